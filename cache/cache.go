// Package cache is the engine room: it turns reads of samples into reads of the local disk, of
// memory, or of the object store, each byte fetched once however many ask for it.
//
// The path of an extent (a file's piece of at most 4 MiB), one way and no way back:
//
//	object store ── flight ──► ring: memory ──► writer ──► keep: a record in a segment
//	 (one GET, shared by       (recycled once   (one       file, never evicted while
//	  all who wait for it)      it was read)     goroutine) the dataset stands
//
// Readers are answered from the flight, the ring or the kept record, whichever there is. An extent
// that the full disk declines stays in the ring until it was read.
//
// A kept set beats any eviction policy here, because an epoch reads each sample once: demand hit
// ratio equals the kept fraction f, where LRU gets about f²/2. First come, first kept: since the
// order is random, the first samples to arrive are a random subset, and what is missing is spread
// evenly over every later epoch.
//
// # Traps
//
//   - A reader that goes away detaches from its flight; the fetch finishes and its bytes stay.
//   - The place of an extent is looked up again under the lock before a flight starts, or two
//     readers that both just missed would fetch twice.
//   - Memory is reserved in the [Ledger] before it is allocated. A prefetch never waits for it.
package cache

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	humanize "github.com/dustin/go-humanize"
	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/cache/segment"
)

// ExtentSize is the largest piece in which a file is fetched and kept, in bytes.
const ExtentSize = segment.ExtentSize

// diskRetry is how long a disk tier that failed is left alone before it is tried again.
const diskRetry = 30 * time.Second

// cleanLimit bounds the copies in memory of what is on disk already. They save a read of the page cache
// each for a reader at the prefetcher's heels, which needs the latest hundred; more would only take
// fresh memory, whose page faults cost as much as that read.
const cleanLimit = 8 << 20

// Options configures a Cache.
type Options struct {
	Memory int64        // ledger limit in bytes
	Logger *slog.Logger // nil: slog.Default()
}

// Cache owns the ledger, the ring and, once OpenDisk was called, the segments. Its volumes share
// them. Safe for concurrent use.
type Cache struct {
	ledger *Ledger
	ring   *ring
	log    *slog.Logger

	disk      *segment.Store // nil: memory only
	writer    *writer        // to disk; nil without one
	diskDir   string
	diskLimit int64
	unchecked int64        // bytes that may be appended before the free space is looked at again
	garbage   atomic.Bool  // records were freed since room was last looked for
	diskDown  atomic.Int64 // unix nanoseconds until which the disk is left alone; 0 when it is well

	ctx    context.Context // ends at Close; flights run under it, not under their readers
	cancel context.CancelFunc
	wg     sync.WaitGroup

	mu      sync.Mutex
	closed  bool
	volumes []*Volume

	freed hooks[func()]
	lost  hooks[func(v *Volume, file int)]

	count counters
}

type counters struct {
	reads, keepHits, ringHits, joined, misses atomic.Int64
	prefetched, prefetchErrors                atomic.Int64
	stallNanos                                atomic.Int64
	corrupt, diskErrors, declined             atomic.Int64
}

// New returns a cache that holds bytes in memory only, until OpenDisk.
func New(o Options) *Cache {
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	c := &Cache{ledger: NewLedger(o.Memory), ring: newRing(min(o.Memory/4, cleanLimit)), log: o.Logger}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	c.ledger.reclaim = func(need int64) { c.ring.reclaim(need, false) }
	c.ledger.freed = c.notifyFreed
	return c
}

// Ledger returns the account of memory.
func (c *Cache) Ledger() *Ledger { return c.ledger }

// OnFreed registers f to be called whenever memory came free. f must not block.
func (c *Cache) OnFreed(f func()) (cancel func()) { return c.freed.add(f) }

func (c *Cache) notifyFreed() {
	for _, f := range c.freed.all() {
		(*f)()
	}
}

// OnLost registers f to be called when a staged extent of the file, which somebody had asked for
// ahead of time and nobody has read yet, had to give its memory to a reader who waits. f may take
// locks that are held over calls of Prefetch and Claim.
func (c *Cache) OnLost(f func(v *Volume, file int)) (cancel func()) { return c.lost.add(f) }

