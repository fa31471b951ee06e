package main

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	humanize "github.com/dustin/go-humanize"
	"github.com/spf13/cobra"

	"github.com/shoalfs/shoal/internal/cli"
	"github.com/shoalfs/shoal/internal/progress"
	"github.com/shoalfs/shoal/internal/workload"
	"github.com/shoalfs/shoal/lab/accelerator"
	"github.com/shoalfs/shoal/lab/rig/testbed"
	"github.com/shoalfs/shoal/prefetch/order"
)

// benchOptions are the flags of the verb.
type benchOptions struct {
	mount, workDir                  string
	batch, accelerators             int
	sampleSize, datasetSize, memory cli.Size
	stepTime                        time.Duration
	scale, cached                   float64
	workers, ahead                  int
	epochs, steps                   int
	order, told                     string
	line                            lineOptions
	connections                     int // of the daemon
	asJSON                          bool
}

// lineOptions say how far the store of an own rig is.
type lineOptions struct {
	bandwidth lineSpeed
	latency   time.Duration
	sigma     float64
}

// lineSpeed is a flag value: 1.1x, 40MB/s or none.
type lineSpeed struct{ testbed.Bandwidth }

func (b *lineSpeed) Type() string { return "bandwidth" }
func (b *lineSpeed) String() string {
	switch {
	case b.Times > 0:
		return fmt.Sprintf("%gx", b.Times)
	case b.Absolute > 0:
		return humanize.Bytes(uint64(b.Absolute))
	}
	return "none"
}

func (b *lineSpeed) Set(text string) error {
	if text == "none" {
		b.Bandwidth = testbed.Bandwidth{}
		return nil
	}
	if times, ok := strings.CutSuffix(text, "x"); ok {
		v, err := strconv.ParseFloat(times, 64)
		if err == nil && v > 0 && !math.IsInf(v, 0) {
			b.Bandwidth = testbed.Bandwidth{Times: v}
			return nil
		}
	} else if n, err := humanize.ParseBytes(strings.TrimSuffix(text, "/s")); err == nil && n > 0 && n < 1<<50 {
		b.Bandwidth = testbed.Bandwidth{Absolute: float64(n)}
		return nil
	}
	return fmt.Errorf("%q is not a bandwidth (write 1.1x, 40MB/s or none)", text)
}

// benchReport is what `shoal-lab bench --json` prints (docs/bench.md).
type benchReport struct {
	Version int `json:"version"` // of this schema
	benchJob
	Order        string        `json:"order"`
	Told         string        `json:"told"`            // what the mount was told; "" for a mount that was there
	Mount        string        `json:"mount,omitempty"` // that was there
	Samples      int           `json:"samples"`
	DatasetBytes int64         `json:"dataset_bytes"`
	Cached       float64       `json:"cached"`          // part of the dataset on disk at the start
	Demand       float64       `json:"demand"`          // B/s without a stall
	Memory       int64         `json:"memory_for_data"` // of the daemon
	Store        *far          `json:"store,omitempty"` // null for a mount that was there
	Bound        float64       `json:"bound,omitempty"` // highest utilisation that the store allows
	Busy         float64       `json:"busy,omitempty"`  // part of all cores that was busy
	CPU          float64       `json:"cpu,omitempty"`   // part of all cores that the rig used
	Utilisation  float64       `json:"utilisation"`     // of all epochs together
	Rate         float64       `json:"samples_per_second"`
	Epochs       []epochReport `json:"epochs"`
}

// benchJob is what the accelerators did.
type benchJob struct {
	Workload     string  `json:"workload"`
	Cores        int     `json:"cores"`
	Accelerators int     `json:"accelerators"`
	Batch        int     `json:"batch"`
	SampleBytes  float64 `json:"sample_bytes"` // mean
	StepSeconds  float64 `json:"step_seconds"` // as run, scaled
	Scale        float64 `json:"scale"`        // the real accelerator takes this many times the bytes a second
	Shrink       float64 `json:"shrink"`       // the real samples are this many times as large
	Workers      int     `json:"workers"`
	Ahead        int     `json:"batches_ahead"`
}

