package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/shoalfs/shoal/cache/cachedir"
	"github.com/shoalfs/shoal/gpuingest/jpeg"
	"github.com/shoalfs/shoal/internal/audit"
	"github.com/shoalfs/shoal/internal/daemon"
	"github.com/shoalfs/shoal/internal/human"
	"github.com/shoalfs/shoal/internal/shortcut"
	"github.com/shoalfs/shoal/prefetch/engine"
	"github.com/shoalfs/shoal/prefetch/order"
)

// invocation is where a verb runs: in a process of its own or, attached, in the daemon that owns the cache directory.
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

// withHost runs do with a cache directory's host: that of the daemon that owns it, or one that is opened for it.
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
		err := attach(c.Context(), cfg.Path, selfArgs, ownEnv(), c.OutOrStdout())
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

var attachVerbs = []string{"mount", "serve", "warm", "cache", "order", "stop", "s3", "stat", "refresh", "upgrade"}

// anyNumber of verbs may run in the daemon of a cache directory, whose user they are.
const anyNumber = 1 << 20

// shortcuts are the servers of this process's mounts by their keys.
var shortcuts sync.Map

// owner is a process that owns a cache directory, and runs the verbs that attach to it.
type owner struct {
	host    *engine.Host
	answers *daemon.Answers
	cancel  context.CancelFunc
	others  sync.WaitGroup

	replayed map[string]*daemon.Running // verbs of the predecessor, by mount point
}

// ownHost takes the cache directory and listens for verbs that attach.
func ownHost(ctx context.Context, cfg engine.HostConfig) (*owner, error) {
	h, err := engine.OpenHost(cfg)
	if err != nil {
		return nil, err
	}
	o := &owner{host: h, answers: answers(h, nil), replayed: map[string]*daemon.Running{}}
	ctx, o.cancel = context.WithCancel(ctx)
	o.others.Go(func() { adjustProcs(ctx, h.Fetched) })
	owned.Store(h)
	jpeg.SetMemory(cachedir.LeastNative)
	o.others.Go(func() { giveBack(ctx) })
	if path, err := o.answers.ListenIn(ctx, cfg.Path); err != nil {
		// A path that is too long for a socket, or a file system without sockets, only disables sharing.
		cfg.Logger.Warn("no other mount can attach to this daemon", "socket", path, "cause", err)
	} else {
		o.replay(ctx)
	}
	return o, nil
}

// closeAfter closes the directory once the process's own verb, which ended with err, and the attached ones have ended.
func (o *owner) closeAfter(ctx context.Context, err error) error {
	waits := time.AfterFunc(time.Second, func() { // which looks as if it hung, and would keep err from the user
		daemon.Own.Notice("%v; this process goes on for the mounts and feeds that came to it",
			cmp.Or(err, errors.New("done")))
	})
	select {
	case <-o.answers.Idle():
	case <-ctx.Done():
	}
	waits.Stop()
	o.cancel()
	o.answers.Close()
	o.others.Wait()
	return errors.Join(err, o.host.Close())
}

// answers runs verbs in this process that come by the socket of m, or of the cache directory if m is nil.
func answers(h *engine.Host, m *mounted) *daemon.Answers {
	a := &daemon.Answers{
		Verbs: attachVerbs, Most: anyNumber,
		Run: func(ctx context.Context, v *daemon.Verb) error {
			c := root()
			c.SetArgs(v.Args)
			c.SetOut(v)
			c.SetErr(v)
			inv := &invocation{Voice: v.Voice, host: h, mount: m, verb: v}
			return c.ExecuteContext(context.WithValue(ctx, invocationKey{}, inv))
		},
		Failed: func(v *daemon.Verb, err error) {
			h.Audit().Write(outcome(audit.Event{Event: "attach", Verb: v.Args[0], Peer: v.Peer}, err))
		},
		Take: func(key string, conn *net.UnixConn) bool {
			server, ok := shortcuts.Load(key)
			if ok {
				if err := server.(*shortcut.Server).Serve(conn); err != nil {
					slog.Warn("the connection to a shoal.open client was closed", "cause", err)
				}
			}
			return ok
		},
	}
	if m != nil {
		a.Most, a.May, a.Take = mostAsking, m.may, nil
	}
	return a
}

// attach runs a verb in the daemon that owns cacheDir. env are variables for what it does there.
func attach(ctx context.Context, cacheDir string, args []string, env map[string]string, out io.Writer) error {
	err := daemon.Ask(ctx, daemon.OfCache(cacheDir), args, env, out)
	if errors.Is(err, daemon.ErrNobody) {
		err = fmt.Errorf("%w at the cache directory %s: there is none to stop or to ask (shoal cache ls %s shows what "+
			"it holds; shoal mount SOURCE MOUNTPOINT --cache-dir %[3]s starts one)", err, cacheDir,
			human.Shell(cacheDir))
	}
	return err
}

// ownEnv are AWS's settings here, and secrets. A verb that only asks sends none: a mount may be another user's.
func ownEnv() map[string]string {
	env := map[string]string{}
	for _, kv := range os.Environ() {
		if name, value, _ := strings.Cut(kv, "="); strings.HasPrefix(name, "AWS_") || name == "HOME" ||
			name == tokenEnv || name == customerKeyVariable || name == s3ConnectionsEnv {
			env[name] = value
		}
	}
	return env
}
