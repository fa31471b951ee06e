package prefetch

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/shoalfs/shoal/prefetch/order"
	"pgregory.net/rapid"
)

// Skipped is how many positions below the frontier were not read.
func (t *Tracker) Skipped() int { return t.Unread(0, t.Frontier()) }

func newSource(seed uint64) source { return rand.New(rand.NewPCG(seed, 0)).IntN }

// follow opens the samples and, as the engine does, gives the next order after each move.
func follow(tk *Tracker, orders func(epoch int) order.Order, samples []int) {
	for _, s := range samples {
		if e, _ := tk.Open(s); e == NextEpoch {
			tk.SetNext(orders(tk.Epoch() + 1))
		}
	}
}

func torchOrders(n int, seed uint64) func(epoch int) order.Order {
	known := map[int]order.Order{}
	return func(epoch int) order.Order {
		if known[epoch] == nil {
			known[epoch] = order.Torch(n, seed, epoch, 1, 0, 0, false)
		}
		return known[epoch]
	}
}

// Trainers of all shapes: after each pass the tracker is in the right epoch, has counted the right
// number of passes, and holds every position of the pass to be read.
func TestTrackerFollowsTrainers(t *testing.T) {
	for _, n := range []int{10, 20, 100, 1000, 4000} {
		for _, d := range []trainer{{0, 1, 1}, {0, 32, 1}, {4, 16, 2}, {8, 64, 2}, {16, 256, 2}} {
			for _, share := range []float64{1, 0.5, 0.1, 0.02} {
				steps := int(float64(n) * share / float64(d.batch))
				if steps*d.batch < 10 && share < 1 {
					continue // a handful of opens cannot be told from noise
				}
				for _, same := range []bool{false, true} {
					name := fmt.Sprintf("n=%d %+v steps=%d same=%v", n, d, steps, same)
					draw := newSource(uint64(n))
					orders := torchOrders(n, 7)
					tk := NewTracker(orders(0), 0, DefaultSpan)
					tk.SetNext(orders(1))
					epoch := 0
					for pass := range 4 {
						opens := d.opens(n, max(steps, 1)+n*int(share), draw)
						follow(tk, orders, samplesOf(orders(epoch), opens))
						if tk.Epoch() != epoch || tk.Pass() != pass {
							t.Fatalf("%s: after pass %d of epoch %d: %+v", name, pass, epoch, tk.Position())
						}
						missing := 0
						for _, p := range opens {
							if !tk.Read(p) {
								missing++
							}
						}
						// The first opens may be lost if the pass before was not complete.
						if missing > 3+len(opens)/10 || share == 1 && missing > 0 {
							t.Fatalf("%s: pass %d: %d of %d opens are not counted", name, pass, missing, len(opens))
						}
						if same != (tk.Upcoming() == tk.Order()) && pass > 0 {
							t.Errorf("%s: Upcoming is wrong", name)
						}
						if !same {
							epoch++
						}
					}
				}
			}
		}
	}
}

func TestTrackerOrdinaryPass(t *testing.T) {
	tk := NewTracker(order.List([]uint32{4, 2, 9, 2, 7}), 3, DefaultSpan)
	for _, c := range []struct {
		sample   int
		event    Event
		pos      int
		frontier int
		head     int
	}{
		{4, Consumed, 0, 1, 1},
		{9, Consumed, 2, 1, 3},
		{5, Stray, -1, 1, 3},
		{1000, Stray, -1, 1, 3},
		{-1, Stray, -1, 1, 3},
		{2, Consumed, 1, 3, 3},
		{4, Repeat, 0, 3, 3},
		{2, Consumed, 3, 4, 4}, // its second occurrence
		{2, Repeat, 1, 4, 4},
		{7, Consumed, 4, 5, 5},
	} {
		if e, pos := tk.Open(c.sample); e != c.event || pos != c.pos || tk.Frontier() != c.frontier ||
			tk.Head() != c.head {
			t.Fatalf("open %d: %v at %d, %+v, want %+v", c.sample, e, pos, tk.Position(), c)
		}
	}
	want := Position{Epoch: 3, Frontier: 5, Head: 5, Consumed: 5, Len: 5}
	if tk.Position() != want || tk.Skipped() != 0 || tk.Count(Stray) != 3 || tk.Count(Consumed) != 5 {
		t.Errorf("%+v, want %+v; %d skipped", tk.Position(), want, tk.Skipped())
	}
	if tk.Read(-1) || tk.Read(5) || !tk.Read(4) {
		t.Error("Read outside the order")
	}
}

