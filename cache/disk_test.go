package cache

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/shoalfs/shoal/cache/segment"
)

const (
	testHang  = 150 * time.Millisecond
	testRetry = 50 * time.Millisecond
)

// troubled is a cache over a disk that can be made to fail.
type troubled struct {
	*fixture
	fs   *faultFS
	dir  string
	c    *Cache
	v    *Volume
	full atomic.Bool // other processes fill the disk
}

func newTroubled(t testing.TB, memory int64, sizes ...int) *troubled {
	d := &troubled{fixture: newFixture(t, sizes...), fs: newFaultFS(), dir: t.TempDir()}
	d.open(t, memory)
	return d
}

func (d *troubled) open(t testing.TB, memory int64) {
	t.Helper()
	d.c = New(Options{Memory: memory, Logger: quiet})
	d.c.hangAfter, d.c.retry, d.c.closeWait = testHang, testRetry, time.Minute
	d.c.statfs = func(string) (free, size int64, err error) {
		if d.full.Load() {
			return 1 << 20, 1 << 30, nil
		}
		return 1 << 29, 1 << 30, nil
	}
	d.v = d.volume(d.c)
	// Small segments, so that writers also open files.
	if err := d.v.OpenDisk(d.dir,
		segment.Options{SegmentSize: 256 << 10, MaxBytes: 64 << 20, FS: d.fs, Logger: quiet}); err != nil {
		t.Fatal(err)
	}
}

func (d *troubled) check(t testing.TB, files ...int) {
	t.Helper()
	for _, i := range files {
		p := make([]byte, len(d.bytes[i]))
		if n, err := d.v.ReadAt(context.Background(), i, p, 0); err != nil || !bytes.Equal(p[:n], d.bytes[i]) {
			t.Fatalf("file %d: %d bytes of %d, %v", i, n, len(p), err)
		}
		d.v.Spend(i)
	}
}

func (d *troubled) isKept(i int) bool { return d.v.loc(d.v.extent(i, 0)) != 0 }

// keep reads the files until they are kept.
func (d *troubled) keep(t testing.TB, files ...int) {
	t.Helper()
	for _, i := range files {
		eventually(t, fmt.Sprintf("file %d is kept", i), func() bool {
			d.c.ring.reclaim(1<<40, 0, true, false) // what came while the disk was down stays in memory
			d.check(t, i)
			return d.isKept(i)
		})
	}
}

func eventually(t interface {
	Helper()
	Fatalf(format string, args ...any)
}, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("waited in vain: %s", what)
		}
	}
}

func span(from, to int) (files []int) {
	for i := from; i < to; i++ {
		files = append(files, i)
	}
	return files
}

