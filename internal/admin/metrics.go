package admin

import (
	"net/http"
	"runtime"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/prefetch/run"
)

// metrics serves GET /metrics in the format that a scraper requests, such as OpenMetrics. Nothing is counted twice: the
// metrics come from the snapshot that /stats shows.
func (s *Server) metrics(mux *http.ServeMux) {
	reg := prometheus.NewRegistry()
	reg.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}), Collector(s.o.Version, s.o.Stats))
	mux.Handle("GET /metrics", promhttp.HandlerFor(reg, promhttp.HandlerOpts{Registry: reg, EnableOpenMetrics: true, MaxRequestsInFlight: 4}))
}

// Collector returns a daemon's metrics of one dataset.
func Collector(version string, stats func() Snapshot) prometheus.Collector {
	return &collector{version, stats}
}

// collector is a daemon's metrics of one dataset (docs/metrics.md). Every label takes its values from a fixed list of at
// most seven, except those of the two infos and of the currency, which have one value at a time.
type collector struct {
	version string
	stats   func() Snapshot
}

// metric is one family. values yields its samples: a value, and label values if there are any.
type metric struct {
	desc   *prometheus.Desc
	kind   prometheus.ValueType
	values func(c *collector, s *Snapshot, put func(value float64, labels ...string))
}

// Describe implements prometheus.Collector.
func (c *collector) Describe(ch chan<- *prometheus.Desc) {
	for _, m := range families {
		ch <- m.desc
	}
	ch <- getDuration
	ch <- decodeDuration
}

// Collect implements prometheus.Collector.
func (c *collector) Collect(ch chan<- prometheus.Metric) {
	s := c.stats()
	for _, m := range families {
		m.values(c, &s, func(v float64, labels ...string) {
			for i := range labels { // a path may be any bytes
				labels[i] = strings.ToValidUTF8(labels[i], "\uFFFD")
			}
			ch <- prometheus.MustNewConstMetric(m.desc, m.kind, v, labels...)
		})
	}
	ch <- histogram(getDuration, s.Store.GetLatency)
	if s.Feed != nil {
		ch <- histogram(decodeDuration, s.Feed.Decoding)
	}
}

var (
	getDuration = desc("store_get_duration_seconds", "Time of successful GETs to the object store, up to the last byte, retries each by itself. "+
		"The bounds are 128 µs and its doubles.")
	decodeDuration = desc("feed_decode_duration_seconds", "Time of the transform of one sample: decoding, augmenting, writing into the batch.")
)

func histogram(d *prometheus.Desc, c objstore.HistogramCounts) prometheus.Metric {
	buckets := make(map[float64]uint64, len(c.Below))
	for i, n := range c.Below {
		buckets[objstore.HistogramBound(i).Seconds()] = uint64(n)
	}
	return prometheus.MustNewConstHistogram(d, uint64(c.Count), c.Sum.Seconds(), buckets)
}

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("shoal_"+name, help, labels, nil)
}

func counter[T int | int64 | float64](name, help string, of func(s *Snapshot) T) metric {
	return metric{desc(name, help), prometheus.CounterValue, func(_ *collector, s *Snapshot, put func(float64, ...string)) { put(float64(of(s))) }}
}

func gauge[T int | int64 | float64](name, help string, of func(s *Snapshot) T) metric {
	m := counter(name, help, of)
	m.kind = prometheus.GaugeValue
	return m
}

// ofPart is a family of a part of the snapshot, absent without it.
func ofPart[P any, T int64 | float64](part func(s *Snapshot) *P, kind prometheus.ValueType, name, help string, of func(p *P) T) metric {
	return metric{desc(name, help), kind, func(_ *collector, s *Snapshot, put func(float64, ...string)) {
		if p := part(s); p != nil {
			put(float64(of(p)))
		}
	}}
}

// labeled is a family with one label.
func labeled(kind prometheus.ValueType, name, help, label string, values func(s *Snapshot, put func(value float64, label ...string))) metric {
	return metric{desc(name, help, label), kind, func(_ *collector, s *Snapshot, put func(float64, ...string)) { values(s, put) }}
}

