package main

import (
	"log/slog"
	"os"
	"sync/atomic"

	"github.com/spf13/cobra"

	"github.com/shoalfs/shoal/internal/cli"
	"github.com/shoalfs/shoal/internal/logs"
)

// limiter is of all loggers of the process, those of verbs that attached included.
var limiter = logs.NewLimiter()

// jsonLog is set where everything on standard error has to be JSON, what is said to a user included: a collector
// of logs reads it.
var jsonLog atomic.Bool

// logOptions are the flags of a daemon's log.
type logOptions struct {
	level  string
	format string
}

func (o *logOptions) add(c *cobra.Command) {
	f := c.Flags()
	f.StringVar(&o.level, "log-level", "info", "debug, info, warn or error")
	f.StringVar(&o.format, "log-format", logs.Text, "text or json, one line per event")
}

// logger returns the logger. In a process of its own it is slog's default, and the log package's, too.
func (o *logOptions) logger(inv *invocation) (*slog.Logger, error) {
	var level slog.Level
	if err := level.UnmarshalText([]byte(o.level)); err != nil {
		return nil, cli.Usagef("--log-level %q: give debug, info, warn or error", o.level)
	}
	log, err := limiter.New(os.Stderr, o.format, level)
	if err != nil {
		return nil, cli.Usagef("--log-format: %w", err)
	}
	log = slog.New(warner{log.Handler(), inv})
	if !inv.attached() {
		slog.SetDefault(log)
		jsonLog.Store(o.format == logs.JSON)
	}
	return log, nil
}
