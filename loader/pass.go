package loader

import (
	"context"
	"crypto/rand"
	"errors"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// pass is one run through the data: the readers that fill batches, and the slots that batches are built in. A session
// has its own pass, or shares one with sessions that get exactly the same batches and never write to them.
//
// A batch is built by the session that asks for its place first. The others can take it until its slot is needed; a
// session that comes too late builds it again. A slot is reused only when nobody refers to it.
type pass struct {
	srv      *Server
	key      passKey
	shared   bool
	short    bool // there was no memory for all slots that were asked for
	crew     *crew
	mem      *slotMemory // nil: batches go in Chunks
	sessions int         // guarded by srv.passMu

	mu      sync.Mutex
	changed chan struct{}    // closed when there may be a slot for those that wait
	free    []uint32         // slots, the last used one at the end: it may still be in the CPU's cache
	idle    []*batch         // complete batches in slots without references, oldest first
	built   map[place]*batch // batches that others may take; shared passes only
	leases  map[*lease]struct{}
}

// passKey is everything that batches depend on.
type passKey struct {
	dataset, order, transform, hash, tail, bad, placement string
	seed                                                  uint64
	batch, world, rank                                    int
}

// place is the position of a batch in the order.
type place struct{ epoch, cursor int }

// lease is one client's claim on slots of a pass.
type lease struct {
	pass    *pass
	key     string // of the handover
	limit   int    // slots that it may hold at once
	session *session
	ready   chan struct{} // closed by the handover

	// Guarded by pass.mu.
	refs   map[uint32]*ref
	given  int           // of refs, delivered
	conn   net.Conn      // of the handover; nil: none yet, or gone
	frames *net.UnixConn // the same, never reset, if the client wants its messages there; set before ready is closed
	used   bool          // there was a handover
	over   bool          // the stream has ended

	told atomic.Bool // everything was sent: the client may leave
}

// ref is a session's claim on the batch in a slot.
type ref struct {
	batch *batch
	given bool // delivered: the client must release it
}

// sharePatience is how long a session waits for slots that other sessions hold before it sends a batch in Chunks.
// It waits once, and not again until slots were free.
const sharePatience = 100 * time.Millisecond

// join gives a session its pass and lease; the lease is nil if batches go in Chunks. It gets as many of the requested
// slots as there is memory for, but at least one for each credit that it opens with and one for the batch that the
// client works on.
func (s *Server) join(sess *session, slots, credits int, readonly bool) (*pass, *lease) {
	if slots == 0 {
		return s.newPass(passKey{}, false, nil), nil
	}
	least := min(credits+1, slots)
	if credits == 0 { // they come later, the number is unknown
		least = slots
	}
	s.passMu.Lock()
	defer s.passMu.Unlock()
	var k passKey
	most := slots
	if sp := sess.spec; readonly {
		k = passKey{sess.ds.Version(), sp.orderName, sp.transformName(), sp.hash, string(sp.tail), sp.bad.text,
			sp.placement.name(), sp.seed, sp.batch, sp.world, sp.rank}
		if p := s.passes[k]; p != nil && (p.mem.count() >= slots || p.short && p.mem.count() >= least) {
			p.sessions++
			return p, p.lease(slots, sess)
		}
		// Twice as many: two sessions never wait for each other, and a later or slower one finds that many batches of
		// the first session.
		most *= 2
	}
	p := s.newPass(k, readonly, s.newSlots(sess, most, least, readonly))
	if p.shared {
		p.short = p.mem.count() < slots
		s.passes[k] = p
	}
	return p, p.lease(slots, sess)
}

// newSlots allocates as many slots as there is memory for now, between least and most; nil if there is too little: all
// who open or leave a session wait for it. If batches may also go in Chunks, it leaves room for one: raw batches can be
// too large for a slot, and sessions that share slots can find all of them taken.
func (s *Server) newSlots(sess *session, most, least int, shared bool) *slotMemory {
	var data, beside int64
	if sess.spec.transform == nil {
		data = s.sizesOf(sess.ds).slotted(sess.spec.batch)
	}
	_, total := planes(sess.spec.transform, sess.spec.batch, data)
	bytes := slotBytes(total)
	if sess.spec.transform == nil || shared {
		beside = bytes
	}
	err := errors.New("the memory is used up (raise --memory, or lower the batch size)")
	for count := most; count >= least; count-- {
		size := int64(count) * bytes
		if !s.o.Memory.TryReserve(size + beside) {
			continue
		}
		s.o.Memory.Release(beside)
		var mem *slotMemory
		if mem, err = newSlotMemory(count, bytes); err == nil {
			s.counters.held.Add(size)
			return mem
		}
		s.o.Memory.Release(size)
	}
	if sess.ctx.Err() == nil {
		s.log.Warn("no shared memory for a feed session: its batches are sent over the connection",
			"session", sess.spec.session, "rank", sess.spec.rank, "slots", least, "slot_bytes", bytes, "cause", err)
	}
	return nil
}

func (s *Server) newPass(k passKey, shared bool, mem *slotMemory) *pass {
	p := &pass{srv: s, key: k, shared: shared && mem != nil, crew: newCrew(s.o.Readers), mem: mem, sessions: 1,
		changed: make(chan struct{}), built: map[place]*batch{}, leases: map[*lease]struct{}{}}
	if mem != nil {
		for slot := mem.count(); slot > 0; slot-- {
			p.free = append(p.free, uint32(slot))
		}
	}
	return p
}

// lease returns a claim on at most limit slots, nil if there are none. The caller holds srv.passMu.
func (p *pass) lease(limit int, s *session) *lease {
	if p.mem == nil {
		return nil
	}
	l := &lease{pass: p, key: rand.Text(), limit: min(limit, p.mem.count()), session: s,
		ready: make(chan struct{}), refs: map[uint32]*ref{}}
	p.mu.Lock()
	p.leases[l] = struct{}{}
	p.mu.Unlock()
	p.srv.leases[l.key] = l
	return l
}

// leave ends a session's part in the pass, once its producer has returned. The last session closes the pass.
func (p *pass) leave(l *lease) error {
	s := p.srv
	s.passMu.Lock()
	if l != nil {
		delete(s.leases, l.key)
	}
	p.sessions--
	last := p.sessions == 0
	if last && s.passes[p.key] == p {
		delete(s.passes, p.key)
	}
	s.passMu.Unlock()
	if l != nil {
		l.finish()
	}
	if !last {
		return nil
	}
	p.crew.close()
	if p.mem == nil {
		return nil
	}
	p.mu.Lock()
	for l := range p.leases {
		switch {
		case l.frames != nil && l.conn != nil:
			_ = l.frames.CloseWrite() // the client closes it; closing it here would lose messages in both directions
		case l.conn != nil:
			_ = l.conn.Close() // its reader ends; the client's mapping stays
		}
	}
	p.mu.Unlock()
	size := int64(len(p.mem.data))
	err := p.mem.close()
	s.counters.held.Add(-size)
	s.o.Memory.Release(size)
	return err
}

// finish is the end of the stream. It drops the batches that were not delivered; those delivered are the client's for
// as long as its handover connection stands.
func (l *lease) finish() {
	l.pass.mu.Lock()
	defer l.pass.mu.Unlock()
	l.over = true
	l.clear()
}

// clear drops what the client of a stream that has ended does not have. The caller holds pass.mu.
func (l *lease) clear() {
	for slot, r := range l.refs {
		if !r.given || l.conn == nil {
			l.drop(slot)
		}
	}
	if l.conn == nil {
		delete(l.pass.leases, l)
	}
	l.pass.wake()
}

// gone notes that the handover connection is closed: the client no longer uses the slots.
func (l *lease) gone() {
	l.pass.mu.Lock()
	defer l.pass.mu.Unlock()
	l.conn = nil
	switch { // before the stream's end, finish does the rest
	case l.over:
		l.clear()
	case !l.told.Load():
		l.session.cancel(errLeaseGone)
	}
}

// drop gives up the claim on a slot. The caller holds pass.mu, and wakes who waits afterwards.
func (l *lease) drop(slot uint32) {
	p, r := l.pass, l.refs[slot]
	delete(l.refs, slot)
	if r.given {
		l.given--
	}
	b := r.batch
	if b.refs--; b.refs > 0 {
		return
	}
	switch {
	case !b.complete: // nobody wants it; its readers free the slot
		p.forget(b)
		if b.cancel != nil {
			b.cancel(context.Canceled)
		}
	case p.built[b.at] == b:
		p.idle = append(p.idle, b)
	default:
		p.free = append(p.free, slot)
	}
}

// forget removes a batch from those that others can take.
func (p *pass) forget(b *batch) {
	if p.built[b.at] == b {
		delete(p.built, b.at)
	}
}

// completed notes that all rows of a batch are settled.
func (p *pass) completed(b *batch) {
	if b.slot == 0 {
		return
	}
	p.mem.finish(b.slot)
	p.mu.Lock()
	defer p.mu.Unlock()
	b.complete = true
	if b.failed {
		p.forget(b)
	}
	if b.refs == 0 {
		p.free = append(p.free, b.slot)
		p.wake()
	}
	if b.cancel != nil {
		b.cancel(nil)
	}
}

// take claims the batch at a place and returns it, if there is one, complete or under construction. First it waits
// while the session has as many slots as it may hold.
func (p *pass) take(ctx context.Context, s *session, at place) (*batch, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	w := slotWait{session: s}
	defer s.window.starve(false)
	for p.built[at] != nil && len(s.lease.refs) >= s.lease.limit {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		w.wait(ctx)
	}
	return p.taken(s.lease, at), nil
}

func (p *pass) taken(l *lease, at place) *batch {
	b := p.built[at]
	if b == nil {
		return nil
	}
	if b.refs == 0 {
		p.idle = slices.DeleteFunc(p.idle, func(i *batch) bool { return i == b })
	}
	b.refs++
	l.refs[b.slot] = &ref{batch: b}
	return b
}

// slot returns a slot without references.
func (p *pass) slot() (uint32, bool) {
	if n := len(p.free); n > 0 {
		s := p.free[n-1]
		p.free = p.free[:n-1]
		return s, true
	}
	if len(p.idle) > 0 {
		b := p.idle[0]
		p.idle = slices.Delete(p.idle, 0, 1)
		p.forget(b)
		return b.slot, true
	}
	return 0, false
}

// claim decides who builds a batch, and where. It returns b, with its source advanced, and with a slot or without one
// if it must go in Chunks; or another session's batch for the same place. It returns nil if the source has moved on:
// the caller begins again with another.
func (p *pass) claim(ctx context.Context, s *session, b *batch, total int64) (*batch, error) {
	l := s.lease
	p.mu.Lock()
	defer p.mu.Unlock()
	here := func(slot uint32) (*batch, error) {
		if b.source.at != b.at {
			if slot != 0 {
				p.free = append(p.free, slot)
			}
			return nil, nil
		}
		b.source.at.cursor += s.spec.global()
		if b.slot = slot; slot != 0 {
			b.refs = 1
			l.refs[slot] = &ref{batch: b}
			if p.shared {
				b.ctx, b.cancel = context.WithCancelCause(context.Background())
				p.built[b.at] = b
			}
		}
		return b, nil
	}
	if l == nil || total > p.mem.room() {
		return here(0)
	}
	w := slotWait{session: s}
	defer s.window.starve(false)
	for {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		if len(l.refs) >= l.limit {
			w.others = time.Time{}
		} else {
			if other := p.taken(l, b.at); other != nil {
				return other, nil
			}
			if slot, ok := p.slot(); ok {
				s.impatient = false
				return here(slot)
			}
			s.impatient = s.impatient || !w.others.IsZero() && time.Since(w.others) >= sharePatience
			if s.impatient {
				return here(0)
			}
		}
		w.wait(ctx)
	}
}

// give marks a batch as delivered, before it is sent, since the client may be fast. It reports false if the session
// is over.
func (l *lease) give(b *batch) bool {
	p := l.pass
	p.mu.Lock()
	defer p.mu.Unlock()
	r := l.refs[b.slot]
	if l.over || r == nil {
		return false
	}
	r.given = true
	l.given++
	p.wake()
	return true
}

// release takes slots back from the client.
func (l *lease) release(slots []uint32) error {
	p := l.pass
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, slot := range slots {
		if r := l.refs[slot]; r == nil || !r.given {
			return invalid("release of slot %d, which holds no batch of this session: release a slot once for each "+
				"batch that came in it", slot)
		}
		l.drop(slot)
	}
	p.wake()
	return nil
}

// poke wakes waiting producers; wake does for a caller that holds mu.
func (p *pass) poke() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.wake()
}

func (p *pass) wake() {
	close(p.changed)
	p.changed = make(chan struct{})
}
