package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"strconv"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/shoalfs/shoal/cache/cachedir"
	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/internal/cli"
	"github.com/shoalfs/shoal/internal/daemon"
	"github.com/shoalfs/shoal/internal/human"
	"github.com/shoalfs/shoal/internal/machine"
	"github.com/shoalfs/shoal/internal/workload"
	"github.com/shoalfs/shoal/prefetch/engine"
	"github.com/shoalfs/shoal/prefetch/order"
	"github.com/shoalfs/shoal/prefetch/sim"
)

type planOptions struct {
	model                            sim.Config // what the flags give in its form
	bandwidth, near, link            bandwidth
	latency, requestCPU, step, read  time.Duration
	connections                      connections
	nodes                            int
	sampleSize                       cli.Size
	mostDisk, mostMemory             amount
	order, workload, target, samples string
	asJSON                           bool
	store                            storeOptions
	parsedPlan
}

// parsedPlan is what the texts of the flags say.
type parsedPlan struct {
	memory      int64
	asked       objstore.StoreOptions // from the store's flags
	tiered      bool                  // there is a near tier
	spec        order.Spec
	utilisation float64 // of --target; 0: not given
	synthetic   int     // samples of a dataset that does not exist yet
}

func planCommand() *cobra.Command {
	o := planOptions{mostDisk: amount{bytes: 20 << 30}, mostMemory: amount{bytes: 2 << 30}, bandwidth: 10e9 / 8,
		link: 10e9 / 8}
	c := &cobra.Command{
		Use:   "plan [SOURCE]",
		Short: "Predict how busy accelerators will be, before a byte is fetched",
		Long: `Lists SOURCE and simulates training on it, with the prefetcher of mounts and feeds and a model of the object store and
the trainer. It predicts utilisation, stalls, bytes and requests for each epoch and names the bottleneck. With --target
it also finds how much cache or bandwidth is enough. Only the listing is fetched, and no cache directory is touched.

Without SOURCE, --samples and --sample-size describe a dataset that does not exist yet.`,
		Example: `  shoal plan s3://photos/train --cache-size 200GiB --bandwidth 10Gbit --latency 30ms --batch 400 --step-time 224ms
  # eight accelerators, a dataset to come: how much cache for 95%?
  shoal plan --samples 1000000 --workload retinanet-b200 --accelerators 8 --cache-size 100GiB --target 95%
  # eight nodes that share their caches
  shoal plan s3://photos/train --nodes 8 --link 25Gbit --accelerators 8 --workload retinanet-b200 --cache-size 200GiB`,
		RunE: func(c *cobra.Command, args []string) error {
			err := o.check(c, len(args) == 1)
			if err != nil {
				return err
			}
			if o.asked, err = o.store.options(invocationOf(c.Context())); err != nil {
				return err
			}
			p := predictor{o: &o, inv: invocationOf(c.Context()), out: c.OutOrStdout()}
			if len(args) == 0 {
				return p.synthetic(c.Context())
			}
			return p.source(c.Context(), args[0])
		},
	}
	f := c.Flags()
	f.Var(&o.mostDisk, "cache-size", "disk space for samples, as for mount; shares and auto refer to this machine")
	f.Var(&o.mostMemory, "memory", "maximum memory of the daemon, as for mount; shares and auto refer to this machine")
	f.Var(&o.bandwidth, "bandwidth", "bandwidth to the object store: 10Gbit, 1GiB/s or unlimited")
	f.DurationVar(&o.latency, "latency", 30*time.Millisecond, "median time to an answer's first byte")
	f.Float64Var(&o.model.LatencySigma, "latency-sigma", 0.3, "sigma of the latency's lognormal distribution")
	f.Var(&o.near, "near-bandwidth", "bandwidth to a near tier, as of --near of mount (default: there is none)")
	f.Lookup("near-bandwidth").DefValue = ""
	f.IntVar(&o.nodes, "nodes", 1, "nodes that share their caches, each with these accelerators, memory and disk")
	f.Var(&o.link, "link", "bandwidth of a node to the other --nodes")
	f.Float64Var(&o.model.RequestRate, "request-rate", 0,
		"requests per second that the store answers (default: no limit)")
	f.DurationVar(&o.requestCPU, "request-cpu", 0,
		"CPU time of the daemon per request; requests are processed one after the other")
	f.Var(&o.connections, "connections", "maximum requests in flight to the object store, as for mount")
	f.StringVar(&o.workload, "workload", "",
		"take --batch, --step-time and --sample-size from: "+strings.Join(workload.Names(), ", "))
	f.IntVar(&o.model.Batch, "batch", 0, "samples per step of one accelerator")
	f.DurationVar(&o.step, "step-time", 0, "compute time of a step")
	f.IntVar(&o.model.Accelerators, "accelerators", 1, "accelerators that step together")
	f.IntVar(&o.model.Workers, "workers", 8, "loader workers per accelerator; 0: it reads between steps")
	f.IntVar(&o.model.Prefetch, "prefetch", 2, "batches that each worker reads ahead")
	f.DurationVar(&o.read, "read-time", 0, "time that a worker spends on a sample once it has the bytes (decoding)")
	f.StringVar(&o.order, "order", "uniform:seed=0", "order in which the samples are read, as for mount")
	f.IntVar(&o.model.Epochs, "epochs", 2, "epochs to simulate")
	f.BoolVar(&o.model.Warm, "warm", false, "start with a filled cache (as after shoal warm)")
	f.StringVar(&o.target, "target", "",
		"find the smallest cache and the lowest bandwidth for this utilisation, such as 95%")
	f.StringVar(&o.samples, "samples", "images",
		"with SOURCE: which files are samples: images, * or a glob on the name;\nwithout SOURCE: number of samples")
	f.Var(&o.sampleSize, "sample-size", "without SOURCE: mean size of a sample")
	f.Uint64Var(&o.model.Seed, "seed", 0, "seed of the model's random numbers")
	f.BoolVar(&o.asJSON, "json", false, "print the prediction as JSON (docs/plan.md)")
	o.store.add(c)
	return c
}

