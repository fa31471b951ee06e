// Package engine is the common part of mount and feed: an [Engine] is one open dataset. It joins the object store,
// the catalog, the cache and the streams of orders. It guards that all readers of one dataset read the same version,
// from one cache, with one stream per order. A [Host] has the open datasets of one cache directory.
//
//	OpenHost ── cachedir.Open: lock the cache directory, open the catalog, account for what lies there
//	Host.Open ── store: near( retry( limit( hedge( meter( s3 | dir )))))
//	          ── manifest: from the catalog, or listed once; of a packed source with its layout
//	          ── cache: one Volume a dataset version, over the dataset's own segments
//	          └─ streams (prefetch/run): one an order in progress (a mount's, a plan's, a feed session's)
//
// # Traps
//
//   - Streams number files as the manifest does; samples (what an order numbers) are a view of them.
//   - A refresh replaces volume and streams at once. Readers that have a file of the old version open
//     go on with the old volume, which the engine keeps until nobody uses it.
//
// More than 40 names are exported: hosts and datasets, their configuration, and what the stats consist of.
package engine

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	humanize "github.com/dustin/go-humanize"

	"github.com/shoalfs/shoal/cache"
	"github.com/shoalfs/shoal/cache/cachedir"
	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/cache/objstore/stores"
	"github.com/shoalfs/shoal/cache/segment"
	"github.com/shoalfs/shoal/cache/shard"
	"github.com/shoalfs/shoal/internal/pause"
	"github.com/shoalfs/shoal/internal/trace"
	"github.com/shoalfs/shoal/prefetch/order"
	"github.com/shoalfs/shoal/prefetch/run"
)

// Config describes the dataset to open.
type Config struct {
	Source string // s3://bucket/prefix, file:///dir, or tar shards
	// with whose rights it is read: of the same source, different ones have nothing in common
	Scope         string
	Shards        string     // a shard set of Source (made by packing) to read from; may be empty
	Publish       string     // destination for shards packed after a complete pass; may be empty
	Order         order.Spec // the order that readers of the mount are expected to follow
	Samples       string     // which files are numbered: catalog.Match's globs, or Rows
	Empty         bool       // there may be no objects yet
	SkipBadShards bool       // leave out the shards that are damaged or missing
	// whether kept files are brought into the host's codec's form: auto, on, off; "": as others say
	Recode           string
	Connections      int  // GETs in flight at most
	AdaptConnections bool // fewer than Connections if they bring as much
	ConnectionsGiven bool // a dataset that is open with others is not shared
	Refresh          bool // list again even if the catalog knows the source
	Store            objstore.StoreOptions
	Near             NearTier
	Logger           *slog.Logger
	Progress         func(listed int) // called during a first listing; may be nil
	// names of versions that are open since an earlier process; may be nil
	Past   func(source string) []string
	Getenv func(name string) string // the AWS environment; nil: the process's own
}

// tries of one request: about 25 s with the default pauses. A trainer survives a restart of the store, and gets an
// error within half a minute if it is gone.
const tries = 16

// Engine is one open dataset. Safe for concurrent use.
type Engine struct {
	host *Host
	cfg  Config
	log  *slog.Logger
	identity
	origin
	catalog *catalog.Catalog
	cache   *cache.Cache
	lifetime
	versions
	orders   orders
	counted  counted
	recoding recoding
	guests   guests
	recorder recorder
	// whether the kernel has a file; nil: it keeps none
	pages atomic.Pointer[func(m *catalog.Manifest, file int) bool]
	quota atomic.Int64  // bytes on disk; 0 is no bound of its own
	lied  chan struct{} // a node of the cluster gave wrong bytes
}

// identity is what a dataset is called.
type identity struct {
	source  objstore.Source
	title   string   // in the catalog
	name    string   // of the listing in the catalog: the title, and the shards that replace it
	dataset [16]byte // of the title
}

// origin is the stores that a dataset's bytes come from.
type origin struct {
	published atomic.Pointer[objstore.Store] // the bare store of Config.Publish; nil without
	budget    *objstore.Budget               // of GETs, of all the dataset's stores; nil: none
	remote                                   // holds the listed objects
	near      *Near                          // between the cache and all stores of the dataset
	withheld  int64                          // of the ledger, for near
	shards    *shardStore                    // of Config.Shards; may be nil
}

