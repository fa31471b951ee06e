package main

import (
	"context"
	"log/slog"
	"path/filepath"
	"strings"
)

// announce tells the starter of a daemon, or a client that attached, its addresses and its log file. In the
// foreground the log has them.
func (inv *invocation) announce(cacheDir string, where ...string) {
	if !inv.waited() {
		return
	}
	if path := filepath.Join(cacheDir, logName); isStderr(path) {
		where = append(where, "log: "+path)
	}
	inv.notice("%s", strings.Join(where, "; "))
}

// warner is a slog.Handler that also sends warnings to the user who waits for a daemon to become ready, and who does not
// see its log.
type warner struct {
	slog.Handler
	inv *invocation
}

// Handle implements slog.Handler.
func (w warner) Handle(ctx context.Context, r slog.Record) error {
	if r.Level >= slog.LevelWarn && w.inv.waited() {
		var b strings.Builder
		b.WriteString("warning: " + r.Message)
		r.Attrs(func(a slog.Attr) bool {
			b.WriteString("; " + a.Key + ": " + a.Value.String())
			return true
		})
		w.inv.notice("%s", strings.ReplaceAll(b.String(), "\n", " "))
	}
	return w.Handler.Handle(ctx, r)
}

// WithAttrs implements slog.Handler.
func (w warner) WithAttrs(attrs []slog.Attr) slog.Handler {
	return warner{w.Handler.WithAttrs(attrs), w.inv}
}

// WithGroup implements slog.Handler.
func (w warner) WithGroup(name string) slog.Handler { return warner{w.Handler.WithGroup(name), w.inv} }
