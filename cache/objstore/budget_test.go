package objstore

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// TestNoHourIsOver: whatever is asked for and when, no window of an hour has more than the budget, and what
// is asked for without end gets nearly all of it.
func TestNoHourIsOver(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		perHour := rapid.Int64Range(LeastBudget, 5000).Draw(rt, "perHour")
		now := time.Unix(1e9, 0)
		b := newBucket(perHour, now)
		var taken []time.Time
		greedy := rapid.Bool().Draw(rt, "greedy")
		for end := now.Add(2 * time.Hour); now.Before(end); {
			if greedy {
				now = now.Add(max(b.until(Demand), time.Millisecond))
			} else {
				now = now.Add(time.Duration(rapid.Int64Range(0, int64(5*time.Minute)).Draw(rt, "pause")))
			}
			p := Priority(rapid.IntRange(0, 1).Draw(rt, "class"))
			if greedy {
				p = Demand
			}
			before := b.tokens
			for n := 0; b.take(p, now); n++ {
				taken = append(taken, now)
			}
			if p == Prefetch && b.size >= 2 && before > b.tokens && b.tokens < demandTokens*(b.size-1)-1e-6 {
				rt.Fatalf("prefetching left %.2f of %.0f tokens", b.tokens, b.size)
			}
		}
		first := 0
		for i, at := range taken {
			for at.Sub(taken[first]) >= time.Hour {
				first++
			}
			if n := int64(i - first + 1); n > perHour {
				rt.Fatalf("%d requests in the hour before %v, of %d", n, at, perHour)
			}
		}
		if greedy && float64(len(taken)) < 0.95*2*float64(perHour-perHour/60) {
			rt.Fatalf("%d requests in two hours, of %d an hour", len(taken), perHour)
		}
	})
}

// budgetAt returns a budget whose clock stands still until it is set on.
func budgetAt(perHour int64, log *slog.Logger) (b *Budget, advance func(time.Duration)) {
	b = NewBudget(perHour, log)
	var mu sync.Mutex
	now := time.Unix(1e9, 0)
	b.now = func() time.Time { mu.Lock(); defer mu.Unlock(); return now }
	b.bucket = newBucket(perHour, now)
	return b, func(d time.Duration) {
		mu.Lock()
		now = now.Add(d)
		mu.Unlock()
		b.mu.Lock()
		b.dispatch()
		b.mu.Unlock()
	}
}

// eventually polls.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("never: %s", what)
		}
	}
}

// TestBudgetServesReadersFirst: prefetches leave a quarter; a reader who comes later goes before them, a
// prefetch that is raised is a reader's; one that gives up leaves its token.
func TestBudgetServesReadersFirst(t *testing.T) {
	var log bytes.Buffer
	b, advance := budgetAt(3600, slog.New(slog.NewTextHandler(&log, nil))) // 60 tokens, 59 a minute
	prefetch := WithUrgency(t.Context(), new(Urgency))
	for range 45 {
		if err := b.Take(prefetch); err != nil {
			t.Fatal(err)
		}
	}
	var u Urgency
	order := make(chan string, 4)
	take := func(name string, ctx context.Context) {
		go func() {
			if err := b.Take(ctx); err != nil {
				name = err.Error()
			}
			order <- name
		}()
	}
	waiting := func(demand, prefetch int) func() bool {
		return func() bool { s := b.Stats(); return s.WaitingDemand == demand && s.WaitingPrefetch == prefetch }
	}
	take("prefetch", prefetch)
	eventually(t, "the prefetch waits", waiting(0, 1))
	take("raised", WithUrgency(t.Context(), &u))
	eventually(t, "the second waits", waiting(0, 2))
	if b.TryTake() {
		t.Error("a hedge went past those that wait")
	}
	for range 15 { // readers have the quarter
		if err := b.Take(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	take("reader", t.Context())
	eventually(t, "the reader waits", waiting(1, 2))
	u.Raise()
	eventually(t, "the raised one is a reader's", waiting(2, 1))
	ctx, cancel := context.WithCancel(t.Context())
	take("context canceled", ctx)
	eventually(t, "the third waits", waiting(3, 1))
	cancel()
	for i, want := range []string{"context canceled", "reader", "raised", "prefetch"} {
		switch i {
		case 0:
		case 3:
			advance(time.Minute)
		default:
			advance(1100 * time.Millisecond)
		}
		if got := <-order; got != want {
			t.Errorf("%s was served, want %s", got, want)
		}
	}
	s := b.Stats()
	if s.Waits != 2 || s.WaitSeconds <= 0 || s.WaitingDemand+s.WaitingPrefetch != 0 {
		t.Errorf("%+v", s)
	}
	if text := log.String(); strings.Count(text, "\n") != 1 || !strings.Contains(text, "gets_per_hour=3600") ||
		!strings.Contains(text, "gets-per-hour in --store") {
		t.Errorf("the log says %q", text)
	}
}

// TestBudgetBoundsWhatIsSent: with retries, waits longer than a try may take, and hedges' tokens, the store
// sees no more than the budget, and no read fails for it.
func TestBudgetBoundsWhatIsSent(t *testing.T) {
	o := Object{Key: "k", Size: 100, ETag: "e"}
	var sent atomic.Int64
	flaky := countingReader{sent: &sent}
	b, advance := budgetAt(600, nil) // 10 tokens
	r := Retry(flaky, RetryPolicy{Budget: b, Tries: 10_000, TryTimeout: time.Millisecond,
		Sleep: func(context.Context, time.Duration) error { return nil }})
	var wg sync.WaitGroup
	var failed atomic.Int64
	for range 20 {
		wg.Go(func() {
			if err := r.ReadAt(t.Context(), o, make([]byte, 10), 0); err != nil {
				failed.Add(1)
			}
		})
	}
	eventually(t, "the bucket is empty", func() bool {
		s := b.Stats()
		return sent.Load() == 10 && s.WaitingDemand > 0
	})
	done := make(chan struct{})
	go func() { wg.Wait(); close(done) }()
	minutes := 0
	for stop := false; !stop; minutes++ {
		advance(10 * time.Second)
		if n := float64(sent.Load()); n > 10+b.bucket.rate*float64(10*(minutes+1)) {
			t.Fatalf("%v sent after %d steps of 10 s", n, minutes+1)
		}
		select {
		case <-done:
			stop = true
		case <-time.After(time.Millisecond):
		}
	}
	if failed.Load() > 0 {
		t.Errorf("%d reads failed", failed.Load())
	}
	if n := sent.Load(); n < 40 { // half of them fail
		t.Errorf("%d sent", n)
	}
}

// countingReader fails every second read, and can do no more than reading.
type countingReader struct {
	Layer
	sent *atomic.Int64
}

func (c countingReader) ReadSpans(_ context.Context, o Object, _ []Span) error {
	if c.sent.Add(1)%2 == 1 {
		return &Error{Op: "read", Key: o.Key, Kind: KindTransient, Err: errors.New("stumbled")}
	}
	return nil
}