// Orders without enough information for a test: each whole pass counts.
func TestTrackerTinyOrders(t *testing.T) {
	for n := range 6 {
		for name, orders := range map[string]func(int) order.Order{
			"torch":      torchOrders(n, 1),
			"sequential": func(int) order.Order { return order.Sequential(n) },
		} {
			tk := NewTracker(orders(0), 0, DefaultSpan)
			tk.SetNext(orders(1))
			for epoch := range 5 {
				for pos := range n {
					follow(tk, orders, []int{orders(epoch).At(pos)})
				}
				if n > 0 && (tk.Epoch() > epoch || name == "sequential" && tk.Epoch() != epoch) {
					t.Errorf("%s, n=%d: epoch %d, want %d", name, n, tk.Epoch(), epoch)
				}
				if n > 0 && tk.Pass() != epoch {
					t.Errorf("%s, n=%d: pass %d, want %d", name, n, tk.Pass(), epoch)
				}
			}
		}
	}
}

func TestTrackerSameOrderEveryEpoch(t *testing.T) {
	orders := func(int) order.Order { return order.Sequential(5000) }
	tk := NewTracker(orders(0), 0, DefaultSpan)
	tk.SetNext(orders(1))
	for epoch := range 5 {
		follow(tk, orders, trainer{4, 32, 2}.opens(5000, 40+1000*(epoch%2), newSource(1)))
		if tk.Epoch() != epoch {
			t.Fatalf("%+v, want epoch %d", tk.Position(), epoch)
		}
	}
}

func TestTrackerValidationPass(t *testing.T) {
	const n = 2000
	orders := torchOrders(n, 5)
	tk := NewTracker(orders(0), 0, DefaultSpan)
	tk.SetNext(orders(1))
	for epoch := range 3 {
		follow(tk, orders, samplesOf(orders(epoch), trainer{2, 32, 2}.opens(n, 20, newSource(2))))
		at := tk.Position()
		for s := n; s < 2*n; s++ {
			if e, pos := tk.Open(s); e != Stray || pos != -1 {
				t.Fatalf("validation: %v, %d", e, pos)
			}
		}
		if tk.Position() != at || at.Epoch != epoch {
			t.Fatalf("epoch %d: validation moved %+v to %+v", epoch, at, tk.Position())
		}
	}
}

// A checksum run over all files at the trainer's own pace: the frontier stays with the trainer, and
// what the trainer is going to read is not taken for read.
func TestTrackerNoise(t *testing.T) {
	const n = 300_000
	d := trainer{4, 32, 2}
	orders := torchOrders(n, 11)
	draw := newSource(3)
	tk := NewTracker(orders(0), 0, 1024)
	tk.SetNext(orders(1))
	file := 0
	for epoch := range 2 {
		o := orders(epoch)
		unread, astray := 0, 0
		for i, p := range d.opens(n, 2000, draw) {
			if tk.Epoch() == epoch && tk.Read(p) {
				unread++
			}
			follow(tk, orders, []int{o.At(p), file % n})
			file++
			if i <= 100 {
				continue
			}
			if tk.Epoch() != epoch || tk.Frontier() > p+2*1024 || tk.Frontier() < p-2*1024 {
				t.Fatalf("epoch %d, open %d: reader at %d, tracker %+v", epoch, i, p, tk.Position())
			}
			if tk.Frontier() > p+d.span() {
				astray++
			}
		}
		// It may pass the reader, until the next of its samples is opened.
		if astray > 64000/100 {
			t.Errorf("epoch %d: the frontier was ahead of the reader after %d of 64,000 opens", epoch, astray)
		}
		if unread > 64000/100 {
			t.Errorf("epoch %d: %d of 64,000 samples were taken for read before they were", epoch, unread)
		}
	}
	// Noise alone moves nothing, before the end and after it.
	for range n {
		follow(tk, orders, []int{file % n})
		file++
	}
	if tk.Epoch() != 1 || tk.Pass() != 1 {
		t.Errorf("noise moved the tracker: %+v", tk.Position())
	}
}

