// Package sim predicts an epoch before anything is fetched: it runs prefetch.Executor, which package engine runs
// against a real store, against a model of a store and of a trainer, in virtual time. Like the executor it is pure:
// no clock, no I/O, no goroutines; equal arguments give equal results.
//
//	trainer ── accelerators in step, each with a loader: workers that read batches ahead
//	   │ reads a sample: kept, staged, on its way, or absent
//	stream ── prefetch.Executor: 7/8 of the connections, 7/8 of the memory
//	   │ requests
//	store ── places, serial work, a request rate, latency to the first byte, a line on which transfers take turns;
//	         before it the caches of other nodes and a near tier, each with a line of its own
//
// docs/plan.md describes the assumptions of the model and its limits.
package sim

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"sort"

	"github.com/shoalfs/shoal/prefetch"
	"github.com/shoalfs/shoal/prefetch/order"
)

// Store is a model of an object store and of the line to it.
type Store struct {
	Bandwidth    float64 // bytes a second, shared by the current transfers in turns; 0: no limit
	Latency      float64 // median seconds to the first byte
	LatencySigma float64 // sigma of its lognormal distribution; 0: always the median
	Connections  int     // requests in flight at most
	RequestRate  float64 // requests a second; 0: no limit
	CPU          float64 // seconds of serial work per request; 0: none
}

// Line is a model of a line on which something else than the store answers.
type Line struct {
	Bandwidth float64 // bytes a second, shared like the store's; 0: no limit
	Latency   float64 // seconds to the first byte
}

// Peers is a model of nodes that share their caches. Each owns an equal part of the samples, and keeps those of them
// that the kept set of all caches together has.
type Peers struct {
	Nodes int
	Line  // on which a node's peers answer it
}

// Job is a model of a training job.
type Job struct {
	Accelerators int     // that work in step: each waits until all have their batch
	Batch        int     // samples per accelerator and step
	Workers      int     // of each accelerator's loader; 0: it reads between two steps
	Step         float64 // seconds of compute a batch
	// batches that a loader holds or reads ahead of the step, all workers together; 0: 2 per worker
	Prefetch int
	Read     float64 // seconds of a worker per sample, without waiting for its bytes
}

// Config is the input of a run. With Peers, Job, Connections, CacheBytes and Memory are those of one node; the
// bandwidth of the store and of the near tier, and the request rate, are shared by all nodes.
type Config struct {
	// Order returns an epoch's order over sample numbers, nil if unknown. It is called for one epoch more than Epochs,
	// whose head is prefetched, and under Belady for two more.
	Order   func(epoch int) order.Order
	Samples int            // in the dataset; 0: as many as epoch 0 has positions
	Sizes   prefetch.Sizes // by sample number
	// Places says where samples lie in shards; nil: each is an object.
	Places prefetch.Places
	// Bulk lets neighbours in a shard be fetched along at any time, if the cache has space for everything missing, as
	// the engine does for orders over shards and for small datasets.
	Bulk bool
	// Key replaces a sample's name in the choice of the kept set; nil: its number, or its run of a shard.
	Key func(sample int) uint64
	Job
	Store
	Near       *Line  // a near tier, which has what was read once; nil: none
	Peers      *Peers // nil: the node is alone
	CacheBytes int64  // on disk
	Memory     int64  // bytes for samples in memory: those in the engine's ledger
	Epochs     int
	Warm       bool // the kept set is resident at the start
	Seed       uint64
	// Watch, unless nil, is called every now and then with the number of finished steps of an epoch. Once it returns
	// false, Run ends with ErrStopped.
	Watch func(epoch, step, steps int) (goOn bool)
}

// ErrStopped is returned by a run that Config.Watch stopped.
var ErrStopped = errors.New("sim: stopped")

// MemoryError is returned if Memory is less than eight times the largest extent.
type MemoryError struct{ Have, Need int64 } // in bytes

func (e *MemoryError) Error() string {
	return fmt.Sprintf("sim: %d bytes of memory where %d are needed", e.Have, e.Need)
}

