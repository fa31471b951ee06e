package objstore

import (
	"context"
	"errors"
	"sync"
	"time"
)

// Limiter lets at most n requests into a store at once and serves those that wait by priority:
// Demand before Prefetch, first come first served within each. One place in eight (at least one,
// if there are two) is kept for Demand, so that a reader never waits behind a wall of prefetches.
//
// A request's priority is its context's when it arrives; [Urgency] can raise it while it waits.
//
// Listings that are sequences (List, ListAfter, ListLevel) are not limited: their caller's loop runs
// between the requests, and a place held meanwhile would lock out, or deadlock, a loop that reads.
type Limiter struct {
	each
	turns

	pace     *pace // nil: the number of places is fixed
	round    round
	n        int // places
	inUse    int // places taken
	prefetch int // of them, by Prefetch
}

// Limit decorates r with n places.
func Limit(r Reader, n int) *Limiter {
	l := &Limiter{n: max(1, n)}
	l.each = each{layerOf(r), l.request}
	l.take, l.back = l.enter, l.leave
	return l
}

// LimitAdaptive decorates r with as many places, most of them at most, as bring the most bytes a
// second: more only while that pays, fewer when the store says SlowDown. See [pace].
func LimitAdaptive(r Reader, most int) *Limiter {
	p := newPace(most)
	l := Limit(r, p.places)
	l.pace = p
	return l
}

// round is what the pace is fed: as many requests as there are places, one after another on each.
type round struct {
	start time.Time
	last  time.Time     // until when area is counted
	area  time.Duration // places in use, times time
	bytes int64
	done  int
}

const (
	// minRound keeps the scheduler's grain (10 ms on a busy machine) small against a round.
	minRound = 50 * time.Millisecond
	// saturated is the part of the places that must have been in use for a round to tell anything.
	// Prefetching can take seven in eight; where it takes far less, it waits for memory, or its
	// reader for nothing, and goodput says nothing about the store.
	saturated = 0.75
)

// count adds the time since the last change of l.inUse. l.mu is held.
func (l *Limiter) count() {
	if l.pace == nil {
		return
	}
	now := time.Now()
	if l.round.start.IsZero() {
		l.round = round{start: now, last: now}
	}
	l.round.area += time.Duration(l.inUse) * now.Sub(l.round.last)
	l.round.last = now
}

// learn takes the outcome of a read of n bytes to the pace. l.mu is held, and count was called.
func (l *Limiter) learn(n int64, err error) {
	if l.pace == nil {
		return
	}
	rd := &l.round
	if err == nil {
		rd.bytes += n
	}
	rd.done++
	took := rd.last.Sub(rd.start)
	next := l.n
	var e *Error
	switch {
	case err != nil && errors.As(err, &e) && e.SlowDown:
		next = l.pace.throttled()
	case rd.done < l.n || took < minRound:
		return
	case float64(rd.area) >= saturated*float64(l.n)*float64(took):
		next = l.pace.round(float64(rd.bytes) / took.Seconds())
		*rd = round{}
	default:
		*rd = round{}
	}
	if next != l.n {
		l.n = next
		*rd = round{}
	}
}

// demandShare is the part of the places that Prefetch cannot take: 1 in 8. It costs prefetching an
// eighth of its concurrency at most, and gives a reader who arrives at a full house a place at once.
const demandShare = 8

// reserved returns the places kept for Demand.
func (l *Limiter) reserved() int {
	if l.n < 2 {
		return 0 // Prefetch must be able to run at all
	}
	return max(1, l.n/demandShare)
}

// SetLimit changes the number of places, which is fixed from then on. Requests under way are not
// disturbed.
func (l *Limiter) SetLimit(n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.pace = nil
	l.n = max(1, n)
	l.dispatch()
}

// Places returns how many requests may run at once now.
func (l *Limiter) Places() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.n
}

// LimitStats are the limiter's gauges. All but Limit are zero when nothing runs.
type LimitStats struct {
	Limit           int `json:"limit"`
	InFlight        int `json:"in_flight"`
	WaitingDemand   int `json:"waiting_demand"`
	WaitingPrefetch int `json:"waiting_prefetch"`
}

