// Package run carries out the decisions of prefetch.Executor: requests to the store, and moves in the cache's memory.
// It guards that nothing happens between a decision and its execution.
//
//	Runner   one a cache: it has the executor, and the goroutine that walks
//	Stream   one an order in progress: it follows its reader, and computes what comes in which epoch
package run

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/shoalfs/shoal/cache"
	"github.com/shoalfs/shoal/internal/pause"
	"github.com/shoalfs/shoal/prefetch"
)

// Runner drives the executor for all streams of a cache: files opened and closed go in, requests and moves come out.
//
// Its lock guards the executor, and every stream's tracker with its state. Events take it for less than a microsecond.
// One goroutine walks, and so does each landing request, a bounded stretch at a time. Actions are carried out with the
// lock held, so that nothing happens between a decision and its execution. The cache is also called with the lock held;
// so its callbacks, which may come within such a call, only take a note, which is handled before the next action.
type Runner struct {
	cache *cache.Cache
	wake  chan struct{}

	mu      sync.Mutex
	x       prefetch.Executor
	streams []*Stream
	told    int64 // of freed

	freed  atomic.Int64 // how often memory came free
	hungry atomic.Bool  // a walk waits for memory
	ranged atomic.Int32 // streams whose orders are of ranges
	lostMu sync.Mutex
	lost   []loss
}

// loss is a staged file, or a piece of one, that was lost.
type loss struct {
	v *cache.Volume
	cache.Range
}

// New returns a runner over a cache. Run starts its work.
func New(c *cache.Cache) *Runner {
	r := &Runner{cache: c, wake: make(chan struct{}, 1)}
	c.OnFreed(func() {
		r.freed.Add(1)
		if r.hungry.Load() {
			pause.Poke(r.wake)
		}
	})
	c.OnLost(func(v *cache.Volume, p cache.Range) {
		r.lostMu.Lock()
		r.lost = append(r.lost, loss{v, p})
		r.lostMu.Unlock()
		r.freed.Add(1) // so that its walk tries again
		pause.Poke(r.wake)
	})
	return r
}

// Run walks until ctx ends.
func (r *Runner) Run(ctx context.Context) {
	for ctx.Err() == nil {
		if r.turn() {
			continue
		}
		select {
		case <-ctx.Done():
		case <-r.wake:
		}
	}
}

// turn carries out the next actions, a bounded stretch. It reports whether there may be more.
func (r *Runner) turn() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.work()
}

// work is turn with r.mu held.
func (r *Runner) work() (more bool) {
	for {
		r.hear()
		a := r.x.Next()
		switch a.Do {
		case prefetch.Again:
			return true
		case prefetch.Idle:
			hungry := r.x.Hungry()
			r.hungry.Store(hungry)
			return hungry && r.freed.Load() != r.told // before hungry was set
		}
		r.do(a)
	}
}

// hear handles the cache's callbacks. r.mu is held.
func (r *Runner) hear() {
	freed := r.freed.Load()
	if freed == r.told {
		return
	}
	r.told = freed
	r.lostMu.Lock()
	lost := r.lost
	r.lost = nil
	r.lostMu.Unlock()
	for _, l := range lost {
		r.x.Lost(l.v, l.File)
		off := int64(l.Extent)*cache.ExtentSize + int64(l.Off)
		for _, s := range r.streams {
			if s.Ranges != nil && s.Volume == l.v {
				for n := range s.Ranges.staging(l.File, off, off+int64(l.N)) {
					r.x.Lost(s.Ranges, n)
				}
			}
		}
	}
	r.x.Freed()
}

// do carries an action out. r.mu is held.
func (r *Runner) do(a prefetch.Action) {
	switch a.Do {
	case prefetch.Fetch:
		r.fetch(a)
	case prefetch.Hand:
		a.Data.(things).Hand(streamOf(a.Walk).account, a.File)
	case prefetch.Spend:
		a.Data.(things).Spend(a.File)
	case prefetch.Sweep:
		r.sweep(a.Data.(things))
	case prefetch.TakeBack:
		out := prefetch.Refused
		if r.cache.TakeBack(streamOf(a.Walk).account, a.Bytes, a.Over, owners{r, a}) {
			out = prefetch.Started
		}
		r.x.Done(a, out, 0)
	}
}