// far is the store of a benchmark's own rig.
type far struct {
	Latency   float64 `json:"latency_seconds"`
	Sigma     float64 `json:"latency_sigma"`
	Bandwidth float64 `json:"bandwidth"` // B/s; 0 is no limit
}

type epochReport struct {
	testbed.Epoch
	Stalled  int     `json:"stalled_steps"`
	Rate     float64 `json:"samples_per_second"`
	StallP50 float64 `json:"stall_p50_seconds"`
	StallP99 float64 `json:"stall_p99_seconds"`
	StallMax float64 `json:"stall_max_seconds"`
}

func benchCommand() *cobra.Command {
	o := benchOptions{datasetSize: 2 << 30}
	o.line.bandwidth.Times = 1.1
	names := workload.Names()
	c := &cobra.Command{
		Use:   "bench [WORKLOAD]",
		Short: "Feed emulated accelerators, and say how busy they are",
		Long: `Emulates accelerators that read a dataset through a mount: each takes a batch, computes for as long as
the real one would (it sleeps), and waits for the others. What counts is utilisation, the part of the time
in which they compute. The workloads are MLPerf-shaped: sizes and times are those of MLPerf Storage, the
results are not MLPerf results. They are ` + strings.Join(names, ", ") + `,
or whatever --batch, --sample-size and --step-time say.

Without --mount it brings its own rig: an S3 server with objects of the workload's size, a proxy that makes
it as far and as narrow as --latency and --bandwidth say, and a daemon. For that it needs fuse3 and
versitygw, and says how to get what is missing. A machine that is too small to do all of that at the real
rate is helped by slower steps (--scale), which is said.`,
		Example: `  # half of the dataset cached, the store 10% faster than what the other half needs
  shoal-lab bench retinanet-b200 --cached 0.5 --bandwidth 1.1x
  # a mount that is there, at the real rate, by 8 accelerators
  shoal-lab bench resnet50-h100 --mount /mnt/train --accelerators 8
  # the same mount without being told the order
  shoal-lab bench retinanet-b200 --told none`,
		Args:      cobra.MaximumNArgs(1),
		ValidArgs: names,
		RunE: func(c *cobra.Command, args []string) error {
			shape, err := o.shape(c, args)
			if err != nil {
				return err
			}
			p := progress.New(c.ErrOrStderr())
			var r *benchReport
			if o.mount != "" {
				r, err = o.runMounted(c.Context(), shape, p)
			} else {
				r, err = o.runRig(c.Context(), shape, p)
			}
			if err != nil {
				return err
			}
			if o.asJSON {
				return json.NewEncoder(c.OutOrStdout()).Encode(r)
			}
			return r.print(c.OutOrStdout())
		},
	}
	f := c.Flags()
	f.StringVar(&o.mount, "mount", "", "read this mount, in the order of --order, instead of an own rig")
	f.StringVar(&o.workDir, "work-dir", "shoal-bench", "folder for objects and cache of the own rig")
	f.IntVar(&o.accelerators, "accelerators", 1, "accelerators, which take a batch each and wait for each other")
	f.IntVar(&o.batch, "batch", 0, "samples that one takes a step (default: the workload's)")
	f.Var(&o.sampleSize, "sample-size", "mean size of a sample (default: the workload's)")
	f.DurationVar(&o.stepTime, "step-time", 0, "compute time of a batch (default: the workload's)")
	f.Float64Var(&o.scale, "scale", 0, "make steps this many times as long (default: 1 on a mount, else what this machine can hold)")
	f.IntVar(&o.workers, "workers", 4, "batches that an accelerator's loader reads at a time, a DataLoader's num_workers")
	f.IntVar(&o.ahead, "batches-ahead", 0, "batches that it keeps ready or under way (default: twice --workers)")
	f.IntVar(&o.epochs, "epochs", 2, "epochs")
	f.IntVar(&o.steps, "steps", 0, "steps of an epoch (default: all of a mount; of an own rig, 20 seconds, from 32 to 256)")
	f.StringVar(&o.order, "order", "", "order in which the accelerators read (default: the mount's own; of an own rig, torch:seed=7)")
	f.StringVar(&o.told, "told", "", "--order of the own rig's mount, such as none or auto (default: the order)")
	f.Float64Var(&o.cached, "cached", 0, "part of the dataset that the cache may hold, and holds at the start")
	f.Var(&o.line.bandwidth, "bandwidth", "of the store: a multiple of what the part that is not cached needs (1.1x), bytes a second (40MB/s) or none")
	f.DurationVar(&o.line.latency, "latency", 30*time.Millisecond, "median time of the store to the first byte")
	f.Float64Var(&o.line.sigma, "sigma", 0.3, "standard deviation of the latency's logarithm")
	f.Var(&o.memory, "memory", "of the daemon (default: for 4 steps, at least 128MiB)")
	f.Var(&o.datasetSize, "dataset-size", "most bytes of the own rig's dataset")
	f.IntVar(&o.connections, "connections", 0, "of the daemon (default: its own)")
	f.BoolVar(&o.asJSON, "json", false, "print the versioned JSON (docs/bench.md)")
	return c
}

