package loader

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/shoalfs/shoal/prefetch/order"
)

// What becomes of 10 samples in batches of 2 for each of 3 ranks: one global batch of 6, and 4 samples
// that do not fill another.
func TestTails(t *testing.T) {
	for _, c := range []struct {
		tail  Tail
		world int
		want  string // by rank, batch by batch; -1 is padding
	}{
		{Drop, 3, "[[[0 3]] [[1 4]] [[2 5]]]"},
		{Pad, 3, "[[[0 3] [6 9]] [[1 4] [7 -1]] [[2 5] [8 -1]]]"},
		{Uneven, 3, "[[[0 3] [6 9]] [[1 4] [7]] [[2 5] [8]]]"},
		{Drop, 6, "[[] [] [] [] [] []]"},
		{Pad, 6, "[[[0 6]] [[1 7]] [[2 8]] [[3 9]] [[4 -1]] [[5 -1]]]"},
		{Uneven, 6, "[[[0 6]] [[1 7]] [[2 8]] [[3 9]] [[4]] [[5]]]"},
		{Pad, 4, "[[[0 4] [8 -1]] [[1 5] [9 -1]] [[2 6] [-1 -1]] [[3 7] [-1 -1]]]"},
		{Uneven, 4, "[[[0 4] [8]] [[1 5] [9]] [[2 6]] [[3 7]]]"}, // two ranks have one batch less
		{Drop, 1, "[[[0 1] [2 3] [4 5] [6 7] [8 9]]]"},
	} {
		var got [][][]int
		for rank := range c.world {
			p, err := newPlan(order.Sequential(10), 0, 2, c.world, rank, c.tail, nil)
			if err != nil {
				t.Fatal(err)
			}
			got = append(got, cutAll(p))
		}
		if fmt.Sprint(got) != c.want {
			t.Errorf("%s, %d ranks:\n got %v\nwant %s", c.tail, c.world, got, c.want)
		}
	}
}

// cutAll returns the samples of all batches of a rank, -1 for padding.
func cutAll(p plan) [][]int {
	list := [][]int{}
	for k := range p.batches() {
		b := []int{}
		for i := range p.rows(k) {
			if i < p.samples(k) {
				b = append(b, p.seq.At(p.pos(k)+i))
			} else {
				b = append(b, -1)
			}
		}
		list = append(list, b)
	}
	return list
}

// The model deals the positions from the cursor on like cards: to the ranks in turn, a global batch at a time.
func TestPlanModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(0, 120).Draw(t, "n")
		world := rapid.IntRange(1, 9).Draw(t, "world")
		batch := rapid.IntRange(1, 7).Draw(t, "batch")
		cursor := rapid.IntRange(0, n).Draw(t, "cursor") // anywhere, as after another global batch
		tail := rapid.SampledFrom([]Tail{Drop, Pad, Uneven}).Draw(t, "tail")
		whole := order.Uniform(n, rapid.Uint64Range(0, 5).Draw(t, "seed"), 0)

		want := make([][][]int, world)
		for first := cursor; first < n; first += batch * world {
			if tail == Drop && n-first < batch*world {
				break
			}
			for rank := range world {
				var b []int
				for i := range batch {
					if pos := first + i*world + rank; pos < n {
						b = append(b, whole.At(pos))
					} else if tail == Pad {
						b = append(b, -1)
					}
				}
				if b != nil {
					want[rank] = append(want[rank], b)
				}
			}
		}
		seen := map[int]bool{}
		steps := -1
		for rank := range world {
			p, err := newPlan(whole, cursor, batch, world, rank, tail, nil)
			if err != nil {
				t.Fatal(err)
			}
			got := cutAll(p)
			if !slices.EqualFunc(got, want[rank], slices.Equal) {
				t.Fatalf("rank %d: got %v, want %v", rank, got, want[rank])
			}
			if steps >= 0 && tail != Uneven && len(got) != steps {
				t.Fatalf("rank %d has %d batches, others %d", rank, len(got), steps)
			}
			if steps = len(got); tail == Uneven && abs(len(got)-len(want[0])) > 1 {
				t.Fatalf("rank %d has %d batches, rank 0 %d", rank, len(got), len(want[0]))
			}
			for k, b := range got {
				for _, id := range b {
					if id >= 0 && seen[id] {
						t.Fatalf("sample %d twice", id)
					}
					seen[id] = true
				}
				if after := min(n, cursor+(k+1)*batch*world); p.after(k) != after {
					t.Fatalf("the cursor after batch %d is %d, not %d", k, p.after(k), after)
				}
			}
		}
		delete(seen, -1)
		if all := n - cursor; tail != Drop && len(seen) != all || tail == Drop && len(seen) != all-all%(batch*world) {
			t.Fatalf("%d samples of %d", len(seen), all)
		}
	})
}

