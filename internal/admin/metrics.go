package admin

import (
	"runtime"

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
// currency, which have one value at a time. What the daemon does not have, such as a feed, has no metrics.
func Collector(version string, stats func() Snapshot) prom.Collector {
	return func(to prom.Sink) {
		s := stats()
		prom.Labeled(to, prometheus.GaugeValue, "shoal_build_info", "1, with the version of Shoal and of Go.",
			"version", "goversion")(1, version, runtime.Version())
		s.putDataset(to)
		s.putReads(to)
		s.putStore(to)
		s.putCost(to)
		s.putOrders(to)
		s.putMemory(to)
		s.putDisk(to)
		if s.Feed != nil {
			putFeed(to, s.Feed)
		}
		if s.S3 != nil {
			putS3(to, s.S3)
		}
		if s.Near != nil {
			putNear(to, s.Near)
		}
		if s.Cluster != nil {
			putCluster(to, s.Cluster)
		}
	}
}

func putHistogram(to prom.Sink, name, help string, c objstore.HistogramCounts) {
	below := make(map[float64]uint64, len(c.Below))
	for i, n := range c.Below {
		below[objstore.HistogramBound(i).Seconds()] = uint64(n)
	}
	to <- prometheus.MustNewConstHistogram(prometheus.NewDesc(name, help, nil, nil), uint64(c.Count), c.Sum.Seconds(),
		below)
}

func is(b bool) int {
	if b {
		return 1
	}
	return 0
}

func (s *Snapshot) putDataset(to prom.Sink) {
	prom.Labeled(to, prometheus.GaugeValue, "shoal_dataset_info",
		"1, with the source and the version of the dataset in force.", "source", "version")(1, s.Source, s.Dataset)
	prom.Gauge(to, "shoal_dataset_files", "Files of the dataset.", s.Files)
	prom.Gauge(to, "shoal_dataset_samples", "Numbered files of the dataset.", s.Samples)
	prom.Gauge(to, "shoal_dataset_bytes", "Size of the dataset.", s.Bytes)
	prom.Gauge(to, "shoal_users", "Mounts and feeds that the daemon serves, of all datasets.", s.Users)
	n := map[string]int{}
	for _, e := range s.Errors {
		n[e.Level]++
	}
	put := prom.Labeled(to, prometheus.GaugeValue, "shoal_recent_events",
		"Distinct warnings and errors that /stats shows (the latest 32 of the dataset and of the daemon each).",
		"level")
	put(float64(n["WARN"]), "warn")
	put(float64(n["ERROR"]), "error")
	prom.Counter(to, "shoal_audit_events_written_total", "Events that the audit log has.", s.Audit.Written)
	prom.Counter(to, "shoal_audit_events_lost_total",
		"Events that it lacks, because its disk was full, failed or hung.", s.Audit.Lost)
}

func (s *Snapshot) putReads(to prom.Sink) {
	prom.Counter(to, "shoal_opens_total", "Files opened through the mount.", s.Opens)
	put := prom.Labeled(to, prometheus.CounterValue, "shoal_reads_total",
		"Extents (up to 4 MiB) read by mount and feed, by where they came from: keep (disk) and ring (memory) without "+
			"waiting, joined (a fetch was under way), miss (a fetch had to be started).", "area")
	put(float64(s.Hits.Keep), "keep")
	put(float64(s.Hits.Ring), "ring")
	put(float64(s.Joined), "joined")
	put(float64(s.Misses), "miss")
	prom.Counter(to, "shoal_read_bytes_total", "Bytes given to readers of mount and feed.", s.ReadBytes)
	prom.Counter(to, "shoal_read_stall_seconds_total",
		"Time that readers waited for the store, summed over readers.", s.Stall)
	prom.Counter(to, "shoal_samples_delivered_total",
		"Samples that trainers got: opens of numbered files through the mount, valid rows of batches that the feed "+
			"has sent. Its rate is the goodput.", s.Delivered)
	prom.Counter(to, "shoal_prefetches_total", "Extents fetched before anybody asked.", s.Prefetched)
	prom.Counter(to, "shoal_prefetch_errors_total", "Of them, those that failed; a later read tries again.",
		s.FetchErrors)
}

func (s *Snapshot) putStore(to prom.Sink) {
	put := prom.Labeled(to, prometheus.CounterValue, "shoal_store_requests_total",
		"Requests to the object store that have ended, retries and hedges included; a listing counts once however "+
			"many pages it has.", "operation", "outcome")
	for op, n := range s.Store.Outcomes {
		put(float64(n.OK), op, "ok")
		put(float64(n.Failed), op, "error")
		put(float64(n.Canceled), op, "canceled")
	}
	putHistogram(to, "shoal_store_get_duration_seconds",
		"Time of successful GETs to the object store, up to the last byte, retries each by itself. The bounds are "+
			"128 µs and its doubles.", s.Store.GetLatency)
	put = prom.Labeled(to, prometheus.CounterValue, "shoal_store_errors_total",
		"Failed requests to the object store, by kind.", "kind")
	for k := range objstore.NumKinds {
		put(float64(s.StoreErrors[objstore.Kind(k).String()]), objstore.Kind(k).Label())
	}
	prom.Counter(to, "shoal_store_received_bytes_total", "Bytes of successful GETs.", s.GetBytes)
	prom.Counter(to, "shoal_store_sent_bytes_total", "Bytes stored in the object store.", s.Store.Sent)
	prom.Counter(to, "shoal_store_retries_total", "Requests that were tried again.", s.Store.Retries)
	prom.Counter(to, "shoal_store_gave_up_total", "Requests that ran out of tries or of time.", s.Store.GaveUp)
	prom.Counter(to, "shoal_store_slow_downs_total",
		"Answers of the store that asked for fewer requests (503 SlowDown, 429).", s.Store.SlowDowns)
	prom.Counter(to, "shoal_store_hedges_total", "Second GETs for what was late.", s.Hedges.Sent)
	prom.Counter(to, "shoal_store_hedges_won_total", "Second GETs that came in first.", s.Hedges.Won)
	prom.Gauge(to, "shoal_store_requests_in_flight", "Requests to the object store that are under way.", s.InFlight)
	prom.Gauge(to, "shoal_store_connections", "Requests that may be in flight to the object store now.", s.Connections)
	put = prom.Labeled(to, prometheus.GaugeValue, "shoal_store_requests_queued",
		"Requests that wait for a connection, by who wants the bytes: demand (a reader waits), prefetch (nobody yet).",
		"priority")
	put(float64(s.Store.WaitingDemand), "demand")
	put(float64(s.Store.WaitingPrefetch), "prefetch")
}

func (s *Snapshot) putCost(to prom.Sink) {
	if s.Cost.Priced {
		prom.Labeled(to, prometheus.CounterValue, "shoal_store_cost_total",
			"What the requests have cost at the prices of --store, in that currency, beginning when the dataset was "+
				"opened.", "currency")(s.Cost.Amount, s.Cost.Currency)
	}
	if b := s.Cost.Budget; b != nil {
		prom.Gauge(to, "shoal_store_budget_gets_per_hour", "Most GETs and HEADs in any hour: gets-per-hour of --store.",
			b.PerHour)
		prom.Gauge(to, "shoal_store_budget_gets_left", "GETs and HEADs that may be sent at once now.", b.Left)
		prom.Counter(to, "shoal_store_budget_wait_seconds_total",
			"Time that readers waited for the budget, summed over readers.", b.WaitSeconds)
	}
}

func (s *Snapshot) putOrders(to prom.Sink) {
	prom.Gauge(to, "shoal_streams", "Orders in progress, feed sessions included.", len(s.Streams))
	s.putLeast(to, "shoal_lead_samples",
		"Samples ahead of the reader that can be read without waiting: the least of all orders in progress whose "+
			"reader has begun and is not at the end. Absent where there is none.",
		func(p *run.Progress) (float64, bool) { return float64(p.Lead), true })
	s.putLeast(to, "shoal_lead_seconds",
		"How long it takes the reader to get through them at its pace. Absent until that is known.",
		func(p *run.Progress) (float64, bool) { return p.LeadSeconds, p.Pace > 0 })
	prom.Gauge(to, "shoal_epoch", "Epoch of the first order in progress, the mount's if there is a mount.",
		s.Order.Epoch)
	prom.Gauge(to, "shoal_epoch_position_samples", "How far its reader has come in the epoch.", s.Order.Position)
	inFlight := 0
	for i := range s.Streams {
		inFlight += s.Streams[i].InFlight
	}
	prom.Gauge(to, "shoal_prefetches_in_flight", "Prefetches under way, over all orders in progress.", inFlight)
}

// putLeast sends the smallest value of the streams.
func (s *Snapshot) putLeast(to prom.Sink, name, help string, of func(p *run.Progress) (float64, bool)) {
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
		prom.Gauge(to, name, help, least)
	}
}

