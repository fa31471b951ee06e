package main

import (
	"context"
	"errors"
	"io"
	"net"
	"runtime"
	"strings"
	"sync"

	"github.com/spf13/cobra"

	"github.com/shoalfs/shoal/cache"
	"github.com/shoalfs/shoal/internal/admin"
	"github.com/shoalfs/shoal/internal/audit"
	"github.com/shoalfs/shoal/internal/cli"
	"github.com/shoalfs/shoal/loader"
	"github.com/shoalfs/shoal/prefetch/engine"
	"github.com/shoalfs/shoal/prefetch/order"
	"github.com/shoalfs/shoal/prefetch/run"
)

func serveCommand() *cobra.Command {
	var eo engineOptions
	var mo mountOptions
	var listen []string
	var mountpoint, group string
	var security feedSecurity
	c := &cobra.Command{
		Use:   "serve SOURCE",
		Short: "Serve a dataset as a feed of finished batches over gRPC",
		Long: `Serves SOURCE as a batch feed: a trainer opens a session (order, batch size, rank, transform) and
receives decoded, augmented batches. With --mount the same daemon also mounts it.
Clients on other machines connect to tls:// addresses with a certificate or a token (docs/feed.md). The protocol is loader/feedpb/feed.proto; the Python client is python/shoal.`,
		Example: `  shoal serve s3://photos/train --listen unix:///run/shoal/feed.sock
  shoal serve s3://photos/train --listen tcp://127.0.0.1:7070 --mount /mnt/train --daemon
  shoal serve s3://photos/train --listen tls://0.0.0.0:7070 --tls-cert tls.crt --tls-key tls.key --token-file tokens`,
		Args: cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			inv := invocationOf(c.Context())
			cfg, host, err := eo.config(inv, args[0])
			if err != nil {
				return err
			}
			if mountpoint, err = mo.check(inv, &eo, mountpoint); err != nil {
				return err
			}
			return asDaemon(c, &eo, mountpoint, listen, func() error {
				lo := loader.ListenOptions{SocketGroup: group}
				fo := loader.Options{Version: version, Compile: compileTransform, Log: cfg.Logger, Workers: runtime.GOMAXPROCS(0)} // before adjustProcs changes it
				if fo.Tokens, err = security.resolve(inv, cfg.Logger, &lo); err != nil {
					return err
				}
				return withHost(c, host, func(ctx context.Context, h *engine.Host, _ io.Writer) error {
					usesNative()
					return runServe(ctx, inv, h, cfg, &eo, &mo, listen, lo, fo, mountpoint)
				})
			})
		},
	}
	eo.add(c)
	mo.add(c)
	security.add(c)
	eo.s3.add(c.Flags(), "s3", "also serve an S3 endpoint at this address: HOST:PORT or https://HOST:PORT (docs/s3-endpoint.md)", &security.files)
	f := c.Flags()
	f.StringArrayVar(&listen, "listen", []string{defaultFeed}, "address of the feed: unix:///PATH, tcp://HOST:PORT or tls://HOST:PORT; may be repeated. Without root the default is in $XDG_RUNTIME_DIR")
	f.Lookup("listen").DefValue = "[" + rootsFeed + "]"
	f.StringVar(&mountpoint, "mount", "", "also mount the dataset here")
	f.StringVar(&group, "socket-group", "", "group of a unix socket, whose members may use it (default: the daemon's)")
	return c
}

