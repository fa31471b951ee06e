package pause

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

func TestFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		if err := For(t.Context(), time.Minute); err != nil || time.Since(start) != time.Minute {
			t.Errorf("%v after %v", err, time.Since(start))
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := For(ctx, time.Minute); !errors.Is(err, context.DeadlineExceeded) || time.Since(start) != time.Minute+
			time.Second {
			t.Errorf("%v after %v", err, time.Since(start))
		}
	})
}

func TestEvery(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start, times := time.Now(), 0
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second+time.Millisecond)
		defer cancel()
		for now := range Every(ctx, time.Second) {
			if times++; now.Sub(start) != time.Duration(times)*time.Second {
				t.Errorf("%d at %v", times, now.Sub(start))
			}
		}
		if times != 5 || ctx.Err() == nil {
			t.Errorf("%d times", times)
		}
		for range Every(t.Context(), time.Second) {
			break
		}
	})
}

func TestTotal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var total Total
		is := func(want time.Duration) {
			t.Helper()
			time.Sleep(time.Second)
			if sum := total.Sum(); sum != want {
				t.Errorf("%v, want %v", sum, want)
			}
		}
		is(0)
		total.Add(2)
		is(2 * time.Second)
		total.Add(-1)
		is(3 * time.Second)
		total.Set(true) // one runs
		is(4 * time.Second)
		total.Set(false)
		is(4 * time.Second)
		total.Set(true)
		is(5 * time.Second)
	})
}