func (s *Snapshot) putMemory(to prom.Sink) {
	m := &s.Memory
	put := prom.Labeled(to, prometheus.GaugeValue, "shoal_memory_ledger_bytes",
		"Sample data in memory, by what it was reserved for: demand (readers that wait), prefetch (fetched ahead), "+
			"batches (of the feed).", "class")
	put(float64(m.Demand), "demand")
	put(float64(m.Prefetch), "prefetch")
	put(float64(m.Batches), "batches")
	prom.Gauge(to, "shoal_memory_ledger_peak_bytes", "Most that was in memory at once.", m.Peak)
	prom.Gauge(to, "shoal_memory_ledger_limit_bytes",
		"Most that may be in memory: --memory without what the daemon needs itself.", m.Limit)
	prom.Gauge(to, "shoal_memory_reservations_waiting", "Reservations that wait for memory.", m.Waiting)
	prom.Gauge(to, "shoal_memory_ring_bytes", "Extents staged in memory.", m.Ring)
	prom.Gauge(to, "shoal_memory_anonymous_bytes", "Resident memory without file pages.", m.RSSAnon)
}

func (s *Snapshot) putDisk(to prom.Sink) {
	d, r := &s.Disk, &s.Recoded
	prom.Gauge(to, "shoal_disk_used_bytes", "Segments of the dataset on disk.", d.Used)
	prom.Gauge(to, "shoal_disk_quota_bytes", "Most that they may take; 0 is no bound of its own.", d.Limit)
	prom.Gauge(to, "shoal_disk_cache_used_bytes", "Segments of all datasets of the cache directory.", d.AllUsed)
	prom.Gauge(to, "shoal_disk_cache_limit_bytes", "Most that they may take: --cache-size without the catalog.",
		d.Budget)
	prom.Gauge(to, "shoal_disk_kept_extents", "Extents of the dataset on disk.", d.Kept)
	prom.Gauge(to, "shoal_disk_extents", "Extents of the dataset.", d.Extents)
	prom.Gauge(to, "shoal_disk_writes_queued", "Extents in memory that are still to be written to disk.", d.Queued)
	prom.Gauge(to, "shoal_disk_out_of_use",
		"1 while the disk is full, fails or hangs, and the daemon goes on without it.", is(d.OutOfUse))
	prom.Counter(to, "shoal_disk_declined_total", "Extents that found the kept set full.", d.Declined)
	prom.Counter(to, "shoal_disk_corrupt_total",
		"Records that failed their checksum; they are fetched again, and never served.", d.Corrupt)
	prom.Counter(to, "shoal_disk_errors_total", "Failed operations of the disk, hangs among them.", d.Errors)
	prom.Counter(to, "shoal_disk_waits_total", "Pieces of reads that the page cache did not have.", d.Waits)
	prom.Counter(to, "shoal_disk_gave_up_total", "Reads that waited too long for the disk and went to the store.",
		d.GaveUp)
	prom.Gauge(to, "shoal_recoded_files", "JPEG files that the disk has in a smaller form (--recode).", r.Files)
	prom.Gauge(to, "shoal_recoded_before_bytes", "These files before recoding.", r.Before)
	prom.Gauge(to, "shoal_recoded_after_bytes", "Their records.", r.After)
	prom.Counter(to, "shoal_restored_total", "Recoded files that were restored for a reader.", r.Restored)
	prom.Counter(to, "shoal_restore_seconds_total", "Time that this took, summed.", r.Restore)
}

