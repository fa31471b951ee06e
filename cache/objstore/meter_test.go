package objstore_test

import (
	"context"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/lab/rig/memstore"
)

func TestMeter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := memstore.New()
		o := m.PutBytes("a/k", make([]byte, 100))
		m.PutBytes("b", nil)
		meter := objstore.NewMeter(
			Fault(t, m, "read a/k 1 slow 30ms\nread a/k 2 503\nread a/k 3 changed\nread a/k 4 stall\nread a/k all "+
				"slow 30ms"))
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		var wg sync.WaitGroup
		for range 3 {
			meter.ReadAt(ctx, o, make([]byte, 60), 0)
		}
		wg.Go(func() { meter.ReadAt(ctx, o, make([]byte, 60), 0) })
		synctest.Wait()
		time.Sleep(300 * time.Millisecond) // by the fake clock
		if s := meter.Stats(); s.InFlight != 1 || s.Silent != 300*time.Millisecond {
			t.Errorf("%d in flight, silent for %v during a stall", s.InFlight, s.Silent)
		}
		wg.Wait()
		meter.ReadAt(t.Context(), o, make([]byte, 100), 0)
		meter.Stat(t.Context(), "a/k")
		meter.Stat(t.Context(), "none")
		memstore.Collect(t, meter.List(t.Context(), "", ""))
		memstore.Collect(t, meter.ListLevel(t.Context(), ""))
		for range meter.List(t.Context(), "", "") {
			break
		}
		s := meter.Stats()
		want := objstore.MeterStats{
			Reads: 5, Stats: 2, Lists: 3, Bytes: 160, Canceled: 1,
			Errors: map[string]int64{"temporary failure": 1, "changed": 1},
		}
		for k, n := range want.Errors {
			if s.Errors[k] != n {
				t.Errorf("%d errors %q, want %d", s.Errors[k], k, n)
			}
		}
		if s.Reads != want.Reads || s.Stats != want.Stats || s.Lists != want.Lists ||
			s.Bytes != want.Bytes || s.Canceled != want.Canceled || s.InFlight != 0 || len(s.Errors) != 2 {
			t.Errorf("stats %+v\nwant  %+v", s, want)
		}
		outcomes := map[string]objstore.Outcomes{"get": {OK: 2, Failed: 2, Canceled: 1}, "head": {OK: 2},
			"list": {OK: 3}, "put": {}, "other": {}}
		if !maps.Equal(s.Outcomes, outcomes) || s.SlowDowns != 1 {
			t.Errorf("outcomes %+v, want %+v; %d slow downs", s.Outcomes, outcomes, s.SlowDowns)
		}
		for _, d := range []time.Duration{s.Median, s.P99} {
			if d < 27*time.Millisecond || d > 33*time.Millisecond {
				t.Errorf("median %v, p99 %v of reads that take 30 ms", s.Median, s.P99)
			}
		}
	})
}

// TestHistogram: quantiles are within 10% of the exact ones over nine powers of ten.
func TestHistogram(t *testing.T) {
	var h objstore.Histogram
	if q := h.Quantile(0.5); q != 0 {
		t.Errorf("median of nothing: %v", q)
	}
	rng := rand.New(rand.NewPCG(1, 2))
	var all []time.Duration
	for range 20_000 {
		d := time.Duration(math.Exp(rng.Float64()*math.Log(1e8)) * 10e3) // 10 µs to 1,000 s
		all = append(all, d)
		h.Record(d)
	}
	slices.Sort(all)
	for _, q := range []float64{0, 0.01, 0.1, 0.5, 0.9, 0.99, 1} {
		got, want := h.Quantile(q), all[min(len(all)-1, int(q*float64(len(all))))]
		if r := float64(got) / float64(want); r < 0.9 || r > 1.1 {
			t.Errorf("quantile %v: %v, exact %v", q, got, want)
		}
	}
	c := h.Counts()
	var sum time.Duration
	for _, d := range all {
		sum += d.Truncate(time.Microsecond)
	}
	if c.Count != int64(len(all)) || c.Sum != sum {
		t.Errorf("%d durations of %v together, want %d of %v", c.Count, c.Sum, len(all), sum)
	}
	for i, n := range c.Below { // exactly
		want, _ := slices.BinarySearch(all, objstore.HistogramBound(i))
		if n != int64(want) {
			t.Errorf("%d durations are less than %v, want %d", n, objstore.HistogramBound(i), want)
		}
	}
	h.Record(-time.Second) // a clock that went back must not panic
	h.Record(1 << 62)
}
