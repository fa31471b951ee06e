package shard

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math/rand/v2"
	"strings"
	"testing"
	"unsafe"

	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/cache/objstore"
)

// halves is a codec of files whose two halves are equal.
type halves struct{ learned string }

func (h *halves) Learn(tables []byte) (func(dst, file []byte) ([]byte, bool), error) {
	h.learned = string(tables)
	return nil, nil
}

func (h *halves) Decode(dst, coded []byte) ([]byte, error) {
	if h.learned != "tables" {
		return nil, errors.New("no tables")
	}
	return append(append(dst, coded...), coded...), nil
}

// codedStore has what is stored in place of the files, by key.
type codedStore struct {
	*store
	stored map[string][]byte
}

func (s codedStore) ReadAt(ctx context.Context, o objstore.Object, p []byte, off int64) error {
	if b, ok := s.stored[o.Key]; ok {
		copy(p, b[off:])
		return nil
	}
	return s.store.ReadAt(ctx, o, p, off)
}

// awayStore answers nothing until it is back, and then with an error.
type awayStore struct {
	objstore.Reader
	came, back chan struct{}
}

func (a *awayStore) Stat(ctx context.Context, key string) (objstore.Object, error) {
	a.came <- struct{}{}
	<-a.back
	return objstore.Object{}, errors.New("away")
}

