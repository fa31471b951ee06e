package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/cache/objstore/stores"
	"github.com/shoalfs/shoal/ckpt"
	"github.com/shoalfs/shoal/ckpt/folder"
	"github.com/shoalfs/shoal/fusefs"
	"github.com/shoalfs/shoal/internal/cli"
	"github.com/shoalfs/shoal/internal/daemon"
	"github.com/shoalfs/shoal/internal/human"
	"github.com/shoalfs/shoal/internal/prom"
)

type ckptOptions struct {
	config   ckpt.Config // what the flags give in its form
	store    storeOptions
	log      logOptions
	stateDir string
	admin    string
	last     []string
	cluster  clusterOptions
}

func ckptCommand() *cobra.Command {
	var o ckptOptions
	c := &cobra.Command{
		Use:   "ckpt DIR DEST",
		Short: "Carry checkpoints from a local folder to a bucket: whole files, in order",
		Long: `Carries what a trainer saves into the ordinary folder DIR to DEST, until it is stopped. Files are uploaded once nobody
can write them any more, and appear in the order in which they were closed. Last names (such as .metadata,
*.index.json, latest) wait for all that was closed before, with --cluster on all hosts: a visible last name means a
complete checkpoint. After a crash the same command continues.

What is removed in DIR stays in DEST, unless --delete is given (docs/checkpoints.md).`,
		Example: `  shoal ckpt /nvme/ckpt s3://models/runs/42
  shoal ckpt wait /nvme/ckpt/step-1000
  shoal ckpt latest s3://models/runs/42`,
		RunE: func(c *cobra.Command, args []string) error { return o.run(c, args[0], args[1]) },
	}
	f := c.Flags()
	f.StringVar(&o.stateDir, "cache-dir", "", "folder for the journal of uploads (default: DIR/"+folder.Home+")")
	f.StringArrayVar(&o.last, "last", folder.DefaultLast,
		"glob of a last name, such as DONE or meta/*.json, in addition to the usual ones (repeatable)")
	f.BoolVar(&o.config.Delete, "delete", false,
		"remove in DEST what is removed in DIR, after all that was closed before")
	f.IntVar(&o.config.KeepLocal, "keep-local", 0,
		"keep only the N newest complete checkpoints in DIR; DEST has all (0: keep all)")
	f.StringVar(&o.config.Link, "link", "",
		"mount of DEST (or a folder in one): complete checkpoints that only DEST has appear in DIR as links into it")
	f.BoolVar(&o.config.Unordered, "hosts-unordered", false,
		"other hosts with this flag may carry to DEST, too; last names wait for this host's files only")
	o.cluster.addEtcd(c, "etcd://HOST:PORT[,…]/NAME: other hosts with the same value may carry to DEST, too; last "+
		"names wait for the files of all (docs/checkpoints.md)")
	f.IntVar(&o.config.Copies, "copies", 1, "2: closed files are also copied to another host of --cluster, which "+
		"publishes them if this one is lost (other hosts' copies are kept in --cache-dir, else on DIR's disk)")
	f.StringVar(&o.cluster.Advertise, "advertise", "", "HOST:PORT at which the others reach this host for --copies "+
		"(default: this machine's address towards etcd, any port)")
	f.BoolVar(&o.cluster.Insecure, "cluster-insecure", false,
		"--copies without encryption: anyone in this network can read and replace them")
	f.StringVar(&o.admin, "admin", "", "HOST:PORT for /metrics and /healthz, such as 127.0.0.1:7073 (docs/metrics.md)")
	f.DurationVar(&o.config.Drain, "drain-timeout", time.Minute,
		"how long to go on uploading closed files after SIGTERM")
	o.store.add(c)
	o.log.add(c)
	c.AddCommand(ckptListCommand(), ckptWaitCommand(), ckptLatestCommand())
	return c
}

func (o *ckptOptions) lastNames() (func(path string) bool, error) {
	last, err := folder.LastNames(o.last...)
	if err != nil {
		err = cli.Usagef("--last: %w", err)
	}
	return last, err
}

