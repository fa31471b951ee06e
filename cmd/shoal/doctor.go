package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	humanize "github.com/dustin/go-humanize"
	"github.com/spf13/cobra"

	"github.com/shoalfs/shoal/cache/cachedir"
	"github.com/shoalfs/shoal/internal/cli"
	"github.com/shoalfs/shoal/internal/doctor"
	"github.com/shoalfs/shoal/internal/machine"
	"github.com/shoalfs/shoal/prefetch/order"
	"github.com/shoalfs/shoal/prefetch/sim"
)

// doctorOptions are the flags of shoal doctor.
type doctorOptions struct {
	cacheDir, mountpoint, python string
	mostDisk, mostMemory         amount
	cacheSize, memory            cli.Size // with their values on this machine
	quick, feedOnly, asJSON      bool
	weakETag                     bool
}

func doctorCommand() *cobra.Command {
	o := doctorOptions{mostDisk: amount{bytes: 20 << 30}, mostMemory: amount{bytes: 2 << 30}}
	c := &cobra.Command{
		Use:   "doctor [SOURCE]",
		Short: "Check this machine and a source, and name what makes Shoal slow",
		Long: `Checks this machine (FUSE, limits, the disk of --cache-dir, versions, GPU) and, with SOURCE, the object store: name,
TLS, clock, credentials, listing, latency of small GETs, bandwidth, and how many connections are useful. Each check
reports what was measured, what it means, and what to change. The last one predicts an epoch from the measured
rates, as shoal plan does.

It changes nothing: its temporary file in --cache-dir has no name and disappears with the process. With SOURCE it sends
hundreds to thousands of GETs. It takes about 20 s, or a third of that with --quick. Exit code 1 if a check failed
(docs/doctor.md).`,
		Example: `  shoal doctor
  shoal doctor s3://photos/train --cache-dir /nvme/shoal --cache-size 200GiB
  shoal doctor s3://photos/train --quick --json`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			source := ""
			if len(args) == 1 {
				source = args[0]
			}
			return runDoctor(c, &o, source)
		},
	}
	f := c.Flags()
	f.StringVar(&o.cacheDir, "cache-dir", "", "cache folder whose disk is measured (default: the one for SOURCE in the user's cache folder)")
	f.Var(&o.mostDisk, "cache-size", "the --cache-size that you will give to mount")
	f.Var(&o.mostMemory, "memory", "the --memory that you will give to mount")
	f.StringVar(&o.mountpoint, "mountpoint", "", "future mount point, to check whether other containers will see it")
	f.StringVar(&o.python, "python", "", "the trainer's interpreter (default: the first python3 in PATH)")
	f.BoolVar(&o.feedOnly, "feed-only", false, "skip the FUSE checks")
	f.BoolVar(&o.quick, "quick", false, "measure for a third of the time, and up to 64 connections")
	f.BoolVar(&o.weakETag, "weak-etag", false, "accept objects listed without an ETag, as mount does")
	f.BoolVar(&o.asJSON, "json", false, "print the versioned JSON (docs/doctor.md)")
	return c
}

func runDoctor(c *cobra.Command, o *doctorOptions, source string) (err error) {
	inv := invocationOf(c.Context())
	opts := doctor.Options{
		Python: o.python, ShoalVersion: version,
		FeedOnly: o.feedOnly, Quick: o.quick,
	}
	if o.mountpoint != "" {
		if opts.Mountpoint, err = inv.abs(o.mountpoint); err != nil {
			return err
		}
	}
	if opts.CacheDir = cacheBase(); source != "" || o.cacheDir != "" {
		eo := engineOptions{cacheDir: o.cacheDir}
		if err := eo.resolveCacheDir(inv, source); err != nil {
			return err
		}
		opts.CacheDir = eo.cacheDir
	}
	if opts.CacheSize, _, err = o.mostDisk.disk(opts.CacheDir, machine.Room); err != nil {
		return err
	}
	if opts.Memory, _, err = o.mostMemory.memory(machine.ReadMemory()); err != nil {
		return err
	}
	o.cacheSize, o.memory = cli.Size(opts.CacheSize), cli.Size(opts.Memory)
	if source != "" {
		text, err := inv.source(source)
		if err != nil {
			return err
		}
		opts.Source = &doctor.Source{
			Text: text, Getenv: inv.environ, WeakETag: o.weakETag, LedgerFor: cachedir.ForecastMemory,
			Forecast: func(ctx context.Context, f doctor.Facts) doctor.Result { return forecast(ctx, f, o) },
		}
	}
	report, err := doctor.Run(c.Context(), doctor.Checks(opts), func(check doctor.Check) func(doctor.Result) {
		if check.Takes <= 2*time.Second { // too short to show
			return func(doctor.Result) {}
		}
		step := inv.step(check.Area + ": " + check.Name)
		return func(r doctor.Result) { step.Done(string(r.Status)) }
	})
	if err != nil {
		return err
	}
	report.Source, report.CacheDir = source, opts.CacheDir
	if o.asJSON {
		err = json.NewEncoder(c.OutOrStdout()).Encode(report)
	} else {
		err = report.Print(c.OutOrStdout())
	}
	return errors.Join(err, report.Failed())
}