func runServe(ctx context.Context, inv *invocation, h *engine.Host, cfg engine.Config, eo *engineOptions, mo *mountOptions, addrs []string, lo loader.ListenOptions, fo loader.Options, mountpoint string) (err error) {
	// Before the long part, so that a wrong address is reported at once.
	listeners, addrs, closeAll, err := listenAll(addrs, lo)
	if err != nil {
		return err
	}
	defer closeAll()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer stoppable(addrs[0], cancel)() // before the dataset is opened: this reports the end after the dataset is closed
	e, ep, err := eo.open(ctx, inv, h, cfg)
	if err != nil {
		return err
	}
	defer func() { ep.stop(); err = joinClose(err, e) }()
	if why := e.Dataset().NoSamples(); why != nil {
		cfg.Logger.Warn("the feed has nothing to serve", "cause", why)
	}
	// Called for each new session, since a refresh moves the engine to another version.
	current := func() loader.Dataset { return feedDataset{e.Dataset()} }
	fo.Memory, fo.Log, fo.Delivered, fo.Node = batchMemory{e.Ledger()}, e.Logger(), e.CountDelivered, h.Node
	fo.Audit = h.Audit().With(audit.Event{Source: e.Source()})
	with := func(feed loader.Stats) admin.Snapshot {
		feed.Listen = addrs
		return admin.Snapshot{Stats: e.Stats(), Feed: &feed, S3: ep.stats()}
	}
	fo.Stats = func(feed loader.Stats) any { return with(feed) }
	server := loader.NewServer(current, fo)
	snapshot := func() admin.Snapshot { return with(server.Stats()) }
	var at phase
	where, stopAdmin, err := startAdmin(eo.admin, &at, cfg.Logger, e, snapshot)
	if err != nil {
		return err
	}
	defer stopAdmin()
	defer server.Close()

	var m *mounted
	var unmounted <-chan struct{}
	if mountpoint != "" {
		if m, err = mountEngine(inv, h, e, mo, mountpoint, cfg, snapshot); err != nil {
			return err
		}
		defer m.left()
		unmounted = m.gone()
	}
	if where, err = ep.add(inv, e, h.Audit(), where); err != nil {
		return err
	}
	// After the mount: a healthy feed means that all of the daemon is up.
	served := make(chan error, 1)
	go func() { served <- server.Serve(listeners...) }()
	at.set(up)
	fo.Audit.Write(audit.Event{Event: "serve", Listen: addrs, Dataset: e.Manifest().Version(), Peer: inv.who()})
	defer func() { fo.Audit.Write(audit.Event{Event: "serve_end"}) }()
	cfg.Logger.Info("serving", "source", e.Source(), "listen", addrs)
	if m != nil {
		where = append([]string{"mounted at " + mountpoint}, where...)
	}
	inv.announce(eo.cacheDir, append([]string{"serving " + e.Source() + " at " + strings.Join(addrs, ", ")}, where...)...)
	orphan := inv.ready()
	if orphan != nil {
		cancel()
	}
	select {
	case err = <-served: // no address is left
	case <-unmounted: // by somebody
	case <-ctx.Done():
	}
	at.set(ending)
	d := beginDrain(cfg.Logger)
	var feed sync.WaitGroup
	feed.Go(func() { d.feed(server) })
	feed.Go(func() { ep.end(d.ctx) })
	if m != nil {
		err = errors.Join(err, d.mount(m, unmounted))
	}
	feed.Wait()
	return errors.Join(orphan, d.end(err))
}

// listenAll listens on all addresses, and returns them with the system's choice for ports of 0.
func listenAll(addrs []string, lo loader.ListenOptions) (listeners []net.Listener, at []string, closeAll func(), err error) {
	closeAll = func() {
		for _, l := range listeners {
			l.Close()
		}
	}
	for _, addr := range addrs {
		l, err := loader.Listen(addr, lo)
		if err != nil {
			if errors.Is(err, loader.ErrAddress) {
				err = cli.Usage(err)
			}
			closeAll()
			return nil, nil, nil, err
		}
		if scheme, rest, _ := strings.Cut(addr, "://"); strings.HasSuffix(rest, ":0") {
			addr = scheme + "://" + l.Addr().String()
		}
		listeners, at = append(listeners, l), append(at, addr)
	}
	return listeners, at, closeAll, nil
}

// feedDataset adapts the engine to the feed: it is loader.Parted.
type feedDataset struct{ *engine.Dataset }

func (d feedDataset) Begin(name string, seq order.Order, start, weight int) (loader.Stream, error) {
	return d.BeginParts(name, seq, start, weight, nil)
}

func (d feedDataset) Parts(ext string) (found, numbered bool) {
	k := d.Dataset.Parts(ext)
	return k.Found, k.Numbered
}

func (d feedDataset) BeginParts(name string, seq order.Order, start, weight int, parts []string) (loader.Stream, error) {
	s, err := d.Dataset.Begin(name, seq, start, weight, parts...)
	if err != nil {
		return nil, err
	}
	return feedStream{s, d.Dataset}, nil
}

type feedStream struct {
	*run.Stream
	dataset *engine.Dataset
}

// ReadCoded implements loader.CodedStream.
func (s feedStream) ReadCoded(ctx context.Context, pos int) (data []byte, release func(), err error) {
	data, release, err = s.Stream.ReadCoded(ctx, pos)
	s.dataset.CountDecoded(len(data))
	return data, release, err
}

func (s feedStream) Close() error {
	s.dataset.End(s.Stream)
	return nil
}

// batchMemory reserves batches in the engine's ledger: it is loader.Memory.
type batchMemory struct{ ledger *cache.Ledger }

func (m batchMemory) Reserve(ctx context.Context, n int64) error {
	return m.ledger.Reserve(ctx, n, cache.ForBatches)
}
func (m batchMemory) TryReserve(n int64) bool { return m.ledger.TryReserve(n, cache.ForBatches) }
func (m batchMemory) Release(n int64)         { m.ledger.Release(n, cache.ForBatches) }
