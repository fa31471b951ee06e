package e2e

import (
	"bytes"
	"encoding/json"
	"math"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"github.com/shoalfs/shoal/lab/rig/proxy"
)

// series returns what an admin address exports: sums over all labels, by name; of histograms the count.
func series(t *testing.T, admin string) map[string]float64 {
	t.Helper()
	parser := expfmt.NewTextParser(model.LegacyValidation)
	families, err := parser.TextToMetricFamilies(bytes.NewReader(metricsText(t, admin)))
	if err != nil {
		t.Fatal(err)
	}
	sums := map[string]float64{}
	for name, f := range families {
		for _, m := range f.GetMetric() {
			sums[name] += m.GetCounter().GetValue() + m.GetGauge().GetValue() +
				float64(m.GetHistogram().GetSampleCount())
			for _, l := range m.GetLabel() {
				sums[name+" "+l.GetValue()] += m.GetCounter().GetValue() + m.GetGauge().GetValue()
			}
		}
	}
	return sums
}

func metricsText(t *testing.T, admin string) []byte {
	t.Helper()
	all := fetchAll(t, "http://"+admin+"/metrics")
	body, _, _ := bytes.Cut(all, []byte("\nmap[")) // the headers
	return append(body, '\n')
}

// The metrics of a daemon count what was done to it: files read through the mount, batches of the feed, requests that
// a stumbling store was sent.
func TestMetricsCountWhatIsDone(t *testing.T) {
	dir, paths := pictures(t, 2, 10)
	var size float64
	for _, p := range paths {
		fi, err := os.Stat(filepath.Join(dir, p))
		if err != nil {
			t.Fatal(err)
		}
		size += float64(fi.Size())
	}
	n := float64(len(paths))
	p, env := far(t, proxy.Options{})
	source := bucket(t, dir)
	admin := freePort(t)
	addr, mnt := serve(t, env, source, "--order", "none", "--kernel-cache", "off", "--admin", admin)
	if err := p.Set(proxy.Options{Faults: []proxy.Fault{{Kind: proxy.Unavailable, Count: 3}}}); err != nil {
		t.Fatal(err)
	}
	readAll(t, mnt, dir, paths)
	got := series(t, admin)
	for name, want := range map[string]float64{
		"shoal_opens_total": n, "shoal_samples_delivered_total": n, "shoal_read_bytes_total": size,
		"shoal_store_received_bytes_total": size,
		"shoal_store_get_duration_seconds": n, "shoal_store_errors_total temporary_failure": 3,
		"shoal_store_retries_total": 3, "shoal_store_requests_total error": 3,
		"shoal_store_slow_downs_total": 3, "shoal_dataset_samples": n, "shoal_build_info": 1, "shoal_feed_sessions": 0,
		"shoal_store_requests_in_flight": 0, "shoal_disk_out_of_use": 0,
	} {
		if v, ok := got[name]; !ok || v != want {
			t.Errorf("%s is %v, want %v", name, v, want)
		}
	}
	if got["shoal_reads_total"] != n || got["shoal_reads_total miss"]+got["shoal_reads_total joined"] != n ||
		got["shoal_read_stall_seconds_total"] <= 0 {
		t.Errorf("reads %v, of which %v missed and %v joined, stall %v", got["shoal_reads_total"],
			got["shoal_reads_total miss"], got["shoal_reads_total joined"], got["shoal_read_stall_seconds_total"])
	}

	r := feed(t, addr, "--batch", "4", "--transform", "RandomResizedCrop(16)")
	if float64(r.Samples) != n {
		t.Fatalf("the feed gave %d samples", r.Samples)
	}
	got = series(t, admin)
	for name, want := range map[string]float64{
		"shoal_samples_delivered_total": 2 * n, "shoal_feed_samples_total": n,
		"shoal_feed_batches_total": float64(r.Batches), "shoal_feed_decode_duration_seconds": n,
		"shoal_feed_source_bytes_total": size, "shoal_read_bytes_total": 2 * size,
		"shoal_feed_sessions_opened_total": 1, "shoal_opens_total": n,
		"shoal_store_received_bytes_total": size, // nothing was fetched twice
	} {
		if v := got[name]; v != want {
			t.Errorf("%s is %v, want %v", name, v, want)
		}
	}

	// The history comes to the same, within its second.
	var h struct {
		Points []struct {
			T         float64
			Samples   float64
			ReadBytes float64 `json:"read_bytes"`
		}
	}
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(50 * time.Millisecond) {
		body, _, _ := bytes.Cut(fetchAll(t, "http://"+admin+"/api/history"), []byte("\nmap["))
		if err := json.Unmarshal(body, &h); err != nil {
			t.Fatal(err)
		}
		last := h.Points[len(h.Points)-1]
		if last.Samples == 2*n && last.ReadBytes == 2*size && math.Abs(last.T-float64(time.Now().Unix())) < 120 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("the last point is %+v", last)
		}
	}
	var s struct {
		Delivered float64 `json:"samples_delivered"`
		Goodput   float64 `json:"goodput_samples_per_sec"`
	}
	if err := json.Unmarshal([]byte(mustShoal(t, nil, "stat", mnt, "--json")), &s); err != nil || s.Delivered != 2*n ||
		s.Goodput <= 0 {
		t.Errorf("%+v, %v", s, err)
	}
}
