package prefetch

import (
	"math"

	"github.com/shoalfs/shoal/prefetch/order"
)

// Followers tells the processes that read by an order from those that read beside it, such as another job's with a seed
// of its own: their opens say nothing of where the order's reader is.
//
// Evidence is summed for each process, as the logarithm of how much more probable the order makes its opens than chance
// does. A process of the order goes on from where it was, mostly forwards and by little: by 1 within a batch, by the
// other workers' batches after it; a step of d positions has the scale-free probability 1/d. So one that reads in another
// random order loses 3 bits an open, and one of the order gains most of the bits of a position. The same is summed for
// the order that comes next, which new processes may begin. A process is taken for a follower by odds of 64:1, and for
// none by the same odds against both orders (the sums are bounded, so that this is E. S. Page's test for a change; see
// Tracker). In between its opens are held back, and count when it is known for a follower.
//
// All this holds as long as somebody follows the order beyond doubt. With nobody in that place every open counts: it may
// be of the reader, who has gone elsewhere. The zero value is ready.
type Followers struct {
	of    map[uint32]*process
	opens int // by those that are told apart
	sure  int // of opens, when one beyond doubt was last seen
}

type process struct {
	cur, next evidence
	follows   bool
	held      []int // samples opened since the evidence was lowest, while it is not known to follow
}

// evidence that a process reads by an order.
type evidence struct {
	order order.Locator
	at    int // position of its last open, plus 1
	bits  float64
}

const (
	decided, doubtless = 6.0, 12.0 // bits
	// sureFor is for how many opens a process beyond doubt keeps others out: longer than its own workers' first ones
	// take, and short beside an epoch.
	sureFor = 1024
	// Shares of a follower's opens that go on forwards, backwards, and anywhere.
	ahead, back, anywhere = 0.75, 0.20, 0.05
	maxFollowers          = 4096
	maxHeld               = 16
)

// Open takes note of an open, and returns the samples whose opens count now as those of the reader of cur, or of next if
// that is not nil. Process 0 is not known, and counts. The result is valid until the next call.
func (f *Followers) Open(id uint32, sample int, cur, next order.Locator) []int {
	p := f.of[id]
	if p == nil || id == 0 {
		if f.of == nil || len(f.of) >= maxFollowers {
			f.of = map[uint32]*process{}
		}
		p = &process{}
		f.of[id] = p
	}
	if p.next.order == cur {
		p.cur, p.next = p.next, evidence{}
	}
	f.opens++
	p.cur.add(sample, cur)
	p.next.add(sample, next)
	if p.cur.bits >= doubtless {
		f.sure = f.opens
	}
	switch bits := max(p.cur.bits, p.next.bits); {
	case bits >= decided:
		p.follows = true
	case bits <= -decided:
		p.follows, p.held = false, p.held[:0]
	}
	p.held = append(p.held, sample)
	if !f.Follows(id) {
		if len(p.held) == maxHeld {
			p.held = p.held[:copy(p.held, p.held[1:])]
		}
		return nil
	}
	counts := p.held
	p.held = p.held[:0]
	return counts
}

// Follows reports whether an open of the process counts at once.
func (f *Followers) Follows(id uint32) bool {
	p := f.of[id]
	return p == nil || p.follows || id == 0 || f.sure == 0 || f.opens-f.sure > sureFor
}

// add takes note of an open of a reader of o.
func (e *evidence) add(sample int, o order.Locator) {
	if e.order != o {
		if e.order == nil || o == nil || e.at > o.Len() || e.at > 0 && o.At(e.at-1) != e.order.At(e.at-1) {
			*e = evidence{}
		}
		e.order = o // which otherwise goes on from the one before
	}
	if o == nil {
		e.bits = -decided
		return
	}
	pos, share := o.Find(sample, e.at), ahead
	if pos < 0 {
		pos, share = o.Find(sample, 0), back
	}
	if pos < 0 { // a file that is not read by the order
		return
	}
	if n := float64(o.Len()); e.at > 0 {
		step := math.Abs(float64(pos - e.at + 1))
		e.bits += math.Log2(anywhere + share*n/(max(step, 1)*(1+math.Log(n))))
		e.bits = min(max(e.bits, -decided), doubtless)
	}
	e.at = pos + 1
}