// shapedJob is a shape as it will be run.
type shapedJob struct {
	workload.Shape
	scale, shrink float64
}

// custom is the workload without a name.
const custom = "custom"

// title names the workload, and what its result is not.
func (r *benchReport) title() string {
	if r.Workload == custom {
		return custom
	}
	return r.Workload + ", MLPerf-shaped, no MLPerf result"
}

// shape is what the arguments say, before anything is scaled.
func (o *benchOptions) shape(c *cobra.Command, args []string) (s workload.Shape, err error) {
	f := c.Flags()
	if len(args) == 1 {
		var ok bool
		if s, ok = workload.Find(args[0]); !ok {
			return s, cli.Usagef("there is no workload %q (see: shoal-lab bench --help)", args[0])
		}
	} else if o.batch == 0 || o.stepTime == 0 || o.sampleSize == 0 && o.mount == "" {
		return s, cli.Usagef("name a workload, or give --batch, --sample-size and --step-time (see: shoal-lab bench --help)")
	} else {
		s.Name = custom
	}
	if f.Changed("batch") {
		s.Batch = o.batch
	}
	if f.Changed("step-time") {
		s.Step = o.stepTime
	}
	if f.Changed("sample-size") {
		s.SampleBytes = int64(o.sampleSize)
	}
	o.ahead = cmp.Or(o.ahead, 2*o.workers)
	switch {
	case s.Batch < 1 || s.Step <= 0 || s.SampleBytes < 0 || s.SampleBytes == 0 && o.mount == "":
		return s, cli.Usagef("--batch, --sample-size and --step-time must be above 0")
	case o.accelerators < 1 || o.workers < 1 || o.ahead < 1 || o.epochs < 1 || o.steps < 0:
		return s, cli.Usagef("--accelerators, --workers, --batches-ahead, --epochs and --steps must be above 0")
	case f.Changed("scale") && !(o.scale > 0 && o.scale <= 1e6):
		return s, cli.Usagef("--scale %g: give a factor above 0, such as 4", o.scale)
	case !(o.cached >= 0 && o.cached <= 1):
		return s, cli.Usagef("--cached %g: give a part from 0 to 1", o.cached)
	case o.line.latency < 0 || !(o.line.sigma >= 0 && o.line.sigma < 10):
		return s, cli.Usagef("--latency and --sigma must not be negative")
	}
	for _, own := range []string{"work-dir", "told", "cached", "bandwidth", "latency", "sigma", "memory", "dataset-size", "connections", "sample-size"} {
		if o.mount != "" && f.Changed(own) {
			return s, cli.Usagef("--%s is for an own rig, not for --mount", own)
		}
	}
	for name, text := range map[string]string{"order": o.order, "told": o.told} {
		spec, err := order.Parse(cmp.Or(text, "sequential"))
		if err == nil {
			err = spec.Check()
		}
		if err == nil && name == "order" && !spec.Computed() {
			err = fmt.Errorf("%s is not an order to read in", text)
		}
		if err != nil {
			return s, cli.Usagef("--%s: %w", name, err)
		}
	}
	return s, nil
}