// lifetime is who uses the dataset, and what runs meanwhile.
type lifetime struct {
	started    time.Time
	users      int           // guarded by the host's lock
	opened     chan struct{} // closed when Open ended
	failed     atomic.Bool   // Open has failed
	gone       chan struct{} // closed when the dataset was let go
	background sync.WaitGroup
	stop       context.CancelFunc
}

// versions are the versions of the dataset that readers may have open. One is in force, and only refresh changes which.
type versions struct {
	cur        atomic.Pointer[view]
	listed     atomic.Pointer[time.Time] // see Listed; nil before the first refresh
	refreshing chan struct{}             // held by the running refresh
	// of what was listed last and is not published yet; only the running Open or refresh uses it
	untold func(served bool)

	mu    sync.Mutex
	views []*opened      // all, the one in force last
	moved []*func([]int) // of OnMoved
}

// counted is what the stats say of the readers and of the log.
type counted struct {
	opens     atomic.Int64
	readers   readers
	goodput   goodput
	errs      errorRing
	transport atomic.Pointer[func() string] // of the mount; nil: there is none
}

// Rows is the Config.Samples of a dataset whose files are what lies in its objects: rows, documents, or columns of
// samples (docs/records.md). After a colon it may have the column that is numbered.
const Rows = "rows"

// rows reports whether the samples are looked for in the objects.
func (c Config) rows() bool { return c.Samples == Rows || strings.HasPrefix(c.Samples, Rows+":") }

// CheckSamples fails if pattern is not valid for Config.Samples.
func CheckSamples(pattern string) error {
	_, err := matchOf(pattern)
	return err
}

// columns returns which columns are shown, if there is a list of them; nil: all. The first is numbered.
func (c Config) columns() []string {
	if list, ok := strings.CutPrefix(c.Samples, Rows+":"); ok && strings.Contains(list, ",") {
		return strings.Split(strings.TrimSuffix(list, ","), ",")
	}
	return nil
}

func matchOf(samples string) (*catalog.Filter, error) {
	if samples == Rows {
		return catalog.Match(shard.Suffixes(""))
	}
	if list, ok := strings.CutPrefix(samples, Rows+":"); ok {
		if samples, _, _ = strings.Cut(list, ","); samples != "" { // or it is refused
			samples = shard.Suffixes(samples)
		}
	}
	return catalog.Match(samples)
}

// title returns what the dataset is called in the catalog. The same objects may be several datasets.
func (c Config) title(source objstore.Source) string {
	title := source.Canonical()
	if c.rows() {
		title += " as csv" // and others since
		if list := c.columns(); list != nil {
			title += " of " + strings.Join(list, ",")
		}
	}
	if c.Scope != "" {
		title += " for " + c.Scope
	}
	return title
}

// Open opens a dataset. Its errors name the thing, the cause and the remedy.
func (h *Host) Open(ctx context.Context, cfg Config) (_ *Engine, err error) {
	cfg.Logger = cmp.Or(cfg.Logger, h.cfg.Logger)
	match, err := matchOf(cfg.Samples)
	if err != nil {
		return nil, err
	}
	// The wrapped handler copies log messages into the stats.
	e := &Engine{
		host: h, cfg: cfg, catalog: h.Catalog, cache: h.Cache, lied: make(chan struct{}, 1),
		lifetime: lifetime{started: time.Now(), users: 1, opened: make(chan struct{}), gone: make(chan struct{})},
		versions: versions{refreshing: make(chan struct{}, 1)},
		orders:   orders{plans: map[string]*plan{}, sessions: map[*run.Stream]struct{}{}},
	}
	e.orders.engine = e
	e.log = slog.New(&e.counted.errs)
	e.counted.errs.next = cfg.Logger.Handler()
	e.orders.spec.Store(&cfg.Order)
	e.guests.ctx, e.guests.cancel = context.WithCancel(context.Background())

	base, source, err := stores.Open(ctx, cfg.Source, e.storeOptions())
	if err != nil {
		return nil, err
	}
	e.source, e.title = source, cfg.title(source)
	e.dataset, e.name = catalog.DatasetID(e.title), e.title
	if same, err := h.enter(ctx, e); same != nil || err != nil {
		return same, err
	}
	defer func() {
		if err = cachedir.WithRemedy(err, h.Path()); err != nil {
			e.failed.Store(true) // who has got it meanwhile goes on with it
			err = errors.Join(err, e.Close())
		}
		close(e.opened)
	}()
	if err := e.openStores(ctx, base); err != nil {
		return nil, err
	}
	if cfg.SkipBadShards { // the catalog's version may be of a part of the dataset
		e.name += " without bad shards"
	}
	if err := e.enterCluster(ctx); err != nil {
		return nil, err
	}
	e.openPast(match)
	m, layout, err := e.firstManifest(ctx, base)
	defer e.tell(false)
	if err != nil {
		return nil, err
	}
	if err := e.readQuota(); err != nil {
		return nil, err
	}
	e.learn()
	quota := e.quota.Load()
	v, err := e.newView(m, layout, match)
	if err != nil {
		return nil, err
	}
	if err := e.openDisk(v); err != nil {
		return nil, err
	}
	e.cur.Store(v)
	if q := e.quota.Load(); q != quota { // set meanwhile
		e.setQuota(q)
	}
	e.tell(true)
	e.log.Info("dataset open", "source", source.String(), "version", m.Version()[:12], "files", m.Len(),
		"packed", layout != nil,
		"samples", v.samples.Len(), "bytes", humanize.IBytes(uint64(m.Bytes())),
		"memory_for_data", humanize.IBytes(uint64(e.cache.Ledger().Limit())))
	if err := e.orders.start(cfg.Order); err != nil {
		return nil, err
	}
	if err := e.startBackground(); err != nil {
		return nil, err
	}
	return e, nil
}

