package prom_test

import (
	"io"
	"log/slog"
	"net/http"
	"runtime"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/shoalfs/shoal/internal/prom"
)

// A table is served, with the metrics of Go; an address without a host is refused.
func TestListen(t *testing.T) {
	type counts struct{ eaten int }
	table := &prom.Table[counts]{
		Families:   []prom.Family[counts]{prom.Counter("fish_eaten_total", "Eaten.", func(c *counts) int { return c.eaten })},
		Snapshot:   func() counts { return counts{7} },
		Info:       prometheus.NewDesc("fish_info", "1.", []string{"goversion"}, nil),
		InfoLabels: func(*counts) []string { return []string{runtime.Version()} },
	}
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
	for _, wrong := range []string{":7072", "7072", "nonsense"} {
		if _, _, err := prom.Listen(wrong, table, log); err == nil || !strings.Contains(err.Error(), "127.0.0.1:7072") {
			t.Errorf("%s: %v", wrong, err)
		}
	}
}