func TestTrackerResumeInMidEpoch(t *testing.T) {
	const n, from = 200_000, 120_000
	d := trainer{8, 64, 2}
	orders := torchOrders(n, 2)
	for seed := range uint64(10) {
		tk := NewTracker(orders(0), 0, 4096)
		tk.SetNext(orders(1))
		opens := d.opens(n-from, 100, newSource(seed))
		jumped := -1
		for i, p := range opens {
			e, _ := tk.Open(orders(0).At(from + p))
			if e == Jump {
				jumped = i
			}
			if jumped >= 0 && tk.Frontier() < from-4096 {
				t.Fatalf("frontier %d after the jump", tk.Frontier())
			}
		}
		sorted, unopened := slices.Sorted(slices.Values(opens)), 0
		for unopened < len(sorted) && sorted[unopened] == unopened {
			unopened++
		}
		// The lowest workers' opens before the jump may be lost, so the frontier can be lower.
		if jumped < 0 || jumped > 100 || tk.Count(Jump) != 1 || tk.Frontier() < from || tk.Frontier() > from+unopened {
			t.Errorf("seed %d: jump at open %d, %d of them, %+v", seed, jumped, tk.Count(Jump), tk.Position())
		}
		if s := tk.Skipped(); s < from || s > from+100 {
			t.Errorf("seed %d: %d skipped", seed, s)
		}
	}
}

// Samples that the trainer never opens hold the frontier up for a span, not for ever.
func TestTrackerSkips(t *testing.T) {
	const n, span = 20_000, 512
	d := trainer{4, 32, 2}
	o := order.Torch(n, 1, 0, 1, 0, 0, false)
	tk := NewTracker(o, 0, span)
	for _, p := range d.opens(n, n, newSource(4)) {
		if p%10 == 3 {
			continue
		}
		tk.Open(o.At(p))
		if lag := tk.Head() - tk.Frontier(); lag > 2*span {
			t.Fatalf("frontier %d behind the head", lag)
		}
	}
	if tk.Head() != n || tk.Skipped() < n/10-2*span/10 {
		t.Errorf("%+v, %d skipped", tk.Position(), tk.Skipped())
	}
	// One that had been given up is read after all.
	if e, pos := tk.Open(o.At(1003)); e != Consumed || pos != 1003 {
		t.Errorf("late read: %v at %d", e, pos)
	}
}

func TestTrackerRanksOnOneMount(t *testing.T) {
	const n, world = 30_001, 8
	d := trainer{4, 32, 2}
	orders := func(epoch int) order.Order { return order.Torch(n, 9, epoch, world, 0, world-1, false) }
	draw := newSource(5)
	tk := NewTracker(orders(0), 0, DefaultSpan)
	tk.SetNext(orders(1))
	for epoch := range 3 {
		ranks := make([][]int, world)
		for r := range ranks {
			ranks[r] = d.opens((n+world-1)/world, 1000, draw)
		}
		follow(tk, orders, samplesOf(orders(epoch), interleave(ranks, draw)))
		if tk.Epoch() != epoch || tk.Consumed() < orders(0).Len()-10 {
			t.Fatalf("epoch %d: %+v", epoch, tk.Position())
		}
	}
}