// forecast predicts a cold and a warm epoch of a trainer without compute, with the code of shoal plan.
func forecast(ctx context.Context, f doctor.Facts, o *doctorOptions) doctor.Result {
	line := bandwidth(f.Bandwidth)
	cacheSize := strings.ReplaceAll(o.cacheSize.String(), " ", "") // without spaces, so that it can be copied
	plan := fmt.Sprintf("shoal plan %s --latency %s --latency-sigma %.2f --bandwidth %s --connections %d --cache-size %s --workload resnet50-h100",
		f.Source, f.Latency.Round(100*time.Microsecond), f.Sigma, line.String(), f.Connections, cacheSize)
	held := fmt.Sprintf("--cache-size %s holds %.0f%% of it", cacheSize, 100*min(float64(o.cacheSize)/float64(max(f.Bytes, 1)), 1))
	if memory := cachedir.ForecastMemory(int64(o.memory), f.Objects); f.Whole && f.Bytes <= memory && f.Bytes > int64(o.cacheSize) {
		held += ", and --memory all of it"
	}
	sizes := make(sim.Files, 0, len(f.Sizes))
	for _, n := range f.Sizes {
		if n > 0 {
			sizes = append(sizes, n)
		}
	}
	skip := func(format string, args ...any) doctor.Result {
		return doctor.Result{Status: doctor.Skipped, Meaning: fmt.Sprintf(format, args...), Remedy: plan}
	}
	switch {
	case !f.Whole:
		return skip("the listing takes longer than this check may; shoal plan lists it all")
	case len(sizes) == 0:
		return skip("all objects are empty")
	case f.Shards:
		return doctor.Result{
			Status: doctor.OK, Measured: fmt.Sprintf("%s in shards take %s at %s; %s", humanize.IBytes(uint64(f.Bytes)), seconds(float64(f.Bytes)/f.Bandwidth), line.String(), held),
			Meaning: "the line's time alone: what is in the shards is known once their indexes were read", Remedy: plan,
		}
	}
	p := predictor{o: &planOptions{
		cacheSize: o.cacheSize, epochs: 2,
		modelledStore:   modelledStore{bandwidth: line, latency: f.Latency, sigma: f.Sigma, connections: connections(f.Connections)},
		modelledTrainer: modelledTrainer{batch: 256, accelerators: 1, workers: 16, prefetch: 2, step: time.Microsecond}, // no compute
	}}
	cfg := p.config()
	cfg.Samples, cfg.Sizes, cfg.Order = len(sizes), sizes, func(epoch int) order.Order { return order.Uniform(len(sizes), 0, epoch) }
	cfg.Memory = cachedir.ForecastMemory(int64(o.memory), len(sizes))
	cfg.Bulk = f.Bytes <= 2*cfg.Memory
	cfg.Watch = func(int, int, int) bool { return ctx.Err() == nil }
	epochs, err := sim.Run(cfg)
	switch {
	case errors.Is(err, sim.ErrStopped):
		return skip("it took too long")
	case err != nil:
		return skip("it could not be predicted: %s", err)
	}
	rate := func(e sim.Epoch) string { return humanize.Comma(int64(float64(e.Samples)/e.Seconds)) + " files/s" }
	cold, warm := epochs[0], epochs[1]
	r := doctor.Result{
		Status:   doctor.OK,
		Measured: fmt.Sprintf("at these rates a first epoch takes %s (%s, bound by %s)", seconds(cold.Seconds), rate(cold), bindingOf(cfg, cold)),
		Meaning:  held + "; a slower trainer never waits, if the order is known",
		Remedy:   plan,
		Values:   map[string]float64{"cold_epoch_seconds": cold.Seconds, "cold_files_per_second": float64(cold.Samples) / cold.Seconds, "warm_epoch_bytes": float64(warm.Bytes), "cold_epoch_bytes": float64(cold.Bytes)},
	}
	if warm.Bytes*20 < cold.Bytes {
		r.Measured += ", and the next ones nothing is fetched for"
	} else {
		r.Measured += fmt.Sprintf(", and each one after it %s (%s, bound by %s)", seconds(warm.Seconds), rate(warm), bindingOf(cfg, warm))
		r.Values["warm_epoch_seconds"] = warm.Seconds
	}
	return r
}

// bindingOf names the limit of an epoch of a trainer without compute.
func bindingOf(c sim.Config, e sim.Epoch) string {
	return c.Limits(e).Others()[0].Name
}
