package loader

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"math/bits"
	"slices"
	"sort"
	"strings"

	"github.com/shoalfs/shoal/prefetch/order"
)

// Deriving is a Transform that reads a dataset derived from the served one: the session's order, batches and ids
// are those of the derived dataset.
type Deriving interface {
	Transform
	// Derived returns the dataset to read instead of the one that the transform was compiled for. It has the same
	// version: the transform's hash distinguishes them in states.
	Derived() Dataset
}

// Packed is a dataset whose samples are rows of several documents of another dataset. Each document is whole, in one
// row, and a row is read as its documents back to back (see [Packed.Begin]). Which documents share a row depends
// only on their sizes, so it is the same in every epoch, on every machine.
type Packed struct {
	Dataset          // of the documents
	docs    []uint32 // documents, row by row
	first   []uint32 // of each row in docs, and the end
	waste   Waste
}

// Waste is the cost of a packing.
type Waste struct {
	Rows      int   `json:"rows"`
	Documents int   `json:"documents"`
	Cut       int   `json:"cut_documents"` // longer than a row
	Tokens    int64 `json:"tokens"`        // in rows
	Padding   int64 `json:"padding"`       // tokens that rows are filled up with
	Most      int   `json:"most"`          // documents in one row
}

func (w Waste) String() string {
	share := 100 * float64(w.Padding) / max(1, float64(w.Tokens+w.Padding))
	return fmt.Sprintf("%d documents in %d rows, %.2f%% padding, %d cut", w.Documents, w.Rows, share, w.Cut)
}

// Pack puts the samples of ds into rows of length tokens by best fit decreasing: longest document first, each into the
// row where it leaves the least room (of several, the one changed last), or into a new row. That needs at most 11/9
// of the fewest rows possible (Johnson, "Near-optimal bin packing algorithms", MIT 1973), and practically no more
// than those if documents are much shorter than the row. Documents of equal length are taken in the order
// uniform:seed=0, so that neighbours do not share a row. tokens computes a document's length from its size. A document
// longer than a row is an error, or is cut if cut is true. It takes O(n log length).
func Pack(ds Dataset, length int, cut bool, tokens func(size int64) (int64, error)) (*Packed, error) {
	n := ds.Len()
	if n >= math.MaxUint32 {
		return nil, fmt.Errorf("%d documents: the limit is 2^32-2", n)
	}
	places := order.Uniform(n, 0, 0)
	p := &Packed{Dataset: ds, docs: make([]uint32, n), first: []uint32{0}}
	lengths := make([]uint32, n)
	count := make([]int, length+2) // documents by length, then where they begin, the longest first
	for i := range lengths {
		t, err := tokens(ds.Size(i))
		if err != nil {
			return nil, fmt.Errorf("document %d (%s): %w", i, ds.Path(i), err)
		}
		if t > int64(length) {
			if !cut {
				return nil, fmt.Errorf(
					"document %d (%s) has %d tokens, a row has %d: use longer rows, or long='cut'", i,
					ds.Path(i), t, length)
			}
			t = int64(length)
			p.waste.Cut++
		}
		lengths[i] = uint32(t)
		count[length-int(t)+1]++
		p.waste.Tokens += t
	}
	for i := 1; i < len(count); i++ {
		count[i] += count[i-1]
	}
	sorted := make([]uint32, n)
	for place := range n {
		doc := places.At(place)
		at := &count[length-int(lengths[doc])]
		sorted[*at] = uint32(doc)
		*at++
	}
	rows := newShelf(length)
	rowOf := make([]uint32, n)
	for _, doc := range sorted {
		rowOf[doc] = rows.put(int(lengths[doc]))
	}
	// Counting sort by row; within a row the longest document comes first.
	begin := make([]uint32, len(rows.next)+1)
	for _, r := range rowOf {
		begin[r+1]++
	}
	for r := 1; r < len(begin); r++ {
		p.waste.Most = max(p.waste.Most, int(begin[r]))
		begin[r] += begin[r-1]
	}
	p.first = slices.Clone(begin)
	for _, doc := range sorted {
		p.docs[begin[rowOf[doc]]] = doc
		begin[rowOf[doc]]++
	}
	p.waste.Rows, p.waste.Documents = p.Len(), n
	p.waste.Padding = int64(p.Len())*int64(length) - p.waste.Tokens
	return p, nil
}

// shelf keeps rows by the room left in them: a list for each amount of room, and a tree of bits that marks the lists
// that are not empty.
type shelf struct {
	next  []uint32   // of each row, the next in its list
	head  []uint32   // by room, row+1
	level [][]uint64 // bit i of level k: something in level k-1's word i; level 0 is by room
}

func newShelf(length int) *shelf {
	s := &shelf{head: make([]uint32, length+1)}
	for n := length + 1; ; n = (n + 63) / 64 {
		s.level = append(s.level, make([]uint64, (n+63)/64))
		if n <= 64 {
			return s
		}
	}
}