// Whatever happens to the disk, reads are right and go on, stats tell, and the tier is used again.
func TestDiskTrouble(t *testing.T) {
	tests := []struct {
		name   string
		start  func(d *troubled)
		reason string
		reads  bool // whether what is kept must be read from the store meanwhile
	}{
		{"write ENOSPC", func(d *troubled) { d.fs.set(syscall.ENOSPC, "write") }, "full", false},
		{"quota of the disk", func(d *troubled) { d.fs.set(syscall.EDQUOT, "write", "open") }, "full", false},
		{"write EIO", func(d *troubled) { d.fs.set(syscall.EIO, "write") }, "error", false},
		{"read-only", func(d *troubled) { d.fs.set(syscall.EROFS, "write", "open", "remove") }, "error", false},
		{"read EIO", func(d *troubled) { d.fs.set(syscall.EIO, "read", "write") }, "error", true},
		{"write hangs", func(d *troubled) { d.fs.set(errHang, "write") }, "hang", false},
		{"open hangs", func(d *troubled) { d.fs.set(errHang, "open") }, "hang", false},
		{"read hangs", func(d *troubled) { d.fs.set(errHang, "read") }, "hang", true},
		{"all hangs", func(d *troubled) { d.fs.set(errHang, "read", "write", "open", "sync", "remove") }, "hang", true},
		{"others fill it", func(d *troubled) { d.full.Store(true) }, "full", false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			const size = 96 << 10
			// Memory for 24 of the 64 files: what waits for the disk must give way.
			d := newTroubled(t, 24*size, slices.Repeat([]int{size}, 64)...)
			if !tt.reads {
				// of reads: this machine may be slow, the disk is not; below the patience of eventually
				d.c.hangAfter = 20 * time.Second
			}
			d.keep(t, span(0, 8)...)
			d.c.ring.drop(nil)
			asked, handed := d.fs.ops["read"].Load(), d.c.Stats().DiskWaits
			tt.start(d)

			d.check(t, span(8, 64)...)
			d.check(t, span(0, 8)...)
			eventually(t, "stats tell", func() bool {
				s := d.c.Stats()
				return s.DiskDown && strings.HasPrefix(s.DiskReason, tt.reason)
			})
			if s := d.v.Stats(); !s.DiskDown || s.DiskErrors == 0 {
				t.Errorf("%+v", s)
			}
			if tt.reason == "hang" {
				// While something hangs nobody touches what is dropped, once what was given up has come there.
				eventually(t, "what is to be read is asked for", func() bool {
					return !tt.reads || d.fs.ops["read"].Load()-asked >= d.c.Stats().DiskWaits-handed
				})
				before := d.fs.ops["read"].Load()
				d.check(t, span(0, 8)...)
				if n := d.fs.ops["read"].Load() - before; tt.reads && n > 0 {
					t.Errorf("%d reads of a disk that hangs", n)
				}
				if d.c.Stats().DiskGaveUp > 8 {
					t.Errorf("%+v", d.c.Stats())
				}
			}
			if hits := d.v.Stats().KeepHits; !tt.reads && hits < 8 {
				t.Errorf("%d reads from a disk that can be read", hits)
			}
			// Prefetching has memory.
			for i := 8; i < 16; i++ {
				landed := make(chan error, 1)
				switch out := d.v.Prefetch(nil, i, 0, time.Time{}, func(_ int, err error) { landed <- err }); out {
				case Started:
					if err := <-landed; err != nil {
						t.Fatal(err)
					}
					d.v.Spend(i)
				case Present:
				default:
					t.Fatalf("prefetch: %v", out)
				}
			}

			d.full.Store(false)
			d.fs.heal()
			eventually(t, "the tier is used again", func() bool { return !d.c.Stats().DiskDown })
			d.keep(t, span(0, 64)...)
			closeCache(t, d.c)
			d.open(t, 24*size)
			if kept, _ := d.v.Kept(); kept != 64 {
				t.Errorf("%d records after reopening", kept)
			}
			before := d.gate.reads.Load()
			d.check(t, span(0, 64)...)
			if n := d.gate.reads.Load() - before; n > 0 && d.c.Stats().DiskErrors == 0 {
				t.Errorf("%d fetches of what is kept", n)
			}
			closeCache(t, d.c)
		})
	}
}

// A close does not wait for a disk that hangs, says so, and what is on the disk is right later.
func TestCloseWhileHung(t *testing.T) {
	for _, op := range []string{"write", "read", "sync"} {
		t.Run(op, func(t *testing.T) {
			t.Parallel()
			d := newTroubled(t, 8<<20, slices.Repeat([]int{64 << 10}, 8)...)
			d.c.closeStuck, d.c.closeWait = testHang, 2*testHang
			d.keep(t, 0, 1, 2)
			d.c.ring.drop(nil)
			d.fs.set(errHang, op)
			d.check(t, span(0, 8)...)
			if op != "sync" {
				eventually(t, "it hangs", func() bool { return d.fs.inside.Load() > 0 })
			}
			err := d.c.Close()
			if !errors.Is(err, errLeftBehind) || !strings.Contains(err.Error(), d.dir) {
				t.Errorf("close: %v", err)
			}
			d.fs.heal()
			eventually(t, "what hung ends", func() bool {
				return d.c.ledger.Used() == 0 && d.v.ds.disk.Load().stuck.Load() == 0
			})
			<-d.v.ds.disk.Load().writer.done
			eventually(t, "the store is closed", func() bool {
				return errors.Is(d.v.ds.disk.Load().store.Sync(), segment.ErrClosed)
			})
			d.open(t, 8<<20)
			d.check(t, span(0, 8)...)
			closeCache(t, d.c)
		})
	}
}

