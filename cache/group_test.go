package cache

import (
	"bytes"
	"context"
	"errors"
	"hash/crc32"
	"iter"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/cache/segment"
)

// packed puts the fixture's files one behind the other, with a gap, into objects of per files each, and
// is their Locator.
type packed struct {
	*fixture
	per    int
	shards []objstore.Object
	off    []int64
	spans  atomic.Int64 // requests for several pieces
	urgent func(ctx context.Context) error
}

func pack(f *fixture, per int) *packed {
	p := &packed{fixture: f, per: per, off: make([]int64, len(f.bytes))}
	for from := 0; from < len(f.bytes); from += per {
		var data []byte
		for i := from; i < min(from+per, len(f.bytes)); i++ {
			data = append(data, make([]byte, 512)...)
			p.off[i] = int64(len(data))
			data = append(data, f.bytes[i]...)
		}
		p.shards = append(p.shards, f.mem.PutBytes("shard-"+string(rune('a'+from/per))+".tar", data))
	}
	// The files themselves are nowhere else.
	for i := range f.m.Len() {
		_ = f.mem.Delete(context.Background(), f.m.Object(i).Key, "")
	}
	return p
}

func (p *packed) Locate(file int) (objstore.Object, int64) { return p.shards[file/p.per], p.off[file] }

func (p *packed) Sum(file, x int) uint32 {
	return crc32.Checksum(extentIn(p.bytes[file], x), castagnoli)
}

func (p *packed) volume(c *Cache) *Volume {
	return c.NewVolume(VolumeOptions{Manifest: p.m, Dataset: [16]byte{1}, Store: p, Locate: p})
}

// It is a store that counts and gates what goes through it.
func (p *packed) ReadSpans(ctx context.Context, o objstore.Object, spans []objstore.Span) error {
	p.spans.Add(1)
	if p.urgent != nil {
		if err := p.urgent(ctx); err != nil {
			return err
		}
	}
	if err := p.gate.ReadAt(ctx, o, spans[0].P, spans[0].Off); err != nil {
		return err
	}
	return objstore.ReadSpans(ctx, p.mem, o, spans)
}

func (p *packed) ReadAt(ctx context.Context, o objstore.Object, b []byte, off int64) error {
	return p.gate.ReadAt(ctx, o, b, off)
}
func (p *packed) Stat(ctx context.Context, key string) (objstore.Object, error) {
	return p.mem.Stat(ctx, key)
}
func (p *packed) List(ctx context.Context, prefix, after string) iter.Seq2[objstore.Object, error] {
	return p.mem.List(ctx, prefix, after)
}

func checkFiles(t testing.TB, v *Volume, want [][]byte, files ...int) {
	t.Helper()
	for _, i := range files {
		p := make([]byte, len(want[i]))
		if n, err := v.ReadAt(context.Background(), i, p, 0); err != nil || !bytes.Equal(p[:n], want[i]) {
			t.Fatalf("file %d: %d bytes of %d, %v", i, n, len(p), err)
		}
	}
}

func TestPackedFiles(t *testing.T) {
	p := pack(newFixture(t, 0, 1, 4095, 70<<10, 9<<20, 12, 5<<20), 3)
	c := newPatient(Options{Memory: 64 << 20, Logger: quiet})
	v := p.volume(c)
	dir := t.TempDir()
	if err := v.OpenDisk(dir, segment.Options{MaxBytes: 64 << 20, Logger: quiet}); err != nil {
		t.Fatal(err)
	}
	checkFiles(t, v, p.bytes, span(0, 7)...)
	at := make([]byte, 1<<20)
	if _, err := v.ReadAt(context.Background(), 4, at, 7<<20+5); err != nil ||
		!bytes.Equal(at, p.bytes[4][7<<20+5:][:1<<20]) {
		t.Errorf("a range of a packed file: %v", err)
	}
	closeCache(t, c)
	// What is kept is the file's, wherever it lies.
	c, v = p.open(t, 64<<20, dir, 64<<20)
	before := p.gate.reads.Load()
	checkFiles(t, v, p.bytes, span(0, 7)...)
	if n := p.gate.reads.Load() - before; n != 0 {
		t.Errorf("%d fetches", n)
	}
	closeCache(t, c)
}

