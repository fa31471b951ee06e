package main

import (
	"context"
	"errors"
	"io/fs"
	"net"

	"github.com/spf13/cobra"

	"github.com/shoalfs/shoal/cache"
	"github.com/shoalfs/shoal/engine"
	"github.com/shoalfs/shoal/fusefs"
	"github.com/shoalfs/shoal/gpuingest"
	"github.com/shoalfs/shoal/loader"
	"github.com/shoalfs/shoal/prefetch/order"
)

func serveCommand() *cobra.Command {
	var eo engineOptions
	var mo mountOptions
	var listen []string
	var mountpoint, group string
	mode := octal(0o660)
	var remote bool
	var workers int
	c := &cobra.Command{
		Use:   "serve SOURCE",
		Short: "Serve a dataset as a feed of finished batches over gRPC",
		Long: `Serves SOURCE as a batch feed: a trainer opens a session (order, batch size, rank, transform) and
receives decoded, augmented batches. With --mount the same daemon also mounts it.
The protocol is loader/feedpb/feed.proto; the Python client is python/shoal.`,
		Example: `  shoal serve s3://photos/train --listen unix:///run/shoal/feed.sock
  shoal serve s3://photos/train --listen tcp://127.0.0.1:7070 --mount /mnt/train --daemon`,
		Args: cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			cfg, err := eo.config(args[0])
			if err != nil {
				return err
			}
			if workers < 0 {
				return usagef("--workers %d: give a number of samples, or 0 for one a processor", workers)
			}
			if mountpoint != "" {
				if err := fusefs.Check(mountpoint); err != nil {
					return err
				}
			}
			if parent, err := background(&eo); parent {
				return err
			}
			lo := loader.ListenOptions{SocketMode: fs.FileMode(mode), SocketGroup: group, AllowRemote: remote}
			err = runServe(c.Context(), cfg, &eo, &mo, listen, lo, mountpoint, workers)
			failed(err)
			return err
		},
	}
	eo.add(c)
	mo.add(c)
	f := c.Flags()
	f.StringArrayVar(&listen, "listen", []string{"unix:///run/shoal/feed.sock"}, "address of the feed, unix:///PATH or tcp://HOST:PORT; may be given several times")
	f.StringVar(&mountpoint, "mount", "", "mount the dataset here too")
	f.Var(&mode, "socket-mode", "permission bits of a unix socket")
	f.StringVar(&group, "socket-group", "", "group of a unix socket (default: the daemon's)")
	f.BoolVar(&remote, "allow-remote", false, "listen beyond loopback, without encryption or authentication")
	f.IntVar(&workers, "workers", 0, "samples decoded at once (default: one a processor)")
	return c
}

func runServe(ctx context.Context, cfg engine.Config, eo *engineOptions, mo *mountOptions, addrs []string, lo loader.ListenOptions, mountpoint string, workers int) (err error) {
	var listeners []net.Listener
	closeAll := func() {
		for _, l := range listeners {
			l.Close()
		}
	}
	for _, addr := range addrs { // before the long part, so that a wrong address is told at once
		l, err := loader.Listen(addr, lo)
		if err != nil {
			if errors.Is(err, loader.ErrAddress) {
				err = usageError{err}
			}
			closeAll()
			return err
		}
		listeners = append(listeners, l)
	}
	e, err := openEngine(ctx, cfg)
	if err != nil {
		closeAll()
		return err
	}
	defer func() { err = errors.Join(err, e.Close()) }()
	stopAdmin, err := startAdmin(eo.admin, e)
	if err != nil {
		closeAll()
		return err
	}
	defer stopAdmin()

	// Asked at every opening, since a refresh moves the engine to another version.
	current := func() loader.Dataset { return feedDataset{e.Dataset()} }
	server := loader.NewServer(current, loader.Options{
		Version: version, Compile: compileTransform, Memory: batchMemory{e.Ledger()}, Log: e.Logger(), Workers: workers,
		Stats: func(feed loader.Stats) any {
			return struct {
				engine.Stats
				Feed loader.Stats `json:"feed"`
			}{e.Stats(), feed}
		},
	})
	served := make(chan error, 1)
	go func() { served <- server.Serve(listeners...) }()
	defer server.Close()

	serveMount := func(ctx context.Context) error { <-ctx.Done(); return nil }
	if mountpoint != "" {
		m, err := mountEngine(e, mo, mountpoint, cfg)
		if err != nil {
			return err
		}
		serveMount = m.serve
	}
	cfg.Logger.Info("serving", "source", e.Source(), "listen", addrs)
	ready()

	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	unmounted := make(chan error, 1)
	go func() { unmounted <- serveMount(ctx) }()
	select {
	case err = <-served:
		cancel()
		return errors.Join(err, <-unmounted)
	case err = <-unmounted: // asked to end, or somebody unmounted
		return err
	}
}

// feedDataset joins the engine to the feed: it is loader.Dataset.
type feedDataset struct{ *engine.Dataset }

func (d feedDataset) Begin(name string, seq order.Order, start int) (loader.Stream, error) {
	s, err := d.Dataset.Begin(name, seq, start)
	if err != nil {
		return nil, err
	}
	return feedStream{s, d.Dataset}, nil
}

type feedStream struct {
	*engine.Stream
	dataset *engine.Dataset
}

func (s feedStream) Close() error {
	s.dataset.End(s.Stream)
	return nil
}

// batchMemory lets batches draw on the engine's ledger: it is loader.Memory.
type batchMemory struct{ ledger *cache.Ledger }

func (m batchMemory) Reserve(ctx context.Context, n int64) error {
	return m.ledger.Reserve(ctx, n, cache.ForBatches)
}
func (m batchMemory) Release(n int64) { m.ledger.Release(n, cache.ForBatches) }

// transform joins gpuingest to the feed: it is loader.Transform.
type transform struct{ *gpuingest.Transform }

func (t transform) Shape() []int {
	c, h, w := t.OutShape()
	if t.Layout() == "nhwc" {
		return []int{h, w, c}
	}
	return []int{c, h, w}
}

func (t transform) Apply(ctx context.Context, src []byte, at loader.Draw, dst []byte) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	return t.Transform.Apply(src, gpuingest.Draw(at), dst)
}

func compileTransform(spec string) (loader.Transform, error) {
	t, err := gpuingest.Compile(spec)
	if err != nil {
		return nil, err
	}
	return transform{t}, nil
}
