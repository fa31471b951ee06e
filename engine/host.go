package engine

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	humanize "github.com/dustin/go-humanize"

	"github.com/shoalfs/shoal/cache"
	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/cache/crypt"
	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/cache/segment"
	"github.com/shoalfs/shoal/internal/audit"
)

// HostConfig says which cache directory a daemon owns, and within which bounds.
type HostConfig struct {
	CacheDir  string // owned by the host while it is open
	CacheSize int64  // bytes on disk, everything under CacheDir counted
	Memory    int64  // bytes of memory for the whole process
	// Secret is the key that the cache directory is encrypted by; nil: it lies in clear. A new directory is made
	// as this says; one of the other kind, or of another key, is refused.
	Secret *crypt.Secret
	// Audit says where it is written down who opened what; without a path nowhere.
	Audit  audit.Options
	Logger *slog.Logger
	// Searcher is a command line that calls ServeSearch with its standard input and output. Without one no
	// seeds are searched for.
	Searcher []string
}

// Host owns a cache directory and what the datasets that are open in it share: the lock, the catalog,
// the account of memory and that of the disk. Safe for concurrent use.
//
// Datasets that are not open keep their segments until another one needs the room: then they give it back (see
// package cache), the one that was not used for the longest time first, unless they are pinned.
type Host struct {
	cfg     HostConfig
	log     *slog.Logger
	key     *crypt.Key // nil: in clear
	audit   *audit.Log // nil: none
	errs    errorRing
	catalog *catalog.Catalog
	cache   *cache.Cache
	unlock  func() error
	runner  *runner

	background sync.WaitGroup
	stop       context.CancelFunc

	mu       sync.Mutex
	closed   bool
	open     map[[16]byte]*Engine
	idle     map[[16]byte]int64 // bytes of segments of datasets that are not open
	metadata int64              // bytes on disk that are kept back for the open datasets' metadata
	offHeap  int64              // bytes of memory that the open datasets' manifests and layouts take
}

const (
	// overhead is what a daemon needs before it holds a single sample: Go runtime, badger's memtables, gRPC,
	// FUSE request buffers and the buffers of 512 connections. Measured as RSS of a mounted daemon over an empty ledger.
	overhead = 64 << 20
	// minLedger lets eight readers wait for 1-MiB objects while prefetching goes on.
	minLedger = 32 << 20
	// bytesPerFile is what the engine holds a file while an order is in force: 8 for the kept
	// record's place, 4 each for this epoch's order, the next one's and the inverse, some bits.
	bytesPerFile = 24
	// bytesPerExtent is what a further extent of a file takes: the record's place and a bit.
	bytesPerExtent = 9
	// catalogOnDisk is what is kept back from --cache-size for the catalog's own files, the log and
	// the socket.
	catalogOnDisk = 8 << 20
	// tableOnDisk is what is kept back for each record's line in its table: 30 bytes, and the
	// same again while the table is replaced.
	tableOnDisk = 64
	// minDisk is the least space in which keeping data on disk is worth a segment.
	minDisk = 4 << 20
	// syncInterval bounds what a crash of the machine (not of the daemon) can cost in refetches.
	syncInterval = 30 * time.Second
)

// LeastMemory is the least HostConfig.Memory, in bytes.
const LeastMemory = overhead + (minLedger*4+2)/3

// RoundUp writes a number of bytes as flags take it, rounded up to whole MiB: what an error tells the user to give has
// to be enough.
func RoundUp(n int64) string { return fmt.Sprintf("%dMiB", (n+1<<20-1)>>20) }

// ledgerOf returns how much of --memory is for data and metadata. The collector and the size classes of buffers need
// about a quarter on top of live bytes.
func ledgerOf(memory int64) int64 { return (memory - overhead) * 3 / 4 }

// memoryFor is the least --memory whose ledger holds n bytes.
func memoryFor(n int64) int64 { return overhead + (n*4+2)/3 }

// ErrInUse is wrapped by OpenHost's error about a cache directory that another process owns.
var ErrInUse = catalog.ErrInUse

