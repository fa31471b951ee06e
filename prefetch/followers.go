package prefetch

import (
	"maps"
	"math"

	"github.com/shoalfs/shoal/prefetch/order"
)

// Followers tells the processes that read by an order from those that read something else, such as another job with
// its own seed: their opens say nothing about the order's reader.
//
// Evidence is summed per process, as the logarithm of how much more probable the order makes its opens than chance
// does. A process of the order continues from where it was, mostly forwards and by little: by 1 within a batch, then
// past the other workers' batches. A step of d positions has the scale-free probability 1/d. So a process that reads
// in another random order loses 3 bits per open, and one of the order gains most of the bits of a position. The same
// is summed for the next order, which new processes may begin. A process counts as a follower at odds of 64:1, and as
// a stranger at the same odds against both orders (the sums are bounded, so this is E. S. Page's test for a change;
// see Tracker). A stranger's opens are left out as long as another process certainly follows the order. While there
// are strangers, opens of unknown processes are held back, and count once their process is a follower. Without a
// certain follower every open counts: it may be the reader's, which has moved. So does every open of a short order,
// in which threads that take turns look like strangers. The zero value is ready.
type Followers struct {
	of      map[uint32]*process
	last    order.Locator // of the last open
	opens   int           // by known processes
	sure    int           // of opens, at the last one by a certain follower
	strange int           // and when a stranger was
	one     [1]int
}

type process struct {
	cur, next evidence
	is        standing
	held      []int // samples opened since the evidence was lowest, while unknown
	seen      int   // Followers.opens at its last open
}

type standing uint8

const (
	unknown standing = iota
	follower
	stranger
)

// evidence that a process reads by an order.
type evidence struct {
	order order.Locator
	at    int // position of its last open, plus 1
	bits  float64
}

const (
	decided, doubtless = 6.0, 12.0 // bits
	// sureFor is for how many opens a certain follower keeps others out: more than the first ones of its own workers,
	// and few compared with an epoch.
	sureFor = 1024
	// Shares of a follower's opens that continue forwards, backwards, and anywhere.
	ahead, back, anywhere = 0.75, 0.20, 0.05
	maxFollowers          = 4096
	maxHeld               = 16
	leastOrder            = 1000
)

// Open records an open, and returns the samples whose opens now count as those of the reader of cur, or of next
// unless nil. Process 0 is unknown, and counts. The result is valid until the next call.
func (f *Followers) Open(id uint32, sample int, cur, next order.Locator) []int {
	if id == 0 || cur.Len() < leastOrder {
		f.one[0] = sample
		return f.one[:]
	}
	if f.last != cur { // processes that have ended would keep the orders that they read by
		f.last = cur
		maps.DeleteFunc(f.of, func(_ uint32, p *process) bool { return f.opens-p.seen > 2*cur.Len() })
	}
	p := f.of[id]
	if p == nil {
		if f.of == nil || len(f.of) >= maxFollowers {
			f.of = map[uint32]*process{}
		}
		p = &process{}
		f.of[id] = p
	}
	if p.next.order == cur && p.cur.order != cur { // not of an order that comes again
		p.cur, p.next = p.next, evidence{}
	}
	f.opens++
	p.seen = f.opens
	p.cur.add(sample, cur)
	p.next.add(sample, next)
	if p.cur.bits >= doubtless {
		f.sure = f.opens
	}
	switch bits := max(p.cur.bits, p.next.bits); {
	case bits >= decided:
		p.is = follower
	case bits <= -decided:
		p.is, p.held = stranger, p.held[:0]
	}
	if p.is == stranger {
		f.strange = f.opens
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
	return p == nil || p.is == follower || !f.lately(f.sure) || p.is == unknown && !f.lately(f.strange)
}

// Strangers reports whether other readers were seen lately.
func (f *Followers) Strangers() bool { return f.lately(f.strange) && f.lately(f.sure) }

func (f *Followers) lately(when int) bool { return when > 0 && f.opens-when <= sureFor }

// add records an open of a reader of o.
func (e *evidence) add(sample int, o order.Locator) {
	if e.order != o {
		if e.order == nil || o == nil || e.at > o.Len() || e.at > 0 && o.At(e.at-1) != e.order.At(e.at-1) {
			*e = evidence{}
		}
		e.order = o // which otherwise continues the previous one
	}
	if o == nil {
		e.bits = -decided
		return
	}
	pos, share := o.Find(sample, e.at), ahead
	if pos < 0 {
		pos, share = o.Find(sample, 0), back
	}
	if pos < 0 { // a file outside the order
		return
	}
	if n := float64(o.Len()); e.at > 0 {
		step := math.Abs(float64(pos - e.at + 1))
		e.bits += math.Log2(anywhere + share*n/(max(step, 1)*(1+math.Log(n))))
		e.bits = min(max(e.bits, -decided), doubtless)
	}
	e.at = pos + 1
}
