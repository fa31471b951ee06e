package admin

import (
	"runtime"
	"slices"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/cache/objstore/near"
	"github.com/shoalfs/shoal/internal/prom"
	"github.com/shoalfs/shoal/loader"
	"github.com/shoalfs/shoal/prefetch/engine"
	"github.com/shoalfs/shoal/prefetch/run"
	"github.com/shoalfs/shoal/s3api"
)

// Collector returns a daemon's metrics of one dataset (docs/metrics.md), which come from the snapshot that /stats
// shows. Every label takes its values from a fixed list of at most seven, except those of the two infos and of the
// currency, which have one value at a time.
func Collector(version string, stats func() Snapshot) prometheus.Collector {
	build := prom.Info("shoal_build_info", "1, with the version of Shoal and of Go.", []string{"version", "goversion"},
		func(*Snapshot) []string { return []string{version, runtime.Version()} })
	return &prom.Table[Snapshot]{Families: append(slices.Clip(families), build), Snapshot: prom.Always(stats)}
}

// families are all metrics but shoal_build_info.
var families = slices.Concat(infoMetrics, readMetrics, storeMetrics, costMetrics, budgetMetrics, orderMetrics,
	memoryMetrics, diskMetrics, auditMetrics,
	feedMetrics, s3Metrics, nearMetrics, clusterMetrics)

func histogram[S any](name, help string, of func(s *S) objstore.HistogramCounts) prom.Family[S] {
	return prom.Histogram(name, help, func(s *S) (count uint64, sum float64, below map[float64]uint64) {
		c := of(s)
		below = make(map[float64]uint64, len(c.Below))
		for i, n := range c.Below {
			below[objstore.HistogramBound(i).Seconds()] = uint64(n)
		}
		return uint64(c.Count), c.Sum.Seconds(), below
	})
}

// is is 1 if something holds.
func is(b bool) int64 {
	if b {
		return 1
	}
	return 0
}

var infoMetrics = []prom.Family[Snapshot]{
	prom.Info("shoal_dataset_info", "1, with the source and the version of the dataset in force.",
		[]string{"source", "version"},
		func(s *Snapshot) []string { return []string{s.Source, s.Dataset} }),
	prom.Gauge("shoal_dataset_files", "Files of the dataset.", func(s *Snapshot) int { return s.Files }),
	prom.Gauge("shoal_dataset_samples", "Numbered files of the dataset.", func(s *Snapshot) int { return s.Samples }),
	prom.Gauge("shoal_dataset_bytes", "Size of the dataset.", func(s *Snapshot) int64 { return s.Bytes }),
	prom.Gauge("shoal_users", "Mounts and feeds that the daemon serves, of all datasets.", func(s *Snapshot) int {
		return s.Users
	}),
	prom.Labeled(prometheus.GaugeValue, "shoal_recent_events",
		"Distinct warnings and errors that /stats shows (the latest 32 of the dataset and of the daemon each).",
		[]string{"level"},
		func(s *Snapshot, put func(float64, ...string)) {
			n := map[string]int{}
			for _, e := range s.Errors {
				n[e.Level]++
			}
			put(float64(n["WARN"]), "warn")
			put(float64(n["ERROR"]), "error")
		}),
}

var readMetrics = []prom.Family[Snapshot]{
	prom.Counter("shoal_opens_total", "Files opened through the mount.", func(s *Snapshot) int64 { return s.Opens }),
	prom.Labeled(prometheus.CounterValue, "shoal_reads_total",
		"Extents (up to 4 MiB) read by mount and feed, by where they came from: "+
			"keep (disk) and ring (memory) without waiting, joined (a fetch was under way), miss (a fetch had to be "+
			"started).", []string{"area"},
		func(s *Snapshot, put func(float64, ...string)) {
			put(float64(s.Hits.Keep), "keep")
			put(float64(s.Hits.Ring), "ring")
			put(float64(s.Joined), "joined")
			put(float64(s.Misses), "miss")
		}),
	prom.Counter("shoal_read_bytes_total", "Bytes given to readers of mount and feed.", func(s *Snapshot) int64 {
		return s.ReadBytes
	}),
	prom.Counter("shoal_read_stall_seconds_total", "Time that readers waited for the store, summed over readers.",
		func(s *Snapshot) float64 { return s.Stall }),
	prom.Counter("shoal_samples_delivered_total",
		"Samples that trainers got: opens of numbered files through the mount, valid rows of batches that the feed "+
			"has sent. "+
			"Its rate is the goodput.", func(s *Snapshot) int64 { return s.Delivered }),
	prom.Counter("shoal_prefetches_total", "Extents fetched before anybody asked.", func(s *Snapshot) int64 {
		return s.Prefetched
	}),
	prom.Counter("shoal_prefetch_errors_total", "Of them, those that failed; a later read tries again.",
		func(s *Snapshot) int64 { return s.FetchErrors }),
}

