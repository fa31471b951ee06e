package objstore

import (
	"math/rand/v2"
	"testing"
	"time"
)

// easeOn runs reads over a line that answers after a latency while few are in flight, and slower in proportion to all
// that are beyond a knee: these and others'. Sizes differ by a factor of 3. It returns how many may be in flight in the
// end.
func easeOn(e *ease, reads, knee int, others func(i int) int, use float64) int {
	rng := rand.New(rand.NewPCG(1, 2))
	for i := range reads {
		inUse := max(1, int(float64(e.n)*use))
		size := 60_000 * (1 + 2*rng.Float64())
		took := 0.030 * (0.8 + 0.4*rng.Float64()) * max(1, float64(inUse+others(i))/float64(knee)) *
			(0.5 + size/120_000)
		e.read(int64(size), time.Duration(took*1e9), inUse, 512)
	}
	return e.n
}

// What is not needed soon uses a line that nobody else uses, up to a queue of some times its latency, and leaves it to
// others when they come. It grows only by use.
func TestEase(t *testing.T) {
	none := func(int) int { return 0 }
	e := ease{n: leastEase}
	if n := easeOn(&e, 500, 100, none, 1); n < 100 || n > 512 {
		t.Errorf("%d in flight over a line for 100", n)
	}
	if n := easeOn(&e, 3000, 100, func(int) int { return 1000 }, 1); n != leastEase {
		t.Errorf("%d in flight beside 1000 others", n)
	}
	if n := easeOn(&e, 500, 100, none, 1); n < 100 {
		t.Errorf("%d in flight after the others have gone", n)
	}
	e = ease{n: leastEase}
	if n := easeOn(&e, 5000, 100, none, 0.25); n > 4*leastEase {
		t.Errorf("%d in flight, of which a quarter is used", n)
	}
	e = ease{n: leastEase}
	if n := easeOn(&e, 5000, 4, none, 1); n > 8*leastEase { // whose latency was never seen without a queue
		t.Errorf("%d in flight over a line for 4", n)
	}
}
