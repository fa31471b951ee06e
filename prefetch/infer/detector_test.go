package infer

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/shoalfs/shoal/prefetch/order"
)

// A DistributedSampler with a usual seed is known within 64 reads, whatever the world, the workers, and
// who of them is seen, and so are its next epochs.
func TestLocksWithin64Reads(t *testing.T) {
	for _, c := range []struct {
		n, world int
		ranks    []int
		batch    int
		workers  int
		pids     bool
		seed     uint64
	}{
		{1000, 1, []int{0}, 32, 0, true, 0},
		{1000, 1, []int{0}, 32, 0, false, 0},
		{1000, 1, []int{0}, 32, 4, true, 0},
		{1000, 1, []int{0}, 32, 4, false, 0},
		{1000, 1, []int{0}, 1, 4, true, 7},
		{1000, 1, []int{0}, 2, 2, true, 7},
		{5000, 8, upTo(8), 16, 2, true, 0},
		{5000, 8, []int{3}, 16, 2, true, 0},
		{5000, 8, []int{3}, 16, 2, false, 0},
		{5000, 8, []int{2, 3}, 16, 2, true, 42},
		{100000, 64, []int{37}, 64, 4, true, 1234},
		{1281167, 8, upTo(8), 256, 1, true, 0},
		{1281167, 8, []int{7}, 256, 8, true, 2024},
		{300, 2, upTo(2), 8, 2, true, 0},
	} {
		t.Run(fmt.Sprintf("n=%d,world=%d,ranks=%v,batch=%d,workers=%d,pids=%v,seed=%d",
			c.n, c.world, c.ranks, c.batch, c.workers, c.pids, c.seed), func(t *testing.T) {
			rng := rand.New(rand.NewPCG(1, uint64(c.n)))
			d := NewDetector(whole(c.n))
			l := loader{world: c.world, ranks: c.ranks, batch: c.batch, workers: c.workers, ahead: 2, pids: c.pids,
				first: 100}
			for epoch := range 3 {
				l.order = order.Torch(c.n, c.seed, epoch, c.world, 0, c.world-1, false)
				l.order = slicedOrder{l.order, min(l.order.Len(), 64*c.world*c.batch*max(c.workers, 1))}
				l.first += 1000
				opens := l.opens(rng)
				if epoch == 0 && len(opens) > 3000 {
					opens = opens[:3000]
				}
				changes := watch(d, opens, Usual)
				f, e, ok := d.Finding()
				t.Logf("epoch %d: %v, %.0f bits from %d reads, world %d ranks %d-%d",
					epoch, changes, f.Bits, f.Reads, f.World, f.First, f.Last)
				want := Locked
				if epoch > 0 {
					want = Followed
				}
				if !ok || len(changes) == 0 || changes[0].what != want || changes[0].at > 64 || e != epoch {
					t.Fatalf("epoch %d, %v", e, changes)
				}
				if sh, _ := f.Source.Shuffle(e); sh != (Shuffle{Seed: uint32(c.seed) + uint32(epoch)}) {
					t.Errorf("%v", sh)
				}
				if len(c.ranks) == c.world && f.World != 1 ||
					len(c.ranks) < c.world && (f.World != c.world || f.First != c.ranks[0] ||
						f.Last != c.ranks[len(c.ranks)-1]) {
					t.Errorf("world %d, ranks %d to %d", f.World, f.First, f.Last)
				}
				// What is said to come is what the ranks read, but for the padding.
				o := f.Order(epoch)
				for _, x := range opens {
					if !slices.Contains(firstOf(o, 20000*max(1, 8)), int(x.Sample)) {
						t.Fatalf("sample %d is not in the order", x.Sample)
					}
					break
				}
			}
		})
	}
}

// Threads that take samples from one list in turns, as most programs but DataLoader have them, are told, too.
func TestThreads(t *testing.T) {
	for _, n := range []int{400, 5000, 300000} {
		rng := rand.New(rand.NewPCG(6, 6))
		o := order.Torch(n, 21, 0, 1, 0, 0, false)
		var opens []Open
		for pos := range 390 {
			opens = append(opens, Open{uint32(1 + rng.IntN(8)), uint32(o.At(pos))})
			if at := len(opens) - 1; at > 0 && rng.IntN(3) == 0 {
				opens[at], opens[at-1] = opens[at-1], opens[at]
			}
		}
		d := NewDetector(whole(n))
		changes := watch(d, opens, Usual)
		if len(changes) != 1 || changes[0].what != Locked || changes[0].at > 64 {
			t.Errorf("%d samples: %v", n, changes)
		}
	}
}

// The head of a permutation is torch's.
func TestHead(t *testing.T) {
	for _, n := range []int{1, 2, 3, 10, 128, 129, 1000, 100000} {
		for _, seed := range []uint32{0, 1, 1 << 31, 1<<32 - 1} {
			for _, skip := range []int{0, 2} {
				g := order.NewGenerator(uint64(seed))
				for range skip {
					g.Random()
				}
				want := g.RandPerm(n)
				out := make([]uint32, min(n, headLen))
				draws := make([]uint32, headLen+skip)
				words(seed, draws)
				s := newSwapped(headLen)
				s.head(n, draws[skip:], out)
				if !slices.Equal(out, want[:len(out)]) {
					t.Errorf("n=%d, seed %d after %d: %v, want %v", n, seed, skip, out, want[:len(out)])
				}
			}
		}
	}
}