// A writer that hangs does not keep memory from those who fetch.
func TestHungWriterGivesMemoryUp(t *testing.T) {
	const size = 96 << 10
	d := newTroubled(t, 16*size, slices.Repeat([]int{size}, 40)...)
	d.fs.set(errHang, "write")
	started, next := 0, 0
	landed := make(chan error, 40)
	fill := func() {
		for next < 40 && d.v.Prefetch(nil, next, 0, time.Time{}, func(_ int, err error) { landed <- err }) == Started {
			next++
			started++
		}
		for ; started > 0; started-- {
			if err := <-landed; err != nil {
				t.Fatal(err)
			}
		}
	}
	fill()
	if next > 16 {
		t.Fatalf("%d of 16 fit", next)
	}
	for i := range next {
		d.v.Spend(i)
	}
	eventually(t, "all is prefetched", func() bool {
		before := next
		fill()
		for i := before; i < next; i++ {
			d.v.Spend(i)
		}
		return next == 40
	})
	if s := d.c.Stats(); !s.DiskDown || !strings.HasPrefix(s.DiskReason, "hang: write") {
		t.Errorf("%+v", s)
	}
	d.fs.heal()
	eventually(t, "the tier is used again", func() bool { return !d.c.Stats().DiskDown })
	closeCache(t, d.c)
}

// A sync does not wait for a disk that hangs, nor does another one pile up behind it.
func TestHungSync(t *testing.T) {
	d := newTroubled(t, 8<<20, 64<<10, 64<<10)
	d.c.closeWait = testHang
	d.keep(t, 0)
	d.fs.set(errHang, "sync")
	for range 3 {
		if err := d.c.Sync(); err == nil || !strings.Contains(err.Error(), d.dir) {
			t.Errorf("sync: %v", err)
		}
	}
	eventually(t, "the first one hangs", func() bool { return d.fs.inside.Load() > 0 })
	if n := d.fs.inside.Load(); n != 1 {
		t.Errorf("%d syncs hang", n)
	}
	d.c.closeWait = time.Minute
	d.fs.heal()
	eventually(t, "a sync succeeds", func() bool { return d.c.Sync() == nil })
	d.keep(t, 1)
	closeCache(t, d.c)
}

// A sync that finds another one under way makes durable what that one began too early for.
func TestSyncBehindAnother(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newTroubled(t, 8<<20, 64<<10, 64<<10)
		keep := func(file int) { // without a read of the disk, whose channels come from other tests
			d.check(t, file)
			if synctest.Wait(); !d.isKept(file) {
				t.Fatalf("file %d is not kept", file)
			}
		}
		keep(0)
		d.fs.set(errHang, "sync")
		syncs := make(chan error, 2)
		go func() { syncs <- d.c.Sync() }()
		synctest.Wait() // it hangs
		keep(1)
		go func() { syncs <- d.c.Sync() }()
		synctest.Wait() // it waits for the first
		d.fs.heal()
		for range 2 {
			if err := <-syncs; err != nil {
				t.Error(err)
			}
		}
		if n := d.fs.ops["sync"].Load(); n < 2 {
			t.Error("what was kept meanwhile is not durable")
		}
		closeCache(t, d.c)
	})
}

