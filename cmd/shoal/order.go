package main

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"os/signal"
	"slices"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/shoalfs/shoal/internal/cli"
	"github.com/shoalfs/shoal/internal/human"
	"github.com/shoalfs/shoal/prefetch/certificate"
	"github.com/shoalfs/shoal/prefetch/engine"
	"github.com/shoalfs/shoal/prefetch/order"
)

type orderOptions struct {
	n, shardSamples, classSamples int
	sizes                         string
	mountpoint                    string
	paths                         bool
	certify, json                 bool
	batch, epochs                 int
}

func orderCommand() *cobra.Command {
	var o orderOptions
	c := &cobra.Command{
		Use:   "order SPEC",
		Short: "Print an order as sample numbers, one per line, or statistics of its batches",
		Long: `Prints the sample numbers of one epoch of SPEC, one per line, so that you can check what Shoal expects a trainer to
read. With --mount it uses that mount's dataset, and --paths prints paths instead of numbers. docs/orders.md describes
the orders.

Some orders depend on more than the number of samples. --mount provides it, or:
  windowed   the samples of each shard       --shard-samples N
  mixture    the samples of each class       --class-samples N, or sources by number (@FIRST-LAST:WEIGHT)
  buckets    the length of each sample       --sizes FILE

--certificate prints statistics of an epoch's batches instead: how often samples of one shard or class meet in a batch
of --batch samples, compared with batches drawn at random. With --world it also shows which classes each rank sees.`,
		Example: `  # what rank 1 of 4 of torch's DistributedSampler(seed=7) reads in epoch 3 of 50,000 samples
  shoal order torch:seed=7 --n 50000 --epoch 3 --world 4 --rank 1
  # the third epoch of a DataLoader(shuffle=True) directly after torch.manual_seed(42)
  shoal order torch-loader:seed=42,from=manual_seed --n 50000 --epoch 2
  # the paths that a mount of shards will be read in
  shoal order windowed:seed=1,window=4 --mount /mnt/train --paths
  # what 16 open shards of 1,000 samples do to batches of 256
  shoal order windowed:seed=1,window=16 --n 128000 --shard-samples 1000 --certificate --batch 256`,
		RunE: func(c *cobra.Command, args []string) error { return o.run(c, args[0]) },
	}
	f := c.Flags()
	f.IntVar(&o.n, "n", 0, "number of samples in the dataset")
	f.IntVar(&o.shardSamples, "shard-samples", 0, "assume shards of this many consecutive samples")
	f.IntVar(&o.classSamples, "class-samples", 0, "assume classes class0, class1, … of this many consecutive samples")
	f.StringVar(&o.sizes, "sizes", "", "file with the length of each sample in bytes, one per line")
	f.StringVar(&o.mountpoint, "mount", "", "take the samples of this mount")
	f.BoolVar(&o.paths, "paths", false, "print paths in the mount, not numbers")
	f.BoolVar(&o.certify, "certificate", false, "print what the batches are like, not the samples")
	f.IntVar(&o.batch, "batch", 0, "with --certificate: samples per batch, all ranks together")
	f.IntVar(&o.epochs, "epochs", 1, "with --certificate: number of epochs, from --epoch on")
	f.BoolVar(&o.json, "json", false,
		"with --certificate: print a JSON object for each epoch (schema in docs/orders.md)")
	f.Int("epoch", 0, "epoch")
	f.Int("world", 1, "number of ranks")
	f.String("rank", "", "rank whose samples are printed, R or A-B")
	return c
}

func (o *orderOptions) run(c *cobra.Command, text string) error {
	spec, err := order.Parse(text)
	if err != nil {
		return cli.Usage(err)
	}
	f := c.Flags()
	for _, key := range []string{"epoch", "world", "rank"} {
		if !f.Changed(key) {
			continue
		}
		if spec, err = spec.With(key, f.Lookup(key).Value.String()); err != nil {
			return cli.Usagef("--%s: %w", key, err)
		}
	}
	if err := o.check(c); err != nil {
		return err
	}
	inv := invocationOf(c.Context())
	if !inv.attached() {
		signal.Reset() // an order holds nothing that needs an orderly end, and may be long
	}
	if spec, err = inv.order(spec); err != nil {
		return cli.Usage(err)
	}
	switch {
	case inv.mount != nil:
		if e := inv.mount.door; !o.paths {
			return o.print(c, inv, spec, e.Dataset().Facts())
		} else if err := e.WriteOrder(c.OutOrStdout(), spec, true); err != nil {
			return cli.Usage(err)
		}
		return nil
	case o.mountpoint != "":
		return o.ofMount(c, spec)
	case o.paths:
		return cli.Usagef("--paths: give --mount too, which has the paths")
	case !f.Changed("n"):
		return cli.Usagef("--n: give the number of samples, or --mount")
	}
	facts, err := o.facts()
	if err != nil {
		return err
	}
	return o.print(c, inv, spec, facts)
}

