package admin

import (
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/shoalfs/shoal/internal/findings"
	"github.com/shoalfs/shoal/prefetch/engine"
)

// serve starts an admin address of a daemon that counts 100 samples a second. A second of its own goes by between two
// snapshots, whenever the machine has time to take them.
func serve(t *testing.T) string {
	t.Helper()
	var asked atomic.Int64
	stats := func() (s Snapshot) {
		s.PID, s.Uptime, s.Order.State = 1, float64(100+asked.Add(1)), "following"
		s.Delivered = int64(100 * s.Uptime)
		s.Opens, s.Reads, s.Hits.Keep = s.Delivered, s.Delivered, s.Delivered
		return s
	}
	at, stop, err := Listen("127.0.0.1:0", Options{
		Stats: stats, Ready: func() error {
			return nil
		}, Profiles: true, Log: slog.New(slog.NewTextHandler(io.Discard, nil)),
		CacheMap: func(cells int) engine.CacheMap { return engine.CacheMap{Version: 1, Samples: cells} },
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(stop)
	return "http://" + at.String()
}

func get(t *testing.T, url, host string) (*http.Response, string) {
	t.Helper()
	req, err := http.NewRequest(http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	if host != "" {
		req.Host = host
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp, string(b)
}

// A page of another origin whose name was made to point here reads nothing.
func TestRebinding(t *testing.T) {
	url := serve(t)
	for host, want := range map[string]int{
		"": 200, "localhost": 200, "localhost:7071": 200, "LOCALHOST.": 200, "shoal.localhost:80": 200,
		"127.0.0.1:1": 200, "127.9.9.9": 200, "[::1]:7071": 200, "[::1]": 200,
		"evil.example": 421, "evil.example:7071": 421, "localhost.evil.example": 421, "127.0.0.1.evil.example": 421,
		"10.0.0.1": 421, "[::]": 421, "0.0.0.0:7071": 421,
	} {
		for _, path := range []string{"/", "/stats", "/api/history", "/debug/pprof/"} {
			if resp, body := get(t, url+path, host); resp.StatusCode != want ||
				want == 421 && strings.Contains(body, "samples") {
				t.Errorf("Host %q, %s: %d, want %d: %.80s", host, path, resp.StatusCode, want, body)
			}
		}
	}
}

// Profiles are there for those who asked for them only.
func TestProfiles(t *testing.T) {
	if resp, body := get(t, serve(t)+"/debug/pprof/goroutine?debug=1", ""); resp.StatusCode != http.StatusOK ||
		!strings.Contains(body, "goroutine profile") {
		t.Errorf("with profiles: %d, %.80s", resp.StatusCode, body)
	}
	at, stop, err := Listen("127.0.0.1:0", Options{Stats: func() (s Snapshot) {
		return s
	}, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	if _, _, err := Listen(at.String(), Options{Log: slog.New(slog.DiscardHandler)}); err == nil ||
		!strings.Contains(err.Error(), "another process listens there") {
		t.Errorf("a busy port: %v", err)
	}
	for _, path := range []string{"", "goroutine?debug=1", "heap", "cmdline", "profile?seconds=1", "trace?seconds=1"} {
		if resp, body := get(t, "http://"+at.String()+"/debug/pprof/"+path,
			""); resp.StatusCode != http.StatusNotFound || !strings.Contains(body, "SHOAL_PPROF=1") {
			t.Errorf("%s: %d, %.80s", path, resp.StatusCode, body)
		}
	}
}

// Beyond loopback any name is right: nobody knows by which the machine is reached.
func TestAnyHostElsewhere(t *testing.T) {
	h := sameHost(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusNoContent)
	}))
	w := httptest.NewRecorder()
	r := httptest.NewRequest(http.MethodGet, "/stats", nil)
	r.Host = "node7.cluster"
	h.ServeHTTP(w, r)
	if w.Code != http.StatusNoContent {
		t.Error(w.Code)
	}
}

func TestVerdictServed(t *testing.T) {
	url := serve(t)
	var v findings.Verdict
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		_, body := get(t, url+"/api/verdict", "")
		if err := json.Unmarshal([]byte(body), &v); err != nil {
			t.Fatalf("%s: %v", body, err)
		}
		if v.Code != "" {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("no verdict")
		}
	}
	if v.Version != 2 || v.Code != "fed" || v.Rates.Hits.Keep != 1 || v.Rates.Samples != 100 {
		t.Errorf("%+v", v)
	}
}

// The verdict is on the last ten seconds, or on less at first.
func TestWatch(t *testing.T) {
	var h history
	for i := range 40 {
		var s Snapshot
		s.PID, s.Uptime = 1, float64(1000+i)
		v := h.judge(s)
		want := float64(min(i, judged))
		if i == 0 {
			want = 1000
		}
		if v.Rates.Seconds != want {
			t.Errorf("snapshot %d: over %g s, want %g", i, v.Rates.Seconds, want)
		}
	}
}

func TestCacheMapServed(t *testing.T) {
	url := serve(t)
	for query, want := range map[string]int{"": engine.MaxMapCells, "?cells=7": 7, "?cells=0": 0, "?cells=1001": 0,
		"?cells=x": 0} {
		resp, body := get(t, url+"/api/cachemap"+query, "")
		var m engine.CacheMap
		if want == 0 {
			if resp.StatusCode != http.StatusBadRequest {
				t.Errorf("%s: %d", query, resp.StatusCode)
			}
		} else if err := json.Unmarshal([]byte(body), &m); err != nil || m.Samples != want {
			t.Errorf("%s: %s, %v", query, body, err)
		}
	}
}

func TestHistorySince(t *testing.T) {
	var h history
	for i := range 5 {
		h.add(Point{Time: float64(i)})
	}
	for since, want := range map[string]int{"": 5, "?since=-1": 5, "?since=2": 2, "?since=2.5": 2, "?since=9": 0} {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/api/history"+since, nil))
		var got History
		if err := json.Unmarshal(w.Body.Bytes(), &got); err != nil || len(got.Points) != want || got.Points == nil {
			t.Errorf("%s: %s, %v", since, w.Body, err)
		}
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/api/history?since=now", nil))
	if w.Code != http.StatusBadRequest {
		t.Error(w.Code)
	}
}

func TestPageServed(t *testing.T) {
	url := serve(t)
	resp, body := get(t, url+"/", "")
	csp := resp.Header.Get("Content-Security-Policy")
	if resp.StatusCode != 200 || !strings.Contains(body, "<title>Shoal") ||
		!strings.Contains(csp, "frame-ancestors 'none'") || strings.Contains(csp, "unsafe") {
		t.Errorf("%d, %s, %.100s", resp.StatusCode, csp, body)
	}
	if resp, _ := get(t, url+"/nothing", ""); resp.StatusCode != http.StatusNotFound {
		t.Error(fmt.Sprint("a page that is not there: ", resp.StatusCode))
	}
}
