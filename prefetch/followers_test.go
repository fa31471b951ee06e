package prefetch

import (
	"math/rand/v2"
	"testing"

	"github.com/shoalfs/shoal/prefetch/order"
)

// job opens files in an order, as DataLoader's workers do.
type job struct {
	first   uint32 // process
	workers int
	batch   int
}

func (j job) process(pos int) uint32 { return j.first + uint32(pos/j.batch%j.workers) }

// Of two jobs the one whose order it is counts, every open of it, and of the other's next to none; through epochs whose
// workers are new, or the same.
func TestFollowersOfTwoJobs(t *testing.T) {
	const n, epochs = 2000, 3
	for name, c := range map[string]struct {
		mine, other job
		same        bool // workers in all epochs
	}{
		"one process":   {job{1, 1, 16}, job{100, 1, 16}, false},
		"same process":  {job{1, 1, 16}, job{100, 1, 16}, true},
		"workers":       {job{1, 8, 16}, job{100, 8, 16}, false},
		"same workers":  {job{1, 8, 16}, job{100, 8, 16}, true},
		"many for few":  {job{1, 1, 16}, job{100, 16, 16}, false},
		"few for many":  {job{1, 16, 16}, job{100, 1, 16}, false},
		"large batches": {job{1, 4, 256}, job{100, 4, 64}, false},
	} {
		t.Run(name, func(t *testing.T) {
			var f Followers
			var orders [2][epochs + 1]order.Locator
			for e := range epochs + 1 {
				orders[0][e], orders[1][e] = order.Uniform(n, 1, e), order.Uniform(n, 2, e)
			}
			false1, began := 0, 0
			for e := range epochs {
				at := 0 // the epoch in force, which is another when the first opens of it have counted
				if e > 0 {
					at = e - 1
				}
				counted := 0
				for pos := range n {
					ids := [2]uint32{c.mine.process(pos), c.other.process(pos)}
					if !c.same {
						ids[0], ids[1] = ids[0]+uint32(1000*e), ids[1]+uint32(1000*e)
					}
					counted += len(f.Open(ids[0], orders[0][e].At(pos), orders[0][at], orders[0][at+1]))
					if counted >= 4 {
						at = e
					}
					count := len(f.Open(ids[1], orders[1][e].At(pos), orders[0][at], orders[0][at+1]))
					if e == 0 && pos < 8*c.other.batch*c.other.workers {
						began += count // before anybody is known
						continue
					}
					false1 += count
				}
				if counted < n-4*c.mine.workers || counted > n {
					t.Errorf("epoch %d: %d of %d opens counted", e, counted, n)
				}
			}
			if false1 > 10 || began > 200 {
				t.Errorf("%d opens of the other job counted, %d more at first", false1, began)
			}
		})
	}
}

// The opens of another job do not count either if the order is to come again, as a plan that its reader may repeat.
func TestFollowersOfAnOrderThatRepeats(t *testing.T) {
	const n = 2000
	var f Followers
	o, other := order.Uniform(n, 1, 0), order.Uniform(n, 2, 0)
	counted := 0
	for pos := range n {
		f.Open(uint32(1+pos/16%4), o.At(pos), o, o)
		counted += len(f.Open(uint32(101+pos/16%4), other.At(pos), o, o))
	}
	if counted > 100 {
		t.Errorf("%d opens of the other job counted", counted)
	}
}

// Where nobody follows the order every open counts, whoever makes it, and again when those who did are gone.
func TestFollowersGone(t *testing.T) {
	const n = 5000
	var f Followers
	o := order.Uniform(n, 1, 0)
	r := rand.New(rand.NewPCG(1, 2))
	for i := range 300 {
		if got := f.Open(uint32(1+i%7), r.IntN(n), o, nil); len(got) != 1 {
			t.Fatalf("open %d counts %d times before anybody follows", i, len(got))
		}
	}
	for pos := range 100 {
		f.Open(50, o.At(pos), o, nil)
	}
	counted := 0
	for i := range 2 * sureFor {
		counted += len(f.Open(uint32(60+i%7), r.IntN(n), o, nil))
	}
	if counted < sureFor-64 || counted > sureFor+64 {
		t.Errorf("%d of %d opens by others counted", counted, 2*sureFor)
	}
	if got := f.Open(0, 7, o, nil); len(got) != 1 || got[0] != 7 {
		t.Errorf("an open by nobody known counts as %v", got)
	}
}

// Threads that take positions in turns are no strangers to each other, whoever of them is ahead.
func TestFollowersOfAPool(t *testing.T) {
	for _, n := range []int{40, 1000, 20_000} {
		var f Followers
		r := rand.New(rand.NewPCG(uint64(n), 3))
		for e := range 3 {
			cur, next := order.Uniform(n, 1, e), order.Uniform(n, 1, e+1)
			counted := 0
			for pos := range n {
				at := min(n-1, pos^r.IntN(8)) // the last few are out of order
				counted += len(f.Open(uint32(1+r.IntN(16)), cur.At(at), cur, next))
				if f.Strangers() && pos > n/10 {
					t.Fatalf("of %d, epoch %d: a stranger at %d", n, e, pos)
				}
			}
			if counted < n-16 {
				t.Errorf("of %d, epoch %d: %d opens counted", n, e, counted)
			}
		}
	}
}

// An order that is extended has the same followers.
func TestFollowersOfALongerOrder(t *testing.T) {
	var f Followers
	whole := order.Uniform(3000, 1, 0)
	o := order.Index(order.Slice(whole, 0, 100))
	for pos := range 3000 {
		if pos >= 80 && pos%100 == 80 {
			o = order.Index(order.Slice(whole, 0, min(pos+120, 3000)))
		}
		if got := f.Open(9, whole.At(pos), o, nil); pos > 20 && len(got) != 1 {
			t.Fatalf("position %d counts %d times", pos, len(got))
		}
	}
}

func BenchmarkFollowers(b *testing.B) {
	const n = 1 << 20
	var f Followers
	o := order.Index(order.Torch(n, 1, 0, 1, 0, 0, false))
	next := order.Index(order.Torch(n, 1, 1, 1, 0, 0, false))
	for i := 0; b.Loop(); i++ {
		f.Open(uint32(1+i/64%8), o.At(i%n), o, next)
	}
}

// Workers that are new in each epoch do not keep the orders of those before them.
func TestFollowersOfManyEpochs(t *testing.T) {
	const n, workers = 5000, 8
	var f Followers
	for epoch := range 50 {
		cur, next := order.Uniform(n, 1, epoch), order.Uniform(n, 1, epoch+1)
		j := job{uint32(1 + epoch*workers), workers, 16}
		for pos := range n {
			f.Open(j.process(pos), cur.At(pos), cur, next)
		}
	}
	if len(f.of) > 4*workers {
		t.Errorf("%d processes are known", len(f.of))
	}
}
