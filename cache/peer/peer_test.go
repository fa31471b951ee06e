package peer

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"io"
	"io/fs"
	"log/slog"
	"math"
	"math/rand/v2"
	"net"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/shoalfs/shoal/cache"
	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/lab/rig/synced"
)

func TestMain(m *testing.M) {
	if address := os.Getenv("PEER_TEST_ASKS"); address != "" {
		asker(address)
		return
	}
	goleak.VerifyTestMain(m)
}

var noise = func() []byte {
	data := make([]byte, 24<<20)
	_, _ = rand.NewChaCha8([32]byte{5}).Read(data)
	return data
}()

// shelf is a Serving of one version. File f has the bytes of noise from 1000*f on.
type shelf struct {
	sync.Mutex
	held    map[int]bool  // else it is to be fetched
	fetches time.Duration // how long a fetch takes
	err     error         // what fetches end in
	gate    chan struct{} // fetches wait for it
	// length of the coded form of some files: the bytes of noise from 500 times the file's number on
	coded map[int]int

	opens  chan struct{} // until this is closed the dataset is being opened; nil: it is open
	looked chan bool     // gets one when somebody looks whether it is

	brings               atomic.Bool // the store brings bytes, of whatever
	received             atomic.Int64
	below                atomic.Uint64
	lent, open, gathered atomic.Int64
	early                atomic.Int64 // volumes given back while pieces were lent
}

var (
	dataset = [16]byte{1, 2}
	version = [32]byte{3, 4}
	form    = [8]byte{5, 6}
)

func pathOf(file int) [16]byte { return [16]byte{byte(file), byte(file >> 8), 9} }

func (s *shelf) Volume(d [16]byte, v [32]byte) (Volume, func(), bool) {
	if d != dataset || v != version || s.Opening(d) != nil {
		return nil, nil, false
	}
	s.Lock()
	defer s.Unlock()
	s.open.Add(1)
	return s, func() {
		s.Lock() // nobody opens, and lends, between the two looks
		defer s.Unlock()
		if s.open.Add(-1) == 0 && s.lent.Load() > 0 {
			s.early.Add(1)
		}
	}, true
}

func (s *shelf) Opening([16]byte) <-chan struct{} {
	s.Lock()
	defer s.Unlock()
	if s.opens != nil {
		select {
		case s.looked <- true:
		default:
		}
	}
	return s.opens
}

func (s *shelf) opened() {
	s.Lock()
	defer s.Unlock()
	close(s.opens)
	s.opens = nil
}

func (s *shelf) File(name string) (io.ReadCloser, int64, error) {
	if name != "manifest-1" {
		return nil, 0, fs.ErrNotExist
	}
	return io.NopCloser(bytes.NewReader(noise)), int64(len(noise)), nil
}

func (s *shelf) Check(file int, path [16]byte, etag string) bool {
	return file < 1000 && path == pathOf(file) && etag == "etag"
}

func (s *shelf) Terms() Terms { return Terms{Below: s.below.Load(), Gives: s.below.Load() > 0} }

// Received goes up with each look while bytes come.
func (s *shelf) Received() int64 {
	if s.brings.Load() {
		return s.received.Add(1)
	}
	return s.received.Load()
}

func (s *shelf) Gather(files []int, _ time.Time) { s.gathered.Add(int64(len(files))) }

func (s *shelf) Serve(ctx context.Context, file int, off int64, n int, _ time.Time, held bool) ([]byte, func(), error) {
	s.Lock()
	here, gate, takes, err := s.held[file], s.gate, s.fetches, s.err
	s.Unlock()
	if !here {
		if held {
			return nil, nil, cache.ErrNotHeld
		}
		if err != nil {
			return nil, nil, err
		}
		if gate == nil {
			c := make(chan struct{})
			gate = c
			time.AfterFunc(takes, func() { close(c) })
		}
		select {
		case <-gate:
		case <-ctx.Done():
			return nil, nil, ctx.Err()
		}
		s.Lock()
		s.held[file] = true
		s.Unlock()
	}
	s.lent.Add(1)
	return noise[1000*file:][off:][:n], func() { s.lent.Add(-1) }, nil
}

