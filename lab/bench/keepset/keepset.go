// Package keepset is the benchmark of that name.
package keepset

import (
	"context"
	"flag"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/cache/objstore/stores"
	"github.com/shoalfs/shoal/internal/progress"
	"github.com/shoalfs/shoal/internal/workload"
	"github.com/shoalfs/shoal/lab/accelerator"
	"github.com/shoalfs/shoal/lab/bench/kit"
	"github.com/shoalfs/shoal/lab/rig/proxy"
	"github.com/shoalfs/shoal/lab/rig/testbed"
	"github.com/shoalfs/shoal/prefetch/order"
	"github.com/shoalfs/shoal/prefetch/sim"
)

const (
	latency = 30 * time.Millisecond
	sigma   = 0.3
	passes  = 2 // epochs, of which the second is reported
	memory  = 112 << 20
	spec    = kit.Cold
	// connections that the daemon and the other caches may use; a sixteenth of it is enough here.
	connections = 128
)

// outcome is one run as it is kept.
type outcome struct {
	Utilisation float64   `json:"utilisation"`
	Rate        float64   `json:"samples_per_second"`
	Requests    int64     `json:"requests"`
	Bytes       int64     `json:"remote_bytes"`
	Stall       float64   `json:"stall_seconds"`
	Kept        float64   `json:"kept"`
	Dataset     int64     `json:"dataset_bytes"`
	Bandwidth   float64   `json:"bandwidth"`
	Memory      int64     `json:"memory"`
	Busy        float64   `json:"busy"`
	Work        *kit.Work `json:"work,omitempty"`
}

type bench struct {
	*kit.Kit
	bed   *testbed.Bed
	done  *kit.Records[outcome]
	bars  *progress.Printer
	shape workload.Shape
	scale float64
	steps int // of an epoch
}

// Bench shows what the choice of what is kept is worth: emulated accelerators over a real mount with
// Shoal's kept set, and beside it the same trace, from the same store behind the same proxy, as far
// prefetched, through caches that evict as LRU and as Belady's optimal policy do; and what the simulator says
// of all three.
//
// The other caches are in this process (cached, policy): the daemon has no such policies. Runs are kept as
// lines of JSON in the work folder and not made again; -fresh begins anew.
func Bench(flags *flag.FlagSet) func(k *kit.Kit) error {
	name := flags.String("workload", "retinanet-b200", "shape of the accelerator")
	scale := flags.Float64("scale", 2, "steps are this many times as long as the real ones")
	fractions := flags.String("cached", "0.5,0.25,0.75,0.9", "parts of the dataset that are cached")
	factors := flags.String("bandwidth", "1.05,1.1", "multiples of what the rest needs")
	steps := flags.Int("steps", 200, "steps of an epoch; the more, the less of the dataset fits the memory ahead, which helps Belady")
	fresh := flags.Bool("fresh", false, "forget the runs of the work folder")
	return func(k *kit.Kit) error {
		b := &bench{Kit: k, bars: progress.New(os.Stderr), scale: *scale, steps: *steps}
		return b.run(*name, *fractions, *factors, *fresh)
	}
}

func numbers(text string) (list []float64, err error) {
	for word := range strings.SplitSeq(text, ",") {
		var v float64
		if _, err := fmt.Sscan(word, &v); err != nil {
			return nil, fmt.Errorf("%q is no number", word)
		}
		list = append(list, v)
	}
	return list, nil
}

func (b *bench) run(name, fractions, factors string, fresh bool) (err error) {
	var ok bool
	if b.shape, ok = workload.Find(name); !ok {
		return fmt.Errorf("there is no workload %q", name)
	}
	b.shape.Step = time.Duration(float64(b.shape.Step) * b.scale)
	cached, err := numbers(fractions)
	if err != nil {
		return err
	}
	speeds, err := numbers(factors)
	if err != nil {
		return err
	}
	if b.done, err = kit.OpenRecords[outcome](filepath.Join(b.Dir, "runs.jsonl"), fresh); err != nil {
		return err
	}
	b.Header("The kept set beside LRU and Belady")
	if b.bed, err = testbed.Start(b.Ctx, filepath.Join(b.Dir, "bed"), b.Shoal, b.Self, "s3proxy"); err != nil {
		return err
	}
	defer b.bed.Close()
	b.head()
	for _, f := range cached {
		for _, x := range speeds {
			if err := b.row(b.config(f, x)); err != nil {
				return fmt.Errorf("f %g, bandwidth %gx: %w", f, x, err)
			}
		}
	}
	b.Say("\nTargets: kept at least 99%%; LRU and Belady, at f = 0.5, 65 to 75%%.")
	return nil
}

