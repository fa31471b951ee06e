package engine

import (
	"os"
	"runtime"
	"strconv"
	"strings"
	"time"
)

// StatsVersion is the version of the Stats schema (docs/stats.md). A field may be added without a
// new version; one that changes its meaning or goes takes one.
const StatsVersion = 1

// Stats is what `.shoal/stats` and `shoal stat --json` show. Counters count from the daemon's start.
type Stats struct {
	Version int     `json:"version"` // of this schema
	PID     int     `json:"pid"`
	Source  string  `json:"source"`
	Dataset string  `json:"dataset"` // dataset version, hex SHA-256
	Files   int     `json:"files"`
	Samples int     `json:"samples"` // numbered files
	Bytes   int64   `json:"bytes"`   // of the dataset
	Uptime  float64 `json:"uptime_seconds"`

	Opens       int64   `json:"opens"` // files opened through the mount
	Reads       int64   `json:"reads"` // extents read by mount and feed
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
	LatencyP50   float64          `json:"get_latency_p50_seconds"`
	LatencyP99   float64          `json:"get_latency_p99_seconds"`

	Lead    int          `json:"lead_samples"` // samples that can be read next without waiting
	Order   OrderState   `json:"order"`
	Streams []Progress   `json:"streams"`
	Skipped SkippedKeys  `json:"keys_not_shown"`
	Memory  MemoryStats  `json:"memory"`
	Disk    DiskStats    `json:"disk"`
	Errors  []ErrorEvent `json:"errors"` // the latest warnings and errors, each once
}

// Hits counts reads that did not wait, by the area that served them.
type Hits struct {
	Keep int64 `json:"keep"` // from the kept set on disk
	Ring int64 `json:"ring"` // from memory
}

// OrderState says what order steers the mount.
type OrderState struct {
	Spec     string `json:"spec"`
	Epoch    int    `json:"epoch"`
	Position int    `json:"position"`
	State    string `json:"state"` // none, waiting (nothing read yet), following, finished
}

// SkippedKeys counts keys that a file tree cannot show.
type SkippedKeys struct {
	Markers  int      `json:"folder_markers"`
	Hostile  int      `json:"hostile"`
	Shadowed int      `json:"shadowed"`
	Examples []string `json:"examples,omitempty"`
}

// MemoryStats is in bytes.
type MemoryStats struct {
	Used       int64 `json:"ledger_used"`
	Peak       int64 `json:"ledger_peak"`
	Limit      int64 `json:"ledger_limit"`
	Ring       int64 `json:"ring"`
	RSS        int64 `json:"rss"`
	RSSAnon    int64 `json:"rss_anon"`
	Goroutines int   `json:"goroutines"`
}

// DiskStats is in bytes of the cache directory's segments.
type DiskStats struct {
	Used     int64 `json:"used"`
	Limit    int64 `json:"limit"`
	Kept     int   `json:"kept_extents"`
	Extents  int   `json:"extents"`
	Declined int64 `json:"declined"` // extents that found the kept set full
	Corrupt  int64 `json:"corrupt"`
	Errors   int64 `json:"errors"`
	OutOfUse bool  `json:"out_of_use"`
}

// Stats returns a snapshot.
func (e *Engine) Stats() Stats {
	v := e.cur.Load()
	c := e.cache.Stats()
	m := e.meter.Stats()
	s := Stats{
		Version: StatsVersion, PID: os.Getpid(), Source: e.source.String(), Dataset: v.manifest.Version(), Files: v.manifest.Len(),
		Samples: v.samples.Len(), Bytes: v.manifest.Bytes(), Uptime: time.Since(e.started).Seconds(),
		Opens: e.opens.Load(), Reads: c.Reads, Hits: Hits{c.KeepHits, c.RingHits}, Joined: c.Joined, Misses: c.Misses,
		Stall: c.Stall.Seconds(), Prefetched: c.Prefetched, FetchErrors: c.FetchErrors,
		GetRequests: m.Reads, GetBytes: m.Bytes, ListRequests: m.Lists, StatRequests: m.Stats, InFlight: m.InFlight,
		StoreErrors: m.Errors, LatencyP50: m.Median.Seconds(), LatencyP99: m.P99.Seconds(),
		Memory: MemoryStats{Used: c.MemoryUsed, Peak: c.MemoryPeak, Limit: c.MemoryLimit, Ring: c.RingBytes, Goroutines: runtime.NumGoroutine()},
		Disk:   DiskStats{Used: c.DiskUsed, Limit: c.DiskLimit, Declined: c.Declined, Corrupt: c.Corrupt, Errors: c.DiskErrors, OutOfUse: c.DiskDown},
		Errors: e.errs.snapshot(), Streams: []Progress{},
	}
	s.Disk.Kept, s.Disk.Extents = v.volume.Kept()
	s.Memory.RSS, s.Memory.RSSAnon = residentBytes()
	sk := v.manifest.Skipped()
	s.Skipped = SkippedKeys{sk.Markers, sk.Hostile, sk.Shadowed, sk.Examples}

	s.Order = OrderState{Spec: e.cfg.Order.String(), State: "none"}
	e.mu.Lock()
	mount := e.mount
	streams := append([]*Stream(nil), mount...)
	for st := range e.sessions {
		streams = append(streams, st)
	}
	e.mu.Unlock()
	for i, st := range streams {
		p := st.Progress()
		s.Streams = append(s.Streams, p)
		if i > 0 {
			continue
		}
		s.Lead, s.Order.Epoch, s.Order.Position = p.Lead, p.Epoch, p.Position
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
		if len(mount) > 0 && p.Name != "mount" {
			s.Order.Spec = "plan"
		}
	}
	return s
}

// residentBytes returns the process's resident set, and the part of it that is not file pages.
func residentBytes() (rss, anon int64) {
	b, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return 0, 0
	}
	for line := range strings.Lines(string(b)) {
		name, rest, _ := strings.Cut(line, ":")
		fields := strings.Fields(rest)
		if len(fields) == 0 {
			continue
		}
		kib, _ := strconv.ParseInt(fields[0], 10, 64)
		switch name {
		case "VmRSS":
			rss = kib << 10
		case "RssAnon":
			anon = kib << 10
		}
	}
	return rss, anon
}