func (e *Engine) startBackground() error {
	ctx, stop := context.WithCancel(context.Background())
	e.stop = stop
	e.background.Go(func() {
		for {
			select {
			case <-e.lied:
				e.verifyKept(ctx)
			case <-ctx.Done():
				return
			}
		}
	})
	e.background.Go(func() { e.scrubLoop(ctx) })
	e.background.Go(func() {
		for range pause.Every(ctx, sweepEvery) {
			e.sweep()
		}
	})
	e.background.Go(func() { e.orders.watch(ctx) })
	e.background.Go(func() { e.recodeLoop(ctx) })
	if e.host.node != nil {
		e.background.Go(func() { e.shareLoop(ctx) })
		e.background.Go(func() { e.versionLoop(ctx) })
	}
	if e.cfg.Publish == "" {
		return nil
	}
	return e.startPublish(ctx)
}

// openStores decorates the source's store, and opens the others.
func (e *Engine) openStores(ctx context.Context, base objstore.Layer) (err error) {
	e.budget = objstore.NewBudget(e.cfg.Store.GetsPerHour, e.log)
	if err := e.openNear(ctx); err != nil {
		return err
	}
	e.remote = e.newRemote(base, e.source)
	if e.cfg.Shards != "" {
		if e.shards, err = e.openShards(ctx); err != nil {
			return err
		}
		e.name += " by " + e.shards.source.Canonical()
	}
	return nil
}

// storeOptions are the options of every store of the dataset, read or written.
func (e *Engine) storeOptions() stores.Options {
	return stores.Options{Logger: e.log, Store: e.cfg.Store, Getenv: e.cfg.Getenv}
}

// remote is a store with all decorators for the dataset's requests.
type remote struct {
	base    objstore.Layer // the bare store
	store   objstore.Layer // on top: the near tier, or the retrier
	retrier *objstore.Retrier
	limiter *objstore.Limiter
	hedger  *objstore.Hedger
	meter   *objstore.Meter
	slowest *slowest
}

func (e *Engine) newRemote(base objstore.Layer, source objstore.Source) remote {
	policy := e.retryPolicy(base)
	r := remote{base: base, meter: objstore.NewMeter(base), slowest: &slowest{now: time.Now}}
	r.meter.OnRead(r.slowest.note)
	r.hedger = objstore.Hedge(r.meter, hedgeMemory{e.cache.Ledger(), policy.Budget})
	if e.cfg.AdaptConnections {
		r.limiter = objstore.LimitAdaptive(r.hedger, e.cfg.Connections)
	} else {
		r.limiter = objstore.Limit(r.hedger, e.cfg.Connections)
	}
	r.retrier = objstore.Retry(r.limiter, policy)
	r.store = e.near.Before(r.retrier, source)
	return r
}

