package main

import (
	"log/slog"
	"os"

	"github.com/spf13/cobra"

	"github.com/shoalfs/shoal/internal/cli"
	"github.com/shoalfs/shoal/internal/daemon"
	"github.com/shoalfs/shoal/internal/logs"
)

// limiter is shared by all loggers of the process, including those of attached verbs.
var limiter = logs.NewLimiter()

// logOptions are the flags of a daemon's log.
type logOptions struct{ level string }

func (o *logOptions) add(c *cobra.Command) {
	c.Flags().StringVar(&o.level, "log-level", "info", logs.Help)
}

// logger returns the logger. In a process of its own it becomes slog's and the log package's default.
func (o *logOptions) logger(inv *invocation) (*slog.Logger, error) {
	level, format, err := logs.Parse(o.level)
	if err != nil {
		return nil, cli.Usagef("--log-level: %w", err)
	}
	log := slog.New(daemon.Warner{Handler: limiter.New(os.Stderr, format, level).Handler(), Voice: inv.Voice})
	if !inv.attached() {
		daemon.Outlive()
		slog.SetDefault(log)
		daemon.JSON.Store(format == logs.JSON)
	}
	return log, nil
}
