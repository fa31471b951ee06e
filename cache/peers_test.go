package cache

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/shoalfs/shoal/cache/objstore"
)

// peerNode is a node of a cluster in one process. It takes the extents for those of another node as its view says.
type peerNode struct {
	c     *Cache
	v     *Volume
	self  int
	all   []*peerNode
	owner atomic.Pointer[func(file, x int) int]
	had   atomic.Pointer[func(file, x int) int] // who owned it before; nil: nobody

	sampled         func(file int) bool // nil: all
	served, refused atomic.Int64
}

func (p *peerNode) Asks(file, x int) bool { return (*p.owner.Load())(file, x) != p.self }

func (p *peerNode) Owns(file, x int) bool { return !p.Asks(file, x) }

func (p *peerNode) Sampled(file, _ int) bool { return p.sampled == nil || p.sampled(file) }

func (p *peerNode) Nodes() int { return len(p.all) }

// Read asks without a deadline: nodes that wait for each other would do so forever.
func (p *peerNode) Read(ctx context.Context, wants []Want, held bool, check checker) (rest []Want) {
	of := p.owner.Load()
	if held {
		of = p.had.Load()
	}
	for _, w := range wants {
		o := p.self
		if of != nil {
			o = (*of)(w.File, int(w.Off/ExtentSize))
		}
		if o == p.self {
			rest = append(rest, w)
			continue
		}
		due := time.Time{}
		if objstore.PriorityOf(ctx) == objstore.Prefetch {
			due = time.Now().Add(time.Minute)
		}
		data, release, err := p.all[o].v.Serve(ctx, w.File, w.Off, len(w.P), due, held)
		if err != nil {
			p.all[o].refused.Add(1)
			rest = append(rest, w)
			continue
		}
		p.all[o].served.Add(1)
		copy(w.P, data)
		release()
		if check(ctx, w) != nil {
			rest = append(rest, w)
		}
	}
	return rest
}

// cluster returns nodes that agree: the extents go round.
func (f *fixture) cluster(t testing.TB, n int, memory int64, disk int64) []*peerNode {
	nodes := make([]*peerNode, n)
	for i := range nodes {
		p := &peerNode{self: i, all: nodes}
		owner := func(file, x int) int { return (file + x) % n }
		p.owner.Store(&owner)
		dir := ""
		if disk > 0 {
			dir = t.TempDir()
		}
		p.c, p.v = f.open(t, memory, dir, disk)
		p.v.SetAdmit(func(file, _ int) bool { return file%n == i })
		nodes[i] = p
	}
	for _, p := range nodes {
		p.v.SetPeers(p)
	}
	return nodes
}

// Nodes that agree fetch each extent once, all together.
func TestPeersFetchOnce(t *testing.T) {
	f := newFixture(t, 0, 1, 70<<10, 63<<10, 200<<10, 4<<20, 9<<20, 4<<20+1)
	nodes := f.cluster(t, 3, 256<<20, 64<<20)
	extents := int64(len(nodes[0].v.locs)) - 1 // the first file is empty and has none
	for round := range 2 {
		var wg sync.WaitGroup
		for _, p := range nodes {
			wg.Go(func() {
				for _, file := range rand.Perm(len(f.bytes)) {
					for x := range p.v.Extents(file) {
						p.v.Prefetch(nil, file, x, time.Time{}, nil)
					}
					data, release, err := p.v.Sample(context.Background(), file)
					if err != nil || !bytes.Equal(data, f.bytes[file]) {
						t.Errorf("file %d: %v", file, err)
					}
					release()
				}
			})
		}
		wg.Wait()
		if n := f.gate.reads.Load(); n > extents+3 { // a reader may meet a flight that has no memory yet
			t.Errorf("round %d: %d fetches of %d extents", round, n, extents)
		}
	}
	var peer int64
	for _, p := range nodes {
		if p.refused.Load() > 3 {
			t.Errorf("%d refused", p.refused.Load())
		}
		peer += p.v.Stats().PeerBytes
	}
	if peer == 0 {
		t.Error("no bytes from peers")
	}
	for _, p := range nodes {
		closeCache(t, p.c)
	}
}

