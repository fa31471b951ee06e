// Package cache serves reads of samples from memory, from the local disk, or from the object store. Each byte is
// fetched once, however many readers ask for it.
//
// An extent (a piece of a file of at most 4 MiB) moves this way:
//
//	a source ── flight ──► ring: memory ──► writer ──► keep: a record in a segment
//	 (one request for     (recycled once   (one a     file, never evicted while
//	  all who wait)        it was read)     dataset)   the dataset stands
//
// It is in its next place before it leaves the last. Reads are queries (request.go), fetches are flights (flight.go),
// and what they ask are sources (source.go): the store, other nodes, the coded copy of a recoded file.
//
// What readers read at random places of files of several extents is fetched in granules of 64 KiB (granules.go). The
// disk keeps those that an order of ranges reads, until they make an extent (partial.go).
//
// An extent that the full disk does not take stays in the ring until it was read, and then while memory has room.
//
// A [Cache] holds several datasets under one memory budget and one disk budget. Each dataset has its own segments and
// writer ([Volume.OpenDisk]). A [Volume] is one version of a dataset; the versions share the segments. One dataset
// can be closed ([Volume.Close]) while the others go on.
//
// A kept set beats any eviction policy here, because an epoch reads each sample once: the demand hit ratio equals the
// kept fraction f, where LRU gets about f²/2. If the order is known, [VolumeOptions].Admit chooses the set. Otherwise
// the first samples to arrive are kept: of a random order a random subset, so that misses spread evenly over every
// later epoch. Reads never displace kept data, so a scan of all files (a backup, a grep) does not shrink the set.
//
// # Giving back
//
// Segments exceed their limit when --cache-size or a quota was lowered, or when another dataset needs the space. Then
// exactly the excess is given back. A dataset over its quota gives back its own data. For the common budget the
// sequence is: data of the dataset being opened that is not in its kept set (garbage, records of old versions, files
// that Admit does not choose); then datasets that are not open, least recently used first; only then the kept set.
//
// Within a dataset whole segments are dropped, coldest first. All records are read equally often, so the coldest
// segment is the one with the smallest share of the kept set's bytes; among equals, the oldest. Dropping the last one
// may free too much. So as many of its records as fit are rewritten: first those of the kept set, then by the hash of
// the path, which spreads the loss over every order ([segment.Store.Condense]). So the excess loss is less than a
// record, and the rewrite less than a segment.
//
// The disk keeps some files in a shorter form: see coded.go.
//
// # One of a cluster
//
// A node keeps what it owns ([Volume.SetOwned]), and owners change. What is kept outside the set then stays until an
// extent of the set finds no room, or the limit is lowered; it serves reads until then. Segments with the smallest
// share of the set are rewritten without the rest. A restart adopts all records, whoever owns them.
//
// # A disk in trouble
//
// The disk may be full, fail, or hang; readers wait at most until a hang is detected, and for a fetch. Everything that
// may wait for the disk runs on goroutines of the dataset, never on the reader's. A read first tries the page cache;
// only if that lacks some of the bytes does it go to a disk reader.
//
//	a read hangs or fails   the tier is dropped: nothing is read from it or written to it
//	a write hangs or fails  nothing is written; reads go on, each under the same watch
//
// The bytes then come from memory and the store, and queued writes release their memory. The tier is used again after
// the operation that hung has returned and a probe (write 4 KiB, fsync, remove) has succeeded.
//
// # Traps
//
//   - A reader that goes away detaches from its flight; the fetch finishes and its bytes stay.
//   - The place of an extent is looked up again under the lock before a flight starts. Otherwise two
//     readers that both just missed would fetch it twice.
//   - A peer's request never asks a peer to fetch, and waits for no flight that does, or that waits for memory.
//   - Memory is reserved in the [Ledger] before it is allocated. A prefetch never waits for it.
//   - Only the writer calls methods of [segment.Store] that write or wait. Its lock is never held over the disk.
//
// More than 40 names are exported: the cache, its volumes and memory, what peers say to each other, and codecs.
package cache

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"reflect"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/cache/segment"
)

// ExtentSize is the largest piece in which a file is fetched and kept, in bytes.
const ExtentSize = segment.ExtentSize

// cleanLimit bounds the copies in memory of data that is on disk already. They save a page cache read each for a
// reader just behind the prefetcher, which needs the latest hundred. More use fresh memory: page faults cost as much.
const cleanLimit = 8 << 20

// ErrClosed is wrapped by errors of reads from a closed dataset. It is a [context.Canceled].
var ErrClosed = fmt.Errorf("cache: the dataset was closed: %w", context.Canceled)

// Options configures a Cache.
type Options struct {
	// Memory is the ledger's limit in bytes.
	Memory int64
	// Disk limits the segments of all datasets together, in bytes; 0 means no limit beyond those of the datasets.
	Disk int64
	// OnFull is asked to free need bytes of Disk by shrinking datasets that are not open. It reports whether any were
	// freed. OpenDisk and the writer's goroutine call it and wait for it. It must not call the cache, except GiveBack.
	// nil: never.
	OnFull func(need int64) bool
	// Logger is slog.Default() where nil.
	Logger *slog.Logger
}

