package prefetch

import (
	"fmt"
	"testing"

	"github.com/shoalfs/shoal/prefetch/order"
	"pgregory.net/rapid"
)

// A reader that begins in the midst of an order that lies within reach of the frontier is found there
// soon, and nothing before it is waited for.
func TestTrackerResumeInShortOrders(t *testing.T) {
	for _, n := range []int{1000, 5000, 20_000, 40_000} {
		for _, d := range []trainer{{0, 32, 1}, {1, 64, 2}, {2, 16, 2}, {4, 32, 2}, {8, 16, 2}} {
			for _, share := range []float64{0.4, 0.6, 0.8} {
				from := int(float64(n) * share)
				if from < 2*clearOf*d.span() {
					continue // less than this a slow worker explains
				}
				o := order.Torch(n, 3, 0, 1, 0, 0, false)
				tk := NewTracker(o, 0, DefaultSpan)
				jumped := -1
				for i, p := range d.opens(n-from, (n-from)/d.batch+1, newSource(uint64(n))) {
					if e, _ := tk.Open(o.At(from + p)); e == Jump && jumped < 0 {
						jumped = i
					}
				}
				name := fmt.Sprintf("n=%d %+v from %d", n, d, from)
				if jumped < 0 || jumped > 2*settled || tk.Count(Jump) != 1 {
					t.Errorf("%s: jump at open %d, %d of them: %+v", name, jumped, tk.Count(Jump), tk.Position())
				}
				if m := tk.LastMove(); m.Event != Jump || m.To < from || m.To > from+1 || m.Unread < from ||
					m.Unread > from+1 || tk.Frontier() != n {
					t.Errorf("%s: %+v, %+v", name, m, tk.Position())
				}
			}
		}
	}
}

// Samples left out in mid-epoch, more than the trainer's own reordering.
func TestTrackerSkipsAhead(t *testing.T) {
	const n, at, skipped = 12_000, 4096, 3000
	d := trainer{2, 32, 2}
	o := order.Torch(n, 3, 0, 1, 0, 0, false)
	tk := NewTracker(o, 0, DefaultSpan)
	for _, p := range d.opens(at, at/32, newSource(1)) {
		tk.Open(o.At(p))
	}
	for i, p := range d.opens(n-at-skipped, 100, newSource(2)) {
		e, _ := tk.Open(o.At(at + skipped + p))
		if want := (Move{Event: Jump, From: 0, To: at + skipped, Unread: skipped}); e == Jump {
			want.From = tk.LastMove().From
			if tk.LastMove() != want || i > 2*settled {
				t.Errorf("open %d: %+v, want %+v", i, tk.LastMove(), want)
			}
		}
	}
	if tk.Count(Jump) != 1 || tk.Skipped() != skipped {
		t.Errorf("%d jumps, %d skipped", tk.Count(Jump), tk.Skipped())
	}
}

// A gap that was left out wrongly: when its worker wakes up the frontier is with it.
func TestTrackerLateWorker(t *testing.T) {
	const n = 10_000
	o := order.Torch(n, 3, 0, 1, 0, 0, false)
	tk := NewTracker(o, 0, DefaultSpan)
	for p := 2000; p < 2100; p++ {
		tk.Open(o.At(p))
	}
	if tk.Count(Jump) != 1 || tk.Frontier() != 2100 {
		t.Fatalf("no jump: %+v", tk.Position())
	}
	if e, pos := tk.Open(o.At(10)); e != Consumed || pos != 10 || tk.Frontier() != 11 {
		t.Errorf("%v at %d: %+v", e, pos, tk.Position())
	}
}

// A run that crashed goes on from its checkpoint: what it reads again is planned again.
func TestTrackerGoesBack(t *testing.T) {
	for _, n := range []int{3000, 60_000} {
		for _, d := range []trainer{{0, 32, 1}, {2, 16, 2}, {4, 32, 2}} {
			orders := torchOrders(n, 4)
			o := orders(0)
			tk := NewTracker(o, 0, 1024) // of the longer order the beginning is out of reach
			tk.SetNext(orders(1))
			read, back := n*3/4, n/3
			for p := range read {
				tk.Open(o.At(p))
			}
			opens := d.opens(n-back, n, newSource(7))
			for i, p := range opens {
				tk.Open(o.At(back + p))
				if i == 2*settled && (tk.Count(Jump) != 1 || tk.Frontier() < back || tk.Frontier() > back+i+1) {
					t.Fatalf("n=%d %+v: after %d opens %d jumps, %+v, %+v",
						n, d, i, tk.Count(Jump), tk.LastMove(), tk.Position())
				}
			}
			if tk.Pass() != 1 || tk.Epoch() != 0 || tk.Frontier() < back || tk.Head() != n || tk.Count(Jump) != 1 {
				t.Errorf("n=%d %+v: %+v, %d jumps", n, d, tk.Position(), tk.Count(Jump))
			}
			for p := range 200 { // and the next epoch is recognised as ever
				tk.Open(orders(1).At(p))
			}
			if tk.Epoch() != 1 {
				t.Errorf("n=%d %+v: the next epoch: %+v", n, d, tk.Position())
			}
		}
	}
}