func (e *Engine) retryPolicy(base objstore.Reader) objstore.RetryPolicy {
	p := e.budget.Policy(base)
	p.Tries = tries
	return p
}

// hedgeMemory charges second answers to the ledger, as demand since readers wait for them, and to the budget of GETs.
type hedgeMemory struct {
	ledger *cache.Ledger
	budget *objstore.Budget
}

func (m hedgeMemory) Borrow(n int64) bool {
	if !m.budget.TryTake() {
		return false
	}
	reserved := m.ledger.TryReserve(n, cache.ForDemand) // last: it may reclaim memory
	if !reserved {
		m.budget.Return()
	}
	return reserved
}

func (m hedgeMemory) Return(n int64) { m.ledger.Release(n, cache.ForDemand) }

// remoteOf returns the store of v's samples.
func (e *Engine) remoteOf(v *view) *remote {
	if e.shards != nil && v.layout != nil {
		return &e.shards.remote
	}
	return &e.remote
}

func (e *Engine) remotes() []*remote {
	if e.shards == nil {
		return []*remote{&e.remote}
	}
	return []*remote{&e.remote, &e.shards.remote}
}

// enter adds the dataset to the host. If it is open already with the same settings, that engine gets one more user.
func (h *Host) enter(ctx context.Context, e *Engine) (*Engine, error) {
	for {
		h.mu.Lock()
		if h.closed {
			h.mu.Unlock()
			return nil, errors.New("the daemon is ending")
		}
		same := h.open[e.dataset]
		if same == nil {
			h.open[e.dataset] = e
			h.Enter(e.dataset)
			h.mu.Unlock()
			return nil, nil
		}
		stays := same.users > 0
		if stays {
			same.users++
		}
		h.mu.Unlock()
		if stays {
			err := await(ctx, same.opened)
			if err == nil && !same.failed.Load() {
				if err = same.join(e.cfg); err == nil && e.cfg.Refresh {
					_, err = same.Refresh(ctx)
				}
				if err == nil {
					return same, nil
				}
			}
			if left := same.Close(); err != nil {
				return nil, errors.Join(err, left)
			}
		}
		// It is on its way out, or could not be opened, and others may have it still.
		if err := await(ctx, same.gone); err != nil {
			return nil, err
		}
	}
}

