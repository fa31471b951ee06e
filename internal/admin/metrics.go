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
		"1, with the source and the current version of the dataset.", "source", "version")(1, s.Source, s.Dataset)
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
	prom.Counter(to, "shoal_audit_events_written_total", "Events written to the audit log.", s.Audit.Written)
	prom.Counter(to, "shoal_audit_events_lost_total",
		"Events missing from the audit log because its disk was full, failed or hung.", s.Audit.Lost)
}

func (s *Snapshot) putReads(to prom.Sink) {
	prom.Counter(to, "shoal_opens_total", "Files opened through the mount.", s.Opens)
	put := prom.Labeled(to, prometheus.CounterValue, "shoal_reads_total",
		"Extents (up to 4 MiB) read by mount and feed, by where they came from: keep (disk) and ring (memory) without "+
			"waiting, joined (a fetch was in flight), miss (a fetch had to be started).", "area")
	put(float64(s.Hits.Keep), "keep")
	put(float64(s.Hits.Ring), "ring")
	put(float64(s.Joined), "joined")
	put(float64(s.Misses), "miss")
	prom.Counter(to, "shoal_read_bytes_total", "Bytes given to readers of mount and feed.", s.ReadBytes)
	prom.Counter(to, "shoal_read_stall_seconds_total",
		"Time that readers waited for the store, summed over readers.", s.Stall)
	prom.Counter(to, "shoal_samples_delivered_total", "Samples that trainers got: opens of numbered files through the "+
		"mount, valid rows of batches that the feed has sent. Its rate is the goodput.", s.Delivered)
	prom.Counter(to, "shoal_prefetches_total", "Extents fetched before a reader requested them.", s.Prefetched)
	prom.Counter(to, "shoal_prefetch_errors_total", "Failed prefetches; a later read tries again.", s.FetchErrors)
}

func (s *Snapshot) putStore(to prom.Sink) {
	put := prom.Labeled(to, prometheus.CounterValue, "shoal_store_requests_total",
		"Completed requests to the object store, including retries and hedges; a listing counts once, however many "+
			"pages it has.", "operation", "outcome")
	for op, n := range s.Store.Outcomes {
		put(float64(n.OK), op, "ok")
		put(float64(n.Failed), op, "error")
		put(float64(n.Canceled), op, "canceled")
	}
	putHistogram(to, "shoal_store_get_duration_seconds", "Time of successful GETs to the object store, to the last "+
		"byte, each retry by itself. The bounds double from 128 µs.", s.Store.GetLatency)
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
	prom.Counter(to, "shoal_store_hedges_total", "Second GETs sent because the first was late.", s.Hedges.Sent)
	prom.Counter(to, "shoal_store_hedges_won_total", "Second GETs that finished first.", s.Hedges.Won)
	prom.Gauge(to, "shoal_store_requests_in_flight", "Requests in flight to the object store.", s.InFlight)
	prom.Gauge(to, "shoal_store_connections", "Requests that may be in flight to the object store now.", s.Connections)
	put = prom.Labeled(to, prometheus.GaugeValue, "shoal_store_requests_queued",
		"Requests waiting for a connection, by who wants the bytes: demand (a reader waits), prefetch (nobody yet).",
		"priority")
	put(float64(s.Store.WaitingDemand), "demand")
	put(float64(s.Store.WaitingPrefetch), "prefetch")
}

func (s *Snapshot) putCost(to prom.Sink) {
	if s.Cost.Priced {
		prom.Labeled(to, prometheus.CounterValue, "shoal_store_cost_total",
			"Cost of the requests since the dataset was opened, at the prices of --store.",
			"currency")(s.Cost.Amount, s.Cost.Currency)
	}
	if b := s.Cost.Budget; b != nil {
		prom.Gauge(to, "shoal_store_budget_gets_per_hour", "Most GETs and HEADs in any hour (--store).", b.PerHour)
		prom.Gauge(to, "shoal_store_budget_gets_left", "GETs and HEADs that may be sent at once now.", b.Left)
		prom.Counter(to, "shoal_store_budget_wait_seconds_total",
			"Time that readers waited for the budget, summed over readers.", b.WaitSeconds)
	}
}

