package prefetch

import (
	"math"
	"math/bits"

	"github.com/shoalfs/shoal/prefetch/order"
)

// fit classifies an open against a cursor.
type fit uint8

const (
	absent fit = iota // the order does not have the sample
	read              // all its positions have been read
	near              // it has an unread position within reach
	far               // only further ahead than reordering explains
)

// cursor is one account of a reader: which positions of an order it has read, assuming that it began at position
// start. It takes Len bits.
type cursor struct {
	order order.Locator
	n     int
	span  int
	z     float64 // bounds the harmonic number of n from above; see step

	start int
	words []uint64 // bit set: read
	count int      // positions read
	head  int      // highest position read + 1
	runs  int      // places where a stream can continue: a read position, or the start, before an unread one
	floor int      // positions below it are no longer expected
	low   int      // smallest unread position from floor on
	// past holds the heads of the last span reads, one for each span/8 of them, as a ring.
	past    [9]int
	oldest  int
	unaudit int // reads since the last entry
}

func newCursor(o order.Locator, span int) *cursor {
	n := o.Len()
	c := &cursor{
		order: o, n: n, span: span,
		z:     1 + math.Log(float64(max(n, 1))),
		words: make([]uint64, (n+63)/64),
	}
	c.restart(0)
	return c
}

// restart clears the cursor and assumes that the reader begins at start.
func (c *cursor) restart(start int) {
	clear(c.words[c.start/64 : (c.head+63)/64])
	c.start, c.count, c.head, c.runs = start, 0, start, 1
	c.reach(start)
}

// reach makes floor the first expected position, and holes above it new.
func (c *cursor) reach(floor int) {
	c.floor = floor
	c.low = c.unread(floor)
	for i := range c.past {
		c.past[i] = min(c.past[i], floor)
	}
}

func (c *cursor) isRead(pos int) bool { return c.words[pos/64]>>(pos%64)&1 != 0 }

// unread returns the smallest unread position from pos on, or n.
func (c *cursor) unread(pos int) int { return c.next(pos, math.MaxUint64) }

// next returns the smallest position from pos on that is set after the words were xored with flip, or n.
func (c *cursor) next(pos int, flip uint64) int {
	for pos < c.n {
		if w := (c.words[pos/64] ^ flip) >> (pos % 64); w != 0 {
			return min(pos+bits.TrailingZeros64(w), c.n)
		}
		pos = (pos/64 + 1) * 64
	}
	return c.n
}

// gap returns how far pos is above the nearest read position below it, or above the beginning. It looks no further
// than window, where far begins anyway.
func (c *cursor) gap(pos int) int {
	stop := max(c.start, pos-c.window())
	for p := pos - 1; p >= stop; p = p/64*64 - 1 {
		if w := c.words[p/64] << (63 - p%64); w != 0 {
			return pos - max(p-bits.LeadingZeros64(w), stop-1)
		}
	}
	return pos - stop + 1
}

// window is how far ahead of low an open may be and still count. A hole at low is given up only after span more
// positions were read, and up to an eighth more as expire counts in such steps, by a reader that may itself be span
// ahead.
func (c *cursor) window() int { return c.span/2 + 2*c.span }

// place finds the most probable position of an open of sample: among the unread ones the first expected one, else one
// that was given up, else one far ahead.
func (c *cursor) place(sample int) (int, fit) {
	next := func(from int) int {
		p := c.order.Find(sample, from)
		for p >= 0 && c.isRead(p) {
			p = c.order.Find(sample, p+1)
		}
		return p
	}
	ahead := next(c.low)
	if ahead >= 0 && ahead < c.low+c.window() {
		return ahead, near
	}
	if late := next(c.start); late >= 0 && late < c.low {
		return late, near
	}
	if ahead >= 0 {
		return ahead, far
	}
	if p := c.order.Find(sample, 0); p >= 0 {
		return p, read
	}
	return -1, absent
}

// mark records an unread position as read.
func (c *cursor) mark(pos int) {
	left := pos == c.start || pos > 0 && c.isRead(pos-1)
	right := pos+1 == c.n || c.isRead(pos+1)
	switch {
	case left && right:
		c.runs--
	case !left && !right:
		c.runs++
	}
	c.words[pos/64] |= 1 << (pos % 64)
	c.count++
	c.head = max(c.head, pos+1)
	switch {
	case pos < c.low && pos >= c.low-c.span:
		// A position that was given up is read after all: so may those after it.
		c.reach(pos)
	case pos == c.low:
		c.low = c.unread(pos)
	}
	c.expire()
}

// expire gives up the holes that are span behind the head and were passed span reads ago. The second condition
// prevents a stray open far ahead from moving the floor past the reader.
func (c *cursor) expire() {
	if c.unaudit++; c.unaudit < max(c.span/8, 1) {
		return
	}
	c.unaudit = 0
	c.past[c.oldest] = c.head
	c.oldest = (c.oldest + 1) % len(c.past)
	if floor := min(c.past[c.oldest], c.head-c.span); floor > c.floor {
		c.floor = floor
		c.low = c.unread(max(c.low, floor))
	}
}

// step is the prior for how far a stream moves on: half of the time to the next position, otherwise by g with a
// probability proportional to 1/g, which has no scale and so allows for batches and ranks of any size. Its sum over g
// from 1 to n is at most 1.
func (c *cursor) step(g int) float64 {
	p := 0.5 / (c.z * float64(g))
	if g == 1 {
		p += 0.5
	}
	return p
}

// density returns the probability of an open at the unread position pos, if the cursor's account is right: either the
// leading stream moves on, or any one of them does. Its sum over all unread positions is at most 1.
func (c *cursor) density(pos int) float64 {
	if pos < c.start {
		return 0
	}
	p := 0.5 * c.step(c.gap(pos)) / float64(c.runs)
	if pos >= c.head {
		p += 0.5 * c.step(pos-c.head+1)
	}
	return p
}

// plausible returns a bound of density for an account with the benefit of the doubt: whichever stream moved on, the
// others may be waiting for it. Otherwise a slow worker that catches up alone would look like a reader with a single
// stream that has begun there.
func (c *cursor) plausible(pos int) float64 {
	p := c.step(c.gap(pos))
	if pos >= c.head {
		p = max(p, c.step(pos-c.head+1))
	}
	return p
}

func (c *cursor) unreadIn(from, to int) int {
	sum := max(to-from, 0)
	for i := from / 64; i*64 < to; i++ {
		w := c.words[i] &^ (1<<max(from-i*64, 0) - 1)
		if to-i*64 < 64 {
			w &= 1<<(to-i*64) - 1
		}
		sum -= bits.OnesCount64(w)
	}
	return sum
}
