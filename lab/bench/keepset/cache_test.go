package keepset

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/shoalfs/shoal/lab/accelerator"
	"github.com/shoalfs/shoal/prefetch/order"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func unit(int) int64 { return 1 }

// The policies against the plainest versions of themselves.
func TestPolicies(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		capacity := rapid.IntRange(1, 6).Draw(t, "capacity")
		trace := rapid.SliceOfN(rapid.IntRange(0, 9), 1, 80).Draw(t, "trace")
		next := func(i int) int {
			for j := i + 1; j < len(trace); j++ {
				if trace[j] == trace[i] {
					return j
				}
			}
			return 1000 + trace[i]
		}
		l, b := newLRU(int64(capacity), unit), newBelady(int64(capacity), unit)
		var recent []int         // the most recent last
		optimal := map[int]int{} // sample -> next use
		for i, s := range trace {
			evicted := []int{}
			had := slices.Contains(recent, s)
			if got := l.use(s, 0, func(old int) { evicted = append(evicted, old) }); got != had {
				t.Fatalf("lru: access %d: held %v, want %v", i, got, had)
			}
			recent = append(slices.DeleteFunc(recent, func(r int) bool { return r == s }), s)
			if len(recent) > capacity {
				if !slices.Equal(evicted, recent[:1]) {
					t.Fatalf("lru: access %d: evicted %v, want %v", i, evicted, recent[:1])
				}
				recent = recent[1:]
			} else if len(evicted) > 0 {
				t.Fatalf("lru: access %d: evicted %v", i, evicted)
			}

			_, had = optimal[s]
			if got := b.use(s, next(i), func(int) {}); got != had {
				t.Fatalf("belady: access %d: held %v, want %v", i, got, had)
			}
			optimal[s] = next(i)
			if len(optimal) > capacity {
				last := s
				for k, at := range optimal {
					if at > optimal[last] {
						last = k
					}
				}
				delete(optimal, last)
			}
			for k := range 10 {
				if _, want := optimal[k]; b.holds(k) != want || l.holds(k) != slices.Contains(recent, k) {
					t.Fatalf("access %d: sample %d: belady %v, want %v", i, k, b.holds(k), want)
				}
			}
		}
	})
}

// line is a store whose transfers take turns on a line of so many bytes a second.
type line struct {
	every time.Duration // a sample
	turn  chan struct{}
	fail  error
}

func newLine(every time.Duration) *line { return &line{every: every, turn: make(chan struct{}, 1)} }

func (l *line) get(ctx context.Context, sample int) ([]byte, error) {
	select {
	case l.turn <- struct{}{}:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	defer func() { <-l.turn }()
	if l.fail != nil && sample == 7 {
		return nil, l.fail
	}
	time.Sleep(l.every)
	return []byte{byte(sample)}, nil
}

const (
	samples = 1000
	half    = samples / 2
	epochs  = 4
)

func trace(seed uint64) (list []order.Locator) {
	for e := range epochs {
		list = append(list, order.Index(order.Uniform(samples, seed, e)))
	}
	return list
}

// Half cached, the line as fast as the missing half needs on average and a tenth: Belady fetches the least, but late
// in the epoch; LRU fetches more (f + (1-f)·ln(1-f) = 0.15 of the accesses hit at f = 0.5).
func TestEmulatedPolicies(t *testing.T) {
	job := accelerator.Job{Accelerators: 1, Batch: 10, Step: 100 * time.Millisecond, Workers: 2, Prefetch: 4}
	every := time.Duration(float64(2*job.Step/10) / 1.1)
	for _, c := range []struct {
		name     string
		policy   policy
		from, to float64 // utilisation
		hits     float64
	}{
		{"lru", newLRU(half, unit), 0.60, 0.70, 0.15},
		{"belady", newBelady(half, unit), 0.68, 0.80, 0.5},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				cache := newCached(trace(3), c.policy, unit, newLine(every).get, 8, samples/20)
				if err := cache.warm(t.Context(), samplesOf(order.Slice(order.Uniform(samples, 9, 0), 0, half))); err != nil {
					t.Fatal(err)
				}
				cache.start(t.Context())
				defer cache.close()
				var before int64
				for e := range epochs - 1 {
					r, err := job.Run(t.Context(), samples, epoch{cache, e}, nil)
					if err != nil {
						t.Fatal(err)
					}
					gets, bytes := cache.counts()
					if gets != bytes {
						t.Fatalf("%d requests for %d bytes of samples of one byte", gets, bytes)
					}
					hits := 1 - float64(gets-before)/samples
					before = gets
					if e == 0 {
						continue
					}
					if r.Utilisation < c.from || r.Utilisation > c.to || hits < c.hits-0.05 || hits > c.hits+0.05 {
						t.Errorf("epoch %d: utilisation %.3f, hits %.3f", e, r.Utilisation, hits)
					}
				}
			})
		})
	}
}

func TestCachedFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLine(time.Millisecond)
		l.fail = errors.New("broken")
		cache := newCached(trace(3), newLRU(half, unit), unit, l.get, 8, 50)
		cache.start(t.Context())
		defer cache.close()
		job := accelerator.Job{Accelerators: 1, Batch: 10, Step: time.Millisecond, Workers: 2, Prefetch: 4}
		if _, err := job.Run(t.Context(), samples, epoch{cache, 0}, nil); !errors.Is(err, l.fail) {
			t.Errorf("%v", err)
		}
	})
}
