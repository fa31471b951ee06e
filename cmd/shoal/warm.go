package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/shoalfs/shoal/internal/cli"
	"github.com/shoalfs/shoal/internal/human"
	"github.com/shoalfs/shoal/prefetch/engine"
)

func warmCommand() *cobra.Command {
	var eo engineOptions
	var fraction float64
	var list string
	c := &cobra.Command{
		Use:   "warm SOURCE",
		Short: "Fill the cache before a job starts",
		Long: `Fetches the files of SOURCE that the cache directory does not hold yet, and keeps them on disk. If a
daemon uses the directory, that daemon does the work. If interrupted, it keeps what it has.`,
		Example: `  shoal warm s3://photos/train --cache-dir /nvme/shoal --cache-size 200GiB
  # half of the bytes, spread evenly over every epoch
  shoal warm s3://photos/train --cache-dir /nvme/shoal --fraction 0.5`,
		RunE: func(c *cobra.Command, args []string) error {
			inv := invocationOf(c.Context())
			if !(fraction > 0 && fraction <= 1) {
				return cli.Usagef("--fraction %g: give a number above 0, up to 1", fraction)
			}
			if list != "" && given(c, "fraction") {
				return cli.Usagef("--fraction and --list: give one of them")
			}
			if list == "" && given(c, "list") { // a variable that is not set
				return cli.Usagef("--list is empty: name a file of paths, or leave it out to keep all of SOURCE")
			}
			cfg, host, err := eo.config(inv, args[0])
			if err != nil {
				return err
			}
			var lines []byte
			if n, err := inv.absAll(&list); err != nil {
				return err
			} else if n > 0 {
				if lines, err = os.ReadFile(list); err != nil {
					return fmt.Errorf("--list: %w", err)
				}
			}
			return withHost(c, host, func(ctx context.Context, h *engine.Host, out io.Writer) error {
				return runWarm(ctx, inv, h, cfg, fraction, lines, out)
			})
		},
	}
	eo.addData(c)
	f := c.Flags()
	f.BoolVar(&eo.data.Refresh, "refresh", false, "list the source again instead of using the saved listing")
	f.Float64Var(&fraction, "fraction", 1, "share of the dataset's bytes to keep")
	f.StringVar(&list, "list", "", "file with the paths to keep, relative to SOURCE, one per line")
	return c
}

func runWarm(ctx context.Context, inv *invocation, h *engine.Host, cfg engine.Config, fraction float64, lines []byte,
	out io.Writer) (err error) {
	e, err := openEngine(ctx, inv, h, cfg)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, e.Close()) }()
	before := e.Cost()
	bar := inv.Step("warming")
	start := time.Now()
	p, err := e.Warm(ctx, fraction, lines, func(p engine.WarmProgress) {
		bar.Set(p.FilesDone, p.Files, human.Bytes(p.BytesDone)+" of "+human.Bytes(p.Bytes))
	})
	rate := float64(p.BytesDone) / max(time.Since(start).Seconds(), 1e-3)
	bar.Done(fmt.Sprintf("%s, %s, %s/s", human.Count(p.FilesDone, "file"), human.Bytes(p.BytesDone),
		human.Bytes(int64(rate))))
	if err != nil {
		return err
	}
	where := ""
	if c := e.Stats().Cluster; c != nil {
		where = fmt.Sprintf(" here, and the rest by the owners among %s", human.Count(len(c.Nodes), "node"))
	}
	fmt.Fprintf(out, "%s of %s of %s are kept%s\n", human.Number(p.Kept), human.Count(p.Extents, "extent"),
		e.Source(), where)
	if cost := e.Cost().Since(before); cost.Priced {
		fmt.Fprintf(out, "sent meanwhile: %s\n", cost)
	}
	least := p.Files
	if lines == nil && fraction < 1 { // accept the share of the dataset within 2%
		least -= least / 50
	}
	switch {
	case p.Errors > 0:
		return fmt.Errorf("%s could not be read, the first: %s", human.Count(p.Errors, "file"), p.FirstError)
	case p.Full && p.FilesDone < least:
		return fmt.Errorf(
			"the cache is full: %d of %d files were kept (raise --cache-size, or ask for a smaller --fraction)",
			p.FilesDone, p.Files)
	}
	return nil
}
