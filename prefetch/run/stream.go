package run

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"github.com/shoalfs/shoal/cache"
	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/internal/pause"
	"github.com/shoalfs/shoal/prefetch"
	"github.com/shoalfs/shoal/prefetch/order"
)

// Options configure a stream. They do not change.
type Options struct {
	Name    string
	Volume  *cache.Volume
	Ranges  *Ranges          // what the orders are of; nil: of the volume's files
	Layout  *catalog.Layout  // of a packed dataset; nil where each file is an object
	Samples *catalog.Samples // what the parts are parts of
	Gate    *prefetch.Gate   // of the store
	Places  func() int       // limit of requests in flight to the store, including readers'
	Ease    func() int       // limit while what comes next is not needed soon
	Grouped func() bool      // the mount's order needs all of a shard soon
	Keep    Keep             // nil for ranges: which files are read again says nothing of those
	Choose  bool             // keep the samples of the first epoch
	Search  bool             // search for the reader in other epochs than the expected one
	Weight  int              // against other streams; 0 is 1

	Epochs func(epoch int) order.Order // over file numbers; nil for an unknown epoch
	First  int                         // epoch to begin with
	Start  int                         // position to begin with
	Opened []Opening                   // by all readers of the mount; they show where the stream's reader is
	Parts  []string                    // extensions of the parts read with each file; see parts.go
	Has    func(file int) bool         // the reader probably has the file, and will not ask for it; nil: it has none

	// called once, from its own goroutine, if the readers do not follow a plan; see prefetch.Trial
	Departs func(s *Stream, matched, of int)
}

// Opening is an open of a file by a process; 0 if unknown.
type Opening struct {
	Process uint32
	File    int
}

// Keep receives the orders, so that the cache keeps samples that are read again.
type Keep interface {
	Opened(file int)
	Choose(o order.Order) // o begins; nil: an epoch has ended. It may take long
}

// Stream carries out one order: it follows its reader, knows or computes the order of each epoch, and has the
// reader's next files fetched; see prefetch.Executor for the rules.
//
// A stream has one goroutine, which computes orders. Close ends it and waits for it.
type Stream struct {
	brief
	runner  *Runner
	account *cache.Account
	told    *atomic.Pointer[order.Locator] // the latest plan; nil for an order that is not a plan

	// Guarded by the runner's lock.
	tracker   *prefetch.Tracker
	walk      *prefetch.Walk
	readers   prefetch.Followers
	trials    trials
	known     int // the epoch whose successor was given to the tracker
	flying    int // requests
	failed    int64
	unit      []int       // the file of the order that was last planned, and its parts
	searched  bool        // in other epochs, for a reader not found in the expected one
	anchor    *Reanchored // the latest move; nil before any
	replanned bool        // its reader writes a plan for each epoch
	pace      paceMeter
	// unread positions up to its fastest workers: as far as one open in nine was, since others may be strangers'
	spread int

	through atomic.Bool // the reader has finished an epoch

	wake   chan struct{}
	cancel context.CancelFunc
	done   chan struct{}
}

// trials are of a plan, and of the one before.
type trials struct{ now, before prefetch.Trial }

// brief is the description of a stream. It does not change.
type brief struct {
	Options
	first   order.Order      // of the epoch to begin with
	of      things           // what the orders are of
	mean    int64            // bytes at a position, about
	horizon prefetch.Horizon // of requests for several files
}

// Begin starts to prefetch an order.
func (r *Runner) Begin(o Options) (*Stream, error) { return r.begin(o, nil) }

// BeginPlan starts to prefetch a written plan, in place of o.Epochs. A reader that starts over repeats it until
// another is written. When this returns, the stream has claimed the staged files that it can use.
func (r *Runner) BeginPlan(o Options, plan order.Locator) (*Stream, error) {
	told := new(atomic.Pointer[order.Locator])
	told.Store(&plan)
	o.Epochs = func(int) order.Order { return *told.Load() }
	s, err := r.begin(o, told)
	if err == nil {
		r.claim(s) // before the stream that it replaces is closed
	}
	return s, err
}