var storeMetrics = []prom.Family[Snapshot]{
	prom.Labeled(prometheus.CounterValue, "shoal_store_requests_total",
		"Requests to the object store that have ended, retries and hedges included; a listing counts once however "+
			"many pages it has.",
		[]string{"operation", "outcome"}, func(s *Snapshot, put func(float64, ...string)) {
			for op, n := range s.Store.Outcomes {
				put(float64(n.OK), op, "ok")
				put(float64(n.Failed), op, "error")
				put(float64(n.Canceled), op, "canceled")
			}
		}),
	histogram("shoal_store_get_duration_seconds",
		"Time of successful GETs to the object store, up to the last byte, retries each by itself. The bounds are "+
			"128 µs and its doubles.",
		func(s *Snapshot) objstore.HistogramCounts { return s.Store.GetLatency }),
	prom.Labeled(prometheus.CounterValue, "shoal_store_errors_total", "Failed requests to the object store, by kind.",
		[]string{"kind"}, func(s *Snapshot, put func(float64, ...string)) {
			for k := range objstore.NumKinds {
				put(float64(s.StoreErrors[objstore.Kind(k).String()]), objstore.Kind(k).Label())
			}
		}),
	prom.Counter("shoal_store_received_bytes_total", "Bytes of successful GETs.", func(s *Snapshot) int64 {
		return s.GetBytes
	}),
	prom.Counter("shoal_store_sent_bytes_total", "Bytes stored in the object store.", func(s *Snapshot) int64 {
		return s.Store.Sent
	}),
	prom.Counter("shoal_store_retries_total", "Requests that were tried again.", func(s *Snapshot) int64 {
		return s.Store.Retries
	}),
	prom.Counter("shoal_store_gave_up_total", "Requests that ran out of tries or of time.", func(s *Snapshot) int64 {
		return s.Store.GaveUp
	}),
	prom.Counter("shoal_store_slow_downs_total",
		"Answers of the store that asked for fewer requests (503 SlowDown, 429).", func(s *Snapshot) int64 {
			return s.Store.SlowDowns
		}),
	prom.Counter("shoal_store_hedges_total", "Second GETs for what was late.", func(s *Snapshot) int64 {
		return s.Hedges.Sent
	}),
	prom.Counter("shoal_store_hedges_won_total", "Second GETs that came in first.", func(s *Snapshot) int64 {
		return s.Hedges.Won
	}),
	prom.Gauge("shoal_store_requests_in_flight", "Requests to the object store that are under way.",
		func(s *Snapshot) int64 { return s.InFlight }),
	prom.Gauge("shoal_store_connections", "Requests that may be in flight to the object store now.",
		func(s *Snapshot) int { return s.Connections }),
	prom.Labeled(prometheus.GaugeValue, "shoal_store_requests_queued",
		"Requests that wait for a connection, by who wants the bytes: demand (a reader waits), prefetch (nobody yet).",
		[]string{"priority"},
		func(s *Snapshot, put func(float64, ...string)) {
			put(float64(s.Store.WaitingDemand), "demand")
			put(float64(s.Store.WaitingPrefetch), "prefetch")
		}),
}

// costMetrics are absent without a price, or without a budget.
var costMetrics = []prom.Family[Snapshot]{
	prom.Labeled(prometheus.CounterValue, "shoal_store_cost_total",
		"What the requests have cost at the prices of --store, in that currency, beginning when the dataset was opened.",
		[]string{"currency"},
		func(s *Snapshot, put func(float64, ...string)) {
			if s.Cost.Priced {
				put(s.Cost.Amount, s.Cost.Currency)
			}
		}),
}