// limits sets the values of mount's flags on this machine, except the default of --memory, which stays.
func (o *planOptions) limits() (err error) {
	if o.model.CacheBytes, _, err = o.mostDisk.disk(cacheBase(), machine.Room); err != nil {
		return err
	}
	if o.memory = o.mostMemory.bytes; o.mostMemory.text != "" {
		o.memory, _, err = o.mostMemory.memory(machine.ReadMemory())
	}
	return err
}

// takeWorkload sets the values that no flag sets from --workload.
func (o *planOptions) takeWorkload(c *cobra.Command) error {
	if o.workload == "" {
		return nil
	}
	shape, ok := workload.Find(o.workload)
	if !ok {
		return cli.Usagef("--workload %q: give one of %s", o.workload, strings.Join(workload.Names(), ", "))
	}
	if !outranks(c, "batch", "workload") {
		o.model.Batch = shape.Batch
	}
	if !outranks(c, "step-time", "workload") {
		o.step = shape.Step
	}
	if !outranks(c, "sample-size", "workload") {
		o.sampleSize = cli.Size(shape.SampleBytes)
	}
	return nil
}

func (o *planOptions) check(c *cobra.Command, source bool) (err error) {
	if err := cmp.Or(o.limits(), o.takeWorkload(c)); err != nil {
		return err
	}
	m := &o.model
	switch {
	case m.Batch < 1 || m.Batch > maxSynthetic:
		return cli.Usagef("--batch %d: give the samples per step of an accelerator, 1 to %s, or a --workload",
			m.Batch, human.Number(maxSynthetic))
	case o.step <= 0:
		return cli.Usagef("--step-time %s: give the compute time of a step, such as 224ms, or a --workload", o.step)
	case m.Accelerators < 1 || m.Accelerators > maxAccelerators:
		return cli.Usagef("--accelerators %d: give a number from 1 to %d", m.Accelerators, maxAccelerators)
	case m.Workers > maxWorkers:
		return cli.Usagef("--workers %d: give a number from 0 to %d", m.Workers, maxWorkers)
	case m.Prefetch < 1 || m.Prefetch > maxWorkers:
		return cli.Usagef("--prefetch %d: give a number from 1 to %d", m.Prefetch, maxWorkers)
	case m.Epochs < 1:
		return cli.Usagef("--epochs %d: give 1 or more", m.Epochs)
	case !(m.LatencySigma >= 0 && m.LatencySigma <= 4):
		return cli.Usagef("--latency-sigma %g: give a number from 0 to 4", m.LatencySigma)
	case !(m.RequestRate >= 0 && m.RequestRate <= math.MaxFloat32):
		return cli.Usagef("--request-rate %g: give requests per second, or 0 for no limit", m.RequestRate)
	}
	if o.spec, err = order.Parse(o.order); err == nil {
		err = o.spec.Check()
	}
	switch {
	case err != nil:
		return cli.Usagef("--order: %w", err)
	case !o.spec.Computed():
		return cli.Usagef("--order %s cannot be simulated (give uniform:seed=0, or the trainer's order)", o.order)
	case o.spec.Name() == "torch-loader":
		return cli.Usagef(
			"--order %s: the order of later epochs is not known (give uniform:seed=0, which takes as long)", o.order)
	}
	if err := o.checkNodes(c); err != nil {
		return err
	}
	if o.target != "" {
		if o.utilisation, err = parseTarget(o.target); err != nil {
			return cli.Usagef("--target: %w", err)
		}
	}
	switch {
	case source && given(c, "sample-size"):
		return cli.Usagef("--sample-size: SOURCE has its own sizes; leave one of them out")
	case source:
		if err := engine.CheckSamples(o.samples); err != nil {
			return cli.Usagef("--samples: %w", err)
		}
		return nil
	}
	o.synthetic, err = strconv.Atoi(o.samples)
	switch {
	case !c.Flags().Changed("samples"):
		return cli.Usagef("give a SOURCE, or --samples and --sample-size of a dataset that does not exist yet")
	case err != nil || o.synthetic < 1 || o.synthetic > maxSynthetic:
		return cli.Usagef("--samples %q: without SOURCE give the number of samples, from 1 to %s",
			o.samples, human.Number(maxSynthetic))
	case o.sampleSize < 1:
		return cli.Usagef("--sample-size: give the mean size of a sample, such as 100KB, or a --workload")
	}
	return nil
}

