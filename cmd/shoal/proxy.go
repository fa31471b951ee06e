package main

import (
	"github.com/spf13/cobra"

	"github.com/shoalfs/shoal/rig/proxy"
)

// proxyCommand is how the demo and the benchmarks run the rig's proxy in a process of its own.
func proxyCommand() *cobra.Command {
	return &cobra.Command{
		Use:                "rig-proxy",
		Short:              "Run the test rig's latency proxy",
		Hidden:             true,
		DisableFlagParsing: true,
		RunE:               func(_ *cobra.Command, args []string) error { return proxy.Main(args) },
	}
}
