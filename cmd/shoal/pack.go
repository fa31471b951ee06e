package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"runtime/debug"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/shoalfs/shoal/cache/cachedir"
	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/cache/objstore/stores"
	"github.com/shoalfs/shoal/cache/shard"
	"github.com/shoalfs/shoal/gpuingest"
	"github.com/shoalfs/shoal/gpuingest/jpeg"
	"github.com/shoalfs/shoal/internal/cli"
	"github.com/shoalfs/shoal/internal/daemon"
	"github.com/shoalfs/shoal/internal/human"
	"github.com/shoalfs/shoal/internal/machine"
	"github.com/shoalfs/shoal/prefetch/engine"
)

type packOptions struct {
	shardSize   cli.Size
	most        amount
	seed        uint64
	connections connections
	asJSON      bool
	re          recoding
	store       storeOptions
	near        engine.NearTier
	destKeyFile string
	cluster     clusterOptions
}

func packCommand() *cobra.Command {
	o := packOptions{shardSize: 64 << 20, most: amount{bytes: 400 << 20}, connections: 256}
	c := &cobra.Command{
		Use:   "pack SOURCE DEST",
		Short: "Pack small files into tar shards",
		Long: `Packs the files of SOURCE into plain tar shards under DEST, in a seeded random order, with an index
beside each shard and a manifest over all. Every shard is read back and checked before it counts.
DEST is then a source itself, and ` + "`shoal mount SOURCE MOUNTPOINT --shards DEST`" + ` reads SOURCE through it.

The same command resumes an interrupted pack. With --cluster one node packs a DEST at a time: the others wait, and find
it done.

With --resize or --decode the pictures are converted first: made smaller, or into raw pixels that need no decoding. The
set is then a dataset of its own, with another version, and says so in its manifest; broken pictures and other files
stay as they are. The new files wait on this machine's disk, under --spool, until the set is complete.

With --recode JPEGs are stored in a form that is about a tenth smaller: tar lists them by their names, and mounts, feeds,
the S3 endpoint and shoal unpack give the originals, under the version of SOURCE. Other programs cannot read them.`,
		Example: `  shoal pack s3://photos/train s3://photos-packed/train
  shoal pack file:///data/train file:///data/train-shards --shard-size 128MiB --seed 7
  shoal pack s3://photos/train s3://photos-small/train --resize short=400 --quality 90
  shoal pack s3://photos/train s3://photos-recoded/train --recode
  shoal pack s3://photos/train s3://photos-raw/train --resize short=400 --decode`,
		RunE: func(c *cobra.Command, args []string) error { return o.run(c, args) },
	}
	f := c.Flags()
	f.Var(&o.shardSize, "shard-size", "shard size; a larger sample gets its own shard")
	f.Uint64Var(&o.seed, "seed", 0, "seed for the order in which samples are packed")
	f.Var(&o.connections, "connections", "maximum requests in flight: up to 512, or auto (512)")
	f.Var(&o.most, "memory", "maximum memory of the process, as for mount")
	f.StringVar(&o.re.resize, "resize", "", "resize larger pictures first: short=400 makes the shorter side 400 pixels")
	f.IntVar(&o.re.Quality, "quality", 90, "JPEG quality of resized pictures, 1 to 100")
	f.BoolVar(&o.re.Decode, "decode", false,
		"store pictures as raw pixels (npy): about nine times the size, no decoding")
	addChoice(f, &o.re.coded, "recode", "store JPEGs in a smaller form, from which every reader gets the originals",
		append([]string{yes, no}, daemonRecodes...)...) // an environment or a file may have those for daemons
	f.StringVar(&o.re.spool, "spool", "",
		"folder for the temporary files of --resize, --decode and --recode (default: the system's)")
	f.BoolVar(&o.asJSON, "json", false, "print the result as JSON")
	o.store.add(c)
	addNear(c, &o.near)
	o.cluster.addNode(c) // what of it pack does not need is taken, as mount, serve and warm take it
	f.Lookup("cluster").Usage = "etcd://HOST:PORT[,…]/NAME: one node of this cluster packs a DEST at a time"
	f.StringVar(&o.destKeyFile, "dest-sse-c-key-file", "",
		"file with the key that S3 encrypts the shards with, or none (default: "+customerKeyVariable+")")
	return c
}

