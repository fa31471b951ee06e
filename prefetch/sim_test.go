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