// Errors name the shard and the member.
func TestPackedErrors(t *testing.T) {
	p := pack(newFixture(t, 1000, 2000, 3000), 3)
	c := newPatient(Options{Memory: 64 << 20, Logger: quiet})
	defer closeCache(t, c)
	v := p.volume(c)
	p.mem.PutBytes("shard-a.tar", []byte("another"))
	landed := make(chan error, 3)
	if n, out := v.PrefetchGroup(nil, []int{0, 2}, time.Time{}, func(_ int, err error) { landed <- err }); n != 2 ||
		out != Started {
		t.Fatal(n, out)
	}
	_, err := v.ReadAt(context.Background(), 1, make([]byte, 10), 0)
	for i, err := range []error{err, <-landed, <-landed} {
		if objstore.KindOf(err) != objstore.KindChanged || !strings.Contains(err.Error(), "shard-a.tar") ||
			!strings.Contains(err.Error(), "c/f000") {
			t.Errorf("%d: %v", i, err)
		}
	}
}

func TestPrefetchGroup(t *testing.T) {
	const size = 60 << 10
	sizes := []int{size, size, size, size, size, 5 << 20, 0, size, size, size}
	p := pack(newFixture(t, sizes...), 8)
	start := func(t *testing.T, memory int64, files []int, wantStarted int, wantOut Outcome) (*Volume, func()) {
		c := newPatient(Options{Memory: memory, Logger: quiet})
		v := p.volume(c)
		checkFiles(t, v, p.bytes, 2) // is there already
		v.ds.flights.Wait()          // and its flight holds no memory any more
		before := p.gate.reads.Load()
		landed := make(chan int, len(files))
		n, out := v.PrefetchGroup(nil, files, time.Time{}, func(file int, err error) {
			if err != nil {
				t.Error(err)
			}
			landed <- file
		})
		if n != wantStarted || out != wantOut {
			t.Errorf("started %d, %v, want %d, %v", n, out, wantStarted, wantOut)
		}
		return v, func() {
			seen := map[int]bool{}
			for range n {
				file := <-landed
				if seen[file] || v.Where(file, 0) <= OnWay {
					t.Errorf("file %d landed: seen %v, staged %v", file, seen[file], v.Where(file, 0) > OnWay)
				}
				seen[file] = true
			}
			if got := p.gate.reads.Load() - before; got != int64(min(n, 1)) {
				t.Errorf("%d requests", got)
			}
			before = p.gate.reads.Load()
			for file := range seen {
				checkFiles(t, v, p.bytes, file)
			}
			if n := p.gate.reads.Load() - before; n > 0 {
				t.Errorf("%d fetches of what was prefetched", n)
			}
			closeCache(t, c)
		}
	}
	for _, tt := range []struct {
		name    string
		memory  int64
		files   []int
		started int
		out     Outcome
	}{
		{"all, but what is there, large or empty", 64 << 20, []int{0, 1, 2, 4, 5, 6, 7}, 4, Started},
		{"another object", 64 << 20, []int{3, 7, 8, 9}, 2, Started},
		{"backwards", 64 << 20, []int{3, 4, 1, 0}, 2, Started},
		{"twice", 64 << 20, []int{3, 3, 4}, 1, Started},
		{"nothing", 64 << 20, []int{2, 5, 6}, 0, Present},
		{"none at all", 64 << 20, nil, 0, Present},
		{"as many as fit", 300 << 10, []int{0, 1, 3, 4, 7}, 4, Started},
		{"none fits", 64 << 10, []int{0, 1}, 0, NoMemory},
	} {
		t.Run(tt.name, func(t *testing.T) {
			v, done := start(t, tt.memory, tt.files, tt.started, tt.out)
			if peak := v.c.Stats().MemoryPeak; peak > tt.memory {
				t.Errorf("%d bytes at once", peak)
			}
			done()
		})
	}
}

