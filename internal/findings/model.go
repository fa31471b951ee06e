package findings

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/shoalfs/shoal/prefetch/order"
	"github.com/shoalfs/shoal/prefetch/sim"
)

// model is a job whose order is known, as `shoal plan` predicts it.
type model struct {
	files         int
	sizes         []int64
	job           sim.Job
	store         sim.Store
	cache, memory int64
}

const (
	// simulated bounds the samples of a run: larger datasets are scaled down, with their cache and memory.
	simulated = 50_000
	leastData = 64 << 20 // bytes of memory for samples that the model needs for any file
)

// run returns the files/s of an epoch that fetches everything, and of the next one, and what bounds the first.
func (m model) run() (cold, warm float64, bound string, err error) {
	sizes := slices.DeleteFunc(slices.Clone(m.sizes), func(n int64) bool { return n <= 0 })
	if len(sizes) == 0 {
		return 0, 0, "", nil
	}
	samples := min(m.files, simulated)
	scale := float64(samples) / float64(m.files)
	m.job.Batch = min(m.job.Batch, samples)
	c := sim.Config{
		Samples: samples, Sizes: sim.Files(sizes),
		Order: func(epoch int) order.Order { return order.Uniform(samples, 0, epoch) },
		Job:   m.job, Store: m.store, Epochs: 2,
		CacheBytes: int64(float64(m.cache) * scale), Memory: max(int64(float64(m.memory)*scale), leastData),
	}
	epochs, err := sim.Run(c)
	if err != nil {
		return 0, 0, "", fmt.Errorf("the job cannot be simulated: %w", err)
	}
	rate := func(e sim.Epoch) float64 { return float64(e.Samples) / e.Seconds }
	bound = c.Limits(epochs[0]).Binding().Name
	return rate(epochs[0]), rate(epochs[1]), cmp.Or(ofTrainer[bound], "the store's "+bound), nil
}

// ofTrainer are the limits that are not the store's.
var ofTrainer = map[string]string{"reading": "the workers' own time", "compute": "the trainer's step"}