// ranks adds the accelerators' ranks to an order that says nothing of ranks.
func ranks(text string, n int) (string, error) {
	spec, err := order.Parse(text)
	if err != nil || n == 1 || spec.World() > 1 || !spec.Computed() {
		return text, err
	}
	if spec, err = spec.With("world", strconv.Itoa(n)); err == nil {
		spec, err = spec.With("rank", order.Ranks{First: 0, Last: n - 1}.String())
	}
	return spec.String(), err
}

func (o *benchOptions) job(w shapedJob) accelerator.Job {
	return accelerator.Job{Accelerators: o.accelerators, Batch: w.Batch, Step: w.Step, Workers: o.workers, Prefetch: o.ahead}
}

// runMounted benches a mount that is there.
func (o *benchOptions) runMounted(ctx context.Context, s workload.Shape, p *progress.Printer) (*benchReport, error) {
	self, err := shoal()
	if err != nil {
		return nil, err
	}
	stats, err := testbed.ReadStats(o.mount)
	if err != nil {
		return nil, err
	}
	if o.order == "" {
		if spec, err := order.Parse(stats.Order.Spec); err != nil || !spec.Computed() {
			return nil, cli.Usagef("--order: the mount has none (it has %q): give one, such as torch:seed=7", stats.Order.Spec)
		}
		o.order = stats.Order.Spec
	}
	spec, err := order.Parse(o.order)
	if err != nil {
		return nil, cli.Usage(err)
	}
	w := shapedJob{Shape: s, scale: cmp.Or(o.scale, 1), shrink: 1}
	w.Step = time.Duration(float64(s.Step) * w.scale)
	w.SampleBytes = stats.Bytes / int64(max(stats.Files, 1))
	r := o.report(w)
	r.Mount, r.Order, r.Samples, r.DatasetBytes, r.Memory = o.mount, o.order, stats.Samples, stats.Bytes, stats.Memory.Limit
	r.Cached = stats.Kept()
	pass := testbed.Pass{
		Mount: o.mount, Job: o.job(w), First: max(spec.Epoch(), stats.Order.Epoch), Epochs: o.epochs, Steps: o.steps,
		Paths: func(ctx context.Context, epoch int) ([]string, error) {
			return testbed.Paths(ctx, self, o.mount, o.order, epoch)
		},
	}
	if o.order == stats.Order.Spec && stats.Order.State == "finished" {
		pass.First++
	}
	show := stages{p: p}
	defer show.end()
	epochs, err := pass.Run(ctx, func(_, done, steps int) { show.set(testbed.Running, done, steps) })
	if err != nil {
		return nil, err
	}
	r.add(epochs)
	return r, nil
}

// Of an own rig.
const (
	rigEpoch    = 20 * time.Second // length of an epoch
	fewestSteps = 32               // of an epoch: fewer say little about the steady state
	mostSteps   = 256
	memorySteps = 4 // whose samples fit the daemon's memory
)

// size makes the workload small enough for this machine's disk and cores, and counts the steps of an epoch.
func (o *benchOptions) size(s workload.Shape) (w shapedJob, steps int) {
	w = shapedJob{Shape: s, scale: cmp.Or(o.scale, 1), shrink: 1}
	perStep := float64(o.accelerators * s.Batch)
	least := cmp.Or(o.steps, fewestSteps)
	if most := float64(o.datasetSize) / perStep / float64(least); float64(s.SampleBytes) > most {
		w.shrink = math.Ceil(float64(s.SampleBytes) / most)
		w.SampleBytes = int64(float64(s.SampleBytes) / w.shrink)
	}
	if o.scale == 0 {
		w.scale = math.Ceil(rigCost(o.accelerators, w.Shape, o.cached) / (holdable * float64(runtime.NumCPU())))
	}
	w.Step = time.Duration(float64(s.Step) * w.scale)
	steps = cmp.Or(o.steps, min(max(int(rigEpoch/w.Step), fewestSteps), mostSteps))
	return w, max(min(steps, int(float64(o.datasetSize)/perStep/float64(w.SampleBytes))), 1)
}

// Processor time that store, proxy, daemon and accelerators together take: for a sample read through the
// mount, for one that has to be fetched as well, and for each byte of the two. Measured by this verb (cpu in
// its report) with samples of 8 KB and 323 KB, cached wholly and not at all, on 2 cores of an AMD EPYC,
// 2026-11-21.
const (
	costRead      = 150e-6
	costReadByte  = 1e-9
	costFetch     = 450e-6
	costFetchByte = 2.5e-9
	// holdable is the part of the cores that the rig may take by that count, so that hardly a reader waits for a core.
	holdable = 0.25
)

