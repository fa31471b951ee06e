package main

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"

	"github.com/spf13/cobra"

	"github.com/shoalfs/shoal/fusefs"
	"github.com/shoalfs/shoal/internal/admin"
	"github.com/shoalfs/shoal/internal/audit"
	"github.com/shoalfs/shoal/internal/cli"
	"github.com/shoalfs/shoal/internal/daemon"
	"github.com/shoalfs/shoal/internal/findings"
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
	addrs      []string   // of the feed

	mounted  *mounted                  // nil: no mount, or not yet
	endDoors func(ctx context.Context) // ends the feed and the endpoint; nil until it serves
	cancel   func()                    // ends it
	ended    chan struct{}             // closed once its dataset is closed
	snapshot func() admin.Snapshot     // for `shoal stat`; nil until there is one
}

// services are those of this process, the oldest first.
var services struct {
	sync.Mutex
	all []*service
}

// enter lets other verbs find the service until leave is called.
func (s *service) enter() (leave func()) {
	services.Lock()
	defer services.Unlock()
	services.all, s.ended = append(services.all, s), make(chan struct{})
	return func() {
		services.Lock()
		defer services.Unlock()
		services.all = slices.DeleteFunc(services.all, func(o *service) bool { return o == s })
		close(s.ended)
	}
}

// serves lets `shoal upgrade` find what the service has begun to serve.
func (s *service) serves(m *mounted, server *loader.Server, ep *endpoint) {
	services.Lock()
	defer services.Unlock()
	s.mounted, s.endDoors = m, func(ctx context.Context) {
		if server != nil {
			server.Drain(ctx)
		}
		ep.end(ctx)
	}
}

// unmounted is the error of a mount; nil if it was unmounted before this process could take it over.
func (s *service) unmounted(err error) error {
	if !errors.Is(err, fusefs.ErrUnmounted) {
		return err
	}
	s.config.Logger.Info("not served any more", "mountpoint", s.mountpoint, "cause", err)
	return nil
}

// show sets what `shoal stat` shows.
func (s *service) show(stats func() admin.Snapshot) {
	services.Lock()
	defer services.Unlock()
	s.snapshot = stats
}

// servesNothing is also said while the daemon is starting, or fills its cache.
const servesNothing = "the daemon serves nothing now"

// ownStats writes the JSON of what this process serves longest.
func ownStats(w io.Writer) error {
	services.Lock()
	defer services.Unlock()
	for _, s := range services.all {
		if s.snapshot != nil {
			return json.NewEncoder(w).Encode(s.snapshot())
		}
	}
	return errors.New(servesNothing + " (shoal cache ls shows what its cache directory holds)")
}

