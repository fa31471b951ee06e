package cache

import (
	"bytes"
	"context"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/cache/segment"
	"github.com/shoalfs/shoal/lab/rig/memstore"
)

func (v *Volume) keptFiles() (files []int) {
	for e := range v.locs {
		if v.loc(uint32(e)) != 0 {
			files = append(files, v.fileOf(uint32(e)))
		}
	}
	return slices.Compact(files)
}

// settled waits until nothing is on its way, or waits to be written.
func settled(t interface {
	Helper()
	Fatalf(format string, args ...any)
}, c *Cache) {
	t.Helper()
	eventually(t, "what was read is in its place", func() bool {
		for _, ds := range c.open() {
			for _, v := range ds.list() {
				v.mu.Lock()
				n := len(v.flights)
				v.mu.Unlock()
				if n > 0 {
					return false
				}
			}
		}
		return c.ring.dirty() == 0
	})
}

// Only what is admitted is kept while any of it is missing; then, first come, others.
func TestAdmit(t *testing.T) {
	f := newFixture(t, slices.Repeat([]int{100 << 10}, 16)...)
	dir := t.TempDir()
	open := func(disk int64, admit func(file, extent int) bool) (*Cache, *Volume) {
		c := newPatient(Options{Memory: 64 << 20, Logger: quiet})
		v := c.NewVolume(VolumeOptions{Manifest: f.m, Dataset: [16]byte{1}, Store: f.gate, Admit: admit})
		if err := v.OpenDisk(dir, segment.Options{MaxBytes: disk, SegmentSize: 256 << 10, Logger: quiet}); err != nil {
			t.Fatal(err)
		}
		return c, v
	}
	even := func(file, _ int) bool { return file%2 == 0 }
	evens := []int{0, 2, 4, 6, 8, 10, 12, 14}

	c, v := open(64<<20, even)
	checkFiles(t, v, f.bytes, 1, 3, 5, 7)
	settled(t, c)
	if kept := v.keptFiles(); len(kept) > 0 {
		t.Errorf("kept %v", kept)
	}
	c.ring.drop(nil)
	checkFiles(t, v, f.bytes, span(0, 14)...)
	settled(t, c)
	if kept := v.keptFiles(); !slices.Equal(kept, evens[:7]) {
		t.Errorf("kept %v", kept)
	}
	checkFiles(t, v, f.bytes, 14)
	settled(t, c)
	c.ring.drop(nil)
	checkFiles(t, v, f.bytes, 15, 13) // nothing of the set is missing any more
	settled(t, c)
	if kept := v.keptFiles(); !slices.Equal(kept, []int{0, 2, 4, 6, 8, 10, 12, 13, 14, 15}) {
		t.Errorf("kept %v", kept)
	}
	closeCache(t, c)

	// After a restart, with another set: what is kept stays and counts.
	c, v = open(64<<20, even)
	if n := v.admission.Load().missing.Load(); n != 0 {
		t.Errorf("%d missing", n)
	}
	v.SetAdmit(func(file, _ int) bool { return file < 3 })
	if n := v.admission.Load().missing.Load(); n != 1 {
		t.Errorf("%d missing", n)
	}
	checkFiles(t, v, f.bytes, 3, 5)
	settled(t, c)
	checkFiles(t, v, f.bytes, 1)
	settled(t, c)
	c.ring.drop(nil)
	checkFiles(t, v, f.bytes, 7)
	settled(t, c)
	if kept := v.keptFiles(); slices.Contains(kept, 3) || !slices.Contains(kept, 1) || !slices.Contains(kept, 7) {
		t.Errorf("kept %v", kept)
	}
	closeCache(t, c)
}