func (o *orderOptions) check(c *cobra.Command) error {
	switch {
	case o.certify && o.batch < 1:
		return cli.Usagef("--certificate: give --batch too, the samples in a batch of all ranks together, 1 or more")
	case o.n > math.MaxUint32 && (o.certify || o.classSamples > 0 || o.sizes != ""):
		return cli.Usagef("--n %d: with --certificate, --class-samples or --sizes give less than 2^32", o.n)
	case o.certify && o.epochs < 1:
		return cli.Usagef("--epochs %d: give 1 or more", o.epochs)
	case o.certify && o.paths:
		return cli.Usagef("--certificate and --paths: leave one out")
	case !o.certify && (given(c, "batch") || given(c, "json") || given(c, "epochs")):
		return cli.Usagef("--batch, --epochs and --json are for --certificate: give it too, or leave them out")
	case o.mountpoint != "" && slices.ContainsFunc([]string{"n", "shard-samples", "class-samples", "sizes"},
		func(flag string) bool { return given(c, flag) }):
		return cli.Usagef("--mount already gives samples, shards, classes and sizes: leave out --n, --shard-samples, " +
			"--class-samples and --sizes")
	}
	return nil
}

// facts are the facts about a hypothetical dataset, from the flags.
func (o *orderOptions) facts() (order.Facts, error) {
	f := order.Facts{Samples: o.n, List: func(path string) ([]uint32, error) {
		data, err := os.ReadFile(path)
		if err != nil {
			return nil, fmt.Errorf("list: %w", err)
		}
		l, err := order.ParseList(data, o.n, nil)
		if err != nil {
			return nil, fmt.Errorf("list %s: %w (paths need --mount)", path, err)
		}
		return l, nil
	}}
	if o.shardSamples > 0 {
		f.Shards = func() order.Groups { return order.Contiguous(o.n, o.shardSamples) }
	}
	if o.classSamples > 0 {
		f.Label = func(sample int) int { return sample / o.classSamples }
		f.Classes = func() []string {
			names := make([]string, order.Contiguous(o.n, o.classSamples).Len())
			for i := range names {
				names[i] = "class" + strconv.Itoa(i)
			}
			return names
		}
	}
	if o.sizes != "" {
		sizes, err := readSizes(o.sizes, o.n)
		if err != nil {
			return f, err
		}
		f.Size = func(sample int) int64 { return sizes[sample] }
	}
	return f, nil
}

// readSizes reads one length from each line, for each of n samples.
func readSizes(path string, n int) ([]int64, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("--sizes: %w", err)
	}
	sizes := make([]int64, 0, n)
	for line := range bytes.Lines(data) {
		text := string(bytes.TrimSpace(line))
		size, err := strconv.ParseInt(text, 10, 64)
		if err != nil || size < 0 {
			return nil, cli.Usagef("--sizes %s, line %d: %q is not a length in bytes", path, len(sizes)+1, text)
		}
		sizes = append(sizes, size)
	}
	if len(sizes) != n {
		return nil, cli.Usagef("--sizes %s has %d lines for %d samples: give one for each", path, len(sizes), n)
	}
	return sizes, nil
}

func (o *orderOptions) print(c *cobra.Command, inv *invocation, spec order.Spec, facts order.Facts) (err error) {
	out := bufio.NewWriterSize(c.OutOrStdout(), 1<<16)
	if o.certify {
		err = o.certificates(out, inv, spec, facts)
	} else if seq, failed := spec.Over(facts, spec.Epoch()); failed != nil {
		err = orderError(failed)
	} else {
		err = engine.WriteNumbers(out, seq)
	}
	return cmp.Or(err, out.Flush())
}

func orderError(err error) error {
	switch {
	case errors.Is(err, order.ErrNeedsShards):
		return cli.Usagef("%w (here: --shard-samples N, or --mount of packed shards)", err)
	case errors.Is(err, order.ErrNeedsFacts):
		return cli.Usagef("%w (here: --mount MOUNTPOINT, --sizes FILE or --class-samples N)", err)
	}
	return cli.Usage(err)
}

// epochCertificate is the line that --json prints.
type epochCertificate struct {
	V         int    `json:"v"` // of this schema, 1
	Order     string `json:"order"`
	Algorithm string `json:"algorithm"`
	Epoch     int    `json:"epoch"`
	certificate.Certificate
}