var budgetMetrics = prom.Part(func(s *Snapshot) *objstore.BudgetStats { return s.Cost.Budget },
	prom.Gauge("shoal_store_budget_gets_per_hour", "Most GETs and HEADs in any hour: gets-per-hour of --store.",
		func(b *objstore.BudgetStats) float64 { return float64(b.PerHour) }),
	prom.Gauge("shoal_store_budget_gets_left", "GETs and HEADs that may be sent at once now.",
		func(b *objstore.BudgetStats) float64 { return float64(b.Left) }),
	prom.Counter("shoal_store_budget_wait_seconds_total",
		"Time that readers waited for the budget, summed over readers.", func(b *objstore.BudgetStats) float64 {
			return b.WaitSeconds
		}),
)

var orderMetrics = []prom.Family[Snapshot]{
	prom.Gauge("shoal_streams", "Orders in progress, feed sessions included.", func(s *Snapshot) int {
		return len(s.Streams)
	}),
	ofLeast("shoal_lead_samples",
		"Samples ahead of the reader that can be read without waiting: the least of all orders in progress whose "+
			"reader has begun and is not at the end. "+
			"Absent where there is none.", func(p *run.Progress) (float64, bool) { return float64(p.Lead), true }),
	ofLeast("shoal_lead_seconds",
		"How long it takes the reader to get through them at its pace. Absent until that is known.",
		func(p *run.Progress) (float64, bool) { return p.LeadSeconds, p.Pace > 0 }),
	prom.Gauge("shoal_epoch", "Epoch of the first order in progress, the mount's if there is a mount.",
		func(s *Snapshot) int { return s.Order.Epoch }),
	prom.Gauge("shoal_epoch_position_samples", "How far its reader has come in the epoch.", func(s *Snapshot) int {
		return s.Order.Position
	}),
	prom.Gauge("shoal_prefetches_in_flight", "Prefetches under way, over all orders in progress.",
		func(s *Snapshot) (n int) {
			for i := range s.Streams {
				n += s.Streams[i].InFlight
			}
			return n
		}),
}

// ofLeast is a gauge of the stream with the smallest value.
func ofLeast(name, help string, of func(p *run.Progress) (float64, bool)) prom.Family[Snapshot] {
	return prom.Labeled(prometheus.GaugeValue, name, help, nil, func(s *Snapshot, put func(float64, ...string)) {
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
	})
}

var memoryMetrics = []prom.Family[Snapshot]{
	prom.Labeled(prometheus.GaugeValue, "shoal_memory_ledger_bytes",
		"Sample data in memory, by what it was reserved for: demand (readers that wait), prefetch (fetched ahead), "+
			"batches (of the feed).", []string{"class"},
		func(s *Snapshot, put func(float64, ...string)) {
			put(float64(s.Memory.Demand), "demand")
			put(float64(s.Memory.Prefetch), "prefetch")
			put(float64(s.Memory.Batches), "batches")
		}),
	prom.Gauge("shoal_memory_ledger_peak_bytes", "Most that was in memory at once.", func(s *Snapshot) int64 {
		return s.Memory.Peak
	}),
	prom.Gauge("shoal_memory_ledger_limit_bytes",
		"Most that may be in memory: --memory without what the daemon needs itself.", func(s *Snapshot) int64 {
			return s.Memory.Limit
		}),
	prom.Gauge("shoal_memory_reservations_waiting", "Reservations that wait for memory.", func(s *Snapshot) int {
		return s.Memory.Waiting
	}),
	prom.Gauge("shoal_memory_ring_bytes", "Extents staged in memory.", func(s *Snapshot) int64 {
		return s.Memory.Ring
	}),
	prom.Gauge("shoal_memory_anonymous_bytes", "Resident memory without file pages.", func(s *Snapshot) int64 {
		return s.Memory.RSSAnon
	}),
}

var auditMetrics = []prom.Family[Snapshot]{
	prom.Counter("shoal_audit_events_written_total", "Events that the audit log has.", func(s *Snapshot) int64 {
		return s.Audit.Written
	}),
	prom.Counter("shoal_audit_events_lost_total", "Events that it lacks, because its disk was full, failed or hung.",
		func(s *Snapshot) int64 { return s.Audit.Lost }),
}

