package engine

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

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
// stream wants it. Streams over one dataset take what others have fetched, and places and memory go by
// weight; see [streams].
//
// A stream has one goroutine, ended and waited for by Close.
type Stream struct {
	engine  *Engine
	name    string
	volume  *cache.Volume
	layout  *catalog.Layout             // where files lie together; nil: each is an object of its own
	epochs  func(epoch int) order.Order // over file numbers; nil when the epoch is not known
	places  func() int                  // requests that may be in flight to the store, readers' ones too
	weight  int
	account *cache.Account
	flow    prefetch.Flow    // guarded by the gate
	first   order.Order      // of the epoch that the stream began with
	epoch0  int              // that epoch
	horizon prefetch.Horizon // of requests for several files
	parts   []string         // extensions of the parts that are read with each file; see parts.go
	samples *catalog.Samples
	sizes   plannable
	mean    int64 // bytes at a position, about

	mu        sync.Mutex
	tracker   *prefetch.Tracker
	cur       phase
	next      phase // planner is nil while the next epoch is not known
	known     int   // the epoch whose successor was given to the tracker
	flying    int
	failed    int64
	restUntil int  // the reader's position from which on it is worth planning again; 0 when not resting
	inBulk    bool // neighbours come along whenever they are needed
	moved     bool // the reader has begun another pass since the last fill
	closed    bool
	unit      []int       // the file of the order that was last planned, and its parts
	head      int         // positions of a plan that waits which are staged first; 0 when none waits
	halved    bool        // what is staged of the plan in progress has made room for them
	searched  bool        // in other epochs, for a reader that was not where it was expected
	anchor    *Reanchored // the latest move; nil before any

	retold bool                           // plans followed upon plans
	told   *atomic.Pointer[order.Locator] // the latest plan; nil for an order that is not a plan

	pace paceMeter

	starved atomic.Bool  // a request found no memory; freed is called with mu held or not
	short   int64        // bytes that it was short of; guarded by mu, as bare
	bare    bool         // it was short of them for what its reader needs next
	opens   atomic.Int64 // by the reader, since bytes were last taken back

	onLanded func(file int, err error) // landedAlone, bound once

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
	reach   int // files up to here may have come along with others
	had     int // files up to here were planned before one of them was lost
	retain  int // so many files from the reader's on stay when others have read them, although they are not planned yet
}

