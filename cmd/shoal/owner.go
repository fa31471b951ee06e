package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"strings"
	"sync"

	"github.com/shoalfs/shoal/cache/cachedir"
	"github.com/shoalfs/shoal/gpuingest/jpeg"
	"github.com/shoalfs/shoal/internal/audit"
	"github.com/shoalfs/shoal/internal/daemon"
	"github.com/shoalfs/shoal/internal/shortcut"
	"github.com/shoalfs/shoal/prefetch/engine"
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
	select {
	case <-o.answers.Idle():
	case <-ctx.Done():
	}
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

// attach runs a verb in the daemon that owns cacheDir.
func attach(ctx context.Context, cacheDir string, args []string, out io.Writer) error {
	err := ask(ctx, daemon.OfCache(cacheDir), args, out)
	if errors.Is(err, daemon.ErrNobody) {
		err = fmt.Errorf(
			"%w at the cache directory %s: there is none to stop or to ask (shoal cache ls %s shows what it "+
				"holds; shoal mount SOURCE MOUNTPOINT --cache-dir %s starts one)", err, cacheDir, cacheDir, cacheDir)
	}
	return err
}

// ask runs a verb in a daemon, with this process's settings of AWS, and its secrets.
func ask(ctx context.Context, to daemon.Asked, args []string, out io.Writer) error {
	env := map[string]string{}
	for _, kv := range os.Environ() {
		if name, value, _ := strings.Cut(kv, "="); strings.HasPrefix(name, "AWS_") || name == "HOME" ||
			name == tokenEnv || name == customerKeyVariable || name == s3ConnectionsEnv {
			env[name] = value
		}
	}
	return daemon.Ask(ctx, to, args, env, out)
}
