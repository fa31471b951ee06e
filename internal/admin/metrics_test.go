package admin

import (
	"flag"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/cache/objstore/near"
	"github.com/shoalfs/shoal/cache/peer"
	"github.com/shoalfs/shoal/internal/prom"
	"github.com/shoalfs/shoal/loader"
	"github.com/shoalfs/shoal/prefetch/engine"
	"github.com/shoalfs/shoal/prefetch/run"
	"github.com/shoalfs/shoal/s3api"
)

var update = flag.Bool("update", false, "write testdata/metrics.txt and the tables of docs/metrics.md anew")

// busy is a snapshot of a daemon in which every metric has a value of its own kind.
func busy() Snapshot {
	var s Snapshot
	s.Source, s.Dataset, s.Files, s.Samples, s.Bytes, s.Users = "file:///d\xff/", "abc", 10, 9, 1000, 2
	s.Reads, s.Hits, s.Joined, s.Misses = 10, engine.Hits{Keep: 1, Ring: 2}, 3, 4
	s.StoreErrors = map[string]int64{"temporary failure": 7}
	s.Store.Outcomes = map[string]objstore.Outcomes{}
	for _, op := range []string{"get", "head", "list", "put", "other"} {
		s.Store.Outcomes[op] = objstore.Outcomes{OK: 5, Failed: 6, Canceled: 7}
	}
	s.Store.GetLatency = objstore.HistogramCounts{Count: 3, Sum: 40e6}
	for i := range s.Store.GetLatency.Below {
		s.Store.GetLatency.Below[i] = int64(min(i, 3))
	}
	s.Streams = []run.Progress{
		{Name: "done", Consumed: 9, Position: 9, Len: 9},
		{Name: "not begun", Len: 9},
		{Name: "a", Consumed: 1, Position: 1, Len: 9, Lead: 5, Pace: 2, LeadSeconds: 2.5, InFlight: 3},
		{Name: "b", Consumed: 1, Position: 1, Len: 9, Lead: 4, InFlight: 4},
	}
	s.Errors = []engine.ErrorEvent{{Level: "WARN"}, {Level: "ERROR"}, {Level: "ERROR"}}
	s.Disk.OutOfUse = true
	s.Cost = engine.Cost{Priced: true, Amount: 1.5, Currency: "USD", Budget: &objstore.BudgetStats{PerHour: 10}}
	s.Feed = &loader.Stats{Open: 2, Decoding: objstore.HistogramCounts{Count: 1, Sum: 1e6}}
	s.S3 = &s3api.Stats{Requests: 9}
	s.Near = &near.Stats{Reads: 9, State: "away"}
	s.Cluster = &engine.ClusterStats{State: "joined", Owned: 0.25, PeerBytes: 9, DiskBytes: 8,
		Nodes: []engine.ClusterNode{
			{ID: "a"}, {ID: "b", Asked: &peer.Stats{State: "away", No: map[string]int64{"version": 3}}}}}
	return s
}

func registry(t *testing.T, s Snapshot) *prometheus.Registry {
	t.Helper()
	reg := prometheus.NewPedanticRegistry()
	reg.MustRegister(Collector("v1", func() Snapshot { return s }))
	return reg
}

func TestMetricsLint(t *testing.T) {
	problems, err := testutil.GatherAndLint(registry(t, busy()))
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
}

func TestMetricsValues(t *testing.T) {
	const want = `
# HELP shoal_lead_samples Samples ahead of the reader that can be read without waiting: the minimum over all orders in progress whose reader has begun and is not at the end. Absent if there is none.
# TYPE shoal_lead_samples gauge
shoal_lead_samples 4
# HELP shoal_lead_seconds Time that the samples ahead last at the reader's pace, a minimum like shoal_lead_samples. Absent until the pace is known.
# TYPE shoal_lead_seconds gauge
shoal_lead_seconds 2.5
# HELP shoal_prefetches_in_flight Prefetches in flight, over all orders in progress.
# TYPE shoal_prefetches_in_flight gauge
shoal_prefetches_in_flight 7
# HELP shoal_recent_events Distinct warnings and errors that /stats shows (the latest 32 of the dataset and of the daemon each).
# TYPE shoal_recent_events gauge
shoal_recent_events{level="error"} 2
shoal_recent_events{level="warn"} 1
# HELP shoal_disk_out_of_use 1 while the disk is full, failing or hanging, and the daemon runs without it.
# TYPE shoal_disk_out_of_use gauge
shoal_disk_out_of_use 1
# HELP shoal_dataset_info 1, with the source and the current version of the dataset.
# TYPE shoal_dataset_info gauge
shoal_dataset_info{source="file:///d�/",version="abc"} 1
`
	reg := registry(t, busy())
	if err := testutil.GatherAndCompare(reg, strings.NewReader(want), "shoal_lead_samples", "shoal_lead_seconds",
		"shoal_prefetches_in_flight",
		"shoal_recent_events", "shoal_disk_out_of_use", "shoal_dataset_info"); err != nil {
		t.Error(err)
	}
	if n, err := testutil.GatherAndCount(registry(t, Snapshot{}), "shoal_lead_samples", "shoal_lead_seconds",
		"shoal_feed_sessions", "shoal_feed_decode_duration_seconds"); n != 0 || err != nil {
		t.Errorf("%d metrics of what there is not, %v", n, err)
	}
	all := gather(t, reg)
	for _, f := range all {
		if f.GetName() != "shoal_store_get_duration_seconds" {
			continue
		}
		h := f.GetMetric()[0].GetHistogram()
		if h.GetSampleCount() != 3 || h.GetSampleSum() != 0.04 || len(h.GetBucket()) != objstore.HistogramBounds ||
			h.GetBucket()[0].GetUpperBound() != 128e-6 || h.GetBucket()[2].GetCumulativeCount() != 2 {
			t.Errorf("histogram %v", h)
		}
	}
}

