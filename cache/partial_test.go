package cache

import (
	"context"
	"errors"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/cache/segment"
)

// planned fetches a range as an order does, and spends it after its reader.
func planned(t *testing.T, v *Volume, want []byte, r Range) {
	t.Helper()
	landed := make(chan error, 64)
	n, _ := v.PrefetchRange(nil, r, time.Time{}, func(_ int, err error) { landed <- err })
	for range n {
		if err := <-landed; err != nil {
			t.Fatal(err)
		}
	}
	readRight(t, v, want, r.Extent*ExtentSize+r.Off, r.N)
	v.SpendRange(r, func(int64, int64) bool { return false })
}

// What an order of ranges reads in pieces is fetched once, in memory for a part of it: the disk has each granule, and
// then the extent, which the next process finds.
func TestGranulesBecomeExtents(t *testing.T) {
	dir := t.TempDir()
	c, v, want, y := openLarge(t, 10*mib, dir)
	const n, small = 100, granuleSize / 8
	draw := rand.New(rand.NewPCG(3, 3))
	for k, i := range draw.Perm(len(want) / small) {
		if k%16 == 0 {
			settled(t, c) // else the reader drops what is still to be written
		}
		r := Range{Extent: i * small / ExtentSize, Off: i * small % ExtentSize, N: small}
		planned(t, v, want, r)
	}
	planned(t, v, want, Range{Extent: 3, Off: 0, N: 5000})
	settled(t, c)
	if got := y.bytes.Load(); got != int64(len(want)) {
		t.Errorf("%d bytes were fetched of %d", got, len(want))
	}
	if kept, all := v.Kept(); kept != all {
		t.Errorf("%d of %d extents are kept", kept, all)
	}
	if len(v.parts) != 0 {
		t.Errorf("%d extents are still in parts", len(v.parts))
	}
	d, used := v.ds.disk.Load(), int64(0)
	for _, s := range d.store.Segments() {
		used += s.Bytes
	}
	if got := d.store.Used(); got != used {
		t.Errorf("%d bytes are taken, the segments have %d", got, used)
	}
	if _, err := os.Stat(filepath.Join(dir, "granules.tmp")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the file has a name: %v", err)
	}
	before := y.requests.Load()
	c.ring.drop(nil)
	for range n {
		off := draw.IntN(len(want) - small)
		readRight(t, v, want, off, small)
	}
	if y.requests.Load() != before {
		t.Error("it is fetched again")
	}
}

// Granules on disk answer readers before the extent is whole; one that is damaged there is fetched again, and slots go
// first when the disk gives space back.
func TestGranulesOnDisk(t *testing.T) {
	c, v, want, y := openLarge(t, 10*mib, t.TempDir())
	r := Range{Extent: 1, Off: 5 * granuleSize, N: 2 * granuleSize}
	planned(t, v, want, r)
	settled(t, c)
	c.ring.drop(nil)
	fetched := func(bytes int64) {
		t.Helper()
		readRight(t, v, want, ExtentSize+r.Off+100, granuleSize)
		if got := y.bytes.Load(); got != bytes {
			t.Errorf("%d bytes were fetched, not %d", got, bytes)
		}
		settled(t, c)
		c.ring.drop(nil)
	}
	if v.WhereRange(r) != OnDisk || !v.ClaimRange(nil, r) {
		t.Errorf("it is at %d", v.WhereRange(r))
	}
	fetched(2 * granuleSize)
	d := v.ds.disk.Load()
	if _, err := d.writer.slots.file.WriteAt([]byte("other"), v.parts[1].at.granule(6)+9); err != nil {
		t.Fatal(err)
	}
	fetched(3 * granuleSize)
	fetched(3 * granuleSize)
	if n := v.Stats().Corrupt; n != 1 {
		t.Errorf("%d damaged", n)
	}
	v.SetQuota(1)
	if err := v.Flush(t.Context()); err != nil {
		t.Fatal(err)
	}
	if used := d.store.Used(); used != 0 {
		t.Errorf("%d bytes are used", used)
	}
	v.SetQuota(0)
	if err := v.Flush(t.Context()); err != nil {
		t.Fatal(err)
	}
	fetched(5 * granuleSize)
}

// damager changes the first byte of what it reads.
type damager struct{ objstore.Reader }

func (d damager) ReadAt(ctx context.Context, o objstore.Object, p []byte, off int64) error {
	err := d.Reader.ReadAt(ctx, o, p, off)
	p[0]++
	return err
}

