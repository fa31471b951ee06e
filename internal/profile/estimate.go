package profile

import (
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/shoalfs/shoal/internal/profile/trace"
	"github.com/shoalfs/shoal/prefetch/order"
	"github.com/shoalfs/shoal/prefetch/sim"
)

// Estimate is the rate of the job if its order were known, from prefetch/sim, as `shoal plan` predicts it.
type Estimate struct {
	Now      float64 `json:"files_per_second"`         // as seen
	NoWait   float64 `json:"no_wait_files_per_second"` // if no read waited: the limit of loader and trainer
	Cold     float64 `json:"cold_files_per_second"`    // an epoch that fetches everything
	Warm     float64 `json:"warm_files_per_second"`    // one after it, with the cache as it is
	Bound    string  `json:"cold_bound"`               // what bounds the cold epoch
	Workers2 float64 `json:"twice_the_workers_files_per_second"`

	// The model.
	Workers     int     `json:"workers"`
	Read        float64 `json:"read_seconds"`    // of a worker for a sample, without waiting for its bytes
	Blocked     float64 `json:"blocked_share"`   // of the workers' time in which they waited for the trainer
	Step        float64 `json:"step_seconds"`    // of a batch
	Latency     float64 `json:"latency_seconds"` // of the store
	Bandwidth   float64 `json:"bandwidth"`       // bytes a second; 0: no limit
	Connections int     `json:"connections"`
	CacheShare  float64 `json:"cache_share"` // of the dataset that the cache may hold
}

const (
	// simulated bounds the samples of a run: larger datasets are scaled down, with their cache and memory.
	simulated = 50_000
	// ceiling is the approximate rate of a mount on two cores with warm data; the model does not include it.
	ceiling = 12_000.0
	// A gap that is this many times the usual one is caused by the trainer: the worker's queue was full.
	longGap    = 8
	leastGap   = time.Millisecond
	trainerSet = 0.3 // of the workers' time, from which on the trainer sets the pace
	leastStep  = 1e-6
	leastData  = 64 << 20 // bytes of memory for samples that the model needs for any file
)

// gaps returns the time in which workers did not wait for a read: between the end of a visit and the beginning of the
// next. blocked is the part of it caused by the trainer.
func (d *digest) gaps() (all, blocked time.Duration) {
	var list []time.Duration
	for _, p := range d.processes {
		for k := 1; k < len(p.visits); k++ {
			before, v := &d.visits[p.visits[k-1]], &d.visits[p.visits[k]]
			list = append(list, max(v.start-before.end, 0))
		}
	}
	slices.Sort(list)
	usual := quantile(list, 0.5)
	for _, g := range list {
		all += g
		if g > longGap*usual+leastGap {
			blocked += g - usual
		}
	}
	return all, blocked
}

// predict simulates the recorded job with its order known.
func (a *analysis) predict() (*Estimate, error) {
	n := len(a.visits) - a.repeatedAtOnce()
	spans, wait := a.spans()
	gaps, blocked := a.gaps()
	e := &Estimate{
		Now: a.pace(), Workers: max(int(math.Round(a.atOnce())), 1), Latency: a.latency(), Bandwidth: a.options.Bandwidth,
		Blocked: share(float64(blocked), float64(spans)), Step: leastStep, Connections: a.connections(),
	}
	e.NoWait = min(e.Now*share(float64(spans), float64(max(spans-wait, 1))), ceiling)
	e.Read = max(spans-wait, 0).Seconds() / float64(n)
	trainerBound := e.Blocked >= trainerSet
	switch {
	case a.options.Step > 0:
		e.Step = a.options.Step
		e.Read = max(gaps-blocked, 0).Seconds() / float64(n)
	case trainerBound:
		e.Step = float64(a.options.Batch) / e.Now
		e.Read = max(gaps-blocked, 0).Seconds() / float64(n)
	}
	e.Workers2 = min(2*e.Now, ceiling)
	if trainerBound {
		e.Workers2 = e.Now
	}

	var sizes sim.Files
	for _, s := range a.sizes() {
		if s > 0 {
			sizes = append(sizes, s)
		}
	}
	if len(sizes) == 0 {
		return e, nil
	}
	files := max(a.trace.Header.Files, len(sizes))
	e.CacheShare = min(share(float64(a.trace.CacheBytes), float64(a.trace.Bytes)), 1)
	samples := min(files, simulated)
	scale := float64(samples) / float64(files)
	c := sim.Config{
		Samples: samples, Sizes: sizes, Order: func(epoch int) order.Order { return order.Uniform(samples, 0, epoch) },
		Job: sim.Job{
			Accelerators: 1, Batch: min(a.options.Batch, samples), Workers: e.Workers, Step: e.Step, Read: e.Read, Prefetch: 2 * e.Workers,
		},
		Store:      sim.Store{Bandwidth: e.Bandwidth, Latency: e.Latency, LatencySigma: 0.3, Connections: e.Connections},
		CacheBytes: int64(float64(a.trace.CacheBytes) * scale), Memory: max(int64(float64(a.trace.Memory)*scale), leastData), Epochs: 2,
	}
	epochs, err := sim.Run(c)
	if err != nil {
		return nil, fmt.Errorf("cannot simulate the recorded job: %w", err)
	}
	rate := func(e sim.Epoch) float64 { return min(float64(e.Samples)/e.Seconds, ceiling) }
	e.Cold, e.Warm = rate(epochs[0]), rate(epochs[1])
	e.Bound = c.Limits(epochs[0]).Binding().Name
	return e, nil
}

func (a *analysis) connections() int {
	for _, n := range []int{a.last.Connections, a.trace.Connections} {
		if n > 0 {
			return n
		}
	}
	return 512
}

// gain adds the predicted gain to a help.
func (a *analysis) gain(h Help, rate float64, by string) Help {
	if a.estimate == nil || a.estimate.Now <= 0 || rate <= 0 {
		return h
	}
	h.Gain, h.By = rate/a.estimate.Now, by
	return h
}

// known is the help for passing the order.
func (a *analysis) known(what, command string) Help {
	h := Help{What: what, Command: command}
	if e := a.estimate; e != nil && e.Cold > 0 {
		h = a.gain(h, e.Cold, fmt.Sprintf("simulated: an epoch that fetches everything by %d workers, store %s, %d connections, %s", e.Workers, millis(e.Latency), e.Connections, a.lineText()))
	}
	return h
}

// fill adds the help of a cache that holds the dataset, if that helps; why begins its text.
func (a *analysis) fill(f *Finding, why string) {
	e := a.estimate
	if e == nil || e.Warm <= 0 || a.areas[trace.Keep]*10 > a.reads*9 {
		return
	}
	what := fmt.Sprintf("%sfill the cache before the first epoch (it may hold %.0f%% of the dataset)", why, 100*e.CacheShare)
	f.Helps = append(f.Helps, a.gain(Help{What: what, Command: "shoal warm " + a.trace.Source + " --cache-dir DIR"}, e.Warm, "simulated: an epoch after the first"))
}

func (a *analysis) lineText() string {
	if a.estimate.Bandwidth == 0 {
		return "no limit of the link"
	}
	return fmt.Sprintf("%.0f MB/s", a.estimate.Bandwidth/1e6)
}

func millis(s float64) string {
	if s < 0.01 {
		return fmt.Sprintf("%.1f ms", s*1e3)
	}
	return fmt.Sprintf("%.0f ms", s*1e3)
}
