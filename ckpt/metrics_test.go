package ckpt

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/shoalfs/shoal/internal/prom"
)

// The metrics pass Prometheus' linter and stand in docs/metrics.md.
func TestMetrics(t *testing.T) {
	reg := prometheus.NewPedanticRegistry()
	reg.MustRegister(&prom.Table[Status]{Families: families, Snapshot: func() (s Status) { return s }, Info: infoDesc,
		InfoLabels: func(*Status) []string { return []string{"v1", "go1", "s3://b/run/"} }})
	if problems, err := testutil.GatherAndLint(reg); err != nil || len(problems) > 0 {
		t.Error(problems, err)
	}
	docs, err := os.ReadFile("../docs/metrics.md")
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
	if n := strings.Count(string(docs), "| `shoal_ckpt_"); n != len(all) {
		t.Errorf("docs/metrics.md has %d metrics of shoal ckpt, and there are %d", n, len(all))
	}
}