func await(ctx context.Context, c <-chan struct{}) error {
	select {
	case <-c:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (c Config) connections() string {
	if c.AdaptConnections {
		return "auto"
	}
	return strconv.Itoa(c.Connections)
}

// join checks that a further user of the dataset has the same settings as the first.
func (e *Engine) join(cfg Config) error {
	open := func(with string) error {
		return fmt.Errorf("%s is open in this cache directory with %s: %w (give the same, or another --cache-dir)",
			e.source, with, ErrOther)
	}
	other := func(flag, is, asked string) error { return open(fmt.Sprintf("%s %q, not %q", flag, is, asked)) }
	another := func(flag string) error { return open("another " + flag) }
	switch {
	case cfg.Samples != e.cfg.Samples:
		return another("--samples")
	case cfg.Shards != e.cfg.Shards:
		return other("--shards", e.cfg.Shards, cfg.Shards)
	case cfg.SkipBadShards != e.cfg.SkipBadShards:
		return another("--bad-shards")
	case !e.recoding.join(cfg.Recode):
		return other("--recode", *e.recoding.mode.Load(), cfg.Recode)
	case cfg.Near != e.cfg.Near:
		return other("--near", e.cfg.Near.String(), cfg.Near.String())
	case cfg.Store.CustomerKey != e.cfg.Store.CustomerKey:
		return fmt.Errorf("%s is open in this cache directory with another key of its objects, SHOAL_SSE_C_KEY (give "+
			"the same, or another --cache-dir)", e.source)
	case cfg.Store.RequesterPays != e.cfg.Store.RequesterPays || cfg.Store.LinksOutside != e.cfg.Store.LinksOutside ||
		!cfg.Store.Prices.IsZero() && cfg.Store.Prices != e.cfg.Store.Prices ||
		cfg.Store.GetsPerHour != 0 && cfg.Store.GetsPerHour != e.cfg.Store.GetsPerHour:
		return another("--store")
	case cfg.ConnectionsGiven && (cfg.Connections != e.cfg.Connections ||
		cfg.AdaptConnections != e.cfg.AdaptConnections):
		return other("--connections", e.cfg.connections(), cfg.connections())
	case cfg.Publish != "" && cfg.Publish != e.cfg.Publish:
		return other("--publish", e.cfg.Publish, cfg.Publish)
	case cfg.Store.WeakETag && !e.cfg.Store.WeakETag:
		return other("--store weak-etag", "false", "true")
	case cfg.Order.Name() == "auto" || cfg.Order == e.order():
		return nil
	case e.order().Computed() || e.order().Name() == "none" ||
		e.orders.inference.Load() == nil && len(e.orders.mounted()) > 0:
		return other("--order", e.order().String(), cfg.Order.String())
	}
	return e.orders.start(cfg.Order)
}

func (e *Engine) openDisk(v *view) error {
	e.host.mu.Lock()
	versions := len(e.host.versions())
	e.host.mu.Unlock()
	return e.host.OpenDisk(v.volume, e.dataset, e.title, e.quota.Load(), versions, e.log)
}

func (e *Engine) readQuota() error {
	all, err := e.catalog.Datasets()
	for _, d := range all {
		if d.ID == e.dataset {
			e.quota.CompareAndSwap(0, d.Quota) // not what is set just now
		}
	}
	return err
}

func (e *Engine) setQuota(n int64) {
	e.quota.Store(n)
	if v := e.cur.Load(); v != nil {
		v.keeping.again()
		v.volume.SetQuota(n)
	}
}

// firstManifest returns the version in the catalog, or lists the source.
func (e *Engine) firstManifest(ctx context.Context, base objstore.Store) (*catalog.Manifest, *catalog.Layout, error) {
	if !e.cfg.Refresh && !e.catalog.Stale(e.name) {
		m, l, err := e.catalog.Manifest(e.name)
		if err == nil && e.host.node != nil {
			m, l, err = e.sharedManifest(ctx, m, l)
		}
		switch {
		case err == nil && m.Len() == 0: // there is no object to probe
		case err == nil && e.shards != nil && l == nil: // the shards may hold this version by now
		case err == nil:
			return m, l, e.probe(ctx, base, m, l)
		case !errors.Is(err, catalog.ErrNoManifest):
			e.log.Warn("the catalog's manifest is unusable; listing again", "cause", err)
		}
	}
	if err := base.Check(ctx); err != nil {
		return nil, nil, err
	}
	return e.listShared(ctx, e.cfg.Refresh || e.catalog.Stale(e.name))
}

// probe requests one object, so that a wrong key or a skewed clock is reported at the start and not by the first
// read. A store that is merely down must not prevent the use of a warm cache, and a warm start reads nothing.
func (e *Engine) probe(ctx context.Context, base objstore.Reader, m *catalog.Manifest, l *catalog.Layout) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	object := m.Object(0)
	switch {
	case e.shards != nil && l != nil:
		base, object = e.shards.base, l.Shard(0)
	case l != nil:
		object = l.Shard(0)
	}
	e.budget.TryTake() // the first request
	_, err := base.Stat(ctx, object.Key)
	if err != nil && object.Size > 0 && ctx.Err() == nil { // the answer to a HEAD has no body, and so no cause
		e.budget.TryTake()
		err = base.ReadAt(ctx, object, make([]byte, 1), 0)
	}
	switch objstore.KindOf(err) {
	case objstore.KindDenied, objstore.KindInvalid:
		return err
	case objstore.KindChanged:
		return nil
	}
	if err != nil {
		e.log.Warn("could not verify access to the object store; continuing from the cache", "cause", err)
	}
	return nil
}

// Refresh lists the source again. If it changed, the new version is in force when Refresh returns; kept data of
// unchanged files stays. It reports whether the version changed.
func (e *Engine) Refresh(ctx context.Context) (changed bool, err error) {
	return e.refresh(ctx, true, func(ctx context.Context) (*catalog.Manifest, *catalog.Layout, error) {
		return e.listShared(ctx, true)
	})
}

// refresh moves to the version that list returns. afresh: its listing began after the call.
func (e *Engine) refresh(ctx context.Context, afresh bool,
	list func(context.Context) (*catalog.Manifest, *catalog.Layout, error)) (changed bool, err error) {
	ctx, span := trace.Start(ctx, "dataset.refresh")
	defer func() {
		err = cachedir.WithRemedy(err, e.host.Path())
		span.End(err)
	}()
	// One at a time: two would both replace the same version, and the one with the older listing might be last.
	select {
	case e.refreshing <- struct{}{}:
		defer func() { <-e.refreshing }()
	case <-ctx.Done():
		return false, ctx.Err()
	}
	old, began := e.cur.Load(), time.Now()
	m, layout, err := list(ctx)
	if err != nil {
		return false, err
	}
	defer func() {
		served := changed || err == nil // if its order cannot start, too
		e.tell(served)
		if served && afresh {
			e.listed.Store(&began)
		}
	}()
	span.Str("shoal.old", old.manifest.Version())
	span.Str("shoal.new", m.Version())
	if m.Version() == old.manifest.Version() && old.layout.Version() == layout.Version() {
		return false, closeList(m, layout)
	}
	match, err := matchOf(e.cfg.Samples)
	if err != nil {
		return false, err
	}
	v, err := e.newView(m, layout, match)
	if err != nil {
		return false, err
	}
	v.volume.Inherit(old.volume)
	e.cur.Store(v)
	old.volume.Retire()
	e.mu.Lock()
	e.views[len(e.views)-2].held = nil
	e.mu.Unlock()
	e.tellMoved(nil)
	e.log.Info("moved to a new dataset version", "old", old.manifest.Version()[:12], "new", m.Version()[:12],
		"files", m.Len())
	if err = e.orders.start(e.order()); err != nil {
		e.orders.drop(func(*run.Stream) bool { return true }) // they follow the old version
	}
	return true, err
}

func (s *versions) tellMoved(dropped []int) {
	s.mu.Lock()
	told := slices.Clone(s.moved)
	s.mu.Unlock()
	for _, f := range told {
		(*f)(dropped)
	}
}

// OnMoved calls f after each move to another version, whoever asked for it, with nil; and with the files of which
// Verify has dropped something, since others may have the wrong bytes, too.
func (s *versions) OnMoved(f func(dropped []int)) (cancel func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.moved = append(s.moved, &f)
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.moved = slices.DeleteFunc(s.moved, func(g *func([]int)) bool { return g == &f })
	}
}