func (s *shelf) ServeCoded(_ context.Context, file int, _ int64, _ int, f [8]byte) ([]byte, func(), bool) {
	s.Lock()
	defer s.Unlock()
	n := s.coded[file]
	if f != form || n == 0 {
		return nil, nil, false
	}
	s.lent.Add(1)
	return noise[500*file:][:n], func() { s.lent.Add(-1) }, true
}

func newShelf(held ...int) *shelf {
	s := &shelf{held: map[int]bool{}}
	for _, f := range held {
		s.held[f] = true
	}
	return s
}

// bed is a server and a client.
type bed struct {
	*shelf
	server *Server
	client *Client
	node   Node
	log    *synced.Buffer
}

func newBed(t testing.TB, s *shelf) *bed { return newBedTLS(t, s, nil, nil) }

// newPatient returns a client that takes no busy machine for a peer that is away.
func newPatient(cfg ClientConfig) *Client {
	c := NewClient(cfg)
	c.silence, c.patience = longest, longest
	return c
}

func listen(t testing.TB) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// want returns pieces of n bytes of files, and checks what was filled.
func want(n int, files ...int) []Piece {
	var pieces []Piece
	for _, f := range files {
		pieces = append(pieces, Piece{File: f, Path: pathOf(f), ETag: "etag", Off: 10, P: make([]byte, n)})
	}
	return pieces
}

func filled(t testing.TB, pieces []Piece) (n int) {
	t.Helper()
	for _, p := range pieces {
		if p.Filled {
			n++
			if !bytes.Equal(p.P, noise[1000*p.File:][p.Off:][:len(p.P)]) {
				t.Errorf("file %d: wrong bytes", p.File)
			}
		}
	}
	return n
}

func (b *bed) read(t testing.TB, pieces []Piece) int {
	t.Helper()
	b.client.Read(t.Context(), b.node, Request{Dataset: dataset, Version: version}, pieces)
	return filled(t, pieces)
}

func (b *bed) stats() Stats { return b.client.Stats()[0] }

// Each answer tells the terms in force, also one of refusals, if the version is open.
func TestTerms(t *testing.T) {
	b := newBed(t, newShelf(1))
	for _, below := range []uint64{0, 1 << 32, 0x3fefffff << 32, math.MaxUint64} {
		b.below.Store(below)
		for _, file := range []int{1, 2, 5000} {
			got := b.client.Read(t.Context(), b.node, Request{Dataset: dataset, Version: version, Held: true},
				want(9, file))
			if got == nil || got.Below != below || got.Gives != (below > 0) {
				t.Errorf("file %d: %+v, want %x", file, got, below)
			}
		}
	}
	if got := b.client.Read(t.Context(), b.node, Request{Dataset: dataset}, want(9, 1)); got != nil {
		t.Errorf("of another version: %+v", got)
	}
}

// A dataset that is being opened is waited for, also longer than a silence may take, by a read that nobody waits for.
func TestOpening(t *testing.T) {
	s := newShelf(1)
	s.opens, s.looked = make(chan struct{}), make(chan bool)
	b := newBed(t, s)
	ctx := objstore.WithUrgency(t.Context(), objstore.NewUrgency(time.Now().Add(longest)))
	pieces, got := want(9, 1), make(chan *Terms)
	go func() { got <- b.client.Read(ctx, b.node, Request{Dataset: dataset, Version: version}, pieces) }()
	for range 2 * silence / waitEvery {
		select {
		case <-got:
			t.Fatal("it did not wait")
		case <-s.looked:
		}
	}
	s.opened()
	if <-got == nil || filled(t, pieces) != 1 {
		t.Errorf("nothing came: %+v", b.stats())
	}
	s.Lock()
	s.opens = make(chan struct{}) // for a reader that waits it never opens
	s.Unlock()
	if n := b.read(t, want(9, 1)); n > 0 || b.stats().No["version"] != 1 {
		t.Errorf("%d of a dataset that is not open, %+v", n, b.stats())
	}
	b.server.busy.Add(serverPlaces) // there is no place to wait in
	start := time.Now()
	if n := b.read(t, want(9, 1)); n > 0 || b.stats().No["busy"] != 1 || time.Since(start) > fetching/2 {
		t.Errorf("%d of a busy node, after %v, %+v", n, time.Since(start), b.stats())
	}
	b.server.busy.Add(-serverPlaces)
}

