package main

import (
	"time"

	"github.com/spf13/cobra"

	"github.com/shoalfs/shoal/lab/demo"
)

func demoCommand() *cobra.Command {
	var o demo.Options
	c := &cobra.Command{
		Use:   "demo",
		Short: "Run the main job on real photographs, end to end",
		Long: `Makes a training set of real photographs, puts it into a real S3 server behind a slow network, trains
a small model on it through a mount without an order, with the order known, and warm, and through the
feed, and prints what each cost. It runs everything on this machine and leaves no process and no mount.

It needs python3 with torch and torchvision, fuse3, Debian's wallpaper packages and versitygw, and
says how to get what is missing.`,
		Example: "  shoal-lab demo --work-dir /tmp/shoal-demo",
		Args:    cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) (err error) {
			if o.Shoal, err = shoal(); err != nil {
				return err
			}
			if o.Proxy, err = proxyOf(); err != nil {
				return err
			}
			o.Progress = c.ErrOrStderr()
			return demo.Run(c.Context(), o, c.OutOrStdout())
		},
	}
	f := c.Flags()
	f.StringVar(&o.WorkDir, "work-dir", "shoal-demo", "folder for photographs, objects, caches and results")
	f.StringVar(&o.Python, "python", "/usr/bin/python3", "interpreter that has torch")
	f.DurationVar(&o.Latency, "latency", 30*time.Millisecond, "median time of the store to the first byte")
	f.Float64Var(&o.Sigma, "sigma", 0.3, "standard deviation of the latency's logarithm")
	f.IntVar(&o.Photos, "photos", 4096, "photographs in the training set")
	f.IntVar(&o.Steps, "steps", 0, "training steps of each run (0: one epoch)")
	f.IntVar(&o.Batch, "batch", 16, "photographs a step")
	f.IntVar(&o.Workers, "workers", 4, "the DataLoader's num_workers")
	f.IntVar(&o.Seed, "seed", 7, "the sampler's seed")
	f.StringVar(&o.CacheSize, "cache-size", "2GiB", "passed to shoal")
	f.StringVar(&o.Memory, "memory", "512MiB", "passed to shoal")
	return c
}
