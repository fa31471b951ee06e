package main

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/cache/objstore/stores"
	"github.com/shoalfs/shoal/cache/shard"
	"github.com/shoalfs/shoal/gpuingest/jpeg"
	"github.com/shoalfs/shoal/internal/cli"
	"github.com/shoalfs/shoal/internal/daemon"
	"github.com/shoalfs/shoal/internal/human"
)

func unpackCommand() *cobra.Command {
	var store storeOptions
	var asJSON bool
	c := &cobra.Command{
		Use:   "unpack SHARDS DIR",
		Short: "Restore the files of tar shards",
		Long: `Restores the files of SHARDS under the folder DIR: a set that shoal pack made, with the paths, bytes and times of
its source, each file verified against the checksum in its shard's index; or any WebDataset tars.

A file appears complete or not at all. Files already in DIR are kept if they are equal, so the same command
continues an interrupted unpack. A file that differs is an error.`,
		Example: `  shoal unpack s3://photos-packed/train /data/train
  shoal unpack 's3://wds/shard-{000000..000127}.tar' /data/wds`,
		RunE: func(c *cobra.Command, args []string) error {
			inv := invocationOf(c.Context())
			o, err := store.options(inv)
			if err != nil {
				return err
			}
			if _, err := objstore.ParseSource(args[0]); err != nil {
				return cli.Usage(err)
			}
			dir, err := inv.abs(args[1])
			if err != nil {
				return err
			}
			done, source, err := unpack(c.Context(), args[0], dir, stores.Options{Store: o})
			if err != nil {
				return err
			}
			if asJSON {
				return json.NewEncoder(c.OutOrStdout()).Encode(done)
			}
			_, err = fmt.Fprintf(c.OutOrStdout(), "%s, %s, of %s in %s; %s were there already\n",
				human.Count(done.Files, "file"), human.Bytes(done.Bytes), source, dir, human.Number(done.Kept))
			return err
		},
	}
	c.Flags().BoolVar(&asJSON, "json", false, "print the result as JSON")
	store.add(c)
	return c
}

func unpack(ctx context.Context, from, dir string, o stores.Options) (
	done shard.Unpacked, _ objstore.Source, err error) {
	log := warnings()
	o.Logger = log
	base, source, err := stores.Open(ctx, from, o)
	if err != nil {
		return done, source, err
	}
	bar := late(daemon.Own, "unpacking "+source.String())
	defer bar.Done("")
	if err := base.Check(ctx); err != nil {
		return done, source, err
	}
	src := objstore.Retry(base, objstore.NewBudget(o.Store.GetsPerHour, log).Policy(base))
	is, err := shard.IsSet(ctx, src, source)
	if err == nil && !is {
		err = fmt.Errorf("%s is not a set of shards (name one that shoal pack made, or tars, as in "+
			"'s3://wds/shard-{000000..000127}.tar')", source)
	}
	if err != nil {
		return done, source, err
	}
	var decoder shard.Decoder
	if jpeg.Available {
		decoder = jpegCoder{}
	}
	set, err := shard.Open(ctx, shard.NewRestorer(src, decoder, nil, 0), source, shard.OpenOptions{Logger: log})
	if err != nil {
		return done, source, err
	}
	done, err = set.Unpack(ctx, dir, func(p shard.Unpacked) {
		bar.Set(p.Files, set.Files, fmt.Sprintf("%s, %d kept", human.Bytes(p.Bytes), p.Kept))
	})
	return done, source, err
}
