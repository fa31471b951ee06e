package cache

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	humanize "github.com/dustin/go-humanize"

	"github.com/shoalfs/shoal/cache/segment"
	"github.com/shoalfs/shoal/internal/killpoint"
	"github.com/shoalfs/shoal/internal/pause"
)

const (
	// hangAfter is how long a disk operation may take before it counts as hanging. A working disk answers a read
	// within 100 ms even with a full queue, and the kernel delays a writer that dirties pages too fast by at most 200
	// ms at a time. Ten times as long means a device reset, a dead network disk or a frozen volume, and these last
	// half a minute. Giving up too early costs some requests to the store; each reader waits this long at most once.
	hangAfter = 2 * time.Second
	// diskRetry is how long a failed disk tier is left alone before it is probed.
	diskRetry = 30 * time.Second
	// closeWait bounds the fsync at close, of some GiB of segments in the page cache.
	closeWait = 60 * time.Second
	// closeStuck bounds the wait at close for a hanging disk: it may yet answer; unwritten data is fetched again.
	closeStuck = 5 * hangAfter
	// wasteful is the share of garbage from which a segment is rewritten without it.
	wasteful = 0.5
	// askEvery is how long the host is not asked again after it could not free space: otherwise every extent that
	// finds the store full would ask.
	askEvery = 5 * time.Second
)

// disk is the segments of one dataset, the goroutines that wait for them, and their health.
type disk struct {
	c     *Cache
	ds    *dataset
	dir   string
	fs    segment.FS
	store *segment.Store

	writer  *writer
	late    *time.Timer   // reports what the writer does that takes too long
	reading chan struct{} // holds one a read under way
	wg      sync.WaitGroup
	synced  chan struct{} // holds one while no sync is under way

	noReads, noWrites atomic.Bool  // trouble
	limit             atomic.Int64 // of the store, as it is to be
	freed, garbage    atomic.Bool  // records were freed since empty segments were last looked for, and wasteful ones
	chosen            atomic.Bool  // outside is to be counted again
	plain             atomic.Bool  // a restored file is to be written: one at a time, as it is in memory until then

	health

	// What only the writer touches.
	outside  []share // to be rewritten for the room of what is outside the sets; see evict
	askAgain time.Time
}

// health says whether the tier is in use, and what it waits for.
type health struct {
	stuck atomic.Int64 // operations that hang

	mu     sync.Mutex
	reason string    // "" when all is well, and otherwise it is probed
	back   time.Time // since when the tier is in use again
}

// OpenDisk attaches the dataset's segments, under dir. Records that belong to the volume become resident at once; the
// others only occupy space that may be reclaimed. All versions of the dataset write to the same segments. Data beyond
// o.MaxBytes or the cache's budget, from a time when these were larger, is given back.
func (v *Volume) OpenDisk(dir string, o segment.Options) error {
	ds, c := v.ds, v.ds.c
	o.Logger = cmp.Or(o.Logger, c.log)
	o.Budget = c.budget
	ds.opening.Lock()
	defer ds.opening.Unlock()
	if !ds.enter() {
		return ErrClosed
	}
	defer ds.flights.Done()
	if ds.disk.Load() != nil {
		return fmt.Errorf("cache: the segments of this dataset are open already, not opening %s", dir)
	}
	a := adoption{v: v}
	store, err := segment.Open(dir, o, a.visit)
	if err != nil {
		return err
	}
	d := &disk{
		c: c, ds: ds, dir: dir, fs: cmp.Or(o.FS, segment.OS), store: store,
		reading: make(chan struct{}, maxDiskReaders), synced: make(chan struct{}, 1),
	}
	d.synced <- struct{}{}
	d.limit.Store(o.MaxBytes)
	d.chosen.Store(true)
	d.late = time.AfterFunc(time.Hour, func() {
		d.stuck.Add(1)
		d.heed("write", fmt.Errorf("%w within %v", errHangs, c.hangAfter))
	})
	d.late.Stop()
	for _, loc := range a.finish() {
		d.free(loc)
	}
	if err := d.shrink(); err != nil {
		v.forget(func(segment.Loc) bool { return true })
		return errors.Join(err, store.Close())
	}
	d.writer = newWriter(d)
	ds.disk.Store(d)
	return nil
}

