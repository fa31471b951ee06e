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

	"github.com/shoalfs/shoal/audit"
	"github.com/shoalfs/shoal/cache"
	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/cache/crypt"
	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/cache/segment"
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
}

// Host owns a cache directory and what the datasets that are open in it share: the lock, the catalog,
// the account of memory and that of the disk. Safe for concurrent use.
//
// Datasets that are not open keep their segments until another one needs the room: then they go,
// the one that was not used for the longest time first, unless they are pinned.
type Host struct {
	cfg     HostConfig
	log     *slog.Logger
	key     *crypt.Key // nil: in clear
	audit   *audit.Log // nil: none
	errs    errorRing
	catalog *catalog.Catalog
	cache   *cache.Cache
	unlock  func() error
	streams streams

	background sync.WaitGroup
	stop       context.CancelFunc

	mu       sync.Mutex
	closed   bool
	open     map[[16]byte]*Engine
	idle     map[[16]byte]int64 // bytes of segments of datasets that are not open
	metadata int64              // bytes on disk that are kept back for the open datasets' metadata
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
	// same again while its table is replaced.
	tableOnDisk = 128
	// minDisk is the least space in which keeping data on disk is worth a segment.
	minDisk = 4 << 20
	// syncInterval bounds what a crash of the machine (not of the daemon) can cost in refetches.
	syncInterval = 30 * time.Second
)

// LeastMemory is the least HostConfig.Memory, in bytes.
const LeastMemory = overhead + minLedger*4/3

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
		return nil, fmt.Errorf("--memory %s is too little for the daemon itself; give at least %s", humanize.IBytes(uint64(max(cfg.Memory, 0))), humanize.IBytes(uint64(need)))
	}
	debug.SetMemoryLimit(cfg.Memory)
	defer func() {
		if err = fullDisk(err, cfg.CacheDir); err != nil {
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
		// The collector and the size classes of buffers need about a quarter on top of live bytes.
		Memory: (cfg.Memory - overhead) * 3 / 4,
		Disk:   max(h.diskLimit(), 1), OnFull: h.evictIdle, Logger: h.log,
	})
	if err := h.findIdle(); err != nil {
		return nil, err
	}
	ctx, stop := context.WithCancel(context.Background())
	h.stop = stop
	h.background.Go(func() { h.syncLoop(ctx) })
	return h, nil
}

// fullDisk adds the remedy to an error about a full disk.
func fullDisk(err error, dir string) error {
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
		return fmt.Errorf("cache directory: %w (free space on the disk of %s, or give another --cache-dir)", err, dir)
	}
	return err
}

// diskLimit derives the segments' limit from --cache-size: metadata first. h.mu is held, or h is new.
func (h *Host) diskLimit() int64 {
	return max(0, h.cfg.CacheSize-min(catalogOnDisk, 1<<20+h.cfg.CacheSize/32)-h.metadata)
}

func (h *Host) segmentsDir() string { return filepath.Join(h.cfg.CacheDir, "segments") }

func (h *Host) datasetDir(id [16]byte) string {
	return filepath.Join(h.segmentsDir(), hex.EncodeToString(id[:]))
}

// findIdle counts what datasets left on disk, and makes the cache small enough.
func (h *Host) findIdle() error {
	if n, err := segment.Migrate(h.segmentsDir()); err != nil {
		return err
	} else if n > 0 {
		h.log.Info("segments of the older layout were moved", "count", n)
	}
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
		n, err := folderBytes(h.datasetDir(id))
		if err != nil {
			return fmt.Errorf("cache directory: %w", err)
		}
		h.idle[id] = n
		h.cache.Budget().Take(n)
	}
	if over := h.cache.Budget().Used() - h.cache.Budget().Limit(); over > 0 {
		h.evictIdle(over)
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

// evictIdle removes segments of datasets that are not open until need bytes came free, and reports
// whether any did.
func (h *Host) evictIdle(need int64) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.idle) == 0 {
		return false
	}
	facts, err := h.catalog.Datasets()
	if err != nil {
		h.log.Error("datasets cannot be listed; none is removed", "cause", err)
		return false
	}
	byID := map[[16]byte]catalog.Dataset{}
	for _, d := range facts {
		byID[d.ID] = d
	}
	var candidates [][16]byte
	for id := range h.idle {
		if !byID[id].Pinned {
			candidates = append(candidates, id)
		}
	}
	slices.SortFunc(candidates, func(a, b [16]byte) int { return byID[a].LastUsed.Compare(byID[b].LastUsed) })
	freed := int64(0)
	for _, id := range candidates {
		if freed >= need {
			break
		}
		n := h.idle[id]
		if err := h.removeSegments(id); err != nil {
			h.log.Error("the segments of a dataset that is not open cannot be removed", "source", byID[id].Source, "cause", err)
			continue
		}
		h.log.Info("segments of a dataset that is not open made room", "source", byID[id].Source, "bytes", n)
		freed += n
	}
	return freed > 0
}

// removeSegments deletes what an idle dataset keeps on disk. h.mu is held.
func (h *Host) removeSegments(id [16]byte) error {
	n, ok := h.idle[id]
	if !ok {
		return nil
	}
	err := os.RemoveAll(h.datasetDir(id))
	left, _ := folderBytes(h.datasetDir(id))
	h.cache.Budget().Give(n - left)
	if h.idle[id] = left; left == 0 {
		delete(h.idle, id)
	}
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

// reserve takes an open dataset's metadata out of memory and disk, and refuses where it does not fit.
func (h *Host) reserve(memory, disk int64, files int) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	ledger := h.cache.Ledger()
	if ledger.Limit()-memory < minLedger || !ledger.Withhold(memory) {
		need := overhead + (h.taken()+memory+minLedger)*4/3
		return fmt.Errorf("--memory %s is too little for %d files: metadata takes %s and the daemon %s; give at least %s",
			humanize.IBytes(uint64(h.cfg.Memory)), files, humanize.IBytes(uint64(memory)), humanize.IBytes(overhead), humanize.IBytes(uint64(need)))
	}
	h.metadata += disk
	h.cache.Budget().SetLimit(h.diskLimit())
	return nil
}

// taken returns what metadata takes of the ledger. h.mu is held.
func (h *Host) taken() int64 { return (h.cfg.Memory-overhead)*3/4 - h.cache.Ledger().Limit() }

// release gives back what reserve took.
func (h *Host) release(memory, disk int64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.cache.Ledger().Withhold(-memory)
	h.metadata -= disk
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
				h.log.Error("cache not synced to disk", "cause", err)
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