func (b *bench) config(f, x float64) testbed.Config {
	return testbed.Config{
		Dataset: testbed.Dataset{Name: b.shape.Name, Samples: b.steps * b.shape.Batch, Size: b.shape.SampleBytes, Sigma: b.shape.SampleSigma},
		Job:     accelerator.Job{Accelerators: 1, Batch: b.shape.Batch, Step: b.shape.Step, Workers: 4, Prefetch: 8},
		Cached:  f, Bandwidth: testbed.Bandwidth{Times: x}, Latency: latency, Sigma: sigma, Memory: memory, Connections: connections,
		Order: spec, Epochs: passes,
	}
}

func (b *bench) head() {
	b.Say("%s, MLPerf-shaped (no MLPerf result): %d × %d B every %v, 1/%g of the real rate; %d samples; %v away; %d MiB of memory for the daemon.",
		b.shape.Name, b.shape.Batch, b.shape.SampleBytes, b.shape.Step, b.scale, b.steps*b.shape.Batch, latency, memory>>20)
	b.Say("Utilisation of the second epoch, its first batch's wait included. `cached` and `bandwidth` as in the first column's run: the other")
	b.Say("caches get as many bytes, the same bandwidth, connections and memory ahead; they are in the bench's own process, in memory.\n")
	b.Say("| cached | bandwidth | | utilisation | simulated | samples/s | GETs | remote MB | stalled | cores busy |")
	b.Say("| ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
}

// row runs one configuration under all policies.
func (b *bench) row(c testbed.Config) error {
	work, err := b.once("calibration "+c.Dataset.Prefix(), func(func(string, int, int)) (outcome, error) {
		w, err := kit.Calibrate(b.Ctx, b.bed, c)
		return outcome{Work: &w}, err
	})
	if err != nil {
		return err
	}
	name := fmt.Sprintf("%s %v f %g x %g", c.Dataset.Prefix(), c.Job.Step, c.Cached, c.Bandwidth.Times)
	kept, err := b.once(name+" keep", func(show func(string, int, int)) (outcome, error) {
		r, err := b.bed.Measure(b.Ctx, c, show)
		if err != nil {
			return outcome{}, err
		}
		o := outcomeOf(r.Epochs[passes-1])
		o.Kept, o.Dataset, o.Bandwidth, o.Memory, o.Busy = r.Kept, r.Bytes, r.Bandwidth, r.Memory, r.Busy
		return o, nil
	})
	if err != nil {
		return err
	}
	for _, p := range []struct {
		label  string
		policy sim.Policy
		make   func(capacity int64, size func(int) int64) policy
	}{
		{"**kept set**", sim.Keep, nil},
		{"LRU", sim.LRU, func(n int64, size func(int) int64) policy { return newLRU(n, size) }},
		{"Belady", sim.Belady, func(n int64, size func(int) int64) policy { return newBelady(n, size) }},
	} {
		o := kept
		if p.make != nil {
			if o, err = b.once(name+" "+p.policy.String(), func(show func(string, int, int)) (outcome, error) { return b.other(c, kept, p.make, show) }); err != nil {
				return err
			}
		}
		predicted, err := kit.Predict(b.Ctx, b.bed, c, testbed.Result{Bytes: kept.Dataset, Kept: kept.Kept, Bandwidth: kept.Bandwidth, Memory: kept.Memory}, *work.Work, p.policy)
		if err != nil {
			return err
		}
		b.Say("| %.3f | %.2f | %s | %.1f%% | %.1f%% | %.0f | %d | %.0f | %.2f s | %.0f%% |", kept.Kept, c.Bandwidth.Times, p.label, 100*o.Utilisation,
			100*predicted[passes-1].Utilisation(), o.Rate, o.Requests, float64(o.Bytes)/1e6, o.Stall, 100*o.Busy)
	}
	return nil
}

// once runs what has no record yet.
func (b *bench) once(name string, run func(show func(stage string, done, total int)) (outcome, error)) (outcome, error) {
	if o, ok := b.done.Get(name); ok {
		return o, nil
	}
	bar := b.bars.Start(name, 0)
	o, err := run(func(stage string, done, total int) { bar.Note(fmt.Sprintf("%s %d/%d", stage, done, total)) })
	if err != nil {
		bar.Done("failed")
		return o, err
	}
	bar.Done(fmt.Sprintf("utilisation %.1f%%", 100*o.Utilisation))
	return o, b.done.Add(name, o)
}

func outcomeOf(e testbed.Epoch) outcome {
	w := kit.Whole(e.Epoch)
	return outcome{Utilisation: w.Utilisation, Rate: w.SamplesPerSecond(), Requests: e.Requests, Bytes: e.RemoteBytes, Stall: w.Stall}
}

// other runs the trace of a configuration through a cache with another policy.
func (b *bench) other(c testbed.Config, kept outcome, make func(int64, func(int) int64) policy, show func(string, int, int)) (o outcome, err error) {
	if err := b.bed.Far(b.Ctx, proxy.Options{}); err != nil {
		return o, err
	}
	get, err := b.getter(b.Ctx, c.Dataset)
	if err != nil {
		return o, err
	}
	capacity := int64(kept.Kept * float64(kept.Dataset))
	orders, err := traceOf(c.Order, c.Dataset.Samples, passes+2) // the head of the next, and Belady knows what comes after
	if err != nil {
		return o, err
	}
	cache := newCached(orders, make(capacity, c.Dataset.SizeOf), c.Dataset.SizeOf, get, c.Connections*7/8, kept.Memory*7/8)
	show(testbed.Warming, 0, 1)
	all := samplesOf(order.Uniform(c.Dataset.Samples, 11, 0))
	if err := cache.warm(b.Ctx, all[:int(math.Round(kept.Kept*float64(len(all))))]); err != nil {
		return o, err
	}
	if err := b.bed.Far(b.Ctx, proxy.Options{Latency: c.Latency, Sigma: c.Sigma, Bandwidth: int64(kept.Bandwidth), Seed: 1}); err != nil {
		return o, err
	}
	cache.start(b.Ctx)
	defer cache.close()
	busy := testbed.Busy()
	for e := range passes {
		gets, bytes := cache.counts()
		r, err := c.Job.Run(b.Ctx, c.Dataset.Samples, epoch{cache, e}, func(done, total int) { show(testbed.Running, done, total) })
		if err != nil {
			return o, err
		}
		allGets, allBytes := cache.counts()
		o = outcomeOf(testbed.Epoch{Number: e, Epoch: r, Requests: allGets - gets, RemoteBytes: allBytes - bytes})
	}
	o.Busy = busy()
	return o, nil
}

func traceOf(text string, samples, epochs int) (list []order.Locator, err error) {
	s, err := order.Parse(text)
	if err != nil {
		return nil, err
	}
	for e := range epochs {
		o, err := s.Order(samples, e)
		if err != nil {
			return nil, err
		}
		list = append(list, order.Index(o))
	}
	return list, nil
}

func samplesOf(o order.Order) (list []int) {
	for pos := range o.Len() {
		list = append(list, o.At(pos))
	}
	return list
}

// getter returns a function that GETs a sample as the daemon does: by the same store, with retries.
func (b *bench) getter(ctx context.Context, d testbed.Dataset) (func(context.Context, int) ([]byte, error), error) {
	getenv := func(name string) string {
		for _, e := range slices.Backward(b.bed.Env) { // the last one counts
			if k, v, _ := strings.Cut(e, "="); k == name {
				return v
			}
		}
		return ""
	}
	store, src, err := stores.Open(ctx, d.Source(), stores.Options{Getenv: getenv})
	if err != nil {
		return nil, err
	}
	reader := objstore.Retry(store, objstore.RetryPolicy{})
	objects := map[string]objstore.Object{}
	for o, err := range reader.List(ctx, src.Prefix) {
		if err != nil {
			return nil, err
		}
		objects[strings.TrimPrefix(o.Key, src.Prefix)] = o
	}
	return func(ctx context.Context, sample int) ([]byte, error) {
		o, ok := objects[d.Path(sample)]
		if !ok {
			return nil, fmt.Errorf("%s is not in the store", d.Path(sample))
		}
		p := make([]byte, o.Size)
		return p, reader.ReadAt(ctx, o, p, 0)
	}, nil
}