// families are all metrics except the histograms and the collectors of Go and of the process.
var families = func() (all []metric) {
	for _, group := range [][]metric{infoMetrics, readMetrics, storeMetrics, costMetrics, orderMetrics, memoryMetrics, diskMetrics, auditMetrics, feedMetrics, s3Metrics, nearMetrics, clusterMetrics} {
		all = append(all, group...)
	}
	return all
}()

var infoMetrics = []metric{
	{desc("build_info", "1, with the version of Shoal and of Go.", "version", "goversion"), prometheus.GaugeValue,
		func(c *collector, _ *Snapshot, put func(float64, ...string)) { put(1, c.version, runtime.Version()) }},
	{desc("dataset_info", "1, with the source and the version of the dataset in force.", "source", "version"), prometheus.GaugeValue,
		func(_ *collector, s *Snapshot, put func(float64, ...string)) { put(1, s.Source, s.Dataset) }},
	gauge("dataset_files", "Files of the dataset.", func(s *Snapshot) int { return s.Files }),
	gauge("dataset_samples", "Numbered files of the dataset.", func(s *Snapshot) int { return s.Samples }),
	gauge("dataset_bytes", "Size of the dataset.", func(s *Snapshot) int64 { return s.Bytes }),
	gauge("users", "Mounts and feeds that the daemon serves, of all datasets.", func(s *Snapshot) int { return s.Users }),
	labeled(prometheus.GaugeValue, "recent_events", "Distinct warnings and errors that /stats shows (the latest 32 of the dataset and of the daemon each).", "level",
		func(s *Snapshot, put func(float64, ...string)) {
			n := map[string]int{}
			for _, e := range s.Errors {
				n[e.Level]++
			}
			put(float64(n["WARN"]), "warn")
			put(float64(n["ERROR"]), "error")
		}),
}

var readMetrics = []metric{
	counter("opens_total", "Files opened through the mount.", func(s *Snapshot) int64 { return s.Opens }),
	labeled(prometheus.CounterValue, "reads_total", "Extents (up to 4 MiB) read by mount and feed, by where they came from: "+
		"keep (disk) and ring (memory) without waiting, joined (a fetch was under way), miss (a fetch had to be started).", "area",
		func(s *Snapshot, put func(float64, ...string)) {
			put(float64(s.Hits.Keep), "keep")
			put(float64(s.Hits.Ring), "ring")
			put(float64(s.Joined), "joined")
			put(float64(s.Misses), "miss")
		}),
	counter("read_bytes_total", "Bytes given to readers of mount and feed.", func(s *Snapshot) int64 { return s.ReadBytes }),
	counter("read_stall_seconds_total", "Time that readers waited for the store, summed over readers.", func(s *Snapshot) float64 { return s.Stall }),
	counter("samples_delivered_total", "Samples that trainers got: opens of numbered files through the mount, valid rows of batches that the feed has sent. "+
		"Its rate is the goodput.", func(s *Snapshot) int64 { return s.Delivered }),
	counter("prefetches_total", "Extents fetched before anybody asked.", func(s *Snapshot) int64 { return s.Prefetched }),
	counter("prefetch_errors_total", "Of them, those that failed; a later read tries again.", func(s *Snapshot) int64 { return s.FetchErrors }),
}

