package main

import (
	"log/slog"
	"os"
	"sync/atomic"

	"github.com/spf13/cobra"

	"github.com/shoalfs/shoal/internal/cli"
	"github.com/shoalfs/shoal/internal/logs"
)

// limiter is shared by all loggers of the process, including those of attached verbs.
var limiter = logs.NewLimiter()

// jsonLog is set if everything on standard error must be JSON, including messages to the user: a log collector reads
// it.
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

// logger returns the logger. In a process of its own it becomes slog's and the log package's default.
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
