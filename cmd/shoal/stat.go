package main

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	humanize "github.com/dustin/go-humanize"
	"github.com/spf13/cobra"

	"github.com/shoalfs/shoal/admin/verdict"
	"github.com/shoalfs/shoal/engine"
	"github.com/shoalfs/shoal/loader"
)

// mountStats are the stats of a mount's daemon.
type mountStats struct {
	engine.Stats
	raw []byte
}

// running reports whether a process has not let go of everything yet.
func running(pid int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	// Field 2 is the command in parentheses, field 3 the state; a zombie holds nothing.
	_, rest, _ := strings.Cut(string(b), ") ")
	return !strings.HasPrefix(rest, "Z")
}

// readStats reads the control file of a mount.
func readStats(mountpoint string) (*mountStats, error) {
	path := filepath.Join(mountpoint, ".shoal", "stats")
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("%s is not a live shoal mount: %w (mount it with `shoal mount SOURCE %s`)", mountpoint, err, mountpoint)
	}
	s := &mountStats{raw: b}
	if err := json.Unmarshal(b, &s.Stats); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return s, nil
}

func statCommand() *cobra.Command {
	var asJSON bool
	var security clientSecurity
	c := &cobra.Command{
		Use:   "stat MOUNTPOINT|ADDR",
		Short: "Show what a daemon did and holds",
		Example: `  shoal stat /mnt/train
  shoal stat unix:///run/shoal/feed.sock --json`,
		Args: cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			raw, err := anyStats(c.Context(), c, args[0], &security)
			if err != nil {
				return err
			}
			if asJSON {
				_, err = c.OutOrStdout().Write(raw)
				return err
			}
			var s verdict.Snapshot
			if err := json.Unmarshal(raw, &s); err != nil {
				return fmt.Errorf("stats of %s: %w", args[0], err)
			}
			printVerdict(c.OutOrStdout(), s)
			printStats(c.OutOrStdout(), &s.Stats, s.Feed)
			return nil
		},
	}
	security.add(c)
	c.Flags().BoolVar(&asJSON, "json", false, "print the versioned JSON (docs/stats.md)")
	return c
}

func anyStats(ctx context.Context, c *cobra.Command, target string, security *clientSecurity) ([]byte, error) {
	if !strings.Contains(target, "://") {
		if _, err := os.Lstat(target); err == nil || strings.HasPrefix(target, "/") || !strings.Contains(target, ":") {
			s, err := readStats(target)
			if err != nil {
				return nil, err
			}
			return s.raw, nil
		}
	}
	client, err := security.dial(target)
	if err != nil {
		return nil, err
	}
	defer client.Close()
	return client.Stats(ctx)
}

// printVerdict says whether the trainer has waited since the daemon's start, and for what; shoal top says it of now.
func printVerdict(w io.Writer, s verdict.Snapshot) {
	v := verdict.Of(verdict.Snapshot{}, s)
	for _, f := range append([]verdict.Finding{v.Finding}, v.Notes...) {
		fmt.Fprintf(w, "%-10s %s. %s", "so far", f.Title, f.Detail)
		if f.Remedy != "" {
			fmt.Fprintf(w, " %s", f.Remedy)
		}
		fmt.Fprintln(w)
	}
}

func printStats(w io.Writer, s *engine.Stats, feed *loader.Stats) {
	row := func(name, format string, args ...any) {
		fmt.Fprintf(w, "%-10s "+format+"\n", append([]any{name}, args...)...)
	}
	bytes := func(n int64) string { return humanize.IBytes(uint64(max(n, 0))) }
	share := func(n int64) float64 { return 100 * float64(n) / float64(max(s.Reads, 1)) }
	row("source", "%s", s.Source)
	row("dataset", "%.12s, %s files, %s numbered, %s", s.Dataset, humanize.Comma(int64(s.Files)), humanize.Comma(int64(s.Samples)), bytes(s.Bytes))
	row("up", "%s (pid %d)", (time.Duration(s.Uptime) * time.Second), s.PID)
	row("order", "%s, epoch %d, position %d, %s; %d samples ahead of the reader", s.Order.Spec, s.Order.Epoch, s.Order.Position, s.Order.State, s.Lead)
	row("reads", "%s of %s opened files: %.1f%% keep, %.1f%% ring, %.1f%% joined a fetch, %.1f%% missed", humanize.Comma(s.Reads), humanize.Comma(s.Opens),
		share(s.Hits.Keep), share(s.Hits.Ring), share(s.Joined), share(s.Misses))
	row("stall", "%.2f s, summed over readers", s.Stall)
	row("store", "%s GETs, %s, p50 %.0f ms, p99 %.0f ms, %d in flight, %s", humanize.Comma(s.GetRequests), bytes(s.GetBytes), s.LatencyP50*1e3, s.LatencyP99*1e3, s.InFlight, storeErrors(s.StoreErrors))
	printCost(row, s.Cost)
	row("memory", "%s of %s for data (peak %s), RSS %s, %d goroutines", bytes(s.Memory.Used), bytes(s.Memory.Limit), bytes(s.Memory.Peak), bytes(s.Memory.RSS), s.Memory.Goroutines)
	limit := s.Disk.Limit // the dataset's quota
	if limit == 0 {
		limit = s.Disk.Budget
	}
	row("disk", "%s of %s, %s of %s extents kept", bytes(s.Disk.Used), bytes(limit), humanize.Comma(int64(s.Disk.Kept)), humanize.Comma(int64(s.Disk.Extents)))
	if feed != nil {
		row("feed", "%d sessions open, %d ended by errors; %s samples in %s batches, %s; batches of %s in memory", feed.Open, feed.Failed,
			humanize.Comma(feed.Total.Samples), humanize.Comma(feed.Total.Batches), bytes(feed.Total.Bytes), bytes(feed.HeldBytes))
		for _, f := range feed.List {
			row("  session", "%s, rank %d of %d (%s): epoch %d, batch %d, %s samples, %d bad, stalled %.2f s, waited %.2f s for credit", f.Session, f.Rank, f.World,
				f.Client, f.Epoch, f.Batch, humanize.Comma(f.Samples), f.Bad, f.Stall, f.Credit)
		}
	}
	if n := s.Skipped.Hostile + s.Skipped.Shadowed; n > 0 {
		row("not shown", "%d keys: %s", n, strings.Join(s.Skipped.Examples, ", "))
	}
	for _, e := range s.Errors {
		row(strings.ToLower(e.Level), "%s (%d×, last %s)", e.Text, e.Count, e.Time.Format(time.TimeOnly))
	}
}

// storeErrors says which requests failed, the most frequent kind first.
func storeErrors(kinds map[string]int64) string {
	if len(kinds) == 0 {
		return "no errors"
	}
	names := slices.SortedFunc(maps.Keys(kinds), func(a, b string) int {
		return cmp.Or(cmp.Compare(kinds[b], kinds[a]), strings.Compare(a, b))
	})
	for i, name := range names {
		names[i] = fmt.Sprintf("%s %s", humanize.Comma(kinds[name]), name)
	}
	return "errors: " + strings.Join(names, ", ")
}
