package sim

import (
	"github.com/shoalfs/shoal/prefetch"
	"github.com/shoalfs/shoal/prefetch/order"
)

// stream runs prefetch.Executor over the modelled store and memory, for one walk, whose prefetch.Source it is. The
// engine infers its reader's position from opened files; the simulation knows it.
type stream struct {
	prefetch.Sizes
	s         *simulation
	x         prefetch.Executor
	gate      prefetch.Gate
	walk      *prefetch.Walk
	cur, next *reader
	bulk      bool
	mean      int64 // bytes of a sample
	read      int   // samples so far
}

// reader is the trainer's place in an epoch: prefetch.Reader.
type reader struct {
	epoch    int
	order    order.Locator // nil if not known
	done     bits          // the positions that were read
	frontier int           // the first position that was not read
	head     int           // the last position that was read, plus 1
}

func (r *reader) Frontier() int { return r.frontier }
func (r *reader) Head() int     { return r.head }

func (r *reader) Read(pos int) bool { return r.done.has(uint32(pos)) }

func (r *reader) Unread(from, to int) (n int) {
	for pos := from; pos < to; pos++ {
		if !r.Read(pos) {
			n++
		}
	}
	return n
}

func (r *reader) mark(pos int) {
	r.done.set(uint32(pos))
	r.head = max(r.head, pos+1)
	for r.frontier < r.order.Len() && r.Read(r.frontier) {
		r.frontier++
	}
}

func (st *stream) init(s *simulation) {
	st.s, st.Sizes = s, s.Sizes
	st.mean = max(s.volume.total/int64(s.Samples), 1)
	connections := func() int { return s.Connections }
	o := prefetch.WalkOptions{Source: st, Gate: &st.gate, Connections: connections, Ease: connections, Weight: 1,
		Layout: s.Places}
	if s.Places != nil {
		st.bulk = s.Bulk && s.CacheBytes >= s.volume.total
		o.Horizon = prefetch.NewHorizon(s.Memory*7/8, st.mean)
	}
	st.cur, st.next = st.reader(0), st.reader(1)
	st.walk = st.x.Begin(o, prefetch.Route{Order: st.cur.order, Reader: st.cur}, 0)
	st.x.Known(st.walk, prefetch.Route{Order: st.next.order})
}

func (st *stream) reader(epoch int) *reader {
	r := &reader{epoch: epoch, order: st.s.order(epoch)}
	if r.order != nil {
		r.done = newBits(r.order.Len())
	}
	return r
}

// begin moves on to an epoch. Extents prefetched for it count.
func (st *stream) begin(epoch int) {
	if epoch == st.cur.epoch {
		return
	}
	st.cur, st.next = st.next, st.reader(epoch+1)
	st.x.Moved(st.walk, prefetch.Route{Order: st.cur.order, Reader: st.cur}, prefetch.Route{Order: st.next.order})
}

func (st *stream) act() {
	for {
		switch a := st.x.Next(); a.Do {
		case prefetch.Idle:
			return
		case prefetch.Fetch:
			st.fetch(a)
		case prefetch.TakeBack:
			st.x.Done(a, prefetch.Refused, 0) // there is no other walk, and its own files it needs
		}
		// The only reader gives up extents itself after reading: volume.spend.
	}
}

// fetch starts a request, if there is memory for it.
func (st *stream) fetch(a prefetch.Action) {
	v, p := &st.s.volume, st.cur
	if a.Pos >= p.order.Len() {
		p = st.next
	}
	if a.Files != nil {
		out, bytes := st.fetchGroup(p, a.Files)
		st.x.Done(a, out, bytes)
		return
	}
	out := prefetch.Refused
	if v.reserve(a.Bytes, false) {
		out = prefetch.Started
		v.fetch(p, a.File, a.Extent, false)
	}
	st.x.Done(a, out, a.Bytes)
}

// fetchGroup starts one request for several files, as many from the front as fit in memory.
func (st *stream) fetchGroup(p *reader, files []int) (out prefetch.Outcome, bytes int64) {
	v, places := &st.s.volume, st.s.Places
	r := &request{epoch: p.epoch, ahead: true}
	var first, to int64
	out = prefetch.Present
	for _, f := range files {
		if v.claim(f, 0) {
			continue
		}
		_, off, end := places.Extent(places.Rank(f))
		from := st.s.source(p, f, v.extent(f, 0))
		if r.files != nil && from != r.from {
			break // others have it: a request of its own
		}
		if !v.reserve(v.sizes.ExtentBytes(f, 0), false) {
			out = prefetch.Refused
			break
		}
		if r.files == nil {
			first, r.from = off, from
		}
		to = max(to, end)
		r.files = append(r.files, int32(f))
		bytes += v.sizes.ExtentBytes(f, 0)
		v.states[v.extent(f, 0)] |= flying
	}
	if r.files == nil {
		return out, 0
	}
	r.bytes = to - first
	st.s.store.send(r)
	for _, f := range r.files {
		v.remember(v.extent(int(f), 0), r)
	}
	return prefetch.Started, bytes
}

// landed handles a request's answer, before its files.
func (st *stream) landed(r *request) {
	if !r.ahead {
		return
	}
	for i, f := range r.files {
		st.x.Landed(st.walk, int(f), i == len(r.files)-1)
	}
}

// opened handles a worker's start with a position.
func (st *stream) opened(pos int) {
	st.cur.mark(pos)
	st.read++
	st.s.follow(st.cur.frontier)
	st.x.Opened(st.walk)
}

func (st *stream) Claim(sample, x int) bool { return st.s.volume.claim(sample, x) }
func (st *stream) Room() (room, free int64) { return st.s.volume.room() }
func (st *stream) Ahead() int               { return prefetch.Reach(st.Rate(), 0, st.Share(), st.mean) }
func (st *stream) Rate() float64            { return float64(st.read) / max(st.s.now, prefetch.AheadFor) }
func (st *stream) Has(int) bool             { return false }
func (st *stream) Load() float64            { return float64(st.s.volume.used) }
func (st *stream) Share() int               { return int(st.s.Memory * 7 / 8 / (st.mean + 1)) }
func (st *stream) Bulk() bool               { return st.bulk }