// SetQuota limits the segments of the volume's dataset, in bytes; 0 means no limit but the cache's. It takes effect
// soon and asynchronously: dropping segments may wait for the disk.
func (v *Volume) SetQuota(n int64) {
	if d := v.ds.disk.Load(); d != nil {
		d.limit.Store(n)
		d.writer.start(d.enforce)
	}
}

// enforce applies a changed quota, or a changed set. Only the writer calls it.
func (d *disk) enforce() {
	d.store.SetMaxBytes(d.limit.Load())
	for _, v := range d.ds.list() { // an extent that is not of the set any more gets no more granules
		d.emptySlots(v, func(e uint32) bool { return !v.Chooses(v.Numbered(int(e))) })
	}
	d.heed("shrink", d.shrink())
	d.requeue()
}

func (d *disk) stats() DiskStats {
	s := DiskStats{DiskUsed: d.store.Used(), DiskLimit: d.limit.Load(), DiskQueued: int(d.writer.depth.Load())}
	d.mu.Lock()
	defer d.mu.Unlock()
	s.DiskReason, s.DiskDown = d.reason, d.reason != ""
	return s
}

func (d *disk) free(loc segment.Loc) {
	d.store.Free(loc)
	d.freed.Store(true)
	d.garbage.Store(true)
}

// forget drops the places of the records whose segments are gone.
func (d *disk) forget() { d.ds.forget(func(loc segment.Loc) bool { return !d.store.Has(loc) }) }

// void frees a record for good, whose bytes are wrong though its checksums are right. It returns when that is on disk.
func (d *disk) void(ctx context.Context, loc segment.Loc) error {
	var failed error
	if err := d.writer.do(ctx, func() {
		failed = d.store.Void(loc)
		d.free(loc)
	}); err != nil {
		return err
	}
	return failed
}

// keep puts an extent on disk, if it is to be there and fits. What is beside the kept set uses free space only. Only
// the writer calls it.
func (d *disk) keep(k extentKey, buf *buffer) bool {
	v := k.v
	file, x := v.Numbered(int(k.extent()))
	if !v.wanted(file, x) {
		return false
	}
	loc := d.appendInRoom(k, buf.data)
	if loc == 0 {
		return false
	}
	if !v.Chooses(file, x) {
		d.chosen.Store(true)
	}
	killpoint.Pass("cache.write.appended")
	d.place(k, loc, buf.coded)
	if v.Extents(file) > 1 {
		d.emptySlot(k, false)
	}
	return true
}

// appendInRoom appends a record of the extent, in free space or in what is freed for it. Only the writer calls it.
func (d *disk) appendInRoom(k extentKey, payload []byte) segment.Loc {
	rec := k.describe(len(payload))
	return d.append(rec, payload, func() (segment.Loc, error) {
		if d.freeUp(!k.v.Chooses(k.v.Numbered(int(k.extent()))), int64(len(payload))) {
			return d.store.Append(rec, payload)
		}
		return 0, segment.ErrFull
	})
}

// place makes a record that was appended the extent's. Only the writer calls it.
func (d *disk) place(k extentKey, loc segment.Loc, coded int) {
	if k.v.move(k.extent(), 0, loc, coded) {
		killpoint.Pass("cache.write.placed")
	} else {
		d.free(loc)
	}
}

// append appends a record, if the disk is in use, or has full do it if the store is full; nil: nobody does. It returns
// 0 if it did not. Only the writer calls it.
func (d *disk) append(rec segment.Record, payload []byte, full func() (segment.Loc, error)) (loc segment.Loc) {
	if d.noWrites.Load() {
		return 0
	}
	err := d.checkSpace(int64(len(payload)))
	if err == nil {
		loc, err = d.store.Append(rec, payload)
	}
	if errors.Is(err, segment.ErrFull) && full != nil {
		loc, err = full()
	}
	switch {
	case err == nil:
		return loc
	case errors.Is(err, segment.ErrFull):
		count(&d.ds.count.Declined, 1)
	case !errors.Is(err, segment.ErrClosed):
		d.heed("write", err)
	}
	return 0
}

// errNoRoom says that too little free space is left on the disk for the catalog and for others.
var errNoRoom = fmt.Errorf("%w", syscall.ENOSPC)

// checkSpace fails with errNoRoom if n bytes more do.
func (d *disk) checkSpace(n int64) error {
	room, err := d.room()
	if err == nil && room < n {
		err = fmt.Errorf("%w: only %s free on the disk of %s beyond the reserve for the catalog",
			errNoRoom, humanize.IBytes(uint64(max(room, 0))), d.dir)
	}
	return err
}

