package engine

import (
	"os"
	"runtime"
	"time"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/cache/objstore/near"
	"github.com/shoalfs/shoal/internal/machine"
	"github.com/shoalfs/shoal/prefetch/run"
)

// StatsVersion is the version of the Stats schema (docs/stats.md). A new field does not need a new version; a changed
// or removed one does.
const StatsVersion = 1

// Stats is the content of `.shoal/stats` and `shoal stat --json`. Counters count from the daemon's start.
type Stats struct {
	Version int     `json:"version"` // of this schema
	PID     int     `json:"pid"`
	Source  string  `json:"source"`
	Packed  bool    `json:"packed"`  // read from tar shards
	Dataset string  `json:"dataset"` // dataset version, hex SHA-256
	Files   int     `json:"files"`
	Samples int     `json:"samples"` // numbered files
	Bytes   int64   `json:"bytes"`   // of the dataset
	Uptime  float64 `json:"uptime_seconds"`

	CacheDir  string `json:"cache_dir"`
	DatasetID string `json:"dataset_id"` // of the source, whatever its version; hex
	Users     int    `json:"users"`      // mounts and feeds that the daemon serves, of all datasets

	Transport   string  `json:"transport,omitempty"` // how requests reach the mount
	Opens       int64   `json:"opens"`               // files opened through the mount
	Readers     int     `json:"readers"`             // threads that opened files of the mount lately
	ReaderTime  float64 `json:"reader_seconds"`      // for which threads read the mount, summed over them
	Reads       int64   `json:"reads"`               // extents read by mount and feed
	ReadBytes   int64   `json:"read_bytes"`          // given to readers of mount and feed
	Hits        Hits    `json:"hits"`
	Joined      int64   `json:"joined"`        // reads that waited for a fetch under way
	Misses      int64   `json:"misses"`        // reads that had to start a fetch
	Stall       float64 `json:"stall_seconds"` // time that readers waited for the store, summed over readers
	Prefetched  int64   `json:"prefetched"`
	FetchErrors int64   `json:"prefetch_errors"`

	GetRequests  int64            `json:"get_requests"`
	GetBytes     int64            `json:"get_bytes"`
	ListRequests int64            `json:"list_requests"`
	StatRequests int64            `json:"stat_requests"`
	StoreErrors  map[string]int64 `json:"store_errors"`
	InFlight     int64            `json:"requests_in_flight"`
	Silent       float64          `json:"silent_seconds"` // for which the store has answered no GET, while some wait
	LatencyP50   float64          `json:"get_latency_p50_seconds"`
	LatencyP99   float64          `json:"get_latency_p99_seconds"`
	Connections  int              `json:"connections"` // requests that may be in flight now
	Slowest      []SlowKey        `json:"slowest"`     // keys by the time that a GET of them took

	Hedges objstore.HedgeStats `json:"hedges"` // second GETs for late requests
	Store  StoreStats          `json:"store"`
	Near   *near.Stats         `json:"near,omitempty"` // nil without a near tier
	Cost   Cost                `json:"cost"`

	Cluster *ClusterStats `json:"cluster,omitempty"` // nil without a cluster

	GoodputStats

	Lead        int            `json:"lead_samples"` // samples that can be read next without waiting
	LeadSeconds float64        `json:"lead_seconds"` // the same at the reader's pace; 0 until that is known
	Order       OrderState     `json:"order"`
	Streams     []run.Progress `json:"streams"`
	Skipped     SkippedKeys    `json:"keys_not_shown"`
	Memory      MemoryStats    `json:"memory"`
	Disk        DiskStats      `json:"disk"`
	Recoded     RecodeStats    `json:"recoded"`
	Audit       AuditStats     `json:"audit"`
	Errors      []ErrorEvent   `json:"errors"` // the latest warnings and errors, each once
}

// Hits counts reads that did not wait, by the area that served them.
type Hits struct {
	Keep int64 `json:"keep"` // from the kept set on disk
	Ring int64 `json:"ring"` // from memory
}

// OrderState describes the order of the mount.
type OrderState struct {
	Spec     string `json:"spec"`
	Epoch    int    `json:"epoch"`
	Position int    `json:"position"`
	// none, waiting (nothing read yet), following, finished; watching, ended, searching, unknown, inferred
	State string `json:"state"`
}

// SkippedKeys counts keys that a file tree cannot show, and shards left out.
type SkippedKeys struct {
	Markers  int      `json:"folder_markers"`
	Hostile  int      `json:"hostile"`
	Shadowed int      `json:"shadowed"`
	Bad      int      `json:"bad_shards"`
	Examples []string `json:"examples,omitempty"`
}