// OpenHost takes the cache directory. Its errors name the thing, the cause and the remedy.
func OpenHost(cfg HostConfig) (_ *Host, err error) {
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	h := &Host{cfg: cfg, open: map[[16]byte]*Engine{}, idle: map[[16]byte]int64{}}
	h.errs.next = cfg.Logger.Handler()
	h.log = slog.New(&h.errs)
	if need := int64(LeastMemory); cfg.Memory < need {
		return nil, fmt.Errorf("--memory %s is too little for the daemon itself; give at least %s", humanize.IBytes(uint64(max(cfg.Memory, 0))), RoundUp(need))
	}
	h.limitHeap()
	defer func() {
		if err = withRemedy(err, cfg.CacheDir); err != nil {
			err = errors.Join(err, h.Close())
		}
	}()
	if err := os.MkdirAll(cfg.CacheDir, 0o700); err != nil {
		return nil, fmt.Errorf("cache directory: %w (give another --cache-dir)", err)
	}
	h.key, h.unlock, err = catalog.LockKey(cfg.CacheDir, cfg.Secret)
	if err == nil || errors.Is(err, ErrEncryption) {
		err = errors.Join(err, h.openAudit(err))
	}
	if err != nil {
		return nil, err
	}
	h.cfg.Secret = nil // the key is had, and rekeying may change what it is wrapped by
	if h.catalog, err = catalog.Open(cfg.CacheDir, catalog.Options{Logger: h.log, Key: h.key}); err != nil {
		return nil, err
	}
	h.cache = cache.New(cache.Options{
		Memory: ledgerOf(cfg.Memory),
		Disk:   max(h.diskLimit(), 1), OnFull: h.makeRoom, Logger: h.log,
	})
	h.runner = newRunner(h.cache)
	if err := h.findIdle(); err != nil {
		return nil, err
	}
	ctx, stop := context.WithCancel(context.Background())
	h.stop = stop
	h.background.Go(func() { h.syncLoop(ctx) })
	h.background.Go(func() { h.runner.run(ctx) })
	return h, nil
}

// withRemedy adds the remedy to an error about a full disk, or about something in the cache directory that is a
// folder and should be a file, or the other way round.
func withRemedy(err error, dir string) error {
	switch {
	case errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT):
		return fmt.Errorf("cache directory: %w (free space on the disk of %s, or give another --cache-dir)", err, dir)
	case (errors.Is(err, syscall.EISDIR) || errors.Is(err, syscall.ENOTDIR) || errors.Is(err, syscall.EEXIST)) && strings.Contains(err.Error(), dir+"/"):
		return fmt.Errorf("%w (mend the cache directory with: shoal fsck %s --repair)", err, dir)
	}
	return err
}

// diskLimit derives the segments' limit from --cache-size: metadata first. h.mu is held, or h is new.
func (h *Host) diskLimit() int64 { return max(0, h.cfg.CacheSize-h.metaOnDisk()) }

// metaOnDisk is what of --cache-size is not for segments. h.mu is held, or h is new.
func (h *Host) metaOnDisk() int64 {
	return min(catalogOnDisk, 1<<20+h.cfg.CacheSize/32) + h.metadata
}

// cacheFor returns a --cache-size that leaves room for data beside the metadata, which grows with it: the catalog's part by a 32nd,
// and the lines of each open version by a 64th.
func (h *Host) cacheFor() int64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	versions := len(h.versions())
	missing := h.metaOnDisk() + minDisk - h.cfg.CacheSize
	return h.cfg.CacheSize + missing*64/int64(max(62-versions, 1))
}

func (h *Host) segmentsDir() string { return filepath.Join(h.cfg.CacheDir, "segments") }

func (h *Host) datasetDir(id [16]byte) string {
	return filepath.Join(h.segmentsDir(), hex.EncodeToString(id[:]))
}

// findIdle counts what datasets left on disk. Where that is more than the limit nothing goes yet: what goes
// first depends on which dataset is opened.
func (h *Host) findIdle() error {
	entries, err := os.ReadDir(h.segmentsDir())
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("cache directory: %w", err)
	}
	for _, e := range entries {
		id, ok := datasetOf(e)
		if !ok {
			continue
		}
		h.countIdle(id)
	}
	return nil
}

// datasetOf returns the dataset whose segments lie in a folder of segments.
func datasetOf(e fs.DirEntry) (id [16]byte, ok bool) {
	b, err := hex.DecodeString(e.Name())
	if err != nil || len(b) != len(id) || !e.IsDir() {
		return id, false
	}
	return [16]byte(b), true
}

func folderBytes(dir string) (n int64, err error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	for _, e := range entries {
		if fi, err := e.Info(); err == nil {
			n += fi.Size()
		}
	}
	return n, err
}