func gather(t *testing.T, reg *prometheus.Registry) []*dto.MetricFamily {
	t.Helper()
	all, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// describe returns a family's name, type and labels.
func describe(f *dto.MetricFamily) (name, kind, labels string) {
	var names []string
	for _, l := range f.GetMetric()[0].GetLabel() {
		names = append(names, l.GetName())
	}
	return f.GetName(), strings.ToLower(f.GetType().String()), strings.Join(names, " ")
}

// What has a name has users: a change of this list breaks somebody's dashboard.
func TestMetricsAreKnown(t *testing.T) {
	var list strings.Builder
	for _, f := range gather(t, registry(t, busy())) {
		name, kind, labels := describe(f)
		fmt.Fprintln(&list, strings.TrimSpace(name+" "+kind+" "+labels))
	}
	golden(t, "testdata/metrics.txt", list.String())
}

// docs/metrics.md has a row for each metric, between two marks.
func TestMetricsAreDocumented(t *testing.T) {
	const begin, end, path = "<!-- metrics: begin -->\n", "<!-- metrics: end -->\n", "../../docs/metrics.md"
	doc, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, ok := strings.Cut(string(doc), begin)
	_, after, ok2 := strings.Cut(rest, end)
	if !ok || !ok2 {
		t.Fatalf("%s has not the marks %q and %q", path, begin, end)
	}
	var rows strings.Builder
	fmt.Fprintln(&rows, "| metric | type | labels | meaning |\n| --- | --- | --- | --- |")
	for _, f := range gather(t, registry(t, busy())) {
		name, kind, labels := describe(f)
		if labels != "" {
			labels = "`" + strings.ReplaceAll(labels, " ", "`, `") + "`"
		}
		fmt.Fprintf(&rows, "| `%s` | %s | %s | %s |\n", name, kind, labels, f.GetHelp())
	}
	golden(t, path, before+begin+rows.String()+end+after)
}

func golden(t *testing.T, path, want string) {
	t.Helper()
	if *update {
		if err := os.WriteFile(path, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if string(got) != want {
		t.Errorf("%s is not up to date: run go test ./internal/admin -run TestMetrics -update, and look at the difference", path)
	}
}

// A label's values come from the program, never from keys, sessions or hosts.
func TestMetricsLabelsAreBounded(t *testing.T) {
	s := busy()
	for i := range 100 {
		kind := fmt.Sprint("kind", i)
		s.StoreErrors[kind] = 1
		s.Streams = append(s.Streams, run.Progress{Name: kind, Consumed: 1, Len: 9})
		s.Feed.List = append(s.Feed.List, loader.SessionStats{Session: kind, Client: kind})
		s.Errors = append(s.Errors, engine.ErrorEvent{Level: kind, Text: kind})
	}
	count := func(s Snapshot) (n int) {
		for _, f := range gather(t, registry(t, s)) {
			n += len(f.GetMetric())
		}
		return n
	}
	if a, b := count(busy()), count(s); a != b {
		t.Errorf("%d series, and %d with more of everything", a, b)
	}
}

// What a scraper gets, in both formats, with the collectors of Go and of the process.
func TestMetricsServed(t *testing.T) {
	mux := http.NewServeMux()
	prom.Handle(mux, Collector("v1", busy))
	srv := httptest.NewServer(mux)
	defer srv.Close()
	get := func(accept string) (string, string) {
		req, _ := http.NewRequestWithContext(t.Context(), http.MethodGet, srv.URL+"/metrics", nil)
		req.Header.Set("Accept", accept)
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		b, err := io.ReadAll(resp.Body)
		if err != nil || resp.StatusCode != http.StatusOK {
			t.Fatal(resp.Status, err)
		}
		return resp.Header.Get("Content-Type"), string(b)
	}
	_, text := get("text/plain")
	parser := expfmt.NewTextParser(model.LegacyValidation)
	found, err := parser.TextToMetricFamilies(strings.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"shoal_reads_total", "shoal_store_get_duration_seconds", "shoal_build_info",
		"go_goroutines", "process_resident_memory_bytes"} {
		if found[name] == nil {
			t.Errorf("no %s", name)
		}
	}
	kind, open := get("application/openmetrics-text; version=1.0.0")
	if !strings.HasPrefix(kind, "application/openmetrics-text") || !strings.HasSuffix(open, "# EOF\n") {
		t.Errorf("asked for OpenMetrics, got %s that ends %q", kind, open[max(0, len(open)-20):])
	}
	unknown := regexp.MustCompile(`(?m)^# TYPE (shoal_\S+) (unknown|untyped)`).FindAllString(open, -1)
	if len(unknown) > 0 {
		t.Errorf("without a type: %v", unknown)
	}
	lines := slices.Collect(strings.Lines(open))
	if len(lines) < 100 {
		t.Errorf("only %d lines", len(lines))
	}
}
