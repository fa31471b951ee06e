// Command shoal-lab is what Shoal is tried with: the demo, benchmarks by emulated accelerators, and a store to try
// things on. It runs the shoal binary beside it as a user would; the product contains none of it.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/shoalfs/shoal/internal/cli"
	"github.com/shoalfs/shoal/lab/rig/proxy"
)

// version is set by the Makefile.
var version = "0.1.0-dev"

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	context.AfterFunc(ctx, stop) // a second signal ends it at once
	err := root().ExecuteContext(ctx)
	if err != nil {
		if ctx.Err() != nil && errors.Is(err, context.Canceled) {
			err = errors.New("interrupted")
		}
		fmt.Fprintln(os.Stderr, "shoal-lab: "+cli.OneLine(err))
	}
	os.Exit(cli.Code(err))
}

func root() *cobra.Command {
	c := &cobra.Command{
		Use:   "shoal-lab",
		Short: "Try Shoal: a demo, benchmarks, and a store to try things on",
		Long: `Runs a demo on real photographs, emulated accelerators that show how busy Shoal keeps them, or an S3 server to try
things on. It uses Shoal's binary: the one in the same folder, else the one on PATH.`,
		Version: version,
	}
	c.AddCommand(demoCommand(), benchCommand(), storeCommand(), proxyCommand(), docsCommand())
	cli.Prepare(c, nil)
	return c
}

// shoal returns the path of the product's binary: beside this one, else on PATH.
func shoal() (string, error) {
	self, err := os.Executable()
	if err != nil {
		return "", err
	}
	if beside, err := exec.LookPath(filepath.Join(filepath.Dir(self), "shoal")); err == nil {
		return beside, nil
	}
	path, err := exec.LookPath("shoal")
	if err != nil {
		return "", fmt.Errorf("the binary of Shoal is neither beside %s nor on PATH: run make build, or install it",
			self)
	}
	return filepath.Abs(path)
}

// proxyCommand is how demo, bench and store run the rig's proxy in a process of its own.
func proxyCommand() *cobra.Command {
	return &cobra.Command{
		Use:                proxy.Verb,
		Short:              "Run the test rig's latency proxy",
		Hidden:             true,
		DisableFlagParsing: true,
		RunE:               func(_ *cobra.Command, args []string) error { return proxy.Main(args) },
	}
}

// docsCommand prints docs/cli-lab.md (make docs).
func docsCommand() *cobra.Command {
	return &cobra.Command{
		Use:    "docs",
		Short:  "Print the reference of the command line",
		Hidden: true,
		Args:   cobra.NoArgs,
		RunE:   func(c *cobra.Command, _ []string) error { return writeReference(c.OutOrStdout()) },
	}
}

// writeReference writes docs/cli-lab.md.
func writeReference(w io.Writer) error {
	fmt.Fprint(w, `# shoal-lab

A program to try Shoal with; `+"`make build`"+` builds it, and no package or image contains it. Generated from the help texts by
`+"`make docs`"+`; a test holds it to them.

`)
	return cli.Reference(w, root())
}