// A large file may be of the set in part.
func TestAdmitByExtent(t *testing.T) {
	f := newFixture(t, 3*ExtentSize+100, 100)
	c := newPatient(Options{Memory: 64 << 20, Logger: quiet})
	defer closeCache(t, c)
	v := c.NewVolume(VolumeOptions{Manifest: f.m, Dataset: [16]byte{1}, Store: f.gate, Admit: func(file, x int) bool {
		return (file+x)%2 == 1
	}})
	if err := v.OpenDisk(t.TempDir(), segment.Options{Logger: quiet}); err != nil {
		t.Fatal(err)
	}
	kept := func() (extents []int) {
		for e := range v.locs {
			if v.loc(uint32(e)) != 0 {
				extents = append(extents, e)
			}
		}
		return extents
	}
	checkFiles(t, v, f.bytes, 0)
	settled(t, c)
	if got := kept(); !slices.Equal(got, []int{1, 3}) || v.admission.Load().missing.Load() != 1 {
		t.Errorf("kept %v, %d missing", got, v.admission.Load().missing.Load())
	}
	checkFiles(t, v, f.bytes, 1)
	settled(t, c)
	c.ring.drop(nil)
	checkFiles(t, v, f.bytes, 0) // nothing of the set is missing any more
	settled(t, c)
	if got := kept(); !slices.Equal(got, span(0, 5)) {
		t.Errorf("kept %v", got)
	}
}

// What is not of the set takes free space, and nobody is asked to make room for it.
func TestExtrasTakeFreeSpaceOnly(t *testing.T) {
	f := newFixture(t, slices.Repeat([]int{100 << 10}, 16)...)
	var asked atomic.Int64
	c := newPatient(Options{Memory: 64 << 20, Disk: 1 << 20, Logger: quiet, OnFull: func(int64) bool {
		asked.Add(1)
		return false
	}})
	defer closeCache(t, c)
	v := c.NewVolume(VolumeOptions{Manifest: f.m, Dataset: [16]byte{1}, Store: f.gate, Admit: func(file, _ int) bool {
		return file < 4
	}})
	if err := v.OpenDisk(t.TempDir(), segment.Options{SegmentSize: 256 << 10, Logger: quiet}); err != nil {
		t.Fatal(err)
	}
	checkFiles(t, v, f.bytes, span(0, 4)...)
	settled(t, c)
	checkFiles(t, v, f.bytes, span(4, 16)...)
	settled(t, c)
	if kept, n := v.keptFiles(), asked.Load(); len(kept) < 8 || !slices.Equal(kept[:4], span(0, 4)) || n != 0 {
		t.Errorf("kept %v, asked %d times", kept, n)
	}
	// One of the set that was lost may ask.
	v.unplace(2, segment.Loc(v.loc(uint32(2))))
	c.ring.drop(nil)
	checkFiles(t, v, f.bytes, 2)
	settled(t, c)
	if asked.Load() != 1 {
		t.Errorf("asked %d times", asked.Load())
	}
}

// Without a known order, scans over everything leave the kept set as it is.
func TestScanResistance(t *testing.T) {
	f := newFixture(t, slices.Repeat([]int{100 << 10}, 64)...)
	for _, memory := range []int64{1 << 20, 64 << 20} {
		c, v := f.open(t, memory, t.TempDir(), 2<<20)
		// With little memory a slow disk may miss some the first time: until it has no room for more.
		for pass := 0; pass < 20 && v.Stats().Declined == 0; pass++ {
			checkFiles(t, v, f.bytes, span(20, 64)...)
			settled(t, c)
		}
		kept := v.keptFiles()
		if len(kept) < 16 || len(kept) > 20 {
			t.Fatalf("kept %d of 100 KB in 2 MiB", len(kept))
		}
		where := make([]uint64, len(kept))
		for i, file := range kept {
			where[i] = v.loc(uint32(file))
		}
		for range 3 {
			checkFiles(t, v, f.bytes, span(0, 64)...)
			settled(t, c)
		}
		for i, file := range kept {
			if v.loc(uint32(file)) != where[i] {
				t.Errorf("file %d is kept no longer", file)
			}
		}
		if after := v.keptFiles(); !slices.Equal(after, kept) {
			t.Errorf("kept %v, now %v", kept, after)
		}
		before := f.gate.reads.Load()
		checkFiles(t, v, f.bytes, kept...)
		if n := f.gate.reads.Load() - before; n != 0 {
			t.Errorf("%d fetches of what is kept", n)
		}
		c.ring.drop(nil)
		for file := range 64 {
			if (v.Where(file, 0) > OnWay) != slices.Contains(kept, file) {
				t.Errorf("file %d: staged is %v", file, v.Where(file, 0) > OnWay)
			}
		}
		closeCache(t, c)
	}
}