func (r *Runner) begin(o Options, told *atomic.Pointer[order.Locator]) (*Stream, error) {
	first := o.Epochs(o.First)
	if first == nil {
		return nil, errors.New("run: the stream's first epoch is not known")
	}
	o.Weight = max(o.Weight, 1)
	b := brief{Options: o, first: first, of: o.Volume}
	if o.Ranges != nil {
		b.of, b.Has = o.Ranges, o.Ranges.kernelHas
	}
	if b.mean = b.meanOf(); o.Layout != nil {
		b.horizon = prefetch.NewHorizon(r.cache.Ledger().Limit()*7/8, b.mean)
		b.horizon.Chunk = o.Layout.Chunk
	}
	s := &Stream{
		brief: b, runner: r, account: r.cache.NewAccount(float64(o.Weight)), told: told, known: o.First - 1,
		tracker: prefetch.NewTracker(first, o.First, prefetch.DefaultSpan),
		wake:    make(chan struct{}, 1), done: make(chan struct{}),
	}
	at := s.tracker.Order()
	for _, by := range o.Opened { // first which processes follow the order, then how far
		s.readers.Open(by.Process, by.File, at, nil)
	}
	for _, by := range o.Opened {
		if s.readers.Follows(by.Process) {
			s.tracker.Open(by.File)
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	s.cancel = cancel
	r.add(s, o.Start)
	go s.run(ctx)
	return s, nil
}

// route is the current order with the stream's reader.
func (s *Stream) route() prefetch.Route {
	return prefetch.Route{Order: s.tracker.Order(), Reader: s.tracker}
}

// Close stops prefetching for this order and waits for the stream's goroutine. Files staged for it alone may be
// recycled then.
func (s *Stream) Close() {
	s.cancel()
	<-s.done
	s.runner.remove(s)
}

// Position returns where the reader stands.
func (s *Stream) Position() prefetch.Position {
	s.runner.mu.Lock()
	defer s.runner.mu.Unlock()
	return s.tracker.Position()
}

func (s *Stream) run(ctx context.Context) {
	defer close(s.done)
	if s.Choose {
		s.Keep.Choose(s.first)
	}
	for {
		if s.through.Swap(false) && s.Keep != nil {
			s.Keep.Choose(nil)
		}
		s.prepareNext()
		s.searchEpoch(ctx)
		select {
		case <-ctx.Done():
			return
		case <-s.wake:
		}
	}
}

// prepareNext computes and indexes the next epoch's order (for torch a whole permutation) outside the lock that every
// open takes.
func (s *Stream) prepareNext() {
	r := s.runner
	r.mu.Lock()
	epoch := s.tracker.Epoch()
	known := s.known == epoch
	r.mu.Unlock()
	if known {
		return
	}
	var next order.Locator
	if o := s.Epochs(epoch + 1); o != nil {
		next = order.Index(o)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if s.tracker.Epoch() != epoch {
		pause.Poke(s.wake) // the reader moved on meanwhile
		return
	}
	s.known = epoch
	switch {
	case next != nil && s.OfPlan() && next == s.tracker.Order():
		if !s.replanned {
			r.x.Known(s.walk, prefetch.Route{Order: next}) // its reader may repeat it; others write a plan per epoch
		}
	case next != nil:
		s.tracker.SetNext(next)
		r.x.Known(s.walk, prefetch.Route{Order: s.tracker.Upcoming()})
	}
	pause.Poke(r.wake)
}

// Heard passes the stream an open from before Runner.Opened knew the stream.
func (s *Stream) Heard(o Opening) {
	s.runner.event(func(*prefetch.Executor) { s.heard(o.Process, o.File) })
}

// heard handles an open by a process that may be of its reader. The runner's lock is held.
func (s *Stream) heard(process uint32, file int) {
	if s.Ranges != nil {
		return // reads show where it is
	}
	cur, next := s.walk.Orders()
	counts := s.readers.Open(process, file, cur, next)
	if s.readers.Strangers() {
		s.runner.x.Beside(s.walk)
	}
	for _, file := range counts {
		s.follow(file)
	}
}

// continues returns the trial of the plan that a read of one of the things continues: the latest, or still the one
// before, for whose end that waits. It returns nil if it continues neither. The runner's lock is held.
func (s *Stream) continues(process uint32, things []int) *prefetch.Trial {
	if s.Departs == nil || len(things) == 0 {
		return nil
	}
	told, t := *s.told.Load(), &s.trials
	if !t.now.Of(told) {
		t.before, t.now = t.now, prefetch.NewTrial(told)
	}
	if cur, _ := s.walk.Orders(); t.before.Of(cur) && t.before.Continues(process, things) {
		return &t.before
	}
	if t.now.Continues(process, things) {
		return &t.now
	}
	return nil
}

// strays handles a read of one of the things that continues no plan. It says nothing of a plan that waits for the end
// of another one. The runner's lock is held.
func (s *Stream) strays(process uint32, things []int) {
	if s.Departs == nil || len(things) == 0 {
		return
	}
	t := &s.trials
	if cur, _ := s.walk.Orders(); t.before.Of(cur) && t.before.Wanders(process, things) {
		return
	}
	if t.now.Strays(process, things) {
		go s.Departs(s, t.now.Matched, t.now.Opens)
	}
}

// follow handles an open by the reader. The runner's lock is held.
func (s *Stream) follow(file int) {
	ev, pos := s.tracker.Open(file)
	s.pace.note(time.Now, s.tracker.Consumed())
	s.spread = min(max(s.tracker.Unread(s.tracker.Frontier(), max(pos, 0)), s.spread-s.spread/64-1), s.spread*9/8+1)
	if ev.Moved() {
		s.moveTo(ev)
		return
	}
	s.runner.x.Opened(s.walk)
	if s.isLost() {
		pause.Poke(s.wake)
	}
}

// Read returns the whole file at position pos of the stream's first epoch and moves its position there. The bytes are
// valid and do not change until release.
func (s *Stream) Read(ctx context.Context, pos int) (data []byte, release func(), err error) {
	return s.ReadBy(ctx, pos, s.Volume.Sample)
}

// ReadBy is Read of what sample returns for the file.
func (s *Stream) ReadBy(ctx context.Context, pos int, sample func(context.Context, int) ([]byte, func(), error)) (
	data []byte, release func(), err error) {
	file := s.first.At(pos)
	unit := s.appendUnit(make([]int, 0, 1+len(s.Parts)), file)
	s.runner.event(func(x *prefetch.Executor) {
		for _, f := range unit { // before the position counts as read, so that no part in flight is given up
			x.Open(s.Volume, f)
			s.Keep.Opened(f)
		}
		s.follow(file)
	})
	done := func() {
		s.runner.event(func(x *prefetch.Executor) {
			for _, f := range unit {
				x.Close(s.Volume, f)
			}
		})
	}
	data, free, err := sample(ctx, file)
	if err != nil {
		done()
		return nil, nil, err
	}
	return data, func() { free(); done() }, nil
}

// Progress describes the state of a stream.
type Progress struct {
	Name     string `json:"name"`
	Epoch    int    `json:"epoch"`
	Pass     int    `json:"pass"`     // times that the epoch was begun again
	Position int    `json:"position"` // highest position read + 1
	Consumed int    `json:"consumed"` // positions read
	Len      int    `json:"len"`      // positions in the epoch
	Planned  int    `json:"planned"`  // position up to which requests were sent
	Lead     int    `json:"lead_samples"`
	InFlight int    `json:"in_flight"`
	Failed   int64  `json:"failed_prefetches"`
	Skipped  int    `json:"skipped"` // positions given up as not read
	Strays   int    `json:"strays"`  // opened files that are not in the order

	Stale      bool        `json:"stale,omitempty"` // of a plan: no reader has followed it for long
	Events     Events      `json:"events"`
	Reanchored *Reanchored `json:"reanchored,omitempty"` // nil before the reader has moved

	Weight int `json:"weight"`
	// share of places and memory for prefetching when all want theirs; 0 to 1
	Share   float64 `json:"share"`
	Held    int64   `json:"held_bytes"`           // of memory, staged or in flight, on this stream's account
	Fetched int64   `json:"prefetch_bytes"`       // requested on its behalf
	Pace    float64 `json:"pace_samples_per_sec"` // of the reader; 0 until it is known

	LeadSeconds float64 `json:"lead_seconds"` // lead_samples at that pace; 0 until it is known
}

// where reports whether the reader need not wait for an extent, and whether it is on its way.
func (s *Stream) where(file, x int) (staged, comes bool) {
	at := s.of.Where(file, x)
	return at > cache.OnWay || s.has(file), at == cache.OnWay
}

// Progress returns a snapshot. Lead is the number of samples ahead of the reader that can be read without waiting.
func (s *Stream) Progress() Progress {
	s.runner.mu.Lock()
	defer s.runner.mu.Unlock()
	at := s.tracker.Position()
	p := Progress{
		Name: s.Name, Epoch: at.Epoch, Pass: at.Pass, Position: at.Head, Consumed: at.Consumed, Len: at.Len,
		Planned: s.walk.Planned(), InFlight: s.flying, Failed: s.failed, Skipped: s.tracker.Unread(0, at.Frontier),
		Strays: s.tracker.Count(prefetch.Stray), Events: s.events(), Reanchored: s.anchor,
		Lead: s.walk.Lead(100_000, s.where), Pace: s.pace.rate,
		Weight: s.Weight, Share: s.runner.share(s), Held: s.account.Held(), Fetched: s.walk.Served(),
	}
	if p.Pace > 0 {
		p.LeadSeconds = float64(p.Lead) / p.Pace
	}
	return p
}
