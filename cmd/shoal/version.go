package main

import (
	"encoding/json"
	"fmt"
	"runtime"
	"runtime/debug"
	"strings"

	"github.com/spf13/cobra"

	"github.com/shoalfs/shoal/gpuingest/jpeg"
	"github.com/shoalfs/shoal/internal/settings"
)

// version is the git tag, or the commit, set by the Makefile. `go install` sets none, but records the module's.
var version = "0.1.0-dev"

var commit string // that the binary was built from, if Go has stamped one

func init() {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return
	}
	if version == "0.1.0-dev" && strings.HasPrefix(info.Main.Version, "v") {
		version = info.Main.Version[1:]
	}
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" {
			commit = s.Value
		}
	}
}

func versionCommand() *cobra.Command {
	var asJSON bool
	c := &cobra.Command{
		Use:     "version",
		Short:   "Print version and platform",
		Example: "  shoal version",
		RunE: func(c *cobra.Command, _ []string) error {
			if !asJSON {
				_, err := fmt.Fprintf(c.OutOrStdout(), "shoal %s\n", c.Root().Version)
				return err
			}
			return json.NewEncoder(c.OutOrStdout()).Encode(struct {
				Version string `json:"version"`
				Commit  string `json:"commit,omitempty"`
				Go      string `json:"go"`
				OS      string `json:"os"`
				Arch    string `json:"arch"`
				JPEG    bool   `json:"jpeg"`
			}{version, commit, runtime.Version(), runtime.GOOS, runtime.GOARCH, jpeg.Available})
		},
	}
	settings.Without(c) // it works whatever they are
	c.Flags().BoolVar(&asJSON, "json", false,
		"print as JSON: version, commit, go, os, arch, jpeg (whether pictures can be decoded)")
	return c
}
