package main

import (
	"fmt"
	"runtime"

	"github.com/spf13/cobra"
)

// version is set by the Makefile: the git tag, or the commit without one.
var version = "0.1.0-dev"

func versionCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "version",
		Short:   "Print version and platform",
		Example: "  shoal version",
		Args:    cobra.NoArgs,
		Run: func(c *cobra.Command, _ []string) {
			fmt.Fprintf(c.OutOrStdout(), "shoal %s, %s, %s/%s\n", version, runtime.Version(), runtime.GOOS, runtime.GOARCH)
		},
	}
}
