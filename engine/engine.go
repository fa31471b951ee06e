// Package engine is one open dataset: what the three doors (mount, feed, sidecar) have in common. It
// joins the object store, the catalog, the cache and the pure planner, and owns the goroutines that
// carry plans out.
//
//	Open ── lock the cache directory
//	     ── store: retry( limit( meter( s3 | dir )))
//	     ── manifest: from the catalog, or listed once
//	     ── cache: ledger, ring, segments; one Volume a dataset version
//	     └─ streams: one an order in progress (a mount's, a plan's, a feed session's)
//
// # Traps
//
//   - Streams number files as the manifest does; samples (what an order numbers) are a view of them.
//   - A refresh replaces volume and streams at once. Readers that have a file of the old version open
//     go on with the old volume, which the engine keeps for as long as it lives.
package engine

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	humanize "github.com/dustin/go-humanize"

	"github.com/shoalfs/shoal/cache"
	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/cache/segment"
	"github.com/shoalfs/shoal/prefetch/order"
)

// Config says what to open and within which bounds.
type Config struct {
	Source      string     // s3://bucket/prefix or file:///dir
	CacheDir    string     // owned by this engine while it is open
	CacheSize   int64      // bytes on disk, everything under CacheDir counted
	Memory      int64      // bytes of memory for the whole process
	Order       order.Spec // what readers of the mount are expected to do
	Samples     string     // which files are numbered: catalog.Match's globs
	Connections int        // GETs in flight at most
	Refresh     bool       // list again even if the catalog knows the source
	WeakETag    bool       // accept objects without an ETag
	Logger      *slog.Logger
	Progress    func(listed int) // told while a first listing goes on; may be nil
}

const (
	// overhead is what a daemon needs before it holds a single sample: Go runtime, badger (its
	// memtables and index), gRPC, FUSE request buffers and the buffers of 512 connections. Measured as
	// RSS of a mounted daemon over an empty ledger.
	overhead = 64 << 20
	// minLedger lets eight readers wait for 1-MiB objects while prefetching goes on.
	minLedger = 32 << 20
	// bytesPerFile is what the engine holds a file while an order is in force: 8 for the kept
	// record's place, 4 each for this epoch's order, the next one's and the inverse, some bits.
	bytesPerFile = 24
	// catalogOnDisk is what is kept back from --cache-size for the catalog's own files, the log and
	// the socket; small caches make badger write less.
	catalogOnDisk = 8 << 20
	// tableOnDisk is what is kept back for each record's line in the catalog: 60 bytes, and the
	// same again until badger compacts.
	tableOnDisk = 128
	// tries of one request: about 25 s with the default pauses. A trainer outlives a store that
	// restarts, and is told within half a minute that one is gone.
	tries = 16
	// minDisk is the least space in which keeping data on disk is worth a segment.
	minDisk = 4 << 20
)

// Engine is one open dataset. Safe for concurrent use.
type Engine struct {
	cfg     Config
	log     *slog.Logger
	source  objstore.Source
	dataset [16]byte
	meter   *objstore.Meter
	store   objstore.Reader
	catalog *catalog.Catalog
	cache   *cache.Cache
	unlock  func() error
	started time.Time

	cur atomic.Pointer[view]

	mu       sync.Mutex
	volumes  map[*catalog.Manifest]*cache.Volume // every version that readers may still have open
	mount    []*Stream                           // what steers the mount: by --order, or one a plan
	plans    map[string]*plan
	sessions map[*Stream]struct{} // the feed's
	closed   bool

	streams streams

	opens atomic.Int64
	errs  errorRing

	background sync.WaitGroup
	stop       context.CancelFunc
}

// view is the dataset version in force.
type view struct {
	manifest *catalog.Manifest
	volume   *cache.Volume
	samples  *catalog.Samples
}

// CheckSamples fails if Config.Samples may not be the pattern.
func CheckSamples(pattern string) error {
	_, err := catalog.Match(pattern)
	return err
}