// room returns how many bytes of the disk may be written to.
func (d *disk) room() (int64, error) {
	free, size, err := d.c.statfs(d.dir)
	if err != nil {
		return 0, fmt.Errorf("free space of %s: %w", d.dir, err)
	}
	return free - min(64<<20, 2<<20+size/32), nil
}

// freeUp drops segments that hold only garbage (records of other datasets, of older versions, corrupt ones). Unless the
// n bytes are beside the kept set it else rewrites one that holds much of it, or makes room of what is outside the set,
// if that yields, or asks the host. It reports whether to try again. It costs nothing if nothing was freed since the
// last call: every extent that finds the store full comes here.
func (d *disk) freeUp(extra bool, n int64) bool {
	if d.freed.Swap(false) {
		n, err := d.store.Reclaim()
		if d.heed("reclaim", err); n > 0 {
			return true
		}
	}
	if extra {
		return false
	}
	if d.garbage.Swap(false) && d.rewriteWasteful(wasteful) {
		return true
	}
	freed, err := d.evict(n)
	d.heed("reclaim", err)
	return freed > 0 || d.ask(n)
}

// rewriteWasteful rewrites the segment with most garbage without it, if that is such a share, and reports whether it
// did. The one in use is left, unless any garbage is to go.
func (d *disk) rewriteWasteful(share float64) bool {
	var worst segment.SegmentInfo
	for _, s := range d.store.Segments() {
		if (!s.Active || share == 0) && s.Garbage > worst.Garbage {
			worst = s
		}
	}
	if worst.Bytes == 0 || float64(worst.Garbage) < share*float64(worst.Bytes) || !d.purge(worst.ID) {
		return false
	}
	d.garbage.Store(true) // there may be more
	return true
}

// overhead is more than an extent's headers and padding.
const overhead = 16 << 10

// ask asks the host for space if n bytes do not fit the cache's budget. It asks for a whole segment: more extents
// will follow, and a dataset that gives space back rewrites up to a segment.
func (d *disk) ask(n int64) bool {
	if d.c.over(n+overhead) <= 0 || time.Now().Before(d.askAgain) {
		return false
	}
	ok := d.askHost(d.c.over(max(n+overhead, d.store.SegmentSize())))
	if !ok {
		d.askAgain = time.Now().Add(askEvery)
	}
	return ok
}

// askHost asks the host for need bytes of the budget. It may take its time.
func (d *disk) askHost(need int64) bool {
	if d.c.onFull == nil {
		return false
	}
	if d.writer != nil {
		d.end()
		defer d.begin()
	}
	return d.c.onFull(need)
}

func reasonOf(op string, err error) string {
	switch {
	case errors.Is(err, errHangs):
		return "hang: " + op
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return "full: " + op
	}
	return "error: " + op
}

// heed takes the tier out of use after an operation that failed, or only writing to it unless that was a read. It is
// used again when a probe has succeeded: reads go on from memory and the store.
func (d *disk) heed(op string, err error) {
	if err == nil {
		return
	}
	count(&d.ds.count.DiskErrors, 1)
	reads, reason := op == "read", reasonOf(op, err)
	d.mu.Lock()
	first := d.reason == "" || reads && !d.noReads.Load()
	d.noWrites.Store(true)
	if reads {
		d.noReads.Store(true)
	}
	if d.reason == "" && d.ds.ctx.Err() == nil {
		d.wg.Go(d.probe)
	}
	if first {
		d.reason = reason
	}
	d.mu.Unlock()
	// Queued writes must not keep memory from fetches.
	d.c.ring.mark(d.ds, false)
	d.c.spent()
	if first {
		d.c.log.Error("disk tier dropped; reads go on from memory and the object store", "dir", d.dir, "reason", reason,
			"cause", err, "reads_too", reads, "remedy", "free space in, or repair, the disk of the cache directory")
	}
}

