package prefetch

import "github.com/shoalfs/shoal/prefetch/order"

// source draws numbers in [0,n) for a simulation: rapid's or a seeded generator's.
type source func(n int) int

// trainer is PyTorch's DataLoader as a mount sees it: workers that read batches side by side, at
// most prefetch batches each ahead of the training loop, which takes them in order. No workers
// means that the loop reads by itself.
type trainer struct{ workers, batch, prefetch int }

// span is how far the trainer reorders.
func (d trainer) span() int { return max(d.workers*d.prefetch, 1) * d.batch }

// opens returns the positions of [0,n) in the order in which they are opened in a pass that stops
// after steps batches. What the workers have opened by then in excess of that is included.
func (d trainer) opens(n, steps int, draw source) []int {
	if d.workers == 0 {
		d.workers, d.prefetch = 1, 1
	}
	batches := (n + d.batch - 1) / d.batch
	size := func(b int) int { return min(d.batch, n-b*d.batch) }
	done := make([]int, batches) // samples opened, by batch
	queues := make([][]int, d.workers)
	sent, taken := 0, 0
	var opens []int
	for taken < min(steps, batches) {
		for ; sent < batches && sent < taken+d.workers*d.prefetch; sent++ {
			queues[sent%d.workers] = append(queues[sent%d.workers], sent)
		}
		w := draw(d.workers)
		if len(queues[w]) == 0 {
			continue
		}
		b := queues[w][0]
		opens = append(opens, b*d.batch+done[b])
		if done[b]++; done[b] == size(b) {
			queues[w] = queues[w][1:]
		}
		for taken < batches && done[taken] == size(taken) {
			taken++
		}
	}
	return opens
}

// drift is how many opens one rank may be ahead of another: gradients are averaged in every step.
const drift = 8

// interleave merges the passes of several ranks, of which rank r reads the positions r, r+W, …
func interleave(ranks [][]int, draw source) []int {
	total := 0
	for _, r := range ranks {
		total += len(r)
	}
	out := make([]int, 0, total)
	at := make([]int, len(ranks))
	for len(out) < total {
		slowest := total
		for r := range ranks {
			if at[r] < len(ranks[r]) {
				slowest = min(slowest, at[r])
			}
		}
		r := draw(len(ranks))
		if at[r] < len(ranks[r]) && at[r] < slowest+drift {
			out = append(out, ranks[r][at[r]]*len(ranks)+r)
			at[r]++
		}
	}
	return out
}

func samplesOf(o order.Order, positions []int) []int {
	out := make([]int, len(positions))
	for i, p := range positions {
		out[i] = o.At(p)
	}
	return out
}

// shards are files packed into tars in order of number, perShard in each.
type shards struct {
	sizes    []int64
	offs     []int64
	perShard int
}

// pack lays files out as tar does: a header of 512 bytes, and padding to the next 512.
func pack(sizes []int64, perShard int) shards {
	s := shards{sizes: sizes, offs: make([]int64, len(sizes)), perShard: perShard}
	var at int64
	for i, size := range sizes {
		if i%perShard == 0 {
			at = 0
		}
		s.offs[i] = at + 512
		at += 512 + (size+511)/512*512
	}
	return s
}

func (s shards) Len() int          { return len(s.sizes) }
func (s shards) Rank(file int) int { return file }
func (s shards) At(rank int) int   { return rank }
func (s shards) Extent(rank int) (int, int64, int64) {
	return rank / s.perShard, s.offs[rank], s.offs[rank] + s.sizes[rank]
}

// traffic is what a pass takes.
type traffic struct {
	requests       int
	samples, spans int64 // bytes of the samples, and of what was fetched
	gaps           int64 // bytes of those that nobody wanted
	widestGap      int64
	peak           int64 // bytes resident at most
	waited         int   // samples that the reader found absent
	burst          int   // requests that were started between two reads, at most
}

func (t traffic) requestsPerSample(n int) float64 { return float64(t.requests) / float64(n) }

// fetch reads an epoch through memory of budget bytes, with requests for several files, as the executor
// does. What is fetched arrives at once, and is forgotten when it was read. Without a horizon requests
// are started as long as there is memory, with what comes in the next quarter of it. What kept holds is on
// disk; kept may be nil.
func fetch(o order.Locator, s shards, c Coalescing, budget int64, h *Horizon, kept *Keep) (t traffic) {
	resident := make([]bool, s.Len())
	for f := range resident {
		resident[f] = kept != nil && kept.Admit(f)
	}
	var used int64
	at := 0
	for reader := range o.Len() {
		started := t.requests
		for at = max(at, reader); at < o.Len() && (h == nil || at < reader+h.Plan); at++ {
			file := o.At(at)
			if resident[file] {
				continue
			}
			if used+s.sizes[file] > budget {
				break
			}
			limit, bound := at+int(budget/4/s.sizes[file]), c
			bound.MaxBytes = min(bound.MaxBytes, budget-used)
			if h != nil {
				limit, bound = reader+h.Take, h.Bound(c, budget-used)
			}
			ranks := Coalesce(file, s, bound, func(f int) bool {
				if resident[f] {
					return false
				}
				pos := o.Find(f, at)
				return pos >= 0 && pos < limit
			})
			_, first, _ := s.Extent(ranks[0])
			_, _, last := s.Extent(ranks[len(ranks)-1])
			t.requests++
			t.spans += last - first
			for i, r := range ranks {
				if i > 0 {
					_, _, end := s.Extent(ranks[i-1])
					t.gaps += s.offs[r] - end
					t.widestGap = max(t.widestGap, s.offs[r]-end)
				}
				resident[r] = true
				used += s.sizes[r]
			}
			t.peak = max(t.peak, used)
		}
		t.burst = max(t.burst, t.requests-started)
		file := o.At(reader)
		switch {
		case kept != nil && kept.Admit(file):
			continue
		case resident[file]:
			resident[file] = false
			used -= s.sizes[file]
		default:
			t.waited++
			t.requests++
			t.spans += s.sizes[file]
		}
		t.samples += s.sizes[file]
	}
	return t
}
