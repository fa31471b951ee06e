package predict

import (
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/shoalfs/shoal/lab/accelerator"
	"github.com/shoalfs/shoal/lab/rig/testbed"
)

// What all configurations share. The rates are low enough for two cores to hold with half to spare, the
// datasets large beside the 32 MiB of the smallest daemon, and an epoch takes 5 to 6 seconds.
const (
	// epochs of a run. The first, which begins with an empty ring, is not compared. One alone is a few seconds
	// and depends on how far ahead the prefetcher happens to be at its two ends.
	epochs = 4
	memory = 112 << 20
	sigma  = 0.3
)

// base is the configuration that the others change: 192 samples/s of 256 KiB.
func base() testbed.Config {
	return testbed.Config{
		Dataset:     dataset(1024, 256<<10),
		Job:         accelerator.Job{Accelerators: 1, Batch: 16, Step: 83 * time.Millisecond, Workers: 4, Prefetch: 8},
		Cached:      0.5,
		Bandwidth:   testbed.Bandwidth{Times: 1.1},
		Latency:     30 * time.Millisecond,
		Sigma:       sigma,
		Memory:      memory,
		Connections: 64,
		Order:       "torch:seed=7",
		Epochs:      epochs,
	}
}

func dataset(samples int, size int64) testbed.Dataset {
	return testbed.Dataset{Name: "predict", Samples: samples, Size: size}
}

// grid returns the configurations, those of the quick mode first.
func grid(quick bool) (list []testbed.Config) {
	with := func(change func(*testbed.Config)) {
		c := base()
		change(&c)
		list = append(list, c)
	}
	for _, f := range []float64{0, 0.25, 0.5, 0.75, 0.9} {
		for _, x := range []float64{0.7, 0.9, 1.05, 1.1, 1.3} {
			if quick && (f == 0.25 || f == 0.75 || x == 0.9 || x == 1.1) {
				continue
			}
			with(func(c *testbed.Config) { c.Cached, c.Bandwidth.Times = f, x })
		}
	}
	// Where latency and connections bind, and where they do not.
	for _, latency := range []time.Duration{5, 100} {
		for _, connections := range []int{4, 16, 128} {
			for _, f := range []float64{0.25, 0.5} {
				if quick && f == 0.25 {
					continue
				}
				with(func(c *testbed.Config) {
					c.Latency, c.Connections, c.Cached, c.Bandwidth = latency*time.Millisecond, connections, f, testbed.Bandwidth{}
				})
			}
		}
	}
	// Small and large samples: the smallest for the heads of the answers, which share the line; the largest are of three
	// requests each.
	for _, s := range []struct {
		samples, batch int
		size           int64
		step           time.Duration
	}{
		{4096, 128, 16 << 10, 170 * time.Millisecond},
		{1536, 32, 64 << 10, 110 * time.Millisecond},
		{256, 4, 1 << 20, 83 * time.Millisecond},
		{40, 1, 9 << 20, 140 * time.Millisecond},
	} {
		for _, f := range []float64{0, 0.5} {
			for _, x := range []float64{0.8, 1.1} {
				if quick && f == 0 {
					continue
				}
				with(func(c *testbed.Config) {
					c.Dataset, c.Job.Batch, c.Job.Step = dataset(s.samples, s.size), s.batch, s.step
					c.Cached, c.Bandwidth.Times = f, x
					if s.size > 4<<20 {
						c.Memory = 256 << 20 // an extent takes an eighth of it at most, and a batch has to fit
					}
				})
			}
		}
	}
	// Other orders, and more accelerators.
	for _, x := range []float64{0.8, 1.1} {
		with(func(c *testbed.Config) { c.Order, c.Bandwidth.Times = "uniform:seed=3", x })
		with(func(c *testbed.Config) { c.Order, c.Bandwidth.Times = "sequential", x })
		with(func(c *testbed.Config) {
			c.Job.Accelerators, c.Job.Batch, c.Bandwidth.Times = 4, 4, x
			c.Order = "torch:seed=7,world=4,rank=0-3"
		})
	}
	// From shards.
	for _, f := range []float64{0, 0.5} {
		for _, x := range []float64{0.8, 1.1} {
			if quick && f == 0 {
				continue
			}
			with(func(c *testbed.Config) { c.Packed, c.Cached, c.Bandwidth.Times = true, f, x })
		}
	}
	return list
}

// drawn returns n configurations drawn at random from the ranges of the grid's dimensions, the same for equal seeds. They
// ask no more of the machine than the grid does: 192 samples and 50 MB a second at most, epochs of about 5.5 seconds.
func drawn(n int, seed uint64) (list []testbed.Config) {
	r := rand.New(rand.NewPCG(seed, 0))
	between := func(lo, hi float64) float64 { return math.Round(100*(lo+(hi-lo)*r.Float64())) / 100 }
	power := func(lo, hi float64) float64 { return lo * math.Pow(hi/lo, r.Float64()) } // each doubling is equally likely
	for range n {
		c := base()
		size := int64(power(64, 9<<10)) << 10
		rate := min(192, 50e6/float64(size)) // samples a second
		c.Job.Accelerators = []int{1, 4}[r.IntN(2)]
		global := max(int(rate*power(0.08, 0.17)), 1) // samples a step
		c.Job.Batch = (global + c.Job.Accelerators - 1) / c.Job.Accelerators
		global = c.Job.Batch * c.Job.Accelerators
		c.Job.Step = time.Duration(1e3*float64(global)/rate) * time.Millisecond
		c.Dataset = dataset(int(5.5/c.Job.Step.Seconds())*global, size)
		if size > 4<<20 {
			c.Memory = 256 << 20
		}
		c.Packed = size <= 256<<10 && r.IntN(4) == 0
		c.Cached, c.Bandwidth.Times = between(0.15, 0.9), between(0.7, 1.3) // a smaller cache of so little data keeps nothing
		c.Latency, c.Connections = time.Duration(power(5, 100))*time.Millisecond, int(power(16, 128))
		c.Order = []string{"sequential", "uniform:seed=%d", "torch:seed=%d"}[r.IntN(3)]
		if strings.Contains(c.Order, "%") {
			c.Order = fmt.Sprintf(c.Order, r.IntN(1000))
		}
		list = append(list, c)
	}
	return list
}

// name tells a configuration in a line. It is unique.
func name(c testbed.Config) string {
	packed := ""
	if c.Packed {
		packed = " packed"
	}
	return fmt.Sprintf("%d × %s%s, f %g, %s, %v, %d conns, %d × %d every %v, %s", c.Dataset.Samples, kib(c.Dataset.Size), packed, c.Cached,
		speed(c), c.Latency, c.Connections, c.Job.Accelerators, c.Job.Batch, c.Job.Step, c.Order)
}

func speed(c testbed.Config) string {
	if c.Bandwidth.Times > 0 {
		return fmt.Sprintf("%gx", c.Bandwidth.Times)
	}
	return "any"
}

func kib(n int64) string {
	if n >= 1<<20 {
		return fmt.Sprintf("%d MiB", n>>20)
	}
	return fmt.Sprintf("%d KiB", n>>10)
}
