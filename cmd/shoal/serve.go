package main

import (
	"context"
	"net"
	"strings"

	"github.com/spf13/cobra"

	"github.com/shoalfs/shoal/cache"
	"github.com/shoalfs/shoal/loader"
	"github.com/shoalfs/shoal/prefetch/engine"
	"github.com/shoalfs/shoal/prefetch/order"
	"github.com/shoalfs/shoal/prefetch/run"
)

type feedFlags struct {
	listen   []string
	group    string
	security feedSecurity
}

func serveCommand() *cobra.Command {
	var eo engineOptions
	var mountpoint string
	s := service{options: &eo, feed: &feedFlags{}}
	c := &cobra.Command{
		Use:   "serve SOURCE",
		Short: "Serve a dataset as a feed of finished batches over gRPC",
		Long: `Serves SOURCE as a batch feed: a trainer opens a session (order, batch size, rank, transform) and
receives decoded, augmented batches. With --mount the same daemon also mounts it.
Clients on other machines connect to tls:// addresses with a certificate or a token (docs/feed.md). The protocol is loader/feedpb/feed.proto; the Python client is python/shoal.`,
		Example: `  shoal serve s3://photos/train --listen unix:///run/shoal/feed.sock
  shoal serve s3://photos/train --listen tcp://127.0.0.1:7070 --mount /mnt/train --daemon
  shoal serve s3://photos/train --listen tls://0.0.0.0:7070 --tls-cert tls.crt --tls-key tls.key --token-file tokens`,
		RunE: func(c *cobra.Command, args []string) error {
			return s.start(c, args[0], mountpoint)
		},
	}
	eo.add(c)
	s.mount.add(c)
	s.feed.security.add(c)
	eo.s3.add(c.Flags(), "s3", alsoS3, &s.feed.security.files)
	f := c.Flags()
	f.StringArrayVar(&s.feed.listen, "listen", []string{defaultFeed}, "address of the feed: unix:///PATH, "+
		"tcp://HOST:PORT or tls://HOST:PORT; may be repeated. Without root the default is in $XDG_RUNTIME_DIR")
	f.Lookup("listen").DefValue = "[" + rootsFeed + "]"
	f.StringVar(&mountpoint, "mount", "", "also mount the dataset here")
	f.StringVar(&s.feed.group, "socket-group", "",
		"group of a unix socket, whose members may use it (default: the daemon's)")
	return c
}

// listenAll listens on all addresses, and returns them with the system's choice for ports of 0.
func listenAll(addrs []string, lo loader.ListenOptions) (
	listeners []net.Listener, at []string, closeAll func(), err error) {
	closeAll = func() {
		for _, l := range listeners {
			l.Close()
		}
	}
	for _, addr := range addrs {
		l, err := loader.Listen(addr, lo)
		if err != nil {
			closeAll()
			return nil, nil, nil, wrongUse(err)
		}
		if scheme, rest, _ := strings.Cut(addr, "://"); strings.HasSuffix(rest, ":0") {
			addr = scheme + "://" + l.Addr().String()
		}
		listeners, at = append(listeners, l), append(at, addr)
	}
	return listeners, at, closeAll, nil
}

// feedDataset adapts the engine to the feed: it is loader.Dataset.
type feedDataset struct{ *engine.Dataset }

func (d feedDataset) Parts(ext string) (found, numbered bool) {
	k := d.Kind(ext)
	return k.Found, k.Numbered
}

func (d feedDataset) Begin(name string, seq order.Order, start, weight int, parts ...string) (loader.Stream, error) {
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

func (s feedStream) Read(ctx context.Context, pos int) (data []byte, release func(), err error) {
	data, release, err = s.Stream.Read(ctx, pos)
	s.dataset.CountRead(len(data), false)
	return data, release, err
}

func (s feedStream) ReadCoded(ctx context.Context, pos int) (data []byte, release func(), err error) {
	data, release, err = s.ReadBy(ctx, pos, s.Volume.SampleCoded)
	s.dataset.CountRead(len(data), true)
	return data, release, err
}

func (s feedStream) Close() error {
	s.dataset.End(s.Stream)
	return nil
}

// batchMemory reserves batches in the cache's ledger: it is loader.Memory.
type batchMemory struct{ *cache.Cache }

func (m batchMemory) Reserve(ctx context.Context, n int64) error { return m.ReserveBatch(ctx, n) }
func (m batchMemory) TryReserve(n int64) bool                    { return m.Ledger().TryReserve(n, cache.ForBatches) }
func (m batchMemory) Release(n int64)                            { m.Ledger().Release(n, cache.ForBatches) }