// Open opens the source. Its errors name the thing, the cause and the remedy.
func Open(ctx context.Context, cfg Config) (_ *Engine, err error) {
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	match, err := catalog.Match(cfg.Samples)
	if err != nil {
		return nil, err
	}
	// The wrapped handler lets stats show what the log says.
	e := &Engine{cfg: cfg, started: time.Now(), volumes: map[*catalog.Manifest]*cache.Volume{},
		plans: map[string]*plan{}, sessions: map[*Stream]struct{}{}}
	e.log = slog.New(&e.errs)
	e.errs.next = cfg.Logger.Handler()
	debug.SetMemoryLimit(cfg.Memory)

	defer func() {
		if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
			err = fmt.Errorf("cache directory: %w (free space on the disk of %s, or give another --cache-dir)", err, cfg.CacheDir)
		}
		if err != nil {
			err = errors.Join(err, e.Close())
		}
	}()
	base, source, err := objstore.Open(ctx, cfg.Source, objstore.Options{})
	if err != nil {
		return nil, err
	}
	e.source = source
	e.dataset = catalog.DatasetID(source.Canonical())
	e.meter = objstore.NewMeter(base)
	e.store = objstore.Retry(objstore.Limit(e.meter, cfg.Connections), objstore.RetryPolicy{Tries: tries})

	if err := os.MkdirAll(cfg.CacheDir, 0o700); err != nil {
		return nil, fmt.Errorf("cache directory: %w (give another --cache-dir)", err)
	}
	if e.unlock, err = catalog.Lock(cfg.CacheDir); err != nil {
		return nil, err
	}
	if e.catalog, err = catalog.Open(cfg.CacheDir, catalog.Options{Logger: e.log}); err != nil {
		return nil, err
	}
	manifest, err := e.firstManifest(ctx, base)
	if err != nil {
		return nil, err
	}
	memory, err := e.ledgerBytes(manifest)
	if err != nil {
		return nil, err
	}
	e.cache = cache.New(cache.Options{Memory: memory, Logger: e.log})
	v := e.newView(manifest, match)
	_, extents := v.volume.Kept()
	disk := diskBytes(cfg.CacheSize, manifest.FileSize(), extents)
	segments, so := filepath.Join(cfg.CacheDir, "segments"), segment.Options{MaxBytes: disk, Index: e.catalog, Logger: e.log}
	if disk >= minDisk {
		if err := e.cache.OpenDisk(segments, so); err != nil {
			return nil, err
		}
	} else {
		if err := cache.ClearDisk(segments, so); err != nil {
			return nil, err
		}
		e.log.Warn("--cache-size leaves no room for data on disk; caching in memory only",
			"cache_size", humanize.IBytes(uint64(cfg.CacheSize)), "metadata", humanize.IBytes(uint64(cfg.CacheSize-disk)),
			"remedy", "give at least "+humanize.IBytes(uint64(cfg.CacheSize-disk+minDisk)))
	}
	e.cur.Store(v)
	e.log.Info("dataset open", "source", source.String(), "version", manifest.Version()[:12], "files", manifest.Len(),
		"samples", v.samples.Len(), "bytes", humanize.IBytes(uint64(manifest.Bytes())), "memory_for_data", humanize.IBytes(uint64(memory)))
	if err := e.startOrder(); err != nil {
		return nil, err
	}
	bg, stop := context.WithCancel(context.Background())
	e.stop = stop
	e.background.Go(func() { e.syncLoop(bg) })
	return e, nil
}

// diskBytes derives the segments' limit from --cache-size: metadata first, and that of a new version
// beside it while a refresh goes on.
func diskBytes(cacheSize, manifest int64, extents int) int64 {
	records := min(int64(extents), cacheSize>>12)
	return cacheSize - min(catalogOnDisk, 1<<20+cacheSize/32) - 2*manifest - records*tableOnDisk
}

