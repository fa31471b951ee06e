package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/shoalfs/shoal/fusefs"
	"github.com/shoalfs/shoal/internal/admin"
	"github.com/shoalfs/shoal/internal/cli"
	"github.com/shoalfs/shoal/internal/daemon"
	"github.com/shoalfs/shoal/internal/findings"
	"github.com/shoalfs/shoal/internal/human"
)

// rawStats asks a daemon, by askMount or askDaemon, for the JSON of its stats.
func rawStats(ctx context.Context, ask func(context.Context, string, io.Writer, ...string) error, target string) (
	[]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, daemon.Long)
	defer cancel()
	var out bytes.Buffer
	err := ask(ctx, target, &out, "stat")
	return out.Bytes(), err
}

// parseStats takes the answer of rawStats or anyStats, as all of the stats or a part of them.
func parseStats[T any](raw []byte, err error) (*T, error) {
	s := new(T)
	if err == nil {
		if err = json.Unmarshal(raw, s); err != nil {
			err = fmt.Errorf("the daemon's stats: %w", err)
		}
	}
	return s, err
}

func statCommand() *cobra.Command {
	var asJSON, live bool
	var security clientSecurity
	w := watch{interval: time.Second}
	c := &cobra.Command{
		Use:   "stat [MOUNTPOINT|ADDR|CACHE-DIR]",
		Short: "Show a daemon's statistics",
		Long: `Shows whether the trainer has waited since the daemon started, what it waited for, and the daemon's counters. Without an
argument it takes the only daemon on this machine that has a mount or serves the default feed. ADDR is a feed's or
a daemon's --admin address. For CACHE-DIR it shows what its daemon has served longest, for a folder that shoal ckpt
carries how far the bucket is behind.`,
		Example: `  shoal stat /mnt/train
  shoal stat unix:///run/shoal/feed.sock --json`,
		RunE: func(c *cobra.Command, args []string) error {
			if inv := invocationOf(c.Context()); inv.mount != nil {
				return inv.mount.stats(c.OutOrStdout())
			} else if inv.attached() {
				return ownStats(c.OutOrStdout())
			}
			if live && asJSON {
				return cli.Usagef("--watch and --json: leave one out (docs/stats.md: the last 15 minutes)")
			}
			if len(args) == 1 && isCarried(args[0]) {
				return ckptStatus(c, args[0], asJSON)
			}
			target, err := oneDaemon(c.Context(), args, &security)
			if err != nil {
				return err
			}
			if w.target = target; live {
				return w.run(c, &security)
			}
			raw, err := anyStats(c.Context(), target, &security)
			if asJSON {
				if _, err = parseStats[struct{}](raw, err); err == nil {
					_, err = fmt.Fprintf(c.OutOrStdout(), "%s\n", bytes.TrimSpace(raw))
				}
				return err
			}
			s, err := parseStats[admin.Snapshot](raw, err)
			if err != nil {
				return err
			}
			var text bytes.Buffer
			v := findings.Of(findings.Snapshot{}, s.Snapshot)
			text.WriteString(findings.Text(append([]findings.Finding{v.Finding}, v.Notes...)))
			printStats(&text, s)
			_, err = io.WriteString(c.OutOrStdout(), cli.Printable(text.String()))
			return err
		},
	}
	security.add(c)
	c.Flags().BoolVar(&asJSON, "json", false, "print the versioned JSON (docs/stats.md)")
	c.Flags().BoolVar(&live, "watch", false,
		"show current activity live, until Ctrl-C; one frame if the output is not a terminal")
	w.add(c.Flags())
	return c
}

// anyStats asks a mount, a feed, an admin address, or the daemon that owns a cache directory.
func anyStats(ctx context.Context, target string, security *clientSecurity) ([]byte, error) {
	if strings.HasPrefix(target, "http://") || strings.HasPrefix(target, "https://") {
		ctx, cancel := context.WithTimeout(ctx, daemon.Patience)
		defer cancel()
		return fromAdmin(ctx, target, "/stats")
	}
	if !strings.Contains(target, "://") {
		if m, err := fusefs.At(target); err != nil || m != nil || isCache(target) {
			return rawStats(ctx, askDaemon, target)
		}
		if _, err := os.Lstat(target); err == nil || strings.HasPrefix(target, "/") || !strings.Contains(target, ":") {
			return nil, notMounted(target)
		}
	}
	client, err := security.dial(target)
	if err != nil {
		return nil, err
	}
	defer client.Close()
	since := time.Now()
	asking, cancel := daemon.InTime(ctx, target)
	defer cancel()
	raw, err := client.Stats(asking)
	if asking.Err() != nil && !errors.Is(ctx.Err(), context.Canceled) {
		err = daemon.Unanswered(target, since)
	}
	return raw, err
}