func (e *Engine) order() order.Spec { return *e.orders.spec.Load() }

// Source returns the source's URL.
func (e *Engine) Source() string { return e.source.String() }

// Logger returns a logger whose warnings and errors also show in the stats.
func (e *Engine) Logger() *slog.Logger { return e.log }

// Manifest returns the version in force.
func (e *Engine) Manifest() *catalog.Manifest { return e.cur.Load().manifest }

// Cache returns what has the account of memory.
func (e *Engine) Cache() *cache.Cache { return e.cache }

// ReadAt reads a file of version m, as cache.Volume.ReadAt does.
func (e *Engine) ReadAt(ctx context.Context, m *catalog.Manifest, file int, p []byte, off int64) (int, error) {
	e.counted.readers.read()
	return e.volumeOf(m).ReadAt(ctx, file, p, off)
}

// WasRead says that a process (0: unknown) has read n bytes of a file from off.
func (e *Engine) WasRead(m *catalog.Manifest, file int, off, n int64, process uint32) {
	e.recoding.asFiles.Add(n)
	e.host.runner.Read(e.volumeOf(m), file, off, n, process, e.orders.mounted)
	if i := e.orders.inference.Load(); i != nil && i.view.manifest == m && i.large(file) {
		i.read(process, file, n)
	}
}

// WillReadRange says what is about to be read, as cache.Volume.WillReadRange does.
func (e *Engine) WillReadRange(m *catalog.Manifest, file int, off, n int64) {
	e.volumeOf(m).WillReadRange(file, off, n)
}

// Lend returns bytes of a file that are in memory, as cache.Volume.Lend does.
func (e *Engine) Lend(m *catalog.Manifest, file int, off int64, n int) (data []byte, release func(), ok bool) {
	e.counted.readers.read()
	return e.volumeOf(m).Lend(file, off, n)
}

// ReadNow reads what is on disk and need not be waited for, as cache.Volume.ReadNow does.
func (e *Engine) ReadNow(m *catalog.Manifest, file int, p []byte, off int64) bool {
	return e.volumeOf(m).ReadNow(file, p, off)
}