var storeMetrics = []metric{
	{desc("store_requests_total", "Requests to the object store that have ended, retries and hedges included; a listing counts once however many pages it has.",
		"operation", "outcome"), prometheus.CounterValue, func(_ *collector, s *Snapshot, put func(float64, ...string)) {
		for op, n := range s.Store.Outcomes {
			put(float64(n.OK), op, "ok")
			put(float64(n.Failed), op, "error")
			put(float64(n.Canceled), op, "canceled")
		}
	}},
	labeled(prometheus.CounterValue, "store_errors_total", "Failed requests to the object store, by kind.", "kind", func(s *Snapshot, put func(float64, ...string)) {
		for k := range objstore.NumKinds {
			put(float64(s.StoreErrors[objstore.Kind(k).String()]), objstore.Kind(k).Label())
		}
	}),
	counter("store_received_bytes_total", "Bytes of successful GETs.", func(s *Snapshot) int64 { return s.GetBytes }),
	counter("store_sent_bytes_total", "Bytes stored in the object store.", func(s *Snapshot) int64 { return s.Store.Sent }),
	counter("store_retries_total", "Requests that were tried again.", func(s *Snapshot) int64 { return s.Store.Retries }),
	counter("store_gave_up_total", "Requests that ran out of tries or of time.", func(s *Snapshot) int64 { return s.Store.GaveUp }),
	counter("store_slow_downs_total", "Answers of the store that asked for fewer requests (503 SlowDown, 429).", func(s *Snapshot) int64 { return s.Store.SlowDowns }),
	counter("store_hedges_total", "Second GETs for what was late.", func(s *Snapshot) int64 { return s.Hedges.Sent }),
	counter("store_hedges_won_total", "Second GETs that came in first.", func(s *Snapshot) int64 { return s.Hedges.Won }),
	gauge("store_requests_in_flight", "Requests to the object store that are under way.", func(s *Snapshot) int64 { return s.InFlight }),
	gauge("store_connections", "Requests that may be in flight to the object store now.", func(s *Snapshot) int { return s.Connections }),
	labeled(prometheus.GaugeValue, "store_requests_queued", "Requests that wait for a connection, by who wants the bytes: demand (a reader waits), prefetch (nobody yet).", "priority",
		func(s *Snapshot, put func(float64, ...string)) {
			put(float64(s.Store.WaitingDemand), "demand")
			put(float64(s.Store.WaitingPrefetch), "prefetch")
		}),
}

// costMetrics are absent without a price, or without a budget.
var costMetrics = []metric{
	labeled(prometheus.CounterValue, "store_cost_total", "What the requests have cost at the prices of --store, in that currency, beginning when the dataset was opened.", "currency",
		func(s *Snapshot, put func(float64, ...string)) {
			if s.Cost.Priced {
				put(s.Cost.Amount, s.Cost.Currency)
			}
		}),
	ofBudget(prometheus.GaugeValue, "store_budget_gets_per_hour", "Most GETs and HEADs in any hour: gets-per-hour of --store.", func(b *objstore.BudgetStats) float64 { return float64(b.PerHour) }),
	ofBudget(prometheus.GaugeValue, "store_budget_gets_left", "GETs and HEADs that may be sent at once now.", func(b *objstore.BudgetStats) float64 { return float64(b.Left) }),
	ofBudget(prometheus.CounterValue, "store_budget_wait_seconds_total", "Time that readers waited for the budget, summed over readers.", func(b *objstore.BudgetStats) float64 { return b.WaitSeconds }),
}

func ofBudget(kind prometheus.ValueType, name, help string, of func(b *objstore.BudgetStats) float64) metric {
	return ofPart(func(s *Snapshot) *objstore.BudgetStats { return s.Cost.Budget }, kind, name, help, of)
}

var orderMetrics = []metric{
	gauge("streams", "Orders in progress, feed sessions included.", func(s *Snapshot) int { return len(s.Streams) }),
	ofLeast("lead_samples", "Samples ahead of the reader that can be read without waiting: the least of all orders in progress whose reader has begun and is not at the end. "+
		"Absent where there is none.", func(p *run.Progress) (float64, bool) { return float64(p.Lead), true }),
	ofLeast("lead_seconds", "How long it takes the reader to get through them at its pace. Absent until that is known.",
		func(p *run.Progress) (float64, bool) { return p.LeadSeconds, p.Pace > 0 }),
	gauge("epoch", "Epoch of the first order in progress, the mount's if there is a mount.", func(s *Snapshot) int { return s.Order.Epoch }),
	gauge("epoch_position_samples", "How far its reader has come in the epoch.", func(s *Snapshot) int { return s.Order.Position }),
	gauge("prefetches_in_flight", "Prefetches under way, over all orders in progress.", func(s *Snapshot) (n int) {
		for i := range s.Streams {
			n += s.Streams[i].InFlight
		}
		return n
	}),
}

// ofLeast is a gauge of the stream with the smallest value.
func ofLeast(name, help string, of func(p *run.Progress) (float64, bool)) metric {
	return metric{desc(name, help), prometheus.GaugeValue, func(_ *collector, s *Snapshot, put func(float64, ...string)) {
		least, found := 0., false
		for i := range s.Streams {
			p := &s.Streams[i]
			if p.Consumed == 0 || p.Position >= p.Len {
				continue
			}
			if v, ok := of(p); ok && (!found || v < least) {
				least, found = v, true
			}
		}
		if found {
			put(least)
		}
	}}
}

