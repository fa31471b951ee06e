package doctor

import (
	"context"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/internal/findings"
)

// window is the duration of a rung; others are multiples of it.
func (s *Source) window() time.Duration {
	if s.quick {
		return 250 * time.Millisecond
	}
	return 700 * time.Millisecond
}

// read reads a part of an object and counts it.
func (s *Source) read(ctx context.Context, o objstore.Object, p []byte, off int64) error {
	atomic.AddInt64(&s.facts.Requests, 1)
	err := s.store.ReadAt(ctx, o, p, off)
	if err == nil {
		atomic.AddInt64(&s.facts.Fetched, int64(len(p)))
	}
	return err
}

// latency measures small GETs, four at a time over open connections.
func (s *Source) latency(ctx context.Context) error {
	const small, most = 4 << 10, 400
	l := &s.facts.Latency
	var mu sync.Mutex
	var wg sync.WaitGroup
	began := time.Now()
	for range 4 {
		wg.Go(func() {
			p := make([]byte, small)
			// At least two: if the first answers are late, those after them show the usual latency.
			for n, full := 0, false; !full && (n < 2 || time.Since(began) < 3*s.window()) && ctx.Err() == nil; n++ {
				o, err := s.sample()
				t := time.Now()
				if err == nil {
					err = s.read(ctx, o, p[:min(o.Size, small)], 0)
				}
				d := time.Since(t)
				mu.Lock()
				switch {
				case err != nil:
					l.Failed++
				case n > 0: // the first opens the connection
					l.Took = append(l.Took, d)
				}
				full = len(l.Took) >= most
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	slices.Sort(l.Took)
	if len(l.Took) >= 4 {
		// The quartiles of a normal distribution are 1.349 sigma apart.
		l.Sigma = math.Log(float64(l.At(0.75))/float64(max(l.At(0.25), 1))) / 1.349
	}
	return nil
}

// bandwidth doubles the connections until it no longer pays.
func (s *Source) bandwidth(ctx context.Context) error {
	most := 512
	if s.quick {
		most = 64
	}
	f := &s.facts
	f.Ladder, f.Rising = ascend(most, s.window(), func(connections int, size int64) findings.Rung {
		if ctx.Err() != nil {
			return findings.Rung{}
		}
		return s.climb(ctx, connections, size)
	})
	return nil
}

const (
	pays        = 1.1 // the gain that justifies doubling the connections
	smallestGet = 64 << 10
	largestGet  = 4 << 20 // cache.ExtentSize
	// largestTotal bounds the memory of all GETs of a rung.
	largestTotal = 512 << 20
)

// ascend doubles the connections, and chooses the size of a GET, until two rungs in a row did not pay. rising says that
// only most stopped it.
func ascend(most int, window time.Duration, climb func(connections int,
	size int64) findings.Rung) (ladder []findings.Rung, rising bool) {
	size, idle := int64(largestGet), 0
	var best float64
	for c := 1; c <= most && idle < 2; c *= 2 {
		size = max(min(size, largestTotal/int64(2*c)), smallestGet)
		g := climb(c, size)
		if g.Gets == 0 {
			return ladder, false
		}
		// For large objects, a size at which several GETs of each connection fit a rung.
		size = min(size, int64(g.Bytes/float64(c)*window.Seconds()/4))
		ladder = append(ladder, g)
		if idle++; g.Bytes >= best*pays {
			idle = 0
		}
		best = max(best, g.Bytes)
	}
	return ladder, idle == 0
}

// climb reads with this many connections for one window, after each has answered once.
func (s *Source) climb(ctx context.Context, connections int, size int64) findings.Rung {
	window := s.window()
	ctx, cancel := context.WithTimeout(ctx, 4*window+2*time.Second)
	defer cancel()
	var warm, wg sync.WaitGroup
	warm.Add(connections)
	var got, gets, began atomic.Int64 // began: since base, once all are warm
	base := time.Now()
	for range connections {
		wg.Go(func() {
			p := make([]byte, size)
			one := func() (n int64) {
				o, err := s.sample()
				if err != nil {
					return 0
				}
				if n = min(o.Size, size); s.read(ctx, o, p[:n], rand.Int64N(o.Size-n+1)) != nil {
					return 0
				}
				return n
			}
			one()
			warm.Done()
			warm.Wait()
			began.CompareAndSwap(0, int64(time.Since(base))+1)
			for ctx.Err() == nil && time.Since(base)-time.Duration(began.Load()) < window {
				if n := one(); n > 0 {
					got.Add(n)
					gets.Add(1)
				}
			}
		})
	}
	wg.Wait()
	took := max((time.Since(base) - time.Duration(began.Load())).Seconds(), 1e-6)
	return findings.Rung{Connections: connections, Bytes: float64(got.Load()) / took, Gets: float64(gets.Load()) / took}
}