// owners implements cache.Owners for a TakeBack. The runner's lock is held.
type owners struct {
	*Runner
	a prefetch.Action
}

func (o owners) Needed(from *cache.Account, v *cache.Volume, file int) int {
	for _, s := range o.streams {
		if s.account == from && s.of == things(v) {
			return o.a.Loses(s.walk, file)
		}
	}
	return 0
}

func (o owners) Heir(v *cache.Volume, file int) *cache.Account {
	if w := o.x.Wanting(v, file); w != nil {
		return streamOf(w).account
	}
	return nil
}

// sweep schedules a check of all that is staged. r.mu is held.
func (r *Runner) sweep(of things) {
	for _, n := range of.Unspent() {
		r.x.Unwanted(of, n)
	}
}

// settle decides who gets the files that readers are done with. r.mu is held.
func (r *Runner) settle() {
	for a, ok := r.x.Settle(); ok; a, ok = r.x.Settle() {
		r.do(a)
	}
}

// event passes an event, and settles at once the files that readers are done with.
func (r *Runner) event(bring func(x *prefetch.Executor)) {
	r.mu.Lock()
	bring(&r.x)
	r.settle()
	ready := r.x.Ready()
	r.mu.Unlock()
	if ready {
		pause.Poke(r.wake)
	}
}

// Opened says that a process (0: unknown) is about to read a file, and that the streams must follow that. Done must
// be called in the end.
func (r *Runner) Opened(v *cache.Volume, file int, process uint32, streams ...*Stream) {
	r.event(func(x *prefetch.Executor) {
		x.Open(v, file)
		files := []int{file}
		try(streams, process, func(s *Stream) []int {
			if s.Ranges != nil {
				return nil // reads count there
			}
			return files
		})
		for _, s := range streams {
			if slices.Contains(r.streams, s) { // it has not ended meanwhile
				s.heard(process, file)
			}
		}
	})
}

// try shows the trials of plans what a process reads now: one of the things. The runner's lock is held.
func try(streams []*Stream, process uint32, things func(s *Stream) []int) {
	var of *prefetch.Trial
	continued := 0
	for _, s := range streams {
		if t := s.continues(process, things(s)); t != nil {
			of = t
			continued++
		}
	}
	if continued == 1 {
		of.Matches(process)
	}
	for _, s := range streams {
		if continued == 0 {
			s.strays(process, things(s))
		}
	}
}

// Done says that a reader is done with a file.
func (r *Runner) Done(v *cache.Volume, file int) {
	r.event(func(x *prefetch.Executor) { x.Close(v, file) })
}

// request is one request to the store, for one file or several.
type request struct {
	s    *Stream
	left int // files that have not landed; guarded by the runner's lock
}

// landed handles a file that arrived or failed.
func (q *request) landed(file int, err error) {
	s, r := q.s, q.s.runner
	r.mu.Lock()
	q.left--
	if q.left == 0 {
		s.flying--
	}
	if err != nil {
		s.failed++
	}
	r.x.Landed(s.walk, file, q.left == 0)
	more := r.work() // starting the next request is cheaper than waking another goroutine for it
	r.mu.Unlock()
	if more {
		pause.Poke(r.wake)
	}
}

// fetch starts a request. r.mu is held, so that its result is handled after it is accounted for.
func (r *Runner) fetch(a prefetch.Action) {
	s := streamOf(a.Walk)
	q, due := &request{s, 1}, s.due(a.Pos)
	var out cache.Outcome
	bytes := a.Bytes
	switch {
	case s.Ranges != nil:
		landed := func(_ int, err error) { q.landed(a.File, err) }
		q.left, out = s.Volume.PrefetchRange(s.account, s.Ranges.piece(a.File, a.Extent), due, landed)
	case a.Files == nil:
		out = s.Volume.Prefetch(s.account, a.File, a.Extent, due, q.landed)
	default:
		bytes = 0
		q.left, out = s.Volume.PrefetchGroup(s.account, a.Files, due, q.landed)
		for _, f := range a.Files {
			bytes += s.Volume.Manifest().Size(f)
		}
	}
	switch out {
	case cache.Started:
		s.flying++
		r.x.Done(a, prefetch.Started, bytes)
	case cache.Present:
		r.x.Done(a, prefetch.Present, 0)
	default:
		r.x.Done(a, prefetch.Refused, 0)
	}
}