func TestRead(t *testing.T) {
	b := newBed(t, newShelf(1, 2, 3))
	if n := b.read(t, want(63<<10, 1, 2, 3)); n != 3 {
		t.Errorf("%d of 3 held, %+v", n, b.stats())
	}
	if n := b.read(t, want(63<<10, 1, 4, 5, 3)); n != 4 || b.gathered.Load() != 2 {
		t.Errorf("%d of 4, %d gathered, %+v", n, b.gathered.Load(), b.stats())
	}
	// What is wanted only if it is held is not fetched, though there is no memory to look for it.
	_ = b.server.budget.Acquire(t.Context(), 32<<20)
	time.AfterFunc(50*time.Millisecond, func() { b.server.budget.Release(32 << 20) })
	pieces := want(1000, 1, 2)
	b.client.Read(t.Context(), b.node, Request{Dataset: dataset, Version: version, Held: true}, pieces)
	if n := filled(t, pieces); n != 2 || b.gathered.Load() != 2 {
		t.Errorf("%d of 2 held, %d gathered, %+v", n, b.gathered.Load(), b.stats())
	}
	for _, n := range []int{1, granuleSize - 1, granuleSize, granuleSize + 1, extentSize} {
		if got := b.read(t, want(n, 1)); got != 1 {
			t.Errorf("%d bytes: %+v", n, b.stats())
		}
	}
	many := make([]int, 3000)
	for i := range many {
		many[i] = i % 1000
	}
	if n := b.read(t, want(1000, many...)); n != len(many) {
		t.Errorf("%d of many", n)
	}
	if n := b.read(t, want(extentSize, 1, 2, 3, 4, 5, 6, 7)); n != 7 {
		t.Errorf("%d of 7 extents: %+v %+v", n, b.stats(), b.server.Stats())
	}
	if s := b.stats(); s.Errors+s.Late+s.Damaged+s.Passed != 0 || s.Hits != s.Asked || s.State != "on" ||
		b.server.Stats().Connections != 1 {
		t.Errorf("%+v %+v", s, b.server.Stats())
	}
}

// Who says that it can decode the coded form gets it, where there is one.
func TestReadCoded(t *testing.T) {
	s := newShelf(1, 2, 3)
	s.coded = map[int]int{1: 1, 3: granuleSize + 9}
	b := newBed(t, s)
	for _, c := range []struct {
		form  [8]byte
		coded [3]int
	}{{form, [3]int{1, 0, granuleSize + 9}}, {[8]byte{1}, [3]int{}}, {[8]byte{}, [3]int{}}} {
		pieces := want(2*granuleSize, 1, 2, 3)
		before := int64(0)
		if all := b.client.Stats(); len(all) > 0 {
			before = all[0].Bytes
		}
		b.client.Read(t.Context(), b.node, Request{Dataset: dataset, Version: version, Form: c.form}, pieces)
		bytesOver := 0
		for i, p := range pieces {
			if !p.Filled || p.Coded != c.coded[i] {
				t.Errorf("%v: file %d: filled %v, %d coded", c.form, p.File, p.Filled, p.Coded)
			}
			if p.Coded > 0 && !bytes.Equal(p.P[:p.Coded], noise[500*p.File:][:p.Coded]) {
				t.Errorf("file %d: wrong coded bytes", p.File)
			}
			if p.Coded == 0 {
				filled(t, pieces[i:i+1])
			}
			bytesOver += cmp.Or(p.Coded, len(p.P))
		}
		if n := b.stats().Bytes - before; n != int64(bytesOver) {
			t.Errorf("%d bytes counted of %d", n, bytesOver)
		}
	}
	until(t, "the server has let go", func() bool { return b.server.Stats().Memory+s.lent.Load() == 0 })
}