// rigCost returns the cores that the rig takes at the real rate.
func rigCost(accelerators int, s workload.Shape, cached float64) float64 {
	rate, size := float64(accelerators*s.Batch)/s.Step.Seconds(), float64(s.SampleBytes)
	return rate * (costRead + size*costReadByte + (1-cached)*(costFetch+size*costFetchByte))
}

// runRig brings a store of its own, and a mount.
func (o *benchOptions) runRig(ctx context.Context, s workload.Shape, p *progress.Printer) (*benchReport, error) {
	self, err := shoal()
	if err != nil {
		return nil, err
	}
	proxy, err := proxyOf()
	if err != nil {
		return nil, err
	}
	if o.order, err = ranks(cmp.Or(o.order, "torch:seed=7"), o.accelerators); err != nil {
		return nil, cli.Usage(err)
	}
	w, steps := o.size(s)
	c := testbed.Config{
		Dataset: testbed.Dataset{Name: s.Name, Samples: steps * w.Batch * o.accelerators, Size: w.SampleBytes, Sigma: s.SampleSigma},
		Job:     o.job(w), Cached: o.cached, Bandwidth: o.line.bandwidth.Bandwidth, Latency: o.line.latency, Sigma: o.line.sigma,
		Memory: int64(o.memory), Connections: o.connections, Order: o.order, Told: o.told, Epochs: o.epochs,
	}
	if c.Memory == 0 {
		c.Memory = max(128<<20, 64<<20+int64(float64(memorySteps*w.Batch*o.accelerators)*float64(w.SampleBytes)*4/3))
	}
	if missing := testbed.Missing(); len(missing) > 0 {
		return nil, fmt.Errorf("this machine lacks what the testbed needs: %s", strings.Join(missing, "; "))
	}
	b, err := testbed.Start(ctx, o.workDir, self, proxy...)
	if err != nil {
		return nil, err
	}
	defer b.Close()
	show := stages{p: p}
	defer show.end()
	m, err := b.Measure(ctx, c, show.set)
	if err != nil {
		return nil, err
	}
	r := o.report(w)
	r.Order, r.Told, r.Samples, r.DatasetBytes = o.order, cmp.Or(o.told, o.order), c.Dataset.Samples, m.Bytes
	r.Cached, r.Memory, r.Bound, r.Busy, r.CPU = m.Kept, m.Memory, m.Bound(), m.Busy, m.CPU
	r.Store = &far{Latency: o.line.latency.Seconds(), Sigma: o.line.sigma, Bandwidth: m.Bandwidth}
	r.add(m.Epochs)
	return r, nil
}

// stages shows what a bench is at.
type stages struct {
	p    *progress.Printer
	mu   sync.Mutex // objects are laid by several goroutines
	bar  *progress.Bar
	name string
}

func (s *stages) set(name string, done, total int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.name != name || done < 2 && name == testbed.Running {
		s.close()
		s.name, s.bar = name, s.p.Start(name, total)
	}
	s.bar.Set(done, total, "")
}

func (s *stages) end() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.close()
}

func (s *stages) close() {
	if s.bar != nil {
		s.bar.Done("")
		s.bar = nil
	}
}

// report begins a report.
func (o *benchOptions) report(w shapedJob) *benchReport {
	return &benchReport{Version: 2, benchJob: benchJob{
		Workload: w.Name, Cores: runtime.NumCPU(), Accelerators: o.accelerators, Batch: w.Batch, StepSeconds: w.Step.Seconds(),
		SampleBytes: float64(w.SampleBytes), Scale: w.scale, Shrink: w.shrink, Workers: o.workers, Ahead: o.ahead,
	}}
}

