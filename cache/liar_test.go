package cache

import (
	"context"
	"crypto/md5"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/cache/segment"
	"github.com/shoalfs/shoal/lab/rig/memstore"
)

// liar gives other bytes of the files of which lies says so.
type liar struct {
	want        [][]byte
	asked       int
	nodes       int // 0: 2
	lies        func(asked, file int) bool
	lied, found int
}

func (l *liar) Owns(int, int) bool { return false }

func (l *liar) Sampled(int, int) bool { return false }

func (l *liar) Nodes() int { return max(l.nodes, 2) }

func (l *liar) Asks(int, int) bool { return true }

func (l *liar) Read(ctx context.Context, wants []Want, _ bool, check checker) (rest []Want) {
	for _, w := range wants {
		l.asked++
		copy(w.P, l.want[w.File][w.Off:])
		lies := l.lies(l.asked, w.File)
		if lies {
			l.lied++
			w.P[len(w.P)/2] ^= 1
		}
		err := check(ctx, w)
		if err != nil {
			rest = append(rest, w)
		}
		if errors.Is(err, ErrOtherBytes) {
			l.found++
		}
	}
	return rest
}

// tagged is a store whose objects have other ETags than they have in the memory store below.
type tagged struct {
	*gate
	was map[string]string
}

func (s tagged) ReadAt(ctx context.Context, o objstore.Object, p []byte, off int64) error {
	o.ETag = s.was[o.Key]
	return s.gate.ReadAt(ctx, o, p, off)
}

// What a node gives with other bytes reaches no reader and no disk where ETags are MD5s, even if those of some objects
// are none. Of others a node is found out by chance, whatever it counts, and what was kept of it by Verify, in memory
// and on disk.
func TestLiars(t *testing.T) {
	md5of := func(prefix string, data []byte, parts string) string {
		s := md5.Sum(append([]byte(prefix), data...))
		return hex.EncodeToString(s[:]) + parts
	}
	sum := func(_ int, data []byte) string { return md5of("", data, "") }
	kms := func(_ int, data []byte) string { return md5of("x", data, "") }
	multipart := func(_ int, data []byte) string { return md5of("", data, "-2") }
	mixed := func(i int, data []byte) string {
		if i < 20 {
			return kms(i, data)
		}
		return sum(i, data)
	}
	third := func(_, file int) bool { return file%3 == 0 }
	for _, c := range []struct {
		name  string
		etag  func(i int, data []byte) string
		lies  func(asked, file int) bool
		files int
		exact bool
		disk  bool
	}{
		{"MD5", sum, third, 300, true, true},
		{"some of KMS", mixed, func(_, file int) bool { return file >= 20 && file%3 == 0 }, 300, true, true},
		{"KMS", kms, third, 3000, false, true},
		{"multipart", multipart, third, 3000, false, true},
		{"counts to 64", multipart, func(asked, _ int) bool { return asked%auditEvery != 0 }, 3000, false, true},
		{"in memory", multipart, third, 3000, false, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			mem := memstore.New()
			store := tagged{&gate{Reader: mem}, map[string]string{}}
			var objects []objstore.Object
			l := &liar{lies: c.lies}
			for i := range c.files {
				data := noise[i*101:][:5000+i]
				o := mem.PutBytes(fmt.Sprintf("a/%04d", i), data)
				store.was[o.Key] = o.ETag
				o.ETag = c.etag(i, data)
				objects, l.want = append(objects, o), append(l.want, data)
			}
			m, err := catalog.Build(memstore.Listing(objects...), catalog.BuildOptions{Prefix: "a/"})
			must(t, err)
			options := Options{Memory: 256 << 20, Disk: 256 << 20, Logger: quiet}
			ca := newPatient(options)
			defer func() { closeCache(t, ca) }()
			v := ca.NewVolume(VolumeOptions{Manifest: m, Dataset: [16]byte{5}, Store: store, Peers: l})
			dir, segments := t.TempDir(), segment.Options{SegmentSize: 1 << 20, Logger: quiet}
			if c.disk {
				must(t, v.OpenDisk(dir, segments))
			}
			read := func() (wrong int) {
				for i, want := range l.want {
					p := make([]byte, len(want))
					_, err := v.ReadAt(t.Context(), i, p, 0)
					must(t, err)
					if string(p) != string(want) {
						wrong++
					}
				}
				return wrong
			}
			wrong := read()
			settled(t, ca)
			if c.exact && (wrong > 0 || l.found != l.lied) || !c.exact && l.found == 0 || wrong+l.found != l.lied {
				t.Errorf("%d wrong, found out %d times of %d", wrong, l.found, l.lied)
			}
			if r, err := v.Verify(t.Context(), nil); err != nil || r.Dropped < wrong ||
				c.disk && r.Extents != c.files || len(r.Files) != r.Dropped {
				t.Errorf("%+v, %v; %d were wrong", r, err, wrong)
			}
			if c.disk { // what was dropped does not come back
				closeCache(t, ca)
				ca = newPatient(options)
				v = ca.NewVolume(VolumeOptions{Manifest: m, Dataset: [16]byte{5}, Store: store, Peers: l})
				must(t, v.OpenDisk(dir, segments))
				if r, err := v.Verify(t.Context(), nil); err != nil || r.Dropped > 0 {
					t.Errorf("after a restart: %+v, %v", r, err)
				}
			}
			l.lies = func(int, int) bool { return false }
			if again := read(); again > 0 {
				t.Errorf("%d of %d are still wrong", again, wrong)
			}
			// what the store has no more, or otherwise by now, ends no comparison of the rest
			if c.name == "multipart" {
				settled(t, ca)
				ca.ring.drop(nil)
				must(t, mem.Delete(t.Context(), objects[0].Key, ""))
				mem.PutBytes(objects[1].Key, []byte("another"))
				if r, err := v.Verify(t.Context(), nil); err != nil || r.Extents != c.files || r.Unknown != 2 {
					t.Errorf("%+v, %v", r, err)
				}
			}
		})
	}
}