func (s *Snapshot) putOrders(to prom.Sink) {
	prom.Gauge(to, "shoal_streams", "Orders in progress, feed sessions included.", len(s.Streams))
	s.putLeast(to, "shoal_lead_samples",
		"Samples ahead of the reader that can be read without waiting: the minimum over all orders in progress "+
			"whose reader has begun and is not at the end. Absent if there is none.",
		func(p *run.Progress) (float64, bool) { return float64(p.Lead), true })
	s.putLeast(to, "shoal_lead_seconds",
		"Time that the samples ahead last at the reader's pace, a minimum like shoal_lead_samples. Absent until the "+
			"pace is known.",
		func(p *run.Progress) (float64, bool) { return p.LeadSeconds, p.Pace > 0 })
	prom.Gauge(to, "shoal_epoch", "Epoch of the first order in progress, the mount's if there is a mount.",
		s.Order.Epoch)
	prom.Gauge(to, "shoal_epoch_position_samples", "Position of the reader in its epoch.", s.Order.Position)
	inFlight := 0
	for i := range s.Streams {
		inFlight += s.Streams[i].InFlight
	}
	prom.Gauge(to, "shoal_prefetches_in_flight", "Prefetches in flight, over all orders in progress.", inFlight)
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
	put := prom.Labeled(to, prometheus.GaugeValue, "shoal_memory_ledger_bytes", "Sample data in memory, by what it "+
		"was reserved for: demand (readers that wait), prefetch (fetched ahead), batches (of the feed).", "class")
	put(float64(m.Demand), "demand")
	put(float64(m.Prefetch), "prefetch")
	put(float64(m.Batches), "batches")
	prom.Gauge(to, "shoal_memory_ledger_peak_bytes", "Most sample data in memory at once so far.", m.Peak)
	prom.Gauge(to, "shoal_memory_ledger_limit_bytes",
		"Limit of sample data in memory: --memory without what the daemon itself needs.", m.Limit)
	prom.Gauge(to, "shoal_memory_reservations_waiting", "Reservations waiting for memory.", m.Waiting)
	prom.Gauge(to, "shoal_memory_ring_bytes", "Extents staged in memory.", m.Ring)
	prom.Gauge(to, "shoal_memory_anonymous_bytes", "Resident memory without file pages.", m.RSSAnon)
}

func (s *Snapshot) putDisk(to prom.Sink) {
	d, r := &s.Disk, &s.Recoded
	prom.Gauge(to, "shoal_disk_used_bytes", "Segments of the dataset on disk.", d.Used)
	prom.Gauge(to, "shoal_disk_quota_bytes", "Quota of the dataset's segments; 0 if it has none.", d.Limit)
	prom.Gauge(to, "shoal_disk_cache_used_bytes", "Segments of all datasets of the cache directory.", d.AllUsed)
	prom.Gauge(to, "shoal_disk_cache_limit_bytes",
		"Limit of shoal_disk_cache_used_bytes: --cache-size without the catalog.", d.Budget)
	prom.Gauge(to, "shoal_disk_kept_extents", "Extents of the dataset on disk.", d.Kept)
	prom.Gauge(to, "shoal_disk_extents", "Extents of the dataset.", d.Extents)
	prom.Gauge(to, "shoal_disk_writes_queued", "Extents in memory waiting to be written to disk.", d.Queued)
	prom.Gauge(to, "shoal_disk_out_of_use",
		"1 while the disk is full, failing or hanging, and the daemon runs without it.", is(d.OutOfUse))
	prom.Counter(to, "shoal_disk_declined_total", "Extents not kept because the kept set was full.", d.Declined)
	prom.Counter(to, "shoal_disk_corrupt_total",
		"Records that failed their checksum; they are fetched again, and never served.", d.Corrupt)
	prom.Counter(to, "shoal_disk_errors_total", "Failed disk operations, including hangs.", d.Errors)
	prom.Counter(to, "shoal_disk_waits_total", "Parts of disk reads that missed the page cache.", d.Waits)
	prom.Counter(to, "shoal_disk_gave_up_total", "Reads that waited too long for the disk and went to the store.",
		d.GaveUp)
	prom.Gauge(to, "shoal_recoded_files", "JPEG files on disk in a smaller form (--recode).", r.Files)
	prom.Gauge(to, "shoal_recoded_before_bytes", "Bytes of the recoded files before recoding.", r.Before)
	prom.Gauge(to, "shoal_recoded_after_bytes", "Bytes of the recoded files on disk.", r.After)
	prom.Counter(to, "shoal_restored_total", "Recoded files that were restored for a reader.", r.Restored)
	prom.Counter(to, "shoal_restore_seconds_total", "Time spent restoring recoded files, summed.", r.Restore)
}