// makeRoom has datasets that are not open give back need bytes of segments, the one that was not used for the
// longest time first, and reports whether any did.
func (h *Host) makeRoom(need int64) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	facts, err := h.catalog.Datasets()
	if err != nil {
		h.log.Error("datasets cannot be listed; none makes room", "cause", err)
		return false
	}
	slices.SortFunc(facts, func(a, b catalog.Dataset) int { return a.LastUsed.Compare(b.LastUsed) })
	byID := map[[16]byte]catalog.Dataset{}
	var candidates [][16]byte // those that the catalog does not know, of which nobody can say when they were used, first
	for _, d := range facts {
		byID[d.ID] = d
	}
	for id := range h.idle {
		if _, known := byID[id]; !known {
			candidates = append(candidates, id)
		}
	}
	for _, d := range facts {
		if h.idle[d.ID] > 0 && !d.Pinned {
			candidates = append(candidates, d.ID)
		}
	}
	freed := int64(0)
	for _, id := range candidates {
		if freed >= need {
			break
		}
		if h.open[id] != nil { // it is being opened
			continue
		}
		before := h.idle[id]
		segments, err := h.cache.GiveBack(h.datasetDir(id), segment.Options{Key: h.key, MaxBytes: h.cache.Budget().Limit(), Index: h.catalog.Index(id), Logger: h.log}, need-freed)
		if err != nil {
			h.log.Error("a dataset that is not open cannot make room", "source", byID[id].Source, "cause", err)
		}
		left := h.countIdle(id)
		if freed += before - left; segments > 0 {
			h.log.Warn("cached data of a dataset that is not open was given back, since another needs the room (pin it, or raise --cache-size)", "source", byID[id].Source,
				"gave_back", humanize.IBytes(uint64(before-left)), "segments", segments, "left", humanize.IBytes(uint64(left)))
		}
	}
	return freed > 0
}

// countIdle counts what a dataset that is not open has on disk. h.mu is held.
func (h *Host) countIdle(id [16]byte) (n int64) {
	n, _ = folderBytes(h.datasetDir(id))
	h.cache.Budget().Take(n)
	h.cache.Budget().Give(h.idle[id])
	if h.idle[id] = n; n == 0 {
		delete(h.idle, id)
	}
	return n
}

// removeSegments deletes what an idle dataset keeps on disk. h.mu is held.
func (h *Host) removeSegments(id [16]byte) error {
	if _, ok := h.idle[id]; !ok {
		return nil
	}
	err := os.RemoveAll(h.datasetDir(id))
	h.countIdle(id)
	return err // the segments' tables go when the dataset is opened next
}

// DatasetInfo is what the cache directory holds of one dataset.
type DatasetInfo struct {
	catalog.Dataset
	Open      bool
	Users     int   // mounts and feeds
	DiskBytes int64 // of its segments
	Kept      int   // extents kept; open datasets only
	Extents   int
}

// Datasets returns what the cache directory holds, by source.
func (h *Host) Datasets() ([]DatasetInfo, error) {
	facts, err := h.catalog.Datasets()
	if err != nil {
		return nil, err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	var infos []DatasetInfo
	for _, d := range facts {
		info := DatasetInfo{Dataset: d, DiskBytes: h.idle[d.ID]}
		if e := h.open[d.ID]; e != nil && e.cur.Load() != nil {
			v := e.cur.Load()
			info.Open, info.Users, info.DiskBytes = true, e.users, v.volume.Stats().DiskUsed
			info.Kept, info.Extents = v.volume.Kept()
		}
		infos = append(infos, info)
	}
	slices.SortFunc(infos, func(a, b DatasetInfo) int { return strings.Compare(a.Source, b.Source) })
	return infos, nil
}

// Find returns the open dataset with this id, in hex.
func (h *Host) Find(id string) (*Engine, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, e := range h.open {
		if hex.EncodeToString(e.dataset[:]) == id && e.cur.Load() != nil {
			return e, nil
		}
	}
	return nil, fmt.Errorf("no dataset %s is open", id)
}

// users returns how many mounts and feeds there are.
func (h *Host) users() (n int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, e := range h.open {
		n += e.users
	}
	return n
}

// Fetched counts the extents that were fetched from stores, or that somebody began to fetch.
func (h *Host) Fetched() int64 {
	c := h.cache.Stats()
	return c.Prefetched + c.Misses
}

// DiskUsage returns the bytes that segments take, and may take, together.
func (h *Host) DiskUsage() (used, limit int64) {
	return h.cache.Budget().Used(), h.cache.Budget().Limit()
}

// FindDataset returns the dataset that text names: a source as the user wrote it, its canonical
// name, or the first digits of the dataset's id.
func (h *Host) FindDataset(text string) (DatasetInfo, error) {
	all, err := h.Datasets()
	if err != nil {
		return DatasetInfo{}, err
	}
	var found []DatasetInfo
	named := text
	if src, err := objstore.ParseSource(text); err == nil {
		named = src.String()
	}
	for _, d := range all {
		plain, _, _ := strings.Cut(d.Source, "?")
		if d.Source == text || plain == named || len(text) >= 4 && strings.HasPrefix(hex.EncodeToString(d.ID[:]), text) {
			found = append(found, d)
		}
	}
	switch len(found) {
	case 1:
		return found[0], nil
	case 0:
		return DatasetInfo{}, fmt.Errorf("no dataset %q in %s (`shoal cache ls %s` lists them)", text, h.cfg.CacheDir, h.cfg.CacheDir)
	}
	return DatasetInfo{}, fmt.Errorf("%q names %d datasets in %s (give the first digits of the id that `shoal cache ls` shows)", text, len(found), h.cfg.CacheDir)
}

// Remove deletes what the cache directory holds of a dataset, which must not be open.
func (h *Host) Remove(id [16]byte) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if e := h.open[id]; e != nil {
		return fmt.Errorf("%s is open (unmount it first)", e.source)
	}
	if err := h.removeSegments(id); err != nil {
		return err
	}
	if err := h.catalog.Forget(id); err != nil {
		return err
	}
	_, err := h.catalog.GC(h.versions()...)
	return err
}