func (o *planOptions) checkNodes(c *cobra.Command) error {
	o.tiered = c.Flags().Changed("near-bandwidth")
	all := order.Ranks{Last: o.spec.World() - 1}
	switch {
	case o.nodes < 1 || o.nodes > maxNodes:
		return cli.Usagef("--nodes %d: give a number from 1 to %s", o.nodes, human.Number(maxNodes))
	case o.nodes == 1 && given(c, "link"):
		return cli.Usagef("--link %s is between nodes: give --nodes, too", o.link.String())
	case o.nodes > 1 && o.spec.Ranks() != all:
		return cli.Usagef("--order %s: with --nodes give the order of all ranks (rank=%s)", o.order, all)
	}
	return nil
}

const planVersion = 3

// Bounds of the simulation.
const (
	maxAccelerators = 4096
	maxWorkers      = 256
	maxNodes        = 1024
	maxSynthetic    = 1_000_000_000
	fewSamples      = 1_000_000 // which take seconds
)

// parseTarget reads 95% or 0.95.
func parseTarget(text string) (float64, error) {
	number, percent := strings.CutSuffix(strings.TrimSpace(text), "%")
	v, err := strconv.ParseFloat(strings.TrimSpace(number), 64)
	if percent {
		v /= 100
	}
	if err != nil || !(v > 0 && v < 1) {
		return 0, fmt.Errorf("%q is not a utilisation (write 95%% or 0.95, less than 100%%)", text)
	}
	return v, nil
}