// Groups that overlap and are wanted at once fetch each file once and reserve nothing twice.
func TestGroupsAtOnce(t *testing.T) {
	p := pack(newFixture(t, 1000, 2000, 3000, 4000, 5000, 6000), 6)
	for range 50 {
		c := newPatient(Options{Memory: 64 << 20, Logger: quiet})
		v := p.volume(c)
		var started atomic.Int64
		var wg, landed sync.WaitGroup
		for r := range 8 {
			wg.Go(func() {
				landed.Add(6)
				n, _ := v.PrefetchGroup(nil, span(r%3, 6), time.Time{}, func(int, error) { landed.Done() })
				started.Add(int64(n))
				landed.Add(n - 6)
			})
		}
		wg.Wait()
		landed.Wait()
		if n := started.Load(); n != 6 {
			t.Fatalf("%d files of 6 were started", n)
		}
		closeCache(t, c)
	}
}

// A reader who waits for one file of a group makes the request urgent.
func TestGroupUrgency(t *testing.T) {
	p := pack(newFixture(t, 1000, 1000, 1000), 3)
	c := newPatient(Options{Memory: 64 << 20, Logger: quiet})
	defer closeCache(t, c)
	v := p.volume(c)
	opened := p.gate.close()
	flying := make(chan struct{})
	p.urgent = func(context.Context) error { close(flying); return nil }
	var wg sync.WaitGroup
	wg.Add(3)
	if n, out := v.PrefetchGroup(nil, []int{0, 1, 2}, time.Time{}, func(int, error) { wg.Done() }); n != 3 ||
		out != Started {
		t.Fatal(n, out)
	}
	<-flying
	v.mu.Lock()
	fl := v.flights[1<<8].fl
	v.mu.Unlock()
	if fl.urgency.Raised() {
		t.Error("urgent from the beginning")
	}
	done := make(chan struct{})
	go func() {
		checkFiles(t, v, p.bytes, 1)
		close(done)
	}()
	eventually(t, "the request is urgent", fl.urgency.Raised)
	if out := v.Prefetch(nil, 2, 0, time.Time{}, nil); out != Present {
		t.Errorf("what is on its way: %v", out)
	}
	opened()
	<-done
	wg.Wait()
	if s := c.Stats(); s.Joined != 1 || s.Misses != 0 || s.Prefetched != 3 {
		t.Errorf("%+v", s)
	}
}

// When a group fails its readers try again by themselves, and the memory comes back.
func TestFailedGroup(t *testing.T) {
	p := pack(newFixture(t, 1000, 1000, 1000), 3)
	c := newPatient(Options{Memory: 64 << 20, Logger: quiet})
	defer closeCache(t, c)
	v := p.volume(c)
	var boom error = &objstore.Error{Op: "read", Key: "shard-a.tar", Kind: objstore.KindInvalid}
	entered, leave := make(chan struct{}), make(chan struct{})
	p.urgent = func(context.Context) error {
		close(entered)
		<-leave
		return boom
	}
	landed := make(chan error, 3)
	if n, out := v.PrefetchGroup(nil, []int{0, 1, 2}, time.Time{}, func(_ int, err error) { landed <- err }); n != 3 ||
		out != Started {
		t.Fatal(n, out)
	}
	<-entered
	done := make(chan struct{})
	go func() {
		defer close(done)
		checkFiles(t, v, p.bytes, 2)
	}()
	eventually(t, "the reader has joined", func() bool { return c.Stats().Joined == 1 })
	close(leave)
	for range 3 {
		if err := <-landed; !errors.Is(err, boom) {
			t.Errorf("landed: %v", err)
		}
	}
	<-done
	if s := c.Stats(); s.FetchErrors != 3 || s.Misses != 1 {
		t.Errorf("%+v", s)
	}
}

// rotten is a store that flips a bit of what it reads, as often as times says.
type rotten struct {
	objstore.Reader
	times atomic.Int64
}

func (r *rotten) ReadAt(ctx context.Context, o objstore.Object, p []byte, off int64) error {
	err := r.Reader.ReadAt(ctx, o, p, off)
	if err == nil && r.times.Add(-1) >= 0 {
		p[len(p)/2] ^= 4
	}
	return err
}

