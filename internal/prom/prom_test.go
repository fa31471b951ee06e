package prom_test

import (
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"runtime"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/shoalfs/shoal/ckpt"
	"github.com/shoalfs/shoal/cmd/shoal-gpu/relay"
	"github.com/shoalfs/shoal/internal/cli"
	"github.com/shoalfs/shoal/internal/prom"
)

// The metrics of each daemon pass Prometheus' linter and stand in docs/metrics.md.
func TestMetrics(t *testing.T) {
	docs, err := os.ReadFile("../../docs/metrics.md")
	if err != nil {
		t.Fatal(err)
	}
	for prefix, metrics := range map[string]prom.Collector{
		"shoal_ckpt_": func(to prom.Sink) { new(ckpt.Status).Metrics(to, "v1") },
		"shoal_gpu_":  func(to prom.Sink) { relay.Stats{}.Metrics(to, "v1") },
	} {
		reg := prometheus.NewPedanticRegistry()
		reg.MustRegister(metrics)
		problems, err := testutil.GatherAndLint(reg)
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range problems {
			t.Errorf("%s: %s", p.Metric, p.Text)
		}
		all, err := reg.Gather()
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range all {
			row := fmt.Sprintf("| `%s` | %s |", f.GetName(), strings.ToLower(f.GetType().String()))
			if !strings.Contains(string(docs), row) || !strings.Contains(string(docs), f.GetHelp()) {
				t.Errorf("docs/metrics.md has no row %s … %s", row, f.GetHelp())
			}
		}
		if n := strings.Count(string(docs), "| `"+prefix); n != len(all) {
			t.Errorf("docs/metrics.md has %d metrics %s…, and there are %d", n, prefix, len(all))
		}
	}
}

// What a collector sends is served, with the metrics of Go; an address without a host is refused.
func TestListen(t *testing.T) {
	table := prom.Collector(func(to prom.Sink) {
		prom.Counter(to, "fish_eaten_total", "Eaten.", 7)
		prom.Labeled(to, prometheus.GaugeValue, "fish_info", "1.", "goversion")(1, runtime.Version())
	})
	log := slog.New(slog.DiscardHandler)
	addr, stop, err := prom.Listen("127.0.0.1:0", table, log)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.Get("http://" + addr.String() + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	body, err := io.ReadAll(resp.Body)
	resp.Body.Close()
	for _, want := range []string{"fish_eaten_total 7", `fish_info{goversion="go`, "go_goroutines"} {
		if err != nil || !strings.Contains(string(body), want) {
			t.Errorf("no %s: %v: %.300s", want, err, body)
		}
	}
	stop()
	for _, wrong := range []string{"nonsense", "h:1:2", "127.0.0.1:99999"} {
		if _, _, err := prom.Serve(wrong, nil, log); !cli.IsUsage(err) || !strings.Contains(err.Error(), "HOST:PORT") {
			t.Errorf("%s: %v", wrong, err)
		}
	}
	for _, wrong := range []string{":7072", "7072", "nonsense"} {
		if _, _, err := prom.Listen(wrong, table, log); err == nil || !strings.Contains(err.Error(), "127.0.0.1:7072") {
			t.Errorf("%s: %v", wrong, err)
		}
	}
}