// MemoryStats is in bytes.
type MemoryStats struct {
	Used       int64 `json:"ledger_used"`
	Peak       int64 `json:"ledger_peak"`
	Limit      int64 `json:"ledger_limit"`
	Demand     int64 `json:"demand"`   // of ledger_used, for readers that wait
	Prefetch   int64 `json:"prefetch"` // of ledger_used, fetched ahead of readers
	Batches    int64 `json:"batches"`  // of ledger_used, the feed's
	Idle       int64 `json:"idle"`     // of ledger_used, what was read and stays for later reads
	Waiting    int   `json:"waiting"`  // reservations that wait for memory
	Ring       int64 `json:"ring"`
	RSS        int64 `json:"rss"`
	RSSAnon    int64 `json:"rss_anon"`
	Goroutines int   `json:"goroutines"`
}

// DiskStats is in bytes of the cache directory's segments.
type DiskStats struct {
	Used     int64  `json:"used"`
	Limit    int64  `json:"limit"`
	Kept     int    `json:"kept_extents"`
	Extents  int    `json:"extents"`
	Declined int64  `json:"declined"` // extents that found the kept set full
	Corrupt  int64  `json:"corrupt"`
	Errors   int64  `json:"errors"`
	OutOfUse bool   `json:"out_of_use"`
	Reason   string `json:"reason,omitempty"` // why it is out of use
	Waits    int64  `json:"waits"`            // pieces of reads that the page cache did not have
	GaveUp   int64  `json:"gave_up"`          // reads that waited too long for the disk
	Budget   int64  `json:"budget"`           // for all datasets of the cache directory
	AllUsed  int64  `json:"all_used"`         // by all of them
	Queued   int    `json:"queued"`           // extents in memory that are still to be written
}

// RecodeStats describes the files that are kept in a shorter form.
type RecodeStats struct {
	UnderWay bool    `json:"under_way"` // others are being brought into it
	Files    int     `json:"files"`
	Before   int64   `json:"bytes_before"` // of these files
	After    int64   `json:"bytes_after"`  // of their records
	Restored int64   `json:"restored"`     // reads of such a file as it came
	Restore  float64 `json:"restore_seconds"`
}

// AuditStats counts the events of the daemon's audit log: 0 without one.
type AuditStats struct {
	Written int64 `json:"written"`
	Lost    int64 `json:"lost"` // because its disk was full, failed or hung
}

