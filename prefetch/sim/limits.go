package sim

import (
	"cmp"
	"math"
	"slices"
	"sort"
)

// Limits are the least seconds that an epoch's work takes of each resource, as if it were the only one. The largest
// is the limit of the epoch: no order of requests can beat it.
type Limits struct {
	Compute   float64 `json:"compute_seconds"`   // the accelerators' steps
	Bandwidth float64 `json:"bandwidth_seconds"` // the bytes over the line to the store, and the heads of the answers
	Near      float64 `json:"near_seconds"`      // those over the line to the near tier
	Link      float64 `json:"link_seconds"`      // those over a node's line to its peers
	Rate      float64 `json:"rate_seconds"`      // the requests at the store's rate
	Latency   float64 `json:"latency_seconds"`   // the requests' first bytes, Connections at a time
	CPU       float64 `json:"cpu_seconds"`       // the requests' serial work
	Read      float64 `json:"read_seconds"`      // the workers' work on samples
}

// Limits returns the limits of an epoch that a run of c returned.
func (c Config) Limits(e Epoch) Limits {
	per := func(work, rate float64) float64 {
		if rate == 0 {
			return 0
		}
		return work / rate
	}
	line := func(a Answers, bandwidth float64) float64 { return per(float64(a.Bytes+head*a.Requests), bandwidth) }
	nodes := float64(c.nodes())
	near, peers := c.others()
	// The mean of the lognormal. What the near tier lacks, it was asked for first.
	latency := c.Latency*math.Exp(c.LatencySigma*c.LatencySigma/2) + near.Latency
	l := Limits{
		Compute:   e.Compute,
		Bandwidth: line(Answers{e.Bytes, e.Requests}, c.Bandwidth),
		Near:      line(e.Near, near.Bandwidth),
		Link:      line(e.Peers, nodes*peers.Bandwidth),
		Rate:      per(float64(e.Requests), c.RequestRate),
		Latency:   float64(e.Requests) * latency / nodes / float64(c.Connections),
		CPU:       float64(e.Requests+e.Near.Requests+e.Peers.Requests) * c.CPU / nodes,
		Read:      float64(e.Samples) * c.Read / nodes / float64(c.Accelerators*max(c.Workers, 1)),
	}
	if c.Workers == 0 {
		l.Read += l.Compute // one after the other
	}
	return l
}

// Limit is one of the Limits.
type Limit struct {
	Name    string
	Seconds float64
}

// Others returns the limits beside Compute, the largest first.
func (l Limits) Others() []Limit {
	all := []Limit{{"bandwidth", l.Bandwidth}, {"the near tier", l.Near}, {"the link", l.Link}, {"latency", l.Latency},
		{"request rate", l.Rate}, {"request CPU", l.CPU}, {"reading", l.Read}}
	slices.SortStableFunc(all, func(a, b Limit) int { return cmp.Compare(b.Seconds, a.Seconds) })
	return all
}

// Binding returns the largest limit: compute if none is larger.
func (l Limits) Binding() Limit {
	if o := l.Others()[0]; o.Seconds > l.Compute {
		return o
	}
	return Limit{"compute", l.Compute}
}

// Steady returns an epoch of c in the steady state of the cache.
func Steady(c Config) (Epoch, error) {
	c.Warm, c.Epochs = true, 2
	epochs, err := Run(c)
	if err != nil {
		return Epoch{}, err
	}
	return epochs[len(epochs)-1], nil
}

// grains is the resolution of CacheFor and BandwidthFor: a 200th of the range.
const grains = 200

// CacheFor returns the smallest cache, in steps of a 200th of total bytes, with which a steady epoch reaches the
// utilisation; ok is false if even total bytes are not enough. progress, unless nil, is called before each of some
// nine runs.
func CacheFor(c Config, utilisation float64, total int64, progress func(run, of int)) (
	bytes int64, ok bool, err error) {
	i, err := smallest(grains, progress, func(i int) (bool, error) {
		c.CacheBytes = cacheOf(total, i)
		e, err := Steady(c)
		return e.Utilisation >= utilisation, err
	})
	return cacheOf(total, i), i <= grains && err == nil, err
}

func cacheOf(total int64, i int) int64 {
	return int64(math.Ceil(float64(total) * float64(min(i, grains)) / grains))
}

// BandwidthFor returns the least bandwidth in bytes a second, to within 5%, with which a steady epoch reaches the
// utilisation with c's cache; ok is false if even an unlimited line is not enough.
func BandwidthFor(c Config, utilisation float64, progress func(run, of int)) (bandwidth float64, ok bool, err error) {
	c.Bandwidth = 0
	free, err := Steady(c)
	if err != nil || free.Utilisation < utilisation {
		return 0, false, err
	}
	if free.Bytes == 0 {
		return 0, true, nil
	}
	// With less than this the line alone takes too long, so it is from here on, in steps of 5%, to 17,000 times it.
	least := float64(free.Bytes) * utilisation / free.Compute
	of := func(i int) float64 { return least * math.Pow(1.05, float64(i)) }
	i, err := smallest(grains, progress, func(i int) (bool, error) {
		c.Bandwidth = of(i)
		e, err := Steady(c)
		return e.Utilisation >= utilisation, err
	})
	return of(i), i <= grains && err == nil, err
}

// smallest returns the smallest i of 0..n for which is holds, n+1 if there is none, by bisection.
func smallest(n int, progress func(run, of int), is func(i int) (bool, error)) (int, error) {
	runs, of := 0, int(math.Ceil(math.Log2(float64(n+2))))
	var failed error
	i := sort.Search(n+1, func(i int) bool {
		if failed != nil {
			return true
		}
		if progress != nil {
			progress(runs, of)
		}
		runs++
		ok, err := is(i)
		if err != nil {
			failed = err
		}
		return ok
	})
	return i, failed
}
