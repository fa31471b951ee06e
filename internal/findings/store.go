package findings

import (
	"fmt"
	"strings"
	"time"

	"github.com/shoalfs/shoal/internal/human"
	"github.com/shoalfs/shoal/prefetch/sim"
)

// Store is what is known of a source and its object store.
type Store struct {
	Source   string
	Endpoint string // "" for a folder of this machine
	Listing
	Latency  Latency
	Ladder   []Rung
	Rising   bool // more connections would be faster, if more had been tried
	Requests int64
	Fetched  int64 // bytes
	Cache    int64 // --cache-size
	Data     int64 // bytes that --memory leaves for samples
}

// Listing is what is listed below the prefix, in a limited time.
type Listing struct {
	Objects int
	Bytes   int64
	Sizes   []int64 // in the keys' order
	Took    time.Duration
	Whole   bool // all was listed
	Shards  bool // they are tar shards
}

// Latency is that of small GETs, sorted; those that failed are not in it.
type Latency struct {
	Took   []time.Duration
	Failed int
	Err    error   // of the last that failed
	Sigma  float64 // of the lognormal distribution, by its quartiles
}

// At is a quantile.
func (l *Latency) At(q float64) time.Duration { return quantile(l.Took, q) }

func quantile[T any](sorted []T, q float64) (v T) {
	if len(sorted) == 0 {
		return v
	}
	return sorted[min(int(q*float64(len(sorted))), len(sorted)-1)]
}

// Rung is the rate of a number of connections.
type Rung struct {
	Connections int
	Bytes, Gets float64 // a second
}

// Knee returns the fastest rung, and the first one that is nearly as fast.
func Knee(ladder []Rung) (best, knee Rung) {
	for _, r := range ladder {
		if r.Bytes > best.Bytes {
			best = r
		}
	}
	for _, r := range ladder {
		if r.Bytes >= 0.9*best.Bytes {
			return best, r
		}
	}
	return best, best
}

