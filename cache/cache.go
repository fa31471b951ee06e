// Package cache is the engine room: it turns reads of samples into reads of the local disk, of
// memory, or of the object store, each byte fetched once however many ask for it.
//
// The path of an extent (a file's piece of at most 4 MiB), one way and no way back:
//
//	object store ── flight ──► ring: memory ──► writer ──► keep: a record in a segment
//	 (one GET, shared by       (recycled once   (one a     file, never evicted while
//	  all who wait for it)      it was read)     dataset)   the dataset stands
//
// Readers are answered from the flight, the ring or the kept record, whichever there is. An extent
// that the full disk declines stays in the ring until it was read.
//
// A [Cache] holds several datasets, each with segments and a writer of its own ([Volume.OpenDisk]),
// under one budget of memory and one of disk. A [Volume] is one version of a dataset; its versions
// share the segments. A dataset leaves ([Volume.Close]) while the others go on.
//
// A kept set beats any eviction policy here, because an epoch reads each sample once: demand hit
// ratio equals the kept fraction f, where LRU gets about f²/2. [VolumeOptions].Admit chooses the set
// where the order is known. Without it: first come, first kept. Since the order is random, the first
// samples to arrive are a random subset, and what is missing is spread evenly over every later epoch.
// Either way nothing that is read displaces what is kept, so a scan over all files (a backup, a
// grep) costs the kept set nothing.
//
// # Giving back
//
// Where segments take more than they may (--cache-size or a quota is smaller than it was, or another dataset needs
// the room) they give back what is too much, and no more. Who gives: a dataset over its quota itself; of the
// budget of all first the dataset that is being opened, as far as it has anything beside its kept set (garbage,
// records of no version in force, files that Admit does not choose), then the datasets that are not open, the one
// that was used the longest time ago first, and only then the kept set.
//
// Within a dataset segments go whole, the coldest first. No record is read more often than another, so cold is
// what is not of the kept set: the segment goes whose share of the kept set's bytes is the least, and of equals
// the one that was written first. The last one would free more than is needed: of it as much is
// written anew as fits, the kept set's records first, then by the hash of the path, which spreads what is lost over
// every order ([segment.Store.Condense]). So what is lost beyond the need is less than a record, and
// what is written is less than a segment.
//
// # A disk in trouble
//
// The disk may be full, fail, or hang; readers never notice more than the time it takes to fetch.
// Whatever may wait for the disk runs on goroutines of the dataset, never on the reader's: reads are
// first tried against the page cache, and handed to a disk reader only where that has not all of it.
//
//	a read hangs or fails   the tier is dropped: nothing is read from it or written to it
//	a write hangs or fails  nothing is written; reads go on, each under the same watch
//
// Then the bytes come from memory and the store, and what waited to be written gives its memory
// up. The tier is used again once the operation that hung has returned and a probe (4 KiB written,
// fsynced, removed) has succeeded.
//
// # Traps
//
//   - A reader that goes away detaches from its flight; the fetch finishes and its bytes stay.
//   - The place of an extent is looked up again under the lock before a flight starts, or two
//     readers that both just missed would fetch twice.
//   - Memory is reserved in the [Ledger] before it is allocated. A prefetch never waits for it.
//   - Methods of [segment.Store] that take its lock are called by the writer alone: an operation that
//     hangs may hold that lock.
package cache

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/cache/segment"
)

// ExtentSize is the largest piece in which a file is fetched and kept, in bytes.
const ExtentSize = segment.ExtentSize

// cleanLimit bounds the copies in memory of what is on disk already. They save a read of the page cache
// each for a reader at the prefetcher's heels, which needs the latest hundred; more would only take
// fresh memory, whose page faults cost as much as that read.
const cleanLimit = 8 << 20

// ErrClosed is wrapped by the errors of reads from a dataset that was closed. It is a
// [context.Canceled].
var ErrClosed = fmt.Errorf("cache: the dataset was closed: %w", context.Canceled)

// Options configures a Cache.
type Options struct {
	// Memory is the ledger's limit in bytes.
	Memory int64
	// Disk is what the segments of all datasets may take together, in bytes; 0 is no limit but
	// that of each dataset.
	Disk int64
	// OnFull is asked for need bytes of Disk, which it may have of datasets that are not open. It
	// reports whether any came free. It is called from OpenDisk, and from a writer's goroutine, which wait
	// for it, and must not call the cache but for GiveBack. nil: never.
	OnFull func(need int64) bool
	// Logger is slog.Default() where nil.
	Logger *slog.Logger
}