// destination opens the bucket or folder that text names, by stores.Open or Create.
func (o *ckptOptions) destination(ctx context.Context, inv *invocation, text string, log *slog.Logger,
	open func(context.Context, string, stores.Options) (objstore.Store, objstore.Source, error)) (
	objstore.Layer, objstore.Source, error) {
	store, err := o.store.options(inv)
	if err != nil {
		return nil, objstore.Source{}, err
	}
	if src, err := objstore.ParseSource(text); err != nil {
		return nil, src, cli.Usage(err)
	} else if src.Shards != "" {
		return nil, src, cli.Usagef("%s names a tar shard: give a prefix or a folder", text)
	}
	base, src, err := open(ctx, text, stores.Options{Store: store, Logger: log})
	if err == nil {
		err = base.Check(ctx)
	}
	if err != nil {
		return nil, src, err
	}
	const requests = 32 // under way at once
	policy := objstore.NewBudget(store.GetsPerHour, log).Policy(base)
	return objstore.Retry(objstore.Limit(base, requests), policy), src, nil
}

func (o *ckptOptions) check(c *cobra.Command, dir string) error {
	copies := o.config.Copies
	switch {
	case dir == "":
		return cli.Usagef("the DIR is empty: give a folder %s", cli.SeeHelp(c))
	case o.config.Drain == 0:
		return cli.Usagef("--drain-timeout %s: give a time", o.config.Drain)
	case o.config.Unordered && o.cluster.URL != "":
		return cli.Usagef("--hosts-unordered and --cluster: give one or the other")
	case copies != 1 && copies != 2:
		return cli.Usagef("--copies %d: give 1 or 2", copies)
	case copies == 2 && o.cluster.URL == "":
		return cli.Usagef("--copies 2: give the hosts' --cluster, too")
	case copies == 1 && (o.cluster.Insecure || o.cluster.Advertise != ""):
		return cli.Usagef("--advertise and --cluster-insecure are for --copies 2")
	case copies == 2:
		return o.cluster.check(invocationOf(c.Context()), "")
	}
	return nil
}

func (o *ckptOptions) run(c *cobra.Command, dir, dest string) (err error) {
	inv := invocationOf(c.Context())
	log, err := o.log.logger(inv)
	if err = cmp.Or(err, o.check(c, dir)); err != nil {
		return err
	}
	cfg := o.config
	if cfg.Last, err = o.lastNames(); err != nil {
		return err
	}
	cfg.Advertise, cfg.Hurried, cfg.Log = o.cluster.Advertise, daemon.Hurried(), log
	if cfg.Cluster, cfg.TLS, err = o.cluster.etcd(inv); err != nil {
		return err
	}
	if _, err = inv.absAll(&dir, &cfg.Link, &o.stateDir); err != nil {
		return err
	}
	cfg.Dir = dir
	if to, err := objstore.ParseSource(dest); err == nil && to.Overlaps(objstore.Source{Scheme: "file", Dir: cfg.Dir}) {
		return cli.Usagef("%s and %s overlap: give another folder", cfg.Dir, to)
	}
	store, src, err := o.destination(c.Context(), inv, dest, log, stores.Create)
	if err != nil {
		return err
	}
	cfg.Store, cfg.Prefix, cfg.Dest = store, src.Prefix, src.Canonical()
	if cfg.Link != "" {
		if inside(cfg.Link, cfg.Dir) || inside(cfg.Dir, cfg.Link) { // by name: the mount may hang
			return cli.Usagef("--link %s and %s overlap: mount elsewhere", cfg.Link, cfg.Dir)
		}
		cfg.Refresh = func(ctx context.Context) error {
			ctx, cancel := context.WithTimeout(ctx, time.Minute)
			defer cancel()
			return askMount(ctx, cfg.Link, io.Discard, "refresh")
		}
	}
	if o.stateDir != "" {
		cfg.State = filepath.Join(o.stateDir, "ckpt", ckpt.StateName(cfg.Dir, src.String()))
	}
	bar := late(inv.Voice, "looking through "+cfg.Dir)
	cfg.Looked = func(files, of int) { bar.Set(files, of, "files") }
	defer bar.Done("")
	carrier, err := ckpt.Open(c.Context(), cfg)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, carrier.Close()) }()
	if o.admin != "" {
		_, stop, err := prom.Listen(o.admin, carrier.Metrics(version), log)
		if err != nil {
			return err
		}
		defer stop()
	}
	return carrier.Run(c.Context(), func() {
		bar.Done("")
		inv.Notice("carrying %s to %s", cfg.Dir, src)
	})
}

// isDest reports whether a user means a bucket, or a folder that is a destination, and not a folder that is carried.
func isDest(text string) bool { return strings.Contains(text, "://") }

