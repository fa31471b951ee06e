package cache

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"time"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/internal/trace"
)

// flight brings parts from the first of its sources that has them, by one request for all. Who asks for one of them
// meanwhile joins it, so that each is fetched once.
//
//	queued ──► funded ──► flying ──► landed
//	   └──────────┴──────────┴─────► failed
//
//	queued   it waits for memory, as a flight for a reader may have to
//	funded   the memory for its parts is reserved; a flight begins here if there is some
//	flying   its sources are asked, one after the other
//	landed   in one step its parts went to the ring, to the writer's queue if the disk takes them, and to who waits
//	failed   who waits got the error
//
// It is in Volume.flights, by each of its parts, until it has landed or failed.
type flight struct {
	parts   []part
	from    *restorer // the coded copy that its part is to be restored from, its only source; nil: it fetches
	sources []Source
	ctx     context.Context   // the dataset's, with the urgency of the request or the span of its reader
	urgency *objstore.Urgency // raised when a reader joins; nil: a reader began it
	purpose purpose
	verify  int           // Volume.verify when it began
	funded  atomic.Bool   // the memory for its parts is reserved
	done    chan struct{} // closed when it has landed or failed
	err     error
}

// part is one piece that a flight brings.
type part struct {
	fl      *flight
	key     extentKey
	file    int
	form    form     // that a reader wants
	buf     *buffer  // nil before there is memory
	waiters int      // readers who get a reference when it lands
	read    int64    // bytes that they are to read
	account *Account // that its memory is on; nil if it is spent, or was begun by a reader
	spent   bool     // nobody wants it after its waiters have it
}

func (p *part) bytes() int { return p.key.v.bytes(p.file, p.key.piece) }

func (p *part) size() int64 { return footprint(p.bytes()) }

// x is the number of the part's extent in its file.
func (p *part) x() int { return int(p.key.extent() - p.key.v.extent(p.file, 0)) }

// assign puts the part on account a, unspent. The volume's lock is held.
func (p *part) assign(a *Account) {
	p.account.add(-p.size())
	a.add(p.size())
	p.account, p.spent = a, false
}

func (p *part) want() Want {
	v := p.key.v
	w := Want{File: p.file, Off: int64(p.x())*ExtentSize + p.key.off(), P: p.buf.data}
	if (p.form == anyForm || p.fl.purpose == ahead) && v.codec != nil && v.Extents(p.file) == 1 {
		w.Coded = &p.buf.coded
	}
	return w
}

// join adds a waiter who reads n bytes; what was read of granules is not counted. The volume's lock is held.
func (p *part) join(n int) {
	if p.waiters++; !p.key.isGranule() {
		p.read += int64(n)
	}
}

// leave takes a waiter away that no longer waits, and was to read n bytes.
func (p *part) leave(n int) {
	p.key.v.mu.Lock()
	defer p.key.v.mu.Unlock()
	select {
	case <-p.fl.done: // it landed in the same moment
		if p.fl.err == nil {
			p.buf.Release()
		}
	default:
		if p.waiters--; !p.key.isGranule() {
			p.read -= int64(n)
		}
	}
}

// await waits for the part's flight, to read n bytes. Its error is the flight's or the context's.
func (p *part) await(ctx context.Context, n int) error {
	select {
	case <-p.fl.done:
		return p.fl.err
	case <-ctx.Done():
		p.leave(n)
		return ctx.Err()
	}
}

// blames reports whether the flight's error may be due to another file than the part's, or to a copy of it.
func (p *part) blames(err error) bool {
	return errors.Is(err, ErrNotHeld) || len(p.fl.parts) > 1 && p.fl.parts[0].file != p.fl.parts[1].file &&
		objstore.KindOf(err) != objstore.KindTransient
}

// begin sends off a flight for parts that are nowhere, and that nobody fetches yet. It is the only place that makes
// flights. v.mu is held, and the memory is reserved unless a reader waits. If the dataset is closed it gives that back
// and returns nil. done, unless nil, is called for each part, from another goroutine.
func (v *Volume) begin(purpose purpose, due time.Time, span trace.Span, parts []part, from *restorer,
	done func(file int, err error)) *flight {
	sources := []Source{from}
	if from == nil {
		sources = purpose.sources(v, parts[0].file, parts[0].x())
	}
	fl := &flight{parts: parts, from: from, sources: sources, purpose: purpose, verify: v.verify,
		done: make(chan struct{})}
	if !v.ds.enter() {
		if purpose != reading {
			v.c.ledger.Release(fl.need(), purpose.class())
		}
		return nil
	}
	if purpose == reading {
		fl.ctx = trace.With(v.ds.ctx, span)
		fl.funded.Store(v.c.ledger.TryReserve(fl.need(), purpose.class())) // now, so that peers can join
	} else {
		fl.urgency = objstore.NewUrgency(due)
		fl.ctx = objstore.WithUrgency(v.ds.ctx, fl.urgency)
		fl.funded.Store(true)
	}
	if purpose == ahead {
		count(&v.ds.count.Prefetched, len(parts))
	}
	for i := range parts {
		p := &parts[i]
		p.fl = fl
		p.account.add(p.size())
		v.flights[p.key.piece] = p
		switch {
		case p.key.isGranule() && purpose == reading:
			p.key.fetched(p.key.bit())
		case !p.key.isGranule() && !p.key.hasSlot():
			delete(v.parts, p.key.extent())
		}
	}
	go fl.fly(v, done)
	return fl
}