// A reader that is interrupted leaves a read that waits for the disk.
func TestInterruptedDiskRead(t *testing.T) {
	d := newTroubled(t, 8<<20, 64<<10)
	d.c.hangAfter = time.Hour
	d.keep(t, 0)
	d.c.ring.drop(nil)
	d.fs.set(errHang, "read")
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	p := make([]byte, 64<<10)
	go func() {
		_, err := d.v.ReadAt(ctx, 0, p, 0)
		done <- err
	}()
	eventually(t, "the read waits", func() bool { return d.fs.inside.Load() > 0 })
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("interrupted: %v", err)
	}
	clear(p)
	d.fs.heal()
	eventually(t, "the read ends", func() bool { return d.fs.inside.Load() == 0 })
	if !d.isKept(0) || d.c.Stats().DiskDown {
		t.Error("an interrupt cost the record, or the disk")
	}
	d.check(t, 0)
	closeCache(t, d.c)
}

// More readers than there are disk readers, some of whose reads hang for ever.
func TestManyReadersOfHungDisk(t *testing.T) {
	const n = 3 * maxDiskReaders
	d := newTroubled(t, 64<<20, slices.Repeat([]int{300 << 10}, n)...)
	d.keep(t, span(0, n)...)
	d.c.ring.drop(nil)
	d.fs.set(errHang, "read")
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() { d.check(t, i) })
	}
	wg.Wait()
	if got := d.fs.ops["read"].Load(); d.fs.inside.Load() > maxDiskReaders {
		t.Errorf("%d reads hang, %d asked", d.fs.inside.Load(), got)
	}
	d.fs.heal()
	eventually(t, "the tier is used again", func() bool { return !d.c.Stats().DiskDown })
	d.check(t, span(0, n)...)
	closeCache(t, d.c)
}

// Several datasets share one budget, and leave one by one.
func TestDatasets(t *testing.T) {
	a, b := newFixture(t, slices.Repeat([]int{128 << 10}, 32)...), newFixture(t, slices.Repeat([]int{100 << 10}, 32)...)
	dirA, dirB := t.TempDir(), t.TempDir()
	const limit = 4 << 20
	asked := make(chan int64, 1000)
	var c *Cache
	var others atomic.Int64
	c = newPatient(Options{Memory: 64 << 20, Disk: limit, Logger: quiet, OnFull: func(need int64) bool {
		asked <- need
		if have := others.Swap(0); have > 0 {
			c.Budget().Give(have)
			return true
		}
		return false
	}})
	defer closeCache(t, c)
	// What closed datasets hold makes room.
	c.Budget().Take(2 << 20)
	others.Store(2 << 20)
	open := func(f *fixture, id byte, dir string) *Volume {
		v := c.NewVolume(VolumeOptions{Manifest: f.m, Dataset: [16]byte{id}, Store: f.gate})
		if err := v.OpenDisk(dir, segment.Options{SegmentSize: 512 << 10, Logger: quiet}); err != nil {
			t.Fatal(err)
		}
		return v
	}
	read := func(f *fixture, v *Volume) {
		t.Helper()
		for i := range f.bytes {
			p := make([]byte, len(f.bytes[i]))
			if _, err := v.ReadAt(context.Background(), i, p, 0); err != nil || !bytes.Equal(p, f.bytes[i]) {
				t.Fatalf("file %d: %v", i, err)
			}
		}
		settled(t, c)
		c.ring.reclaim(1<<30, 0, true, false)
	}
	va := open(a, 1, dirA)
	read(a, va)
	if len(asked) == 0 {
		t.Error("the host was not asked to make room")
	}
	if kept, _ := va.Kept(); kept < 28 {
		t.Errorf("%d kept of 4 MiB in a budget of 4 MiB", kept)
	}
	if err := va.OpenDisk(dirB, segment.Options{Logger: quiet}); err == nil {
		t.Error("a second disk was opened")
	}
	vb := open(b, 2, dirB)
	read(b, vb)
	if kept, _ := vb.Kept(); kept > 4 {
		t.Errorf("%d kept although there was no room", kept)
	}
	if s := c.Stats(); s.DiskUsed > limit || s.DiskUsed != c.Budget().Used() || s.Reads != 64 {
		t.Errorf("%+v", s)
	}
	if s := vb.Stats(); s.Reads != 32 || s.Declined == 0 || s.Extents != 32 {
		t.Errorf("%+v", s)
	}
	// The first one leaves; the other has its room.
	if err := va.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := va.ReadAt(context.Background(), 0, make([]byte, 1), 0); !errors.Is(err, ErrClosed) ||
		!errors.Is(err, context.Canceled) {
		t.Errorf("read of a closed dataset: %v", err)
	}
	if out := va.Prefetch(nil, 1, 0, time.Time{}, nil); out != Closed {
		t.Errorf("prefetch: %v", out)
	}
	if s := c.Stats(); s.Reads != 64 {
		t.Errorf("what a closed dataset did is forgotten: %+v", s)
	}
	read(b, vb)
	if kept, _ := vb.Kept(); kept != 32 {
		t.Errorf("%d kept in an empty budget", kept)
	}
	// It comes back and finds what it had, as far as the budget reaches.
	va = open(a, 1, dirA)
	if used := c.Budget().Used(); used > limit {
		t.Errorf("%d bytes used of %d", used, limit)
	}
	read(a, va)
	// A quota that shrinks.
	vb.SetQuota(1 << 20)
	eventually(t, "the quota holds", func() bool { return vb.Stats().DiskUsed <= 1<<20 })
	read(b, vb)
	if s := vb.Stats(); s.DiskUsed > 1<<20 || s.DiskLimit != 1<<20 {
		t.Errorf("%+v", s)
	}
	vb.SetQuota(0)
	eventually(t, "it grows again", func() bool {
		read(b, vb)
		return vb.Stats().DiskUsed > 1<<20
	})
}