func ckptListCommand() *cobra.Command {
	var o ckptOptions
	var asJSON bool
	c := &cobra.Command{
		Use:   "ls DIR|DEST",
		Short: "List the checkpoints of a folder, or of a bucket, oldest first",
		Long: `Lists checkpoints: folders with a last name. For DIR, a folder that a daemon carries, it also says how far the bucket is
behind; for DEST (s3://… or file://…) it lists what the bucket has.`,
		Example: `  shoal ckpt ls /nvme/ckpt
  shoal ckpt ls s3://models/runs/42 --json`,
		RunE: func(c *cobra.Command, args []string) error {
			out := c.OutOrStdout()
			if !isDest(args[0]) {
				return ckptStatus(c, args[0], asJSON)
			}
			all, _, err := o.list(c, args[0])
			if err != nil {
				return err
			}
			if asJSON {
				return json.NewEncoder(out).Encode(all)
			}
			w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
			fmt.Fprintln(w, "CHECKPOINT\tFILES\tSIZE\tSINCE\tSTATE")
			for _, r := range all {
				state := "no last name"
				if r.Complete {
					state = "complete"
				}
				fmt.Fprintf(w, "%s\t%d\t%s\t%s\t%s\n", oneLine(r.Path), r.Files,
					human.Bytes(r.Bytes), r.Time.Local().Format(time.DateTime), state)
			}
			return w.Flush()
		},
	}
	c.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	o.addList(c)
	return c
}

func (o *ckptOptions) addList(c *cobra.Command) {
	c.Flags().StringArrayVar(&o.last, "last", folder.DefaultLast,
		"glob of a last name, in addition to the usual ones, as for shoal ckpt (repeatable)")
	o.store.add(c)
}

func (o *ckptOptions) list(c *cobra.Command, text string) ([]ckpt.Remote, objstore.Source, error) {
	last, err := o.lastNames()
	if err != nil {
		return nil, objstore.Source{}, err
	}
	bar := late(daemon.Own, "listing "+text)
	defer bar.Done("")
	store, src, err := o.destination(c.Context(), invocationOf(c.Context()), text, warnings(), stores.Open)
	if err != nil {
		return nil, src, err
	}
	all, err := ckpt.List(c.Context(), store, src.Prefix, last)
	return all, src, err
}

func statusOf(ctx context.Context, dir string) (s ckpt.Status, err error) {
	client, _, err := ckpt.Find(dir)
	if err != nil {
		return s, err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, daemon.Patience, fmt.Errorf(
		"the shoal ckpt of %s has been silent for %s (is it stopped? end it by kill -9, and start it again)",
		client.Dir, daemon.Patience))
	defer cancel()
	return client.Status(ctx)
}

// isCarried reports whether shoal ckpt carries a folder, or did. A mount is not looked into: its daemon may hang.
func isCarried(dir string) bool {
	if m, err := fusefs.At(dir); isDest(dir) || m != nil || err != nil {
		return false
	}
	_, err := os.Lstat(filepath.Join(dir, folder.Home, folder.Socket))
	return err == nil
}

func ckptStatus(c *cobra.Command, dir string, asJSON bool) error {
	s, err := statusOf(c.Context(), dir)
	if err == nil && asJSON {
		return json.NewEncoder(c.OutOrStdout()).Encode(s)
	} else if err != nil {
		return err
	}
	out := c.OutOrStdout()
	fmt.Fprintln(out, oneLine(fmt.Sprintf("%s to %s: %s", s.Dir, s.Dest, behind(s.Behind))))
	if s.Trouble != "" {
		fmt.Fprintf(out, "trouble: %s\n", oneLine(s.Trouble))
	}
	for _, h := range []struct {
		n    int
		what string
	}{{s.Here.Writing, "being written"}, {s.Here.Temporary, "with a temporary name"},
		{s.Here.Torn, "not whole (see the log)"}, {s.Here.Skipped, "left out (links, pipes, or what the log names)"}} {
		if h.n > 0 {
			fmt.Fprintf(out, "%s %s\n", human.Count(h.n, "file"), h.what)
		}
	}
	if len(s.Checkpoints) == 0 {
		return nil
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "CHECKPOINT\tFILES\tSIZE\tSTATE")
	for _, k := range s.Checkpoints {
		state := "in the bucket"
		if k.Linked {
			state = "in the bucket, linked"
		} else if k.Lacks != "" {
			state = k.Lacks + ": " + k.Why
		}
		fmt.Fprintf(w, "%s\t%d\t%s\t%s\n", oneLine(k.Path), k.Files, human.Bytes(k.Bytes), oneLine(state))
	}
	return w.Flush()
}