// wants reports whether the plan, as far as it was carried out, holds the file at a position from
// on that is not read. The position that is being planned counts.
func (p *phase) wants(file, from int) bool {
	if p.order == nil {
		return false
	}
	for pos := p.order.Find(file, from); pos >= 0 && pos <= max(p.pos, p.reach, p.had, from+p.retain); pos = p.order.Find(file, pos+1) {
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
	if pos := p.order.Find(file, from); pos >= 0 && pos < p.pos {
		p.pos, p.had = pos, max(p.had, p.pos)
	}
}

// newStream starts to prefetch epochs(epoch) from position start.
func (e *Engine) newStream(name string, v *view, epochs func(int) order.Order, epoch, start, weight int) (*Stream, error) {
	return e.startStream(name, v, epochs, epoch, start, weight, nil, nil)
}

// newStreamAt starts to prefetch epochs(epoch) for a reader of the mount that has opened the given files of it.
func (e *Engine) newStreamAt(name string, v *view, epochs func(int) order.Order, epoch int, opened []int) (*Stream, error) {
	return e.startStream(name, v, epochs, epoch, 0, e.cfg.Weight, nil, opened)
}

func (e *Engine) startStream(name string, v *view, epochs func(int) order.Order, epoch, start, weight int, parts []string, opened []int) (*Stream, error) {
	o := epochs(epoch)
	if o == nil {
		return nil, errors.New("engine: the stream's first epoch is not known")
	}
	weight = max(weight, 1)
	s := &Stream{
		engine: e, name: name, volume: v.volume, layout: v.layout, epochs: epochs, first: o, epoch0: epoch, known: epoch - 1,
		parts: parts, samples: v.samples, places: e.placesOf(v),
		weight: weight, account: e.cache.NewAccount(float64(weight)), flow: prefetch.Flow{Weight: float64(weight)},
		tracker: prefetch.NewTracker(o, prefetch.TrackerOptions{Epoch: epoch}),
		wake:    make(chan struct{}, 1), done: make(chan struct{}),
	}
	for _, file := range opened {
		s.tracker.Open(file)
	}
	if s.sizes = s.volume; len(parts) > 0 {
		s.sizes = units{s}
	}
	s.mean = s.meanOf()
	if s.layout != nil {
		s.horizon = prefetch.NewHorizon(e.cache.Ledger().Limit()*7/8, s.mean)
	}
	s.onLanded = s.landedAlone
	s.cur = s.phaseOf(s.tracker.Order(), s.tracker.Read, start)
	ctx, cancel := context.WithCancel(context.Background())
	s.cancel = cancel
	s.off = []func(){e.cache.OnFreed(s.freed), e.cache.OnLost(s.lost)}
	e.host.streams.add(s)
	s.mu.Lock()
	s.cur.retain = e.host.streams.reach(s) // of what others' readers are done with before s has planned
	s.mu.Unlock()
	go s.run(ctx)
	return s, nil
}

func (s *Stream) phaseOf(o order.Order, read func(pos int) bool, pos int) phase {
	if o == nil {
		return phase{}
	}
	return phase{order: order.Index(o), planner: prefetch.NewPlanner(o, s.sizes).Skipping(read), read: read, pos: pos}
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
	s.engine.host.streams.remove(s)
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.engine.gate.plan(s) // it waits for no place any more
	s.engine.gate.pass(s.most())
	s.engine.cache.CloseAccount(s.account)
	s.engine.host.streams.sweep(s.volume)
}

// epoch returns the epoch that the reader is in.
func (s *Stream) epoch() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.tracker.Epoch()
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
		s.searchEpoch(ctx.Done())
		if s.fill() {
			// After the new pass has claimed what it can use of what was staged for the old one.
			s.engine.host.streams.sweep(s.volume)
		}
		s.engine.gate.pass(s.most())
		if s.starved.Load() {
			s.takeBack()
		}
		select {
		case <-ctx.Done():
			return
		case <-s.wake:
		}
	}
}

// takeBackEvery is after how many opens a stream may take back bytes for one file.
const takeBackEvery = 4

// takeBack takes memory from a stream that holds much more. At once that is what a stream that begins needs
// to go ahead at all, and the rest comes free as the others' readers go on. Where it does not, since they
// are slower, it is taken bit by bit, as s shows by its own reading that it needs it. What the reader
// asks for next is always worth what somebody needs last: it would take that memory itself in a moment.
func (s *Stream) takeBack() {
	const much, more = 4.0, 1.25 // how many times as much another holds
	over := much
	s.mu.Lock()
	short, bare := s.short, s.bare
	s.mu.Unlock()
	if bare {
		over = 0
	} else if s.opens.Load() >= takeBackEvery {
		s.opens.Store(0)
		over = more
	}
	s.engine.cache.TakeBack(s.account, short, over, s.engine.host.streams.payer) // what comes free wakes s
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
	switch {
	case next != nil && s.ofPlan() && next == s.tracker.Order():
		if !s.retold {
			s.next = s.phaseOf(next, unread, 0) // whose reader may repeat it; others write a plan for each epoch
		}
	case next != nil:
		s.tracker.SetNext(next)
		s.next = s.phaseOf(s.tracker.Upcoming(), unread, 0)
	}
}

// fill starts as many requests as connections and memory allow. It reports whether the reader has
// begun another pass since the last call.
func (s *Stream) fill() (moved bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	flying := s.flying
	s.engine.gate.plan(s)
	s.inBulk = s.bulk()
	s.cur.pos = max(s.cur.pos, s.tracker.Frontier())
	if s.stageHead() {
		return true
	}
	for {
		done, ok := s.issue(&s.cur)
		if done && s.next.planner != nil {
			_, ok = s.issue(&s.next)
		}
		if ok {
			s.starved.Store(false)
			s.cur.retain = s.engine.host.streams.reach(s)
			break
		}
		if s.starved.Swap(true) {
			break // whatever came free since the attempt began has woken us
		}
	}
	moved, s.moved = s.moved, false
	if s.flying > flying || !s.starved.Load() {
		s.engine.host.streams.passOn(s)
	}
	if s.starved.Load() && s.tracker.Frontier()+s.cur.retain > s.cur.pos {
		s.cur.retain = 0 // what is needed first must not wait for what is needed later
		moved = true
	}
	return moved
}