func abs(n int) int { return max(n, -n) }

// A placement changes which rank of a global batch reads a sample, and nothing else.
func TestPlacedPlan(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(0, 120).Draw(t, "n")
		ranks := rapid.SliceOfN(rapid.IntRange(0, 3), 1, 7).Draw(t, "ranks")
		world := len(ranks)
		batch := rapid.IntRange(1, 7).Draw(t, "batch")
		cursor := rapid.IntRange(0, n).Draw(t, "cursor")
		tail := rapid.SampledFrom([]Tail{Drop, Pad, Uneven}).Draw(t, "tail")
		whole := order.Uniform(n, rapid.Uint64Range(0, 5).Draw(t, "seed"), 0)
		text := fmt.Sprintf(`{"v":2,"nodes":[{"id":"a","weight":1},{"id":"b","weight":1},{"id":"c","weight":2},{"id":"d","weight":3}],"ranks":%s}`,
			strings.ReplaceAll(fmt.Sprint(ranks), " ", ","))
		by, err := parsePlacement(text, world)
		if err != nil {
			t.Fatal(err)
		}
		by.owner = by.Owners([16]byte{}, func(i int) uint64 { return uint64(i) })

		plain, placed := make([][]int, n), make([][]int, n) // by global batch: the samples of all ranks
		local, most := 0, 0
		for rank := range world {
			p, err := newPlan(whole, cursor, batch, world, rank, tail, nil)
			if err != nil {
				t.Fatal(err)
			}
			q, err := newPlan(whole, cursor, batch, world, rank, tail, by)
			if err != nil {
				t.Fatal(err)
			}
			if p.batches() != q.batches() || p.start != q.start || p.seq.Len() != q.seq.Len() {
				t.Fatalf("rank %d: %d batches from %d of %d, and plain %d from %d of %d",
					rank, q.batches(), q.start, q.seq.Len(), p.batches(), p.start, p.seq.Len())
			}
			l := q.seq.(order.Locator)
			for pos := range q.seq.Len() {
				sample := q.seq.At(pos)
				if g := q.globalPos(pos); whole.At(g) != sample {
					t.Fatalf("position %d of rank %d is sample %d, and at %d in the order is %d",
						pos, rank, sample, g, whole.At(g))
				}
				if at := l.Find(sample, 0); at != pos || l.Find(sample, pos+1) >= 0 {
					t.Fatalf("sample %d of rank %d is at %d, found at %d", sample, rank, pos, at)
				}
			}
			for k := range p.batches() {
				if p.rows(k) != q.rows(k) || p.samples(k) != q.samples(k) || p.after(k) != q.after(k) {
					t.Fatalf("batch %d of rank %d has %d rows and %d samples, plain %d and %d",
						k, rank, q.rows(k), q.samples(k), p.rows(k), p.samples(k))
				}
				for i := range p.samples(k) {
					sample := q.seq.At(q.pos(k) + i)
					plain[k] = append(plain[k], p.seq.At(p.pos(k)+i))
					placed[k] = append(placed[k], sample)
					local += b2i(by.owner(sample) == ranks[rank])
					most += b2i(by.owner(plain[k][len(plain[k])-1]) == ranks[rank])
				}
			}
			if found := l.Find(n, 0); found >= 0 {
				t.Fatalf("found sample %d at %d", n, found)
			}
		}
		for k := range plain {
			slices.Sort(plain[k])
			slices.Sort(placed[k])
			if !slices.Equal(plain[k], placed[k]) {
				t.Fatalf("batch %d has %v, and without a placement %v", k, placed[k], plain[k])
			}
		}
		if local < most {
			t.Fatalf("%d samples are local, and %d without a placement", local, most)
		}
	})
}

func b2i(b bool) int {
	if b {
		return 1
	}
	return 0
}
