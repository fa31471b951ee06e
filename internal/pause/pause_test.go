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
