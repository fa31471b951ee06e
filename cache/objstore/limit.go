package objstore

import (
	"context"
	"errors"
	"sync"
	"time"
)

// Limiter lets at most n requests into a store at once and serves waiters by priority: Demand before Prefetch, first
// come first served within each. One place in eight (at least one, if there are two) is reserved for Demand, so that
// a reader never queues behind prefetches.
//
// A request's priority is its context's when it arrives; [Urgency] can raise it while it waits.
//
// Listings that are sequences (List, ListLevel) are not limited: the caller's loop runs between the
// requests, and a place held meanwhile would block, or deadlock, a loop that reads.
type Limiter struct {
	each
	turns

	pace     *pace // nil: the number of places is fixed
	ease     ease
	round    round
	n        int // places
	inUse    int // places taken
	prefetch int // of them, by Prefetch
}

// Limit decorates r with n places.
func Limit(r Layer, n int) *Limiter {
	l := &Limiter{n: max(1, n), ease: ease{n: leastEase}}
	l.each = each{r, l.request}
	l.take, l.back = l.enter, l.leave
	return l
}

// LimitAdaptive decorates r with the number of places, up to most, that gives the highest throughput: more only while
// that helps, fewer when the store says SlowDown. See [pace].
func LimitAdaptive(r Layer, most int) *Limiter {
	p := newPace(most)
	l := Limit(r, p.places)
	l.pace = p
	return l
}

// round is the input of pace: as many requests as there are places, one after another on each.
type round struct {
	start time.Time
	last  time.Time     // end of the time counted in area
	area  time.Duration // places in use, times time
	bytes int64
	done  int
}

const (
	// minRound keeps the scheduler's granularity (10 ms on a busy machine) small against a round.
	minRound = 50 * time.Millisecond
	// saturated is the share of the places that must have been in use for a round to count. Prefetching can use seven
	// in eight. If it uses far fewer, it waits for memory or the reader, and goodput says nothing about the store.
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

// learn feeds the outcome of a read of n bytes to the pace. l.mu is held, and count was called.
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
	switch e, ok := errors.AsType[*Error](err); {
	case ok && e.SlowDown:
		if next = l.pace.throttled(); next == l.n {
			return
		}
	case rd.done < l.n || took < minRound:
		return
	case float64(rd.area) >= saturated*float64(l.n)*float64(took):
		next = l.pace.round(float64(rd.bytes) / took.Seconds())
	}
	l.n, *rd = next, round{}
}

// demandShare is the share of the places that Prefetch cannot take: 1 in 8. It costs prefetching at most an eighth of
// its concurrency, and gives a reader a place at once when all others are taken.
const demandShare = 8

// Places returns how many requests may run at once now.
func (l *Limiter) Places() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.n
}

// Ease returns how many requests may run at once while there are some whose bytes nobody needs soon, so that they do
// not slow down those of others who read from the same store. See [ease].
func (l *Limiter) Ease() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.ease.n
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

// enter takes a place if a request of class p may start now. l.mu is held.
func (l *Limiter) enter(p Priority) bool {
	reserved := min(l.n-1, max(1, l.n/demandShare)) // Prefetch must be able to run at all
	if l.inUse >= l.n || p == Prefetch && l.prefetch >= l.n-reserved {
		return false
	}
	l.count()
	l.inUse++
	if p == Prefetch {
		l.prefetch++
	}
	return true
}

// leave returns a place. l.mu is held.
func (l *Limiter) leave(p Priority) {
	l.count()
	l.inUse--
	if p == Prefetch {
		l.prefetch--
	}
}

func (l *Limiter) request(ctx context.Context, r request, f func(ctx context.Context) error) (err error) {
	class, _, err := l.wait(ctx)
	if err != nil {
		return err
	}
	start := time.Now()
	defer func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.count()
		if r.class == opRead {
			l.learn(r.bytes, err)
			if err == nil {
				l.ease.read(r.bytes, time.Since(start), l.inUse, l.n)
			}
		}
		l.leave(class)
		l.dispatch()
	}()
	return f(ctx)
}

// Urgency is a priority that can rise while its request waits: a prefetch becomes Demand when a reader needs the same
// bytes. The zero value is ready to use. It serves one request and any number of raisers.
type Urgency struct {
	due time.Time

	mu      sync.Mutex
	raised  bool
	onRaise func()
}

// NewUrgency returns the urgency of a request whose bytes a reader will need at due; zero if unknown.
func NewUrgency(due time.Time) *Urgency { return &Urgency{due: due} }

// Due returns when a reader will need the bytes, and false if that is unknown.
func (u *Urgency) Due() (t time.Time, ok bool) { return u.due, !u.due.IsZero() }

// Raise makes the request Demand: immediately if it waits, from the start if it arrives later. It does not affect a
// request that has its place already.
func (u *Urgency) Raise() {
	u.mu.Lock()
	f := u.onRaise
	u.raised, u.onRaise = true, nil
	u.mu.Unlock()
	if f != nil {
		f()
	}
}

// Raised reports whether Raise was called.
func (u *Urgency) Raised() bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.raised
}

// watch calls f at the first Raise, which may be in the past. The returned function ends the watch; f may still be
// running then.
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

// DueOf returns when the context's request has to be done: at once unless it is a prefetch; false if that is unknown.
func DueOf(ctx context.Context) (t time.Time, ok bool) {
	if u := urgencyOf(ctx); u != nil && !u.Raised() {
		return u.Due()
	}
	return time.Now(), true
}

func urgencyOf(ctx context.Context) *Urgency {
	u, _ := ctx.Value(urgencyKey{}).(*Urgency)
	return u
}
