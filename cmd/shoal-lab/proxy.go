package main

import (
	"github.com/spf13/cobra"

	"github.com/shoalfs/shoal/lab/rig/proxy"
)

// proxyVerb is how demo, bench and store run the rig's proxy in a process of its own.
const proxyVerb = "rig-proxy"

func proxyCommand() *cobra.Command {
	return &cobra.Command{
		Use:                proxyVerb,
		Short:              "Run the test rig's latency proxy",
		Hidden:             true,
		DisableFlagParsing: true,
		RunE:               func(_ *cobra.Command, args []string) error { return proxy.Main(args) },
	}
}
