package main

import (
	"encoding/json"
	"errors"
	"strings"

	"github.com/spf13/cobra"

	"github.com/shoalfs/shoal/cache/cachedir"
	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/internal/cli"
	"github.com/shoalfs/shoal/internal/doctor"
	"github.com/shoalfs/shoal/internal/findings"
	"github.com/shoalfs/shoal/internal/machine"
)

type doctorOptions struct {
	doctor.Options    // what the flags give in its form
	cacheSize, memory amount
	asJSON            bool
	store             storeOptions
}

func doctorCommand() *cobra.Command {
	o := doctorOptions{cacheSize: amount{bytes: 20 << 30}, memory: amount{bytes: 2 << 30}}
	c := &cobra.Command{
		Use:   "doctor [SOURCE]",
		Short: "Check this machine and a source, and name what makes Shoal slow",
		Long: `Checks this machine (FUSE, cores, memory, the disk of --cache-dir) and, with SOURCE, the object store: bucket,
listing, latency of small GETs, bandwidth, and how many connections are useful. Each check reports what was measured,
what it means, and what to change. The last one predicts an epoch from the measured rates, as shoal plan does.

It changes nothing: its temporary file in --cache-dir has no name and disappears with the process. With SOURCE it sends
hundreds to thousands of GETs. It takes about 20 s, or a third of that with --quick. Exit code 1 if a check failed
(docs/doctor.md).`,
		Example: `  shoal doctor
  shoal doctor s3://photos/train --cache-dir /nvme/shoal --cache-size 200GiB
  shoal doctor s3://photos/train --quick --json`,
		RunE: func(c *cobra.Command, args []string) error {
			return runDoctor(c, &o, strings.Join(args, ""))
		},
	}
	f := c.Flags()
	f.StringVar(&o.CacheDir, "cache-dir", "",
		"cache folder whose disk is measured (default: the one for SOURCE in the user's cache folder)")
	f.Var(&o.cacheSize, "cache-size", "the --cache-size that you will give to mount")
	f.Var(&o.memory, "memory", "the --memory that you will give to mount")
	f.BoolVar(&o.FeedOnly, "feed-only", false, "skip the FUSE checks")
	f.BoolVar(&o.Quick, "quick", false, "measure for a third of the time, and up to 64 connections")
	o.store.add(c)
	f.BoolVar(&o.asJSON, "json", false, "print the versioned JSON (docs/doctor.md)")
	return c
}

func runDoctor(c *cobra.Command, o *doctorOptions, source string) (err error) {
	inv := invocationOf(c.Context())
	opts := &o.Options
	opts.Pod = inv.environ("KUBERNETES_SERVICE_HOST") != ""
	if eo := (engineOptions{cacheDir: opts.CacheDir}); source == "" && eo.cacheDir == "" {
		opts.CacheDir = cacheBase()
	} else {
		if err := eo.resolveCacheDir(inv, source); err != nil {
			return err
		}
		opts.CacheDir = eo.cacheDir
	}
	if opts.CacheSize, _, err = o.cacheSize.disk(opts.CacheDir, machine.Room); err != nil {
		return err
	}
	if opts.Memory, _, err = o.memory.memory(machine.ReadMemory()); err != nil {
		return err
	}
	if source != "" {
		if _, err = objstore.ParseSource(source); err != nil {
			return cli.Usage(err)
		}
		if opts.Source, err = inv.source(source); err != nil {
			return err
		}
		if opts.Store.Store, err = o.store.options(inv); err != nil {
			return err
		}
		opts.Store.Getenv = inv.environ
		opts.Data = func(files int) int64 { return cachedir.ForecastMemory(opts.Memory, files) }
	}
	begin := func(code string) func(string) { return inv.Step(code).Done }
	report, err := doctor.Run(c.Context(), doctor.Checks(*opts), begin)
	if err != nil {
		return err
	}
	report.Shoal, report.Source, report.CacheDir = version, source, opts.CacheDir
	if o.asJSON {
		err = json.NewEncoder(c.OutOrStdout()).Encode(report)
	} else {
		err = report.Print(c.OutOrStdout())
	}
	return errors.Join(err, findings.Failed(report.Findings))
}
