package engine

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"

	"github.com/shoalfs/shoal/cache"
	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/prefetch"
	"github.com/shoalfs/shoal/prefetch/order"
)

// Stream carries one order out: it follows its reader and keeps fetching what comes next, nearest
// first, as long as connections and memory allow. When the epoch's last request is out it goes on
// with the head of the next epoch.
//
// What it has fetched ahead is claimed: it stays in memory until it was read, and no longer than some
// stream wants it.
//
// A stream has one goroutine, ended and waited for by Close.
type Stream struct {
	engine   *Engine
	name     string
	volume   *cache.Volume
	epochs   func(epoch int) order.Order // over file numbers; nil when the epoch is not known
	inFlight int                         // most requests in flight
	first    order.Order                 // of the epoch that the stream began with

	mu      sync.Mutex
	tracker *prefetch.Tracker
	cur     phase
	next    phase // planner is nil while the next epoch is not known
	known   int   // the epoch whose successor was given to the tracker
	flying  int
	failed  int64
	moved   bool // the reader has begun another pass since the last fill
	closed  bool

	starved atomic.Bool  // a request found no memory; freed is called with mu held or not
	ahead   atomic.Int64 // positions planned and not yet read, after the last fill

	wake   chan struct{}
	cancel context.CancelFunc
	done   chan struct{}
	off    []func()
}

// phase is an epoch's plan and how far it was carried out.
type phase struct {
	order   order.Locator
	planner *prefetch.Linear
	read    func(pos int) bool
	pos     int
}

// wants reports whether the plan, as far as it was carried out, holds the file at a position from
// on that is not read. The position that is being planned counts.
func (p *phase) wants(file, from int) bool {
	if p.order == nil {
		return false
	}
	for pos := p.order.Find(file, from); pos >= 0 && pos <= p.pos; pos = p.order.Find(file, pos+1) {
		if !p.read(pos) {
			return true
		}
	}
	return false
}

// rewind plans again from where the file is wanted.
func (p *phase) rewind(file, from int) {
	if p.order == nil {
		return
	}
	if pos := p.order.Find(file, from); pos >= 0 {
		p.pos = min(p.pos, pos)
	}
}

// newStream starts to prefetch epochs(epoch) from position start.
func (e *Engine) newStream(name string, v *cache.Volume, epochs func(int) order.Order, epoch, start int) (*Stream, error) {
	o := epochs(epoch)
	if o == nil {
		return nil, errors.New("engine: the stream's first epoch is not known")
	}
	s := &Stream{
		engine: e, name: name, volume: v, epochs: epochs, first: o, known: epoch - 1,
		// The limiter keeps an eighth of the connections for readers who wait.
		inFlight: max(1, e.cfg.Connections-e.cfg.Connections/8),
		tracker:  prefetch.NewTracker(o, prefetch.TrackerOptions{Epoch: epoch}),
		wake:     make(chan struct{}, 1), done: make(chan struct{}),
	}
	s.cur = s.phaseOf(s.tracker.Order(), s.tracker.Read, start)
	ctx, cancel := context.WithCancel(context.Background())
	s.cancel = cancel
	s.off = []func(){e.cache.OnFreed(s.freed), e.cache.OnLost(s.lost)}
	e.streams.add(s)
	go s.run(ctx)
	return s, nil
}

func (s *Stream) phaseOf(o order.Order, read func(pos int) bool, pos int) phase {
	if o == nil {
		return phase{}
	}
	return phase{order.Index(o), prefetch.NewPlanner(o, s.volume).Skipping(read), read, pos}
}

func unread(int) bool { return false }

// Close stops prefetching for this order and waits for the stream's goroutine. What is staged for it
// alone may be recycled then.
func (s *Stream) Close() {
	s.cancel()
	<-s.done
	for _, off := range s.off {
		off()
	}
	s.engine.streams.remove(s)
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.engine.streams.sweep(s.volume)
}

func (s *Stream) poke() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

func (s *Stream) run(ctx context.Context) {
	defer close(s.done)
	for {
		s.prepareNext()
		if s.fill() {
			// After the new pass has claimed what it can use of what was staged for the old one.
			s.engine.streams.sweep(s.volume)
		}
		select {
		case <-ctx.Done():
			return
		case <-s.wake:
		}
	}
}

