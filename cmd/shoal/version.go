package main

import (
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"
)

// version is set by the Makefile from the git tag, if there is one.
var version = "0.1.0-dev"

func versionCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "version",
		Short:   "Print version, commit and platform",
		Example: "  shoal version",
		Args:    cobra.NoArgs,
		Run: func(c *cobra.Command, _ []string) {
			commit := "unknown"
			if info, ok := debug.ReadBuildInfo(); ok {
				for _, s := range info.Settings {
					if s.Key == "vcs.revision" {
						commit = s.Value
					}
				}
			}
			fmt.Fprintf(c.OutOrStdout(), "shoal %s, commit %.12s, %s, %s/%s\n", version, commit, runtime.Version(), runtime.GOOS, runtime.GOARCH)
		},
	}
}