var memoryMetrics = []metric{
	labeled(prometheus.GaugeValue, "memory_ledger_bytes", "Sample data in memory, by what it was reserved for: demand (readers that wait), prefetch (fetched ahead), batches (of the feed).", "class",
		func(s *Snapshot, put func(float64, ...string)) {
			put(float64(s.Memory.Demand), "demand")
			put(float64(s.Memory.Prefetch), "prefetch")
			put(float64(s.Memory.Batches), "batches")
		}),
	gauge("memory_ledger_peak_bytes", "Most that was in memory at once.", func(s *Snapshot) int64 { return s.Memory.Peak }),
	gauge("memory_ledger_limit_bytes", "Most that may be in memory: --memory without what the daemon needs itself.", func(s *Snapshot) int64 { return s.Memory.Limit }),
	gauge("memory_reservations_waiting", "Reservations that wait for memory.", func(s *Snapshot) int { return s.Memory.Waiting }),
	gauge("memory_ring_bytes", "Extents staged in memory.", func(s *Snapshot) int64 { return s.Memory.Ring }),
	gauge("memory_anonymous_bytes", "Resident memory without file pages.", func(s *Snapshot) int64 { return s.Memory.RSSAnon }),
}

var auditMetrics = []metric{
	counter("audit_events_written_total", "Events that the audit log has.", func(s *Snapshot) int64 { return s.Audit.Written }),
	counter("audit_events_lost_total", "Events that it lacks, because its disk was full, failed or hung.", func(s *Snapshot) int64 { return s.Audit.Lost }),
}

var diskMetrics = []metric{
	gauge("disk_used_bytes", "Segments of the dataset on disk.", func(s *Snapshot) int64 { return s.Disk.Used }),
	gauge("disk_quota_bytes", "Most that they may take; 0 is no bound of its own.", func(s *Snapshot) int64 { return s.Disk.Limit }),
	gauge("disk_cache_used_bytes", "Segments of all datasets of the cache directory.", func(s *Snapshot) int64 { return s.Disk.AllUsed }),
	gauge("disk_cache_limit_bytes", "Most that they may take: --cache-size without the catalog.", func(s *Snapshot) int64 { return s.Disk.Budget }),
	gauge("disk_kept_extents", "Extents of the dataset on disk.", func(s *Snapshot) int { return s.Disk.Kept }),
	gauge("disk_extents", "Extents of the dataset.", func(s *Snapshot) int { return s.Disk.Extents }),
	gauge("disk_writes_queued", "Extents in memory that are still to be written to disk.", func(s *Snapshot) int { return s.Disk.Queued }),
	gauge("disk_out_of_use", "1 while the disk is full, fails or hangs, and the daemon goes on without it.", func(s *Snapshot) int64 { return is(s.Disk.OutOfUse) }),
	counter("disk_declined_total", "Extents that found the kept set full.", func(s *Snapshot) int64 { return s.Disk.Declined }),
	counter("disk_corrupt_total", "Records that failed their checksum; they are fetched again, and never served.", func(s *Snapshot) int64 { return s.Disk.Corrupt }),
	counter("disk_errors_total", "Failed operations of the disk, hangs among them.", func(s *Snapshot) int64 { return s.Disk.Errors }),
	counter("disk_waits_total", "Pieces of reads that the page cache did not have.", func(s *Snapshot) int64 { return s.Disk.Waits }),
	counter("disk_gave_up_total", "Reads that waited too long for the disk and went to the store.", func(s *Snapshot) int64 { return s.Disk.GaveUp }),
	gauge("recoded_files", "JPEG files that the disk has in a smaller form (--recode).", func(s *Snapshot) int { return s.Recoded.Files }),
	gauge("recoded_before_bytes", "These files as they came.", func(s *Snapshot) int64 { return s.Recoded.Before }),
	gauge("recoded_after_bytes", "Their records.", func(s *Snapshot) int64 { return s.Recoded.After }),
	counter("restored_total", "Recoded files that were restored for a reader.", func(s *Snapshot) int64 { return s.Recoded.Restored }),
	counter("restore_seconds_total", "Time that this took, summed.", func(s *Snapshot) float64 { return s.Recoded.Restore }),
}