func putFeed(to prom.Sink, f *loader.Stats) {
	t := &f.Total
	prom.Gauge(to, "shoal_feed_sessions", "Open sessions.", f.Open)
	prom.Counter(to, "shoal_feed_sessions_opened_total", "Sessions opened.", f.Sessions)
	prom.Counter(to, "shoal_feed_sessions_fenced_total",
		"Sessions ended by a newer one of the same name and rank.", f.Fenced)
	prom.Counter(to, "shoal_feed_sessions_failed_total",
		"Sessions ended by an error, clients that left not counted.", f.Failed)
	prom.Gauge(to, "shoal_feed_held_bytes", "Memory of batches, including all slots.", f.HeldBytes)
	prom.Gauge(to, "shoal_feed_transforms_running", "Transforms running now.", f.Working)
	prom.Gauge(to, "shoal_feed_transforms_limit", "Transforms that may run at once: one per processor.", f.Workers)
	prom.Counter(to, "shoal_feed_batches_total", "Batches sent.", t.Batches)
	prom.Counter(to, "shoal_feed_slot_batches_total", "Batches sent in shared memory.", t.InSlots)
	prom.Counter(to, "shoal_feed_shared_batches_total", "Batches sent that another session of the same pass had built.",
		t.Shared)
	prom.Counter(to, "shoal_feed_samples_total", "Valid rows sent.", t.Samples)
	prom.Counter(to, "shoal_feed_bad_samples_total",
		"Rows sent without a sample because it could not be decoded.", t.Bad)
	prom.Counter(to, "shoal_feed_sent_bytes_total", "Bytes of batches sent.", t.Bytes)
	prom.Counter(to, "shoal_feed_source_bytes_total", "Bytes of stored samples read.", t.SourceBytes)
	prom.Counter(to, "shoal_feed_fetch_seconds_total",
		"Time that the feed waited for the bytes of samples, summed over its readers.", t.Fetch)
	prom.Counter(to, "shoal_feed_stall_seconds_total", "Time that clients wanted a batch and none was ready.", t.Stall)
	prom.Counter(to, "shoal_feed_send_seconds_total", "Time spent sending, including flow control.", t.Send)
	prom.Counter(to, "shoal_feed_credit_seconds_total",
		"Time that finished batches waited for clients to want one: the trainers are the slower side.", t.Credit)
	prom.Counter(to, "shoal_feed_reserve_seconds_total", "Time spent waiting for memory, including slots.", t.Reserve)
	prom.Counter(to, "shoal_feed_slot_seconds_total", "Time that clients wanted a batch while holding all their slots.",
		t.Slots)
	putHistogram(to, "shoal_feed_decode_duration_seconds",
		"Time to transform one sample: decode, augment, write into the batch.", f.Decoding)
}