// Cache owns the ledger and the ring, which its datasets share. Safe for concurrent use.
type Cache struct {
	ledger *Ledger
	ring   *ring
	log    *slog.Logger
	budget *segment.Budget // nil: no limit
	onFull func(need int64) bool

	// Constants, but for tests.
	hangAfter, retry, closeStuck, closeWait time.Duration
	statfs                                  func(dir string) (free, size int64, err error)

	mu       sync.Mutex
	closed   bool
	datasets map[[16]byte]*dataset
	gone     Counts // of datasets that were closed

	freed hooks[func()]
	lost  hooks[func(v *Volume, file int)]
}

// New returns a cache that holds bytes in memory only, until a volume opens its disk.
func New(o Options) *Cache {
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	c := &Cache{
		ledger: NewLedger(o.Memory), ring: newRing(min(o.Memory/4, cleanLimit)), log: o.Logger, onFull: o.OnFull,
		hangAfter: hangAfter, retry: diskRetry, closeStuck: closeStuck, closeWait: closeWait, statfs: freeSpace, datasets: map[[16]byte]*dataset{},
	}
	if o.Disk > 0 {
		c.budget = segment.NewBudget(o.Disk)
	}
	c.ledger.reclaim = func(need int64, class Class) {
		spare := int64(0)
		if class == ForPrefetch {
			spare = o.Memory / againShare
		}
		c.ring.reclaim(need, false, spare)
	}
	c.ledger.freed = c.notifyFreed
	return c
}

// againShare is the part of the memory in which what was read stays for those who open it again, as programs do that look
// at a file's header first, and trainers that augment a sample several times. What is fetched ahead does not take it.
const againShare = 16

// Ledger returns the account of memory.
func (c *Cache) Ledger() *Ledger { return c.ledger }

// Budget returns the account of disk, nil without one. Whoever keeps segments of datasets that are
// not open under the same limit takes their bytes from it.
func (c *Cache) Budget() *segment.Budget { return c.budget }

// OnFreed registers f to be called whenever memory came free. f must not block.
func (c *Cache) OnFreed(f func()) (cancel func()) { return c.freed.add(f) }

func (c *Cache) notifyFreed() {
	for _, f := range c.freed.all() {
		(*f)()
	}
}

// OnLost registers f to be called when a staged extent of the file, which somebody had asked for
// ahead of time and nobody has read yet, had to give its memory to a reader who waits, or to one of those
// who fetch ahead (TakeBack). f may take locks that are held over calls of Prefetch and Claim.
func (c *Cache) OnLost(f func(v *Volume, file int)) (cancel func()) { return c.lost.add(f) }

// evict frees need bytes if it can, also of what was fetched ahead of time. No lock of those who
// fetch ahead may be held.
func (c *Cache) evict(need int64) {
	c.tellLost(c.ring.reclaim(need, true, 0))
}

// reserve waits for n bytes that a reader needs. What was fetched ahead of time gives way, also what is on its
// way still, or being read, when the wait begins: nobody may ever read it.
func (c *Cache) reserve(ctx context.Context, n int64, class Class) error {
	if c.ledger.TryReserve(n, class) {
		return nil
	}
	c.evict(n)
	return c.ledger.reserve(ctx, n, class, func() { c.evict(n) })
}

func (c *Cache) tellLost(lost []extentKey) {
	for _, k := range lost {
		for _, f := range c.lost.all() {
			(*f)(k.v, k.v.fileOf(k.extent))
		}
	}
}

// TryReserve takes n bytes of the ledger for demand and reports whether they were to be had. What
// was fetched ahead of time gives way.
func (c *Cache) TryReserve(n int64) bool {
	if c.ledger.TryReserve(n, ForDemand) {
		return true
	}
	c.evict(n)
	return c.ledger.TryReserve(n, ForDemand)
}

// relieve gives memory to those who wait for it, as far as nobody else needs it.
func (c *Cache) relieve() {
	if need := c.ledger.pressed(); need > 0 {
		c.ring.reclaim(need, false, 0)
	}
}

// get returns an extent that is in memory, of which n bytes are to be read, with a reference for the caller, or nil.
func (c *Cache) get(k extentKey, n int) *Buffer {
	b, freed := c.ring.get(k, n)
	if freed {
		c.relieve()
		c.notifyFreed() // spent bytes are as good as free to a prefetch
	}
	return b
}

func freeSpace(dir string) (free, size int64, err error) {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return 0, 0, err
	}
	return int64(st.Bavail) * st.Bsize, int64(st.Blocks) * st.Bsize, nil
}

type counters struct {
	keepHits, ringHits, joined, misses atomic.Int64
	prefetched, prefetchErrors         atomic.Int64
	stallNanos                         atomic.Int64
	corrupt, diskErrors, declined      atomic.Int64
	handed, gaveUp                     atomic.Int64
	readBytes                          atomic.Int64
}