// Cache owns the ledger and the ring, which its datasets share. Safe for concurrent use.
type Cache struct {
	ledger *Ledger
	ring   *ring
	log    *slog.Logger
	budget *segment.Budget
	onFull func(need int64) bool

	restoring chan struct{} // one a restore under way

	// Constant except in tests.
	hangAfter, retry, closeStuck, closeWait time.Duration
	statfs                                  func(dir string) (free, size int64, err error)

	mu       sync.Mutex
	closed   bool
	datasets map[[16]byte]*dataset
	gone     Counts // of datasets that were closed

	lost func(v *Volume, r Range)
}

// New returns a cache that holds bytes in memory only, until a volume opens its disk.
func New(o Options) *Cache {
	o.Logger = cmp.Or(o.Logger, slog.Default())
	c := &Cache{
		ledger: newLedger(o.Memory), ring: newRing(min(o.Memory/4, cleanLimit)), log: o.Logger,
		budget: segment.NewBudget(o.Disk), onFull: o.OnFull, restoring: make(chan struct{}, runtime.GOMAXPROCS(0)),
		hangAfter: hangAfter, retry: diskRetry, closeStuck: closeStuck, closeWait: closeWait, statfs: freeSpace,
		datasets: map[[16]byte]*dataset{}, lost: func(*Volume, Range) {},
	}
	c.ledger.reclaim = func(need int64, class Class) { c.reclaim(need, class != ForPrefetch, false) }
	c.ledger.idle = c.ring.idle.Load
	return c
}

// againShare is the part of memory in which spent samples stay for a second open: programs look at a file's header
// first, and some trainers augment a sample several times. Prefetches do not take it.
const againShare = 16

// Ledger returns the account of memory.
func (c *Cache) Ledger() *Ledger { return c.ledger }

// Budget returns the account of disk. A caller takes from it what segments of datasets that are not open occupy.
func (c *Cache) Budget() *segment.Budget { return c.budget }

// OnFreed has f called whenever memory was freed. f must not block. Nothing else may use the cache meanwhile.
func (c *Cache) OnFreed(f func()) { c.ledger.freed = f }

// OnLost has f called when a staged piece that was prefetched and not yet read made way for a reader or for another
// prefetcher (TakeBack). f may take locks that are held over Prefetch and Claim. Nothing else may use the cache yet.
func (c *Cache) OnLost(f func(v *Volume, r Range)) { c.lost = f }

// reclaim tries to free need bytes of what nobody needs now; with all, of what was read last, too; with hard, of all.
func (c *Cache) reclaim(need int64, all, hard bool) (lost []extentKey) {
	return c.ring.reclaim(need, c.ledger.Limit()/againShare, all, hard)
}

// evict tries to free need bytes, if necessary from prefetched data. The caller must hold no lock of a prefetcher.
func (c *Cache) evict(need int64) { c.tellLost(c.reclaim(need, true, true)) }

// reserve waits for n bytes that a reader needs. Prefetched data gives way, even if it is still in flight or being
// read when the wait begins: it may never be read.
func (c *Cache) reserve(ctx context.Context, n int64, class Class) error {
	if c.ledger.TryReserve(n, class) {
		return nil
	}
	c.evict(n)
	return c.ledger.reserve(ctx, n, class, func() { c.evict(n) })
}

// ReserveBatch waits until n bytes can be reserved for a batch of a feed, or fails with ErrTooLarge or the context's
// error. Prefetched data gives way, the latest first: the batch's own leaves the ring only once the batch has memory.
func (c *Cache) ReserveBatch(ctx context.Context, n int64) error {
	return c.ledger.reserve(ctx, n, ForBatches, func() { c.evict(c.ledger.missing(n)) })
}

func (c *Cache) tellLost(lost []extentKey) {
	for _, k := range lost {
		file, x := k.v.Numbered(int(k.extent()))
		c.lost(k.v, Range{file, x, int(k.off()), k.v.bytes(file, k.piece)})
	}
}

// TryReserve reserves n bytes for demand and reports whether it could. Prefetched data gives way.
func (c *Cache) TryReserve(n int64) bool {
	if c.ledger.TryReserve(n, ForDemand) {
		return true
	}
	c.evict(n)
	return c.ledger.TryReserve(n, ForDemand)
}

// relieve gives memory that nobody else needs to the reservations that wait.
func (c *Cache) relieve() {
	if need := c.ledger.pressed(); need > 0 {
		c.reclaim(need, true, false)
	}
}

// get returns an extent in memory in a form that will do, with a reference for the caller, who reads n bytes; or nil.
func (c *Cache) get(k extentKey, n int, f form) (b *buffer) {
	freed := false
	if f != plainForm {
		b, freed = c.ring.get(k.as(coded), n)
	}
	if b == nil && f != codedForm {
		b, freed = c.ring.get(k, n)
	}
	if freed {
		c.spent()
	}
	return b
}

