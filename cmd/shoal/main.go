// Command shoal keeps GPUs fed from object storage: it mounts a bucket as a filesystem that reads
// ahead in the order of the epoch, and serves finished batches over gRPC.
//
// All wiring is here, one file a verb. Exit codes: 0 done, 1 failed (one line on stderr that names
// the thing, the cause and the remedy), 2 wrong use.
package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/shoalfs/shoal/engine"
	"github.com/shoalfs/shoal/internal/trace/export"
)

// usageError marks an error of the command line: exit code 2.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

func usagef(format string, args ...any) error { return usageError{fmt.Errorf(format, args...)} }

// searchVerb makes this process one that searches for a trainer's seed. No user gives it: a daemon does.
const searchVerb = "search-seeds"

func main() {
	if len(os.Args) == 2 && os.Args[1] == searchVerb {
		os.Exit(report(engine.ServeSearch(os.Stdin, os.Stdout)))
	}
	ctx, stop := onSignals()
	stopTracing, err := export.Start(ctx, version, os.Getenv)
	if err == nil {
		err = root().ExecuteContext(ctx)
	} else {
		err = usageError{err}
	}
	stopTracing()
	if ctx.Err() != nil && errors.Is(err, context.Canceled) {
		err = errInterrupted
	}
	failed(err) // the parent of a daemon, if this is one
	stop()
	limiter.Flush()
	os.Exit(report(err))
}

var errInterrupted = errors.New("interrupted")

// report prints err as one line and returns the exit code.
func report(err error) int {
	if err == nil {
		return 0
	}
	if jsonLog.Load() {
		slog.Error("shoal: " + oneLine(err))
	} else {
		fmt.Fprintln(os.Stderr, "shoal: "+oneLine(err))
	}
	if errors.As(err, new(usageError)) {
		return 2
	}
	return 1
}

func oneLine(err error) string {
	return strings.Join(strings.FieldsFunc(err.Error(), func(r rune) bool { return r == '\n' }), "; ")
}

func root() *cobra.Command {
	c := &cobra.Command{
		Use:   "shoal",
		Short: "Keeps GPUs fed from object storage",
		Long: `Shoal keeps GPUs fed from object storage. It knows the order of an epoch before the trainer
asks, so that the trainer never waits: as a mounted filesystem, as a feed of finished batches,
or as a sidecar container.`,
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	c.SetFlagErrorFunc(flagError)
	c.SetHelpCommand(helpCommand())
	c.AddCommand(mountCommand(), umountCommand(), refreshCommand(), serveCommand(), stopCommand(), feedCommand(), verifyCommand(),
		orderCommand(), planCommand(), packCommand(), warmCommand(), fsckCommand(), cacheCommand(),
		statCommand(), topCommand(),
		healthCommand(),
		doctorCommand(), profileCommand(),
		configCommand(), docsCommand(),
		demoCommand(), benchCommand(), versionCommand(), proxyCommand())
	nameArguments(c)
	tellDefaults(c)
	c.RunE = func(c *cobra.Command, args []string) error {
		if len(args) > 0 {
			return unknownVerb(c, args[0])
		}
		return c.Help()
	}
	c.Args = cobra.ArbitraryArgs
	addSettings(c)
	addCompletions(c)
	return c
}
