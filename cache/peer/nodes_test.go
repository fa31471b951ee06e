package peer

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/shoalfs/shoal/cache"
	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/cache/segment"
	"github.com/shoalfs/shoal/lab/rig/memstore"
	"github.com/shoalfs/shoal/lab/rig/synced"
)

// slowly is a store that counts, and takes a while.
type slowly struct {
	objstore.Reader
	reads atomic.Int64
}

func (s *slowly) ReadAt(ctx context.Context, o objstore.Object, p []byte, off int64) error {
	s.reads.Add(1)
	time.Sleep(time.Duration(rand.IntN(3000)) * time.Microsecond)
	return s.Reader.ReadAt(ctx, o, p, off)
}

// clusterNode is a daemon as far as peers go: a real cache, server and client.
type clusterNode struct {
	*cache.Volume
	m      *catalog.Manifest
	c      *cache.Cache
	id     string
	client *Client
	log    *synced.Buffer
	all    []*clusterNode
	form   [8]byte // that it takes
	owner  atomic.Pointer[func(file, x int) int]

	mu      sync.Mutex
	server  *Server
	address string
	ended   chan error
}

func (n *clusterNode) Terms() Terms { return Terms{} }

func (n *clusterNode) Received() int64 { return 0 }

func (n *clusterNode) Owns(int, int) bool { return false }

func (n *clusterNode) Sampled(int, int) bool { return false }

func (n *clusterNode) Nodes() int { return len(n.all) }

func (n *clusterNode) Check(file int, path [16]byte, etag string) bool {
	return file < n.m.Len() && n.m.PathHash(file) == path && n.m.ETag(file) == etag
}

// serving is what the node's server reads from.
type serving struct{ n *clusterNode }

func (s serving) Volume(_ [16]byte, v [32]byte) (Volume, func(), bool) {
	return s.n, func() {}, v == s.n.m.VersionHash()
}

func (s serving) Opening([16]byte) <-chan struct{} { return nil }

func (s serving) File(string) (io.ReadCloser, int64, error) { return nil, 0, fs.ErrNotExist }

func (n *clusterNode) start(t testing.TB) {
	l := listen(t)
	ended := make(chan error, 1)
	server := NewServer(ServerConfig{Self: n.id, Serving: serving{n}, Memory: 4 << 20, Log: quiet(n.log)})
	go func() { ended <- server.Listen(l) }()
	n.mu.Lock()
	defer n.mu.Unlock()
	n.server, n.address, n.ended = server, l.Addr().String(), ended
}

func (n *clusterNode) stop(t testing.TB) {
	n.mu.Lock()
	server, ended := n.server, n.ended
	n.mu.Unlock()
	server.Close()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if s := server.Stats(); s.InFlight != 0 || s.Memory != 0 || s.Connections != 0 {
		t.Errorf("left: %+v", s)
	}
}

func (n *clusterNode) node() Node {
	n.mu.Lock()
	defer n.mu.Unlock()
	return Node{ID: n.id, Address: n.address}
}

func (n *clusterNode) Asks(file, x int) bool { return n.all[(*n.owner.Load())(file, x)] != n }

func (n *clusterNode) Read(ctx context.Context, wants []cache.Want, held bool,
	check func(context.Context, cache.Want) error) (rest []cache.Want) {
	if held { // nothing has moved
		return wants
	}
	by := map[*clusterNode][]int{}
	for i, w := range wants {
		o := n.all[(*n.owner.Load())(w.File, int(w.Off/cache.ExtentSize))]
		by[o] = append(by[o], i)
	}
	missing := by[n]
	delete(by, n)
	for o, list := range by {
		pieces := make([]Piece, len(list))
		for j, i := range list {
			w := wants[i]
			pieces[j] = Piece{File: w.File, Path: n.m.PathHash(w.File), ETag: n.m.ETag(w.File), Off: w.Off, P: w.P}
		}
		r := Request{Version: n.m.VersionHash()}
		if !slices.ContainsFunc(list, func(i int) bool { return wants[i].Coded == nil }) {
			r.Form = n.form
		}
		n.client.Read(ctx, o.node(), r, pieces)
		for j, i := range list {
			if pieces[j].Coded > 0 {
				*wants[i].Coded = pieces[j].Coded
			}
			if !pieces[j].Filled || check(ctx, wants[i]) != nil {
				missing = append(missing, i)
			}
		}
	}
	slices.Sort(missing)
	for _, i := range missing {
		rest = append(rest, wants[i])
	}
	return rest
}