// start checks the flags, and runs the verb: here, in the background, under a supervisor, or attached to a daemon.
func (s *service) start(c *cobra.Command, source, mountpoint string) (err error) {
	s.inv = invocationOf(c.Context())
	if s.feed != nil {
		s.addrs = s.feed.listen
	}
	addrs := strings.Join(append(slices.Clone(s.addrs), s.options.s3.addr), " ")
	for _, flag := range []string{"tls-cert", "tls-key", "tls-client-ca"} { // set elsewhere they may be for other verbs
		if given(c, flag) && !strings.Contains(addrs, "s://") {
			return cli.Usagef("--%s: no address is https:// or tls://, so nothing would use it (give such an address, "+
				"or leave it out)", flag)
		}
	}
	if only := s.feed == nil && mountpoint == ""; s.options.s3.addr == "" &&
		(only || given(c, "s3-keys") || given(c, "s3-anonymous")) {
		return cli.Usagef("there is no address for the S3 endpoint: give --%s 127.0.0.1:9000", s.options.s3.flag)
	}
	config, host, err := s.options.config(s.inv, source)
	if err != nil {
		return err
	}
	if !s.inv.attached() && s.options.daemon == no && !daemon.Supervised() {
		if err = daemon.Connect(os.Getenv(daemon.KeeperEnv), s.options.cacheDir); err != nil {
			return err
		}
	}
	// who writes through an endpoint begins with nothing
	s.config, s.config.Empty = config, s.feed == nil && mountpoint == ""
	defer func() {
		if err != nil && s.mount.made {
			_ = os.Remove(s.mountpoint) // unless something is mounted there
		}
	}()
	if s.mountpoint, err = s.mount.check(s.inv, s.options, mountpoint); err != nil {
		return err
	}
	if !s.inv.attached() {
		daemon.Serves(s.watched())
		if s.options.daemon != no && !daemon.Supervised() {
			if parent, err := daemon.Background(c.Context(), s.options.cacheDir, again()); parent {
				return err
			}
		}
		defer daemon.RotateLog(s.options.cacheDir)()
		if s.options.daemon == supervised || daemon.Supervised() {
			if parent, err := daemon.Supervise(c.Context(), again(), unmountLeft); parent {
				return err
			}
		}
	}
	lo, fo := loader.ListenOptions{}, loader.Options{}
	if s.feed != nil {
		lo.SocketGroup = s.feed.group
		fo = loader.Options{Version: version, Compile: compileTransform, Workers: cores}
		if fo.Tokens, err = s.feed.security.resolve(s.inv, s.config.Logger, &lo); err != nil {
			return err
		}
	}
	return withHost(c, host, func(ctx context.Context, h *engine.Host, _ io.Writer) error {
		return s.run(ctx, h, lo, fo)
	})
}

// unmountLeft detaches a mount that nobody serves any more.
func unmountLeft(mountpoint string) {
	if err := fusefs.Unmount(mountpoint, true); err != nil {
		slog.Error("a mount is left that nobody serves", "cause", err)
	}
}

// watched are the mount and the feed's addresses, and what asks them whether they answer. tls:// addresses are left
// out: they may need a client's certificate or another authority than the system's.
func (s *service) watched() (targets []string, check func(ctx context.Context) error) {
	if s.mountpoint != "" {
		targets = []string{s.mountpoint}
	}
	for _, addr := range s.addrs {
		if !strings.HasPrefix(addr, "tls://") {
			targets = append(targets, addr)
		}
	}
	return targets, func(ctx context.Context) error {
		return healthOfAll(ctx, targets, daemon.Patience, &clientSecurity{})
	}
}

// run serves until ctx ends, somebody unmounts, or the feed has no address left.
func (s *service) run(ctx context.Context, h *engine.Host, lo loader.ListenOptions, fo loader.Options) (err error) {
	// Before the long part, so that a wrong address is reported at once.
	listeners, addrs, closeAll, err := listenAll(s.addrs, lo)
	if err != nil {
		return err
	}
	defer closeAll()
	s.addrs = addrs
	ctx, s.cancel = context.WithCancel(ctx)
	defer s.cancel()
	defer s.enter()() // before the dataset is opened: this reports the end after the dataset is closed
	e, ep, err := s.options.open(ctx, s.inv, h, s.config)
	if err != nil {
		return err
	}
	defer func() { ep.stop(); err = errors.Join(err, e.Close()) }()
	server, snapshot := s.newFeed(h, e, ep, fo)
	if server != nil {
		defer server.Close()
	}
	s.show(snapshot)
	defer s.show(nil)
	var at daemon.Life
	where, stopAdmin, err := startAdmin(s.options.admin, &at, s.config.Logger, e, snapshot)
	if err != nil {
		return err
	}
	defer stopAdmin()
	var m *mounted
	unmounted := make(chan struct{})
	if s.mountpoint != "" {
		if m, err = mountEngine(s.inv, h, e, &s.mount, s.mountpoint, s.config, snapshot); err != nil {
			return s.unmounted(err)
		}
		defer m.left()
		go func() { m.server.Wait(); close(unmounted) }()
	}
	if where, err = ep.add(s.inv, e, h.Audit(), where); err != nil {
		if m != nil {
			err = errors.Join(err, m.server.Unmount(true))
		}
		return err
	}
	served := make(chan error, 1)
	if server != nil { // after the mount: a healthy feed means that all of the daemon is up
		go func() { served <- server.Serve(listeners...) }()
		events := h.Audit().With(audit.Event{Source: e.Source()})
		events.Write(audit.Event{Event: "serve", Listen: s.addrs, Dataset: e.Manifest().Version(), Peer: s.inv.who()})
		defer events.Write(audit.Event{Event: "serve_end"})
	}
	at.Ready()
	s.serves(m, server, ep)
	s.inv.Announce(s.options.cacheDir, append(s.places(e), where...)...)
	orphan := s.inv.Ready()
	if orphan != nil {
		s.cancel()
	}
	select {
	case err = <-served: // no address is left
	case <-unmounted: // by somebody
	case <-ctx.Done():
	}
	if daemon.Told() {
		handOn(h)
	}
	renewing.RLock() // where this process is being replaced, it ends here
	defer renewing.RUnlock()
	d := at.Drain(s.config.Logger, limiter.Flush)
	var others sync.WaitGroup
	if server != nil {
		others.Go(func() { d.Feed(server) })
	}
	others.Go(func() { ep.end(d.Context()) })
	if m != nil {
		err = errors.Join(err, m.drain(d, unmounted))
	}
	others.Wait()
	return errors.Join(orphan, d.End(err))
}

