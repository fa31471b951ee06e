package infer

import (
	"math/rand/v2"

	"github.com/shoalfs/shoal/prefetch/order"
)

// loader is a simulated DataLoader, one a rank: what an unmodified trainer opens, by whom and when.
type loader struct {
	order   order.Order // of the whole world, over samples
	world   int
	ranks   []int // that are on the mount
	batch   int
	workers int // 0: the trainer's own thread reads
	ahead   int // batches that a worker may be ahead of the trainer
	pids    bool
	first   uint32 // process number of the first worker
}

// opens returns an epoch's opens, interleaved at random within what the trainers' consumption allows.
func (l loader) opens(rng *rand.Rand) (out []Open) {
	type worker struct {
		process uint32
		batches [][]int
		done    int // samples
		next    int // batches
	}
	var all [][]*worker
	process := l.first
	for _, r := range l.ranks {
		mine := order.Stripe(l.order, l.world, r, r)
		n := max(l.workers, 1)
		ws := make([]*worker, n)
		for w := range ws {
			ws[w] = &worker{process: process}
			if !l.pids {
				ws[w].process = 0
			}
			process++
		}
		for k := 0; k*l.batch < mine.Len(); k++ {
			var b []int
			for pos := k * l.batch; pos < min((k+1)*l.batch, mine.Len()); pos++ {
				b = append(b, mine.At(pos))
			}
			w := ws[k%n]
			w.batches = append(w.batches, b)
		}
		all = append(all, ws)
	}
	for {
		// A worker can go on unless it is ahead of the slowest of its rank.
		var ready []*worker
		for _, ws := range all {
			slowest := 1 << 30
			for _, w := range ws {
				if w.next < len(w.batches) {
					slowest = min(slowest, w.next)
				}
			}
			for _, w := range ws {
				if w.next < len(w.batches) && w.next < slowest+max(l.ahead, 1) {
					ready = append(ready, w)
				}
			}
		}
		if len(ready) == 0 {
			return out
		}
		w := ready[rng.IntN(len(ready))]
		out = append(out, Open{w.process, uint32(w.batches[w.next][w.done])})
		if w.done++; w.done == len(w.batches[w.next]) {
			w.done, w.next = 0, w.next+1
		}
	}
}

// watch feeds opens to a detector and runs what searches it asks for, up to a depth, at once. It returns the
// changes with the number of opens before each.
type change struct {
	what Change
	at   int
}

func watch(d *Detector, opens []Open, deepest Depth) (changes []change) {
	for i, o := range opens {
		if c := d.Open(o); c != None {
			changes = append(changes, change{c, i + 1})
		}
		for s := d.Next(idle); s != nil; s = d.Next(idle) {
			if s.Depth > deepest {
				continue
			}
			var best *Finding
			for step := 0; step < s.Steps() && best == nil; step++ {
				s.Run(step, never, func(f Finding) {
					if best == nil || f.Bits > best.Bits {
						best = &f
					}
				})
			}
			if best != nil {
				if c := d.Lock(s, *best); c != None {
					changes = append(changes, change{c, i + 1})
				}
			}
		}
	}
	return changes
}

func idle(Depth) bool { return false }

func whole(n int) []Subset { return []Subset{{Len: n}} }

func upTo(n int) (list []int) {
	for i := range n {
		list = append(list, i)
	}
	return list
}