// An extent moves from its former owner to the new one, also at a third node's request, and not from the store.
func TestPeersRecall(t *testing.T) {
	f := newFixture(t, 70<<10, 70<<10, 70<<10)
	nodes := f.cluster(t, 3, 64<<20, 64<<20)
	ctx := context.Background()
	owned := func(by int) *func(file, x int) int { of := func(int, int) int { return by }; return &of }
	for _, p := range nodes {
		p.owner.Store(owned(0))
	}
	checkFiles(t, nodes[0].v, f.bytes, 0, 1)
	for _, p := range nodes {
		p.had.Store(owned(0))
		p.owner.Store(owned(1))
	}
	checkFiles(t, nodes[1].v, f.bytes, 0)
	checkFiles(t, nodes[2].v, f.bytes, 1)
	if n := f.gate.reads.Load(); n != 2 {
		t.Errorf("%d fetches of 2 files", n)
	}
	checkFiles(t, nodes[2].v, f.bytes, 2) // nobody has it
	if n := f.gate.reads.Load(); n != 3 {
		t.Errorf("%d fetches of 3 files", n)
	}
	for _, p := range nodes {
		if err := p.v.Flush(ctx); err != nil {
			t.Fatal(err)
		}
		closeCache(t, p.c)
	}
}

func TestServe(t *testing.T) {
	f := newFixture(t, 70<<10, 9<<20)
	c, v := f.open(t, 32<<20, t.TempDir(), 64<<20)
	defer closeCache(t, c)
	ctx := context.Background()
	serve := func(file int, off int64, n int, held bool, want error) {
		t.Helper()
		data, release, err := v.Serve(ctx, file, off, n, time.Time{}, held)
		if !errors.Is(err, want) {
			t.Errorf("file %d at %d, held %v: %v, want %v", file, off, held, err, want)
		}
		if err == nil {
			if !bytes.Equal(data, f.bytes[file][off:][:n]) {
				t.Error("wrong bytes")
			}
			release()
		}
	}
	for _, bad := range []Want{{File: -1}, {File: 2}, {Off: -1}, {Off: 70 << 10}, {Off: 1, P: make([]byte, 70<<10)},
		{File: 1, Off: ExtentSize - 1, P: make([]byte, 2)}, {Off: 1 << 62}} {
		if _, _, err := v.Serve(ctx, bad.File, bad.Off, max(len(bad.P), 1), time.Time{}, false); err == nil {
			t.Errorf("%d at %d of file %d served", len(bad.P), bad.Off, bad.File)
		}
	}
	serve(0, 10, 100, true, ErrNotHeld)
	serve(0, 10, 100, false, nil)
	serve(0, 0, 70<<10, true, nil)
	if n := f.gate.reads.Load(); n != 1 {
		t.Errorf("%d fetches", n)
	}
	if err := v.Flush(ctx); err != nil {
		t.Fatal(err)
	}
	if e := v.key(0, 0); e.maybe() || !e.onDisk() {
		t.Error("what was fetched for a peer is not spent, or not kept")
	}
	serve(0, 3, 69<<10, true, nil)

	// A part of a large file's extent is fetched for the second that asks, if the disk keeps it.
	at := int64(ExtentSize + 7*granuleSize)
	serve(1, at, granuleSize, false, ErrNotHeld)
	serve(1, at+granuleSize, granuleSize, false, ErrNotHeld)
	serve(1, at+5, 10, false, nil)
	serve(1, at+granuleSize, granuleSize, true, nil)
	// A granule that is here.
	if _, err := v.ReadAt(ctx, 1, make([]byte, 10), 2*ExtentSize+3*granuleSize); err != nil {
		t.Fatal(err)
	}
	serve(1, 2*ExtentSize+3*granuleSize+9, 100, true, nil)
	serve(1, 2*ExtentSize+4*granuleSize-9, 10, true, ErrNotHeld)
	if s := v.Stats(); s.Reads != 1 || s.ReadBytes != 10 {
		t.Errorf("a peer's reads are counted as this node's: %+v", s.Counts)
	}
}

