package ckpt

import (
	"cmp"
	"context"
	"runtime"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/shoalfs/shoal/internal/prom"
)

// Metrics are the status for Prometheus (docs/metrics.md), while Run answers; else there are none.
func (c *Carrier) Metrics(version string) prom.Collector {
	return func(to prom.Sink) {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		var s Status
		if c.in(ctx, func() { s = c.status() }) {
			s.Metrics(to, version)
		}
	}
}

// Metrics sends the status.
func (s *Status) Metrics(to prom.Sink, version string) {
	prom.Labeled(to, prometheus.GaugeValue, "shoal_ckpt_info", "1, with the versions of Shoal and Go, and the "+
		"destination.", "version", "goversion", "destination")(1, version, runtime.Version(), s.Dest)
	prom.Gauge(to, "shoal_ckpt_behind_files", "Closed files that the bucket lacks.", s.Behind.Files)
	prom.Gauge(to, "shoal_ckpt_behind_bytes", "Bytes of closed files that the bucket lacks.", s.Behind.Bytes)
	prom.Gauge(to, "shoal_ckpt_behind_seconds", "How long ago the first file that the bucket lacks was closed.",
		time.Since(cmp.Or(s.Behind.Since, time.Now())).Seconds())
	prom.Gauge(to, "shoal_ckpt_behind_removals", "Objects waiting to be removed.", s.Behind.Removals)
	prom.Gauge(to, "shoal_ckpt_trouble", "1 while something cannot be published.", min(len(s.Trouble), 1))
	prom.Gauge(to, "shoal_ckpt_torn_files", "Files that are not whole although nobody is writing them.", s.Here.Torn)
	prom.Gauge(to, "shoal_ckpt_skipped_files", "Files that cannot be objects.", s.Here.Skipped)
	prom.Counter(to, "shoal_ckpt_published_files_total", "Published files.", s.Stats.Files)
	prom.Counter(to, "shoal_ckpt_published_bytes_total", "Bytes of published files.", s.Stats.Bytes)
	prom.Counter(to, "shoal_ckpt_removed_total", "Removed objects.", s.Stats.Removed)
}