// add adds a stream from position start on.
func (r *Runner) add(s *Stream, start int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.streams = append(r.streams, s)
	if s.Ranges != nil {
		r.ranged.Add(1)
	}
	o := prefetch.WalkOptions{
		Data: s.of, Source: source{s.of, s}, Gate: s.Gate, Connections: s.Places, Ease: s.Ease,
		Weight: float64(s.Weight), Horizon: s.horizon,
	}
	if s.Layout != nil {
		o.Layout = s.Layout
	}
	if len(s.Parts) > 0 {
		o.Parts = units{s}
	}
	s.walk = r.x.Begin(o, s.route(), start)
	pause.Poke(r.wake)
}

// claim lets a new stream walk until it stops: then it has claimed the staged files that it can use.
func (r *Runner) claim(s *Stream) {
	for walking := true; walking; {
		r.turn()
		r.mu.Lock()
		walking = s.walk.State() == prefetch.Walking
		r.mu.Unlock()
	}
}

// remove ends a stream, and returns when files staged for it alone may be recycled: then its volume may be closed.
func (r *Runner) remove(s *Stream) {
	r.mu.Lock()
	r.streams = slices.DeleteFunc(r.streams, func(t *Stream) bool { return t == s })
	if s.Ranges != nil {
		r.ranged.Add(-1)
		s.closeRanges(0)
	}
	r.x.End(s.walk)
	r.settle() // the ranges that were open
	r.cache.CloseAccount(s.account)
	r.sweep(s.of)
	for r.x.Sweeping() {
		r.work()
		r.mu.Unlock() // others want it
		r.mu.Lock()
	}
	r.mu.Unlock()
	pause.Poke(r.wake)
}

// share returns the share of the memory for prefetching that s gets when all streams with something to fetch want
// theirs. r.mu is held.
func (r *Runner) share(s *Stream) float64 {
	all := s.Weight
	for _, t := range r.streams {
		if t != s && t.walk.State() != prefetch.Ended { // which wants no more
			all += t.Weight
		}
	}
	return float64(s.Weight) / float64(all)
}

// source is a stream as prefetch.Source.
type source struct {
	things
	s *Stream
}

func streamOf(w *prefetch.Walk) *Stream { return w.Source.(source).s }

func (o source) Claim(file, extent int) bool {
	return o.Has(file) || o.things.Claim(o.s.account, file, extent)
}

func (s *Stream) has(file int) bool { return s.Has != nil && s.Has(file) }

func (o source) Has(file int) bool        { return o.s.has(file) }
func (o source) Rate() float64            { return o.s.pace.rate }
func (o source) Load() float64            { return o.s.account.Load() }
func (o source) Room() (room, free int64) { return o.s.runner.cache.Ledger().PrefetchRoom() }

func (o source) Ahead() int { return prefetch.Reach(o.s.pace.rate, o.s.spread, o.Share(), o.s.mean) }

func (o source) Share() int {
	room := o.s.runner.share(o.s) * float64(o.s.runner.cache.Ledger().Limit()*7/8)
	return int(room / float64(o.s.mean+1))
}

// Bulk implements prefetch.Source: for a windowed order, which needs all of a shard soon, and for a small dataset if
// the disk has space for everything missing. Otherwise neighbours would be fetched too early.
func (o source) Bulk() bool {
	c, v := o.s.runner.cache, o.s.Volume
	if o.s.Layout == nil {
		return false
	}
	m := v.Manifest()
	kept, extents := v.Kept()
	missing := m.Bytes() / int64(max(extents, 1)) * int64(extents-kept)
	return v.DiskRoom() > missing && (o.s.Grouped() || m.Bytes() <= 2*c.Ledger().Limit())
}

// due returns when the reader will need the position, zero if unknown. r.mu is held.
func (s *Stream) due(pos int) time.Time {
	before := pos - s.tracker.Head()
	switch {
	case before < 0: // at any moment, since later ones were read
		return time.Now()
	case s.pace.rate <= 0:
		return time.Time{}
	}
	return time.Now().Add(time.Duration(float64(before) / s.pace.rate * float64(time.Second)))
}