// StallBounds are the upper bounds of a Histogram's buckets in seconds; the last bucket has none.
var StallBounds = [...]float64{1e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1, 2, 5, 10}

// Histogram counts the steps by their wait for batches. The first bucket is for waits below 0.1 ms, or none.
type Histogram [len(StallBounds) + 1]int64

// Add counts a wait.
func (h *Histogram) Add(seconds float64) { h[sort.SearchFloat64s(StallBounds[:], seconds)]++ }

// Epoch is the result of an epoch. Its bytes and requests are those that fetch its samples, whenever they were sent:
// those for the head of the next epoch belong to the next epoch. Samples, bytes and requests are those of all nodes.
type Epoch struct {
	Epoch       int       `json:"epoch"`
	Seconds     float64   `json:"seconds"`         // from the end of the last epoch's last step to the end of its own
	Compute     float64   `json:"compute_seconds"` // seconds of that in which the accelerators computed
	Stall       float64   `json:"stall_seconds"`   // seconds in which they waited
	Utilisation float64   `json:"utilisation"`     // Compute / Seconds
	Samples     int       `json:"samples"`
	Bytes       int64     `json:"bytes"` // from the store, over the line
	Requests    int64     `json:"requests"`
	Near        Answers   `json:"near,omitzero"`     // of the near tier
	Peers       Answers   `json:"peers,omitzero"`    // of other nodes, also of what those had to fetch first
	DiskBytes   int64     `json:"disk_bytes"`        // from the readers' own disks
	KeepHits    int64     `json:"keep_hits"`         // samples that were in the cache
	RingHits    int64     `json:"ring_hits"`         // samples that lay in memory, fetched ahead
	Waits       int64     `json:"waits"`             // samples that a worker had to wait for
	Stalls      Histogram `json:"stalls"`            // of the steps
	MemoryPeak  int64     `json:"memory_peak_bytes"` // bytes
}

// Answers are what something else than the store answers.
type Answers struct {
	Bytes    int64 `json:"bytes"`
	Requests int64 `json:"requests"`
}

// watchEvery is the number of events between two calls of Watch: less than a millisecond, but for huge samples.
const watchEvery = 1 << 9

// extentLimit is the share of the memory that one extent may take: an eighth is reserved for demand.
const extentLimit = 8

func (c *Config) check() error {
	switch {
	case c.Order == nil || c.Sizes == nil:
		return errors.New("sim: Order and Sizes are needed")
	case c.Accelerators < 1 || c.Batch < 1 || c.Workers < 0 || c.Prefetch < 0:
		return fmt.Errorf(
			"sim: %d accelerators, batches of %d, %d workers, %d batches ahead: give at least 1, 1, 0 and 0",
			c.Accelerators, c.Batch, c.Workers, c.Prefetch)
	case !finite(c.Step) || c.Step == 0:
		return fmt.Errorf("sim: a step of %g s: give more than 0", c.Step)
	case c.Connections < 1:
		return fmt.Errorf("sim: %d connections: give at least 1", c.Connections)
	case c.Epochs < 1:
		return fmt.Errorf("sim: %d epochs: give at least 1", c.Epochs)
	case c.CacheBytes < 0:
		return fmt.Errorf("sim: a cache of %d bytes: give 0 or more", c.CacheBytes)
	case c.Peers != nil && c.Peers.Nodes < 1:
		return fmt.Errorf("sim: %d nodes: give at least 1", c.Peers.Nodes)
	}
	near, peers := c.others()
	for _, v := range []float64{c.Bandwidth, c.Latency, c.LatencySigma, c.RequestRate, c.CPU, c.Read, near.Bandwidth,
		near.Latency, peers.Bandwidth, peers.Latency} {
		if !finite(v) {
			return fmt.Errorf("sim: %g in the model of the store or the job: give 0 or more", v)
		}
	}
	return nil
}

func finite(v float64) bool { return v >= 0 && !math.IsInf(v, 1) }

type simulation struct {
	Config
	now    float64
	agenda agenda
	random *rand.Rand

	store   store
	sharing sharing
	stream  stream
	volume  volume
	trainer trainer

	orders map[int]order.Locator // of all nodes, by epoch: those in use
	epochs []Epoch
}