// certificates measures each epoch. The batch is that of all ranks.
func (o *orderOptions) certificates(out io.Writer, inv *invocation, spec order.Spec, facts order.Facts) (err error) {
	if spec.World() > 1 {
		if spec, err = spec.With("rank", fmt.Sprintf("0-%d", spec.World()-1)); err != nil {
			return cli.Usage(err)
		}
	}
	subject := certificate.Subject{Batch: o.batch, Samples: facts.Samples, World: spec.World()}
	if facts.Classes != nil && len(facts.Classes()) > 0 {
		subject.Label = facts.Label
	}
	if facts.Shards != nil {
		subject.Shard = shardOf(facts.Shards(), facts.Samples)
	}
	for epoch := spec.Epoch(); epoch < spec.Epoch()+o.epochs; epoch++ {
		seq, err := spec.Over(facts, epoch)
		if err != nil {
			return orderError(err)
		}
		subject.Order = seq
		if m, ok := seq.(order.Mixed); ok && (facts.Classes == nil || len(facts.Classes()) == 0) {
			subject.Label = m.Source
		}
		bar := late(inv.Voice, fmt.Sprintf("epoch %d", epoch))
		subject.Progress = func(n int) { bar.Set(n, seq.Len(), "") }
		cert, err := certificate.Of(subject)
		bar.Done("")
		if err != nil {
			return cli.Usage(err)
		}
		line := epochCertificate{1, spec.String(), spec.Algorithm(), epoch, cert}
		if o.json {
			err = json.NewEncoder(out).Encode(line)
		} else {
			err = line.write(out)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// shardOf inverts groups.
func shardOf(g order.Groups, n int) func(sample int) int {
	of := make([]uint32, n)
	for shard := range g.Len() {
		for i := range g.Size(shard) {
			of[g.At(shard, i)] = uint32(shard)
		}
	}
	return func(sample int) int { return int(of[sample]) }
}

func (c epochCertificate) write(w io.Writer) error {
	var b bytes.Buffer
	fmt.Fprintf(&b, "%s, epoch %d: %s positions, %s whole batches of %s\n", c.Order, c.Epoch, human.Number(c.Positions),
		human.Number(c.Batches), human.Number(c.Batch))
	if c.Missing+c.Repeated == 0 {
		fmt.Fprintf(&b, "  samples  each of %s once\n", human.Number(c.Samples))
	} else {
		fmt.Fprintf(&b, "  samples  %s of %s do not occur, %s positions repeat one\n", human.Number(c.Missing),
			human.Number(c.Samples), human.Number(c.Repeated))
	}
	if s := c.Shards; s != nil {
		fmt.Fprintf(&b, "  shards   %s of %.5g samples; at most %s open at once\n", human.Number(s.Shards), s.Mean,
			human.Number(s.Open))
		fmt.Fprintf(&b, "  pairs    %.5g of the same shard in a batch; at random %.5g\n", s.Pairs, s.Random)
		fmt.Fprintf(&b, "  design   D = %.4g; 1+(B-1)(S-1)/(WS-1)(1-W/shards) with W open gives %.4g; a batch says "+
			"as much about the shards as a random one of %.4g\n",
			s.Design, s.Formula, float64(c.Batch)/math.Max(s.Design, 1e-9))
	}
	if l := c.Labels; l != nil {
		fmt.Fprintf(&b, "  labels   %s classes; a batch's total variation from the epoch is %.4f, at most %.4f; at "+
			"random %.4f\n", human.Number(l.Classes), l.Variation, l.Worst, l.Random)
	}
	for _, r := range c.Ranks {
		fmt.Fprintf(&b, "  rank %-3d %s positions of %s classes; their total variation from the epoch is %.4f; at "+
			"random %.4f\n", r.Rank, human.Number(r.Positions), human.Number(r.Classes), r.Variation, r.Random)
	}
	_, err := w.Write(b.Bytes())
	return err
}

// ofMount asks the daemon of a mount, which has the manifest and the shards.
func (o *orderOptions) ofMount(c *cobra.Command, spec order.Spec) error {
	args := []string{"order", spec.String()}
	for _, name := range []string{"paths", "certificate", "batch", "epochs", "json"} {
		if f := c.Flags().Lookup(name); f.Changed && (o.certify || name == "paths") {
			args = append(args, "--"+name+"="+f.Value.String())
		}
	}
	return askMount(c.Context(), o.mountpoint, c.OutOrStdout(), args...)
}