// fly takes a flight from its first state to its last.
func (fl *flight) fly(v *Volume, done func(file int, err error)) {
	defer v.ds.flights.Done()
	var err error
	if !fl.funded.Load() {
		err = v.c.reserve(fl.ctx, fl.need(), fl.purpose.class())
	}
	if err == nil {
		fl.funded.Store(true)
		wants := make([]Want, len(fl.parts))
		for i := range fl.parts {
			p := &fl.parts[i]
			p.buf = newBuffer(v.c.ledger, p.bytes(), fl.purpose.class())
			wants[i] = p.want()
		}
		for i := 0; i < len(fl.sources) && len(wants) > 0 && err == nil; i++ {
			wants, err = fl.sources[i].Fill(fl.ctx, wants)
		}
	}
	fl.land(v, err)
	fl.from.close()
	if done != nil {
		for i := range fl.parts {
			done(fl.parts[i].file, v.store.named(fl.parts[i].file, err))
		}
	}
}

// need returns the memory for the parts of a flight, and for what they are restored from.
func (fl *flight) need() int64 { return fl.from.need() + sizeOf(fl.parts) }

func sizeOf(parts []part) (n int64) {
	for i := range parts {
		n += parts[i].size()
	}
	return n
}

// land ends a flight. Each part is in its next place before it leaves v.flights.
func (fl *flight) land(v *Volume, err error) {
	d := v.ds.disk.Load()
	write := make([]bool, len(fl.parts)) // asked without the lock
	for i := range fl.parts {
		write[i] = err == nil && d != nil && fl.from == nil && fl.parts[i].fits(d)
	}
	v.mu.Lock()
	fl.err = err
	for i := range fl.parts {
		p := &fl.parts[i]
		if err == nil {
			if p.lends() {
				p.buf.lent, p.buf.detour = v.phase.Load(), fl.purpose == serving && fl.from == nil
			}
			p.buf.refs.Add(int32(p.waiters))
			p.stow(d, write[i])
		} else {
			p.remember(err)
		}
		p.account.add(-p.size())
		delete(v.flights, p.key.piece)
	}
	if err == nil && !v.retired && fl.verify == v.verify {
		fl.from.keepPlain(fl.parts[0].buf)
	}
	close(fl.done)
	v.mu.Unlock()
	for i := range fl.parts {
		fl.parts[i].buf.Release()
	}
	if slices.Contains(write, true) && d.noWrites.Load() { // set a moment ago: the sweep may have missed these
		v.c.ring.mark(v.ds, false)
	}
	if err != nil && fl.purpose == ahead {
		count(&v.ds.count.FetchErrors, len(fl.parts))
	}
	v.c.relieve()
}

// fits reports whether the disk may take the part.
func (p *part) fits(d *disk) bool {
	v := p.key.v
	if d.noWrites.Load() || v.loc(p.key.extent()) != 0 {
		return false
	}
	if p.key.isGranule() {
		return p.key.takesGranules()
	}
	return v.wanted(p.file, p.x())
}

// stow puts a part that has come into the ring, and queues it to be written. The volume's lock is held.
func (p *part) stow(d *disk, write bool) {
	v := p.key.v
	granule := p.key.isGranule()
	done := p.spent || v.retired || p.account == nil && p.read >= int64(p.bytes())
	key := p.key
	if p.buf.coded > 0 { // also for its waiters
		p.buf.data = p.buf.data[:p.buf.coded]
		key = key.as(coded)
	}
	if v.retired && granule || done && p.fl.from != nil || p.fl.verify != v.verify {
		return // what was restored and read can be restored again; what came before a Verify is not compared
	}
	write = write && !v.retired && (!granule || v.parts[p.key.extent()].planned)
	v.c.ring.put(key, p.buf, p.account, p.read, done, write)
	if write {
		d.writer.add(key)
	}
}

const (
	failureTime  = time.Second
	mostFailures = 1024 // remembered; a store that is gone fails everything
)

// failure is a store's error, for readers that ask for the extent again soon. After a failed read the kernel does, page
// by page, and each time would cost all the retries and the time that the store had.
type failure struct {
	at  time.Time
	err error
}

// remember keeps a failure. The volume's lock is held.
func (p *part) remember(err error) {
	v := p.key.v
	var of *objstore.Error
	if p.waiters == 0 || p.blames(err) || !errors.As(err, &of) {
		return
	}
	if len(v.failed) >= mostFailures {
		clear(v.failed)
	}
	v.failed[p.key.extent()] = failure{time.Now(), v.store.named(p.file, err)}
}
