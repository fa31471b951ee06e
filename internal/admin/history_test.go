package admin

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/shoalfs/shoal/loader"
	"github.com/shoalfs/shoal/prefetch/engine"
)

func TestHistoryRing(t *testing.T) {
	var h history
	for n := range 2*historyPoints + 7 {
		h.add(Point{Time: float64(n)})
		got := h.points
		if want := min(n+1, historyPoints); len(got) != want {
			t.Fatalf("after %d points: %d are kept, want %d", n+1, len(got), want)
		}
		for i, p := range got {
			if want := float64(n + 1 - len(got) + i); p.Time != want {
				t.Fatalf("after %d points: number %d is of %v, want %v", n+1, i, p.Time, want)
			}
		}
	}
	if cap(h.points) > 2*historyPoints {
		t.Errorf("there is room for %d points", cap(h.points))
	}
}

// What the dashboard reads: the names are a contract.
func TestHistoryServed(t *testing.T) {
	var s Snapshot
	s.GetRequests, s.GetBytes, s.Reads, s.ReadBytes = 1, 2, 3, 4
	s.Hits, s.Joined, s.Misses, s.Stall = engine.Hits{Keep: 5, Ring: 6}, 7, 8, 9.5
	s.Lead, s.LeadSeconds, s.InFlight, s.Memory.Used, s.Memory.RSS = 10, 11.5, 12, 13, 14
	s.Delivered = 15
	s.Feed = &loader.Stats{Total: loader.SessionStats{Decode: 16.5, Credit: 17.5, Stall: 18.5}}
	var h history
	p := pointOf(time.UnixMilli(1_500), s)
	p.StallShare, p.Level, p.Code = 0.25, "warn", "store-slow"
	h.add(p)
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/api/history", nil))
	var got struct {
		Version int
		Step    float64 `json:"step_seconds"`
		Points  []map[string]any
	}
	if err := json.Unmarshal(w.Body.Bytes(), &got); err != nil || got.Version != 2 || got.Step != 1 ||
		len(got.Points) != 1 {
		t.Fatalf("%v, %v", got, err)
	}
	want := map[string]any{
		"t": 1.5, "get_requests": 1.0, "get_bytes": 2.0, "reads": 3.0, "read_bytes": 4.0, "keep": 5.0, "ring": 6.0,
		"joined": 7.0, "misses": 8.0,
		"stall_seconds": 9.5, "lead_samples": 10.0, "lead_seconds": 11.5, "in_flight": 12.0, "ledger_used": 13.0,
		"rss":     14.0,
		"samples": 15.0, "decode_seconds": 16.5, "credit_seconds": 17.5, "feed_stall_seconds": 18.5,
		"stall_share": 0.25, "level": "warn", "code": "store-slow",
	}
	if len(got.Points[0]) != len(want) {
		t.Errorf("%d fields, want %d", len(got.Points[0]), len(want))
	}
	for name, v := range want {
		if got.Points[0][name] != v {
			t.Errorf("%s is %v, want %v", name, got.Points[0][name], v)
		}
	}
}
