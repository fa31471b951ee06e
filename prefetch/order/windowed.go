package order

import (
	"fmt"
	"math"
)

// Groups says which samples lie together, such as in one shard. Together the groups contain each of the samples
// 0..n-1 exactly once, n being the sum of their sizes; a group may be empty. Implementations are immutable.
type Groups interface {
	// Len returns the number of groups.
	Len() int
	// Size returns the number of samples in group g.
	Size(g int) int
	// At returns the i-th sample of group g, 0 <= i < Size(g), by place in the group.
	At(g, i int) int
}

// Contiguous returns groups of size consecutive samples each, of n in all; the last may be smaller.
// It panics unless n >= 0 and size > 0.
func Contiguous(n, size int) Groups {
	if n < 0 || size <= 0 {
		panic(fmt.Sprintf("order: %d samples in groups of %d", n, size))
	}
	return contiguous{n, size}
}

type contiguous struct{ n, size int }

func (c contiguous) Len() int { return c.n/c.size + min(c.n%c.size, 1) }

func (c contiguous) Size(g int) int {
	check(g, c.Len())
	return min(c.size, c.n-g*c.size)
}

func (c contiguous) At(g, i int) int {
	check(i, c.Size(g))
	return g*c.size + i
}

// Windowed returns a pseudo-random permutation of the samples of g, keyed by (seed, epoch), that has only window groups
// open at a time: what is read next lies in few places, which can be fetched in large pieces. It fails on a negative
// epoch, on a window below 1, and on groups that do not hold each sample once or hold more than 2^32-1.
//
// It takes 8 bytes a sample (half of it for Find); while it is made, up to 4 more for each sample of the
// open groups, and 17 ns a sample (a million samples, 16 of 1,000 groups open).
//
// The algorithm, windowed@1. Let mix(z) be Mix13 and c = 0x9e3779b97f4a7c15, as in Uniform. All
// arithmetic is modulo 2^64. The state is k = mix(seed+c) ^ mix(mix(epoch)+c). A draw below m is
//
//		k += c; the upper 64 bits of the 128-bit product mix(k)·m
//
//	 1. Shuffle the list of the groups that are not empty, ascending at first: for i = 0..G-2 draw z
//	    below G-i and swap entries i and i+z.
//	 2. Open the first W = min(window, G) of the list in the slots 0..W-1. A slot holds its group's
//	    samples as a list, in the group's order.
//	 3. While the list has groups that were never opened: draw j below W; draw b below 4W, and if b < W
//	    let j = max(j, b). Draw i below the number of samples in slot j. The i-th of them is next in the
//	    order; the last of the slot's list takes its place there. If the slot is empty now, the next
//	    group of the list is opened in it.
//	 4. When all have been opened, put the slots' lists together, slot 0 first. Until nothing is left,
//	    draw i below their number; the i-th is next in the order, and the last takes its place.
//
// So with all groups open it is a uniform shuffle. Step 3 draws a slot first, because drawing evenly among the samples
// of all slots lets them run empty together: W·ln W samples are left when the first is empty, then a new group of S is
// most of what there is, and the samples of a batch come from one group 3 times as often as necessary (measured at 16
// of 128 groups of 1,000). The slots have weights from 0.75 to 1.25 (this is what b does), so that those opened
// together at the beginning do not end together: of 16, at most 4 to 5 new groups are opened within the time that one
// group's worth of samples takes, instead of 12 to 15, and what has to be fetched is even.
//
// The price of a window is the design effect D: a batch of B says as much about the whole dataset as an independent
// sample of B/D. Where windows do not matter (samples lie in the groups by chance, as pack leaves them) this costs
// nothing; where a group is of one class it is all of the label's noise. For G groups of S samples, D is close to
//
//	1 + (B-1)·(S-1)/(W·S-1)·(1-W/G)
//
// within 6% for W <= G/4 and at W >= G. Between these it can be above: the last groups to be opened have few others
// beside them (B=256, S=1,000, W=16: 14 instead of 13 at G=64, 9.7 instead of 9.0 at 32, 5.3 instead of 1.9 at 17).
func Windowed(g Groups, seed uint64, epoch, window int) (Locator, error) {
	if epoch < 0 || window < 1 {
		return nil, fmt.Errorf("epoch %d, window %d: an epoch is at least 0, a window at least 1", epoch, window)
	}
	n, err := total(g)
	if err != nil {
		return nil, err
	}
	samples, places := make(list, 0, n), make([]uint32, n) // as of a table: 0 until the sample has been met
	const met = math.MaxUint32
	var bad error
	// load appends the samples of a group, and notes those that no permutation can hold.
	load := func(to []uint32, group int) []uint32 {
		for i := range g.Size(group) {
			s := g.At(group, i)
			if s < 0 || s >= n || places[s] != 0 {
				bad = fmt.Errorf(
					"group %d holds sample %d, which is in a group already or not below %d, the number of samples",
					group, s, n)
				return to
			}
			places[s] = met
			to = append(to, uint32(s))
		}
		return to
	}
	k := draws(key(seed, epoch))
	emit := func(list []uint32, i int) []uint32 {
		s := list[i]
		last := len(list) - 1
		list[i] = list[last]
		samples = append(samples, s)
		places[s] = uint32(len(samples))
		return list[:last]
	}

	var closed []uint32
	for i := range g.Len() {
		if g.Size(i) > 0 {
			closed = append(closed, uint32(i))
		}
	}
	shuffle(closed, &k)
	slots := make([][]uint32, min(window, len(closed)))
	for j := range slots {
		slots[j] = load(make([]uint32, 0, g.Size(int(closed[j]))), int(closed[j]))
	}
	closed = closed[len(slots):]
	for len(closed) > 0 && bad == nil {
		j := k.below(len(slots))
		if b := k.below(4 * len(slots)); b < len(slots) {
			j = max(j, b)
		}
		slots[j] = emit(slots[j], k.below(len(slots[j])))
		if len(slots[j]) == 0 {
			slots[j] = load(slots[j], int(closed[0]))
			closed = closed[1:]
		}
	}
	left := make([]uint32, 0, n-len(samples))
	for j := range slots {
		left = append(left, slots[j]...)
		slots[j] = nil
	}
	for len(left) > 0 && bad == nil {
		left = emit(left, k.below(len(left)))
	}
	if bad != nil {
		return nil, bad
	}
	return &table{Order: samples, first: places}, nil
}

func total(g Groups) (int, error) {
	n := 0
	for i := range g.Len() {
		size := g.Size(i)
		if size < 0 || size >= math.MaxUint32-n {
			return 0, fmt.Errorf("group %d of %d samples, after %d in others: 2^32-2 are the most", i, size, n)
		}
		n += size
	}
	return n, nil
}
