package objstore

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/shoalfs/shoal/internal/pause"
	"github.com/shoalfs/shoal/internal/trace"
)

// RetryPolicy says how often and how long a failed request is retried. The zero value of a field is its default.
type RetryPolicy struct {
	// Tries is the number of tries, including the first. Default 8.
	Tries int
	// Base and Cap bound the sleeps: before try k+1 it is uniform in [0, min(Cap, Base·2^(k-1))), "full jitter" (M.
	// Brooker, AWS Architecture Blog, 2015). Defaults 50 ms and 5 s. A prefetch whose bytes are needed much later
	// sleeps longer, up to Cap, until a reader arrives.
	Base, Cap time.Duration
	// Total is the time from the start of the first try, tries and sleeps together, after which the request fails. For
	// a listing it restarts with each key. Default 2 min.
	Total time.Duration
	// TryTimeout ends one try of a request that hangs. Default 30 s. A request that reads or writes n bytes gets
	// n/minRate in addition to Total and TryTimeout, and so do a Copy of n bytes and the Complete of an upload of n
	// bytes, since some servers copy them, and its Resume. Tries of listings and of Uploads are not ended: the caller's
	// loop runs inside them, or they are many requests, and their store bounds each page.
	TryTimeout time.Duration

	// Budget delays tries of reads and Stats; their time starts after that. nil: no delay.
	Budget *Budget

	// Rand and Sleep are for tests. Rand returns a number in [0,1).
	Rand  func() float64
	Sleep func(ctx context.Context, d time.Duration) error
}

// FastFail is the policy for the first contact with a store: it reports a wrong endpoint in about a second, and
// forgives one dropped connection.
var FastFail = RetryPolicy{Tries: 3, Base: 200 * time.Millisecond, Cap: 400 * time.Millisecond, Total: 10 * time.Second,
	TryTimeout: 5 * time.Second}

func (p RetryPolicy) withDefaults() RetryPolicy {
	p.Tries = cmp.Or(p.Tries, 8)
	p.Base = cmp.Or(p.Base, 50*time.Millisecond)
	p.Cap = cmp.Or(p.Cap, 5*time.Second)
	p.Total = cmp.Or(p.Total, 2*time.Minute)
	p.TryTimeout = cmp.Or(p.TryTimeout, 30*time.Second)
	if p.Rand == nil {
		p.Rand = rand.Float64
	}
	if p.Sleep == nil {
		p.Sleep = pause.For
	}
	return p
}

// Do tries f, which sends one request, by this policy.
func (p RetryPolicy) Do(ctx context.Context, op, key string, f func(ctx context.Context) error) error {
	t := Retrier{p: p.withDefaults()}
	return t.tries(ctx, request{op: op, key: key}, f)
}

// Retrier retries requests that failed with KindTransient, and no others. AbortUploads ends uploads that a lost
// answer left behind.
type Retrier struct {
	each
	p RetryPolicy

	retries atomic.Int64
	gaveUp  atomic.Int64
}

// Retry decorates r with policy p.
func Retry(r Layer, p RetryPolicy) *Retrier {
	t := &Retrier{p: p.withDefaults()}
	t.each = each{r, t.request}
	return t
}

// RetryStats are counts since the start.
type RetryStats struct {
	Retries int64 `json:"retries"` // tries after the first
	GaveUp  int64 `json:"gave_up"` // requests that ran out of tries or time
}

// Stats returns the counts.
func (t *Retrier) Stats() RetryStats {
	return RetryStats{Retries: t.retries.Load(), GaveUp: t.gaveUp.Load()}
}

// attempts is the state of one request's tries.
type attempts struct {
	t     *Retrier
	n     int           // tries that failed
	free  int           // tries that were repeated at once
	bytes int64         // that it moves
	start time.Time     // of the first try
	held  time.Duration // by the budget, since start
}

// freeTries is how many retries without a pause one request gets: for new credentials, and for the version that is
// pinned, with one each to spare.
const freeTries = 4