// Reads of files at random, or by name, are nobody who goes back or ahead.
func TestTrackerNoiseIsNoPlace(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(1000, 20_000).Draw(t, "n")
		draw := newSource(rapid.Uint64().Draw(t, "seed"))
		orders := torchOrders(n, 6)
		tk := NewTracker(orders(0), 0, DefaultSpan)
		tk.SetNext(orders(1))
		for p := range rapid.IntRange(0, n).Draw(t, "read") {
			tk.Open(orders(0).At(p))
		}
		byName := rapid.Bool().Draw(t, "by name")
		for i := range min(2*n, 5000) {
			s := draw(n)
			if byName {
				s = i % n
			}
			tk.Open(s)
		}
		if tk.Count(Jump) != 0 {
			t.Fatalf("%d jumps, %+v, %+v", tk.Count(Jump), tk.LastMove(), tk.Position())
		}
	})
}

// A run that resumes in an epoch far from the one that was expected, at its beginning or not.
func TestTrackerAdopt(t *testing.T) {
	const n = 20_000
	orders := torchOrders(n, 12)
	for _, d := range []trainer{{0, 32, 1}, {4, 32, 2}, {8, 64, 2}} {
		for _, from := range []int{0, 9000} {
			tk := NewTracker(orders(0), 0, DefaultSpan)
			tk.SetNext(orders(1))
			opens := samplesOf(orders(7), d.opens(n-from, 60, newSource(3)))
			if from > 0 {
				opens = opens[:0]
				for _, p := range d.opens(n-from, 60, newSource(3)) {
					opens = append(opens, orders(7).At(from+p))
				}
			}
			for i, s := range opens[:120] {
				tk.Open(s)
				if i < settled-1 && tk.Lost() {
					t.Fatalf("lost after %d opens", i+1)
				}
			}
			if !tk.Lost() {
				t.Fatalf("%+v from %d: not lost: %+v", d, from, tk.Position())
			}
			for epoch := range 40 {
				if epoch != 7 && tk.Adopt(orders(epoch), epoch) {
					t.Fatalf("%+v from %d: epoch %d was adopted", d, from, epoch)
				}
			}
			if !tk.Adopt(orders(7), 7) || tk.Lost() || tk.Epoch() != 7 || tk.Pass() != 1 ||
				tk.LastMove().Event != Found {
				t.Fatalf("%+v from %d: epoch 7 was not adopted: %+v, %+v", d, from, tk.Position(), tk.LastMove())
			}
			tk.SetNext(orders(8))
			for _, s := range opens[120:] {
				tk.Open(s)
			}
			if tk.Epoch() != 7 || tk.Frontier() <= from || tk.Frontier() > from+len(opens) {
				t.Errorf("%+v from %d: %+v", d, from, tk.Position())
			}
			for p := range 200 {
				tk.Open(orders(8).At(p))
			}
			if tk.Epoch() != 8 {
				t.Errorf("%+v from %d: the next epoch: %+v", d, from, tk.Position())
			}
		}
	}
}

// A reader that is where it was expected is never lost, nor after it was seen there.
func TestTrackerIsNotLost(t *testing.T) {
	const n = 20_000
	orders := torchOrders(n, 12)
	for _, d := range []trainer{{0, 32, 1}, {4, 32, 2}, {8, 64, 2}} {
		for epoch := range 2 {
			tk := NewTracker(orders(0), 0, DefaultSpan)
			tk.SetNext(orders(1))
			for _, p := range d.opens(n, 200, newSource(3)) {
				tk.Open(orders(epoch).At(p))
				if tk.Lost() {
					t.Fatalf("%+v in epoch %d: %+v", d, epoch, tk.Position())
				}
			}
			for p := range 500 {
				tk.Open(orders(9).At(p))
			}
			if tk.Lost() {
				t.Errorf("%+v: lost after it was found", d)
			}
		}
	}
}

// An order that grows while it is read: against one that was whole from the start.
func TestTrackerExtend(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		samples := rapid.SliceOfN(rapid.Uint32Range(0, 60), 1, 150).Draw(t, "samples")
		cut := rapid.IntRange(1, len(samples)).Draw(t, "cut")
		tk := NewTracker(order.List(samples[:cut]), 0, 16)
		var opened []int
		for range rapid.IntRange(0, cut*2).Draw(t, "opens") {
			s := int(samples[rapid.IntRange(0, cut-1).Draw(t, "position")])
			opened = append(opened, s)
			if e, _ := tk.Open(s); e.Moved() {
				return // what counts then is another account's
			}
		}
		read, at := make([]bool, cut), tk.Position()
		for p := range read {
			read[p] = tk.Read(p)
		}
		tk.Extend(order.List(samples))
		want := at
		want.Len = len(samples)
		if want.Frontier < cut {
			want.Frontier = tk.Frontier()
		}
		if tk.Position() != want || tk.Frontier() < at.Frontier {
			t.Fatalf("after %v: %+v was %+v", opened, tk.Position(), at)
		}
		streams := 0 // places where one can go on
		for p := range samples {
			if p < cut && tk.Read(p) != read[p] || p >= cut && tk.Read(p) {
				t.Fatalf("position %d: read %v", p, tk.Read(p))
			}
			if !tk.Read(p) && (p == 0 || tk.Read(p-1)) {
				streams++
			}
		}
		if streams != tk.cur.runs {
			t.Fatalf("%d streams, want %d", tk.cur.runs, streams)
		}
		for p := range samples {
			if !tk.Read(p) {
				tk.Open(int(samples[p]))
			}
		}
	})
}
