package ckpt

import (
	"cmp"
	"context"
	"runtime"
	"slices"
	"time"

	"github.com/shoalfs/shoal/internal/prom"
)

// Metrics are the status for Prometheus (docs/metrics.md), while Run answers; else there are none.
func (c *Carrier) Metrics(version string) *prom.Table[Status] {
	snapshot := func() (s Status, ok bool) {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		ok = c.in(ctx, func() { s = c.status() })
		return s, ok
	}
	info := prom.Info("shoal_ckpt_info", "1, with the versions of Shoal and Go, and the destination.",
		[]string{"version", "goversion", "destination"},
		func(*Status) []string { return []string{version, runtime.Version(), c.Dest} })
	return &prom.Table[Status]{Families: append(slices.Clip(families), info), Snapshot: snapshot}
}

var families = []prom.Family[Status]{
	prom.Gauge("shoal_ckpt_behind_files", "Closed files that the bucket lacks.", func(s *Status) int {
		return s.Behind.Files
	}),
	prom.Gauge("shoal_ckpt_behind_bytes", "Bytes of closed files that the bucket lacks.", func(s *Status) int64 {
		return s.Behind.Bytes
	}),
	prom.Gauge("shoal_ckpt_behind_seconds", "How long ago the first file that the bucket lacks was closed.",
		func(s *Status) float64 {
			return time.Since(cmp.Or(s.Behind.Since, time.Now())).Seconds()
		}),
	prom.Gauge("shoal_ckpt_behind_removals", "Objects that are to be removed.", func(s *Status) int {
		return s.Behind.Removals
	}),
	prom.Gauge("shoal_ckpt_trouble", "1 while something cannot be published.", func(s *Status) int {
		return min(len(s.Trouble), 1)
	}),
	prom.Gauge("shoal_ckpt_torn_files", "Files that nobody writes, and that are not whole.", func(s *Status) int {
		return s.Here.Torn
	}),
	prom.Gauge("shoal_ckpt_skipped_files", "Files that cannot be objects.", func(s *Status) int {
		return s.Here.Skipped
	}),
	prom.Counter("shoal_ckpt_published_files_total", "Published files.", func(s *Status) int64 {
		return s.Stats.Files
	}),
	prom.Counter("shoal_ckpt_published_bytes_total", "Bytes of published files.", func(s *Status) int64 {
		return s.Stats.Bytes
	}),
	prom.Counter("shoal_ckpt_removed_total", "Removed objects.", func(s *Status) int64 { return s.Stats.Removed }),
}
