package cache

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/cache/segment"
	"github.com/shoalfs/shoal/lab/rig/memstore"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var quiet = slog.New(slog.NewTextHandler(io.Discard, nil))

// gate is a store that counts reads and, while it is shut, holds them.
type gate struct {
	objstore.Reader
	reads atomic.Int64
	shut  atomic.Pointer[chan struct{}]
	fail  atomic.Pointer[error]
}

func (g *gate) ReadAt(ctx context.Context, o objstore.Object, p []byte, off int64) error {
	g.reads.Add(1)
	if ch := g.shut.Load(); ch != nil {
		select {
		case <-*ch:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	if err := g.fail.Load(); err != nil {
		return *err
	}
	return g.Reader.ReadAt(ctx, o, p, off)
}

func (g *gate) close() (open func()) {
	ch := make(chan struct{})
	g.shut.Store(&ch)
	return func() { g.shut.Store(nil); close(ch) }
}

// noise is what all files are cut from, each at another place: making it anew for every case of the
// model costs more than the test.
var noise = func() []byte {
	data := make([]byte, 16<<20)
	_, _ = rand.NewChaCha8([32]byte{3}).Read(data)
	return data
}()

// fixture is a dataset in a memory store.
type fixture struct {
	mem   *memstore.Mem
	gate  *gate
	m     *catalog.Manifest
	bytes [][]byte // by file
}

func newFixture(t testing.TB, sizes ...int) *fixture {
	t.Helper()
	f := &fixture{mem: memstore.New()}
	f.gate = &gate{Reader: f.mem}
	var objects []objstore.Object
	content := map[string][]byte{}
	for i, n := range sizes {
		data := noise[i*977:][:n]
		key := fmt.Sprintf("c/f%04d", i)
		objects = append(objects, f.mem.PutBytes(key, data))
		content[key] = data
	}
	m, err := catalog.Build(memstore.Listing(objects...), catalog.BuildOptions{})
	if err != nil {
		t.Fatal(err)
	}
	f.m = m
	for i := range m.Len() {
		f.bytes = append(f.bytes, content[m.Path(i)])
	}
	return f
}

// volume adds the fixture to a cache.
func (f *fixture) volume(c *Cache) *Volume {
	return c.NewVolume(VolumeOptions{Manifest: f.m, Dataset: [16]byte{1}, Store: f.gate})
}

// newPatient returns a cache that takes no disk for one that hangs: this machine's may be slow.
func newPatient(o Options) *Cache {
	c := New(o)
	c.hangAfter = time.Minute
	return c
}

// open returns a cache over the fixture; dir "" means memory only.
func (f *fixture) open(t testing.TB, memory int64, dir string, disk int64) (*Cache, *Volume) {
	t.Helper()
	c := newPatient(Options{Memory: memory, Logger: quiet})
	v := f.volume(c)
	if dir != "" {
		if err := v.OpenDisk(dir, segment.Options{MaxBytes: disk, Logger: quiet}); err != nil {
			t.Fatal(err)
		}
	}
	return c, v
}

func closeCache(t testing.TB, c *Cache) {
	t.Helper()
	if err := c.Close(); err != nil {
		t.Error(err)
	}
}

func TestManyReadersOneFetch(t *testing.T) {
	f := newFixture(t, 70<<10)
	c, v := f.open(t, 64<<20, t.TempDir(), 64<<20)
	defer closeCache(t, c)
	open := f.gate.close()
	var wg sync.WaitGroup
	for range 32 {
		wg.Go(func() {
			p := make([]byte, 70<<10)
			if n, err := v.ReadAt(context.Background(), 0, p, 0); err != nil || !bytes.Equal(p[:n], f.bytes[0]) {
				t.Errorf("%d bytes, %v", n, err)
			}
		})
	}
	eventually(t, "all wait for one fetch", func() bool { return c.Stats().Joined == 31 })
	open()
	wg.Wait()
	if s := c.Stats(); f.gate.reads.Load() != 1 || s.Misses != 1 || s.Joined != 31 {
		t.Errorf("%d fetches, %+v", f.gate.reads.Load(), s)
	}
}

// A reader that is interrupted leaves at once; what it asked for lands anyway, and is still to be read.
func TestInterruptedReaderLeavesItsFetch(t *testing.T) {
	const size = 50 << 10
	f := newFixture(t, size)
	c, v := f.open(t, 64<<20, "", 0)
	defer closeCache(t, c)
	open := f.gate.close()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() {
		_, err := v.ReadAt(ctx, 0, make([]byte, size), 0)
		done <- err
	}()
	eventually(t, "it is fetched", func() bool { return f.gate.reads.Load() > 0 })
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Fatalf("interrupted read: %v", err)
	}
	open()
	eventually(t, "it has landed", func() bool { return v.Where(0, 0) > OnWay })
	if n := c.Stats().IdleBytes; n != 0 {
		t.Errorf("%d bytes count as read", n)
	}
	if n, err := v.ReadAt(context.Background(), 0, make([]byte, size), 0); n != size || err != nil ||
		f.gate.reads.Load() != 1 {
		t.Errorf("read again: %d, %v, %d fetches", n, err, f.gate.reads.Load())
	}
}

func TestPrefetchNeverWaitsForMemory(t *testing.T) {
	f := newFixture(t, 1<<20, 1<<20, 1<<20)
	c, v := f.open(t, 2<<20, "", 0)
	defer closeCache(t, c)
	landed := make(chan error, 3)
	if out := v.Prefetch(nil, 0, 0, time.Time{}, func(_ int, err error) { landed <- err }); out != Started {
		t.Fatalf("first: %v", out)
	}
	if err := <-landed; err != nil {
		t.Fatal(err)
	}
	if out := v.Prefetch(nil, 1, 0, time.Time{}, nil); out != NoMemory {
		t.Fatalf("second of three in 2 MiB, of which an eighth is the readers': %v", out)
	}
	if out := v.Prefetch(nil, 0, 0, time.Time{}, nil); out != Present {
		t.Fatalf("what is there: %v", out)
	}
	// Once all of it was read its bytes are free to take.
	freed := make(chan struct{}, 8)
	c.OnFreed(func() {
		select {
		case freed <- struct{}{}:
		default:
		}
	})
	if _, err := v.ReadAt(context.Background(), 0, make([]byte, 1<<20), 0); err != nil {
		t.Fatal(err)
	}
	<-freed
	if out := v.Prefetch(nil, 1, 0, time.Time{}, func(_ int, err error) { landed <- err }); out != Started {
		t.Fatalf("after the first was spent: %v", out)
	}
	if err := <-landed; err != nil {
		t.Fatal(err)
	}
	// A reader takes what prefetching holds.
	if n, err := v.ReadAt(context.Background(), 2, make([]byte, 1<<20), 0); n != 1<<20 || err != nil {
		t.Fatal(n, err)
	}
	if s := c.Stats(); s.MemoryPeak > 2<<20 {
		t.Errorf("peak %d of %d", s.MemoryPeak, 2<<20)
	}
}

// TestFailedFetch: an error that a reader was told is told for a moment to those who ask again, as the kernel does,
// without another fetch; then the store is asked.
func TestFailedFetch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, 10<<10)
		c, v := f.open(t, 64<<20, "", 0)
		defer closeCache(t, c)
		var boom error = &objstore.Error{Op: "read", Key: "c/f0000", Kind: objstore.KindChanged}
		f.gate.fail.Store(&boom)
		landed := make(chan error)
		v.Prefetch(nil, 0, 0, time.Time{}, func(_ int, err error) { landed <- err })
		if err := <-landed; objstore.KindOf(err) != objstore.KindChanged {
			t.Errorf("prefetch: %v", err)
		}
		for range 3 {
			if _, err := v.ReadAt(t.Context(), 0, make([]byte, 10), 0); objstore.KindOf(err) != objstore.KindChanged {
				t.Errorf("read: %v", err)
			}
		}
		if n := f.gate.reads.Load(); n != 2 {
			t.Errorf("%d GETs for a prefetch and three reads, want 2", n)
		}
		f.gate.fail.Store(nil)
		time.Sleep(failureTime)
		synctest.Wait()
		if n, err := v.ReadAt(t.Context(), 0, make([]byte, 10), 0); n != 10 || err != nil {
			t.Errorf("once the store is well again: %d, %v", n, err)
		}
		// Two parts of an extent fail, one after the other: the later error is told for as long.
		p := &part{fl: &flight{parts: make([]part, 1)}, key: v.key(0, 0), waiters: 1}
		for range 2 {
			v.mu.Lock()
			p.remember(boom)
			v.mu.Unlock()
			time.Sleep(failureTime * 9 / 10)
			synctest.Wait()
			v.mu.Lock()
			if time.Since(v.failed[p.key.extent()].at) >= failureTime {
				t.Error("an error was forgotten with an earlier one")
			}
			v.mu.Unlock()
		}
		time.Sleep(failureTime)
	})
}

