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

	"github.com/shoalfs/shoal/internal/admin"
	"github.com/shoalfs/shoal/internal/audit"
	"github.com/shoalfs/shoal/loader"
	"github.com/shoalfs/shoal/prefetch/engine"
)

// service is what a verb serves of a dataset: a mount, a feed and an S3 endpoint, or some of them.
type service struct {
	inv        *invocation
	options    *engineOptions
	config     engine.Config
	mount      mountOptions
	mountpoint string     // "": no mount
	feed       *feedFlags // nil: no feed
}

// start checks the flags, and runs the verb as they say: here or in the background, under a supervisor, or in the daemon that it
// attached to.
func (s *service) start(c *cobra.Command, source, mountpoint string) (err error) {
	s.inv = invocationOf(c.Context())
	empty := s.config.Empty
	config, host, err := s.options.config(s.inv, source)
	if err != nil {
		return err
	}
	s.config, s.config.Empty = config, empty
	if s.mountpoint, err = s.mount.check(s.inv, s.options, mountpoint); err != nil {
		return err
	}
	var addrs []string
	if s.feed != nil {
		addrs = s.feed.listen
	}
	if !s.inv.attached() {
		serviceTargets(s.mountpoint, addrs...)
		if parent, err := background(s.options); parent {
			return err
		}
		defer rotateLog(s.options)()
		if s.options.daemon.more {
			if parent, err := supervise(c.Context()); parent {
				return err
			}
		}
	}
	lo, fo := loader.ListenOptions{}, loader.Options{}
	if s.feed != nil {
		lo.SocketGroup = s.feed.group
		fo = loader.Options{Version: version, Compile: compileTransform, Workers: runtime.GOMAXPROCS(0)} // before adjustProcs changes it
		if fo.Tokens, err = s.feed.security.resolve(s.inv, s.config.Logger, &lo); err != nil {
			return err
		}
	}
	return withHost(c, host, func(ctx context.Context, h *engine.Host, _ io.Writer) error {
		return s.run(ctx, h, addrs, lo, fo)
	})
}

// run serves until ctx ends, somebody unmounts, or the feed has no address left.
func (s *service) run(ctx context.Context, h *engine.Host, addrs []string, lo loader.ListenOptions, fo loader.Options) (err error) {
	// Before the long part, so that a wrong address is reported at once.
	listeners, addrs, closeAll, err := listenAll(addrs, lo)
	if err != nil {
		return err
	}
	defer closeAll()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if s.feed != nil {
		defer stoppable(addrs[0], cancel)() // before the dataset is opened: this reports the end after the dataset is closed
	}
	e, ep, err := s.options.open(ctx, s.inv, h, s.config)
	if err != nil {
		return err
	}
	defer func() { ep.stop(); err = joinClose(err, e) }()
	f := s.newFeed(h, e, ep, addrs, fo)
	defer f.Close()
	var at phase
	where, stopAdmin, err := startAdmin(s.options.admin, &at, s.config.Logger, e, f.snapshot)
	if err != nil {
		return err
	}
	defer stopAdmin()
	var m *mounted
	var unmounted <-chan struct{}
	if s.mountpoint != "" {
		if m, err = mountEngine(s.inv, h, e, &s.mount, s.mountpoint, s.config, f.snapshot); err != nil {
			return err
		}
		defer m.left()
		unmounted = m.gone()
	}
	if where, err = ep.add(s.inv, e, h.Audit(), where); err != nil {
		if m != nil {
			err = errors.Join(err, m.server.Unmount(true))
		}
		return err
	}
	defer f.begin(s.inv, e, listeners)() // after the mount: a healthy feed means that all of the daemon is up
	at.set(up)
	s.inv.announce(s.options.cacheDir, append(s.places(e, addrs), where...)...)
	orphan := s.inv.ready()
	if orphan != nil {
		cancel()
	}
	select {
	case err = <-f.served: // no address is left
	case <-unmounted: // by somebody
	case <-ctx.Done():
	}
	at.set(ending)
	d := beginDrain(s.config.Logger)
	var others sync.WaitGroup
	others.Go(func() { d.feed(f.Server) })
	others.Go(func() { ep.end(d.ctx) })
	if m != nil {
		err = errors.Join(err, d.mount(m, unmounted))
	}
	others.Wait()
	return errors.Join(orphan, d.end(err))
}

// places says what is served, in the log and for announce.
func (s *service) places(e *engine.Engine, addrs []string) (where []string) {
	log, idle := s.config.Logger, "nothing is prefetched"
	switch {
	case s.feed != nil:
		idle = "the feed has nothing to serve"
		log.Info("serving", "source", e.Source(), "listen", addrs)
		if where = []string{"serving " + e.Source() + " at " + strings.Join(addrs, ", ")}; s.mountpoint != "" {
			where = append(where, "mounted at "+s.mountpoint)
		}
	case s.mountpoint != "":
		log.Info("mounted", "source", e.Source(), "mountpoint", s.mountpoint)
		where = []string{"mounted " + e.Source() + " at " + s.mountpoint}
	default: // an S3 endpoint serves all objects
		return nil
	}
	if why := e.Dataset().NoSamples(); why != nil {
		log.Warn(idle, "cause", why)
	}
	return where
}

// feed is a service's feed; without one it has no server.
type feed struct {
	*loader.Server
	addrs    []string
	audit    *audit.Log
	snapshot func() admin.Snapshot // of all that the service serves
	served   chan error
}

func (s *service) newFeed(h *engine.Host, e *engine.Engine, ep *endpoint, addrs []string, fo loader.Options) *feed {
	f := &feed{addrs: addrs, served: make(chan error, 1)}
	with := func(stats *loader.Stats) admin.Snapshot {
		return admin.Snapshot{Stats: e.Stats(), Feed: stats, S3: ep.stats()}
	}
	if f.snapshot = func() admin.Snapshot { return with(nil) }; s.feed == nil {
		return f
	}
	usesNative()
	f.audit = h.Audit().With(audit.Event{Source: e.Source()})
	fo.Memory, fo.Log, fo.Delivered, fo.Node, fo.Audit = batchMemory{e.Ledger()}, e.Logger(), e.CountDelivered, h.Node, f.audit
	of := func(stats loader.Stats) admin.Snapshot {
		stats.Listen = addrs
		return with(&stats)
	}
	fo.Stats = func(stats loader.Stats) any { return of(stats) }
	// Called for each new session, since a refresh moves the engine to another version.
	f.Server = loader.NewServer(func() loader.Dataset { return feedDataset{e.Dataset()} }, fo)
	f.snapshot = func() admin.Snapshot { return of(f.Stats()) }
	return f
}

// begin begins to serve, and returns what notes the end.
func (f *feed) begin(inv *invocation, e *engine.Engine, listeners []net.Listener) (end func()) {
	if f.Server == nil {
		return func() {}
	}
	go func() { f.served <- f.Serve(listeners...) }()
	f.audit.Write(audit.Event{Event: "serve", Listen: f.addrs, Dataset: e.Manifest().Version(), Peer: inv.who()})
	return func() { f.audit.Write(audit.Event{Event: "serve_end"}) }
}

// Close closes the server.
func (f *feed) Close() {
	if f.Server != nil {
		f.Server.Close()
	}
}