// Wrong bytes that came into a slot are gone when all was verified.
func TestVerifyDropsSlots(t *testing.T) {
	c, v, want, y := openLarge(t, 10*mib, t.TempDir())
	right := y.Reader
	y.Reader = damager{right}
	r := Range{Extent: 1, N: granuleSize}
	landed := make(chan error, 1)
	if n, _ := v.PrefetchRange(nil, r, time.Time{}, func(_ int, err error) { landed <- err }); n != 1 {
		t.Fatalf("%d are fetched", n)
	}
	if err := <-landed; err != nil {
		t.Fatal(err)
	}
	settled(t, c)
	y.Reader = right
	c.ring.drop(nil)
	if v.WhereRange(r) != OnDisk {
		t.Fatalf("it is at %d", v.WhereRange(r))
	}
	if _, err := v.Verify(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	readRight(t, v, want, ExtentSize, 100)
}

// What is not of a new set leaves its slot.
func TestSlotsOfOthers(t *testing.T) {
	c, v, want, _ := openLarge(t, 10*mib, t.TempDir())
	for x := range 2 {
		planned(t, v, want, Range{Extent: x, N: granuleSize})
	}
	settled(t, c)
	v.SetOwned(func(_, x int) bool { return x == 1 })
	if err := v.Flush(t.Context()); err != nil {
		t.Fatal(err)
	}
	if used := v.ds.disk.Load().store.Used(); used != slotSize {
		t.Errorf("%d bytes are used", used)
	}
}

// A reader who finds a granule on a disk that is put out of use, and in use, while it looks reads it from there or from
// the store.
func TestGranulesOnADiskThatComesAndGoes(t *testing.T) {
	c, v, want, _ := openLarge(t, 10*mib, t.TempDir())
	r := Range{Extent: 1, Off: 5 * granuleSize, N: granuleSize}
	planned(t, v, want, r)
	settled(t, c)
	d, done, ended := v.ds.disk.Load(), make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		for {
			select {
			case <-done:
				return
			default:
			}
			for i := range 1000 {
				d.noReads.Store(i%2 == 0)
			}
		}
	}()
	for range 5000 {
		c.ring.drop(nil)
		readRight(t, v, want, ExtentSize+r.Off, 100)
	}
	close(done)
	<-ended
}

// A file for slots that cannot be made while the disk is in trouble is made after that.
func TestSlotsAfterTrouble(t *testing.T) {
	c, v, want, y := openLarge(t, 10*mib, "")
	c.retry = time.Millisecond
	files := newFaultFS()
	if err := v.OpenDisk(t.TempDir(), segment.Options{MaxBytes: 64 * mib, Logger: quiet, FS: files}); err != nil {
		t.Fatal(err)
	}
	files.set(syscall.EMFILE, "open")
	r := Range{Extent: 1, Off: 5 * granuleSize, N: granuleSize}
	planned(t, v, want, r)
	eventually(t, "the disk is out of use", func() bool { return c.Stats().DiskDown })
	files.heal()
	eventually(t, "the disk is in use again", func() bool { return !c.Stats().DiskDown })
	settled(t, c)
	c.ring.drop(nil)
	r.Extent = 2
	planned(t, v, want, r)
	settled(t, c)
	c.ring.drop(nil)
	before := y.bytes.Load()
	readRight(t, v, want, r.Extent*ExtentSize+r.Off, 100)
	if y.bytes.Load() != before {
		t.Error("the granule is not on disk")
	}
}

// A version that is retired leaves no slot behind.
func TestSlotsOfRetired(t *testing.T) {
	c, v, want, _ := openLarge(t, 10*mib, t.TempDir())
	planned(t, v, want, Range{Extent: 1, Off: 0, N: granuleSize})
	settled(t, c)
	d := v.ds.disk.Load()
	if d.store.Used() < slotSize {
		t.Errorf("%d bytes are used", d.store.Used())
	}
	v.Retire()
	if err := v.Flush(t.Context()); err != nil {
		t.Fatal(err)
	}
	if d.store.Used() != 0 {
		t.Errorf("%d bytes are used", d.store.Used())
	}
}

// Readers who do not follow a plan are served as without it: who reads on gets more and more at once, and of what is
// read at random places more than half of an extent brings it whole.
func TestReadersBesideAPlan(t *testing.T) {
	c, v, want, y := openLarge(t, 48*mib, t.TempDir())
	for x := range 3 {
		planned(t, v, want, Range{Extent: x, Off: 30 * granuleSize, N: granuleSize})
	}
	settled(t, c)
	y.requests.Store(0)
	for off := 0; off < 8*mib; off += 128 << 10 {
		readRight(t, v, want, off, 128<<10)
	}
	if n := y.requests.Load(); n > 12 {
		t.Errorf("%d requests from start to end", n)
	}
	for g := range 40 {
		readRight(t, v, want, 8*mib+(g*13%64)*granuleSize, 100)
	}
	settled(t, c)
	if n := y.requests.Load(); n > 12+34 || !v.KeptExtent(0, 2) {
		t.Errorf("%d requests, kept: %v", n, v.KeptExtent(0, 2))
	}
}

// What readers of a retired version fetch is not written to disk: it would be there for nobody.
func TestRetiredIsNotWritten(t *testing.T) {
	c, v, want, _ := openLarge(t, 48*mib, t.TempDir())
	d := v.ds.disk.Load()
	v.Retire()
	readRight(t, v, want, 0, 100)
	settled(t, c)
	d.requeue()
	if err := v.Flush(t.Context()); err != nil {
		t.Fatal(err)
	}
	if d.store.Used() != 0 {
		t.Errorf("%d bytes are used", d.store.Used())
	}
}
