package admin

import (
	"context"
	"encoding/json"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/shoalfs/shoal/internal/findings"
	"github.com/shoalfs/shoal/internal/pause"
)

const HistoryVersion = 2 // of the answer to GET /api/history (docs/stats.md)

const (
	historyStep   = time.Second
	historyPoints = 15 * 60
	// judged is the number of snapshots, a step apart, over which a verdict is given: long enough that one slow batch
	// does not change it, short enough to show the effect of changed settings.
	judged = 10
)

// Point is a daemon's counters at one time. Counters count from the daemon's start, as in /stats.
type Point struct {
	Time float64 `json:"t"` // Unix seconds

	GetRequests int64   `json:"get_requests"`
	GetBytes    int64   `json:"get_bytes"`
	Reads       int64   `json:"reads"`
	ReadBytes   int64   `json:"read_bytes"`
	Keep        int64   `json:"keep"`
	Ring        int64   `json:"ring"`
	Joined      int64   `json:"joined"`
	Misses      int64   `json:"misses"`
	Stall       float64 `json:"stall_seconds"`
	Samples     int64   `json:"samples"` // delivered to trainers

	Lead        int     `json:"lead_samples"`
	LeadSeconds float64 `json:"lead_seconds"`
	InFlight    int64   `json:"in_flight"`
	LedgerUsed  int64   `json:"ledger_used"`
	RSS         int64   `json:"rss"`

	FeedPoint

	// Of the seconds before, from package findings.
	StallShare float64        `json:"stall_share"` // of the time, 0 to 1
	Level      findings.Level `json:"level"`
	Code       string         `json:"code"`
}

// FeedPoint is of the feed; 0 without one.
type FeedPoint struct {
	Decode    float64 `json:"decode_seconds"`
	Credit    float64 `json:"credit_seconds"`
	FeedStall float64 `json:"feed_stall_seconds"`
}

func pointOf(t time.Time, s Snapshot) Point {
	p := Point{
		Time:        float64(t.UnixMilli()) / 1000,
		GetRequests: s.GetRequests, GetBytes: s.GetBytes, Reads: s.Reads, ReadBytes: s.ReadBytes,
		Keep: s.Hits.Keep, Ring: s.Hits.Ring, Joined: s.Joined, Misses: s.Misses, Stall: s.Stall, Samples: s.Delivered,
		Lead: s.Lead, LeadSeconds: s.LeadSeconds, InFlight: s.InFlight, LedgerUsed: s.Memory.Used, RSS: s.Memory.RSS,
	}
	if f := s.Feed; f != nil {
		p.FeedPoint = FeedPoint{f.Total.Decode, f.Total.Credit, f.Total.Stall}
	}
	return p
}

// History is the answer to GET /api/history.
type History struct {
	Version int     `json:"version"`
	Step    float64 `json:"step_seconds"`
	Points  []Point `json:"points"` // oldest first
}

// history keeps the latest points, as many as the page shows, and judges snapshots as they arrive.
type history struct {
	mu        sync.Mutex
	points    []Point             // at most historyPoints
	snapshots []findings.Snapshot // the latest, at most judged
	last      findings.Verdict
}

// keep adds a point each step until ctx ends.
func (h *history) keep(ctx context.Context, stats func() Snapshot) {
	take := func(now time.Time) {
		snap := stats()
		p, v := pointOf(now, snap), h.judge(snap)
		p.StallShare, p.Level, p.Code = v.Rates.Stall, v.Level, v.Code
		h.add(p)
	}
	take(time.Now())
	for now := range pause.Every(ctx, historyStep) {
		take(now)
	}
}

func (h *history) add(p Point) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.points = append(h.points[max(0, len(h.points)-historyPoints+1):], p)
}

// judge returns the verdict over the time from the oldest of the last snapshots to this one.
func (h *history) judge(s Snapshot) findings.Verdict {
	h.mu.Lock()
	defer h.mu.Unlock()
	var oldest findings.Snapshot // before the first one: since the daemon's start
	if len(h.snapshots) > 0 {
		oldest = h.snapshots[0]
	}
	h.snapshots = append(h.snapshots[max(0, len(h.snapshots)-judged+1):], s.Snapshot)
	h.last = findings.Of(oldest, s.Snapshot)
	return h.last
}

func (h *history) verdict(w http.ResponseWriter, _ *http.Request) {
	h.mu.Lock()
	last := h.last
	h.mu.Unlock()
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(last) // the client may be gone
}

// ServeHTTP answers with all points, or with those later than the parameter since (Unix seconds).
func (h *history) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	h.mu.Lock()
	points := append([]Point{}, h.points...)
	h.mu.Unlock()
	if text := r.URL.Query().Get("since"); text != "" {
		since, err := strconv.ParseFloat(text, 64)
		if err != nil {
			http.Error(w, "since="+strconv.Quote(text)+": give Unix seconds", http.StatusBadRequest)
			return
		}
		for len(points) > 0 && points[0].Time <= since {
			points = points[1:]
		}
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(History{HistoryVersion, historyStep.Seconds(), points}) // the client may be gone
}