var diskMetrics = []prom.Family[Snapshot]{
	prom.Gauge("shoal_disk_used_bytes", "Segments of the dataset on disk.", func(s *Snapshot) int64 {
		return s.Disk.Used
	}),
	prom.Gauge("shoal_disk_quota_bytes", "Most that they may take; 0 is no bound of its own.", func(s *Snapshot) int64 {
		return s.Disk.Limit
	}),
	prom.Gauge("shoal_disk_cache_used_bytes", "Segments of all datasets of the cache directory.",
		func(s *Snapshot) int64 { return s.Disk.AllUsed }),
	prom.Gauge("shoal_disk_cache_limit_bytes", "Most that they may take: --cache-size without the catalog.",
		func(s *Snapshot) int64 { return s.Disk.Budget }),
	prom.Gauge("shoal_disk_kept_extents", "Extents of the dataset on disk.", func(s *Snapshot) int {
		return s.Disk.Kept
	}),
	prom.Gauge("shoal_disk_extents", "Extents of the dataset.", func(s *Snapshot) int { return s.Disk.Extents }),
	prom.Gauge("shoal_disk_writes_queued", "Extents in memory that are still to be written to disk.",
		func(s *Snapshot) int { return s.Disk.Queued }),
	prom.Gauge("shoal_disk_out_of_use", "1 while the disk is full, fails or hangs, and the daemon goes on without it.",
		func(s *Snapshot) int64 { return is(s.Disk.OutOfUse) }),
	prom.Counter("shoal_disk_declined_total", "Extents that found the kept set full.", func(s *Snapshot) int64 {
		return s.Disk.Declined
	}),
	prom.Counter("shoal_disk_corrupt_total",
		"Records that failed their checksum; they are fetched again, and never served.", func(s *Snapshot) int64 {
			return s.Disk.Corrupt
		}),
	prom.Counter("shoal_disk_errors_total", "Failed operations of the disk, hangs among them.",
		func(s *Snapshot) int64 { return s.Disk.Errors }),
	prom.Counter("shoal_disk_waits_total", "Pieces of reads that the page cache did not have.",
		func(s *Snapshot) int64 { return s.Disk.Waits }),
	prom.Counter("shoal_disk_gave_up_total", "Reads that waited too long for the disk and went to the store.",
		func(s *Snapshot) int64 { return s.Disk.GaveUp }),
	prom.Gauge("shoal_recoded_files", "JPEG files that the disk has in a smaller form (--recode).",
		func(s *Snapshot) int { return s.Recoded.Files }),
	prom.Gauge("shoal_recoded_before_bytes", "These files before recoding.", func(s *Snapshot) int64 {
		return s.Recoded.Before
	}),
	prom.Gauge("shoal_recoded_after_bytes", "Their records.", func(s *Snapshot) int64 { return s.Recoded.After }),
	prom.Counter("shoal_restored_total", "Recoded files that were restored for a reader.", func(s *Snapshot) int64 {
		return s.Recoded.Restored
	}),
	prom.Counter("shoal_restore_seconds_total", "Time that this took, summed.", func(s *Snapshot) float64 {
		return s.Recoded.Restore
	}),
}