type predictor struct {
	o   *planOptions
	inv *invocation
	out io.Writer
}

func (p *predictor) synthetic(ctx context.Context) error {
	o, n := p.o, p.o.synthetic
	c := p.config()
	c.Samples, c.Sizes = n, sim.Files{int64(o.sampleSize)}
	c.Memory = cachedir.ForecastMemory(o.memory, n)
	if part := n / fewSamples; part > 10 && c.Memory > 0 {
		p.inv.Notice("simulating %s takes long: the same fraction of samples and cache predicts about the same "+
			"utilisation (--samples %d --cache-size %s)",
			human.Count(n, "sample"), n/part, cachedir.RoundUp(c.CacheBytes/int64(part)))
	}
	return p.predict(ctx, c, func(epoch int) (order.Order, error) { return o.spec.Order(n, epoch) }, planDataset{
		Samples: n, Bytes: int64(n) * int64(o.sampleSize), read: int64(n) * int64(o.sampleSize),
	})
}

// source lists a dataset into a temporary catalog: the user's own may be in use, and has a --cache-size of its own.
func (p *predictor) source(ctx context.Context, source string) (err error) {
	if _, err := objstore.ParseSource(source); err != nil {
		return cli.Usage(err)
	}
	dir, err := os.MkdirTemp("", "shoal-plan-")
	if err != nil {
		return fmt.Errorf("cannot create a temporary folder: %w (set TMPDIR to a writable folder)", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	logger := warnings()
	h, err := engine.OpenHost(
		engine.HostConfig{Options: cachedir.Options{Path: dir, Size: 1 << 50, Memory: p.o.memory, Logger: logger}})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, h.Close()) }()
	if source, err = p.inv.source(source); err != nil {
		return err
	}
	e, err := openEngine(ctx, p.inv, h, engine.Config{
		Source: source, Order: none, Samples: p.o.samples, Connections: p.o.connections.most(), Logger: logger,
		Getenv: p.inv.environ, Store: p.o.asked,
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, e.Close()) }()
	f := e.Forecast()
	if f.Samples == 0 {
		return fmt.Errorf("%s: none of its %s files matches --samples %s (give --samples '*' for all)",
			e.Source(), human.Number(f.Files), p.o.samples)
	}
	c := p.config()
	c.Samples, c.Sizes, c.Places, c.Key, c.Memory = f.Files, f.Sizes, f.Places, f.Key, f.Memory
	c.Bulk = p.o.spec.NeedsGroups() || f.Bytes <= 2*f.Memory
	return p.predict(ctx, c, func(epoch int) (order.Order, error) { return f.Order(p.o.spec, epoch) },
		planDataset{Source: e.Source(), Samples: f.Samples, Bytes: f.Bytes, Packed: f.Places != nil, read: f.Read})
}

// roundTrip is the assumed time in seconds to the first byte of a near tier and of another node.
const roundTrip = 1e-3

func (p *predictor) config() sim.Config {
	o, c := p.o, p.o.model
	c.Step, c.Read, c.Prefetch = o.step.Seconds(), o.read.Seconds(), c.Prefetch*max(c.Workers, 1)
	c.Bandwidth, c.Latency, c.CPU = float64(o.bandwidth), o.latency.Seconds(), o.requestCPU.Seconds()
	c.Connections = o.connections.most()
	if n := float64(o.asked.GetsPerHour*int64(o.nodes)) / 3600; n > 0 && (c.RequestRate == 0 || n < c.RequestRate) {
		c.RequestRate = n
	}
	if o.nodes > 1 {
		c.Peers = &sim.Peers{Nodes: o.nodes, Line: sim.Line{Bandwidth: float64(o.link), Latency: roundTrip}}
	}
	if o.tiered {
		c.Near = &sim.Line{Bandwidth: float64(o.near), Latency: roundTrip}
	}
	return c
}