// Place is Volume.Place of the version m.
func (e *Engine) Place(m *catalog.Manifest, file int, check bool) (segment.Place, bool) {
	return e.volumeOf(m).Place(file, check)
}

// Damaged is Volume.Damaged.
func (e *Engine) Damaged() int64 { return e.cur.Load().volume.Damaged() }

// SegmentDir is Volume.SegmentDir of the version m.
func (e *Engine) SegmentDir(m *catalog.Manifest) string { return e.volumeOf(m).SegmentDir() }

// State says where the file's content is: on disk ("kept"), in memory ("staged"), or only in the object store
// ("remote").
func (e *Engine) State(m *catalog.Manifest, file int) string {
	switch e.volumeOf(m).Residence(file) {
	case cache.OnDisk:
		return "kept"
	case cache.InMemory:
		return "staged"
	}
	return "remote"
}

// Permissions returns the file's current mode bits, if the source is a local folder.
func (e *Engine) Permissions(m *catalog.Manifest, file int) (bits uint32, ok bool) {
	if e.source.Scheme != "file" || e.cur.Load().layout != nil {
		return 0, false
	}
	info, err := os.Stat(filepath.Join(e.source.Dir, m.Path(file)))
	if err != nil {
		return 0, false
	}
	return uint32(info.Mode().Perm()), true
}

// volumeOf returns the volume of a version that is or was in force.
func (e *Engine) volumeOf(m *catalog.Manifest) *cache.Volume { return m.Owner.(*view).volume }

// Opened is the position signal: a reader of the mount has opened a file. process is that of the reader, or 0.
func (e *Engine) Opened(m *catalog.Manifest, file int, process uint32) {
	e.counted.opens.Add(1)
	e.counted.readers.opened(process)
	v := e.volumeOf(m)
	v.WillRead(file)
	cur := e.cur.Load()
	if cur.manifest != m {
		e.host.runner.Opened(v, file, process)
		return
	}
	if _, ok := cur.samples.Sample(file); ok {
		e.CountDelivered(1)
	}
	cur.keeping.Opened(file)
	// First, so that a stream that it begins meanwhile hears of this open twice, rather than never.
	if i := e.orders.inference.Load(); i != nil && i.view.manifest == m {
		i.opened(process, file)
	}
	e.host.runner.Opened(v, file, process, e.orders.mounted()...)
}

// SetPages says whom to ask whether the kernel has a file, so that it is not fetched for readers of the mount.
func (e *Engine) SetPages(has func(m *catalog.Manifest, file int) bool) { e.pages.Store(&has) }

// inPages reports whether the kernel probably has a file.
func (v *view) inPages(e *Engine, file int) bool {
	has := e.pages.Load()
	return has != nil && (*has)(v.manifest, file)
}

// Released says that a reader of the mount has closed a file.
func (e *Engine) Released(m *catalog.Manifest, file int) { e.host.runner.Done(e.volumeOf(m), file) }

// Close ends one use of the dataset. The last one ends every stream and closes the dataset; its data on disk stays.
// No reader may be left.
func (e *Engine) Close() error {
	e.host.mu.Lock()
	e.users--
	last := e.users == 0
	e.host.mu.Unlock()
	if !last {
		return nil
	}
	defer close(e.gone)
	if e.stop != nil {
		e.stop()
		e.background.Wait() // it may begin an inference
	}
	e.orders.close()
	if !e.cfg.Store.Prices.IsZero() || e.budget != nil {
		e.log.Info("requests to the object store", "source", e.source.String(), "sum", e.Cost().String())
	}
	return e.host.leave(e)
}

// leave removes the dataset from the host, and frees its memory and its metadata's.
func (h *Host) leave(e *Engine) error {
	var err error
	h.node.forget(e)
	e.guests.close()
	if len(e.views) > 0 {
		err = e.views[len(e.views)-1].held.volume.Close()
	}
	e.near.Close() // nobody reads any more, but copies may still be put
	e.cache.Ledger().Withhold(-e.withheld)
	if len(e.views) > 0 {
		for _, r := range e.remotes() {
			r.hedger.Wait() // they hold memory
		}
	}
	h.mu.Lock()
	delete(h.open, e.dataset)
	err = errors.Join(err, h.Leave(e.dataset))
	h.mu.Unlock()
	for _, o := range e.views {
		err = errors.Join(err, o.close(h))
	}
	return err
}