// feedMetrics are absent without a feed.
var feedMetrics = prom.Part(func(s *Snapshot) *loader.Stats { return s.Feed },
	prom.Gauge("shoal_feed_sessions", "Open sessions.", func(f *loader.Stats) float64 { return float64(f.Open) }),
	prom.Counter("shoal_feed_sessions_opened_total", "Sessions opened.", func(f *loader.Stats) float64 {
		return float64(f.Sessions)
	}),
	prom.Counter("shoal_feed_sessions_fenced_total",
		"Sessions that a newer opening of the same session and rank has ended.", func(f *loader.Stats) float64 {
			return float64(f.Fenced)
		}),
	prom.Counter("shoal_feed_sessions_failed_total",
		"Sessions that an error has ended; clients that left are not counted.", func(f *loader.Stats) float64 {
			return float64(f.Failed)
		}),
	prom.Gauge("shoal_feed_held_bytes", "Memory of batches, all slots included.", func(f *loader.Stats) float64 {
		return float64(f.HeldBytes)
	}),
	prom.Gauge("shoal_feed_transforms_running", "Transforms that run now.", func(f *loader.Stats) float64 {
		return float64(f.Working)
	}),
	prom.Gauge("shoal_feed_transforms_limit", "Transforms that may run at once: one for each processor.",
		func(f *loader.Stats) float64 { return float64(f.Workers) }),
	prom.Counter("shoal_feed_batches_total", "Batches sent.", func(f *loader.Stats) float64 {
		return float64(f.Total.Batches)
	}),
	prom.Counter("shoal_feed_slot_batches_total", "Of them, those that went in shared memory.",
		func(f *loader.Stats) float64 { return float64(f.Total.InSlots) }),
	prom.Counter("shoal_feed_shared_batches_total", "Of them, those built for another session of the same pass.",
		func(f *loader.Stats) float64 { return float64(f.Total.Shared) }),
	prom.Counter("shoal_feed_samples_total", "Valid rows sent.", func(f *loader.Stats) float64 {
		return float64(f.Total.Samples)
	}),
	prom.Counter("shoal_feed_bad_samples_total", "Rows sent without a sample, because that could not be decoded.",
		func(f *loader.Stats) float64 { return float64(f.Total.Bad) }),
	prom.Counter("shoal_feed_sent_bytes_total", "Bytes of batches sent.", func(f *loader.Stats) float64 {
		return float64(f.Total.Bytes)
	}),
	prom.Counter("shoal_feed_source_bytes_total", "Bytes of stored samples read.", func(f *loader.Stats) float64 {
		return float64(f.Total.SourceBytes)
	}),
	prom.Counter("shoal_feed_fetch_seconds_total",
		"Time that readers of samples waited for the engine, summed over them.", func(f *loader.Stats) float64 {
			return f.Total.Fetch
		}),
	prom.Counter("shoal_feed_stall_seconds_total", "Time that clients wanted a batch and none was ready.",
		func(f *loader.Stats) float64 { return f.Total.Stall }),
	prom.Counter("shoal_feed_send_seconds_total", "Time of writing to connections, flow control included.",
		func(f *loader.Stats) float64 { return f.Total.Send }),
	prom.Counter("shoal_feed_credit_seconds_total",
		"Time that batches waited for clients to want one: the trainers are the slower side.",
		func(f *loader.Stats) float64 { return f.Total.Credit }),
	prom.Counter("shoal_feed_reserve_seconds_total", "Time of waiting for memory, slots included.",
		func(f *loader.Stats) float64 { return f.Total.Reserve }),
	prom.Counter("shoal_feed_slot_seconds_total", "Time that clients wanted a batch and held all their slots.",
		func(f *loader.Stats) float64 { return f.Total.Slots }),
	histogram("shoal_feed_decode_duration_seconds",
		"Time of the transform of one sample: decoding, augmenting, writing into the batch.",
		func(f *loader.Stats) objstore.HistogramCounts { return f.Decoding }),
)

// s3Metrics are absent without an S3 endpoint.
var s3Metrics = prom.Part(func(s *Snapshot) *s3api.Stats { return s.S3 },
	prom.Counter("shoal_s3_requests_total", "Requests to the S3 endpoint.", func(s *s3api.Stats) int64 {
		return s.Requests
	}),
	prom.Counter("shoal_s3_errors_total",
		"Of them, those that it refused or failed; errors of the origin are not counted.", func(s *s3api.Stats) int64 {
			return s.Errors
		}),
	prom.Counter("shoal_s3_forwarded_total", "Of them, those that it sent to the origin.", func(s *s3api.Stats) int64 {
		return s.Forwarded
	}),
	prom.Counter("shoal_s3_sent_bytes_total", "Bytes of objects, and of the origin's answers, that it sent.",
		func(s *s3api.Stats) int64 { return s.Sent }),
	prom.Gauge("shoal_s3_connections", "Open connections of its clients.", func(s *s3api.Stats) int64 {
		return s.Connections
	}),
)