func behind(b ckpt.Behind) string {
	if b.Files+b.Removals == 0 {
		return "nothing is behind"
	}
	text := fmt.Sprintf("behind by %s, %s", human.Count(b.Files, "file"), human.Bytes(b.Bytes))
	if b.Removals > 0 {
		text += fmt.Sprintf(" and %s", human.Count(b.Removals, "removal"))
	}
	if !b.Since.IsZero() {
		text += ", for " + time.Since(b.Since).Round(time.Second).String()
	}
	if b.WaitsFor != "" {
		text += "; " + b.Next + " waits for " + b.WaitsFor
	}
	return text
}

func ckptWaitCommand() *cobra.Command {
	var timeout time.Duration
	var copies int
	c := &cobra.Command{
		Use:   "wait PATH",
		Short: "Wait until a file or folder is whole in the bucket",
		Long: `Returns when the bucket has all that is now at or below PATH, in a folder that shoal ckpt carries. It waits for files
being written, and fails if nothing at PATH can be published. --copies 2 waits only until one host may be lost.`,
		Example: "  shoal ckpt wait /nvme/ckpt/step-1000 --timeout 10m",
		RunE: func(c *cobra.Command, args []string) error {
			ctx := c.Context()
			if copies != 1 && copies != 2 {
				return cli.Usagef("--copies %d: give 1 or 2", copies)
			} else if timeout > 0 {
				var cancel func()
				ctx, cancel = context.WithTimeoutCause(ctx, timeout,
					fmt.Errorf("the shoal ckpt of %s has been silent for %s", args[0], timeout))
				defer cancel()
			}
			client, rel, err := ckpt.Find(args[0])
			if err != nil {
				return err
			}
			bar := daemon.Own.Step("waiting for " + rel)
			defer bar.Done("")
			var got ckpt.Wait
			for look := true; ; look = false {
				w, err := client.Wait(ctx, rel, copies, look)
				if err != nil {
					if got.Lacks != "" && errors.Is(ctx.Err(), context.DeadlineExceeded) {
						err = fmt.Errorf(
							"%s is not whole in the bucket%s after %s: %s is %s (see: shoal ckpt ls %s)", args[0],
							map[int]string{2: " or on two hosts"}[copies], timeout, got.Lacks, got.Why, client.Dir)
					}
					return err
				}
				if got = w; got.Whole {
					return nil
				}
				bar.Set(0, 0, oneLine(got.Lacks+": "+got.Why))
			}
		},
	}
	c.Flags().IntVar(&copies, "copies", 1, "2: until the bucket or a second host has it (shoal ckpt --copies 2)")
	c.Flags().DurationVar(&timeout, "timeout", 0, "how long to wait (0: without end)")
	return c
}

func ckptLatestCommand() *cobra.Command {
	var o ckptOptions
	c := &cobra.Command{
		Use:   "latest DIR|DEST",
		Short: "Print the newest complete checkpoint",
		Long: `Prints the newest checkpoint that is complete in the bucket: for DEST its URL; for DIR, a folder that a daemon carries,
its path. If DEST has no last names, it cannot tell which are complete, and prints the newest one, with a warning.`,
		Example: "  torchrun train.py --resume \"$(shoal ckpt latest s3://models/runs/42)\"",
		RunE: func(c *cobra.Command, args []string) error {
			if isDest(args[0]) {
				all, src, err := o.list(c, args[0])
				if err != nil {
					return err
				}
				newest, sure, ok := ckpt.Latest(all)
				if !ok {
					return fmt.Errorf("%s has no complete checkpoint (%s there; see: shoal ckpt ls %s)",
						src, human.Count(len(all), "incomplete one"), args[0])
				}
				if !sure {
					invocationOf(c.Context()).Notice(
						"there is no last name in %s, so %s may be incomplete (name yours with --last)", src,
						newest.Path)
				}
				_, err = fmt.Fprintln(c.OutOrStdout(), src.String()+newest.Path)
				return err
			}
			s, err := statusOf(c.Context(), args[0])
			if err != nil {
				return err
			}
			for i := len(s.Checkpoints) - 1; i >= 0; i-- {
				if s.Checkpoints[i].Lacks == "" {
					_, err = fmt.Fprintln(c.OutOrStdout(), filepath.Join(s.Dir, s.Checkpoints[i].Path))
					return err
				}
			}
			if len(s.Checkpoints) == 0 { // a latest beside them says which is complete, and only DEST that it is there
				return fmt.Errorf("no folder in %s has a last name (see: shoal ckpt latest %s)", s.Dir, s.Dest)
			}
			return fmt.Errorf("no checkpoint of %s is complete in %s (see: shoal ckpt ls %s)", s.Dir, s.Dest, args[0])
		},
	}
	o.addList(c)
	return c
}