// storeRules need the facts of those before them.
var storeRules = []Rule[*Site]{
	{"source/bucket", func(s *Site) Finding {
		if s.Endpoint == "" {
			return ok("%s, a folder of this machine", s.Source)
		}
		return ok("%s at %s can be listed", s.Source, s.Endpoint)
	}},
	{"source/listing", func(s *Site) Finding {
		if s.Objects == 0 {
			return ok("nothing at %s", s.Source).but(Fail, "there is nothing to mount",
				"check the prefix and its case: aws s3 ls "+human.Shell(s.Source))
		}
		more := ""
		if !s.Whole {
			more = "more than "
		}
		mean, each := s.Bytes/int64(s.Objects), float64(s.Objects)/max(s.Took.Seconds(), 1e-6)
		f := ok("%s%s, %s, %s each; %s objects/s", more, human.Count(s.Objects, "object"), human.Bytes(s.Bytes),
			human.Bytes(mean), human.Rate(each))
		f.Values = map[string]float64{"objects": float64(s.Objects), "bytes": float64(s.Bytes),
			"objects_per_second": each}
		if s.Endpoint != "" && mean < 256<<10 && s.Objects >= 1000 && !s.Shards {
			return f.but(OK, "many small objects: each costs a GET; packed into shards they cost a few large GETs",
				fmt.Sprintf("shoal pack %s DEST, then shoal mount %[1]s MOUNTPOINT --shards DEST",
					human.Shell(s.Source)))
		}
		return f
	}},
	{"source/latency", func(s *Site) Finding {
		l := &s.Latency
		n := len(l.Took)
		if n < 4 && l.Err != nil {
			return OfError(l.Err)
		} else if n == 0 {
			return unanswered()
		}
		p50, p90, p99 := l.At(0.5), l.At(0.9), l.At(0.99)
		f := ok("p50 %s, p90 %s, p99 %s, worst %s, of %d GETs of 4 KiB, %d failed", short(p50), short(p90), short(p99),
			short(l.At(1)), n, l.Failed)
		f.Values = map[string]float64{
			"p50_seconds": p50.Seconds(), "p90_seconds": p90.Seconds(), "p99_seconds": p99.Seconds(),
			"gets": float64(n), "failed": float64(l.Failed),
		}
		switch {
		case l.Failed*100 > n:
			return f.but(Warn, "the store refuses or drops requests; each is retried later",
				"lower --connections, or ask the store's operator")
		case p50 > 100*time.Millisecond:
			return f.but(Warn, fmt.Sprintf("the latency is high: a reader without an order gets %.0f files/s, eight "+
				"of them %.0f", 1/p50.Seconds(), 8/p50.Seconds()),
				"train in the store's region, use a cache (shoal warm), or pack into shards; and always pass the order")
		case p99 > time.Second && p99 > 10*p50:
			return f.but(Warn, "some answers are very late; Shoal sends a second request for those that delay a reader",
				"ask the store's operator about hot partitions, throttling, a busy proxy")
		}
		return f
	}},
	{"source/bandwidth", func(s *Site) Finding {
		best, knee := Knee(s.Ladder)
		if best.Gets == 0 {
			return unanswered()
		}
		var steps []string
		for _, g := range s.Ladder {
			steps = append(steps, fmt.Sprintf("%d: %s/s", g.Connections, rate(g.Bytes)))
		}
		rising := ""
		if s.Rising {
			rising = "; the rate still rises"
		}
		f := ok("%s/s, %s GETs/s with %d connections (%s)%s; the checks fetched %s with %s", rate(best.Bytes),
			human.Rate(best.Gets), knee.Connections, strings.Join(steps, ", "), rising, rate(float64(s.Fetched)),
			human.Count(s.Requests, "GET"))
		f.Values = map[string]float64{
			"bytes_per_second": best.Bytes, "gets_per_second": best.Gets,
			"connections_that_pay":   float64(knee.Connections),
			"bytes_per_second_alone": s.Ladder[0].Bytes, "bytes_fetched": float64(s.Fetched),
			"gets_sent": float64(s.Requests),
		}
		if needed := 204e6; s.Endpoint != "" && best.Bytes < needed/2 {
			return f.but(Warn, fmt.Sprintf("an H100 that trains ResNet-50 needs 204 MB/s of images; here it gets "+
				"%.0f%% of them until the cache is filled", 100*best.Bytes/needed),
				"a cache that holds the dataset (--cache-size, shoal warm), shards (shoal pack), a nearer store, or "+
					"a faster link")
		}
		return f
	}},
	{"source/epoch", func(s *Site) Finding {
		best, knee := Knee(s.Ladder)
		store := sim.Store{Bandwidth: best.Bytes, Latency: s.Latency.At(0.5).Seconds(), LatencySigma: s.Latency.Sigma,
			Connections: knee.Connections}
		plan := fmt.Sprintf("shoal plan %s --latency %s --latency-sigma %.2f --bandwidth %.0fMbit --connections %d "+
			"--cache-size %dMiB --workload resnet50-h100", human.Shell(s.Source),
			s.Latency.At(0.5).Round(100*time.Microsecond), store.LatencySigma, store.Bandwidth*8/1e6,
			store.Connections, s.Cache>>20)
		part := ""
		if !s.Whole {
			part = " of the part that was listed"
		}
		if s.Shards {
			return ok("%s in shards%s take %.3g s", human.Bytes(s.Bytes), part, float64(s.Bytes)/best.Bytes).
				but(OK, "the line's time alone: what is in the shards is known once their indexes were read", plan)
		}
		job := sim.Job{Accelerators: 1, Batch: 256, Workers: 16, Step: 1e-6, Prefetch: 32}
		cold, warm, bound, err := model{s.Objects, s.Sizes, job, store, s.Cache, s.Data}.run()
		if err != nil {
			return OfError(err)
		}
		n, held := float64(s.Objects), min(share(s.Cache, s.Bytes), 1)
		f := ok("at these rates a first epoch%s takes %.3g s (%s files/s, bound by %s), and each one after it %.3g s",
			part, n/cold, human.Rate(cold), bound, n/warm)
		f.Values = map[string]float64{"cold_epoch_seconds": n / cold, "warm_epoch_seconds": n / warm}
		return f.but(OK, "--cache-size "+human.Bytes(s.Cache)+" holds "+human.Percent(held)+
			" of it; a slower trainer never waits, if the order is known", plan)
	}},
}

func seconds(s float64) string { return short(time.Duration(s * float64(time.Second))) }

// short prints a duration with two or three digits.
func short(d time.Duration) string {
	if d < 10*time.Millisecond {
		return fmt.Sprintf("%.2f ms", d.Seconds()*1e3)
	}
	return fmt.Sprintf("%.0f ms", d.Seconds()*1e3)
}

func unanswered() Finding {
	return ok("no GET was answered in time").
		but(Fail, "nothing can be read at a useful rate", "ask the store's operator; check the network")
}