// nearMetrics are absent without a near tier.
var nearMetrics = prom.Part(func(s *Snapshot) *near.Stats { return s.Near },
	prom.Counter("shoal_near_reads_total",
		"Reads of units (4 MiB of an object, or less), or of parts of one, that the near tier could answer.",
		func(s *near.Stats) int64 { return s.Reads }),
	prom.Counter("shoal_near_hits_total", "Of them, those that it answered.", func(s *near.Stats) int64 {
		return s.Hits
	}),
	prom.Counter("shoal_near_misses_total", "Of them, those that it had no copy for.", func(s *near.Stats) int64 {
		return s.Misses
	}),
	prom.Counter("shoal_near_passed_total", "Of them, those that did not ask it: it was skipped, or had no free place.",
		func(s *near.Stats) int64 { return s.Passed }),
	prom.Counter("shoal_near_bytes_total", "Bytes that it answered with.", func(s *near.Stats) int64 {
		return s.Bytes
	}),
	prom.Counter("shoal_near_puts_total", "Copies put to it.", func(s *near.Stats) int64 { return s.Puts }),
	prom.Counter("shoal_near_put_bytes_total", "Bytes of them.", func(s *near.Stats) int64 { return s.PutBytes }),
	prom.Counter("shoal_near_dropped_total",
		"Copies that were not put: the queue was full, or the tier did not take any.", func(s *near.Stats) int64 {
			return s.Dropped
		}),
	prom.Counter("shoal_near_damaged_total", "Copies that did not match, and were read from the origin.",
		func(s *near.Stats) int64 { return s.Damaged }),
	prom.Counter("shoal_near_errors_total", "Requests to it that failed, or had no answer in time.",
		func(s *near.Stats) int64 { return s.Errors }),
	prom.Gauge("shoal_near_queued_bytes", "Memory in use for copies to be put and reads to be verified.",
		func(s *near.Stats) int64 { return s.Queued }),
	prom.Gauge("shoal_near_away", "1 while it is left out.", func(s *near.Stats) int64 {
		return is(s.State == "away")
	}),
	prom.Gauge("shoal_near_read_only", "1 while nothing is put, and it is still read.", func(s *near.Stats) int64 {
		return is(s.State == "read-only")
	}),
)

// clusterMetrics are absent without a cluster.
var clusterMetrics = prom.Part(func(s *Snapshot) *engine.ClusterStats { return s.Cluster },
	prom.Gauge("shoal_cluster_joined", "1 while etcd answers and has this node.", func(s *engine.ClusterStats) float64 {
		return float64(is(s.State == "joined"))
	}),
	prom.Gauge("shoal_cluster_nodes", "Nodes of the cluster, as of the last list.",
		func(s *engine.ClusterStats) float64 { return float64(len(s.Nodes)) }),
	prom.Gauge("shoal_cluster_owned_ratio", "Share of the dataset that this node owns.",
		func(s *engine.ClusterStats) float64 { return s.Owned }),
	prom.Gauge("shoal_cluster_nodes_away", "Nodes that are left out, since they do not answer this one as they should.",
		func(s *engine.ClusterStats) float64 { return float64(len(s.Away())) }),
	prom.Counter("shoal_cluster_disk_bytes_total", "Bytes of the dataset read from this node's own disk.",
		func(s *engine.ClusterStats) float64 { return float64(s.DiskBytes) }),
	prom.Counter("shoal_peer_other_version_total",
		"Pieces that other nodes did not give, since they have another version of the dataset.",
		func(s *engine.ClusterStats) float64 { return float64(s.OtherVersion()) }),
	prom.Counter("shoal_peer_bytes_total", "Bytes of the dataset read from other nodes.",
		func(s *engine.ClusterStats) float64 { return float64(s.PeerBytes) }),
	prom.Counter("shoal_peer_given_bytes_total", "Bytes given to other nodes, of all datasets.",
		func(s *engine.ClusterStats) float64 { return float64(s.Given.Bytes) }),
	prom.Counter("shoal_peer_given_pieces_total", "Pieces of extents given to other nodes.",
		func(s *engine.ClusterStats) float64 { return float64(s.Given.Pieces) }),
	prom.Counter("shoal_peer_busy_total", "Pieces not given to other nodes for lack of memory or of a place.",
		func(s *engine.ClusterStats) float64 { return float64(s.Given.Busy) }),
)
