package infer

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/shoalfs/shoal/prefetch/order"
)

// firstRun feeds opens until there is a run.
func firstRun(s *Sequences, opens []Open) (Run, int) {
	for i, o := range opens {
		if r, ok, _ := s.Open(o.Process, int(o.Sample)); ok {
			return r, i + 1
		}
	}
	return Run{}, -1
}

// Whoever goes through the files in sequence is seen within 16 opens, with its step, from where it begins.
func TestSequences(t *testing.T) {
	for _, c := range []struct {
		n, from, world int
		ranks          []int
		batch, workers int
		pids           bool
	}{
		{1000, 0, 1, []int{0}, 32, 0, true},
		{1000, 700, 1, []int{0}, 32, 0, false},
		{1000, 0, 1, []int{0}, 32, 4, true},
		{16384, 0, 1, []int{0}, 64, 4, false},
		{16384, 5000, 1, []int{0}, 1, 4, true},
		{16384, 0, 8, []int{3}, 32, 0, true},
		{16384, 0, 8, []int{3}, 32, 2, true},
		{16384, 0, 8, []int{2, 3}, 32, 0, true},
		{16384, 0, 2, []int{0, 1}, 32, 0, true},
		{1281167, 0, 1, []int{0}, 256, 8, true},
	} {
		t.Run(fmt.Sprintf("%+v", c), func(t *testing.T) {
			rng := rand.New(rand.NewPCG(1, 1))
			l := loader{order: order.Slice(order.Sequential(c.n), c.from, c.n), world: c.world, ranks: c.ranks,
				batch: c.batch, workers: c.workers, ahead: 2, pids: c.pids, first: 7}
			opens := l.opens(rng)
			r, at := firstRun(NewSequences("listed", c.n), opens[:64])
			if at < 0 || at > 16+2*c.workers || r.List != "listed" || r.From < c.from-c.world ||
				r.From > c.from+c.world*c.batch*max(c.workers, 1) {
				t.Fatalf("after %d: %+v", at, r)
			}
			if whole := len(c.ranks) == c.world; whole && r.World != 1 ||
				!whole && (r.World != c.world || r.First != c.ranks[0] || r.Last != c.ranks[len(c.ranks)-1]) {
				t.Errorf("%+v", r)
			}
			w := r.Window(c.n)
			for _, o := range opens[len(opens)/2:] {
				if w.Find(int(o.Sample), 0) < 0 {
					t.Fatalf("%+v does not hold %d", r, o.Sample)
				}
			}
		})
	}
}

// A pass that repeats the one before is seen, whatever its order: numpy's permutation that is drawn once.
func TestRepeatedPass(t *testing.T) {
	const n = 3000
	rng := rand.New(rand.NewPCG(2, 2))
	var perm []uint32
	for _, s := range rng.Perm(n)[:2000] { // of a part of the files
		perm = append(perm, uint32(s))
	}
	s := NewSequences("listed", n)
	for pass := range 3 {
		l := loader{order: order.List(perm), world: 1, ranks: []int{0}, batch: 16, workers: 2, ahead: 2, pids: true,
			first: uint32(10 * pass)}
		r, at := firstRun(s, l.opens(rng))
		switch {
		case pass == 0 && at >= 0:
			t.Errorf("after %d: %+v", at, r)
		case pass > 0 && (at < 0 || at > 24 || r.List != Repeated || r.World != 1):
			t.Errorf("pass %d, after %d: %+v", pass, at, r)
		}
		if pass > 0 {
			for _, o := range l.opens(rng) {
				s.Open(o.Process, int(o.Sample))
			}
		}
	}
}

// What is read at random is no sequence.
func TestNoFalseSequence(t *testing.T) {
	for _, n := range []int{50, 1000, 20000} {
		rng := rand.New(rand.NewPCG(3, uint64(n)))
		for _, workers := range []int{0, 8} {
			s := NewSequences("listed", n)
			for range 20000 / n {
				var perm []uint32
				for _, f := range rng.Perm(n) {
					perm = append(perm, uint32(f))
				}
				l := loader{order: order.List(perm), world: 1, ranks: []int{0}, batch: 16, workers: workers, ahead: 2,
					pids: true, first: 7}
				if r, at := firstRun(s, l.opens(rng)); at >= 0 {
					t.Errorf("%d files, %d workers: after %d: %+v", n, workers, at, r)
				}
			}
		}
	}
}

// Neither is what opens few of many files again and again, what wanders among them, or a shuffle of few neighbours, but
// for one in a hundred that is nearly one; what eight ranks read in sequence is.
func TestRepeatsAreNoSequence(t *testing.T) {
	const n, seeds = 1000, 500
	claims := map[string]int{}
	for seed := range uint64(seeds) {
		rng := rand.New(rand.NewPCG(4, seed))
		opens := map[string][]Open{}
		at := rng.IntN(n)
		for i := range 400 {
			opens["few"] = append(opens["few"], Open{7, uint32(50 + rng.IntN(8))})
			at = min(max(at+rng.IntN(9)-4, 0), n-1)
			opens["walk"] = append(opens["walk"], Open{7, uint32(at)})
			for rank := range uint32(8) {
				opens["ranks"] = append(opens["ranks"], Open{7 + rank, uint32(i)})
			}
		}
		for _, i := range rng.Perm(32) {
			opens["neighbours"] = append(opens["neighbours"], Open{7, uint32(300 + i)})
		}
		for name, opens := range opens {
			if _, at := firstRun(NewSequences("listed", n), opens); at >= 0 && (name != "ranks" || at <= 160) {
				claims[name]++
			}
		}
	}
	if t.Log(claims); claims["ranks"] < seeds || claims["few"] > 0 || claims["walk"] > seeds/100 ||
		claims["neighbours"] > seeds/100 {
		t.Errorf("of %d seeds: %v", seeds, claims)
	}
}