// evict frees need bytes if it can, also of what was fetched ahead of time. No lock of those who
// fetch ahead may be held.
func (c *Cache) evict(need int64) {
	for _, k := range c.ring.reclaim(need, true) {
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

// OpenDisk attaches the segments under dir. Records that belong to a volume of the cache become
// resident at once; the others only occupy space that may be taken from them. Segments that do not
// fit o.MaxBytes, because it was larger once, are dropped.
func (c *Cache) OpenDisk(dir string, o segment.Options) error {
	if o.Logger == nil {
		o.Logger = c.log
	}
	c.mu.Lock()
	byDataset := map[[16]byte]*Volume{}
	for _, v := range c.volumes {
		byDataset[v.dataset] = v
	}
	c.mu.Unlock()
	var unclaimed []segment.Loc
	disk, err := segment.Open(dir, o, func(rec segment.Record, loc segment.Loc) {
		if v := byDataset[rec.Dataset]; v == nil || !v.adopt(rec, loc) {
			unclaimed = append(unclaimed, loc)
		}
	})
	if err != nil {
		return err
	}
	for _, v := range byDataset {
		v.index = nil
	}
	c.disk, c.diskDir, c.diskLimit, c.writer = disk, dir, o.MaxBytes, newWriter(c)
	for _, loc := range unclaimed {
		c.free(loc)
	}
	return c.shrink()
}

// shrink drops segments until the limit holds, the one that loses least first.
func (c *Cache) shrink() error {
	for c.diskLimit > 0 && c.disk.Used() > c.diskLimit {
		least := slices.MinFunc(c.disk.Segments(), func(a, b segment.SegmentInfo) int {
			return cmp.Compare(a.Bytes-a.Garbage, b.Bytes-b.Garbage)
		})
		if err := c.dropSegment(least.ID); err != nil {
			return err
		}
		c.log.Info("cache made smaller", "limit", c.diskLimit, "dropped_bytes", least.Bytes, "dropped_records", least.Records)
	}
	return nil
}

// dropSegment deletes a segment; what it held of live records is fetched again.
func (c *Cache) dropSegment(id uint32) error {
	_, err := c.disk.DropSegment(id, nil)
	c.mu.Lock()
	volumes := c.volumes
	c.mu.Unlock()
	for _, v := range volumes {
		v.forget(id)
	}
	return err
}

// ClearDisk deletes the segments under dir, of a cache that is to hold nothing on disk any more.
func ClearDisk(dir string, o segment.Options) error {
	if _, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	disk, err := segment.Open(dir, o, nil)
	if err != nil {
		return err
	}
	for _, s := range disk.Segments() {
		_, dropErr := disk.DropSegment(s.ID, nil)
		err = errors.Join(err, dropErr)
	}
	return errors.Join(err, disk.Close())
}

// relieve gives memory to those who wait for it, as far as nobody else needs it.
func (c *Cache) relieve() {
	if need := c.ledger.pressed(); need > 0 {
		c.ring.reclaim(need, false)
	}
}

// keep appends the extent to the kept set. It returns 0 when there is no place for it. Only the
// writer calls it.
func (c *Cache) keep(rec segment.Record, payload []byte) segment.Loc {
	if !c.diskUsable() {
		return 0
	}
	err := c.checkSpace(int64(len(payload)))
	var loc segment.Loc
	if err == nil {
		loc, err = c.disk.Append(rec, payload)
	}
	if errors.Is(err, segment.ErrFull) && c.makeRoom() {
		loc, err = c.disk.Append(rec, payload)
	}
	switch {
	case err == nil:
		return loc
	case errors.Is(err, segment.ErrFull):
		c.count.declined.Add(1)
	default:
		c.diskFailed("write", err)
	}
	return 0
}

// checkEvery is how many bytes are appended between two looks at the disk's free space.
const checkEvery = 8 << 20

// checkSpace fails with ENOSPC if n bytes more would leave too little free on the disk for the
// catalog, which does not survive a full one, and for others. Only the writer calls it.
func (c *Cache) checkSpace(n int64) error {
	if c.unchecked >= n {
		c.unchecked -= n
		return nil
	}
	var st unix.Statfs_t
	if err := unix.Statfs(c.diskDir, &st); err != nil {
		return fmt.Errorf("free space of %s: %w", c.diskDir, err)
	}
	free, size := int64(st.Bavail)*st.Bsize, int64(st.Blocks)*st.Bsize
	room := free - min(64<<20, 2<<20+size/32)
	if room < n {
		return fmt.Errorf("%w: %s free of %s, some of which is left for the catalog", syscall.ENOSPC, humanize.IBytes(uint64(free)), humanize.IBytes(uint64(size)))
	}
	c.unchecked = min(room, checkEvery) - n
	return nil
}

// free gives a record up.
func (c *Cache) free(loc segment.Loc) {
	c.disk.Free(loc)
	c.garbage.Store(true)
}

// wasteful is the share of garbage from which a segment is worth dropping with the live records that
// it still has: those are fetched again.
const wasteful = 0.5

// makeRoom drops segments that hold nothing, or little, but garbage: records of other datasets, of
// older versions, and corrupt ones. It reports whether that freed anything. Where nothing was freed
// since the last look it costs one load, since every extent that finds the store full comes here.
func (c *Cache) makeRoom() bool {
	if !c.garbage.Swap(false) {
		return false
	}
	freed, err := c.disk.Reclaim()
	if err == nil && freed == 0 {
		var worst segment.SegmentInfo
		for _, s := range c.disk.Segments() {
			if !s.Active && s.Garbage > worst.Garbage {
				worst = s
			}
		}
		if worst.Bytes == 0 || float64(worst.Garbage) < wasteful*float64(worst.Bytes) {
			return false
		}
		freed, err = worst.Bytes, c.dropSegment(worst.ID)
	}
	if err != nil {
		c.diskFailed("reclaim", err)
	}
	c.garbage.Store(freed > 0) // there may be more
	return freed > 0
}

// diskUsable reports whether the disk tier may be written to.
func (c *Cache) diskUsable() bool {
	until := c.diskDown.Load()
	if until == 0 {
		return true
	}
	if time.Now().UnixNano() < until {
		return false
	}
	if c.diskDown.CompareAndSwap(until, 0) {
		c.log.Info("disk tier is tried again")
	}
	return true
}

// diskFailed takes the disk tier out of use for a while: reads go on from memory and the store.
func (c *Cache) diskFailed(op string, err error) {
	c.count.diskErrors.Add(1)
	if c.diskDown.Swap(time.Now().Add(diskRetry).UnixNano()) == 0 {
		c.log.Error("disk tier dropped; reads go on from memory and the object store",
			"op", op, "cause", err, "remedy", "free space in, or repair, the cache directory", "retry_in", diskRetry)
	}
}

// Stats is a snapshot of what the cache did and holds.
type Stats struct {
	Reads       int64         // extents read
	KeepHits    int64         // from the kept set on disk
	RingHits    int64         // from memory
	Joined      int64         // waited for a fetch that was under way already
	Misses      int64         // had to start a fetch and wait for it
	Prefetched  int64         // fetched before anybody asked
	FetchErrors int64         // prefetches that failed; a later read tries again
	Stall       time.Duration // sum of the time that readers waited for the store
	Corrupt     int64         // records that failed their checksum; refetched, never served
	DiskErrors  int64         // failed operations of the disk tier
	Declined    int64         // extents that found the kept set full
	DiskDown    bool          // the disk tier is out of use

	MemoryUsed, MemoryPeak, MemoryLimit int64 // ledger, bytes
	RingEntries                         int
	RingBytes                           int64
	DiskUsed, DiskLimit                 int64 // bytes in segment files
}

// Stats returns a snapshot.
func (c *Cache) Stats() Stats {
	s := Stats{
		Reads: c.count.reads.Load(), KeepHits: c.count.keepHits.Load(), RingHits: c.count.ringHits.Load(),
		Joined: c.count.joined.Load(), Misses: c.count.misses.Load(),
		Prefetched: c.count.prefetched.Load(), FetchErrors: c.count.prefetchErrors.Load(),
		Stall: time.Duration(c.count.stallNanos.Load()), Corrupt: c.count.corrupt.Load(),
		DiskErrors: c.count.diskErrors.Load(), Declined: c.count.declined.Load(),
		DiskDown:   c.diskDown.Load() > time.Now().UnixNano(),
		MemoryUsed: c.ledger.Used(), MemoryPeak: c.ledger.Peak(), MemoryLimit: c.ledger.Limit(),
	}
	s.RingEntries, s.RingBytes = c.ring.used()
	if c.disk != nil {
		s.DiskUsed, s.DiskLimit = c.disk.Used(), c.diskLimit
	}
	return s
}

// Sync makes what was kept so far survive a crash of the machine.
func (c *Cache) Sync() error {
	if c.disk == nil {
		return nil
	}
	return c.disk.Sync()
}

// Close ends every flight, gives all memory back and closes the segments. Readers must be gone. It
// fails when bytes are still reserved, which means that somebody holds a buffer.
func (c *Cache) Close() error {
	c.mu.Lock()
	c.closed = true
	c.mu.Unlock()
	c.cancel()
	c.wg.Wait()
	if c.writer != nil {
		c.writer.close()
	}
	c.ring.drop(nil) // also what late fetches left of retired volumes
	var err error
	if c.disk != nil {
		err = c.disk.Close()
	}
	if used := c.ledger.Used(); used != 0 {
		err = errors.Join(err, fmt.Errorf("cache: %d bytes of memory are still reserved at close", used))
	}
	return err
}
