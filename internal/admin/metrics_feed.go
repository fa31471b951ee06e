package admin

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/shoalfs/shoal/loader"
)

// feedMetrics are absent without a feed.
var feedMetrics = []metric{
	ofFeed(prometheus.GaugeValue, "feed_sessions", "Open sessions.", func(f *loader.Stats) float64 { return float64(f.Open) }),
	ofFeed(prometheus.CounterValue, "feed_sessions_opened_total", "Sessions opened.", func(f *loader.Stats) float64 { return float64(f.Sessions) }),
	ofFeed(prometheus.CounterValue, "feed_sessions_fenced_total", "Sessions that a newer opening of the same session and rank has ended.", func(f *loader.Stats) float64 { return float64(f.Fenced) }),
	ofFeed(prometheus.CounterValue, "feed_sessions_failed_total", "Sessions that an error has ended; clients that left are not counted.", func(f *loader.Stats) float64 { return float64(f.Failed) }),
	ofFeed(prometheus.GaugeValue, "feed_held_bytes", "Memory of batches, all slots included.", func(f *loader.Stats) float64 { return float64(f.HeldBytes) }),
	ofFeed(prometheus.GaugeValue, "feed_transforms_running", "Transforms that run now.", func(f *loader.Stats) float64 { return float64(f.Working) }),
	ofFeed(prometheus.GaugeValue, "feed_transforms_limit", "Transforms that may run at once: one for each processor.", func(f *loader.Stats) float64 { return float64(f.Workers) }),
	ofFeed(prometheus.CounterValue, "feed_batches_total", "Batches sent.", func(f *loader.Stats) float64 { return float64(f.Total.Batches) }),
	ofFeed(prometheus.CounterValue, "feed_slot_batches_total", "Of them, those that went in shared memory.", func(f *loader.Stats) float64 { return float64(f.Total.InSlots) }),
	ofFeed(prometheus.CounterValue, "feed_shared_batches_total", "Of them, those built for another session of the same pass.", func(f *loader.Stats) float64 { return float64(f.Total.Shared) }),
	ofFeed(prometheus.CounterValue, "feed_samples_total", "Valid rows sent.", func(f *loader.Stats) float64 { return float64(f.Total.Samples) }),
	ofFeed(prometheus.CounterValue, "feed_bad_samples_total", "Rows sent without a sample, because that could not be decoded.", func(f *loader.Stats) float64 { return float64(f.Total.Bad) }),
	ofFeed(prometheus.CounterValue, "feed_sent_bytes_total", "Bytes of batches sent.", func(f *loader.Stats) float64 { return float64(f.Total.Bytes) }),
	ofFeed(prometheus.CounterValue, "feed_source_bytes_total", "Bytes of stored samples read.", func(f *loader.Stats) float64 { return float64(f.Total.SourceBytes) }),
	ofFeed(prometheus.CounterValue, "feed_fetch_seconds_total", "Time that readers of samples waited for the engine, summed over them.", func(f *loader.Stats) float64 { return f.Total.Fetch }),
	ofFeed(prometheus.CounterValue, "feed_stall_seconds_total", "Time that clients wanted a batch and none was ready.", func(f *loader.Stats) float64 { return f.Total.Stall }),
	ofFeed(prometheus.CounterValue, "feed_send_seconds_total", "Time of writing to connections, flow control included.", func(f *loader.Stats) float64 { return f.Total.Send }),
	ofFeed(prometheus.CounterValue, "feed_credit_seconds_total", "Time that batches waited for clients to want one: the trainers are the slower side.", func(f *loader.Stats) float64 { return f.Total.Credit }),
	ofFeed(prometheus.CounterValue, "feed_reserve_seconds_total", "Time of waiting for memory, slots included.", func(f *loader.Stats) float64 { return f.Total.Reserve }),
	ofFeed(prometheus.CounterValue, "feed_slot_seconds_total", "Time that clients wanted a batch and held all their slots.", func(f *loader.Stats) float64 { return f.Total.Slots }),
}

func ofFeed(kind prometheus.ValueType, name, help string, of func(f *loader.Stats) float64) metric {
	return ofPart(func(s *Snapshot) *loader.Stats { return s.Feed }, kind, name, help, of)
}
