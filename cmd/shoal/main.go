// Command shoal keeps GPUs supplied with data from object storage: it mounts a bucket as a file system that
// prefetches in the order of the epoch, and serves finished batches over gRPC.
//
// This package has all wiring, one file for each verb. Exit codes are package cli's; `shoal run` has its command's.
package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"runtime"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/shoalfs/shoal/internal/cli"
	"github.com/shoalfs/shoal/internal/daemon"
	"github.com/shoalfs/shoal/internal/trace/export"
	"github.com/shoalfs/shoal/prefetch/engine"
)

// searchVerb makes this process search for a trainer's seed. Daemons use it, not users.
const searchVerb = "search-seeds"

func main() {
	if len(os.Args) == 2 && os.Args[1] == searchVerb {
		os.Exit(report(engine.ServeSearch(os.Stdin, os.Stdout)))
	}
	ctx, stop := daemon.Signals()
	stopTracing, err := export.Start(ctx, version, os.Getenv)
	if err == nil {
		c := root()
		c.SetArgs(selfArgs)
		c, err = c.ExecuteContextC(ctx)
		if level := c.Flags().Lookup("log-level"); err != nil && level != nil { // for a verb that has no log yet
			_, _ = (&logOptions{level.Value.String()}).logger(&invocation{Voice: daemon.Own})
		}
	} else {
		err = cli.Usage(err)
	}
	stopTracing()
	if ctx.Err() != nil && errors.Is(err, context.Canceled) {
		err = daemon.ErrInterrupted
	}
	daemon.Failed(err) // tell the parent, if this is a daemon
	stop()
	limiter.Flush()
	os.Exit(report(err))
}

// report prints err as one line and returns the exit code.
func report(err error) int {
	if err == nil {
		return 0
	}
	if daemon.JSON.Load() {
		slog.Error("shoal: " + cli.OneLine(err))
	} else {
		fmt.Fprintln(os.Stderr, "shoal: "+cli.OneLine(err))
	}
	return cli.Code(err)
}

func root() *cobra.Command {
	c := &cobra.Command{
		Use:   "shoal",
		Short: "Keeps GPUs fed from object storage",
		Long: `Shoal keeps GPUs fed from object storage. It knows the order of an epoch before the trainer asks, so that
the trainer never waits: as a mounted filesystem, as a feed of finished batches, or as a sidecar container.`,
		Version: fmt.Sprintf("%s, %s, %s/%s", version, runtime.Version(), runtime.GOOS, runtime.GOARCH),
	}
	c.SetVersionTemplate("shoal {{.Version}}\n")
	c.AddCommand(mountCommand(), umountCommand(), upgradeCommand(), refreshCommand(), serveCommand(), s3Command(),
		stopCommand(), feedCommand(), verifyCommand(), orderCommand(), planCommand(), packCommand(), unpackCommand(),
		ckptCommand(), warmCommand(), fsckCommand(), cacheCommand(), statCommand(), topCommand(), clusterCommand(),
		healthCommand(), doctorCommand(), profileCommand(), configCommand(), docsCommand(), csiCommand(),
		keeperCommand(), quickstartCommand(), pythonCommand(), runCommand(), versionCommand())
	takeArguments(c)
	cli.Prepare(c, removed)
	addSettings(c)
	return c
}

// takeArguments lets each verb take the arguments that its Use names, unless it looks at them itself.
func takeArguments(c *cobra.Command) {
	names := cli.ArgumentsOf(c)
	least := slices.IndexFunc(append(names, "["), func(name string) bool { return name[0] == '[' })
	switch {
	case c.Args != nil:
	case strings.Contains(c.Use, "..."):
		c.Args = cobra.MinimumNArgs(least)
	default:
		c.Args = cobra.RangeArgs(least, len(names))
	}
	for _, sub := range c.Commands() {
		takeArguments(sub)
	}
}
