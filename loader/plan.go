package loader

import (
	"fmt"

	"github.com/shoalfs/shoal/prefetch/order"
)

// Tail says what happens to an epoch's last batch if the samples do not fill it.
type Tail string

// The tails. With Drop and Pad all ranks see the same number of batches.
const (
	Drop   Tail = "drop"   // leave it out
	Pad    Tail = "pad"    // fill it with rows of zeros that are marked as not valid
	Uneven Tail = "uneven" // deliver it short; a rank without samples left has one batch less
)

// ParseTail reads a tail; empty is Drop.
func ParseTail(s string) (Tail, error) {
	switch t := Tail(s); t {
	case "":
		return Drop, nil
	case Drop, Pad, Uneven:
		return t, nil
	}
	return "", fmt.Errorf("tail %q: must be drop, pad or uneven", s)
}

// plan is a rank's share of the samples of one epoch, from a cursor on. Global batch k is the positions
// [cursor+kB, cursor+(k+1)B) of the global order, B = batch*world, and rank r takes positions r, r+world, ...
// of it. So the rank's positions, counted over the whole epoch in seq, are consecutive. A placement deals the positions
// of a batch out in another way, with as many for each rank.
type plan struct {
	seq    order.Order // what the rank reads in the epoch
	n      int         // positions of the global order
	first  int         // global position of seq's position 0
	start  int         // position in seq where the cursor is
	cursor int
	batch  int // rows of the rank
	world  int
	tail   Tail
	again  order.Repeating // the global order, if it repeats samples in a way of its own
	placed *placedOrder    // nil: the rank takes its positions in turn
}

// newPlan takes the rank's share of whole, the order of all ranks: its positions in turn, or those that a placement
// deals it.
func newPlan(whole order.Order, cursor, batch, world, rank int, tail Tail, by *placement) (plan, error) {
	n := whole.Len()
	if cursor > n {
		return plan{}, fmt.Errorf("cursor %d is beyond the epoch's %d samples", cursor, n)
	}
	// The cursor is a multiple of its global batch, and so of the world, unless the session changes the global batch;
	// then the phase shifts.
	base := cursor % world
	p := plan{n: n, first: base + rank, start: cursor / world, cursor: cursor, batch: batch, world: world, tail: tail}
	if by == nil {
		p.seq = order.Stripe(order.Slice(whole, base, n), world, rank, rank)
	} else {
		p.placed = newPlacedOrder(whole, cursor, batch, rank, by)
		p.seq = p.placed
		if l, ok := whole.(order.Locator); ok {
			p.seq = placedLocator{p.placed, l}
		}
	}
	// Positions that are never delivered are not prefetched.
	if end := p.start + p.batches()*p.batch; end < p.seq.Len() {
		p.seq = order.Slice(p.seq, 0, end)
	}
	return p, nil
}

func (p plan) global() int { return p.batch * p.world }

// batches returns the number of batches left for this rank.
func (p plan) batches() int {
	left := p.n - p.cursor
	k := left / p.global()
	switch {
	case left%p.global() == 0 || p.tail == Drop:
		return k
	case p.tail == Uneven && p.samples(k) == 0:
		return k
	}
	return k + 1
}

// samples returns the number of samples in batch k, at most p.batch.
func (p plan) samples(k int) int {
	return min(p.batch, max(0, p.seq.Len()-p.pos(k)))
}

// rows returns the number of rows of batch k.
func (p plan) rows(k int) int {
	if p.tail == Uneven {
		return p.samples(k)
	}
	return p.batch
}

// pos returns the position in seq of batch k's row 0.
func (p plan) pos(k int) int { return p.start + k*p.batch }

// globalPos returns the position in the global order of position pos in seq.
func (p plan) globalPos(pos int) int {
	if p.placed != nil {
		return p.placed.global(pos)
	}
	return p.first + pos*p.world
}

// occurrence returns how often the sample at position pos in seq came before in the epoch, over all ranks, in a dataset
// of n. Orders that do not count it themselves are permutations, repeated in the way torch pads.
func (p plan) occurrence(pos, n int) uint32 {
	if p.again != nil {
		return uint32(p.again.Occurrence(p.globalPos(pos)))
	}
	return uint32(p.globalPos(pos) / max(n, 1))
}

// after returns the cursor once all ranks have consumed batch k.
func (p plan) after(k int) int { return min(p.n, p.cursor+(k+1)*p.global()) }

// index returns the number of batch k in the epoch.
func (p plan) index(k int) int { return (p.cursor + k*p.global()) / p.global() }
