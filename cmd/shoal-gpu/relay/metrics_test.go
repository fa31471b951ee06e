package relay_test

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
)

// The metrics pass Prometheus' linter and stand in docs/metrics.md.
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
}