func (o *packOptions) run(c *cobra.Command, args []string) error {
	memory, remarks, err := o.most.memory(machine.ReadMemory())
	switch {
	case err != nil:
		return err
	case o.shardSize < 1<<20:
		return cli.Usagef("--shard-size %s: give at least 1MiB", o.shardSize.String())
	case memory < 128<<20:
		return cli.Usagef("--memory %s: give at least 128MiB", o.most.String())
	}
	(&invocation{remarks: remarks}).logLimits(slog.Default())
	if given(c, "recode") && slices.Contains(daemonRecodes, o.re.coded) {
		return cli.Usagef("--recode=%s is for daemons: give --recode, or leave it out", o.re.coded)
	}
	if err := cmp.Or(o.re.check(given(c, "quality")), checkNear(o.near)); err != nil {
		return cli.Usage(err)
	}
	source, err := objstore.ParseSource(args[0])
	dest, failed := objstore.ParseSource(args[1])
	if err = cmp.Or(err, failed); err != nil {
		return cli.Usage(err)
	} else if dest.Overlaps(source) {
		return cli.Usagef("%s and the source %s overlap: give another destination", dest, source)
	}
	unlock, err := o.cluster.only(c.Context(), invocationOf(c.Context()), "pack/"+strings.TrimSuffix(args[1], "/"))
	if err != nil {
		return err
	}
	defer unlock()
	from, to, err := packStores(invocationOf(c.Context()), o.store, o.destKeyFile)
	if err != nil {
		return err
	}
	res, err := pack(c.Context(), args[0], args[1], from, to, shard.PackOptions{
		ShardSize: int64(o.shardSize), Seed: o.seed, Permute: engine.PackOrder(o.seed),
		Connections: o.connections.most(), Memory: memory,
	}, o.re, o.near)
	if err != nil {
		return wrongUse(err)
	}
	if o.asJSON {
		return json.NewEncoder(c.OutOrStdout()).Encode(res)
	}
	switch {
	case res.Complete:
		fmt.Fprintf(c.OutOrStdout(), "%s holds this set already: nothing to do\n", args[1])
	case res.Resumed > 0:
		fmt.Fprintf(c.OutOrStdout(), "resumed: %s of %s were there already\n", human.Number(res.Resumed),
			human.Count(res.Shards, "shard"))
	}
	fmt.Fprintf(c.OutOrStdout(), "%s, %s, in %s under %s; dataset version %.12s\n", human.Count(res.Files, "file"),
		human.Bytes(res.Bytes), human.Count(res.Shards, "shard"), args[1], res.Version)
	if res.Cost.Priced {
		fmt.Fprintf(c.OutOrStdout(), "sent: %s\n", res.Cost)
	}
	if n := res.Escaped.Files; n > 0 {
		fmt.Fprintf(c.OutOrStdout(), "%s names were escaped in the tars, which WebDataset would have merged or left "+
			"out; a mount shows the original ones\n", human.Number(n))
	}
	return nil
}

func packStores(inv *invocation, o storeOptions, destKeyFile string) (from, to stores.Options, err error) {
	store, err := o.options(inv)
	if err != nil {
		return from, to, err
	}
	from.Store, to.Store = store, store
	switch destKeyFile {
	case "":
	case "none":
		to.Store.CustomerKey = objstore.CustomerKey{}
	default:
		to.Store.CustomerKey, _, err = keyOf(inv, "dest-sse-c-key-file", destKeyFile, "", objstore.ParseCustomerKey)
	}
	return from, to, err
}

type recoding struct {
	gpuingest.Recode
	resize, spool string
	coded         string // yes: JPEGs are stored recoded
}

func (r *recoding) check(quality bool) (err error) {
	if r.Short, err = gpuingest.ParseResize(r.resize); err != nil {
		return err
	}
	switch {
	case r.coded == yes && r.Decode:
		return errors.New("--recode is for JPEG, and --decode stores pixels: leave one out")
	case !jpeg.Available && (r.Decode || r.Short > 0 || r.coded == yes):
		return jpeg.ErrUnavailable
	case r.Quality < 1 || r.Quality > 100:
		return fmt.Errorf("--quality %d: give a number from 1 to 100", r.Quality)
	case quality && r.Decode:
		return errors.New("--quality is for JPEG, and --decode stores pixels: leave one out")
	case quality && r.Short == 0:
		return errors.New("--quality goes with --resize: pictures that keep their size are not encoded again")
	}
	r.spool = cmp.Or(r.spool, os.TempDir())
	return nil
}

func (r *recoding) all(ctx context.Context, src objstore.ReaderAt, m *catalog.Manifest, connections int,
	memory int64) (*recoded, *catalog.Manifest, error) {
	made, err := recode(ctx, src, m, r.Recode, r.spool, connections, memory)
	if err != nil {
		return nil, nil, err
	}
	if n := made.kept.Load(); n > 0 {
		daemon.Own.Notice("%s files are not readable pictures and stay as they are", human.Number(n))
	}
	built, err := catalog.Build(made.list, catalog.BuildOptions{})
	if err != nil {
		return nil, nil, fmt.Errorf("recoded files: %w", err)
	}
	m, err = mapped(built)
	return made, m, err
}

// packOverhead is a pack's memory besides the parts that it builds: Go's, also for its garbage, and the connections'.
const packOverhead = 96 << 20

// packSource puts retries and the near tier before the store of a pack. The tier's memory is taken from the pack's.
func packSource(ctx context.Context, base objstore.Store, source objstore.Source, store stores.Options,
	nearby engine.NearTier, budget *objstore.Budget, to string,
	o *shard.PackOptions) (objstore.Layer, *engine.Near, error) {
	debug.SetMemoryLimit(o.Memory)
	memory := engine.NearMemory(o.Memory)
	tier, err := nearby.Open(ctx,
		engine.NearOptions{Source: source, Beside: []string{to}, Store: store.Store, Memory: memory, Log: o.Logger})
	if tier != nil {
		o.Memory -= memory
	}
	o.Source = source.String()
	return tier.Before(objstore.Retry(objstore.Limit(base, o.Connections), budget.Policy(base)), source), tier, err
}