func firstOf(o order.Order, n int) (list []int) {
	for pos := range min(n, o.Len()) {
		list = append(list, o.At(pos))
	}
	return list
}

// epochs feeds the opens of some epochs of a loader, each by new workers, and returns the changes by epoch.
func epochs(d *Detector, l loader, rng *rand.Rand, orders []order.Order, between func(epoch int) []Open) (
	all [][]change) {
	for epoch, o := range orders {
		l.order = o
		l.first += 1000
		opens := l.opens(rng)
		if between != nil {
			opens = append(opens, between(epoch)...)
		}
		all = append(all, watch(d, opens, Usual))
	}
	return all
}

func one(n int, seeds ...uint64) (list []order.Order) {
	for _, s := range seeds {
		list = append(list, order.Torch(n, s, 0, 1, 0, 0, false))
	}
	return list
}

// What trainers do from epoch to epoch is followed: nothing is unlocked, and the prediction holds.
func TestFollows(t *testing.T) {
	const n = 800
	var drawn, persistent, private []order.Order
	each, once := order.NewGenerator(1234), order.NewGenerator(1234)
	once.Int63()
	for range 4 {
		each.Int63()
		drawn = append(drawn, order.Torch(n, each.Int63(), 0, 1, 0, 0, false))
		persistent = append(persistent, order.Torch(n, once.Int63(), 0, 1, 0, 0, false))
	}
	g := order.NewGenerator(9)
	for range 4 {
		g.Int63() // the base seed
		private = append(private, order.List(g.RandPerm(n)))
		g.RandPerm(n) // what RandomSampler draws at the end
	}
	validation := func(int) (opens []Open) {
		for i := range 300 {
			opens = append(opens, Open{5, uint32(n + i)})
		}
		return opens
	}
	within := func(int) (opens []Open) { // of the same files, in sequence, by other workers
		for i := range 150 {
			opens = append(opens, Open{6, uint32(i)})
		}
		return opens
	}
	for _, c := range []struct {
		name    string
		orders  []order.Order
		between func(int) []Open
		locks   int
	}{
		{"successive", one(n, 3, 4, 5), nil, 1},
		{"never told the epoch", one(n, 3, 3, 3), nil, 1},
		{"drawn after manual_seed", drawn, nil, 1},
		{"drawn, persistent workers", persistent, nil, 2},
		{"a generator of its own", private, nil, 1},
		{"validation elsewhere", one(n, 3, 4, 5), validation, 1},
		{"validation of the same files", one(n, 3, 4, 5), within, 1},
	} {
		for _, workers := range []int{0, 3} {
			for _, pids := range []bool{true, false}[:1+workers/3] {
				t.Run(fmt.Sprintf("%s,workers=%d,pids=%v", c.name, workers, pids), func(t *testing.T) {
					d := NewDetector([]Subset{{Len: n + 300}, {Folder: "train", Len: n}})
					l := loader{world: 1, ranks: []int{0}, batch: 16, workers: workers, ahead: 2, pids: pids}
					all := epochs(d, l, rand.New(rand.NewPCG(1, 1)), c.orders, c.between)
					locks := 0
					for _, e := range all {
						for _, ch := range e {
							switch ch.what {
							case Unlocked:
								t.Errorf("unlocked: %v", all)
							case Locked:
								locks++
							}
						}
					}
					f, e, ok := d.Finding()
					if locks != c.locks || !ok {
						t.Fatalf("%v, want %d locks", all, c.locks)
					}
					reads, last := f.Order(e), c.orders[len(c.orders)-1]
					for pos := range n {
						if reads.At(pos) != last.At(pos) {
							t.Fatalf("%v: %v at epoch %d is not what was read last", all, f, e)
						}
					}
				})
			}
		}
	}
}

// An epoch that comes from a page cache is over before a search of its seed can begin, and is followed all the same.
func TestFollowsWithoutSearches(t *testing.T) {
	const n = 1200
	rng := rand.New(rand.NewPCG(8, 8))
	l := loader{world: 1, ranks: []int{0}, batch: 8, workers: 2, ahead: 2, pids: true}
	d := NewDetector(whole(n))
	for epoch, o := range one(n, 42, 43, 44, 45) {
		l.order = o
		l.first += 1000
		opens := l.opens(rng)
		if epoch == 0 {
			watch(d, opens, Usual)
			continue
		}
		var changes []change
		for i, o := range opens {
			if c := d.Open(o); c != None {
				changes = append(changes, change{c, i + 1})
			}
		}
		if len(changes) != 1 || changes[0].what != Followed || changes[0].at > maxDoubt {
			t.Fatalf("epoch %d: %v", epoch, changes)
		}
	}
}