// newNodes starts nodes that agree on who owns what.
func newNodes(t testing.TB, client func(ClientConfig) *Client, n int, memory int64, store objstore.Reader,
	m *catalog.Manifest) []*clusterNode {
	nodes := make([]*clusterNode, n)
	owner := func(file, x int) int { return (file + x) % n }
	for i := range nodes {
		log := &synced.Buffer{}
		c := cache.New(cache.Options{Memory: memory, Logger: quiet(log)})
		nodes[i] = &clusterNode{m: m, c: c, id: fmt.Sprintf("node-%d", i), all: nodes, log: log,
			client: client(ClientConfig{Log: quiet(log)})}
		nodes[i].owner.Store(&owner)
		nodes[i].Volume = c.NewVolume(cache.VolumeOptions{Manifest: m, Store: store, Peers: nodes[i]})
		nodes[i].start(t)
	}
	return nodes
}

// files stores files of random sizes, and returns their bytes in the manifest's order.
func files(t testing.TB, sizes ...int) (store *slowly, m *catalog.Manifest, content [][]byte) {
	t.Helper()
	mem := memstore.New()
	by := map[string][]byte{}
	var objects []objstore.Object
	for i, n := range sizes {
		key := fmt.Sprintf("c/f%04d", i)
		by[key] = noise[977*i:][:n]
		objects = append(objects, mem.PutBytes(key, by[key]))
	}
	m, err := catalog.Build(memstore.Listing(objects...), catalog.BuildOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for f := range m.Len() {
		content = append(content, by[m.Path(f)])
	}
	return &slowly{Reader: mem}, m, content
}

func closeNodes(t testing.TB, nodes []*clusterNode) {
	for _, n := range nodes {
		n.client.Close()
		n.stop(t)
	}
	for _, n := range nodes {
		if err := n.Close(); err != nil { // flights
			t.Error(err)
		}
		if err := n.c.Close(); err != nil {
			t.Error(err)
		}
	}
}

// Nodes that agree fetch nothing twice, by real connections.
func TestNodesFetchOnce(t *testing.T) {
	var sizes []int
	for i := range 100 {
		sizes = append(sizes, 1+i*1700)
	}
	sizes = append(sizes, 4<<20, 9<<20)
	store, m, content := files(t, sizes...)
	nodes := newNodes(t, newPatient, 3, 256<<20, store, m)
	var wg sync.WaitGroup
	for _, n := range nodes {
		for range 4 {
			wg.Go(func() {
				for _, f := range rand.Perm(m.Len()) {
					p := make([]byte, len(content[f]))
					if _, err := n.ReadAt(t.Context(), f, p, 0); err != nil || !bytes.Equal(p, content[f]) {
						t.Errorf("file %d: %v", f, err)
					}
				}
			})
		}
	}
	wg.Wait()
	// A peer may meet a flight that waits for its memory, or a server that sends another extent of 4 MiB already.
	if reads := store.reads.Load(); reads > 104+20 {
		for _, n := range nodes {
			t.Logf("%+v %+v", n.client.Stats(), n.server.Stats())
		}
		t.Errorf("%d fetches of 104 extents", reads)
	}
	closeNodes(t, nodes)
}

// halver codes files whose second half repeats the first, under the name form.
type halver struct{ form [8]byte }

func (h halver) Encode(dst, file []byte) ([]byte, bool) {
	half := len(file) / 2
	return append(append(dst, h.form[:]...), file[:half]...), half > 8 && bytes.Equal(file[:half], file[half:])
}

func (h halver) Decode(dst, coded []byte) ([]byte, error) {
	if h.Form(coded) != h.form {
		return dst, errors.New("another form")
	}
	return append(append(dst, coded[8:]...), coded[8:]...), nil
}

func (h halver) Form(coded []byte) [8]byte { return [8]byte(coded) }
func (h halver) KeepRestored() bool        { return false }

// What a node keeps recoded goes to others as it is, if they know the form, and is kept so there; they read the same
// bytes by every door. Who knows another form gets the files.
func TestNodesExchangeCoded(t *testing.T) {
	mem := memstore.New()
	var objects []objstore.Object
	var content [][]byte
	total := 0
	for i := range 40 {
		half := noise[977*i:][:20<<10+i]
		content = append(content, append(slices.Clone(half), half...))
		objects = append(objects, mem.PutBytes(fmt.Sprintf("c/f%04d", i), content[i]))
		total += len(content[i])
	}
	m, err := catalog.Build(memstore.Listing(objects...), catalog.BuildOptions{})
	if err != nil {
		t.Fatal(err)
	}
	store := &slowly{Reader: mem}
	forms := [][8]byte{{1}, {1}, {2}}
	nodes, dirs := make([]*clusterNode, len(forms)), make([]string, len(forms))
	first := func(int, int) int { return 0 }
	open := func(i int) {
		n := nodes[i]
		n.c = cache.New(cache.Options{Memory: 64 << 20, Disk: 256 << 20, Logger: quiet(n.log)})
		n.Volume = n.c.NewVolume(cache.VolumeOptions{Manifest: m, Store: store, Codec: halver{forms[i]}})
		if i > 0 {
			n.SetPeers(n)
		}
		if err := n.OpenDisk(dirs[i], segment.Options{SegmentSize: 1 << 20, Logger: quiet(n.log)}); err != nil {
			t.Fatal(err)
		}
	}
	read := func(i int) {
		for file := range content {
			p := make([]byte, len(content[file]))
			if _, err := nodes[i].ReadAt(t.Context(), file, p, 0); err != nil || !bytes.Equal(p, content[file]) {
				t.Fatalf("node %d, file %d: %v", i, file, err)
			}
			nodes[i].Spend(file)
		}
		if err := nodes[i].Flush(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	coded := func(i int) (n int) {
		for file := range content {
			data, release, err := nodes[i].SampleCoded(t.Context(), file)
			if err != nil {
				t.Fatal(err)
			}
			if len(data) < len(content[file]) {
				n++
				data, _ = halver{forms[i]}.Decode(nil, data)
			}
			if !bytes.Equal(data, content[file]) {
				t.Errorf("node %d, file %d differs", i, file)
			}
			release()
			nodes[i].Spend(file)
		}
		return n
	}
	for i := range nodes {
		log := &synced.Buffer{}
		nodes[i] = &clusterNode{m: m, id: fmt.Sprintf("node-%d", i), all: nodes, log: log,
			client: newPatient(ClientConfig{Log: quiet(log)}), form: forms[i]}
		nodes[i].owner.Store(&first)
		dirs[i] = t.TempDir()
		open(i)
		nodes[i].start(t)
	}
	read(0)
	for r, idle := cache.NewRecoder(nodes[0].Volume, 2, func(time.Duration) {}), 0; idle < 2; {
		if idle++; r.Next(t.Context()) {
			idle = 0
		}
	}
	if s := nodes[0].Stats(); s.Coded != len(content) {
		t.Fatalf("%+v", s)
	}
	fetched, restored := store.reads.Load(), nodes[0].Stats().Restored
	if n := coded(1); n != len(content) {
		t.Errorf("%d came coded", n)
	}
	read(1)
	if s := nodes[1].Stats(); s.Coded != len(content) || s.PeerBytes >= int64(total)*6/10 ||
		nodes[1].client.Stats()[0].Bytes != s.PeerBytes {
		t.Errorf("%d bytes of files, %+v, %+v", total, s, nodes[1].client.Stats())
	}
	if n := nodes[0].Stats().Restored; n != restored {
		t.Errorf("the owner restored %d", n-restored)
	}
	if n := coded(2); n != 0 {
		t.Errorf("%d came in another form", n)
	}
	// After a restart they are read from the disk.
	if err := errors.Join(nodes[1].Close(), nodes[1].c.Close()); err != nil {
		t.Error(err)
	}
	given := nodes[0].server.Stats().Pieces
	open(1)
	read(1)
	if n := coded(1); n != len(content) {
		t.Errorf("%d are coded after a restart", n)
	}
	if n, more := store.reads.Load()-fetched, nodes[0].server.Stats().Pieces-given; n+more != 0 {
		t.Errorf("%d fetches, %d pieces", n, more)
	}
	closeNodes(t, nodes)
}

// Nodes with little memory, whose views differ and change, and of which one ends now and then, while all read
// everything at once: every read ends soon and right, and nothing is left.
func TestNodesInTrouble(t *testing.T) {
	store, m, content := files(t, 1, 63<<10, 63<<10, 63<<10, 200<<10, 1<<20, 4<<20, 9<<20, 4<<20+1)
	nodes := newNodes(t, NewClient, 3, 16<<20, store, m)
	worst := lag(t)
	stop := make(chan struct{})
	var readers, trouble sync.WaitGroup
	for _, n := range nodes {
		for range 3 {
			readers.Go(func() {
				for range 20 {
					f := rand.IntN(m.Len())
					if rand.IntN(3) == 0 {
						n.Prefetch(nil, f, rand.IntN(n.Extents(f)), time.Now().Add(time.Second), nil)
						continue
					}
					off := rand.IntN(len(content[f]))
					p := make([]byte, rand.IntN(300<<10))
					start := time.Now()
					got, err := n.ReadAt(t.Context(), f, p, int64(off))
					if err != nil || !bytes.Equal(p[:got], content[f][off:][:min(len(p), len(content[f])-off)]) {
						t.Errorf("file %d at %d: %v", f, off, err)
					}
					if took := time.Since(start); took > 3*stall+worst() { // it may wait for memory that others hold
						t.Errorf("a read took %v, on a machine that is late by %v", took, worst())
					}
				}
			})
		}
	}
	trouble.Go(func() {
		for {
			select {
			case <-stop:
				return
			case <-time.After(20 * time.Millisecond):
			}
			n := nodes[rand.IntN(3)]
			a, b := rand.IntN(3), 1+rand.IntN(5)
			owner := func(file, x int) int { return (a + b*file + x) % 3 }
			n.owner.Store(&owner)
			if rand.IntN(4) == 0 {
				n.stop(t)
				n.start(t)
			}
		}
	})
	readers.Wait()
	close(stop)
	trouble.Wait()
	closeNodes(t, nodes)
}

// More reads at once than there are places all get their bytes, and all of them end at once when the peer freezes.
func TestPlaces(t *testing.T) {
	b := newBed(t, newShelf(1))
	var wg sync.WaitGroup
	var got atomic.Int64
	for range 300 {
		wg.Go(func() {
			pieces := want(10, 1)
			b.client.Read(t.Context(), b.node, Request{Dataset: dataset, Version: version}, pieces)
			got.Add(int64(filled(t, pieces)))
		})
	}
	wg.Wait()
	if s := b.stats(); got.Load() != 300 || s.InFlight != 0 || b.server.Stats().Connections > peerPlaces {
		t.Errorf("%d: %+v", got.Load(), s)
	}
	h := newHostile(t, func(c *hostileConn, _ Request, _ []asked) bool { <-c.h.quit; return false })
	c := NewClient(ClientConfig{Log: quiet(b.log)})
	defer c.Close()
	worst := lag(t)
	node := Node{ID: "node-b", Address: h.l.Addr().String()}
	start := time.Now()
	for range 300 {
		wg.Go(func() { c.Read(t.Context(), node, Request{}, want(10, 1)) })
	}
	wg.Wait()
	// 300 reads that wait for places one after another take five stalls
	if took := time.Since(start); took > 2*stall+worst() || h.asks.Load() > 3*peerPlaces {
		t.Errorf("%v for %d asked", took, h.asks.Load())
	}
}