// pprofEnv, if set, makes --admin serve profiles: for developers, and not for all who may see the dashboard.
const pprofEnv = "SHOAL_PPROF"

// startAdmin serves the admin address, if there is one, until stop is called. where is for announce.
func startAdmin(addr string, at *daemon.Life, log *slog.Logger, e *engine.Engine, stats func() admin.Snapshot) (
	where []string, stop func(), err error) {
	if addr == "" {
		return nil, func() {}, nil
	}
	bound, stop, err := admin.Listen(addr, admin.Options{Version: version, Stats: stats, Ready: at.Err,
		CacheMap: e.CacheMap, Profiles: os.Getenv(pprofEnv) != "", Log: log})
	if err != nil {
		return nil, nil, err
	}
	log.Info("dashboard", "url", "http://"+bound.String())
	return []string{"dashboard: http://" + bound.String()}, stop, nil
}

// places says what is served, in the log and for announce.
func (s *service) places(e *engine.Engine) (where []string) {
	log, idle := s.config.Logger, "nothing is prefetched"
	switch {
	case s.feed != nil:
		idle = "the feed has nothing to serve"
		log.Info("serving", "source", e.Source(), "listen", s.addrs)
		if where = []string{"serving " + e.Source() + " at " + strings.Join(s.addrs, ", ")}; s.mountpoint != "" {
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

// newFeed returns the server of the feed, nil without one, and what returns the counters of all that is served.
func (s *service) newFeed(h *engine.Host, e *engine.Engine, ep *endpoint, fo loader.Options) (
	server *loader.Server, snapshot func() admin.Snapshot) {
	with := func(feed *loader.Stats) admin.Snapshot {
		return admin.Snapshot{Snapshot: findings.Snapshot{Stats: e.Stats(), Feed: feed}, S3: ep.stats()}
	}
	if s.feed == nil {
		return nil, func() admin.Snapshot { return with(nil) }
	}
	usesNative()
	of := func(feed loader.Stats) admin.Snapshot {
		feed.Listen = s.addrs
		return with(&feed)
	}
	fo.Stats = func(feed loader.Stats) any { return of(feed) }
	fo.Memory, fo.Log, fo.Delivered, fo.Node = batchMemory{e.Cache()}, e.Logger(), e.CountDelivered, h.Node
	fo.Audit = h.Audit().With(audit.Event{Source: e.Source()})
	// Called for each new session, since a refresh moves the engine to another version.
	server = loader.NewServer(func() loader.Dataset { return feedDataset{e.Dataset()} }, fo)
	return server, func() admin.Snapshot { return of(server.Stats()) }
}
