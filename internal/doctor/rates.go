package doctor

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	humanize "github.com/dustin/go-humanize"

	"github.com/shoalfs/shoal/cache/objstore"
)

// random returns a number below n.
func (s *Source) random(n int) int { return rand.IntN(n) }

// sample returns one of the objects of at least this many bytes.
func (s *Source) sample(least int64) (objstore.Object, bool) {
	for range 64 {
		if len(s.objects) == 0 {
			break
		}
		if o := s.objects[s.random(len(s.objects))]; o.Size >= least {
			return o, true
		}
	}
	for _, o := range s.objects {
		if o.Size >= least {
			return o, true
		}
	}
	return objstore.Object{}, false
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

func (s *Source) latencyWindow() time.Duration {
	if s.quick {
		return 700 * time.Millisecond
	}
	return 2 * time.Second
}

const (
	smallGet    = 4 << 10
	latencyGets = 400 // at most
	farMedian   = 100 * time.Millisecond
	longTail    = time.Second
)

// latency measures small GETs, four at a time over open connections.
func (s *Source) latency(ctx context.Context) Result {
	var mu sync.Mutex
	var took []time.Duration
	var failed int
	var wg sync.WaitGroup
	began, window := time.Now(), s.latencyWindow()
	for range 4 {
		wg.Go(func() {
			p := make([]byte, smallGet)
			// At least two: if the first answers are late, those after them show the usual latency.
			for n := 0; (n < 2 || time.Since(began) < window) && ctx.Err() == nil; n++ {
				o, found := s.sample(1)
				if !found {
					return
				}
				t := time.Now()
				err := s.read(ctx, o, p[:min(o.Size, smallGet)], 0)
				d := time.Since(t)
				mu.Lock()
				switch {
				case err != nil:
					failed++
				case n > 0: // the first opens the connection
					took = append(took, d)
				}
				full := len(took) >= latencyGets
				mu.Unlock()
				if full {
					return
				}
			}
		})
	}
	wg.Wait()
	if len(took) < 4 {
		return ok("%d GETs answered in %s, %d failed", len(took), short(time.Since(began)), failed).because(Fail, "the store answers few requests", "ask its operator; try again later")
	}
	slices.Sort(took)
	q := func(p float64) time.Duration { return took[min(int(p*float64(len(took))), len(took)-1)] }
	p50, p99 := q(0.5), q(0.99)
	s.facts.Latency = p50
	// The quartiles of a normal distribution are 1.349 sigma apart.
	s.facts.Sigma = math.Log(float64(q(0.75))/float64(max(q(0.25), 1))) / 1.349
	r := ok("p50 %s, p90 %s, p99 %s, worst %s, of %d GETs of %s", short(p50), short(q(0.9)), short(p99), short(took[len(took)-1]), len(took), humanize.IBytes(smallGet)).
		with("p50_seconds", p50.Seconds()).with("p90_seconds", q(0.9).Seconds()).with("p99_seconds", p99.Seconds()).with("gets", float64(len(took))).with("failed", float64(failed))
	if failed > 0 {
		r.Measured += fmt.Sprintf(", %d failed", failed)
	}
	switch {
	case failed*100 > len(took):
		return r.because(Warn, "the store refuses or drops requests; each is retried later", "lower --connections, or ask the store's operator")
	case p50 > farMedian:
		return r.because(Warn, fmt.Sprintf("the latency is high: a reader without an order gets %.0f files/s, eight of them %.0f", 1/p50.Seconds(), 8/p50.Seconds()), "train in the store's region, use a cache (shoal warm), or pack into shards; and always pass the order")
	case p99 > longTail && p99 > 10*p50:
		return r.because(Warn, "some answers are very late; Shoal sends a second request for those that delay a reader", "ask the store's operator about hot partitions, throttling, a busy proxy")
	}
	return r
}

func (s *Source) rungWindow() time.Duration {
	if s.quick {
		return 250 * time.Millisecond
	}
	return 700 * time.Millisecond
}

const (
	mostRungs   = 512
	quickRungs  = 64
	pays        = 1.1 // the gain that justifies doubling the connections
	kneeShare   = 0.9
	slowStore   = 100e6
	largestGet  = 4 << 20 // cache.ExtentSize
	smallestGet = 64 << 10
	// largestTotal bounds the memory of all GETs of a rung.
	largestTotal = 512 << 20
)

// rung is the rate of a number of connections.
type rung struct {
	connections int
	bytes, gets float64 // a second
}

// bandwidth doubles the connections until it no longer pays.
func (s *Source) bandwidth(ctx context.Context) Result {
	most := mostRungs
	if s.quick {
		most = quickRungs
	}
	ladder, rising := ascend(most, s.rungWindow(), func(connections int, size int64) rung {
		if ctx.Err() != nil {
			return rung{}
		}
		return s.climb(ctx, connections, size)
	})
	if len(ladder) == 0 {
		return ok("no GET was answered in time").because(Fail, "nothing can be read at a useful rate", "ask the store's operator; check the network")
	}
	best, knee := kneeOf(ladder)
	s.facts.Bandwidth, s.facts.Connections = best.bytes, knee.connections
	var steps []string
	for _, g := range ladder {
		steps = append(steps, fmt.Sprintf("%d: %s/s", g.connections, rate(g.bytes)))
	}
	r := ok("%s/s, %s GETs/s with %d connections (%s)", rate(best.bytes), count(best.gets), knee.connections, strings.Join(steps, ", ")).
		with("bytes_per_second", best.bytes).with("gets_per_second", best.gets).with("connections_that_pay", float64(knee.connections)).
		with("bytes_per_second_alone", ladder[0].bytes)
	if rising {
		r.Measured += "; the rate still rises"
	}
	r.Measured += fmt.Sprintf("; the checks fetched %s with %s GETs", rate(float64(s.facts.Fetched)), humanize.Comma(s.facts.Requests))
	r = r.with("bytes_fetched", float64(s.facts.Fetched)).with("gets_sent", float64(s.facts.Requests))
	switch {
	case s.s3 == nil:
		return r
	case best.bytes < slowStore:
		return r.because(Warn, fmt.Sprintf("an H100 that trains ResNet-50 needs 204 MB/s of images; here it gets %.0f%% of them until the cache is filled", min(100*best.bytes/204e6, 100)),
			"a cache that holds the dataset (--cache-size, shoal warm), shards (shoal pack), a nearer store, or a faster link")
	case rising && s.quick:
		return r.because(OK, "more connections may be faster: --quick stops here", "")
	}
	return r
}

// ascend doubles the connections, and chooses the size of a GET, until two rungs in a row did not pay. rising says that
// only most stopped it.
func ascend(most int, window time.Duration, climb func(connections int, size int64) rung) (ladder []rung, rising bool) {
	size, idle := int64(largestGet), 0
	var best float64
	for c := 1; c <= most && idle < 2; c *= 2 {
		size = max(min(size, largestTotal/int64(2*c)), smallestGet)
		g := climb(c, size)
		if g.gets == 0 {
			return ladder, false
		}
		// For large objects, a size at which several GETs of each connection fit a rung.
		size = min(size, int64(g.bytes/float64(c)*window.Seconds()/4))
		ladder = append(ladder, g)
		if idle++; g.bytes >= best*pays {
			idle = 0
		}
		best = max(best, g.bytes)
	}
	return ladder, idle == 0
}

// kneeOf returns the fastest rung, and the first one that is nearly as fast.
func kneeOf(ladder []rung) (best, knee rung) {
	best = slices.MaxFunc(ladder, func(a, b rung) int { return cmp.Compare(a.bytes, b.bytes) })
	i := slices.IndexFunc(ladder, func(g rung) bool { return g.bytes >= kneeShare*best.bytes })
	return best, ladder[i]
}

// climb reads with this many connections for one window, after each has answered once.
func (s *Source) climb(ctx context.Context, connections int, size int64) rung {
	window := s.rungWindow()
	ctx, cancel := context.WithTimeout(ctx, 4*window+2*time.Second)
	defer cancel()
	var warm, wg sync.WaitGroup
	warm.Add(connections)
	var got, gets atomic.Int64
	var began atomic.Int64 // since base, once all are warm
	base := time.Now()
	for range connections {
		wg.Go(func() {
			p := make([]byte, size)
			one := func(count bool) bool {
				o, found := s.sample(1)
				if !found {
					return false
				}
				n := min(o.Size, size)
				off := int64(0)
				if o.Size > n {
					off = rand.Int64N(o.Size - n + 1)
				}
				if err := s.read(ctx, o, p[:n], off); err != nil {
					return ctx.Err() == nil
				}
				if count {
					got.Add(n)
					gets.Add(1)
				}
				return true
			}
			one(false)
			warm.Done()
			warm.Wait()
			began.CompareAndSwap(0, int64(time.Since(base))+1)
			for more := true; more && time.Since(base)-time.Duration(began.Load()) < window; {
				more = one(true)
			}
		})
	}
	wg.Wait()
	took := max((time.Since(base) - time.Duration(began.Load())).Seconds(), 1e-6)
	return rung{connections, float64(got.Load()) / took, float64(gets.Load()) / took}
}

// fits checks whether the daemon's memory is enough for the dataset's metadata.
func (s *Source) fits(context.Context) Result {
	switch {
	case s.LedgerFor == nil:
		return skipped("the memory that a daemon needs is unknown")
	case s.facts.Shards:
		return skipped("the files in the shards are unknown until their indexes are read")
	case s.facts.Objects == 0:
		return skipped("nothing was listed")
	}
	at := ""
	if !s.facts.Whole {
		at = "at least "
	}
	left := s.LedgerFor(s.memory, s.facts.Objects)
	r := ok("of --memory %s, %s%s files leave %s for samples", humanize.IBytes(uint64(s.memory)), at, humanize.Comma(int64(s.facts.Objects)), humanize.IBytes(uint64(max(left, 0)))).with("bytes_for_samples", float64(left))
	mean := s.facts.Bytes / int64(s.facts.Objects)
	need := int64(32 << 20)
	switch {
	case left < need:
		return r.because(Fail, "the mount refuses to start with less than 32 MiB", fmt.Sprintf("--memory %dMiB", (s.memory+2*(need-left))>>20+1))
	case s.facts.Connections > 0 && left < int64(s.facts.Connections)*min(mean, largestGet):
		return r.because(Warn, fmt.Sprintf("%d requests in flight of %s each need more than that: fewer will be sent", s.facts.Connections, humanize.IBytes(uint64(min(mean, largestGet)))), fmt.Sprintf("--memory %dMiB", (s.memory+2*int64(s.facts.Connections)*min(mean, largestGet))>>20+1))
	}
	return r
}

// epoch requests the forecast.
func (s *Source) epoch(ctx context.Context) Result {
	switch {
	case s.Forecast == nil:
		return skipped("nobody forecasts")
	case s.facts.Latency == 0 || s.facts.Bandwidth == 0:
		return skipped("latency or bandwidth could not be measured")
	}
	return s.Forecast(ctx, s.facts)
}