// put finds a row for a document of n tokens.
func (s *shelf) put(n int) uint32 {
	room, ok := s.find(n)
	var row uint32
	if ok {
		row = s.head[room] - 1
		if s.head[room] = s.next[row]; s.head[room] == 0 {
			s.clear(room)
		}
	} else {
		row, room = uint32(len(s.next)), len(s.head)-1
		s.next = append(s.next, 0)
	}
	room -= n
	s.next[row] = s.head[room]
	s.head[room] = row + 1
	for i := range s.level {
		s.level[i][room>>6] |= 1 << (room & 63)
		room >>= 6
	}
	return row
}

func (s *shelf) clear(room int) {
	for i := range s.level {
		if s.level[i][room>>6] &^= 1 << (room & 63); s.level[i][room>>6] != 0 {
			return
		}
		room >>= 6
	}
}

// find returns the smallest room of at least n that some row has.
func (s *shelf) find(n int) (int, bool) {
	for i := range s.level {
		if w := n >> 6; w < len(s.level[i]) {
			if rest := s.level[i][w] >> (n & 63); rest != 0 {
				n += bits.TrailingZeros64(rest)
				for i--; i >= 0; i-- {
					n = n<<6 + bits.TrailingZeros64(s.level[i][n])
				}
				return n, true
			}
		}
		n = n>>6 + 1
	}
	return 0, false
}

// Over returns the same packing for a dataset whose samples have the same sizes.
func (p *Packed) Over(ds Dataset) *Packed {
	q := *p
	q.Dataset = ds
	return &q
}

// Waste returns the cost of the packing.
func (p *Packed) Waste() Waste { return p.waste }

// Documents returns the samples of the base dataset that make a row, longest first.
func (p *Packed) Documents(row int) []uint32 { return p.docs[p.first[row]:p.first[row+1]] }

// Len implements Dataset.
func (p *Packed) Len() int { return len(p.first) - 1 }

// Label implements Dataset: a row has none.
func (p *Packed) Label(int) int { return -1 }

// Classes implements Dataset.
func (p *Packed) Classes() []string { return nil }

// Groups implements Dataset: the documents of a row may be in any shard.
func (p *Packed) Groups() (order.Groups, string) { return nil, "" }

// Size implements Dataset.
func (p *Packed) Size(row int) int64 {
	docs := p.Documents(row)
	n := packedHeader(len(docs))
	for _, d := range docs {
		n += p.Dataset.Size(int(d))
	}
	return n
}

// Path implements Dataset.
func (p *Packed) Path(row int) string {
	const shown = 3
	docs := p.Documents(row)
	var names []string
	for _, d := range docs[:min(shown, len(docs))] {
		names = append(names, p.Dataset.Path(int(d)))
	}
	if len(docs) > shown {
		names = append(names, fmt.Sprintf("and %d more", len(docs)-shown))
	}
	return "row of " + strings.Join(names, ", ")
}

// packedHeader is the length of the header before the documents of a row.
func packedHeader(docs int) int64 { return 8 + 16*int64(docs) }

// Parts implements Dataset.
func (p *Packed) Parts(string) (found, numbered bool) { return false, false }

// Begin implements Dataset. A row is read as, little-endian,
//
//	u64 number of documents
//	... for each: u64 sample of the base dataset, u64 length in bytes
//	... the documents, back to back
func (p *Packed) Begin(name string, seq order.Order, start, weight int, _ ...string) (Stream, error) {
	o := &packedOrder{p: p, seq: seq, first: make([]int, seq.Len()+1)}
	for i := range seq.Len() {
		o.first[i+1] = o.first[i] + len(p.Documents(seq.At(i)))
	}
	s, err := p.Dataset.Begin(name, o, o.first[start], weight)
	if err != nil {
		return nil, err
	}
	return &packedStream{s, o}, nil
}

// packedOrder is an order of rows, expanded to their documents.
type packedOrder struct {
	p     *Packed
	seq   order.Order
	first []int // position of each row's first document
}

func (o *packedOrder) Len() int { return o.first[len(o.first)-1] }

func (o *packedOrder) At(pos int) int {
	row := sort.SearchInts(o.first, pos+1) - 1
	return int(o.p.Documents(o.seq.At(row))[pos-o.first[row]])
}

type packedStream struct {
	Stream
	order *packedOrder
}

// Read implements Stream. It reads the documents one after another: the engine prefetches them together.
func (s *packedStream) Read(ctx context.Context, pos int) ([]byte, func(), error) {
	row := s.order.seq.At(pos)
	docs := s.order.p.Documents(row)
	out := make([]byte, packedHeader(len(docs)), s.order.p.Size(row))
	binary.LittleEndian.PutUint64(out, uint64(len(docs)))
	for i, d := range docs {
		data, release, err := s.Stream.Read(ctx, s.order.first[pos]+i)
		if err != nil {
			return nil, nil, fmt.Errorf("document %d (%s): %w", d, s.order.p.Dataset.Path(int(d)), err)
		}
		entry := out[packedHeader(i):]
		binary.LittleEndian.PutUint64(entry, uint64(d))
		binary.LittleEndian.PutUint64(entry[8:], uint64(len(data)))
		out = append(out, data...)
		release()
	}
	return out, func() {}, nil
}