// Stats returns the gauges.
func (l *Limiter) Stats() LimitStats {
	l.mu.Lock()
	defer l.mu.Unlock()
	return LimitStats{l.n, l.inUse, l.queue[Demand].Len(), l.queue[Prefetch].Len()}
}

// fits says whether a request of class p may start now.
func (l *Limiter) fits(p Priority) bool {
	return l.inUse < l.n && (p != Prefetch || l.prefetch < l.n-l.reserved())
}

func (l *Limiter) enter(p Priority) bool {
	if !l.fits(p) {
		return false
	}
	l.count()
	l.inUse++
	if p == Prefetch {
		l.prefetch++
	}
	return true
}

// leave gives back a place. l.mu is held.
func (l *Limiter) leave(p Priority) {
	l.count()
	l.inUse--
	if p == Prefetch {
		l.prefetch--
	}
}

// ReadAt implements [Reader].
func (l *Limiter) ReadAt(ctx context.Context, o Object, p []byte, off int64) error {
	class, _, err := l.wait(ctx)
	if err != nil {
		return err
	}
	err = l.below.ReadAt(ctx, o, p, off)
	l.finish(class, int64(len(p)), err)
	return err
}

// finish gives back the place of a read of n bytes.
func (l *Limiter) finish(p Priority, n int64, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.count()
	l.learn(n, err)
	l.leave(p)
	l.dispatch()
}

// ReadSpans implements [SpanReader].
func (l *Limiter) ReadSpans(ctx context.Context, o Object, spans []Span) error {
	class, _, err := l.wait(ctx)
	if err != nil {
		return err
	}
	err = l.below.ReadSpans(ctx, o, spans)
	l.finish(class, SpansLength(spans), err)
	return err
}

// request does a request when it has a place.
func (l *Limiter) request(ctx context.Context, _ request, f func(ctx context.Context) error) error {
	class, _, err := l.wait(ctx)
	if err != nil {
		return err
	}
	defer func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.leave(class)
		l.dispatch()
	}()
	return f(ctx)
}

// Urgency is a priority that can rise while its request waits: a prefetch becomes Demand when a
// reader arrives for the same bytes. The zero value is ready to use; it serves one request and any
// number of raisers.
type Urgency struct {
	due time.Time

	mu      sync.Mutex
	raised  bool
	onRaise func()
}

// NewUrgency returns the urgency of a request whose bytes a reader will want at due; the zero time
// means that this is not known.
func NewUrgency(due time.Time) *Urgency { return &Urgency{due: due} }

// Due returns when a reader will want the bytes, and false where that is not known.
func (u *Urgency) Due() (t time.Time, ok bool) { return u.due, !u.due.IsZero() }

// Raise makes the request Demand, at once where it waits now and from the start where it arrives
// later. A request that has its place already is not changed.
func (u *Urgency) Raise() {
	u.mu.Lock()
	f := u.onRaise
	u.raised, u.onRaise = true, nil
	u.mu.Unlock()
	if f != nil {
		f()
	}
}

// Raised says whether Raise has been called.
func (u *Urgency) Raised() bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.raised
}

// watch calls f at the first Raise, which may have been. The returned function ends the watch; f
// may still be running then.
func (u *Urgency) watch(f func()) (stop func()) {
	u.mu.Lock()
	raised := u.raised
	if !raised {
		u.onRaise = f
	}
	u.mu.Unlock()
	if raised {
		f()
	}
	return func() {
		u.mu.Lock()
		defer u.mu.Unlock()
		u.onRaise = nil
	}
}

type urgencyKey struct{}

// WithUrgency returns a context whose requests are Prefetch until u is raised.
func WithUrgency(ctx context.Context, u *Urgency) context.Context {
	return context.WithValue(ctx, urgencyKey{}, u)
}

func urgencyOf(ctx context.Context) *Urgency {
	u, _ := ctx.Value(urgencyKey{}).(*Urgency)
	return u
}
