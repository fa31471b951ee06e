package objstore

import "time"

// ease finds how many requests may be in flight while there are some that nobody needs soon. It is pure: [Limiter]
// feeds it.
//
// What shares a line with others, and can wait, goes by latency (LEDBAT, RFC 6817). A pace would not do: its own
// goodput is the higher the more requests it has beside those of others. A round is as many reads as may be in flight.
// If most of them took lineFull times as long as the fastest of their size lately, the line is full, and the number is
// halved. Otherwise it is doubled, if half as many were in flight.
type ease struct {
	n, done, late, most int
	settle              bool // this round still has requests of the number before
	// that a read of a size took, in this part of the history and the last
	least, before [hedgeClasses]time.Duration
	reads         int
}

const (
	leastEase   = 8
	lineFull    = 3       // more than sizes of one class, and what else a reader has in flight, make of it
	easeHistory = 1 << 14 // reads, after which what was before them is forgotten
)

// read takes a read of n bytes, at whose end as many as inUse of all places were in use.
func (e *ease) read(n int64, took time.Duration, inUse, places int) {
	if e.reads++; e.reads%easeHistory == 0 {
		e.before, e.least = e.least, [hedgeClasses]time.Duration{}
	}
	least, long := &e.least[classOf(n)], e.before[classOf(n)]
	if *least == 0 || took < *least {
		*least = took
	}
	if took > lineFull**least || long > 0 && took > lineFull*long {
		e.late++
	}
	e.most = max(e.most, inUse)
	if e.done++; e.done < e.n {
		return
	}
	before := e.n
	switch {
	case e.settle:
	case 2*e.late > e.done:
		e.n /= 2
	case 2*e.most >= e.n:
		e.n *= 2
	}
	e.n = max(leastEase, min(e.n, places))
	e.done, e.late, e.most, e.settle = 0, 0, 0, e.n != before
}