// Run simulates the epochs 0 to Epochs-1. It takes about a microsecond per sample, and a few bytes per sample in
// addition to the orders. It fails if the configuration is invalid, an epoch's order is unknown, or the memory is
// less than eight times the largest extent.
func Run(c Config) ([]Epoch, error) {
	if err := c.check(); err != nil {
		return nil, err
	}
	s := &simulation{Config: c, orders: map[int]order.Locator{}, random: rand.New(rand.NewPCG(c.Seed, 0))}
	first := s.order(0)
	if first == nil || first.Len() == 0 {
		return nil, errors.New("sim: the first epoch has no known order, or no samples")
	}
	if s.Samples == 0 {
		s.Samples = s.whole(0).Len()
	}
	if err := s.volume.init(s); err != nil {
		return nil, err
	}
	s.sharing.init(s)
	s.store.init(s)
	s.stream.init(s)
	s.trainer.init(s)
	for e := range c.Epochs {
		if s.order(e) == nil {
			return nil, fmt.Errorf("sim: the order of epoch %d is not known", e)
		}
		if err := s.run(e); err != nil {
			return nil, err
		}
	}
	return s.epochs[:c.Epochs], nil
}

// whole returns the order of all nodes for an epoch, searchable, or nil.
func (s *simulation) whole(epoch int) order.Locator {
	o, ok := s.orders[epoch]
	if !ok {
		if made := s.Order(epoch); made != nil {
			o = order.Index(made)
		}
		s.orders[epoch] = o
	}
	return o
}

// order returns the node's part of an epoch's order, searchable, or nil: of each round of positions the first.
func (s *simulation) order(epoch int) order.Locator {
	whole := s.whole(epoch)
	if whole == nil {
		return nil
	}
	return order.Stripe(whole, s.Accelerators*s.nodes(), 0, s.Accelerators-1).(order.Locator)
}

// result returns the Epoch for an epoch's counts.
func (s *simulation) result(epoch int) *Epoch {
	for len(s.epochs) <= epoch {
		s.epochs = append(s.epochs, Epoch{Epoch: len(s.epochs)})
	}
	return &s.epochs[epoch]
}

func (s *simulation) run(epoch int) error {
	began := s.now
	s.volume.peak = s.volume.used
	s.stream.begin(epoch)
	s.trainer.begin(epoch)
	s.stream.act()
	for events := 0; !s.trainer.done(); events++ {
		if events%watchEvery == 0 && s.Watch != nil && !s.Watch(epoch, s.trainer.finished, s.trainer.steps) {
			return ErrStopped
		}
		if !s.next() {
			return fmt.Errorf(
				"sim: epoch %d stands still after %.3f s with %d of %d steps done (a fault of the simulator)", epoch,
				s.now, s.trainer.finished, s.trainer.steps)
		}
		s.stream.act()
	}
	r := s.result(epoch)
	r.Samples = s.trainer.samples
	r.ofAll(s.whole(epoch).Len())
	s.follow(math.MaxInt)
	s.sharing.at = 0
	delete(s.orders, epoch)
	r.Seconds = s.now - began
	r.Stall = max(r.Seconds-r.Compute, 0)
	r.Utilisation = min(r.Compute/r.Seconds, 1)
	r.MemoryPeak = s.volume.peak
	return nil
}

// next processes the next event. It reports whether there was one.
func (s *simulation) next() bool {
	if w := s.store.soonest(); w != nil && (len(s.agenda) == 0 || w.turnEnds < s.agenda[0].at) {
		s.now = w.turnEnds
		s.store.turnEnded(w)
		return true
	}
	if len(s.agenda) == 0 {
		return false
	}
	e := s.agenda[0]
	s.agenda, s.now = s.agenda[1:], e.at
	switch e.kind {
	case firstByte:
		s.store.arrived(e.request)
	case stepEnd:
		s.trainer.stepEnded()
	case workerReady:
		s.trainer.advance(e.worker)
	}
	return true
}