// prepareNext computes and indexes the next epoch's order, which for torch is a whole permutation,
// outside the lock that every open of a file takes.
func (s *Stream) prepareNext() {
	s.mu.Lock()
	epoch := s.tracker.Epoch()
	known := s.known == epoch
	s.mu.Unlock()
	if known {
		return
	}
	var next order.Locator
	if o := s.epochs(epoch + 1); o != nil {
		next = order.Index(o)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.tracker.Epoch() != epoch {
		return // the reader moved on meanwhile; the next round tries again
	}
	s.known = epoch
	if next != nil {
		s.tracker.SetNext(next)
		s.next = s.phaseOf(s.tracker.Upcoming(), unread, 0)
	}
}

// fill starts as many requests as connections and memory allow. It reports whether the reader has
// begun another pass since the last call.
func (s *Stream) fill() (moved bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.cur.pos = max(s.cur.pos, s.tracker.Frontier())
	for {
		done, ok := s.issue(&s.cur)
		if done && s.next.planner != nil {
			_, ok = s.issue(&s.next)
		}
		s.ahead.Store(int64(s.lead()))
		if ok {
			s.starved.Store(false)
			break
		}
		if s.starved.Swap(true) {
			break // whatever came free since the attempt began has woken us
		}
	}
	moved, s.moved = s.moved, false
	return moved
}

// lead returns how many positions are planned ahead of the reader. s.mu is held.
func (s *Stream) lead() int { return s.cur.pos - s.tracker.Frontier() + s.next.pos }

// issue carries the phase's plan out. It reports whether the plan's end was reached, and whether there
// was memory for all that connections allow. s.mu is held.
func (s *Stream) issue(p *phase) (done, ok bool) {
	for {
		// One position at a time, because what is passed on the way to it is claimed. Were more
		// claimed than what lies before the next request, then this might find all memory taken by
		// samples that are needed after it.
		_, p.pos = p.planner.Plan(p.pos, 0, 0, s.volume.Claim)
		if p.pos == p.order.Len() {
			return true, true
		}
		if s.engine.streams.mustYield(s, s.lead()) {
			return false, false
		}
		file := p.order.At(p.pos)
		for x := range s.volume.Extents(file) {
			if s.flying >= s.inFlight {
				return false, true
			}
			switch s.volume.Prefetch(file, x, func(err error) { s.landed(file, err) }) {
			case cache.Started:
				s.flying++
			case cache.Present:
			case cache.NoMemory, cache.Closed:
				return false, false
			}
		}
	}
}

// landed is told about every request that ended. A failed one is left to the reader, whose own read
// tries again and reports the error.
func (s *Stream) landed(file int, err error) {
	s.mu.Lock()
	s.flying--
	if err != nil {
		s.failed++
	}
	wanted := s.wantsLocked(file)
	// Woken for some requests at a time: a wake-up costs more than a request's planning.
	enough := s.flying <= s.inFlight-max(1, s.inFlight/16)
	s.mu.Unlock()
	if !wanted { // given up, or read, while it was on its way
		s.engine.streams.spend(s.volume, file)
	}
	if enough {
		s.poke()
	}
}

// wants reports whether the file was fetched, or claimed, for this stream and is still to be read.
func (s *Stream) wants(file int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.wantsLocked(file)
}

func (s *Stream) wantsLocked(file int) bool {
	return !s.closed && (s.cur.wants(file, s.tracker.Frontier()) || s.next.wants(file, 0))
}

// lost is told that a file which was staged had to go before it was read.
func (s *Stream) lost(v *cache.Volume, file int) {
	if v != s.volume {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.cur.rewind(file, s.tracker.Frontier())
	s.next.rewind(file, 0)
	s.starved.Store(true) // so that memory that comes free leads to another fill
}

// freed is told that memory came free.
func (s *Stream) freed() {
	if s.starved.Load() {
		s.poke()
	}
}

// opened tells the stream that its reader has opened a file.
func (s *Stream) opened(file int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if ev, _ := s.tracker.Open(file); ev.Moved() {
		s.cur = s.phaseOf(s.tracker.Order(), s.tracker.Read, s.tracker.Frontier())
		s.next = s.phaseOf(s.tracker.Upcoming(), unread, 0)
		s.moved = true
		s.poke()
	}
}

// Read returns the whole file at position pos of the stream's first epoch and moves its position
// there. The bytes are valid, and nobody writes to them, until release.
func (s *Stream) Read(ctx context.Context, pos int) (data []byte, release func(), err error) {
	file := s.first.At(pos)
	s.engine.streams.opened(s.volume, file)
	s.opened(file)
	data, free, err := s.volume.Sample(ctx, file)
	if err != nil {
		s.engine.streams.done(s.volume, file)
		return nil, nil, err
	}
	return data, func() {
		free()
		s.engine.streams.done(s.volume, file)
	}, nil
}

// Progress tells where a stream stands.
type Progress struct {
	Name     string `json:"name"`
	Epoch    int    `json:"epoch"`
	Pass     int    `json:"pass"`     // times that the epoch was begun again
	Position int    `json:"position"` // highest position read + 1
	Consumed int    `json:"consumed"` // positions read
	Len      int    `json:"len"`      // positions in the epoch
	Planned  int    `json:"planned"`  // position up to which requests are out
	Lead     int    `json:"lead_samples"`
	InFlight int    `json:"in_flight"`
	Failed   int64  `json:"failed_prefetches"`
	Skipped  int    `json:"skipped"` // positions given up as not read
	Strays   int    `json:"strays"`  // opened files that are not in the order
}

// maxLead bounds the work of computing a lead.
const maxLead = 100_000

// Progress returns a snapshot. Lead is the number of samples ahead of the reader that can be read
// without waiting.
func (s *Stream) Progress() Progress {
	s.mu.Lock()
	defer s.mu.Unlock()
	at := s.tracker.Position()
	return Progress{
		Name: s.name, Epoch: at.Epoch, Pass: at.Pass, Position: s.tracker.Head(), Consumed: s.tracker.Consumed(), Len: s.cur.order.Len(),
		Planned: s.cur.pos, InFlight: s.flying, Failed: s.failed, Skipped: s.tracker.Skipped(), Strays: s.tracker.Count(prefetch.Stray),
		Lead: s.cur.planner.Lead(s.tracker.Frontier(), maxLead, s.volume.Staged),
	}
}

// fileOrder maps an order over samples to one over files.
type fileOrder struct {
	samples order.Order
	view    *catalog.Samples
}

// Len implements order.Order.
func (o fileOrder) Len() int { return o.samples.Len() }

// At implements order.Order.
func (o fileOrder) At(pos int) int { return o.view.File(o.samples.At(pos)) }