func (c *counters) snapshot() Counts {
	n := Counts{
		KeepHits: c.keepHits.Load(), RingHits: c.ringHits.Load(), Joined: c.joined.Load(), Misses: c.misses.Load(),
		Prefetched: c.prefetched.Load(), FetchErrors: c.prefetchErrors.Load(), Stall: time.Duration(c.stallNanos.Load()),
		Corrupt: c.corrupt.Load(), DiskErrors: c.diskErrors.Load(), Declined: c.declined.Load(),
		DiskWaits: c.handed.Load(), DiskGaveUp: c.gaveUp.Load(), ReadBytes: c.readBytes.Load(),
	}
	n.Reads = n.KeepHits + n.RingHits + n.Joined + n.Misses
	return n
}

// Counts is what was done since the start.
type Counts struct {
	Reads       int64         // extents read
	KeepHits    int64         // from the kept set on disk
	RingHits    int64         // from memory
	Joined      int64         // waited for a fetch that was under way already
	Misses      int64         // had to start a fetch and wait for it
	Prefetched  int64         // fetched before anybody asked
	FetchErrors int64         // prefetches that failed; a later read tries again
	Stall       time.Duration // sum of the time that readers waited for the store
	Corrupt     int64         // records that failed their checksum; refetched, never served
	DiskErrors  int64         // failed operations of the disk tier, hangs among them
	Declined    int64         // extents that found the kept set full
	DiskWaits   int64         // pieces of at most 256 KiB that the page cache did not have
	DiskGaveUp  int64         // reads that waited too long for the disk and went to the store
	ReadBytes   int64         // given to readers
}

func (n *Counts) add(m Counts) {
	n.Reads += m.Reads
	n.KeepHits += m.KeepHits
	n.RingHits += m.RingHits
	n.Joined += m.Joined
	n.Misses += m.Misses
	n.Prefetched += m.Prefetched
	n.FetchErrors += m.FetchErrors
	n.Stall += m.Stall
	n.Corrupt += m.Corrupt
	n.DiskErrors += m.DiskErrors
	n.Declined += m.Declined
	n.DiskWaits += m.DiskWaits
	n.DiskGaveUp += m.DiskGaveUp
	n.ReadBytes += m.ReadBytes
}

// DiskStats is the state of a disk tier, or of all together.
type DiskStats struct {
	DiskUsed, DiskLimit int64  // bytes in segment files
	DiskDown            bool   // out of use, for writing at least
	DiskReason          string // why: "hang", "full" or "error", with the operation
	DiskQueued          int    // extents that are still to be written
}

// Stats is a snapshot of what the cache did and holds, over all datasets.
type Stats struct {
	Counts
	DiskStats

	MemoryUsed, MemoryPeak, MemoryLimit         int64 // ledger, bytes
	MemoryDemand, MemoryPrefetch, MemoryBatches int64 // of MemoryUsed, by class
	MemoryWaiting                               int   // reservations that wait
	RingEntries                                 int
	RingBytes                                   int64
}

// VolumeStats is a snapshot of what one dataset did and holds.
type VolumeStats struct {
	Counts
	DiskStats

	Kept, Extents int // extents of this version on disk, and all
}

// Stats returns a snapshot. It never waits for the disk.
func (c *Cache) Stats() Stats {
	s := Stats{MemoryUsed: c.ledger.Used(), MemoryPeak: c.ledger.Peak(), MemoryLimit: c.ledger.Limit()}
	s.MemoryDemand, s.MemoryPrefetch, s.MemoryBatches, s.MemoryWaiting = c.ledger.classes()
	s.RingEntries, s.RingBytes = c.ring.used()
	c.mu.Lock()
	defer c.mu.Unlock()
	s.Counts = c.gone
	for _, ds := range c.datasets {
		s.add(ds.count.snapshot())
		if d := ds.disk.Load(); d != nil {
			one := d.stats()
			s.DiskUsed += one.DiskUsed
			s.DiskLimit += one.DiskLimit
			s.DiskDown = s.DiskDown || one.DiskDown
			s.DiskQueued += one.DiskQueued
			if s.DiskReason == "" {
				s.DiskReason = one.DiskReason
			}
		}
	}
	if c.budget != nil {
		s.DiskUsed, s.DiskLimit = c.budget.Used(), c.budget.Limit()
	}
	return s
}

// open returns the datasets.
func (c *Cache) open() []*dataset {
	c.mu.Lock()
	defer c.mu.Unlock()
	all := make([]*dataset, 0, len(c.datasets))
	for _, ds := range c.datasets {
		all = append(all, ds)
	}
	return all
}

// Sync makes what was kept so far survive a crash of the machine. It fails where a disk takes too
// long.
func (c *Cache) Sync() error {
	var errs []error
	for _, ds := range c.open() {
		if d := ds.disk.Load(); d != nil {
			errs = append(errs, d.sync())
		}
	}
	return errors.Join(errs...)
}

// Close closes every dataset and gives all memory back. Readers must be gone. It fails when bytes
// are still reserved, which means that somebody holds a buffer. A disk that hangs is left behind, and
// reported.
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