type (
	planDataset struct {
		Source  string `json:"source,omitempty"`
		Samples int    `json:"samples"`
		Bytes   int64  `json:"bytes"`
		Packed  bool   `json:"packed"`
		read    int64  // bytes of the samples
	}
	planEpoch struct {
		sim.Epoch
		Limits sim.Limits   `json:"limits"` // seconds that each resource alone needs
		Bound  string       `json:"bound"`
		Cost   *engine.Cost `json:"cost,omitempty"` // at the prices of --store
	}
	planTarget struct {
		Utilisation   float64  `json:"utilisation"`
		CacheBytes    *int64   `json:"cache_bytes"`    // nil: no cache is enough with this bandwidth
		CacheFraction *float64 `json:"cache_fraction"` // of the dataset
		// with --cache-size; 0: nothing is fetched; nil: no bandwidth is enough
		Bandwidth *float64 `json:"bandwidth_bytes_per_sec"`
	}
	// planReport is what --json prints (docs/plan.md).
	planReport struct {
		Version    int         `json:"version"` // of this schema
		Nodes      int         `json:"nodes"`
		Dataset    planDataset `json:"dataset"`
		Demand     float64     `json:"demand_bytes_per_sec"` // the rate of accelerators that never wait
		CacheBytes int64       `json:"cache_bytes"`
		Epochs     []planEpoch `json:"epochs"`
		Target     *planTarget `json:"target,omitempty"`
	}
)

func (p *predictor) predict(ctx context.Context, c sim.Config, of func(epoch int) (order.Order, error),
	d planDataset) error {
	// A run is one call that cannot be interrupted except through its callbacks.
	var failed error
	c.Order = func(epoch int) order.Order {
		o, err := of(epoch)
		if err != nil {
			failed = errors.Join(failed, err)
			return nil
		}
		return o
	}
	if step := p.o.nodes * c.Accelerators * c.Batch; d.Samples < step {
		return cli.Usagef("%s are less than one step: %s of a batch of %d take %s (give fewer --nodes or "+
			"--accelerators, a smaller --batch, or more samples)", human.Count(d.Samples, "sample"),
			human.Count(p.o.nodes*c.Accelerators, "accelerator"), c.Batch, human.Number(step))
	}
	explain := func(err error) error {
		switch {
		case failed != nil:
			return failed
		case errors.Is(err, sim.ErrStopped):
			return ctx.Err()
		}
		if little, ok := errors.AsType[*sim.MemoryError](err); ok {
			return fmt.Errorf("--memory %s leaves %s for data beside the metadata of %s, and simulating it takes %s "+
				"(give at least %s)", human.Bytes(p.o.memory), human.Bytes(little.Have),
				human.Count(d.Samples, "sample"), human.Bytes(little.Need),
				cachedir.RoundUp(p.o.memory+(little.Need-little.Have)*4/3+1))
		}
		return err
	}
	r := planReport{
		Version: planVersion, Nodes: p.o.nodes, Dataset: d, CacheBytes: c.CacheBytes,
		Demand: float64(d.read) / float64(d.Samples) * float64(p.o.nodes*c.Accelerators*c.Batch) / c.Step,
	}
	bar := late(p.inv.Voice, "simulating")
	c.Watch = func(epoch, step, steps int) bool {
		bar.Set(epoch*steps+step, c.Epochs*steps, "steps")
		return ctx.Err() == nil
	}
	epochs, err := sim.Run(c)
	bar.Done("")
	if err != nil {
		return explain(err)
	}
	for _, e := range epochs {
		l := c.Limits(e)
		var cost *engine.Cost
		if prices := p.o.asked.Prices; !prices.IsZero() {
			cost = new(engine.CostOf(objstore.Requests{Get: e.Requests, Received: e.Bytes}, prices))
		}
		r.Epochs = append(r.Epochs, planEpoch{e, l, boundOf(e, l), cost})
	}
	if p.o.utilisation > 0 {
		t, err := p.target(c, d.Bytes/int64(p.o.nodes))
		if err != nil {
			return explain(err)
		}
		r.Target = t
	}
	if p.o.asJSON {
		return json.NewEncoder(p.out).Encode(r)
	}
	return p.print(r)
}