// Stats returns a snapshot.
func (e *Engine) Stats() Stats {
	v := e.cur.Load()
	c, all := v.volume.Stats(), e.cache.Stats()
	m := e.remoteOf(v).meter.Stats()
	s := Stats{
		Version: StatsVersion, PID: os.Getpid(), Source: e.source.String(), Dataset: v.manifest.Version(),
		Files: v.manifest.Len(), Samples: v.samples.Len(), Bytes: v.manifest.Bytes(),
		Uptime: time.Since(e.started).Seconds(), Packed: v.layout != nil,
		CacheDir: e.host.Path(), DatasetID: e.datasetID(), Users: e.host.users(),
		Opens: e.counted.opens.Load(), Reads: c.Reads, ReadBytes: c.ReadBytes, Hits: Hits{c.KeepHits, c.RingHits},
		Joined: c.Joined, Misses: c.Misses, Stall: c.Stall.Seconds(),
		Prefetched: c.Prefetched, FetchErrors: c.FetchErrors,
		StoreErrors: map[string]int64{}, Store: StoreStats{Outcomes: map[string]objstore.Outcomes{}},
		LatencyP50: m.Median.Seconds(), LatencyP99: m.P99.Seconds(),
		Memory: MemoryStats{Used: all.MemoryUsed, Peak: all.MemoryPeak, Limit: all.MemoryLimit,
			Demand: all.MemoryDemand, Prefetch: all.MemoryPrefetch, Batches: all.MemoryBatches, Idle: all.IdleBytes,
			Waiting: all.MemoryWaiting, Ring: all.RingBytes, Goroutines: runtime.NumGoroutine()},
		Disk: DiskStats{Used: c.DiskUsed, Limit: c.DiskLimit, Declined: c.Declined, Corrupt: c.Corrupt,
			Errors: c.DiskErrors, OutOfUse: c.DiskDown, Reason: c.DiskReason, Waits: c.DiskWaits, GaveUp: c.DiskGaveUp,
			Budget: all.DiskLimit, AllUsed: all.DiskUsed, Queued: c.DiskQueued},
		Recoded: RecodeStats{e.recoding.underWay.Load(), c.Coded, c.CodedBefore, c.CodedAfter, c.Restored,
			c.Restore.Seconds()},
		Errors: append(e.host.errs.snapshot(), e.counted.errs.snapshot()...), Streams: []run.Progress{},
	}
	if transport := e.counted.transport.Load(); transport != nil {
		s.Transport = (*transport)()
	}
	e.addStores(&s)
	s.Delivered, s.PerSecond = e.counted.goodput.rate(time.Now())
	s.Cost = e.Cost()
	s.Audit.Written, s.Audit.Lost = e.host.audit.Counts()
	s.Connections = e.remoteOf(v).limiter.Places()
	if e.near != nil {
		s.Near = new(e.near.Stats())
	}
	s.Cluster = e.clusterStats(c.PeerBytes, c.KeptBytes)
	s.Slowest, s.Readers = e.remoteOf(v).slowest.snapshot(), e.counted.readers.count()
	s.ReaderTime = e.counted.readers.seconds()
	s.Disk.Kept, s.Disk.Extents = v.volume.Kept()
	process := machine.Fields("/proc/self/status") // in KiB
	s.Memory.RSS, s.Memory.RSSAnon = process["VmRSS:"]<<10, process["RssAnon:"]<<10
	sk := v.manifest.Skipped()
	bad, examples := v.badShards()
	s.Skipped = SkippedKeys{sk.Markers, sk.Hostile, sk.Shadowed, bad, append(examples, sk.Examples...)}

	s.Order = OrderState{Spec: e.order().String(), State: "none"}
	mount, sessions := e.orders.following()
	stale, told := e.orders.stale(), false
	for _, st := range append(mount, sessions...) {
		p := st.Progress()
		p.Stale = stale[p.Name]
		s.Streams = append(s.Streams, p)
		if told || p.Stale {
			continue
		}
		told = true
		s.Lead, s.LeadSeconds, s.Order.Epoch, s.Order.Position = p.Lead, p.LeadSeconds, p.Epoch, p.Position
		switch {
		case len(mount) == 0:
			s.Order.Spec, s.Order.State = p.Name, "following"
		case p.Consumed == 0:
			s.Order.State = "waiting"
		case p.Position >= p.Len:
			s.Order.State = "finished"
		default:
			s.Order.State = "following"
		}
		if len(mount) > 0 && st.OfPlan() {
			s.Order.Spec = "plan"
		}
	}
	if i := e.orders.inference.Load(); i != nil {
		i.state(&s.Order)
	}
	if s.Order.State == "none" && e.orders.ended() {
		s.Order.Spec, s.Order.State = "plan", "ended"
	}
	return s
}

// StoreStats is the details of requests to the object store; with a shard set in place of the source's objects, to
// both. Sums and latencies are in Stats.
type StoreStats struct {
	// of finished requests, retries included: get, head, list, put, other
	Outcomes  map[string]objstore.Outcomes `json:"outcomes"`
	Sent      int64                        `json:"sent_bytes"` // stored
	Retries   int64                        `json:"retries"`    // tries after the first
	GaveUp    int64                        `json:"gave_up"`    // requests that ran out of tries or time
	SlowDowns int64                        `json:"slow_downs"` // answers that requested fewer requests
	// requests without a connection that a reader waits for
	WaitingDemand   int                      `json:"waiting_demand"`
	WaitingPrefetch int                      `json:"waiting_prefetch"` // the others
	GetLatency      objstore.HistogramCounts `json:"-"`                // of successful GETs, up to the last byte
}

func (e *Engine) addStores(s *Stats) {
	for _, r := range e.remotes() {
		m, l, t, of := r.meter.Stats(), r.limiter.Stats(), r.retrier.Stats(), &s.Store
		s.GetRequests, s.GetBytes, s.ListRequests = s.GetRequests+m.Reads, s.GetBytes+m.Bytes, s.ListRequests+m.Lists
		s.StatRequests, s.InFlight = s.StatRequests+m.Stats, s.InFlight+m.InFlight
		s.Silent = max(s.Silent, m.Silent.Seconds())
		for kind, n := range m.Errors {
			s.StoreErrors[kind] += n
		}
		for op, o := range m.Outcomes {
			of.Outcomes[op] = of.Outcomes[op].Add(o)
		}
		of.Sent, of.SlowDowns = of.Sent+m.Written, of.SlowDowns+m.SlowDowns
		of.Retries, of.GaveUp = of.Retries+t.Retries, of.GaveUp+t.GaveUp
		h := r.hedger.Stats()
		s.Hedges.Sent, s.Hedges.Won = s.Hedges.Sent+h.Sent, s.Hedges.Won+h.Won
		of.WaitingDemand, of.WaitingPrefetch = of.WaitingDemand+l.WaitingDemand, of.WaitingPrefetch+l.WaitingPrefetch
		of.GetLatency.Add(r.meter.Latency().Counts())
	}
}
