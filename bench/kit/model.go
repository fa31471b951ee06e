package kit

import (
	"context"
	"fmt"
	"time"

	"github.com/shoalfs/shoal/accelerator"
	"github.com/shoalfs/shoal/prefetch"
	"github.com/shoalfs/shoal/prefetch/order"
	"github.com/shoalfs/shoal/prefetch/sim"
	"github.com/shoalfs/shoal/rig/testbed"
)

// Work is what this machine itself adds to a run, in seconds: measured, since no model knows it.
type Work struct {
	Read  float64 `json:"read"`  // a worker's time over one sample that is on disk
	Fetch float64 `json:"fetch"` // the machine's time, all processes together, over one request
}

// Calibrate measures Work for the dataset of a configuration: one worker reads all of it from disk, then all
// of it comes from a store that is near and wide, into eight.
func Calibrate(ctx context.Context, b *testbed.Bed, c testbed.Config) (w Work, err error) {
	c.Order, c.Told, c.Epochs, c.Bandwidth, c.Latency, c.Packed = "torch:seed=1", "", 1, testbed.Bandwidth{}, 0, false
	for _, side := range []struct {
		cached  float64
		workers int
		into    *float64
	}{{1, 1, &w.Read}, {0, 8, &w.Fetch}} {
		c.Cached = side.cached
		c.Job = accelerator.Job{Accelerators: 1, Batch: max(c.Dataset.Samples/64, 1), Step: time.Microsecond, Workers: side.workers, Prefetch: 2 * side.workers}
		r, err := b.Measure(ctx, c, func(string, int, int) {})
		if err != nil {
			return w, fmt.Errorf("calibrate %s, %.0f%% cached: %w", c.Dataset.Prefix(), 100*side.cached, err)
		}
		*side.into = Whole(r.Epochs[0].Epoch).Seconds / float64(r.Epochs[0].Samples)
	}
	w.Fetch /= float64(max(sizes{c.Dataset}.Extents(0), 1))
	return w, nil
}

// Whole counts the wait for the first batch as a stall, as package sim does.
func Whole(e accelerator.Epoch) accelerator.Epoch {
	e.Seconds += e.FirstBatch
	e.Stall += e.FirstBatch
	e.Utilisation = e.Compute / e.Seconds
	return e
}

// extentBytes is how much of a file the daemon fetches at a time.
const extentBytes = 4 << 20

// sizes are those of a testbed's dataset.
type sizes struct{ testbed.Dataset }

func (s sizes) Extents(sample int) int {
	return int((s.SizeOf(sample) + extentBytes - 1) / extentBytes)
}

func (s sizes) ExtentBytes(sample, extent int) int64 {
	return min(extentBytes, s.SizeOf(sample)-int64(extent)*extentBytes)
}

// shards lie as `shoal pack` lays them, in a random order, which is not the same one.
type shards struct {
	rank, at []int
	object   []int
	off, end []int64
}

// shardBytes is the shard size of a testbed's packed datasets; tarBlock what tar rounds to.
const (
	shardBytes = 16 << 20
	tarBlock   = 512
)

func pack(d testbed.Dataset) *shards {
	s := &shards{rank: make([]int, d.Samples)}
	random := order.Uniform(d.Samples, 1, 0)
	object, off := 0, int64(0)
	for r := range d.Samples {
		file := random.At(r)
		size := d.SizeOf(file)
		if off > 0 && off+tarBlock+size > shardBytes {
			object, off = object+1, 0
		}
		s.rank[file] = r
		s.at = append(s.at, file)
		s.object = append(s.object, object)
		s.off = append(s.off, off+tarBlock)
		s.end = append(s.end, off+tarBlock+size)
		off += tarBlock + (size+tarBlock-1)/tarBlock*tarBlock
	}
	return s
}

func (s *shards) Len() int                         { return len(s.at) }
func (s *shards) Rank(file int) int                { return s.rank[file] }
func (s *shards) At(rank int) int                  { return s.at[rank] }
func (s *shards) Extent(r int) (int, int64, int64) { return s.object[r], s.off[r], s.end[r] }

// Connections is what a daemon has in flight unless it is told otherwise.
const Connections = 512

// Prediction is what the simulator says of an epoch.
type Prediction struct {
	Utilisation     float64
	Requests, Bytes float64
}

// predictions is how many simulations with other latencies and kept sets are averaged: an epoch of a few seconds
// is a short one.
const predictions = 5

// Predict simulates a configuration that was measured, with what was kept, the bandwidth and the memory that
// it had, and returns a prediction for each epoch.
func Predict(c testbed.Config, r testbed.Result, w Work, p sim.Policy) ([]Prediction, error) {
	spec, err := order.Parse(c.Order)
	if err != nil {
		return nil, err
	}
	cfg := sim.Config{
		Order: func(epoch int) order.Order {
			o, err := spec.Order(c.Dataset.Samples, epoch)
			if err != nil {
				return nil
			}
			return o
		},
		Sizes: sizes{c.Dataset},
		Job: sim.Job{
			Accelerators: c.Job.Accelerators, Batch: c.Job.Batch, Workers: c.Job.Workers, Step: c.Job.Step.Seconds(),
			Prefetch: c.Job.Prefetch, Read: w.Read,
		},
		Store: sim.Store{
			Bandwidth: r.Bandwidth, Latency: c.Latency.Seconds(), LatencySigma: c.Sigma, Connections: Connections,
			CPU: w.Fetch,
		},
		CacheBytes: int64(r.Kept * float64(r.Bytes)), Memory: r.Memory, Policy: p, Epochs: c.Epochs, Warm: true,
	}
	if c.Connections > 0 {
		cfg.Connections = c.Connections
	}
	if c.Packed {
		cfg.Places = pack(c.Dataset)
	}
	mean := make([]Prediction, c.Epochs)
	for seed := range uint64(predictions) {
		cfg.Seed = seed + 1
		cfg.Key = func(sample int) uint64 { return seed<<32 | uint64(sample) }
		if c.Packed {
			cfg.Key = nil // by runs of a shard
		}
		epochs, err := sim.Run(cfg)
		if err != nil {
			return nil, err
		}
		for i, e := range epochs {
			mean[i].Utilisation += e.Utilisation / predictions
			mean[i].Requests += float64(e.Requests) / predictions
			mean[i].Bytes += float64(e.Bytes) / predictions
		}
	}
	return mean, nil
}

var _ prefetch.Places = (*shards)(nil)