// What cannot be had without waiting for memory or for another node is refused.
func TestServeRefuses(t *testing.T) {
	f := newFixture(t, 70<<10, 70<<10, 70<<10, 4<<20)
	nodes := f.cluster(t, 2, 3<<20, 0)
	defer func() {
		for _, p := range nodes {
			closeCache(t, p.c)
		}
	}()
	ctx := context.Background()
	a, b := nodes[0], nodes[1]
	if _, _, err := a.v.Serve(ctx, 3, 0, 4<<20, time.Time{}, false); !errors.Is(err, ErrMemory) {
		t.Errorf("without memory: %v", err)
	}
	// A waits for B, which waits for the store.
	open := f.gate.close()
	got := make(chan error, 2)
	read := func(p *peerNode, file int) {
		_, err := p.v.ReadAt(ctx, file, make([]byte, 10), 0)
		got <- err
	}
	go read(a, 1)
	eventually(t, "B fetches", func() bool { return f.gate.reads.Load() == 1 })
	if _, _, err := a.v.Serve(ctx, 1, 0, 10, time.Time{}, false); !errors.Is(err, ErrBusy) {
		t.Errorf("a flight that asks a peer: %v", err)
	}
	// B's own reader joins.
	go read(b, 1)
	eventually(t, "B's reader joins", func() bool { return b.c.Stats().Joined == 1 })
	short, cancel := context.WithCancel(ctx)
	cancel()
	if _, _, err := b.v.Serve(short, 1, 0, 10, time.Time{}, false); !errors.Is(err, context.Canceled) {
		t.Errorf("who left: %v", err)
	}
	if _, _, err := b.v.Serve(ctx, 1, 0, 10, time.Time{}, true); !errors.Is(err, ErrNotHeld) {
		t.Errorf("on its way: %v", err)
	}
	open()
	for range 2 {
		if err := <-got; err != nil {
			t.Error(err)
		}
	}
	if n := f.gate.reads.Load(); n != 1 {
		t.Errorf("%d fetches", n)
	}
	// The store's error is the store's.
	failed := error(&objstore.Error{Op: "read", Key: "x", Kind: objstore.KindTransient, Err: errors.New("boom")})
	f.gate.fail.Store(&failed)
	for range 3 {
		if _, _, err := a.v.Serve(ctx, 2, 0, 10, time.Time{}, false); objstore.KindOf(err) != objstore.KindTransient {
			t.Errorf("failed fetch: %v", err)
		}
	}
	if n := f.gate.reads.Load(); n != 2 {
		t.Errorf("%d fetches: a failure is to be remembered", n)
	}
	f.gate.fail.Store(nil)
	a.v.SetPeers(nil)
	if _, err := a.v.ReadAt(ctx, 1, make([]byte, 10), 70<<10-10); err != nil {
		t.Error(err)
	}
}

// Groups are of files that all ask a peer, or none.
func TestGroupsByOwner(t *testing.T) {
	p := pack(newFixture(t, 1000, 1000, 1000, 1000, 1000, 1000), 6)
	nodes := make([]*peerNode, 2)
	for i := range nodes {
		c := newPatient(Options{Memory: 64 << 20, Logger: quiet})
		defer closeCache(t, c)
		nodes[i] = &peerNode{self: i, all: nodes, c: c, v: p.volume(c)}
		owner := func(file, _ int) int { return file / 3 }
		nodes[i].owner.Store(&owner)
		nodes[i].v.SetPeers(nodes[i])
	}
	landed := make(chan error, 6)
	group := func(files ...int) {
		n, out := nodes[0].v.PrefetchGroup(nil, files, time.Time{}, func(_ int, err error) { landed <- err })
		if n != 3 || out != Started {
			t.Fatal(n, out)
		}
		for range n {
			if err := <-landed; err != nil {
				t.Fatal(err)
			}
		}
	}
	group(0, 1, 2, 3, 4, 5)
	group(3, 4, 5)
	checkFiles(t, nodes[0].v, p.bytes, span(0, 6)...)
	if own, peer := nodes[0].v.Stats().PeerBytes, nodes[1].v.Stats().PeerBytes; own != 3000 || peer != 0 {
		t.Errorf("%d and %d bytes from peers", own, peer)
	}
}

// What a peer asks for together is fetched together, and nobody waits for it here.
func TestGather(t *testing.T) {
	p := pack(newFixture(t, 1000, 1000, 1000, 1000, 5<<20, 1000, 1000), 4)
	c := newPatient(Options{Memory: 64 << 20, Logger: quiet})
	defer closeCache(t, c)
	v := p.volume(c)
	checkFiles(t, v, p.bytes, 1)
	before := p.gate.reads.Load()
	v.Gather([]int{0, 1, 2, 3, 3, 4, 5, 6}, time.Time{})
	for _, file := range []int{0, 1, 2, 3, 5, 6} {
		data, release, err := v.Serve(context.Background(), file, 0, 1000, time.Time{}, false)
		if err != nil || !bytes.Equal(data, p.bytes[file]) {
			t.Fatalf("file %d: %v", file, err)
		}
		release()
	}
	settled(t, c)
	if n := p.gate.reads.Load() - before; n != 2 {
		t.Errorf("%d requests for two objects", n)
	}
	if v.Where(4, 0) > OnWay || v.Where(4, 1) > OnWay {
		t.Error("a large file is fetched")
	}
	for range v.Unspent() {
		t.Error("something waits to be read")
	}
	if s := v.Stats(); s.Prefetched != 0 {
		t.Errorf("%+v", s.Counts)
	}
	// As far as there is memory.
	small := newPatient(Options{Memory: 20 << 10, Logger: quiet})
	defer closeCache(t, small)
	v = p.volume(small)
	v.Gather([]int{0, 1, 2, 3, 5, 6}, time.Time{})
	checkFiles(t, v, p.bytes, 0, 1, 2, 3, 5, 6)
}

