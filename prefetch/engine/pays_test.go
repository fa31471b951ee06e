package engine

import (
	"testing"
	"time"

	"github.com/shoalfs/shoal/prefetch/infer"
)

// A search of all seeds is worth waiting for only if it can end within the epoch.
func TestSearchesThatPay(t *testing.T) {
	for _, c := range []struct {
		depth    infer.Depth
		reads, n int
		after    time.Duration
		cpus     int
		pays     bool
	}{
		{infer.Small, 1000, 1024, time.Second, 2, true},          // some seconds
		{infer.Small, 1024, 1024, time.Second, 2, false},         // an epoch was not enough
		{infer.Whole, 500, 1_281_167, time.Second, 2, true},      // 43 minutes are left
		{infer.Whole, 500, 8192, time.Second, 2, false},          // 16 s are left
		{infer.Whole, 500, 8192, time.Second, 16, true},          // of which 9 are enough
		{infer.Whole, 8192 + 8000, 8192, time.Hour, 16, true},    // 40 s are left of the second epoch
		{infer.Whole, 8192 + 8190, 8192, time.Hour, 16, false},   // nothing is left of it
		{infer.Whole, 1_281_000, 1_281_167, time.Hour, 2, false}, // nor here
	} {
		since := time.Unix(1000, 0)
		s := inferred{depth: c.depth, reads: c.reads, since: since}
		if got := s.pays(c.n, since.Add(c.after), c.cpus); got != c.pays {
			t.Errorf("%+v: %v", c, got)
		}
	}
}