// dirty returns how many entries wait to be written.
func (r *ring) dirty() (n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, e := range r.entries {
		if e.dirty {
			n++
		}
	}
	return n
}

// A version that was opened later writes to the same segments and finds its records after a restart.
func TestVersionsShareTheDisk(t *testing.T) {
	d := newTroubled(t, 8<<20, 64<<10, 64<<10)
	d.keep(t, 0)
	w := d.volume(d.c)
	w.Inherit(d.v)
	d.v.Retire()
	d.v = w
	if !d.isKept(0) {
		t.Error("not inherited")
	}
	d.keep(t, 1)
	closeCache(t, d.c)
	d.open(t, 8<<20)
	defer closeCache(t, d.c)
	if kept, _ := d.v.Kept(); kept != 2 {
		t.Errorf("%d kept", kept)
	}
}

func TestScrub(t *testing.T) {
	f := newFixture(t, slices.Repeat([]int{100 << 10}, 8)...)
	dir := t.TempDir()
	c, v := f.open(t, 64<<20, dir, 64<<20)
	for i := range f.bytes {
		if _, err := v.ReadAt(context.Background(), i, make([]byte, 100<<10), 0); err != nil {
			t.Fatal(err)
		}
	}
	closeCache(t, c)
	segs, err := filepath.Glob(filepath.Join(dir, "*.seg"))
	if err != nil || len(segs) != 1 {
		t.Fatal(segs, err)
	}
	data, err := os.ReadFile(segs[0])
	if err != nil {
		t.Fatal(err)
	}
	data[bytes.Index(data, f.bytes[3][50<<10:50<<10+64])] ^= 1
	if err := os.WriteFile(segs[0], data, 0o600); err != nil {
		t.Fatal(err)
	}
	c, v = f.open(t, 64<<20, dir, 64<<20)
	bad, err := v.Scrub(context.Background(), 64<<20)
	if err != nil || bad != 1 {
		t.Errorf("%d bad, %v", bad, err)
	}
	if kept, _ := v.Kept(); kept != 7 || c.Stats().Corrupt != 1 {
		t.Errorf("%d kept, %+v", kept, c.Stats())
	}
	// Paced: 800 KB at 4 MB/s take 0.2 s, from another start, since what is right is not read twice.
	closeCache(t, c)
	c, v = f.open(t, 64<<20, dir, 64<<20)
	start := time.Now()
	if _, err := v.Scrub(context.Background(), 4<<20); err != nil || time.Since(start) < 150*time.Millisecond {
		t.Errorf("%v in %v", err, time.Since(start))
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	closeCache(t, c)
	c, v = f.open(t, 64<<20, dir, 64<<20)
	if _, err := v.Scrub(ctx, 1); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
	closeCache(t, c)
}

// TestScrubFindsHeader damages header and bytes of a record of a full segment. A few bytes of a block that was right
// when it was read are not checked again, so only the scrub can find it.
func TestScrubFindsHeader(t *testing.T) {
	const size = 100 << 10
	f := newFixture(t, slices.Repeat([]int{size}, 8)...)
	c, dir := newPatient(Options{Memory: 64 << 20, Logger: quiet}), t.TempDir()
	defer closeCache(t, c)
	v := f.volume(c)
	if err := v.OpenDisk(dir, segment.Options{SegmentSize: 256 << 10, Logger: quiet}); err != nil {
		t.Fatal(err)
	}
	d := &troubled{fixture: f, c: c, v: v}
	d.keep(t, span(0, 8)...)
	if err := c.Sync(); err != nil { // which seals it
		t.Fatal(err)
	}
	c.ring.drop(nil)
	d.check(t, 0)
	loc, _ := v.at(0)
	file, err := os.OpenFile(filepath.Join(dir, fmt.Sprintf("%08d.seg", loc.Segment())), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	data := make([]byte, 200<<10)
	if _, err := file.ReadAt(data, 0); err != nil {
		t.Fatal(err)
	}
	at := bytes.Index(data, f.bytes[0][:64])
	for _, i := range []int{bytes.LastIndex(data[:at], []byte("SHRC")), at} {
		if _, err := file.WriteAt([]byte{^data[i]}, int64(i)); err != nil {
			t.Fatal(err)
		}
	}
	if bad, err := v.Scrub(t.Context(), 64<<20); err != nil || bad != 1 {
		t.Errorf("%d bad, %v", bad, err)
	}
	if kept, _ := v.Kept(); kept != 7 {
		t.Errorf("%d kept", kept)
	}
	p := make([]byte, 10)
	if _, err := v.ReadAt(t.Context(), 0, p, 0); err != nil || !bytes.Equal(p, f.bytes[0][:10]) {
		t.Errorf("%x, %v", p, err)
	}
}

// TestReadNow: what the page cache has of the disk is read at once, and nothing else.
func TestReadNow(t *testing.T) {
	f := newFixture(t, 200<<10, 200<<10)
	c := New(Options{Memory: 64 << 20, Logger: quiet})
	v := f.volume(c)
	if err := v.OpenDisk(t.TempDir(), segment.Options{MaxBytes: 64 << 20, Logger: quiet}); err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	d := &troubled{fixture: f, c: c, v: v}
	d.keep(t, 0)
	c.ring.reclaim(1<<40, 0, true, false)
	p := make([]byte, 50<<10)
	at := func(file int, off int64) bool { return v.ReadNow(file, p, off) }
	if !at(0, 0) { // the writer's own pages are in memory, unless the file system cannot tell
		t.Skip("the file system has no RWF_NOWAIT")
	}
	before := c.Stats().KeepHits
	for _, off := range []int64{0, 1000, 150 << 10} {
		clear(p)
		if !at(0, off) || !bytes.Equal(p, f.bytes[0][off:][:len(p)]) {
			t.Errorf("wrong bytes at %d", off)
		}
	}
	if n := c.Stats().KeepHits - before; n != 3 {
		t.Errorf("%d hits are counted", n)
	}
	if at(1, 0) {
		t.Error("a file that is not on disk was read")
	}
}