// probe, on a goroutine of its own, puts the tier in use again once nothing hangs and the disk accepts a write.
func (d *disk) probe() {
	for {
		d.mu.Lock()
		wait := d.c.retry // of a disk that failed, or hangs again just after it was used again
		if strings.HasPrefix(d.reason, "hang") && time.Since(d.back) >= wait {
			wait = min(d.c.hangAfter/4, time.Second/2)
		}
		d.mu.Unlock()
		if pause.For(d.ds.ctx, wait) != nil {
			return
		}
		if d.stuck.Load() > 0 {
			continue
		}
		err := d.tryDisk()
		d.mu.Lock()
		was := d.reason
		if d.stuck.Load() > 0 || d.ds.ctx.Err() != nil {
			d.mu.Unlock()
			continue
		}
		if err != nil {
			d.reason = reasonOf("probe", err)
			d.mu.Unlock()
			d.c.log.Warn("disk tier is still out of use", "dir", d.dir, "cause", err)
			continue
		}
		d.reason, d.back = "", time.Now()
		d.noReads.Store(false)
		d.noWrites.Store(false)
		d.mu.Unlock()
		d.c.log.Warn("disk tier in use again", "dir", d.dir, "was", was, "over", "disk tier")
		d.requeue()
		return
	}
}

// requeue queues extents in memory that found no place on the disk before.
func (d *disk) requeue() {
	for _, k := range d.c.ring.mark(d.ds, true) {
		d.writer.add(k)
	}
}

// tryDisk writes 4 KiB to the disk and removes it again.
func (d *disk) tryDisk() (err error) {
	if err := d.checkSpace(4096); err != nil {
		return err
	}
	name := filepath.Join(d.dir, "probe")
	f, err := d.fs.OpenFile(name, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	if _, err = f.WriteAt(make([]byte, 4096), 0); err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close(), d.fs.Remove(name))
}

// sync makes kept data durable. An fsync that takes longer than closeWait, or on a disk that hangs, goes on in the
// background. The next call waits for it and then starts its own, because the earlier one may have started too early.
func (d *disk) sync() error {
	var err error
	start, ended := time.Now(), make(chan struct{})
	if d.await(d.synced, d.c.closeWait, 0) {
		d.mu.Lock()
		closing := d.ds.ctx.Err() != nil // which syncs too
		if closing {
			d.synced <- struct{}{}
		} else {
			d.wg.Go(func() {
				if err = d.store.Sync(); err != nil {
					d.forget()
				}
				close(ended)
				d.synced <- struct{}{}
			})
		}
		d.mu.Unlock()
		if closing || d.await(ended, d.c.closeWait, 0) {
			return err
		}
	}
	return fmt.Errorf("cache: fsync of %s did not finish within %v (check the disk)",
		d.dir, time.Since(start).Round(time.Second))
}

// close writes the queue and closes the segments, but does not wait for a disk that hangs. No flight or reader uses
// the disk any more, and the dataset's context has ended.
func (d *disk) close() error {
	d.mu.Lock() // whoever starts a goroutine looks at the context under it
	d.noReads.Store(true)
	d.mu.Unlock()
	var err error
	closed, others := make(chan struct{}), make(chan struct{})
	go func() {
		d.writer.close()
		err = d.store.Close()
		if f := d.writer.slots.file; f != nil {
			err = errors.Join(err, f.Close())
		}
		close(closed)
		d.wg.Wait() // they may hang though the writer did not
		close(others)
	}()
	if !d.await(d.writer.done, math.MaxInt64, d.c.closeStuck) || !d.await(closed, d.c.closeWait, d.c.closeStuck) {
		return d.leave()
	}
	if !d.await(others, d.c.closeStuck, d.c.closeStuck) {
		return errors.Join(err, d.leave())
	}
	return err
}

// await waits for ended: for so long at most, and for stuck while an operation hangs. It reports whether it has ended.
func (d *disk) await(ended <-chan struct{}, most, stuck time.Duration) bool {
	tick := time.NewTicker(max(d.c.hangAfter/4, time.Millisecond))
	defer tick.Stop()
	start := time.Now()
	for well := start; ; { // when nothing hung
		select {
		case <-ended:
			return true
		case now := <-tick.C:
			if d.stuck.Load() == 0 {
				well = now
			}
			if now.Sub(start) > most || now.Sub(well) > stuck {
				return false
			}
		}
	}
}

func (d *disk) leave() error {
	return fmt.Errorf(
		"cache: the disk of %s hangs; its segments are %w: the last records may be fetched again (check the disk)",
		d.dir, errLeftBehind)
}

// begin says that the writer does something that may hang.
func (d *disk) begin() { d.late.Reset(d.c.hangAfter) }

// end says that it has done it.
func (d *disk) end() {
	if !d.late.Stop() {
		d.stuck.Add(-1)
	}
}