// add adds what was run.
func (r *benchReport) add(epochs []testbed.Epoch) {
	var compute, seconds float64
	samples := 0
	for _, e := range epochs {
		var stalls []float64
		one := epochReport{Epoch: e, Rate: e.SamplesPerSecond()}
		for _, s := range e.Steps {
			stalls = append(stalls, s.Stall)
			if s.Stall > 0 {
				one.Stalled++
			}
		}
		slices.Sort(stalls)
		quantile := func(q float64) float64 { return stalls[int(q*float64(len(stalls)-1))] }
		one.StallP50, one.StallP99, one.StallMax = quantile(0.5), quantile(0.99), quantile(1)
		r.Epochs = append(r.Epochs, one)
		compute, seconds, samples = compute+e.Compute, seconds+e.Seconds, samples+e.Samples
	}
	r.Utilisation, r.Rate = compute/seconds, float64(samples)/seconds
	r.Demand = float64(r.Accelerators*r.Batch) * r.SampleBytes / r.StepSeconds
}

// what tells the accelerators in a line.
func (r *benchReport) what() string {
	text := fmt.Sprintf("%d × a batch of %d × %s every %v", r.Accelerators, r.Batch, humanize.Bytes(uint64(r.SampleBytes)), time.Duration(r.StepSeconds*1e9).Round(10*time.Microsecond))
	if r.Shrink > 1 {
		text += fmt.Sprintf(", 1/%g of the real size, so that the dataset fits --dataset-size", r.Shrink)
	}
	if r.Scale != 1 {
		text += fmt.Sprintf(", 1/%g of the real rate, so that %d cores can hold it", r.Scale, r.Cores)
	}
	return text
}

// where tells the store and the cache in a line.
func (r *benchReport) where() string {
	if r.Store == nil {
		return fmt.Sprintf("%s, %.0f%% of it cached at the start", r.Mount, 100*r.Cached)
	}
	speed := "any bandwidth"
	if r.Store.Bandwidth > 0 {
		speed = humanize.Bytes(uint64(r.Store.Bandwidth)) + "/s"
		if need := r.Demand * (1 - r.Cached); need > 0 {
			speed += fmt.Sprintf(", %.2f times what the %.0f%% that are not cached need", r.Store.Bandwidth/need, 100*(1-r.Cached))
		}
	}
	return fmt.Sprintf("%v away, %s", time.Duration(r.Store.Latency*1e9), speed)
}

func (r *benchReport) print(out io.Writer) error {
	row := func(name, format string, args ...any) {
		fmt.Fprintf(out, "%-12s "+format+"\n", append([]any{name}, args...)...)
	}
	row("workload", "%s", r.title())
	row("accelerators", "%s", r.what())
	row("store", "%s", r.where())
	row("dataset", "%s samples, %s; order %s", humanize.Comma(int64(r.Samples)), humanize.Bytes(uint64(r.DatasetBytes)), r.Order)
	if r.Told != "" && r.Told != r.Order {
		row("", "the mount was told %s", r.Told)
	}
	fmt.Fprintln(out)
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "epoch\tutilisation\tsamples/s\tMB/s\tGETs\tremote MB\tfirst batch\tstalled\tsteps stalled\tp50\tp99\tlongest\t")
	for _, e := range r.Epochs {
		fmt.Fprintf(t, "%d\t%.1f%%\t%.0f\t%.1f\t%d\t%.0f\t%.2f s\t%.2f s\t%d of %d\t%.0f ms\t%.0f ms\t%.0f ms\t\n", e.Number, 100*e.Utilisation, e.Rate,
			e.BytesPerSecond()/1e6, e.Requests, float64(e.RemoteBytes)/1e6, e.FirstBatch, e.Stall, e.Stalled, len(e.Steps), 1e3*e.StallP50, 1e3*e.StallP99, 1e3*e.StallMax)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	fmt.Fprintln(out)
	if r.Bound > 0 {
		row("bound", "%.1f%% is all that the store allows; reached %.1f%% of it", 100*r.Bound, 100*r.Utilisation/r.Bound)
	}
	if r.Busy > 0 {
		row("machine", "the rig took %.0f%% of %d cores, everything together %.0f%%", 100*r.CPU, r.Cores, 100*r.Busy)
		if r.Busy > busyCores {
			row("", "so the machine, not the store, may bound this: raise --scale")
		}
	}
	return nil
}

// busyCores is the part of the cores from which on waiting for one is likely to show.
const busyCores = 0.85