func TestRefusals(t *testing.T) {
	b := newBed(t, newShelf(1))
	ask := func(reason string, req Request, p Piece, fails error) {
		t.Helper()
		b.Lock()
		b.err = fails
		b.Unlock()
		before := int64(0)
		if all := b.client.Stats(); len(all) > 0 {
			before = all[0].No[reason]
		}
		pieces := []Piece{p, want(100, 1)[0]}
		b.client.Read(t.Context(), b.node, req, pieces)
		if s := b.stats(); s.No[reason] == before || pieces[0].Filled || s.Errors > 0 || s.State != "on" {
			t.Errorf("%s: %+v", reason, s)
		}
	}
	p := want(100, 1)[0]
	ok := Request{Dataset: dataset, Version: version}
	ask("version", Request{Dataset: dataset}, p, nil)
	ask("version", Request{Version: version}, p, nil)
	other := p
	other.ETag = "other"
	ask("etag", ok, other, nil)
	other = p
	other.Path[0]++
	ask("etag", ok, other, nil)
	other = p
	other.File = 1 << 31
	ask("etag", ok, other, nil)
	missing := want(100, 7)[0]
	ask("not_held", Request{Dataset: dataset, Version: version, Held: true}, missing, nil)
	ask("busy", ok, missing, cache.ErrBusy)
	ask("error", ok, missing, errors.New("boom"))
	ask("memory", ok, missing, cache.ErrMemory)
	if !b.server.budget.TryAcquire(32 << 20) {
		t.Error("memory is left claimed")
	}
	ask("memory", ok, p, nil)
	b.server.budget.Release(32 << 20)
	b.server.busy.Add(serverPlaces)
	ask("busy", ok, p, nil)
	b.server.busy.Add(-serverPlaces)
	if n := b.read(t, want(100, 1)); n != 1 {
		t.Error("not asked any more")
	}
	if n := b.read(t, []Piece{{File: 1, ETag: strings.Repeat("e", 256), P: make([]byte, 1)}}); n != 0 {
		t.Error("an ETag that the protocol cannot carry")
	}
}

// A server that is short of memory has who asks wait, and serves him as soon as there is some; he holds none meanwhile.
func TestWaitsForMemory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStage()
		defer s.close(t)
		if !s.server.budget.TryAcquire(32<<20 - 1500) { // one piece fits
			t.Fatal("no budget")
		}
		s.readers(t.Context(), t, 16, time.Second, time.Millisecond)
		if n := s.missed.Load(); n > 0 || s.asked.Load() < 1000 {
			t.Errorf("%d of %d: %+v", n, s.asked.Load(), s.client.Stats())
		}
		synctest.Wait()
		if !s.server.budget.TryAcquire(1500) {
			t.Fatal("memory is left claimed")
		}
		time.AfterFunc(2*time.Second, func() { s.server.budget.Release(32 << 20) })
		s.read(t.Context(), t)
		if n := s.missed.Load(); n > 0 || time.Duration(s.slowest.Load()) > 2*time.Second+2*pressEvery {
			t.Errorf("%d, the slowest took %v: %+v", n, time.Duration(s.slowest.Load()), s.client.Stats())
		}
		s.shelf.Lock()
		s.shelf.err, s.shelf.held = cache.ErrMemory, map[int]bool{} // the cache's own memory
		s.shelf.Unlock()
		time.AfterFunc(2*time.Second, func() { s.shelf.Lock(); s.shelf.err = nil; s.shelf.Unlock() })
		s.read(t.Context(), t)
		if n := s.missed.Load(); n > 0 {
			t.Errorf("%d: %+v", n, s.client.Stats())
		}
		for _, brings := range []bool{true, false} { // what others fetch gives memory back
			s.shelf.brings.Store(brings)
			s.shelf.Lock()
			s.shelf.err, s.shelf.held = cache.ErrMemory, map[int]bool{}
			s.shelf.Unlock()
			time.AfterFunc(4*fetching, func() { s.shelf.Lock(); s.shelf.err = nil; s.shelf.Unlock() })
			before := s.missed.Load()
			if s.read(t.Context(), t); (s.missed.Load() > before) == brings {
				t.Errorf("its store brings bytes: %v; %+v", brings, s.client.Stats())
			}
			time.Sleep(4 * fetching)
		}
		synctest.Wait()
		if !s.server.budget.TryAcquire(32 << 20) {
			t.Error("memory is left claimed")
		}
	})
}

func quiet(log *synced.Buffer) *slog.Logger { return slog.New(slog.NewTextHandler(log, nil)) }