// again records a failed try. It returns nil if the request may be tried again, after sleeping, and otherwise the
// error for the caller.
func (a *attempts) again(ctx context.Context, err error) error {
	e, ok := errors.AsType[*Error](err)
	if !ok || e.Kind != KindTransient {
		return err
	}
	if cerr := ctx.Err(); cerr != nil {
		return cerr
	}
	t := a.t
	if e.AtOnce && a.free < freeTries {
		a.free++
		t.retries.Add(1)
		return nil
	}
	a.n++
	tell(ctx, "failed try", err)
	pause := t.p.Cap
	if shift := a.n - 1; shift < 32 && t.p.Base < t.p.Cap>>shift {
		pause = t.p.Base << shift
	}
	pause = time.Duration(t.p.Rand() * float64(pause))
	now := time.Now()
	spent := now.Sub(a.start) - a.held
	left := limit(t.p.Total, a.bytes) - spent
	if a.n >= t.p.Tries || pause >= left {
		t.gaveUp.Add(1)
		if a.n == 1 {
			return err
		}
		cause := fmt.Errorf("gave up after %d tries in %v", a.n, spent.Round(time.Millisecond))
		if e.Err != nil {
			cause = fmt.Errorf("%w: %w", cause, e.Err)
		}
		wrapped := *e
		wrapped.Err = cause
		return &wrapped
	}
	if cerr := t.pause(ctx, now, pause, left); cerr != nil {
		return cerr
	}
	t.retries.Add(1)
	return nil
}

// patientShare is the share of the time until its bytes are needed that a prefetch may sleep before its next try: at
// a quarter, five tries fit in before three quarters of the time are gone.
const patientShare = 4

// pause sleeps for d before a try. For a prefetch whose bytes are needed much later it sleeps longer, but at most for
// most, so that a store in trouble serves waiting readers first. An arriving reader ends the sleep.
func (t *Retrier) pause(ctx context.Context, now time.Time, d, most time.Duration) error {
	u := urgencyOf(ctx)
	if u == nil || u.Raised() {
		return t.p.Sleep(ctx, d)
	}
	if due, ok := u.Due(); ok {
		d = max(d, min(time.Duration(t.p.Rand()*float64(due.Sub(now)/patientShare)), t.p.Cap, most))
	}
	sctx, wake := context.WithCancel(ctx)
	defer wake()
	defer u.watch(wake)()
	if err := t.p.Sleep(sctx, d); err != nil {
		return ctx.Err() // nil if it was a reader
	}
	return nil
}

// errTryTimeout is the cause of a try's context that ran out. It lets decorators below tell that from a caller that
// gave up.
var errTryTimeout = errors.New("no answer in time")

const minRate = 1 << 20 // bytes/s

// limit extends a time d for a request that moves n bytes.
func limit(d time.Duration, n int64) time.Duration {
	return d + time.Duration(float64(n)/minRate*float64(time.Second))
}

// try runs f under the timeout of one try, or the rest of the request's time.
func (a *attempts) try(ctx context.Context, op, key string, f func(ctx context.Context) error) error {
	t := a.t
	most := min(limit(t.p.TryTimeout, a.bytes), limit(t.p.Total, a.bytes)-time.Since(a.start)+a.held)
	tctx, cancel := context.WithTimeoutCause(ctx, most, errTryTimeout)
	defer cancel()
	err := f(tctx)
	if err != nil && ctx.Err() == nil && tctx.Err() != nil && KindOf(err) == KindOther {
		return &Error{Op: op, Key: key, Kind: KindTransient,
			Err: fmt.Errorf("no answer within %v", most.Round(time.Millisecond))}
	}
	return err
}

// request tries f, which sends a request, until it succeeds or the policy gives up.
func (t *Retrier) request(ctx context.Context, r request, f func(ctx context.Context) error) (err error) {
	if trace.On() {
		tctx, told := tracedRequest(ctx, r.op, r.key, r.bytes)
		ctx = tctx
		defer func() { told.end(err) }()
	}
	return t.tries(ctx, r, f)
}

