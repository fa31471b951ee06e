package main

import (
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"github.com/shoalfs/shoal/demo"
	"github.com/shoalfs/shoal/python"
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
		Example: "  shoal demo --work-dir /tmp/shoal-demo",
		Args:    cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			self, err := os.Executable()
			if err != nil {
				return err
			}
			o.Shoal, o.Progress, o.Client = self, c.ErrOrStderr(), python.Files
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
	c.AddCommand(demoStoreCommand())
	return c
}

func demoStoreCommand() *cobra.Command {
	var o demo.Options
	c := &cobra.Command{
		Use:   "store",
		Short: "Run the demo's S3 server with photographs in the background, to try things on",
		Long: `Makes photographs, puts them into a real S3 server behind a slow network as s3://photos/train, and goes to the
background once it answers. It prints shell commands that set AWS_ENDPOINT_URL, AWS_REGION and credentials for
it, and STORE_PID, to end it with kill. It needs Debian's wallpaper packages and versitygw.`,
		Example: `  eval "$(shoal demo store --photos 1024)"
  shoal mount s3://photos/train /mnt/train --daemon
  kill $STORE_PID`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			env := filepath.Join(o.WorkDir, "store.env")
			if parent, err := background(&engineOptions{daemon: true, cacheDir: o.WorkDir}); parent {
				if err != nil {
					return err
				}
				exports, err := os.ReadFile(env)
				if err != nil {
					return err
				}
				_, err = c.OutOrStdout().Write(exports)
				return err
			}
			self, err := os.Executable()
			if err != nil {
				return err
			}
			o.Shoal, o.Progress = self, noticeLines{}
			defer func() { _ = os.Remove(env) }()
			return demo.Store(c.Context(), o, func(vars []string) error {
				if err := os.WriteFile(env, []byte(demo.Exports(vars, os.Getpid())), 0o600); err != nil {
					return err
				}
				return ready()
			})
		},
	}
	f := c.Flags()
	f.StringVar(&o.WorkDir, "work-dir", "shoal-demo", "folder for photographs and objects")
	f.DurationVar(&o.Latency, "latency", 30*time.Millisecond, "median time of the store to the first byte")
	f.IntVar(&o.Photos, "photos", 4096, "photographs in the bucket")
	return c
}