// A move that was wrong is taken back.
func TestTrackerPrevEpoch(t *testing.T) {
	const n = 10_000
	orders := torchOrders(n, 3)
	tk := NewTracker(orders(0), 0, DefaultSpan)
	tk.SetNext(orders(1))
	for _, epoch := range []int{0, 1, 0, 1, 1, 0} {
		for pos := range 100 {
			tk.Open(orders(epoch).At(pos))
		}
		if tk.Epoch() != epoch || tk.Frontier() != 100 {
			t.Fatalf("%+v, want epoch %d", tk.Position(), epoch)
		}
	}
	if tk.Count(PrevEpoch) != 2 || tk.Count(NextEpoch) != 2 || tk.Count(Restart) != 1 {
		t.Errorf("%d back, %d on, %d again", tk.Count(PrevEpoch), tk.Count(NextEpoch), tk.Count(Restart))
	}
}

// A single open never moves the tracker, wherever it is.
func TestTrackerOneOpenIsNotEnough(t *testing.T) {
	const n = 100_000
	orders := torchOrders(n, 8)
	for pos := range 200 {
		tk := NewTracker(orders(0), 0, 1000)
		tk.SetNext(orders(1))
		for p := range 5000 {
			tk.Open(orders(0).At(p))
		}
		for _, s := range []int{orders(1).At(pos), orders(0).At(pos), orders(0).At(50_000 + pos)} {
			if e, _ := tk.Open(s); e.Moved() {
				t.Fatalf("one open at position %d: %v", pos, e)
			}
			for p := range 20 {
				tk.Open(orders(0).At(5000 + p))
			}
		}
	}
}

// An arbitrary trainer against a model: a set of what was opened in this pass.
func TestTrackerModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		draw := newSource(rapid.Uint64().Draw(t, "seed"))
		d := trainer{
			workers:  rapid.IntRange(0, 4).Draw(t, "workers"),
			batch:    rapid.IntRange(1, 32).Draw(t, "batch"),
			prefetch: rapid.IntRange(1, 2).Draw(t, "prefetch"),
		}
		world := rapid.IntRange(1, 3).Draw(t, "world")
		// Fewer samples a stream do not identify an epoch within a pass.
		span := (d.span()+drift)*world + rapid.IntRange(0, 100).Draw(t, "extra span")
		n := rapid.IntRange(200*world*max(d.workers, 1), max(3000, 10*span)).Draw(t, "n")
		// Most of a short order is within reach of the frontier of a pass that ended early: what is read next
		// fits that as well, and may be told apart late.
		near := n < 8*span
		seed := rapid.Uint64().Draw(t, "order seed")
		orders := func(epoch int) order.Order { return order.Torch(n, seed, epoch, world, 0, world-1, false) }
		tk := NewTracker(orders(0), 0, span)
		tk.SetNext(orders(1))
		epoch, length := 0, orders(0).Len()
		for pass := range rapid.IntRange(1, 5).Draw(t, "passes") {
			if pass > 0 && !rapid.Bool().Draw(t, "same epoch") {
				epoch++
			}
			o := orders(epoch)
			steps := rapid.IntRange(120/d.batch/world+1, length/d.batch/world+1).Draw(t, "steps")
			ranks := make([][]int, world)
			for r := range ranks {
				ranks[r] = d.opens(length/world, steps, draw)
			}
			opens := interleave(ranks, draw)
			opened := make([]bool, length)
			for i, p := range opens {
				wasRead := tk.Pass() == pass && tk.Read(p)
				e, pos := tk.Open(o.At(p))
				opened[p] = true
				if e == NextEpoch {
					tk.SetNext(orders(tk.Epoch() + 1))
				}
				if tk.Pass() != pass {
					continue
				}
				if !tk.Read(pos) || o.At(pos) != o.At(p) {
					t.Fatalf("pass %d, open %d: position %d is %v at %d", pass, i, p, e, pos)
				}
				if wasRead && e == Consumed && pos == p {
					t.Fatalf("pass %d, open %d: position %d consumed twice", pass, i, p)
				}
			}
			if tk.Epoch() != epoch || tk.Pass() != pass {
				if near {
					return
				}
				t.Fatalf("after pass %d of epoch %d: %+v", pass, epoch, tk.Position())
			}
			lost := 0
			for p, was := range opened {
				if was && !tk.Read(p) {
					lost++
				}
				if !was && !tk.Read(p) && p > tk.Head()-span && p < tk.Frontier() {
					t.Fatalf("frontier %d passed position %d, head %d, span %d", tk.Frontier(), p, tk.Head(), span)
				}
			}
			if lost > 5+len(opens)/5 && !near {
				t.Fatalf("pass %d: %d opens of %d are not counted", pass, lost, len(opens))
			}
			unread := 0
			for p := range tk.Frontier() {
				if !tk.Read(p) {
					unread++
				}
			}
			if tk.Skipped() != unread {
				t.Fatalf("%d skipped, want %d", tk.Skipped(), unread)
			}
		}
	})
}

