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
	"github.com/shoalfs/shoal/lab/rig/testbed"
	"github.com/shoalfs/shoal/prefetch/order"
)

// benchOptions are the flags of the verb. What they leave open, the workload and the machine fill in.
type benchOptions struct {
	testbed.Config
	mount, workDir string
	datasetSize    cli.Size
	scale          float64 // the steps are this many times as long as the real ones; 0: what this machine can hold
	shrink         float64 // the real samples are this many times as large
	steps          int
	asJSON         bool
}

// benchReport is what `shoal-lab bench --json` prints (docs/bench.md).
type benchReport struct {
	Version      int     `json:"version"` // of this schema
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
	testbed.Result
	Order       string        `json:"order"`
	Told        string        `json:"told"`            // what the mount was told; "" for a mount that was there
	Mount       string        `json:"mount,omitempty"` // that was there
	Store       *far          `json:"store,omitempty"` // null for a mount that was there
	Bound       float64       `json:"bound,omitempty"` // highest utilisation that the store allows
	Utilisation float64       `json:"utilisation"`     // of all epochs together
	Rate        float64       `json:"samples_per_second"`
	Epochs      []epochReport `json:"epochs"`
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
	o := benchOptions{datasetSize: 2 << 30, shrink: 1}
	o.Bandwidth.Times = 1.1
	names := workload.Names()
	c := &cobra.Command{
		Use:   "bench [WORKLOAD]",
		Short: "Feed emulated accelerators, and measure how busy they are",
		Long: `Emulates accelerators that read a dataset through a mount: each takes a batch, computes for as long as
the real one would (it sleeps), and waits for the others. It reports utilisation, the share of the time
in which they compute. The workloads are MLPerf-shaped: sizes and times are those of MLPerf Storage, the
results are not MLPerf results. They are ` + strings.Join(names, ", ") + `,
or defined by --batch, --sample-size and --step-time.

Without --mount it starts a rig: an S3 server with objects of the workload's size, a proxy that adds
--latency and limits --bandwidth, and a daemon. That needs fuse3 and versitygw; it says how to get what is
missing. If the machine is too small for all of that at the real rate, steps are slowed down (--scale), and
the output says so.`,
		Example: `  # half of the dataset cached, the store 10% faster than what the other half needs
  shoal-lab bench retinanet-b200 --cached 0.5 --bandwidth 1.1x
  # an existing mount, at the real rate, by 8 accelerators
  shoal-lab bench resnet50-h100 --mount /mnt/train --accelerators 8
  # the rig's mount without the order
  shoal-lab bench retinanet-b200 --told none`,
		Args:      cobra.MaximumNArgs(1),
		ValidArgs: names,
		RunE: func(c *cobra.Command, args []string) error {
			if err := o.check(c, args); err != nil {
				return err
			}
			run := o.runRig
			if o.mount != "" {
				run = o.runMounted
			}
			show := stages{p: progress.New(c.ErrOrStderr())}
			r, err := run(c.Context(), show.set)
			show.end()
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
	f.StringVar(&o.mount, "mount", "", "read this mount, in --order, instead of starting a rig")
	f.StringVar(&o.workDir, "work-dir", "shoal-bench", "folder for objects and cache of the rig")
	f.IntVar(&o.Job.Accelerators, "accelerators", 1, "accelerators, each with its own batch; all step together")
	f.IntVar(&o.Job.Batch, "batch", 0, "samples per accelerator and step (default: the workload's)")
	f.Var((*cli.Size)(&o.Dataset.Size), "sample-size", "mean size of a sample (default: the workload's)")
	f.DurationVar(&o.Job.Step, "step-time", 0, "compute time of a batch (default: the workload's)")
	f.Float64Var(&o.scale, "scale", 0,
		"make steps this many times as long (default: 1 on a mount, else what this machine can keep up with)")
	f.IntVar(&o.Job.Workers, "workers", 4,
		"batches that an accelerator's loader reads at a time, a DataLoader's num_workers")
	f.IntVar(&o.Job.Prefetch, "batches-ahead", 0, "batches each keeps ready or in progress (default: twice --workers)")
	f.IntVar(&o.Epochs, "epochs", 2, "epochs")
	f.IntVar(&o.steps, "steps", 0,
		"steps per epoch (default: all of a mount; with a rig, 20 seconds, from 32 to 256)")
	f.StringVar(&o.Order, "order", "",
		"order in which the accelerators read (default: the mount's own; with a rig, torch:seed=7)")
	f.StringVar(&o.Told, "told", "", "--order of the rig's mount, such as none or auto (default: the order)")
	f.Float64Var(&o.Cached, "cached", 0, "part of the dataset that the cache may hold, and holds at the start")
	f.Var(&o.Bandwidth, "bandwidth",
		"of the store: a multiple of what the uncached part needs (1.1x), bytes per second (40MB/s) or none")
	f.DurationVar(&o.Latency, "latency", 30*time.Millisecond, "median time of the store to the first byte")
	f.Float64Var(&o.Sigma, "sigma", 0.3, "standard deviation of the latency's logarithm")
	f.Var((*cli.Size)(&o.Memory), "memory", "of the daemon (default: for 4 steps, at least 128MiB)")
	f.Var(&o.datasetSize, "dataset-size", "maximum size of the rig's dataset")
	f.IntVar(&o.Connections, "connections", 0, "of the daemon (default: its own)")
	f.BoolVar(&o.asJSON, "json", false, "print the versioned JSON (docs/bench.md)")
	return c
}

// custom is the workload without a name.
const custom = "custom"

// check fills in what the arguments leave to the workload, before anything is scaled.
func (o *benchOptions) check(c *cobra.Command, args []string) error {
	f := c.Flags()
	s := workload.Shape{Name: custom}
	if len(args) == 1 {
		var ok bool
		if s, ok = workload.Find(args[0]); !ok {
			return cli.Usagef("there is no workload %q (see: shoal-lab bench --help)", args[0])
		}
	} else if o.Job.Batch == 0 || o.Job.Step == 0 || o.Dataset.Size == 0 && o.mount == "" {
		return cli.Usagef(
			"name a workload, or give --batch, --sample-size and --step-time (see: shoal-lab bench --help)")
	}
	o.Job.Prefetch = cmp.Or(o.Job.Prefetch, 2*o.Job.Workers)
	switch {
	case f.Changed("batch") && o.Job.Batch < 1 || f.Changed("step-time") && o.Job.Step <= 0 ||
		f.Changed("sample-size") && o.Dataset.Size < 1:
		return cli.Usagef("--batch, --sample-size and --step-time must be above 0")
	case o.Job.Accelerators < 1 || o.Job.Workers < 1 || o.Job.Prefetch < 1 || o.Epochs < 1 || o.steps < 0:
		return cli.Usagef("--accelerators, --workers, --batches-ahead, --epochs and --steps must be above 0")
	case f.Changed("scale") && !(o.scale > 0 && o.scale <= 1e6):
		return cli.Usagef("--scale %g: give a factor above 0, such as 4", o.scale)
	case !(o.Cached >= 0 && o.Cached <= 1):
		return cli.Usagef("--cached %g: give a part from 0 to 1", o.Cached)
	case o.Latency < 0 || o.Connections < 0 || !(o.Sigma >= 0 && o.Sigma < 10):
		return cli.Usagef("--latency and --connections must not be negative, and --sigma must be from 0 to 10")
	}
	o.take(s)
	least := o.Job.Accelerators * o.Job.Batch * cmp.Or(o.steps, fewestSteps)
	if o.mount == "" && int64(o.datasetSize) < int64(least) {
		return cli.Usagef("--dataset-size: give at least %dB, a byte for each of %[1]d samples", least)
	}
	for _, own := range []string{"work-dir", "told", "cached", "bandwidth", "latency", "sigma", "memory",
		"dataset-size", "connections", "sample-size"} {
		if o.mount != "" && f.Changed(own) {
			return cli.Usagef("--%s is for an own rig, not for --mount", own)
		}
	}
	for name, text := range map[string]string{"order": o.Order, "told": o.Told} {
		spec, err := order.Parse(cmp.Or(text, "sequential"))
		if err == nil {
			err = spec.Check()
		}
		if err == nil && name == "order" && !spec.Computed() {
			err = fmt.Errorf("%s is not an order to read in", text)
		}
		if err != nil {
			return cli.Usagef("--%s: %w", name, err)
		}
	}
	return nil
}

// take has the accelerators do what a workload says, but for what the flags say.
func (o *benchOptions) take(s workload.Shape) {
	o.Dataset.Name, o.Dataset.Sigma = s.Name, s.SampleSigma
	o.Dataset.Size = cmp.Or(o.Dataset.Size, s.SampleBytes)
	o.Job.Batch, o.Job.Step = cmp.Or(o.Job.Batch, s.Batch), cmp.Or(o.Job.Step, s.Step)
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

// runMounted benches a mount that is there.
func (o *benchOptions) runMounted(ctx context.Context, show func(stage string, done, total int)) (*benchReport, error) {
	self, err := shoal()
	if err != nil {
		return nil, err
	}
	stats, err := testbed.ReadStats(o.mount)
	if err != nil {
		return nil, err
	}
	o.Order = cmp.Or(o.Order, stats.Order.Spec)
	spec, err := order.Parse(o.Order)
	if err != nil || !spec.Computed() { // the flag was checked
		return nil, cli.Usagef("--order: the mount has none (it has %q): give one, such as torch:seed=7", o.Order)
	}
	o.scale = cmp.Or(o.scale, 1)
	o.Job.Step = time.Duration(float64(o.Job.Step) * o.scale)
	o.Dataset.Size = stats.Bytes / int64(max(stats.Files, 1))
	pass := testbed.Pass{Shoal: self, Mount: o.mount, Order: o.Order, Job: o.Job,
		First: max(spec.Epoch(), stats.Order.Epoch), Epochs: o.Epochs, Steps: o.steps}
	if o.Order == stats.Order.Spec && stats.Order.State == "finished" {
		pass.First++
	}
	epochs, err := pass.Run(ctx, func(done, steps int) { show(testbed.Running, done, steps) })
	if err != nil {
		return nil, err
	}
	r := o.report(testbed.Result{Samples: stats.Samples, Bytes: stats.Bytes, Kept: stats.Kept(),
		Memory: stats.Memory.Limit, Demand: o.Job.Rate() * float64(o.Dataset.Size), Epochs: epochs})
	r.Mount = o.mount
	return r, nil
}

// Of an own rig.
const (
	rigEpoch    = 20 * time.Second // length of an epoch
	fewestSteps = 32               // of an epoch: fewer say little about the steady state
	mostSteps   = 256
	memorySteps = 4 // whose samples fit the daemon's memory
)

// fit makes the workload small enough for this machine's disk and cores, and the dataset as large as an epoch.
func (o *benchOptions) fit() {
	perStep := float64(o.Job.Accelerators * o.Job.Batch)
	least := cmp.Or(o.steps, fewestSteps)
	if size, most := float64(o.Dataset.Size), float64(o.datasetSize)/perStep/float64(least); size > most {
		o.shrink = math.Ceil(size / most)
		o.Dataset.Size = int64(size / o.shrink)
	}
	if o.scale == 0 {
		o.scale = math.Ceil(rigCost(o.Config) / (holdable * float64(runtime.NumCPU())))
	}
	o.Job.Step = time.Duration(float64(o.Job.Step) * o.scale)
	steps := cmp.Or(o.steps, min(max(int(rigEpoch/o.Job.Step), fewestSteps), mostSteps))
	steps = max(min(steps, int(float64(o.datasetSize)/perStep/float64(o.Dataset.Size))), 1)
	o.Dataset.Samples = steps * o.Job.Batch * o.Job.Accelerators
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

// rigCost returns the cores that the rig takes with these steps.
func rigCost(c testbed.Config) float64 {
	size := float64(c.Dataset.Size)
	return c.Job.Rate() * (costRead + size*costReadByte + (1-c.Cached)*(costFetch+size*costFetchByte))
}

// runRig brings a store of its own, and a mount.
func (o *benchOptions) runRig(ctx context.Context, show func(stage string, done, total int)) (*benchReport, error) {
	self, err := shoal()
	if err != nil {
		return nil, err
	}
	if o.Order, err = ranks(cmp.Or(o.Order, "torch:seed=7"), o.Job.Accelerators); err != nil {
		return nil, cli.Usage(err)
	}
	o.fit()
	if o.Memory == 0 {
		o.Memory = max(128<<20, 64<<20+
			int64(float64(memorySteps*o.Job.Batch*o.Job.Accelerators)*float64(o.Dataset.Size)*4/3))
	}
	if missing := testbed.Missing(); len(missing) > 0 {
		return nil, fmt.Errorf("this machine lacks what the testbed needs: %s", strings.Join(missing, "; "))
	}
	b, err := testbed.Start(ctx, o.workDir, self)
	if err != nil {
		return nil, err
	}
	defer b.Close()
	m, err := b.Measure(ctx, o.Config, show)
	if err != nil {
		return nil, err
	}
	r := o.report(m)
	r.Told, r.Bound = cmp.Or(o.Told, o.Order), m.Bound()
	r.Store = &far{Latency: o.Latency.Seconds(), Sigma: o.Sigma, Bandwidth: m.Bandwidth}
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
		s.end()
		s.name, s.bar = name, s.p.Start(name, total)
	}
	s.bar.Set(done, total, "")
}

// end is called by set, or when nobody calls that any more.
func (s *stages) end() {
	if s.bar != nil {
		s.bar.Done("")
	}
}

// report says what was run, and what became of it.
func (o *benchOptions) report(m testbed.Result) *benchReport {
	r := &benchReport{Version: 2, Result: m, Order: o.Order,
		Workload: o.Dataset.Name, Cores: runtime.NumCPU(), Accelerators: o.Job.Accelerators, Batch: o.Job.Batch,
		StepSeconds: o.Job.Step.Seconds(), SampleBytes: float64(o.Dataset.Size), Scale: o.scale, Shrink: o.shrink,
		Workers: o.Job.Workers, Ahead: o.Job.Prefetch,
	}
	var compute, seconds float64
	samples := 0
	for _, e := range m.Epochs {
		var stalls []float64
		one := epochReport{Epoch: e, Rate: float64(e.Samples) / e.Seconds}
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
	return r
}

// what tells the accelerators in a line.
func (r *benchReport) what() string {
	text := fmt.Sprintf("%d × a batch of %d × %s every %v", r.Accelerators, r.Batch,
		humanize.Bytes(uint64(r.SampleBytes)), time.Duration(r.StepSeconds*1e9).Round(10*time.Microsecond))
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
		return fmt.Sprintf("%s, %.0f%% of it cached at the start", r.Mount, 100*r.Kept)
	}
	speed := "any bandwidth"
	if r.Store.Bandwidth > 0 {
		speed = humanize.Bytes(uint64(r.Store.Bandwidth)) + "/s"
		if need := r.Demand * (1 - r.Kept); need > 0 {
			speed += fmt.Sprintf(", %.2f times what the %.0f%% that are not cached need",
				r.Store.Bandwidth/need, 100*(1-r.Kept))
		}
	}
	return fmt.Sprintf("%v away, %s", time.Duration(r.Store.Latency*1e9), speed)
}

func (r *benchReport) print(out io.Writer) error {
	row := func(name, format string, args ...any) {
		fmt.Fprintf(out, "%-12s "+format+"\n", append([]any{name}, args...)...)
	}
	title := r.Workload
	if title != custom {
		title += ", MLPerf-shaped, no MLPerf result"
	}
	row("workload", "%s", title)
	row("accelerators", "%s", r.what())
	row("store", "%s", r.where())
	row("dataset", "%s samples, %s; order %s", humanize.Comma(int64(r.Samples)),
		humanize.Bytes(uint64(r.Bytes)), r.Order)
	if r.Told != "" && r.Told != r.Order {
		row("", "the mount was told %s", r.Told)
	}
	fmt.Fprintln(out)
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "epoch\tutilisation\tsamples/s\tMB/s\tGETs\tremote MB\tfirst batch\tstalled\tsteps "+
		"stalled\tp50\tp99\tlongest\t")
	for _, e := range r.Epochs {
		fmt.Fprintf(t, "%d\t%.1f%%\t%.0f\t%.1f\t%d\t%.0f\t%.2f s\t%.2f s\t%d of %d\t%.0f ms\t%.0f ms\t%.0f ms\t\n",
			e.Number, 100*e.Utilisation, e.Rate,
			float64(e.Bytes)/e.Seconds/1e6, e.Requests, float64(e.RemoteBytes)/1e6, e.FirstBatch, e.Stall, e.Stalled,
			len(e.Steps), 1e3*e.StallP50, 1e3*e.StallP99, 1e3*e.StallMax)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	fmt.Fprintln(out)
	if r.Bound > 0 {
		row("bound", "%.1f%% is all that the store allows; reached %.1f%% of it", 100*r.Bound,
			100*r.Utilisation/r.Bound)
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
