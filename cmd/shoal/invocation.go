package main

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/shoalfs/shoal/cache/cachedir"
	"github.com/shoalfs/shoal/internal/audit"
	"github.com/shoalfs/shoal/internal/daemon"
	"github.com/shoalfs/shoal/prefetch/engine"
	"github.com/shoalfs/shoal/prefetch/order"
)

// invocation is the environment of a verb: a process of its own or, if it attached, the daemon that owns the cache
// directory.
type invocation struct {
	*daemon.Voice
	host  *engine.Host // the daemon's; nil in a process of its own
	mount *mounted     // whose socket the verb came by; nil: the cache directory's
	verb  *daemon.Verb // in a daemon, with the user's folder and environment; else nil: they are the process's own

	remarks []remark // remarks about limits, for the log of a process of its own
}

type invocationKey struct{}

func invocationOf(ctx context.Context) *invocation {
	if inv, ok := ctx.Value(invocationKey{}).(*invocation); ok {
		return inv
	}
	return &invocation{Voice: daemon.Own}
}

func peerOf(c *cobra.Command) *audit.Peer { return invocationOf(c.Context()).who() }

func (inv *invocation) who() *audit.Peer {
	if inv.verb != nil && inv.verb.Peer != nil {
		return inv.verb.Peer
	}
	return audit.Self()
}

// attached reports whether the verb runs in another process's daemon.
func (inv *invocation) attached() bool { return inv.host != nil }

// abs makes a path absolute, relative to the user's folder.
func (inv *invocation) abs(path string) (string, error) {
	if filepath.IsAbs(path) || inv.verb == nil {
		return filepath.Abs(path)
	}
	return filepath.Join(inv.verb.Dir, path), nil
}

// absAll makes the paths that are given absolute, and counts them.
func (inv *invocation) absAll(paths ...*string) (given int, err error) {
	for _, path := range paths {
		if *path != "" && err == nil {
			given++
			*path, err = inv.abs(*path)
		}
	}
	return given, err
}

// source makes a source that is a relative path absolute, relative to the user's folder.
func (inv *invocation) source(text string) (string, error) {
	if text == "" || strings.Contains(text, "://") {
		return text, nil
	}
	return inv.abs(text)
}

// order makes the path of a list absolute, relative to the user's folder: a daemon may have another one.
func (inv *invocation) order(spec order.Spec) (order.Spec, error) {
	if spec.Path() == "" {
		return spec, nil
	}
	path, err := inv.abs(spec.Path())
	if err != nil {
		return spec, err
	}
	return spec.With("path", path)
}

func (inv *invocation) environ(name string) string {
	if inv.verb != nil {
		return inv.verb.Env[name]
	}
	return os.Getenv(name)
}

// withHost runs do with the host of a cache directory: the daemon's if one owns it, otherwise one that is opened for
// it.
func withHost(c *cobra.Command, cfg engine.HostConfig,
	do func(ctx context.Context, h *engine.Host, out io.Writer) error) error {
	inv := invocationOf(c.Context())
	if inv.attached() {
		if err := inv.host.Accepts(cfg, func(flag string) bool {
			return given(c, flag)
		}); err != nil {
			return wrongUse(err)
		}
		return do(c.Context(), inv.host, c.OutOrStdout())
	}
	// A daemon that is ending still owns the directory for a moment.
	start := time.Now()
	for ; ; time.Sleep(50 * time.Millisecond) {
		// Who uses the directory is asked first: its disk may hang.
		err := attach(c.Context(), cfg.Path, selfArgs(), c.OutOrStdout())
		if errors.Is(err, daemon.ErrNobody) {
			var o *owner
			slow := time.AfterFunc(daemon.Patience, func() {
				inv.Notice("opening the cache directory %s takes longer than %s", cfg.Path, daemon.Patience)
			})
			o, err = ownHost(c.Context(), cfg)
			slow.Stop()
			if err == nil {
				return o.closeAfter(c.Context(), do(c.Context(), o.host, c.OutOrStdout()))
			}
			if !errors.Is(err, cachedir.ErrInUse) || time.Since(start) > silentPatience {
				return err
			}
		} else if !errors.Is(err, daemon.ErrEnding) || time.Since(start) > endingPatience {
			return err
		}
		if err := c.Context().Err(); err != nil {
			return err
		}
	}
}

const (
	silentPatience = 3 * time.Second  // with an owner that does not listen
	endingPatience = 30 * time.Second // with one that is about to end
)
