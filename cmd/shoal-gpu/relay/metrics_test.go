package relay_test

import (
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
)

// The metrics pass Prometheus' linter, stand in docs/metrics.md, and are served.
func TestMetrics(t *testing.T) {
	h := start(t, 8)
	reg := prometheus.NewPedanticRegistry()
	reg.MustRegister(h.relay.Metrics("v1"))
	problems, err := testutil.GatherAndLint(reg)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
	docs, err := os.ReadFile("../../../docs/metrics.md")
	if err != nil {
		t.Fatal(err)
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
	if n := strings.Count(string(docs), "| `shoal_gpu_"); n != len(all) {
		t.Errorf("docs/metrics.md has %d metrics of shoal-gpu, and there are %d", n, len(all))
	}

	addr, stop, err := h.relay.ListenAdmin("127.0.0.1:0", "v1", slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.Get("http://" + addr.String() + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	body, err := io.ReadAll(resp.Body)
	resp.Body.Close()
	if err != nil || !strings.Contains(string(body), "shoal_gpu_batches_total 0") || !strings.Contains(string(body), "go_goroutines") {
		t.Errorf("%v: %.300s", err, body)
	}
	stop()
	for _, wrong := range []string{":7072", "7072", "nonsense"} {
		if _, _, err := h.relay.ListenAdmin(wrong, "v1", slog.New(slog.DiscardHandler)); err == nil || !strings.Contains(err.Error(), "127.0.0.1:7072") {
			t.Errorf("%s: %v", wrong, err)
		}
	}
}
