package main

import (
	"github.com/spf13/cobra"

	"github.com/shoalfs/shoal/internal/cli"
	"github.com/shoalfs/shoal/lab/demo"
)

func demoCommand() *cobra.Command {
	o := demo.Defaults()
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
			if err := check(o); err != nil {
				return err
			}
			if o.Shoal, err = shoal(); err != nil {
				return err
			}
			o.Progress = c.ErrOrStderr()
			return demo.Run(c.Context(), o, c.OutOrStdout())
		},
	}
	f := c.Flags()
	f.StringVar(&o.WorkDir, "work-dir", o.WorkDir, "folder for photographs, objects, caches and results")
	f.StringVar(&o.Python, "python", o.Python, "interpreter that has torch")
	f.DurationVar(&o.Latency, "latency", o.Latency, "median time of the store to the first byte")
	f.Float64Var(&o.Sigma, "sigma", o.Sigma, "standard deviation of the latency's logarithm")
	f.IntVar(&o.Photos, "photos", o.Photos, "photographs in the training set")
	f.IntVar(&o.Steps, "steps", 0, "training steps of each run (0: one epoch)")
	f.IntVar(&o.Batch, "batch", o.Batch, "photographs per step")
	f.IntVar(&o.Workers, "workers", o.Workers, "the DataLoader's num_workers")
	f.IntVar(&o.Seed, "seed", o.Seed, "the sampler's seed")
	f.StringVar(&o.CacheSize, "cache-size", o.CacheSize, "passed to shoal")
	f.StringVar(&o.Memory, "memory", o.Memory, "passed to shoal")
	return c
}

// check checks the flags of demo and store.
func check(o demo.Options) error {
	switch {
	case o.Steps < 0 || o.Batch < 1 || o.Workers < 0:
		return cli.Usagef("--steps and --workers must not be negative, and --batch must be above 0")
	case o.Photos < 2*o.Batch:
		return cli.Usagef("--photos %d: give at least %d, two batches", o.Photos, 2*o.Batch)
	case o.Latency < 0 || !(o.Sigma >= 0 && o.Sigma < 10):
		return cli.Usagef("--latency must not be negative, and --sigma must be from 0 to 10")
	}
	return nil
}