func (t *Retrier) tries(ctx context.Context, r request, f func(ctx context.Context) error) (err error) {
	a := attempts{t: t, bytes: r.bytes}
	for {
		if err := a.admit(ctx, r.op); err != nil {
			return err
		}
		if err = a.try(ctx, r.op, r.key, f); err == nil {
			return nil
		}
		if err = a.again(ctx, err); err != nil {
			return err
		}
	}
}

// admit waits for the budget. The request's time starts after that, and stops meanwhile.
func (a *attempts) admit(ctx context.Context, op string) (err error) {
	if b := a.t.p.Budget; b != nil && (op == "read" || op == "stat") {
		asked := time.Now()
		err = b.Take(ctx)
		a.held += time.Since(asked)
	}
	if a.start.IsZero() {
		a.begin()
	}
	return err
}

// begin restarts the request's time.
func (a *attempts) begin() { a.n, a.free, a.held, a.start = 0, 0, 0, time.Now() }

// PutNew implements [Uploader]. A try whose answer was lost may have stored the object, and the next one then finds
// it; so after a temporary failure an object with the same bytes is a success.
func (t *Retrier) PutNew(ctx context.Context, key string, data []byte) (o Object, err error) {
	tries := 0
	err = t.request(ctx, request{"put", opPut, key, int64(len(data))}, func(ctx context.Context) (err error) {
		tries++
		o, err = t.below.PutNew(ctx, key, data)
		return err
	})
	if tries > 1 && KindOf(err) == KindExists {
		if have, ok := t.holds(ctx, key, data); ok {
			return have, nil
		}
	}
	return o, err
}

// holds reports whether the object key has exactly these bytes.
func (t *Retrier) holds(ctx context.Context, key string, data []byte) (Object, bool) {
	o, err := t.Stat(ctx, key)
	if err != nil || o.Size != int64(len(data)) {
		return Object{}, false
	}
	p := make([]byte, len(data))
	return o, t.ReadAt(ctx, o, p, 0) == nil && bytes.Equal(p, data)
}

// List implements [Reader]. A listing that fails in between continues after the last key that was yielded; progress
// resets its tries.
func (t *Retrier) List(ctx context.Context, prefix, after string) iter.Seq2[Object, error] {
	return t.resume(ctx, after, func(last string) iter.Seq2[Object, error] { return t.below.List(ctx, prefix, last) })
}

// ListLevel implements [Layer]. A level that fails in between is listed again from its start, without the entries
// already yielded.
func (t *Retrier) ListLevel(ctx context.Context, prefix string) iter.Seq2[Object, error] {
	return t.resume(ctx, "", func(string) iter.Seq2[Object, error] { return t.below.ListLevel(ctx, prefix) })
}

// cursor is how far a sequence has come.
type cursor struct {
	last  string // key that was yielded
	again bool   // it was listed anew, and has not come beyond that key
}

// resume yields what list yields, and after a temporary failure lists again, without the entries that were yielded.
// Continuing after the last key would lose objects if the store does not list in key order (as some gateways over a
// file system), so then it does not continue.
func (t *Retrier) resume(ctx context.Context, after string,
	list func(last string) iter.Seq2[Object, error]) iter.Seq2[Object, error] {
	return func(yield func(Object, error) bool) {
		objects, prefixes := cursor{last: after}, cursor{}
		a := attempts{t: t}
		a.begin()
		ordered := true
		for {
			var failed error
			for o, err := range list(objects.last) {
				if err != nil {
					failed = err
					break
				}
				c := &objects
				if o.IsPrefix() {
					c = &prefixes
				}
				if c.last != "" && o.Key <= c.last {
					if c.again {
						continue
					}
					ordered = false
				}
				if !yield(o, nil) {
					return
				}
				c.last, c.again = o.Key, false
				a.begin()
			}
			if failed == nil {
				return
			}
			if ordered {
				failed = a.again(ctx, failed)
			}
			if failed != nil {
				yield(Object{}, failed)
				return
			}
			objects.again, prefixes.again = true, true
		}
	}
}