// A set with coded members is the same dataset: any range of its shards reads as if each file were stored as it is, by
// one request for neighbours, and it unpacks to the originals.
func TestCodedMembers(t *testing.T) {
	s := newStore()
	coded := codedStore{s, map[string][]byte{}}
	want := map[string][]byte{}
	names := map[string]int{}
	for i := range 90 {
		name := fmt.Sprintf("class%d/%04d.jpg", i%3, i)
		data := bytesOf(uint64(i), i*29%2000)
		if i%4 != 0 && len(data) > 0 {
			data = append(data, data...)
			coded.stored["src/"+name] = data[:len(data)/2]
		}
		want[name], names[name] = data, len(data)
	}
	for name, data := range want {
		s.PutBytes("src/"+name, data)
	}
	m, err := catalog.Build(s.List(t.Context(), "src/", ""), catalog.BuildOptions{Prefix: "src/"})
	if err != nil {
		t.Fatal(err)
	}
	o := small(1)
	o.Coded = &Coded{
		Tables: []byte("tables"),
		Length: func(i int) int64 {
			if b, ok := coded.stored[m.Object(i).Key]; ok {
				return int64(len(b))
			}
			return m.Size(i)
		},
		Sum: func(i int) uint32 { return crc32.Checksum(want[m.Path(i)], castagnoli) },
	}
	res, err := Pack(t.Context(), m, coded, s, "out/", o)
	if err != nil {
		t.Fatalf("%+v, %v", res, err)
	}
	if res, err := Pack(t.Context(), m, coded, s, "out/", o); err != nil || !res.Complete {
		t.Errorf("again: %+v, %v", res, err)
	}
	r := NewRestorer(s, new(halves), nil, 0)
	set, err := Open(t.Context(), r, out, OpenOptions{})
	if err != nil || set.Version != m.Version() {
		t.Fatalf("%+v, %v", set, err)
	}
	objects := set.Objects()
	images := make([][]byte, len(objects)) // of the shards, as they are shown
	for member, err := range set.Members(t.Context()) {
		if err != nil {
			t.Fatal(err)
		}
		got := make([]byte, member.Size)
		if err := r.ReadAt(t.Context(), objects[member.Shard], got, member.Off); err != nil ||
			!bytes.Equal(got, want[member.Path]) {
			t.Fatalf("%s: %v", member.Path, err)
		}
		image := &images[member.Shard]
		for int64(len(*image)) < member.Off+member.Size {
			*image = append(*image, 0)
		}
		copy((*image)[member.Off:], got)
	}
	rng := rand.New(rand.NewPCG(1, 2))
	for range 300 {
		i := rng.IntN(len(objects))
		lo := rng.IntN(len(images[i]))
		whole := make([]byte, len(images[i]))
		if err := r.ReadAt(t.Context(), objects[i], whole, 0); err != nil {
			t.Fatal(err)
		}
		part := make([]byte, 1+rng.IntN(len(whole)-lo))
		if err := r.ReadAt(t.Context(), objects[i], part, int64(lo)); err != nil ||
			!bytes.Equal(part, whole[lo:lo+len(part)]) {
			t.Fatalf("%d bytes at %d of %s: %v", len(part), lo, objects[i].Key, err)
		}
	}
	var spans []objstore.Span
	var neighbours []string
	for member := range set.Members(t.Context()) {
		if member.Shard == 0 && member.Size > 0 {
			spans = append(spans, objstore.Span{Off: member.Off, P: make([]byte, member.Size)})
			neighbours = append(neighbours, member.Path)
		}
	}
	if err := r.ReadSpans(t.Context(), objects[0], spans); err != nil {
		t.Fatal(err)
	}
	for i, sp := range spans {
		if !bytes.Equal(sp.P, want[neighbours[i]]) {
			t.Errorf("%s: other bytes among neighbours", neighbours[i])
		}
	}
	// A reader that asks for it gets coded members as they are, if it may have them.
	for _, asIs := range []bool{false, true} {
		r := NewRestorer(s, new(halves), func() bool { return asIs }, 0)
		lengths, ask := make([]int, len(spans)), make([]*int, len(spans))
		for i := range spans {
			if i%3 > 0 {
				ask[i] = &lengths[i]
			}
		}
		if err := r.ReadCoded(t.Context(), objects[0], spans, ask); err != nil {
			t.Fatal(err)
		}
		for i, sp := range spans {
			whole := want[neighbours[i]]
			stored, isCoded := coded.stored["src/"+neighbours[i]]
			if got := lengths[i]; (got > 0) != (asIs && isCoded && i%3 > 0) ||
				got > 0 && !bytes.Equal(sp.P[:got], stored) || got == 0 && !bytes.Equal(sp.P, whole) {
				t.Errorf("as is %v: %s came as %d bytes of %d", asIs, neighbours[i], got, len(whole))
			}
		}
		one := make([]byte, len(spans[1].P))
		if err := r.ReadCoded(t.Context(), objects[0], []objstore.Span{{Off: spans[1].Off + 1, P: one[1:]}},
			ask[1:2]); err != nil || !bytes.Equal(one[1:], want[neighbours[1]][1:]) {
			t.Errorf("a part of a member: %v", err)
		}
	}
	dir := t.TempDir()
	if done, err := set.Unpack(t.Context(), dir, nil); err != nil || done.Files != len(want) {
		t.Fatalf("%+v, %v", done, err)
	}
	holds(t, dir, want)
	layout, err := catalog.BuildLayout(m, objects, func(yield func(catalog.Place, error) bool) {
		for member := range set.Members(t.Context()) {
			yield(catalog.Place{Path: member.Path, Shard: member.Shard, Off: member.Off}, nil)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	known := uintptr(0)
	for _, c := range r.shards {
		known += uintptr(cap(c.coded)) * unsafe.Sizeof(codedMember{})
	}
	if len(r.shards) != len(objects) || known == 0 || int64(known) > CodedBytes(layout) {
		t.Errorf("%d bytes for the coded members of %d shards, %d are reserved for %d",
			known, len(r.shards), CodedBytes(layout), len(objects))
	}
	// tar lists all by their names.
	listed := 0
	for _, o := range set.Shards {
		in := tar.NewReader(bytes.NewReader(get(t, s, o.Key)))
		for {
			h, err := in.Next()
			if err == io.EOF {
				break
			}
			if err != nil || want[h.Name] == nil && names[h.Name] != 0 {
				t.Fatalf("%+v, %v", h, err)
			}
			listed++
		}
	}
	if listed != len(want) {
		t.Errorf("tar lists %d members", listed)
	}
	// Not to be restored.
	_, err = openAnd(t, NewRestorer(s, nil, nil, 0))
	if err == nil || !strings.Contains(err.Error(), "built with cgo") {
		t.Errorf("without a decoder: %v", err)
	}
	s.onRead = func(o objstore.Object, p []byte, off int64) {
		if strings.HasSuffix(o.Key, ".tar") {
			p[len(p)/2] ^= 1
		}
	}
	r = NewRestorer(struct{ objstore.Reader }{s}, new(halves), nil, 0)
	for member := range set.Members(t.Context()) {
		if _, ok := coded.stored["src/"+member.Path]; !ok {
			continue
		}
		err := r.ReadAt(t.Context(), objects[member.Shard], make([]byte, member.Size), member.Off)
		if err == nil || !strings.Contains(err.Error(), "out/shard-") || !strings.Contains(err.Error(), "from a copy") {
			t.Errorf("%s is damaged: %v", member.Path, err)
		}
	}
	// While the store is away who waits for the same index waits once.
	away := &awayStore{Reader: s, came: make(chan struct{}, 100), back: make(chan struct{})}
	waiting := NewRestorer(away, new(halves), nil, 0)
	failed := make(chan error)
	for range 8 {
		go func() { failed <- waiting.ReadAt(t.Context(), objects[0], make([]byte, 1), 0) }()
	}
	<-away.came
	left, leave := context.WithCancel(t.Context())
	leave()
	if err := waiting.ReadAt(left, objects[0], make([]byte, 1), 0); !errors.Is(err, context.Canceled) {
		t.Errorf("who leaves: %v", err)
	}
	none := func() (int, bool) { return 0, false }
	if _, err := cached(left, waiting, "left", none, nil, nil); err == nil { // nil is not called
		t.Error("loaded for a reader that has left")
	}
	close(away.back)
	for range 8 {
		if err := <-failed; err == nil {
			t.Error("read without the store")
		}
	}
	// One damaged member among others: unpack names it.
	var bad Member
	for member := range set.Members(t.Context()) {
		if _, ok := coded.stored["src/"+member.Path]; ok && member.Shard == 1 {
			bad = member
		}
	}
	at, _ := mustShard(t, r, objects[1]).stored(bad.Off, false)
	s.onRead = func(o objstore.Object, p []byte, off int64) {
		if o.Key == set.Shards[1].Key && off <= at && at < off+int64(len(p)) {
			p[at-off] ^= 1
		}
	}
	if done, err := openAnd(t, r); err == nil ||
		!strings.Contains(err.Error(), ": "+bad.Path+": restore out/shard-000001.tar") || done.Files == 0 {
		t.Errorf("%s is damaged: %+v, %v", bad.Path, done, err)
	}
}

func mustShard(t *testing.T, r *Restorer, o objstore.Object) *codedShard {
	t.Helper()
	c, err := known(t.Context(), r, r.shards, o.ETag+" "+o.Key, func(ctx context.Context) (*codedShard, error) {
		return r.load(ctx, o)
	})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// openAnd unpacks out.
func openAnd(t *testing.T, r objstore.Reader) (Unpacked, error) {
	t.Helper()
	set, err := Open(t.Context(), r, out, OpenOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return set.Unpack(t.Context(), t.TempDir(), nil)
}
