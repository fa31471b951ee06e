package objstore

import (
	"cmp"
	"context"
	"log/slog"
	"time"
)

// Budget limits the GETs and HEADs of a store per hour. It is a token bucket for a minute's worth that fills at the
// remaining rate, so no window of an hour exceeds the limit, wherever it begins. Demand takes tokens before Prefetch,
// first come first served within each, and a quarter of the bucket is reserved for Demand: prefetching slows down
// before readers do. Readers that find it empty wait.
//
// It is part of [RetryPolicy] and not a decorator, because waiting for a token must not count as time of a try. A nil
// Budget has no limit.
type Budget struct {
	turns
	log    *slog.Logger
	now    func() time.Time
	bucket bucket

	timer   *time.Timer
	quietAt time.Time
	waits   int64
	waited  time.Duration
}

// LeastBudget is the minimum of GETs per hour: below, a single reader would wait for minutes.
const LeastBudget = 60

// NewBudget returns a budget of perHour requests, at least [LeastBudget]; nil, without a limit, for 0. log gets a
// warning when readers wait; it may be nil.
func NewBudget(perHour int64, log *slog.Logger) *Budget {
	if perHour <= 0 {
		return nil
	}
	log = cmp.Or(log, slog.New(slog.DiscardHandler))
	b := &Budget{log: log, now: time.Now}
	b.take, b.back, b.joined = b.draw, b.putBack, b.warn
	b.bucket = newBucket(max(perHour, LeastBudget), b.now())
	return b
}

// Policy returns the default policy for requests to a store, with the budget if the store is S3: a folder's reads
// cost nothing.
func (b *Budget) Policy(base Reader) RetryPolicy {
	if _, ok := base.(charged); !ok {
		return RetryPolicy{}
	}
	return RetryPolicy{Budget: b}
}

// bucket is the arithmetic of a budget.
type bucket struct {
	perHour int64
	size    float64 // most tokens
	rate    float64 // tokens a second
	tokens  float64
	last    time.Time
}

// demandTokens is the share of the bucket reserved for Demand.
const demandTokens = 0.25

func newBucket(perHour int64, now time.Time) bucket {
	size := float64(perHour / 60)
	return bucket{perHour: perHour, size: size, rate: (float64(perHour) - size) / 3600, tokens: size, last: now}
}

// need returns how many tokens must be there for a request of class p: one, plus the reserve that p may not use.
func (b *bucket) need(p Priority) float64 {
	if p == Demand || b.size < 2 {
		return 1
	}
	return 1 + demandTokens*(b.size-1)
}

func (b *bucket) fill(now time.Time) {
	if d := now.Sub(b.last); d > 0 {
		b.tokens = min(b.size, b.tokens+b.rate*d.Seconds())
		b.last = now
	}
}

func (b *bucket) take(p Priority, now time.Time) bool {
	b.fill(now)
	if b.tokens < b.need(p) {
		return false
	}
	b.tokens--
	return true
}

// until returns the time until p may take a token, if no other request does.
func (b *bucket) until(p Priority) time.Duration {
	return time.Duration(max(0, b.need(p)-b.tokens) / b.rate * float64(time.Second))
}

// Take waits for a token. Its error is ctx's.
func (b *Budget) Take(ctx context.Context) error {
	if b == nil {
		return nil
	}
	start := b.now()
	class, waited, err := b.wait(ctx)
	if waited && err == nil && class == Demand {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.waits++
		b.waited += b.now().Sub(start)
	}
	return err
}

// TryTake takes a token as Prefetch if there is one and nobody waits: for optional requests.
func (b *Budget) TryTake() bool {
	if b == nil {
		return true
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.queue[Demand].Len() == 0 && b.queue[Prefetch].Len() == 0 && b.bucket.take(Prefetch, b.now())
}

// draw takes a token if p may, and otherwise schedules dispatch for when there is one. b.mu is held.
func (b *Budget) draw(p Priority) bool {
	if b.bucket.take(p, b.now()) {
		return true
	}
	if b.timer != nil {
		b.timer.Stop()
	}
	b.timer = time.AfterFunc(max(b.bucket.until(p), leastWake), func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.dispatch()
	})
	return false
}

// Return returns a token of TryTake whose request was not sent.
func (b *Budget) Return() {
	if b == nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.putBack(Prefetch)
	b.dispatch()
}

// putBack returns an unused token. b.mu is held.
func (b *Budget) putBack(Priority) { b.bucket.tokens = min(b.bucket.size, b.bucket.tokens+1) }

// leastWake avoids a timer if tokens come faster than it.
const leastWake = time.Millisecond

// quiet is the time between two warnings.
const quiet = time.Minute

// longWait is the wait of a reader from which a warning is logged.
const longWait = time.Second

// warn logs that readers wait, once a minute. b.mu is held.
func (b *Budget) warn(class Priority) {
	ahead := time.Duration(float64(b.queue[Demand].Len()) / b.bucket.rate * float64(time.Second))
	now := b.now()
	if class != Demand || ahead < longWait || now.Before(b.quietAt) {
		return
	}
	b.quietAt = now.Add(quiet)
	b.log.Warn("the budget of GETs is spent: readers wait", "gets_per_hour", b.bucket.perHour,
		"readers_waiting", b.queue[Demand].Len(),
		"wait_of_the_last", ahead.Round(time.Second), "remedy",
		"raise gets-per-hour in --store, keep more on disk (--cache-size), or pack small files (shoal pack)")
}

// BudgetStats are a budget's gauges and counts since the start.
type BudgetStats struct {
	PerHour         int64   `json:"gets_per_hour"`
	Left            int64   `json:"left"` // requests that may be sent at once now
	WaitingDemand   int     `json:"waiting_demand"`
	WaitingPrefetch int     `json:"waiting_prefetch"`
	Waits           int64   `json:"waits"`        // of readers
	WaitSeconds     float64 `json:"wait_seconds"` // summed over readers
}

// Stats returns the counts; nil for no budget.
func (b *Budget) Stats() *BudgetStats {
	if b == nil {
		return nil
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.bucket.fill(b.now())
	return &BudgetStats{PerHour: b.bucket.perHour, Left: int64(b.bucket.tokens), WaitingDemand: b.queue[Demand].Len(),
		WaitingPrefetch: b.queue[Prefetch].Len(), Waits: b.waits, WaitSeconds: b.waited.Seconds()}
}