func printStats(w io.Writer, s *admin.Snapshot) {
	row := func(name, format string, args ...any) {
		fmt.Fprintf(w, "%-10s "+format+"\n", append([]any{name}, args...)...)
	}
	share := func(n int64) float64 { return 100 * float64(n) / float64(max(s.Reads, 1)) }
	row("source", "%s", s.Source)
	row("dataset", "%.12s, %s, %s numbered, %s", s.Dataset, human.Count(s.Files, "file"),
		human.Number(s.Samples), human.Bytes(s.Bytes))
	row("up", "%s (pid %d)", (time.Duration(s.Uptime) * time.Second), s.PID)
	if s.Transport != "" {
		row("mount", "by %s", s.Transport)
	}
	switch s.Order.State {
	case "unknown":
		row("order", "unknown: run the trainer with `shoal run`")
	case "ended":
		row("order", "%s, ended with its trainer", s.Order.Spec)
	default:
		row("order", "%s, epoch %d, position %d, %s; %s ahead of the reader", s.Order.Spec, s.Order.Epoch,
			s.Order.Position, s.Order.State, human.Count(s.Lead, "sample"))
	}
	row("reads", "%s of %s: %.1f%% keep, %.1f%% ring, %.1f%% joined a fetch, %.1f%% missed", human.Number(s.Reads),
		human.Count(s.Opens, "opened file"), share(s.Hits.Keep), share(s.Hits.Ring), share(s.Joined), share(s.Misses))
	row("stall", "%.2f s, summed over readers", s.Stall)
	row("store", "%s, %s, p50 %.0f ms, p99 %.0f ms, %d in flight, %s", human.Count(s.GetRequests, "GET"),
		human.Bytes(s.GetBytes), s.LatencyP50*1e3, s.LatencyP99*1e3, s.InFlight, storeErrors(s.StoreErrors))
	if n := s.Near; n != nil {
		row("near", "%s, %s: %s of %s answered, %s; %s put, %s dropped, %s damaged, %s; p50 %.1f ms", n.Tier, n.State,
			human.Number(n.Hits), human.Count(n.Reads, "read"), human.Bytes(n.Bytes), human.Count(n.Puts, "copy"),
			human.Number(n.Dropped), human.Number(n.Damaged), human.Count(n.Errors, "error"), n.Median*1e3)
	}
	if n := s.Cluster; n != nil {
		row("cluster", "%s, %s: %s, this one owns %.1f%%; %s from other nodes, %s given to them%s", n.Cluster, n.State,
			human.Count(len(n.Nodes), "node"),
			100*n.Owned, human.Bytes(n.PeerBytes), human.Bytes(n.Given.Bytes), strings.TrimSuffix("; "+n.Cause, "; "))
	}
	printCost(row, s.Cost)
	m := s.Memory
	row("memory", "%s of %s for data (idle %s, peak %s), RSS %s, %d goroutines", human.Bytes(m.Used),
		human.Bytes(m.Limit), human.Bytes(m.Idle), human.Bytes(m.Peak), human.Bytes(m.RSS), m.Goroutines)
	limit := cmp.Or(s.Disk.Limit, s.Disk.Budget) // the dataset's quota, else the cache's
	used := human.Bytes(s.Disk.Used) + " of " + human.Bytes(limit)
	if s.Disk.Used > limit { // possible if the metadata of other datasets, or of a new version, has lowered the limit
		used = human.Bytes(s.Disk.Used) + ", above the limit of " + human.Bytes(limit) +
			" that there is now: nothing is added"
	}
	if s.Disk.Reason != "" {
		used += ", out of use (" + s.Disk.Reason + ")"
	}
	row("disk", "%s, %s of %s kept", used, human.Number(s.Disk.Kept), human.Count(s.Disk.Extents, "extent"))
	if n := s.Recoded; n.Files > 0 {
		row("recoded", "%s, %s in %s; %s, %.2f s", human.Count(n.Files, "file"), human.Bytes(n.Before),
			human.Bytes(n.After), human.Count(n.Restored, "restore"), n.Restore)
	}
	if feed := s.Feed; feed != nil {
		row("feed", "%s open, %d ended by errors; %s in %s, %s; batches of %s in memory",
			human.Count(feed.Open, "session"), feed.Failed, human.Count(feed.Total.Samples, "sample"),
			human.Count(feed.Total.Batches, "batch"), human.Bytes(feed.Total.Bytes), human.Bytes(feed.HeldBytes))
		for _, f := range feed.List {
			row("  session", "%s, rank %d of %d (%s): epoch %d, batch %d, %s, %d bad, stalled %.2f s, waited %.2f s "+
				"for credit", f.Session, f.Rank, f.World,
				f.Client, f.Epoch, f.Batch, human.Count(f.Samples, "sample"), f.Bad, f.Stall, f.Credit)
		}
	}
	if d := s.S3; d != nil {
		row("S3", "%s at %s, %s: %s to the origin, %s refused or failed; %s sent", human.Count(d.Requests, "request"),
			d.Listen, human.Count(d.Connections, "connection"), human.Number(d.Forwarded), human.Number(d.Errors),
			human.Bytes(d.Sent))
	}
	if n := s.Skipped.Hostile + s.Skipped.Shadowed + s.Skipped.Bad; n > 0 {
		row("not shown", "%s: %s", human.Count(n, "key"), strings.Join(s.Skipped.Examples, ", "))
	}
	for _, e := range s.Errors {
		row(strings.ToLower(e.Level), "%s (%d×, last %s)", e.Text, e.Count, e.Time.Format(time.TimeOnly))
	}
}

// storeErrors describes the failed requests, the most frequent kind first.
func storeErrors(kinds map[string]int64) string {
	if len(kinds) == 0 {
		return "no errors"
	}
	names := slices.SortedFunc(maps.Keys(kinds), func(a, b string) int {
		return cmp.Or(cmp.Compare(kinds[b], kinds[a]), strings.Compare(a, b))
	})
	for i, name := range names {
		names[i] = fmt.Sprintf("%s %s", human.Number(kinds[name]), name)
	}
	return "errors: " + strings.Join(names, ", ")
}