// A packed file whose bytes are not those that the index of its shard names is read once more, and then neither served
// nor kept: alone, in a group, from a node, and with the shard's size and ETag unchanged.
func TestPackedFilesAreCompared(t *testing.T) {
	p := pack(newFixture(t, 5000, 5001, 5002, 5003, 5004, 5005, 5006, 5007, 5008, 5009, 5010, 5011), 4)
	store := &rotten{Reader: p.mem}
	c := newPatient(Options{Memory: 64 << 20, Disk: 64 << 20, Logger: quiet})
	defer closeCache(t, c)
	l := &liar{want: p.bytes, lies: func(_, file int) bool { return file == 9 }}
	v := c.NewVolume(VolumeOptions{Manifest: p.m, Dataset: [16]byte{1}, Store: store, Locate: p, Peers: l})
	must(t, v.OpenDisk(t.TempDir(), segment.Options{SegmentSize: 1 << 20, Logger: quiet}))
	read := func(file int) error {
		got := make([]byte, len(p.bytes[file]))
		_, err := v.ReadAt(t.Context(), file, got, 0)
		if err == nil && !bytes.Equal(got, p.bytes[file]) {
			t.Errorf("file %d differs", file)
		}
		return err
	}
	if err := read(9); err != nil || l.found != 1 {
		t.Errorf("from a node: %v, found out %d times", err, l.found)
	}
	v.SetPeers(nil)
	store.times.Store(1)
	if err := read(0); err != nil {
		t.Errorf("a fault on the way: %v", err)
	}
	store.times.Store(2)
	err := read(1)
	if objstore.KindOf(err) != objstore.KindInvalid || !strings.Contains(err.Error(), "shard-a.tar") ||
		!strings.Contains(err.Error(), p.m.Path(1)) || !strings.Contains(err.Error(), "checksum") {
		t.Errorf("%v", err)
	}
	settled(t, c)
	if v.Residence(0) != OnDisk || v.Residence(1) != InStore {
		t.Error("what is wrong is kept, or what is right is not")
	}
	done := make(chan error, 4)
	store.times.Store(1 << 20)
	if n, _ := v.PrefetchGroup(c.NewAccount(1), []int{4, 5, 6, 7}, time.Time{}, func(_ int, err error) {
		done <- err
	}); n != 4 {
		t.Fatal(n)
	}
	for range 4 {
		if err := <-done; objstore.KindOf(err) != objstore.KindInvalid {
			t.Errorf("a group: %v", err)
		}
	}
}

// So is each extent of a larger file: read in order, alone, and from a node.
func TestExtentsOfPackedFilesAreCompared(t *testing.T) {
	p := pack(newFixture(t, 3*ExtentSize+100, 2*ExtentSize+7), 2)
	store := &rotten{Reader: p.mem}
	c := newPatient(Options{Memory: 64 << 20, Disk: 64 << 20, Logger: quiet})
	defer closeCache(t, c)
	l := &liar{want: p.bytes, lies: func(_, file int) bool { return file == 1 }}
	v := c.NewVolume(VolumeOptions{Manifest: p.m, Dataset: [16]byte{1}, Store: store, Locate: p, Peers: l})
	must(t, v.OpenDisk(t.TempDir(), segment.Options{SegmentSize: 16 << 20, Logger: quiet}))
	read := func(file, x int) error {
		want := extentIn(p.bytes[file], x)
		got := make([]byte, len(want))
		_, err := v.ReadAt(t.Context(), file, got, int64(x)*ExtentSize)
		if err == nil && !bytes.Equal(got, want) {
			t.Errorf("extent %d of file %d differs", x, file)
		}
		return err
	}
	if err := read(1, 0); err != nil || l.found != 1 {
		t.Errorf("from a node: %v, found out %d times", err, l.found)
	}
	v.SetPeers(nil)
	must(t, read(0, 0))
	store.times.Store(1)
	if err := read(0, 2); err != nil {
		t.Errorf("a fault on the way: %v", err)
	}
	settled(t, c)
	store.times.Store(2)
	err := read(0, 1)
	if objstore.KindOf(err) != objstore.KindInvalid || !strings.Contains(err.Error(), p.m.Path(0)) ||
		!strings.Contains(err.Error(), "checksum") {
		t.Errorf("%v", err)
	}
	store.times.Store(0)
	settled(t, c)
	if v.Claim(nil, 0, 1) || !v.Claim(nil, 0, 2) {
		t.Error("what is wrong is kept, or what is right is not")
	}
}