func TestFlippedByteIsFetchedAgain(t *testing.T) {
	f := newFixture(t, 300<<10)
	dir := t.TempDir()
	c, v := f.open(t, 64<<20, dir, 64<<20)
	p := make([]byte, 300<<10)
	if _, err := v.ReadAt(context.Background(), 0, p, 0); err != nil {
		t.Fatal(err)
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
	at := bytes.Index(data, f.bytes[0][200<<10:200<<10+64])
	data[at] ^= 1
	if err := os.WriteFile(segs[0], data, 0o600); err != nil {
		t.Fatal(err)
	}
	for corrupt := range int64(2) { // then what was fetched instead is there
		c, v = f.open(t, 64<<20, dir, 64<<20)
		if kept, _ := v.Kept(); kept != 1 {
			t.Fatalf("%d records adopted", kept)
		}
		clear(p)
		if n, err := v.ReadAt(context.Background(), 0, p, 0); err != nil || !bytes.Equal(p[:n], f.bytes[0]) {
			t.Fatalf("served %d bytes that are not the object's, %v", n, err)
		}
		if s := c.Stats(); s.Corrupt != 1-corrupt || f.gate.reads.Load() != 2 {
			t.Errorf("%d fetches, %+v", f.gate.reads.Load(), s)
		}
		closeCache(t, c)
	}
}

func TestInherit(t *testing.T) {
	f := newFixture(t, 5<<10, 6<<10, 5<<20)
	c, v := f.open(t, 64<<20, t.TempDir(), 64<<20)
	defer closeCache(t, c)
	for i := range 3 {
		if _, err := v.ReadAt(context.Background(), i, make([]byte, 5<<20), 0); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "all is kept", func() bool { kept, n := v.Kept(); return kept == n })
	var objects []objstore.Object
	for i := range f.m.Len() {
		objects = append(objects, f.m.Object(i))
	}
	objects[1] = f.mem.PutBytes(objects[1].Key, []byte("new"))
	objects = append(objects, f.mem.PutBytes("b/added", []byte("added")))
	m2, err := catalog.Build(memstore.Listing(objects...), catalog.BuildOptions{})
	if err != nil {
		t.Fatal(err)
	}
	w := c.NewVolume(VolumeOptions{Manifest: m2, Dataset: [16]byte{1}, Store: f.gate})
	w.Inherit(v)
	v.Retire()
	before := f.gate.reads.Load()
	for i := range m2.Len() {
		p := make([]byte, m2.Size(i))
		if _, err := w.ReadAt(context.Background(), i, p, 0); err != nil {
			t.Errorf("%s: %v", m2.Path(i), err)
		}
	}
	if n := f.gate.reads.Load() - before; n != 2 {
		t.Errorf("%d fetches for one changed and one new file", n)
	}
}

// What a version fetches once a newer one has taken over its records would be nobody's.
func TestInheritedVersionKeepsNothing(t *testing.T) {
	f := newFixture(t, 5<<10, 6<<10)
	c, v := f.open(t, 64<<20, t.TempDir(), 64<<20)
	defer closeCache(t, c)
	read := func(file int) {
		if _, err := v.ReadAt(t.Context(), file, make([]byte, 8<<10), 0); err != nil {
			t.Fatal(err)
		}
		if err := v.Flush(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	read(0)
	w := c.NewVolume(VolumeOptions{Manifest: f.m, Dataset: [16]byte{1}, Store: f.gate})
	w.Inherit(v)
	read(1)
	if kept, _ := v.Kept(); kept != 1 {
		t.Errorf("%d extents are kept", kept)
	}
}

// Files of several extents that are wanted whole, more of them at once than fit memory: whoever has
// memory for its file must get the extents.
func TestManyLargeSamples(t *testing.T) {
	f := newFixture(t, 9<<20, 9<<20, 9<<20, 9<<20, 9<<20, 9<<20)
	c, v := f.open(t, 32<<20, "", 0)
	defer closeCache(t, c)
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute) // stuck, not slow
	defer cancel()
	// Fetched ahead, and for nobody to read: it must make way.
	landed := make(chan error, 18)
	n := 0
	for file := range 6 {
		for x := range 3 {
			if v.Prefetch(nil, file, x, time.Time{}, func(_ int, err error) { landed <- err }) == Started {
				n++
			}
		}
	}
	for range n {
		<-landed
	}
	var wg sync.WaitGroup
	for i := range 24 {
		wg.Go(func() {
			data, release, err := v.Sample(ctx, i%6)
			if err != nil || !bytes.Equal(data, f.bytes[i%6]) {
				t.Errorf("file %d: %d bytes, %v", i%6, len(data), err)
				return
			}
			release()
		})
	}
	wg.Wait()
	if peak := c.Stats().MemoryPeak; peak > 32<<20 {
		t.Errorf("%d bytes at once", peak)
	}
}

// TestReaderBehindPrefetches: a reader who finds the memory taken by fetches that are under way gets what they
// bring, although nobody reads it.
func TestReaderBehindPrefetches(t *testing.T) {
	f := newFixture(t, 1<<20+1, 1<<20)
	c, v := f.open(t, 2<<20, "", 0)
	defer closeCache(t, c)
	open := f.gate.close()
	landed := make(chan error, 1)
	if out := v.Prefetch(nil, 0, 0, time.Time{}, func(_ int, err error) { landed <- err }); out != Started {
		t.Fatal(out)
	}
	read := make(chan error, 1)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute) // stuck, not slow
	defer cancel()
	go func() {
		_, err := v.ReadAt(ctx, 1, make([]byte, 10), 0)
		read <- err
	}()
	eventually(t, "the reader waits for memory", func() bool { return c.Stats().MemoryWaiting == 1 })
	open()
	if err := <-landed; err != nil {
		t.Error(err)
	}
	if err := <-read; err != nil {
		t.Error(err)
	}
}

// A reader that takes the memory of what was fetched ahead tells whose it was.
func TestLost(t *testing.T) {
	f := newFixture(t, 5<<20, 1<<20, 1<<20) // the first has two extents
	c, v := f.open(t, 3<<20, "", 0)
	defer closeCache(t, c)
	var lost []Range
	c.OnLost(func(w *Volume, r Range) {
		if w != v {
			t.Error("another volume")
		}
		lost = append(lost, r)
	})
	landed := make(chan error, 1)
	for _, k := range [][2]int{{0, 1}, {1, 0}} {
		if v.Prefetch(nil, k[0], k[1], time.Time{}, func(_ int, err error) { landed <- err }) != Started {
			t.Fatal("no memory")
		}
		<-landed
	}
	if !c.TryReserve(2 << 20) {
		t.Error("what was fetched ahead did not make way")
	}
	if want := []Range{{File: 1, N: 1 << 20}, {File: 0, Extent: 1, N: 1 << 20}}; len(lost) == 0 ||
		!slices.Equal(lost, want[:len(lost)]) {
		t.Errorf("lost %v, want the latest first", lost)
	}
	c.Ledger().Release(2<<20, ForDemand)
	if v.Claim(nil, 1, 0) {
		t.Error("it is still there")
	}
}

// What was read is claimed again before its memory is taken.
func TestClaimSpent(t *testing.T) {
	f := newFixture(t, 1<<20, 1<<20)
	c, v := f.open(t, 2<<20, "", 0)
	defer closeCache(t, c)
	if _, err := v.ReadAt(context.Background(), 0, make([]byte, 1<<20), 0); err != nil {
		t.Fatal(err)
	}
	if !v.Claim(nil, 0, 0) {
		t.Fatal("what was read is gone")
	}
	if out := v.Prefetch(nil, 1, 0, time.Time{}, nil); out != NoMemory {
		t.Errorf("a prefetch took what is claimed: %v", out)
	}
	if files := v.Unspent(); !slices.Equal(files, []int{0}) {
		t.Errorf("unspent are %v", files)
	}
	v.Spend(0)
	if files := v.Unspent(); len(files) > 0 {
		t.Errorf("unspent are %v", files)
	}
	landed := make(chan error, 1)
	if out := v.Prefetch(nil, 1, 0, time.Time{}, func(_ int, err error) { landed <- err }); out != Started {
		t.Fatalf("spent, and no memory: %v", out)
	}
	<-landed
}

// A limit that was lowered holds from the next start on, and the rest is still there.
func TestSmallerLimit(t *testing.T) {
	sizes := slices.Repeat([]int{1 << 20}, 24)
	f := newFixture(t, sizes...)
	dir := t.TempDir()
	fill := func(limit int64, want int) {
		c, v := f.open(t, 64<<20, dir, limit)
		defer closeCache(t, c)
		for file := range sizes {
			p := make([]byte, 1<<20)
			if n, err := v.ReadAt(context.Background(), file, p, 0); err != nil || !bytes.Equal(p[:n], f.bytes[file]) {
				t.Fatalf("file %d: %d bytes, %v", file, n, err)
			}
		}
		eventually(t, fmt.Sprintf("%d of %d are kept in %d bytes", want, len(sizes), limit), func() bool {
			n, _ := v.Kept()
			return n == want
		})
		if used := c.Stats().DiskUsed; used > limit {
			t.Errorf("%d bytes on disk, limit %d", used, limit)
		}
	}
	fill(64<<20, 24)
	before := f.gate.reads.Load()
	fill(17<<20, 16)
	if n := f.gate.reads.Load() - before; n != 8 {
		t.Errorf("fetched %d of 24 when there was room for 16", n)
	}
	if _, err := newPatient(Options{}).GiveBack(dir, segment.Options{Logger: quiet}, 64<<20); err != nil {
		t.Fatal(err)
	}
	if left, _ := filepath.Glob(filepath.Join(dir, "*.seg")); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

// What was on its way to a version that was left meanwhile stays in nobody's way.
func TestRetiredWhileFetching(t *testing.T) {
	f := newFixture(t, 1<<20, 1<<20)
	c, old := f.open(t, 3<<20, t.TempDir(), 64<<20)
	open := f.gate.close()
	landed := make(chan error, 2)
	for file := range 2 {
		if out := old.Prefetch(nil, file, 0, time.Time{}, func(_ int, err error) { landed <- err }); out != Started {
			t.Fatal(out)
		}
	}
	v := f.volume(c)
	v.Inherit(old)
	old.Retire()
	open()
	for range 2 {
		if err := <-landed; err != nil {
			t.Fatal(err)
		}
	}
	if out := v.Prefetch(nil, 0, 0, time.Time{}, func(_ int, err error) { landed <- err }); out != Started {
		t.Errorf("the old version's bytes are in the way: %v", out)
	} else if err := <-landed; err != nil {
		t.Error(err)
	}
	closeCache(t, c) // fails if bytes are left
}

// TestReadersOfPieces: readers who read piece by piece, as the kernel does, and together need twice the memory that
// there is, fetch each file once. One who goes away in the middle holds up the others for a moment only.
func TestReadersOfPieces(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const files, readers, size, piece = 32, 8, 256 << 10, 32 << 10
		f := newFixture(t, slices.Repeat([]int{size}, files+4)...)
		c, v := f.open(t, 4*size, "", 0)
		defer closeCache(t, c)
		ctx := t.Context()
		var all sync.WaitGroup
		for r := range readers {
			all.Go(func() {
				for file := r; file < files; file += readers {
					for off := int64(0); off < size; off += piece {
						if _, err := v.ReadAt(ctx, file, make([]byte, piece), off); err != nil {
							t.Error(err)
						}
						time.Sleep(time.Millisecond) // it looks at what it has read
					}
				}
			})
		}
		all.Wait()
		if n := f.gate.reads.Load(); n != files {
			t.Errorf("%d requests for %d files", n, files)
		}
		for file := range 4 {
			if _, err := v.ReadAt(ctx, files+file, make([]byte, piece), 0); err != nil {
				t.Fatal(err)
			}
		}
		begin := time.Now()
		if _, err := v.ReadAt(ctx, 0, make([]byte, piece), 0); err != nil {
			t.Fatal(err)
		}
		if took := time.Since(begin); took > 2*betweenPieces {
			t.Errorf("a reader waited %v for memory that nobody reads any more", took)
		}
	})
}