func putFeed(to prom.Sink, f *loader.Stats) {
	t := &f.Total
	prom.Gauge(to, "shoal_feed_sessions", "Open sessions.", f.Open)
	prom.Counter(to, "shoal_feed_sessions_opened_total", "Sessions opened.", f.Sessions)
	prom.Counter(to, "shoal_feed_sessions_fenced_total",
		"Sessions that a newer opening of the same session and rank has ended.", f.Fenced)
	prom.Counter(to, "shoal_feed_sessions_failed_total",
		"Sessions that an error has ended; clients that left are not counted.", f.Failed)
	prom.Gauge(to, "shoal_feed_held_bytes", "Memory of batches, all slots included.", f.HeldBytes)
	prom.Gauge(to, "shoal_feed_transforms_running", "Transforms that run now.", f.Working)
	prom.Gauge(to, "shoal_feed_transforms_limit", "Transforms that may run at once: one for each processor.", f.Workers)
	prom.Counter(to, "shoal_feed_batches_total", "Batches sent.", t.Batches)
	prom.Counter(to, "shoal_feed_slot_batches_total", "Of them, those that went in shared memory.", t.InSlots)
	prom.Counter(to, "shoal_feed_shared_batches_total", "Of them, those built for another session of the same pass.",
		t.Shared)
	prom.Counter(to, "shoal_feed_samples_total", "Valid rows sent.", t.Samples)
	prom.Counter(to, "shoal_feed_bad_samples_total",
		"Rows sent without a sample, because that could not be decoded.", t.Bad)
	prom.Counter(to, "shoal_feed_sent_bytes_total", "Bytes of batches sent.", t.Bytes)
	prom.Counter(to, "shoal_feed_source_bytes_total", "Bytes of stored samples read.", t.SourceBytes)
	prom.Counter(to, "shoal_feed_fetch_seconds_total",
		"Time that readers of samples waited for the engine, summed over them.", t.Fetch)
	prom.Counter(to, "shoal_feed_stall_seconds_total", "Time that clients wanted a batch and none was ready.", t.Stall)
	prom.Counter(to, "shoal_feed_send_seconds_total", "Time of writing to connections, flow control included.", t.Send)
	prom.Counter(to, "shoal_feed_credit_seconds_total",
		"Time that batches waited for clients to want one: the trainers are the slower side.", t.Credit)
	prom.Counter(to, "shoal_feed_reserve_seconds_total", "Time of waiting for memory, slots included.", t.Reserve)
	prom.Counter(to, "shoal_feed_slot_seconds_total", "Time that clients wanted a batch and held all their slots.",
		t.Slots)
	putHistogram(to, "shoal_feed_decode_duration_seconds",
		"Time of the transform of one sample: decoding, augmenting, writing into the batch.", f.Decoding)
}