// target finds the cache and the bandwidth that are enough. total is a node's part of the dataset.
func (p *predictor) target(c sim.Config, total int64) (*planTarget, error) {
	t := &planTarget{Utilisation: p.o.utilisation}
	bar := late(p.inv.Voice, "looking for the cache")
	cache, ok, err := sim.CacheFor(c, t.Utilisation, total, func(run, of int) { bar.Set(run, of, "runs") })
	bar.Done("")
	if err != nil {
		return nil, err
	}
	if ok {
		t.CacheBytes, t.CacheFraction = &cache, new(float64(cache)/float64(max(total, 1)))
	}
	bar = late(p.inv.Voice, "looking for the bandwidth")
	rate, ok, err := sim.BandwidthFor(c, t.Utilisation, func(run, of int) { bar.Set(run, of, "runs") })
	bar.Done("")
	if ok {
		t.Bandwidth = &rate
	}
	return t, err
}

// late returns a step that is shown after a second, if it has not ended. Done may be called again.
func late(v *daemon.Voice, label string) daemon.Step {
	l := new(lateStep)
	time.AfterFunc(time.Second, func() {
		l.Lock()
		defer l.Unlock()
		if !l.ended {
			l.step = v.Step(label)
		}
	})
	return l
}

type lateStep struct {
	sync.Mutex
	step  daemon.Step // nil: not shown
	ended bool
}

func (l *lateStep) Set(done, total int, note string) {
	l.Lock()
	defer l.Unlock()
	if l.step != nil {
		l.step.Set(done, total, note)
	}
}

func (l *lateStep) Done(result string) {
	l.Lock()
	defer l.Unlock()
	if l.ended = true; l.step != nil {
		l.step.Done(result)
		l.step = nil
	}
}

