// Package pause waits, but not for longer than a context lasts, wakes who waits, and sums up the times of waits.
package pause

import (
	"context"
	"iter"
	"sync"
	"time"
)

// For waits for d, or fails with the context's error when that ends.
func For(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Every yields the time every d, until ctx ends.
func Every(ctx context.Context, d time.Duration) iter.Seq[time.Time] {
	return func(yield func(time.Time) bool) {
		t := time.NewTicker(d)
		defer t.Stop()
		for {
			select {
			case now := <-t.C:
				if !yield(now) {
					return
				}
			case <-ctx.Done():
				return
			}
		}
	}
}

// Poke wakes who waits for c, which has room for one.
func Poke(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// Total is a sum of times. Those that have not ended count too: a wait shows while it lasts.
type Total struct {
	mu      sync.Mutex
	ended   int64 // in nanoseconds, less the starts of those that have not
	running int64 // how many these are
}

var started = time.Now() // what times count from

// Add begins n times, or ends -n.
func (t *Total) Add(n int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.running += n
	t.ended -= n * int64(time.Since(started))
}

// Set begins or ends the one time that may run. Its calls do not overlap.
func (t *Total) Set(on bool) {
	if running := t.running > 0; on && !running {
		t.Add(1)
	} else if !on && running {
		t.Add(-1)
	}
}

// Sum is rounded to the microsecond.
func (t *Total) Sum() time.Duration {
	t.mu.Lock()
	defer t.mu.Unlock()
	return time.Duration(t.ended + t.running*int64(time.Since(started))).Round(time.Microsecond)
}