// firstManifest takes the version that the catalog knows, or lists.
func (e *Engine) firstManifest(ctx context.Context, base objstore.Reader) (*catalog.Manifest, error) {
	if !e.cfg.Refresh {
		m, err := e.catalog.Manifest(e.source.Canonical())
		switch {
		case err == nil:
			return m, e.probe(ctx, base, m)
		case !errors.Is(err, catalog.ErrNoManifest):
			e.log.Warn("the catalog's manifest is unusable; listing again", "cause", err)
		}
	}
	if c, ok := base.(objstore.Checker); ok {
		if err := c.Check(ctx); err != nil {
			return nil, err
		}
	}
	return e.list(ctx)
}

// probe asks for one object, so that a wrong key or a skewed clock is told at the start and not by
// the first read. A store that is merely down must not keep a warm cache from being used.
func (e *Engine) probe(ctx context.Context, base objstore.Reader, m *catalog.Manifest) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	_, err := base.Stat(ctx, m.Object(0).Key)
	switch objstore.KindOf(err) {
	case objstore.KindDenied, objstore.KindInvalid:
		return err
	}
	if err != nil {
		e.log.Warn("the object store does not answer as expected; going on with what is cached", "cause", err)
	}
	return nil
}

// list lists the source and makes the result the catalog's current version.
func (e *Engine) list(ctx context.Context) (*catalog.Manifest, error) {
	start := time.Now()
	// 16 listings in parallel: a page of 1,000 keys takes a store about 100 ms.
	objects := objstore.ListParallel(ctx, e.store, e.source.Prefix, 16, e.cfg.Progress)
	m, err := catalog.Build(objects, catalog.BuildOptions{Prefix: e.source.Prefix, WeakETag: e.cfg.WeakETag})
	if err != nil {
		return nil, fmt.Errorf("list %s: %w", e.source, err)
	}
	if err := e.catalog.SetManifest(e.source.Canonical(), m); err != nil {
		return nil, err
	}
	// From here on the mapped file serves, and the listing's heap goes.
	if m, err = e.catalog.Manifest(e.source.Canonical()); err != nil {
		return nil, err
	}
	if n, err := e.catalog.GC(); err != nil {
		e.log.Warn("old manifests were not removed", "cause", err)
	} else if n > 0 {
		e.log.Debug("old manifests removed", "count", n)
	}
	e.log.Info("listed", "source", e.source.String(), "files", m.Len(), "took", time.Since(start).Round(time.Millisecond))
	if s := m.Skipped(); s.Hostile+s.Shadowed > 0 {
		e.log.Warn("some keys cannot be shown as files", "hostile", s.Hostile, "shadowed_by_a_folder", s.Shadowed, "examples", s.Examples)
	}
	return m, nil
}

// ledgerBytes derives the ledger's limit from --memory: metadata first, data gets what is left.
func (e *Engine) ledgerBytes(m *catalog.Manifest) (int64, error) {
	metadata := int64(m.Len())*bytesPerFile + m.FileSize()
	// The collector and the size classes of buffers need about a quarter on top of live bytes.
	ledger := (e.cfg.Memory - overhead - metadata) * 3 / 4
	if ledger < minLedger {
		need := overhead + metadata + minLedger*4/3
		return 0, fmt.Errorf("--memory %s is too little for %d files: metadata takes %s and the daemon %s; give at least %s",
			humanize.IBytes(uint64(e.cfg.Memory)), m.Len(), humanize.IBytes(uint64(metadata)), humanize.IBytes(overhead), humanize.IBytes(uint64(need)))
	}
	return ledger, nil
}

func (e *Engine) newView(m *catalog.Manifest, match func(string) bool) *view {
	v := &view{manifest: m, volume: e.cache.NewVolume(m, e.dataset, e.store), samples: m.Samples(match)}
	e.mu.Lock()
	e.volumes[m] = v.volume
	e.mu.Unlock()
	return v
}