// BenchmarkFollow looks for what follows a shuffle of 1,281,167 samples, of the kind with the most successors.
func BenchmarkFollow(b *testing.B) {
	const n = 1281167
	g := order.NewGenerator(1234)
	g.Skip(6)
	o := order.Torch(n, g.Int63(), 0, 1, 0, 0, false)
	var opens []Open
	for pos := range firstDoubt {
		opens = append(opens, Open{1, uint32(o.At(pos))})
	}
	for b.Loop() {
		if f, ok := nearest(Source{Default, 1234, 3, loaderStep}, opens, Subset{Len: n}); !ok {
			b.Fatal(f)
		}
	}
}

// A reader that does something else is let go after some opens, and found again.
func TestUnlocks(t *testing.T) {
	const n = 2000
	rng := rand.New(rand.NewPCG(2, 2))
	for _, workers := range []int{0, 2} {
		l := loader{world: 1, ranks: []int{0}, batch: 16, workers: workers, ahead: 2, pids: true}
		d := NewDetector(whole(n))
		l.order = one(n, 11)[0]
		watch(d, l.opens(rng)[:700], Usual)
		if _, _, ok := d.Finding(); !ok {
			t.Fatal("no lock")
		}
		l.first, l.order = 100, order.List(order.NewGenerator(3<<30).RandPerm(n))
		changes := watch(d, l.opens(rng)[:500], Usual)
		if len(changes) != 1 || changes[0].what != Unlocked || changes[0].at > 2*maxDoubt {
			t.Errorf("%v", changes)
		}
		l.first, l.order = 200, one(n, 77)[0]
		changes = watch(d, l.opens(rng), Usual)
		if f, _, ok := d.Finding(); !ok || f.Source.Seed != 77 {
			t.Errorf("%v: %v", changes, f)
		}
	}
}

// Other readers of all files change nothing, as long as they are not far faster.
func TestOthersDoNotUnlock(t *testing.T) {
	const n = 3000
	for name, other := range map[string]func(i int, rng *rand.Rand) int{
		"random": func(_ int, rng *rand.Rand) int { return rng.IntN(n) },
		"scan":   func(i int, _ *rand.Rand) int { return i % n },
	} {
		for _, pids := range []bool{true, false} {
			rng := rand.New(rand.NewPCG(3, 3))
			d := NewDetector(whole(n))
			l := loader{order: one(n, 5)[0], world: 1, ranks: []int{0}, batch: 32, workers: 2, ahead: 2,
				pids: pids, first: 1}
			var opens []Open
			for i, o := range l.opens(rng) {
				opens = append(opens, o)
				if i > 100 {
					p := uint32(99)
					if !pids {
						p = 0
					}
					opens = append(opens, Open{p, uint32(other(i, rng))})
				}
			}
			changes := watch(d, opens, Usual)
			if len(changes) != 1 || changes[0].what != Locked {
				t.Errorf("%s, pids %v: %v", name, pids, changes)
			}
		}
	}
}

// The training set may be a folder's, and then it has numbers of its own.
func TestSubset(t *testing.T) {
	subsets := []Subset{{Len: 5000}, {Folder: "test", Len: 1000}, {Folder: "train", First: 1000, Len: 3000},
		{Folder: "val", First: 4000, Len: 1000}}
	rng := rand.New(rand.NewPCG(4, 4))
	d := NewDetector(subsets)
	l := loader{order: offset{one(3000, 0)[0], 1000}, world: 1, ranks: []int{0}, batch: 32, workers: 2, ahead: 2,
		pids: true, first: 1}
	changes := watch(d, l.opens(rng), Usual)
	f, _, ok := d.Finding()
	if !ok || f.Subset != subsets[2] || changes[0].at > 64 {
		t.Fatalf("%v: %v", changes, f)
	}
	o := f.Order(0)
	for pos := range 3000 {
		if o.At(pos) != l.order.At(pos) {
			t.Fatalf("position %d: %d, want %d", pos, o.At(pos), l.order.At(pos))
		}
	}
	// Whereas a loader of all of them shuffles all numbers.
	d = NewDetector(subsets)
	l.order = one(5000, 0)[0]
	watch(d, l.opens(rng), Usual)
	if f, _, ok := d.Finding(); !ok || f.Subset != subsets[0] {
		t.Errorf("%v", f)
	}
}

// Small datasets carry too little evidence: there is no lock, and no harm.
func TestTooSmall(t *testing.T) {
	for _, n := range []int{0, 1, 2, 3, 7, 20} {
		d := NewDetector(whole(n))
		rng := rand.New(rand.NewPCG(5, 5))
		l := loader{order: one(n, 0)[0], world: 1, ranks: []int{0}, batch: 2, workers: 2, ahead: 2,
			pids: true, first: 1}
		for range 5 {
			if changes := watch(d, l.opens(rng), Usual); len(changes) > 0 && n < 20 {
				t.Errorf("%d samples: %v", n, changes)
			}
		}
	}
}