// late gives wrong bytes that no check finds, once it may.
type late struct {
	liar
	begun, may chan struct{}
}

func (l *late) Read(_ context.Context, wants []Want, _ bool, _ checker) (rest []Want) {
	l.begun <- struct{}{}
	<-l.may
	clear(wants[0].P)
	return nil
}

// What was on its way when a Verify began stays nowhere: nobody would compare it.
func TestLiesOnTheirWay(t *testing.T) {
	f := newFixture(t, 5000)
	c, v := f.open(t, 64<<20, t.TempDir(), 64<<20)
	defer closeCache(t, c)
	l := &late{begun: make(chan struct{}, 1), may: make(chan struct{})}
	v.SetPeers(l)
	landed := make(chan error, 1)
	v.Prefetch(nil, 0, 0, time.Time{}, func(_ int, err error) { landed <- err })
	<-l.begun
	_, err := v.Verify(t.Context(), nil)
	must(t, err)
	close(l.may)
	must(t, <-landed)
	settled(t, c)
	if at := v.Residence(0); at != InStore {
		t.Errorf("it is kept: %d", at)
	}
}

// What the writer has in hand when it is dropped from memory is dropped from the disk as well.
func TestLiesInTheWritersHand(t *testing.T) {
	d := newTroubled(t, 64<<20, 5000, 5000)
	defer closeCache(t, d.c)
	d.c.hangAfter = time.Minute
	l := &late{begun: make(chan struct{}, 1), may: make(chan struct{})}
	close(l.may)
	d.v.SetPeers(l)
	var once sync.Once
	var wg sync.WaitGroup
	r, err := d.v.Verify(t.Context(), func(int, int) {
		once.Do(func() { // between the two files
			d.fs.set(errHang, "write")
			_, err := d.v.ReadAt(t.Context(), 1, make([]byte, 5000), 0)
			must(t, err)
			eventually(t, "it is being written", func() bool { return d.fs.inside.Load() > 0 })
			wg.Go(func() {
				eventually(t, "it is dropped from memory", func() bool {
					plain, _ := d.c.ring.forms(d.v.key(1, 0))
					return !plain
				})
				d.fs.heal()
			})
		})
	})
	wg.Wait()
	must(t, errors.Join(err, d.v.Flush(t.Context())))
	if at := d.v.Residence(1); r.Dropped < 1 || at != InStore {
		t.Errorf("%+v, and it is kept: %d", r, at)
	}
}

// metered counts the bytes that are read.
type metered struct {
	objstore.Reader
	bytes int
}

func (m *metered) ReadAt(ctx context.Context, o objstore.Object, p []byte, off int64) error {
	m.bytes += len(p)
	return m.Reader.ReadAt(ctx, o, p, off)
}

// However many nodes there are, what all their audits read from the store is at most 1/64 of the dataset.
func TestAudits(t *testing.T) {
	const pieces = 20_000
	for _, c := range []struct {
		size, nodes int
		found       float64 // after how many pieces one node finds another out that lies about every byte
	}{
		{5000, 2, 64}, {5000, 4, 3 * 64}, {5000, 64, 63 * 64}, {granuleSize, 4, 3 * 64}, {1 << 20, 4, 64},
		{1 << 20, 64, 63 * 64 / 16}, {ExtentSize, 4, 64}, {ExtentSize, 64, 64}, {ExtentSize - 1, 1000, 999},
	} {
		mem := memstore.New()
		o := mem.PutBytes("a/1", noise[:c.size])
		store := &metered{Reader: tagged{&gate{Reader: mem}, map[string]string{o.Key: o.ETag}}}
		o.ETag = "x-1"
		m, err := catalog.Build(memstore.Listing(o), catalog.BuildOptions{Prefix: "a/"})
		must(t, err)
		ca := newPatient(Options{Memory: 64 << 20, Logger: quiet})
		v := ca.NewVolume(VolumeOptions{Manifest: m, Dataset: [16]byte{5}, Store: store})
		n, p := nodes{v: v, p: &liar{nodes: c.nodes}}, slices.Clone(noise[:c.size])
		for range pieces {
			must(t, n.check(t.Context(), Want{P: p}))
		}
		for i := range p {
			p[i] ^= 1
		}
		found := 0
		for range pieces {
			if errors.Is(n.check(t.Context(), Want{P: p}), ErrOtherBytes) {
				found++
			}
		}
		read := float64(min(c.size, granuleSize)) / float64(c.size) // of a piece
		audits, want := float64(store.bytes)/2/float64(c.size)/read, pieces/c.found
		t.Logf("%d bytes, %d nodes: %.4f of the dataset is compared",
			c.size, c.nodes, audits/pieces*read*float64(c.nodes-1))
		for _, got := range []float64{audits, float64(found)} {
			if math.Abs(got-want) > 5*math.Sqrt(want)+5 {
				t.Errorf("%d bytes, %d nodes: %.0f of %d pieces, want %.0f", c.size, c.nodes, got, pieces, want)
			}
		}
		if all := read * float64(c.nodes-1) / c.found; all > 1.001/64 {
			t.Errorf("%d bytes, %d nodes: %.4f of the dataset", c.size, c.nodes, all)
		}
		closeCache(t, ca)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
