package doctor

import (
	"context"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/shoalfs/shoal/internal/findings"
)

// latency measures small GETs, four at a time over open connections.
func (s *Source) latency(ctx context.Context) error {
	l := &s.facts.Latency
	_, *l = s.climb(ctx, 4, 4<<10, 3*s.window)
	slices.Sort(l.Took)
	// The quartiles of a normal distribution are 1.349 sigma apart.
	l.Sigma = math.Log(float64(max(l.At(0.75), 1))/float64(max(l.At(0.25), 1))) / 1.349
	return nil
}

// bandwidth doubles the connections until it no longer pays.
func (s *Source) bandwidth(ctx context.Context) error {
	most := 512
	if s.quick {
		most = 64
	}
	f := &s.facts
	f.Ladder, f.Rising = ascend(most, s.window, func(connections int, size int64) findings.Rung {
		rung, _ := s.climb(ctx, connections, size, s.window)
		return rung
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

// climb reads with this many connections for one window, after each has answered once. It reads from within objects: a
// store that ignores Range is found out.
func (s *Source) climb(ctx context.Context, connections int, size int64, window time.Duration) (findings.Rung,
	findings.Latency) {
	ctx, cancel := context.WithTimeout(ctx, 4*window+2*time.Second)
	defer cancel()
	var warm, wg sync.WaitGroup
	warm.Add(connections)
	var mu sync.Mutex
	var l findings.Latency
	var got, gets int64
	var began atomic.Int64 // since base, once all are warm
	base := time.Now()
	for range connections {
		wg.Go(func() {
			p := make([]byte, size)
			for n := 0; n == 0 || ctx.Err() == nil && int64(time.Since(base))-began.Load() < int64(window); n++ {
				t := time.Now()
				o, err := s.sample()
				part := p[:min(o.Size, size)]
				if err == nil {
					err = s.store.ReadAt(ctx, o, part, rand.Int64N(o.Size-int64(len(part))+1))
				}
				mu.Lock()
				s.facts.Requests++
				switch {
				case err != nil && ctx.Err() == nil:
					l.Failed, l.Err = l.Failed+1, err
				case err == nil:
					if s.facts.Fetched += int64(len(part)); n > 0 {
						got, gets, l.Took = got+int64(len(part)), gets+1, append(l.Took, time.Since(t))
					}
				}
				mu.Unlock()
				if n == 0 {
					warm.Done()
					warm.Wait()
					began.CompareAndSwap(0, int64(time.Since(base))+1)
				}
			}
		})
	}
	wg.Wait()
	took := max((time.Since(base) - time.Duration(began.Load())).Seconds(), 1e-6)
	return findings.Rung{Connections: connections, Bytes: float64(got) / took, Gets: float64(gets) / took}, l
}