// most returns how many prefetches may be in flight: the limiter keeps an eighth of the places for readers
// who wait.
func (s *Stream) most() int {
	n := s.places()
	return max(1, n-n/8)
}

// resident is what the planner takes for that. s.mu is held.
func (s *Stream) resident(file, extent int) bool { return s.sizes.Claim(s.account, file, extent) }

// claim is resident for a file by itself.
func (s *Stream) claim(file, extent int) bool { return s.volume.Claim(s.account, file, extent) }

// due returns when the reader will ask for a position, zero if that is not known. s.mu is held.
func (s *Stream) due(p *phase, pos int) time.Time {
	if p != &s.cur {
		pos += s.cur.order.Len()
	}
	in, ok := prefetch.Pace{Head: s.tracker.Head(), Rate: s.pace.rate}.Due(pos)
	if !ok {
		return time.Time{}
	}
	return time.Now().Add(time.Duration(in * float64(time.Second)))
}

// issue carries the phase's plan out. It reports whether the plan's end was reached, and whether there
// was memory for all that connections allow. s.mu is held.
func (s *Stream) issue(p *phase) (done, ok bool) {
	gate, most := &s.engine.gate, s.most()
	for {
		// One position at a time, because what is passed on the way to it is claimed. Were more
		// claimed than what lies before the next request, then this might find all memory taken by
		// samples that are needed after it.
		_, p.pos = p.planner.Plan(p.pos, 0, 0, s.resident)
		if p.pos == p.order.Len() {
			return true, true
		}
		unit := s.unitOf(p.order.At(p.pos))
		file := s.missing(unit)
		s.bare = p == &s.cur && p.pos <= s.tracker.Frontier()
		s.short = min(s.volume.Manifest().Size(file), cache.ExtentSize)
		if !s.bare && s.engine.host.streams.mustYield(s) {
			return false, false
		}
		group, rest := s.group(p, file)
		if rest {
			return false, !s.hurries(p)
		}
		if len(group) > 1 {
			if !gate.may(s, most) {
				return false, true
			}
			var bytes int64
			for _, f := range group {
				bytes += s.volume.Manifest().Size(f)
			}
			r := &request{s: s}
			r.left.Store(int64(len(group)))
			s.flying++
			gate.took(s, bytes)
			started, out := s.volume.PrefetchGroup(s.account, group, s.due(p, p.pos), r.landed)
			r.drop(len(group) - started)
			if out == cache.NoMemory || out == cache.Closed {
				return false, false
			}
			continue
		}
		// The extents of a large file are under way side by side, the first ones first.
		for _, f := range unit {
			for x := range s.volume.Extents(f) {
				if !gate.may(s, most) {
					return false, true
				}
				switch s.volume.Prefetch(s.account, f, x, s.due(p, p.pos), s.onLanded) {
				case cache.Started:
					s.flying++
					gate.took(s, s.volume.ExtentBytes(f, x))
				case cache.Present:
				case cache.NoMemory, cache.Closed:
					return false, false
				}
			}
		}
	}
}

// Bounds of a request for several files of a shard. More than 4 MiB gain nothing, since a request's cost
// is spread over some 60 photographs by then; files that nobody asked for cost their bytes, of which
// 16 KiB pass in the time of a header or two.
const (
	groupBytes = 4 << 20
	groupGap   = 16 << 10
	groupFiles = 256
)

// bulk reports whether neighbours should be fetched although they are needed late, since the disk has
// room for all that is missing. They cost bytes before their time, so it must be for a windowed
// order, which needs all of a shard soon, or a dataset that is fetched in moments.
func (s *Stream) bulk() bool {
	if s.layout == nil {
		return false
	}
	e, m := s.engine, s.volume.Manifest()
	kept, extents := s.volume.Kept()
	missing := m.Bytes() / int64(max(extents, 1)) * int64(extents-kept)
	return s.volume.DiskRoom() > missing && (e.order().NeedsGroups() || m.Bytes() <= 2*e.cache.Ledger().Limit())
}

