package main

import (
	"bufio"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/shoalfs/shoal/prefetch/order"
)

func orderCommand() *cobra.Command {
	var n int
	c := &cobra.Command{
		Use:   "order SPEC",
		Short: "Print an order: sample numbers, one a line",
		Long: `Prints the sample numbers that SPEC gives for one epoch, one a line, so that anyone can check
what Shoal expects a trainer to read.`,
		Example: `  # what rank 1 of 4 of torch's DistributedSampler(seed=7) reads in epoch 3 of 50,000 samples
  shoal order torch:seed=7 --n 50000 --epoch 3 --world 4 --rank 1`,
		Args: cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			spec, err := order.Parse(args[0])
			if err != nil {
				return usageError{err}
			}
			f := c.Flags()
			if n < 0 || !f.Changed("n") {
				return usagef("--n: give the number of samples, 0 or more")
			}
			for _, key := range []string{"epoch", "world", "rank"} {
				if !f.Changed(key) {
					continue
				}
				if spec, err = spec.With(key, f.Lookup(key).Value.String()); err != nil {
					return usagef("--%s: %w", key, err)
				}
			}
			o, err := spec.Order(n, spec.Epoch())
			if err != nil {
				return usageError{err}
			}
			w := bufio.NewWriterSize(c.OutOrStdout(), 1<<16)
			var line []byte
			for pos := range o.Len() {
				line = strconv.AppendInt(line[:0], int64(o.At(pos)), 10)
				if _, err := w.Write(append(line, '\n')); err != nil {
					return err
				}
			}
			return w.Flush()
		},
	}
	f := c.Flags()
	f.IntVar(&n, "n", 0, "number of samples in the dataset")
	f.Int("epoch", 0, "epoch")
	f.Int("world", 1, "number of ranks")
	f.String("rank", "0", "rank whose samples are printed, R or A-B")
	return c
}