func (p *predictor) print(r planReport) error {
	o, demand, kind := p.o, bandwidth(r.Demand), "each an object"
	if r.Dataset.Packed {
		kind = "in shards"
	}
	take, hold, columns := human.Count(o.model.Accelerators, "accelerator")+" take", "the cache holds", ""
	switch {
	case r.Nodes > 1:
		take, hold = fmt.Sprintf("%d nodes of %s", r.Nodes, take), "the caches hold"
	case o.model.Accelerators == 1:
		take += "s"
	}
	lines := "bandwidth: " + o.bandwidth.words()
	if o.tiered {
		lines, columns = lines+", to the near tier "+o.near.words(), "near tier\t"
	}
	if r.Nodes > 1 {
		lines, columns = lines+", between nodes "+o.link.words(), columns+"peers\town disk\t"
	}
	samples := human.Number(r.Dataset.Samples) + " samples"
	if r.Dataset.Source != "" {
		samples = r.Dataset.Source + ": " + samples
	}
	fmt.Fprintf(p.out, "%s, %s, %s\n", samples, human.Bytes(r.Dataset.Bytes), kind)
	fmt.Fprintf(p.out, "%s %s; %s; %s %.0f%% of the dataset\n\n", take, demand.words(), lines, hold,
		100*min(float64(o.nodes)*float64(r.CacheBytes)/float64(max(r.Dataset.Bytes, 1)), 1))
	w := tabwriter.NewWriter(p.out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "epoch\tutilisation\ttime\tstall\tfetched\trequests\t"+columns+
		"cached\tahead\twaited for\tbound by\t")
	for _, e := range r.Epochs {
		share := func(n int64) string { return fmt.Sprintf("%.1f%%", 100*float64(n)/float64(e.Samples)) }
		fmt.Fprintf(w, "%d\t%.1f%%\t%s\t%s\t%s\t%s\t", e.Epoch.Epoch, 100*e.Utilisation, seconds(e.Seconds),
			seconds(e.Stall), human.Bytes(e.Bytes), human.Number(e.Requests))
		if o.tiered {
			fmt.Fprintf(w, "%s\t", human.Bytes(e.Near.Bytes))
		}
		if r.Nodes > 1 {
			fmt.Fprintf(w, "%s\t%s\t", human.Bytes(e.Peers.Bytes), human.Bytes(e.DiskBytes))
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t\n", share(e.KeepHits), share(e.RingHits), share(e.Waits), e.Bound)
	}
	if err := w.Flush(); err != nil {
		return err
	}
	fmt.Fprintln(p.out)
	fmt.Fprintln(p.out, r.Epochs[len(r.Epochs)-1].verdict())
	for _, e := range r.Epochs {
		if e.Cost != nil {
			fmt.Fprintf(p.out, "epoch %d: %s\n", e.Epoch.Epoch, e.Cost)
		}
	}
	if r.Target != nil {
		fmt.Fprintln(p.out, p.advice(*r.Target))
	}
	return nil
}

// uneven bounds an epoch that takes longer than each limit: at times it waits for bytes, at others for accelerators.
const uneven = "unevenness"

func boundOf(e sim.Epoch, l sim.Limits) string {
	if limit := l.Binding(); e.Seconds <= 1.03*limit.Seconds {
		return limit.Name
	}
	return uneven
}

// verdict says what bounds the epoch, and how close it is to the bound.
func (e planEpoch) verdict() string {
	bound := e.Limits.Binding()
	head := fmt.Sprintf("epoch %d: ", e.Epoch.Epoch)
	switch e.Bound {
	case uneven:
		return head + fmt.Sprintf("no limit is reached: %s, the nearest, takes %.0f%% of the time; bytes are missing "+
			"in bursts, or the first batches wait, for longer than --memory and --prefetch bridge", bound.Name,
			100*bound.Seconds/e.Seconds)
	case "compute":
		next := e.Limits.Others()[0]
		if next.Seconds == 0 {
			return head + "the accelerators are the limit, and nothing has to be fetched"
		}
		return head + fmt.Sprintf("the accelerators are the limit; next is %s, which takes %.0f%% of the time",
			next.Name, 100*next.Seconds/e.Seconds)
	}
	return head + fmt.Sprintf("%s is the limit: of what it allows, a utilisation of %.1f%%, %.0f%% is reached",
		bound.Name, 100*e.Limits.Compute/bound.Seconds, 100*min(bound.Seconds/e.Seconds, 1))
}

func (p *predictor) advice(t planTarget) string {
	goal := fmt.Sprintf("for %.4g%%: ", 100*t.Utilisation)
	var ways []string
	switch {
	case t.CacheBytes == nil:
	case *t.CacheBytes == 0:
		ways = append(ways, fmt.Sprintf("no cache is needed at %s", p.o.bandwidth.String()))
	default:
		ways = append(ways, fmt.Sprintf("--cache-size %s (%.1f%% of the dataset) at %s",
			cachedir.RoundUp(*t.CacheBytes), 100**t.CacheFraction, p.o.bandwidth.String()))
	}
	switch {
	case t.Bandwidth == nil:
	case *t.Bandwidth == 0:
		ways = append(ways, fmt.Sprintf("a filled cache of %s alone", human.Bytes(p.o.model.CacheBytes)))
	default:
		b := bandwidth(*t.Bandwidth)
		ways = append(ways, fmt.Sprintf("--bandwidth %s with --cache-size %s", b.String(),
			human.Bytes(p.o.model.CacheBytes)))
	}
	if len(ways) == 0 {
		return goal + "neither cache nor bandwidth is enough (look at latency, --connections, --workers and --memory)"
	}
	return goal + strings.Join(ways, ", or ")
}

// seconds formats a virtual time with about three digits.
func seconds(s float64) string {
	switch {
	case s < 1:
		return fmt.Sprintf("%.0fms", s*1000)
	case s < 100:
		return fmt.Sprintf("%.1fs", s)
	case s < 1e9:
		return time.Duration(s * 1e9).Round(time.Second).String()
	}
	return fmt.Sprintf("%.3gs", s)
}