// group returns the files to fetch by one request with the one that is needed next: its neighbours in
// the shard that are needed soon, or that the disk takes. rest says that it is too early for that
// one: more will come along with it when the reader has gone on, or when there is more memory.
// s.mu is held.
func (s *Stream) group(p *phase, file int) (files []int, rest bool) {
	if s.layout == nil || s.volume.Extents(file) != 1 {
		return nil, false
	}
	frontier, head := 0, 0
	if p == &s.cur {
		frontier, head = s.tracker.Frontier(), s.tracker.Head()
	}
	bounds := prefetch.Coalescing{MaxBytes: groupBytes, MaxGap: groupGap, MaxFiles: groupFiles}
	free := s.engine.cache.PrefetchRoom()
	if early := p.pos >= s.horizon.Front(frontier, head)+s.horizon.Plan; early && (!s.hurries(p) || free < s.horizon.Reserve+groupBytes) {
		if p != &s.next {
			s.restUntil = p.pos - s.horizon.Plan*3/4
		}
		return nil, true
	}
	bounds = s.horizon.Bound(bounds, free)
	reach := p.order.Len() - 1
	if !s.inBulk {
		reach = min(reach, frontier+s.horizon.Take)
	}
	ranks := prefetch.Coalesce(file, packed{s.layout, s.volume}, bounds, func(f int) bool {
		if s.volume.Extents(f) != 1 {
			return false
		}
		if s.inBulk {
			return !s.claim(f, 0)
		}
		for of := range s.readWith(f) {
			for pos := p.order.Find(of, frontier); pos >= 0 && pos <= reach; pos = p.order.Find(of, pos+1) {
				if !p.read(pos) {
					return !s.claim(f, 0)
				}
			}
		}
		return false
	})
	p.reach = max(p.reach, reach)
	for i, r := range ranks {
		ranks[i] = s.layout.At(r)
	}
	return ranks, false
}

// hurries reports whether what memory there is goes to a phase before its reader comes near: neighbours for
// the disk, and the next epoch, for which the line would be idle else while this one's last batches are read.
// s.mu is held.
func (s *Stream) hurries(p *phase) bool { return s.inBulk || p == &s.next }

// packed implements prefetch.Places.
type packed struct {
	*catalog.Layout
	v *cache.Volume
}

// Extent implements prefetch.Places.
func (p packed) Extent(rank int) (object int, off, end int64) {
	file := p.At(rank)
	object, off = p.Where(file)
	return object, off, off + p.v.Manifest().Size(file)
}

// request is one request to the store, for one file or several.
type request struct {
	s    *Stream
	left atomic.Int64 // files that have not landed
}

// drop says that n files of the request were not asked for after all. s.mu is held.
func (r *request) drop(n int) {
	if n > 0 && r.left.Add(int64(-n)) == 0 {
		r.s.flying--
		r.s.engine.gate.left(r.s.most())
	}
}

// landed is told about every file that arrived or failed.
func (r *request) landed(file int, err error) { r.s.landed(file, err, r.left.Add(-1) == 0) }

// landedAlone is told about every extent that was asked for by a request of its own.
func (s *Stream) landedAlone(file int, err error) { s.landed(file, err, true) }

// landed takes note of a file that arrived or failed; last if that was all of the request. A failed one is
// left to the reader, whose own read tries again and reports the error.
func (s *Stream) landed(file int, err error, last bool) {
	s.mu.Lock()
	if last {
		s.flying--
	}
	if err != nil {
		s.failed++
	}
	wanted := s.wantsLocked(file)
	s.mu.Unlock()
	if !wanted { // given up, or read, while it was on its way
		s.engine.host.streams.spend(s.volume, file)
	}
	if last {
		s.engine.gate.left(s.most())
	}
}

// wants reports whether the file was fetched, or claimed, for this stream and is still to be read.
func (s *Stream) wants(file int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.wantsLocked(file)
}

func (s *Stream) wantsLocked(file int) bool {
	if s.closed {
		return false
	}
	for f := range s.readWith(file) {
		if s.cur.wants(f, s.tracker.Frontier()) || s.next.wants(f, 0) {
			return true
		}
	}
	return false
}