func putS3(to prom.Sink, s *s3api.Stats) {
	prom.Counter(to, "shoal_s3_requests_total", "Requests to the S3 endpoint.", s.Requests)
	prom.Counter(to, "shoal_s3_errors_total",
		"Requests that the S3 endpoint refused or failed, not counting errors of the origin.", s.Errors)
	prom.Counter(to, "shoal_s3_forwarded_total", "Requests that the S3 endpoint forwarded to the origin.", s.Forwarded)
	prom.Counter(to, "shoal_s3_sent_bytes_total",
		"Bytes of objects, and of the origin's answers, that the S3 endpoint sent.", s.Sent)
	prom.Gauge(to, "shoal_s3_connections", "Open client connections of the S3 endpoint.", s.Connections)
}

func putNear(to prom.Sink, s *near.Stats) {
	prom.Counter(to, "shoal_near_reads_total",
		"Reads of units (4 MiB of an object, or less), or of parts of one, that the near tier could answer.", s.Reads)
	prom.Counter(to, "shoal_near_hits_total", "Reads that the near tier answered.", s.Hits)
	prom.Counter(to, "shoal_near_misses_total", "Reads for which the near tier had no copy.", s.Misses)
	prom.Counter(to, "shoal_near_passed_total",
		"Reads that bypassed the near tier: it was skipped, or had no free place.", s.Passed)
	prom.Counter(to, "shoal_near_bytes_total", "Bytes read from the near tier.", s.Bytes)
	prom.Counter(to, "shoal_near_puts_total", "Copies put to the near tier.", s.Puts)
	prom.Counter(to, "shoal_near_put_bytes_total", "Bytes put to the near tier.", s.PutBytes)
	prom.Counter(to, "shoal_near_dropped_total",
		"Copies not put to the near tier: the queue was full, or the tier took none.", s.Dropped)
	prom.Counter(to, "shoal_near_damaged_total", "Damaged near-tier copies; the origin was read instead.", s.Damaged)
	prom.Counter(to, "shoal_near_errors_total", "Requests to the near tier that failed or timed out.", s.Errors)
	prom.Gauge(to, "shoal_near_queued_bytes", "Memory of queued near-tier puts and verifications.", s.Queued)
	prom.Gauge(to, "shoal_near_away", "1 while the near tier is skipped.", is(s.State == "away"))
	prom.Gauge(to, "shoal_near_read_only", "1 while the near tier is read but not filled.", is(s.State == "read-only"))
}

func putCluster(to prom.Sink, s *engine.ClusterStats) {
	prom.Gauge(to, "shoal_cluster_joined", "1 while etcd answers and lists this node.", is(s.State == "joined"))
	prom.Gauge(to, "shoal_cluster_nodes", "Nodes of the cluster, as of the last list.", len(s.Nodes))
	prom.Gauge(to, "shoal_cluster_owned_ratio", "Share of the dataset that this node owns.", s.Owned)
	prom.Gauge(to, "shoal_cluster_nodes_away",
		"Nodes skipped because they do not answer this one properly.", len(s.Away()))
	prom.Counter(to, "shoal_cluster_disk_bytes_total", "Bytes of the dataset read from this node's own disk.",
		s.DiskBytes)
	prom.Counter(to, "shoal_peer_other_version_total",
		"Pieces that other nodes did not give because they have another version of the dataset.", s.OtherVersion())
	prom.Counter(to, "shoal_peer_bytes_total", "Bytes of the dataset read from other nodes.", s.PeerBytes)
	prom.Counter(to, "shoal_peer_given_bytes_total", "Bytes given to other nodes, of all datasets.", s.Given.Bytes)
	prom.Counter(to, "shoal_peer_given_pieces_total", "Pieces of extents given to other nodes.", s.Given.Pieces)
	prom.Counter(to, "shoal_peer_busy_total", "Pieces not given to other nodes for lack of memory or a free place.",
		s.Given.Busy)
}