// packed is what --json prints.
type packed struct {
	shard.Result
	Version string
	Cost    engine.Cost
}

func pack(ctx context.Context, from, to string, fromStore, toStore stores.Options, o shard.PackOptions, re recoding,
	nearby engine.NearTier) (res packed, err error) {
	o.Logger = warnings()
	fromStore.Logger, toStore.Logger = o.Logger, o.Logger
	base, source, err := stores.Open(ctx, from, fromStore)
	if err != nil {
		return res, err
	}
	dst, where, err := stores.Create(ctx, to, toStore)
	if err != nil {
		return res, err
	}
	budget := objstore.NewBudget(fromStore.Store.GetsPerHour, o.Logger)
	store, tier, err := packSource(ctx, base, source, fromStore, nearby, budget, to, &o)
	if err != nil {
		return res, err
	}
	defer tier.Close()
	var src objstore.ReaderAt = store
	// Checked during the listing, which their errors end.
	asked, listing := errgroup.WithContext(ctx)
	asked.Go(func() error { return base.Check(listing) })
	asked.Go(func() error {
		if set, err := shard.IsSet(listing, store, source); err != nil || !set {
			return err
		}
		return fmt.Errorf("%s is a shard set (mount it as it is, or restore its files: shoal unpack)", source)
	})
	bar := daemon.Own.Step("listing " + source.String())
	objects := objstore.ListParallel(listing, store, source.Prefix, 16, func(n int) {
		bar.Set(0, 0, human.Number(n)+" objects")
	})
	built, err := catalog.Build(objects, catalog.BuildOptions{Prefix: source.Prefix})
	bar.Done("")
	if err := asked.Wait(); err != nil {
		return res, err
	}
	if err != nil {
		return res, fmt.Errorf("list %s: %w", source, err)
	}
	m, err := mapped(built)
	if err != nil {
		return res, err
	}
	defer func() { _ = m.Close() }()
	if s := m.Skipped(); s.Total() > 0 {
		daemon.Own.Notice("not packed: %s that no file system can show: %s", human.Count(s.Total(), "key"),
			strings.Join(s.Examples, ", "))
	}
	need := packOverhead + m.FileSize() + 16*int64(m.Len())
	if o.Memory -= need; o.Memory < 32<<20 {
		if need += 32 << 20; tier != nil {
			need += engine.NearMemory(2 * need)
		}
		return res, fmt.Errorf("--memory is too little for %s files (give at least %s)", human.Number(m.Len()),
			cachedir.RoundUp(need))
	}
	if o.Recoded = re.String(); o.Recoded != "" {
		made, anew, failed := re.all(ctx, src, m, o.Connections, o.Memory)
		if failed != nil {
			return res, failed
		}
		if err := m.Close(); err != nil {
			return res, err
		}
		src, m = made, anew
		defer removeSpool(made.dir, &err)
	}
	res.Result, err = packInto(ctx, m, src, objstore.Retry(dst, budget.Policy(dst)), where.Prefix, o, re)
	if err != nil {
		return res, err
	}
	total := objstore.RequestsOf(base).Plus(objstore.RequestsOf(dst))
	res.Version, res.Cost = m.Version(), engine.CostOf(total, fromStore.Store.Prices)
	return res, nil
}

// packInto packs m, and recodes its files first if that is wanted.
func packInto(ctx context.Context, m *catalog.Manifest, src objstore.ReaderAt, dst objstore.Layer, prefix string,
	o shard.PackOptions, re recoding) (res shard.Result, err error) {
	if re.coded == yes {
		stored, failed := storeCoded(ctx, src, m, re.spool, o.Connections, o.Memory)
		if failed != nil {
			return res, failed
		}
		src, o.Coded = stored, stored.coded()
		defer removeSpool(stored.dir, &err)
	}
	bar := daemon.Own.Step("packing")
	o.Progress = func(p shard.Progress) {
		bar.Set(p.Files, p.TotalFiles, fmt.Sprintf("%s of %s, %d of %d shards", human.Bytes(p.Bytes),
			human.Bytes(p.TotalBytes), p.Shards, p.TotalShards))
	}
	res, err = shard.Pack(ctx, m, src, dst, prefix, o)
	if err != nil {
		bar.Done("")
		return res, err
	}
	bar.Done(human.Count(res.Shards, "shard"))
	return res, nil
}

// mapped moves a manifest from the heap to a mapped file, so that its size does not count. The file is already
// unlinked: nothing stays behind, however the process ends.
func mapped(m *catalog.Manifest) (*catalog.Manifest, error) {
	dir, err := os.MkdirTemp("", "shoal-pack-")
	if err != nil {
		return nil, err
	}
	path, err := m.Save(dir)
	if err == nil {
		m, err = catalog.Load(path)
	}
	return m, errors.Join(err, os.RemoveAll(dir))
}
