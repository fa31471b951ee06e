package loader_test

import (
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/loader"
	"github.com/shoalfs/shoal/prefetch/order"
)

// sized is a dataset of documents of these lengths in bytes.
func sized(lengths []int) *testDataset {
	return &testDataset{Samples: len(lengths), Bytes: func(i int) []byte {
		b := make([]byte, lengths[i])
		for k := range b {
			b[k] = byte(i + k)
		}
		return b
	}}
}

func same(size int64) (int64, error) { return size, nil }

// bestFit is best fit decreasing as its definition has it, in quadratic time: the number of rows it needs.
func bestFit(lengths []int, row int) int {
	sorted := slices.Clone(lengths)
	slices.SortFunc(sorted, func(a, b int) int { return b - a })
	var room []int
	for _, n := range sorted {
		best := -1
		for i, r := range room {
			if r >= n && (best < 0 || r < room[best]) {
				best = i
			}
		}
		if best < 0 {
			best, room = len(room), append(room, row)
		}
		room[best] -= n
	}
	return len(room)
}

// TestPack holds random packings against the definition: every document once and whole, no row too long, as many
// rows as best fit needs, and the same again.
func TestPack(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	rng := rand.New(rand.NewPCG(seed, 7))
	for round := range 150 {
		row := 1 + rng.IntN([]int{4, 64, 65, 700, 5000}[round%5])
		lengths := make([]int, rng.IntN(400))
		for i := range lengths {
			lengths[i] = rng.IntN(row + 1)
			if round%2 == 0 {
				lengths[i] = rng.IntN(min(row, 9) + 1)
			}
		}
		ds := sized(lengths)
		p, err := loader.Pack(ds, row, false, same)
		if err != nil {
			t.Fatal(err)
		}
		seen := make([]bool, len(lengths))
		total, most := 0, 0
		for r := range p.Len() {
			n := 0
			for _, d := range p.Documents(r) {
				if seen[d] {
					t.Fatalf("seed %d: document %d twice", seed, d)
				}
				seen[d] = true
				n += lengths[d]
			}
			if n > row {
				t.Fatalf("seed %d: row of %d tokens, %d fit", seed, n, row)
			}
			total, most = total+n, max(most, len(p.Documents(r)))
		}
		if i := slices.Index(seen, false); i >= 0 {
			t.Fatalf("seed %d: document %d is missing", seed, i)
		}
		if want := bestFit(lengths, row); p.Len() != want {
			t.Fatalf("seed %d, round %d: %d rows, best fit needs %d", seed, round, p.Len(), want)
		}
		w := p.Waste()
		if want := (loader.Waste{Rows: p.Len(), Documents: len(lengths), Tokens: int64(total),
			Padding: int64(p.Len()*row - total), Most: most}); w != want {
			t.Fatalf("seed %d: waste %+v, want %+v", seed, w, want)
		}
		again, _ := loader.Pack(ds, row, false, same)
		for r := range p.Len() {
			if !slices.Equal(p.Documents(r), again.Documents(r)) {
				t.Fatalf("seed %d: row %d differs the second time", seed, r)
			}
		}
	}
}

func TestPackLongDocuments(t *testing.T) {
	ds := sized([]int{3, 11, 5})
	if _, err := loader.Pack(ds, 10, false, same); err == nil || !strings.Contains(err.Error(), "document 1") ||
		!strings.Contains(err.Error(), "long='cut'") {
		t.Errorf("a document longer than a row: %v", err)
	}
	p, err := loader.Pack(ds, 10, true, same)
	if err != nil || p.Len() != 2 || p.Waste().Cut != 1 {
		t.Errorf("cut: %v, %+v", err, p.Waste())
	}
	odd := errors.New("odd")
	if _, err := loader.Pack(ds, 10, true, func(int64) (int64, error) { return 0, odd }); !errors.Is(err, odd) {
		t.Errorf("size that is no document: %v", err)
	}
}

// TestPackedRead reads rows in another order than they lie, from the middle on, and finds each document whole.
func TestPackedRead(t *testing.T) {
	lengths := make([]int, 200)
	for i := range lengths {
		lengths[i] = i * 7 % 50
	}
	ds := sized(lengths)
	p, err := loader.Pack(ds, 64, false, same)
	if err != nil {
		t.Fatal(err)
	}
	spec, err := order.Parse("uniform:seed=3")
	if err != nil {
		t.Fatal(err)
	}
	seq, err := spec.Order(p.Len(), 1)
	if err != nil {
		t.Fatal(err)
	}
	begun := -1
	ds.Begun = func(_ string, base order.Order, start int) {
		begun = start
		n := 0
		for pos := range seq.Len() {
			for _, d := range p.Documents(seq.At(pos)) {
				if got := base.At(n); got != int(d) {
					t.Errorf("position %d is document %d, want %d", n, got, d)
				}
				n++
			}
		}
		if n != base.Len() {
			t.Errorf("%d positions, want %d", base.Len(), n)
		}
	}
	first := p.Len() / 2
	s, err := p.Begin("test", seq, first, 1)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	docs := 0
	for pos := range first {
		docs += len(p.Documents(seq.At(pos)))
	}
	if begun != docs {
		t.Errorf("began at document %d, want %d", begun, docs)
	}
	for pos := first; pos < seq.Len(); pos++ {
		row := seq.At(pos)
		b, release, err := s.Read(t.Context(), pos)
		if err != nil {
			t.Fatal(err)
		}
		if int64(len(b)) != p.Size(row) {
			t.Errorf("row %d: %d bytes, Size says %d", row, len(b), p.Size(row))
		}
		n := int(binary.LittleEndian.Uint64(b))
		at := 8 + 16*n
		for i, d := range p.Documents(row) {
			sample, size := binary.LittleEndian.Uint64(b[8+16*i:]), int(binary.LittleEndian.Uint64(b[16+16*i:]))
			if sample != uint64(d) || string(b[at:at+size]) != string(ds.Bytes(int(d))) {
				t.Errorf("row %d, document %d is not what was stored", row, d)
			}
			at += size
		}
		release()
	}
	if ds.Reading.Load() != 0 {
		t.Errorf("%d documents were not released", ds.Reading.Load())
	}
	ds.Begun = nil
	gone := &objstore.Error{Op: "read", Key: "x", Kind: objstore.KindNotFound, Err: errors.New("gone")}
	ds.Errors = map[int]error{int(p.Documents(0)[0]): gone}
	s2, err := p.Begin("test2", order.Sequential(p.Len()), 0, 1)
	if err != nil {
		t.Fatal(err)
	}
	defer s2.Close()
	if _, _, err := s2.Read(t.Context(), 0); !errors.Is(err, gone) {
		t.Errorf("a store's error: %v", err)
	}
}