// versions returns the versions of manifests and layouts that are open. h.mu is held.
func (h *Host) versions() (versions []string) {
	for _, e := range h.open {
		versions = append(versions, e.openVersions()...)
	}
	return versions
}

// Pin keeps a dataset's segments from being removed while it is not open, or allows that again.
func (h *Host) Pin(id [16]byte, pinned bool) error { return h.catalog.SetPinned(id, pinned) }

// SetQuota bounds what a dataset may keep on disk; 0 is no bound but the cache's. An open dataset
// that keeps more gives segments up.
func (h *Host) SetQuota(id [16]byte, n int64) error {
	if err := h.catalog.SetQuota(id, n); err != nil {
		return err
	}
	h.mu.Lock()
	e := h.open[id]
	h.mu.Unlock()
	if e != nil {
		e.setQuota(n)
	}
	return nil
}

// limitHeap leaves of --memory to Go's heap what manifests and layouts, which lie beside it, do not take. h.mu is
// held, or h is new.
func (h *Host) limitHeap() { debug.SetMemoryLimit(h.cfg.Memory - h.offHeap) }

// reserve takes an open dataset's metadata out of memory, offHeap of it beside Go's heap, and disk, and refuses
// where it does not fit.
func (h *Host) reserve(memory, offHeap, disk int64, files int) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	ledger := h.cache.Ledger()
	if ledger.Limit()-memory < minLedger || !ledger.Withhold(memory) {
		need := memoryFor(h.taken() + memory + minLedger)
		return fmt.Errorf("--memory %s is too little for %d files: metadata takes %s and the daemon %s; give at least %s",
			humanize.IBytes(uint64(h.cfg.Memory)), files, humanize.IBytes(uint64(memory)), humanize.IBytes(overhead), RoundUp(need))
	}
	h.metadata += disk
	h.offHeap += offHeap
	h.limitHeap()
	h.cache.Budget().SetLimit(h.diskLimit())
	return nil
}

// taken returns what metadata takes of the ledger. h.mu is held.
func (h *Host) taken() int64 { return ledgerOf(h.cfg.Memory) - h.cache.Ledger().Limit() }

// release gives back what reserve took.
func (h *Host) release(memory, offHeap, disk int64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.cache.Ledger().Withhold(-memory)
	h.metadata -= disk
	h.offHeap -= offHeap
	h.limitHeap()
	h.cache.Budget().SetLimit(h.diskLimit())
}

func (h *Host) syncLoop(ctx context.Context) {
	t := time.NewTicker(syncInterval)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
			if err := h.cache.Sync(); err != nil {
				h.log.Error("cache not synced to disk", "cause", withRemedy(err, h.cfg.CacheDir))
			}
		}
	}
}

// Close leaves the cache directory to the next owner. The datasets must have been closed.
func (h *Host) Close() error {
	h.mu.Lock()
	h.closed = true
	open := len(h.open)
	h.mu.Unlock()
	if open > 0 {
		return fmt.Errorf("engine: %d datasets are still open", open)
	}
	if h.stop != nil {
		h.stop()
		h.background.Wait()
	}
	var err error
	if h.cache != nil {
		err = h.cache.Close()
	}
	if h.catalog != nil {
		err = errors.Join(err, h.catalog.Close())
	}
	if h.unlock != nil {
		err = errors.Join(err, h.unlock())
		h.audit.Write(audit.Event{Event: "cache_close"})
	}
	return errors.Join(err, h.audit.Close())
}