// spent says that bytes in memory were spent, which a prefetch may take.
func (c *Cache) spent() { c.relieve(); c.ledger.freed() }

func freeSpace(dir string) (free, size int64, err error) {
	var st unix.Statfs_t
	err = unix.Statfs(dir, &st)
	return int64(st.Bavail) * st.Bsize, int64(st.Blocks) * st.Bsize, err
}

// Counts are totals since the start. Those of a dataset change atomically.
type Counts struct {
	Reads       int64         // extents read: the sum of the next four
	KeepHits    int64         // from the kept set on disk
	RingHits    int64         // from memory
	Joined      int64         // waited for a fetch that was under way already
	Misses      int64         // had to start a fetch and wait for it
	Prefetched  int64         // fetched before anybody asked
	FetchErrors int64         // prefetches that failed; a later read tries again
	Stall       time.Duration // sum of the time that readers waited for the store, or wait
	Corrupt     int64         // records that failed their checksum; refetched, never served
	DiskErrors  int64         // failed operations of the disk tier, hangs among them
	Declined    int64         // extents that found the kept set full
	DiskWaits   int64         // pieces of at most 256 KiB that the page cache did not have
	DiskGaveUp  int64         // reads that went to the store because the disk took too long
	ReadBytes   int64         // given to readers
	PeerBytes   int64         // fetched from other nodes
	KeptBytes   int64         // of ReadBytes, from the kept set on disk
	Restored    int64         // files restored from their coded form
	Restore     time.Duration // sum of the time that took
}

// addTo adds the counts to n, while they may change.
func (c *Counts) addTo(n *Counts) {
	from, to := reflect.ValueOf(c).Elem(), reflect.ValueOf(n).Elem()
	for i := range from.NumField() {
		more := atomic.LoadInt64((*int64)(from.Field(i).Addr().UnsafePointer()))
		to.Field(i).SetInt(to.Field(i).Int() + more)
	}
	n.Reads = n.KeepHits + n.RingHits + n.Joined + n.Misses
}

func count(c *int64, n int) { atomic.AddInt64(c, int64(n)) }

// DiskStats is the state of a disk tier, or of all together.
type DiskStats struct {
	DiskUsed, DiskLimit int64  // bytes in segment files
	DiskDown            bool   // out of use, for writing at least
	DiskReason          string // why: "hang", "full" or "error", with the operation
	DiskQueued          int    // extents that are still to be written
}

// Stats is a snapshot of activity and contents over all datasets.
type Stats struct {
	Counts
	DiskStats
	MemoryStats

	RingBytes int64
	IdleBytes int64 // of these, what nobody is known to read next
}

// VolumeStats is a snapshot of activity and contents of one dataset.
type VolumeStats struct {
	Counts
	DiskStats

	Kept, Extents int // extents of this version on disk, and all

	Coded                   int   // files of this version that are kept coded
	CodedBefore, CodedAfter int64 // their bytes, and those of their records
}

// Stats returns a snapshot. It never waits for the disk.
func (c *Cache) Stats() Stats {
	s := Stats{MemoryStats: c.ledger.stats(),
		DiskStats: DiskStats{DiskUsed: c.budget.Used(), DiskLimit: c.budget.Limit()}}
	_, s.RingBytes = c.ring.used()
	s.IdleBytes = c.ring.idle.Load()
	c.mu.Lock()
	defer c.mu.Unlock()
	s.Counts = c.gone
	for _, ds := range c.datasets {
		ds.addTo(&s.Counts)
		if d := ds.disk.Load(); d != nil {
			one := d.stats()
			s.DiskDown = s.DiskDown || one.DiskDown
			s.DiskQueued += one.DiskQueued
			s.DiskReason = cmp.Or(s.DiskReason, one.DiskReason)
		}
	}
	return s
}

func (c *Cache) open() []*dataset {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Collect(maps.Values(c.datasets))
}

// Sync makes kept data survive a crash of the machine. It fails if a disk takes too long.
func (c *Cache) Sync() (err error) {
	for _, ds := range c.open() {
		if d := ds.disk.Load(); d != nil {
			err = errors.Join(err, d.sync())
		}
	}
	return err
}

// Close closes every dataset and frees all memory. No reader may be left. It fails if bytes are still reserved, which
// means that a buffer is still referenced. A disk that hangs is not waited for, and reported.
func (c *Cache) Close() error {
	c.mu.Lock()
	c.closed = true
	c.mu.Unlock()
	all := c.open()
	errs := make([]error, len(all))
	var wg sync.WaitGroup
	for i, ds := range all {
		wg.Go(func() { errs[i] = ds.close() })
	}
	wg.Wait()
	c.ring.drop(nil)
	err := errors.Join(errs...)
	if used := c.ledger.Used(); used != 0 && !errors.Is(err, errLeftBehind) {
		err = errors.Join(err, fmt.Errorf("cache: %d bytes of memory are still reserved at close", used))
	}
	return err
}