// Three nodes whose views differ arbitrarily, and change, read everything at once, with little memory: every read ends
// with the right bytes, and nothing is left.
func TestPeersModel(t *testing.T) {
	// The default of 100 takes 15 s.
	if n := flag.Lookup("rapid.checks"); n.Value.String() == n.DefValue {
		_ = n.Value.Set("25")
		defer n.Value.Set(n.DefValue)
	}
	f := newFixture(t, 0, 1, 63<<10, 63<<10, 63<<10, 200<<10, 1<<20, 4<<20, 9<<20, 4<<20+1)
	rapid.Check(t, func(rt *rapid.T) {
		const n = 3
		memory := rapid.SampledFrom([]int64{12 << 20, 20 << 20, 64 << 20}).Draw(rt, "memory")
		disk := rapid.SampledFrom([]int64{0, 8 << 20}).Draw(rt, "disk")
		nodes := f.cluster(t, n, memory, disk)
		view := func(p *peerNode) {
			of := rapid.SliceOfN(rapid.IntRange(0, n-1), 16, 16).Draw(rt, fmt.Sprintf("view of %d", p.self))
			owner := func(file, x int) int { return of[(file+5*x)%16] }
			p.had.Store(p.owner.Load())
			p.owner.Store(&owner)
			p.sampled = func(file int) bool { return file%3 == 0 }
		}
		seed := rapid.Uint64().Draw(rt, "seed")
		done := make(chan struct{})
		var wg sync.WaitGroup
		for i, p := range nodes {
			view(p)
			for reader := range 4 {
				wg.Go(func() {
					r := rand.New(rand.NewPCG(seed, uint64(4*i+reader)))
					for range 25 {
						p.step(t, r, f)
					}
				})
			}
		}
		for range rapid.IntRange(0, 5).Draw(rt, "changes of view") {
			view(nodes[rapid.IntRange(0, n-1).Draw(rt, "whose")])
		}
		go func() { wg.Wait(); close(done) }()
		select {
		case <-done:
		case <-time.After(time.Minute):
			panic("the nodes wait for each other")
		}
		for _, p := range nodes {
			settled(rt, p.c) // else a prefetch may still read what another node lends
		}
		for _, p := range nodes {
			if err := p.c.Close(); err != nil {
				rt.Fatal(err)
			}
		}
		if t.Failed() {
			rt.FailNow()
		}
	})
}

// step reads or prefetches something.
func (p *peerNode) step(t *testing.T, r *rand.Rand, f *fixture) {
	file := r.IntN(len(f.bytes))
	want := f.bytes[file]
	switch r.IntN(6) {
	case 0:
		for x := range p.v.Extents(file) {
			p.v.Prefetch(nil, file, x, time.Now().Add(time.Second), nil)
		}
	case 1:
		files := []int{r.IntN(len(f.bytes)), file}
		slices.Sort(files)
		p.v.PrefetchGroup(nil, files, time.Time{}, nil)
	case 2:
		p.v.Spend(file)
	case 3:
		ctx, cancel := context.WithTimeout(context.Background(), time.Duration(r.IntN(1000))*time.Microsecond)
		_, _ = p.v.ReadAt(ctx, file, make([]byte, len(want)), 0)
		cancel()
	case 4:
		off := r.IntN(len(want) + 1)
		b := make([]byte, r.IntN(300<<10))
		n, err := p.v.ReadAt(context.Background(), file, b, int64(off))
		if err != nil || !bytes.Equal(b[:n], want[off:][:min(len(b), len(want)-off)]) {
			t.Errorf("file %d at %d: %d bytes, %v", file, off, n, err)
		}
	default:
		if len(want) > ExtentSize { // held whole while its extents are fetched: that takes more memory than there is
			return
		}
		data, release, err := p.v.Sample(context.Background(), file)
		if err != nil || !bytes.Equal(data, want) {
			t.Errorf("file %d: %v", file, err)
			return
		}
		release()
	}
}
