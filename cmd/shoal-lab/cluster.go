package main

import (
	"time"

	"github.com/spf13/cobra"

	"github.com/shoalfs/shoal/lab/demo"
)

func clusterCommand() *cobra.Command {
	var o demo.Options
	c := &cobra.Command{
		Use:   "cluster",
		Short: "Play a job on four machines that share one cache, and kill one of them",
		Long: `Plays a job on four nodes, each in a network namespace of its own, whose caches hold the photographs only together: two
epochs without a cluster, two with one, and a third in which a node is killed. It prints how many bytes came from
the store, from peers and from the nodes' own caches, checks that each trainer got exactly what the sampler's order says,
and writes a report. It runs everything on this machine and leaves no process and no namespace.

It needs root, iproute2, etcd, Debian's wallpaper packages and versitygw, and says how to get what is missing.`,
		Example: "  shoal-lab cluster --work-dir /tmp/shoal-demo",
		Args:    cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) (err error) {
			if o.Shoal, err = shoal(); err != nil {
				return err
			}
			o.Progress = c.ErrOrStderr()
			return demo.Cluster(c.Context(), o, c.OutOrStdout())
		},
	}
	f := c.Flags()
	f.StringVar(&o.WorkDir, "work-dir", "shoal-demo", "folder for photographs, objects, caches and the report")
	f.DurationVar(&o.Latency, "latency", 30*time.Millisecond, "median time of the store to the first byte")
	f.Float64Var(&o.Sigma, "sigma", 0.3, "standard deviation of the latency's logarithm")
	f.IntVar(&o.Photos, "photos", 4096, "photographs in the training set")
	f.IntVar(&o.Seed, "seed", 7, "the sampler's seed")
	return c
}