// lost is told that a file which was staged had to go before it was read.
func (s *Stream) lost(v *cache.Volume, file int) {
	if v != s.volume {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for f := range s.readWith(file) {
		s.cur.rewind(f, s.tracker.Frontier())
		s.next.rewind(f, 0)
	}
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
	s.opens.Add(1)
	before := s.tracker.Frontier()
	ev, _ := s.tracker.Open(file)
	s.pace.note(time.Now, s.tracker.Consumed())
	switch at := s.tracker.Frontier(); {
	case ev.Moved():
		s.moveTo(ev)
	case at < before && at < s.cur.pos: // what had been given up is read after all
		s.cur.pos = at
		s.poke()
	case s.restUntil > 0 && s.horizon.Front(at, s.tracker.Head()) >= s.restUntil:
		s.restUntil = 0
		s.poke()
	case s.isLost():
		s.poke()
	case s.starved.Load() && (s.tracker.Frontier() >= s.cur.pos || s.opens.Load() >= takeBackEvery):
		s.poke() // it may take memory back now
	}
}

// Read returns the whole file at position pos of the stream's first epoch and moves its position
// there. The bytes are valid, and nobody writes to them, until release.
func (s *Stream) Read(ctx context.Context, pos int) (data []byte, release func(), err error) {
	file := s.first.At(pos)
	unit := s.appendUnit(make([]int, 0, 1+len(s.parts)), file)
	for _, f := range unit { // before the position counts as read, so that no part is given up that is on its way
		s.engine.host.streams.opened(s.volume, f)
	}
	done := func() {
		for _, f := range unit {
			s.engine.host.streams.done(s.volume, f)
		}
	}
	s.opened(file)
	data, free, err := s.volume.Sample(ctx, file)
	if err != nil {
		done()
		return nil, nil, err
	}
	return data, func() { free(); done() }, nil
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

	Stale      bool        `json:"stale,omitempty"` // of a plan: nobody has read by it for long
	Events     Events      `json:"events"`
	Reanchored *Reanchored `json:"reanchored,omitempty"` // nil before the reader has moved

	Weight  int     `json:"weight"`
	Share   float64 `json:"share"`                // of places and memory for prefetching, when all streams want them; 0 to 1
	Held    int64   `json:"held_bytes"`           // of memory, staged or on their way, that count as this stream's
	Fetched int64   `json:"prefetch_bytes"`       // that were asked for on its behalf
	Pace    float64 `json:"pace_samples_per_sec"` // of the reader; 0 until it is known

	LeadSeconds float64 `json:"lead_seconds"` // lead_samples at that pace; 0 until it is known
}

// maxLead bounds the work of computing a lead.
const maxLead = 100_000

// Progress returns a snapshot. Lead is the number of samples ahead of the reader that can be read
// without waiting.
func (s *Stream) Progress() Progress {
	s.mu.Lock()
	defer s.mu.Unlock()
	at := s.tracker.Position()
	p := Progress{
		Name: s.name, Epoch: at.Epoch, Pass: at.Pass, Position: s.tracker.Head(), Consumed: s.tracker.Consumed(), Len: s.cur.order.Len(),
		Planned: s.cur.pos, InFlight: s.flying, Failed: s.failed, Skipped: s.tracker.Skipped(), Strays: s.tracker.Count(prefetch.Stray),
		Events: s.events(), Reanchored: s.anchor,
		Lead:   s.cur.planner.Lead(s.tracker.Frontier(), maxLead, s.sizes.Staged),
		Weight: s.weight, Share: s.engine.host.streams.share(s), Held: s.account.Held(), Fetched: s.engine.gate.served(s), Pace: s.pace.rate,
	}
	if p.Pace > 0 {
		p.LeadSeconds = float64(p.Lead) / p.Pace
	}
	return p
}

// filesOf maps an order over samples to one over files. It can be searched without an index where the
// order can, as uniform can; torch's is indexed by order.Index, in 4 bytes a file.
func filesOf(o order.Order, samples *catalog.Samples) order.Order {
	files := fileOrder{o, samples}
	if l, ok := o.(order.Locator); ok {
		return fileLocator{files, l}
	}
	return files
}

type fileOrder struct {
	samples order.Order
	view    *catalog.Samples
}

// Len implements order.Order.
func (o fileOrder) Len() int { return o.samples.Len() }

// At implements order.Order.
func (o fileOrder) At(pos int) int { return o.view.File(o.samples.At(pos)) }

type fileLocator struct {
	fileOrder
	by order.Locator
}

// Find implements order.Locator.
func (o fileLocator) Find(file, from int) int {
	sample, ok := o.view.Sample(file)
	if !ok {
		return -1
	}
	return o.by.Find(sample, from)
}