// 64 readers with a cache, memory and disk, of a hundredth of the dataset.
func TestTinyCache(t *testing.T) {
	const files, size = 400, 200 << 10
	f := newFixture(t, slices.Repeat([]int{size}, files)...)
	const hundredth = files * size / 100
	dir := t.TempDir()
	c := newPatient(Options{Memory: hundredth, Disk: hundredth, Logger: quiet})
	v := f.volume(c)
	if err := v.OpenDisk(dir, segment.Options{SegmentSize: hundredth / 4, Logger: quiet}); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for r := range 64 {
		wg.Go(func() {
			p := make([]byte, size)
			for i := range 20 {
				file := (r*31 + i*(2*r+1)) % files
				if n, err := v.ReadAt(context.Background(), file, p, 0); err != nil ||
					!bytes.Equal(p[:n], f.bytes[file]) {
					t.Errorf("file %d: %d bytes, %v", file, n, err)
				}
				if i%4 == 0 {
					v.Prefetch(nil, (file+1)%files, 0, time.Time{}, nil)
				}
				v.Spend(file)
			}
		})
	}
	ended := make(chan struct{})
	go func() {
		wg.Wait()
		close(ended)
	}()
	for done := false; !done; {
		if s := c.Stats(); s.DiskUsed > hundredth || s.MemoryPeak > hundredth {
			t.Errorf("%+v", s)
			break
		}
		select {
		case <-ended:
			done = true
		case <-time.After(5 * time.Millisecond):
		}
	}
	<-ended
	closeCache(t, c)
}

// huge is a store of one object whose bytes are computed: far larger than any budget.
type huge struct {
	objstore.Reader
	o objstore.Object
}

// period is prime, so that no two extents are alike.
const period = 9_999_991

func hugeBytes(p []byte, off int64) {
	for len(p) > 0 {
		n := copy(p, noise[off%period:period])
		p, off = p[n:], off+int64(n)
	}
}

func (h huge) ReadAt(_ context.Context, o objstore.Object, p []byte, off int64) error {
	if o.Key != h.o.Key || off+int64(len(p)) > h.o.Size {
		return &objstore.Error{Op: "read", Key: o.Key, Kind: objstore.KindInvalid}
	}
	hugeBytes(p, off)
	return nil
}

func TestHugeObject(t *testing.T) {
	h := huge{o: objstore.Object{Key: "huge/object", Size: 5<<30 + 12345, ETag: "e"}}
	m, err := catalog.Build(memstore.Listing(h.o), catalog.BuildOptions{})
	if err != nil {
		t.Fatal(err)
	}
	c := newPatient(Options{Memory: 48 << 20, Disk: 40 << 20, Logger: quiet})
	v := c.NewVolume(VolumeOptions{Manifest: m, Dataset: [16]byte{1}, Store: h})
	if err := v.OpenDisk(t.TempDir(), segment.Options{Logger: quiet}); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for r := range 8 {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(5, uint64(r)))
			p, want := make([]byte, 6<<20), make([]byte, 6<<20)
			for i := range 8 {
				off := rng.Int64N(h.o.Size)
				if i == 0 {
					off = h.o.Size - 100 - int64(r)
				}
				p := p[:rng.IntN(len(p))]
				n, err := v.ReadAt(context.Background(), 0, p, off)
				want := want[:min(int64(len(p)), h.o.Size-off)]
				hugeBytes(want, off)
				if err != nil || !bytes.Equal(p[:n], want) {
					t.Errorf("%d bytes at %d: %d, %v", len(p), off, n, err)
				}
			}
		})
	}
	wg.Wait()
	settled(t, c)
	if s := c.Stats(); s.MemoryPeak > 48<<20 || s.DiskUsed > 40<<20 {
		t.Errorf("%+v", s)
	}
	if kept, extents := v.Kept(); kept == 0 || extents != 1281 {
		t.Errorf("%d of %d extents kept", kept, extents)
	}
	if _, _, err := v.Sample(context.Background(), 0); err == nil {
		t.Error("5 GiB at once")
	}
	closeCache(t, c)
}