func putS3(to prom.Sink, s *s3api.Stats) {
	prom.Counter(to, "shoal_s3_requests_total", "Requests to the S3 endpoint.", s.Requests)
	prom.Counter(to, "shoal_s3_errors_total",
		"Of them, those that it refused or failed; errors of the origin are not counted.", s.Errors)
	prom.Counter(to, "shoal_s3_forwarded_total", "Of them, those that it sent to the origin.", s.Forwarded)
	prom.Counter(to, "shoal_s3_sent_bytes_total", "Bytes of objects, and of the origin's answers, that it sent.",
		s.Sent)
	prom.Gauge(to, "shoal_s3_connections", "Open connections of its clients.", s.Connections)
}

func putNear(to prom.Sink, s *near.Stats) {
	prom.Counter(to, "shoal_near_reads_total",
		"Reads of units (4 MiB of an object, or less), or of parts of one, that the near tier could answer.", s.Reads)
	prom.Counter(to, "shoal_near_hits_total", "Of them, those that it answered.", s.Hits)
	prom.Counter(to, "shoal_near_misses_total", "Of them, those that it had no copy for.", s.Misses)
	prom.Counter(to, "shoal_near_passed_total",
		"Of them, those that did not ask it: it was skipped, or had no free place.", s.Passed)
	prom.Counter(to, "shoal_near_bytes_total", "Bytes that it answered with.", s.Bytes)
	prom.Counter(to, "shoal_near_puts_total", "Copies put to it.", s.Puts)
	prom.Counter(to, "shoal_near_put_bytes_total", "Bytes of them.", s.PutBytes)
	prom.Counter(to, "shoal_near_dropped_total",
		"Copies that were not put: the queue was full, or the tier did not take any.", s.Dropped)
	prom.Counter(to, "shoal_near_damaged_total", "Copies that did not match, and were read from the origin.", s.Damaged)
	prom.Counter(to, "shoal_near_errors_total", "Requests to it that failed, or had no answer in time.", s.Errors)
	prom.Gauge(to, "shoal_near_queued_bytes", "Memory in use for copies to be put and reads to be verified.", s.Queued)
	prom.Gauge(to, "shoal_near_away", "1 while it is left out.", is(s.State == "away"))
	prom.Gauge(to, "shoal_near_read_only", "1 while nothing is put, and it is still read.", is(s.State == "read-only"))
}

func putCluster(to prom.Sink, s *engine.ClusterStats) {
	prom.Gauge(to, "shoal_cluster_joined", "1 while etcd answers and has this node.", is(s.State == "joined"))
	prom.Gauge(to, "shoal_cluster_nodes", "Nodes of the cluster, as of the last list.", len(s.Nodes))
	prom.Gauge(to, "shoal_cluster_owned_ratio", "Share of the dataset that this node owns.", s.Owned)
	prom.Gauge(to, "shoal_cluster_nodes_away",
		"Nodes that are left out, since they do not answer this one as they should.", len(s.Away()))
	prom.Counter(to, "shoal_cluster_disk_bytes_total", "Bytes of the dataset read from this node's own disk.",
		s.DiskBytes)
	prom.Counter(to, "shoal_peer_other_version_total",
		"Pieces that other nodes did not give, since they have another version of the dataset.", s.OtherVersion())
	prom.Counter(to, "shoal_peer_bytes_total", "Bytes of the dataset read from other nodes.", s.PeerBytes)
	prom.Counter(to, "shoal_peer_given_bytes_total", "Bytes given to other nodes, of all datasets.", s.Given.Bytes)
	prom.Counter(to, "shoal_peer_given_pieces_total", "Pieces of extents given to other nodes.", s.Given.Pieces)
	prom.Counter(to, "shoal_peer_busy_total", "Pieces not given to other nodes for lack of memory or of a place.",
		s.Given.Busy)
}