func BenchmarkTrackerOpen(b *testing.B) {
	const n = 1_000_000
	orders := torchOrders(n, 1)
	tk := NewTracker(orders(0), 0, DefaultSpan)
	tk.SetNext(orders(1))
	opens := samplesOf(orders(0), trainer{16, 256, 2}.opens(n, n, newSource(1)))
	b.ReportAllocs()
	i := 0
	for b.Loop() {
		tk.Open(opens[i%n])
		i++
	}
}

// A scan of all files by name (cp -r, tar, a checksum run) reads a shard whose members are sorted from end
// to end, and a windowed order holds them close together: it must not look like a reader that has moved
// there, wherever it is and whenever it comes.
func TestTrackerScanOfShards(t *testing.T) {
	const n = 120_000
	d := trainer{4, 32, 2}
	for _, c := range []struct{ perShard, window, span int }{{250, 4, 1024}, {250, 4, 16384}, {1000, 16, 1024},
		{1000, 4, 16384}} {
		orders := func(e int) order.Order { return windowed(order.Contiguous(n, c.perShard), 11, e, c.window) }
		for _, pace := range []int{0, 1, 4} {
			tk := NewTracker(orders(0), 0, c.span)
			tk.SetNext(orders(1))
			file, total, astray := 0, 0, 0
			for epoch := range 2 {
				o := orders(epoch)
				opens := d.opens(n, 400, newSource(3))
				for i, p := range opens {
					follow(tk, orders, []int{o.At(p)})
					for range pace {
						follow(tk, orders, []int{file % n})
						file++
					}
					if i < 100 && epoch > 0 {
						continue // it takes some opens to see that the epoch has begun
					}
					total++
					if tk.Epoch() != epoch || tk.Frontier() > p+d.span() || tk.Frontier() < p-2*c.span {
						astray++
					}
				}
				if tk.Epoch() != epoch {
					t.Errorf("%+v, %d files scanned for each read: in epoch %d the tracker is in %+v",
						c, pace, epoch, tk.Position())
				}
			}
			if astray > total/40 {
				t.Errorf(
					"%+v, %d files scanned for each read: the tracker is not with the reader for %d of %d opens", c,
					pace, astray, total)
			}
		}
	}
}

// Only orders that do not read by number themselves tell a scan from their reader.
func TestTrackerKnowsScans(t *testing.T) {
	const n = 50_000
	for name, c := range map[string]struct {
		o    order.Order
		want bool
	}{
		"sequential":  {order.Sequential(n), false},
		"uniform":     {order.Uniform(n, 1, 0), true},
		"windowed":    {windowed(order.Contiguous(n, 250), 1, 0, 4), true},
		"tiny window": {windowed(order.Contiguous(n, 20), 1, 0, 1), false},
		"short":       {order.Sequential(5), false},
	} {
		if tk := NewTracker(c.o, 0, DefaultSpan); tk.scans != c.want {
			t.Errorf("%s: %v", name, tk.scans)
		}
	}
}

// windowed is order.Windowed where nothing is wrong.
func windowed(g order.Groups, seed uint64, epoch, window int) order.Locator {
	o, err := order.Windowed(g, seed, epoch, window)
	if err != nil {
		panic(err)
	}
	return o
}