// syncInterval bounds what a crash of the machine (not of the daemon) can cost in refetches.
const syncInterval = 30 * time.Second

func (e *Engine) syncLoop(ctx context.Context) {
	t := time.NewTicker(syncInterval)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
			if err := e.cache.Sync(); err != nil {
				e.log.Error("cache not synced to disk", "cause", err)
			}
		}
	}
}

// Refresh lists the source again. If it changed, the new version is in force when Refresh returns;
// what is kept of unchanged files stays. It reports whether the version changed.
func (e *Engine) Refresh(ctx context.Context) (changed bool, err error) {
	old := e.cur.Load()
	m, err := e.list(ctx)
	if err != nil {
		return false, err
	}
	if m.Version() == old.manifest.Version() {
		return false, m.Close()
	}
	match, err := catalog.Match(e.cfg.Samples)
	if err != nil {
		return false, err
	}
	v := e.newView(m, match)
	v.volume.Inherit(old.volume)
	e.cur.Store(v)
	old.volume.Retire()
	e.log.Info("moved to a new dataset version", "old", old.manifest.Version()[:12], "new", m.Version()[:12], "files", m.Len())
	return true, e.startOrder()
}

// Source returns the source's URL.
func (e *Engine) Source() string { return e.source.String() }

// Logger returns a logger whose warnings and errors also show in the stats.
func (e *Engine) Logger() *slog.Logger { return e.log }

// Manifest returns the version in force.
func (e *Engine) Manifest() *catalog.Manifest { return e.cur.Load().manifest }

// Reserve takes n bytes of memory for something that a reader asked for, and reports whether they
// were to be had. Ledger().Release gives them back, as cache.ForDemand.
func (e *Engine) Reserve(n int64) bool { return e.cache.TryReserve(n) }

// Ledger returns the account of memory.
func (e *Engine) Ledger() *cache.Ledger { return e.cache.Ledger() }

// ReadAt reads a file of version m, as cache.Volume.ReadAt does.
func (e *Engine) ReadAt(ctx context.Context, m *catalog.Manifest, file int, p []byte, off int64) (int, error) {
	return e.volumeOf(m).ReadAt(ctx, file, p, off)
}

func (e *Engine) volumeOf(m *catalog.Manifest) *cache.Volume {
	if v := e.cur.Load(); v.manifest == m {
		return v.volume
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.volumes[m]
}

// Opened is the position signal: a reader of the mount has opened a file.
func (e *Engine) Opened(m *catalog.Manifest, file int) {
	e.opens.Add(1)
	e.streams.opened(e.volumeOf(m), file)
	if e.cur.Load().manifest != m {
		return
	}
	for _, s := range e.mountStreams() {
		s.opened(file)
	}
}

// Released says that a reader of the mount has closed a file.
func (e *Engine) Released(m *catalog.Manifest, file int) {
	e.streams.done(e.volumeOf(m), file)
}

func (e *Engine) mountStreams() []*Stream {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.mount
}

// Close ends every stream, gives all memory back, and leaves the cache directory to the next owner.
// Readers must be gone.
func (e *Engine) Close() error {
	e.mu.Lock()
	e.closed = true
	streams := append([]*Stream(nil), e.mount...)
	for s := range e.sessions {
		streams = append(streams, s)
	}
	e.mu.Unlock()
	for _, s := range streams {
		s.Close()
	}
	if e.stop != nil {
		e.stop()
		e.background.Wait()
	}
	var err error
	if e.cache != nil {
		for _, p := range e.plans {
			e.cache.Ledger().Release(p.reserved, cache.ForDemand)
		}
		err = errors.Join(err, e.cache.Close())
	}
	for m := range e.volumes {
		err = errors.Join(err, m.Close())
	}
	if e.catalog != nil {
		err = errors.Join(err, e.catalog.Close())
	}
	if e.unlock != nil {
		err = errors.Join(err, e.unlock())
	}
	return err
}
