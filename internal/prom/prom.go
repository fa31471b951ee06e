// Package prom shows the counters of a daemon to Prometheus, from a snapshot of them, at an address of its own.
package prom

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// Family is one metric without labels.
type Family[S any] struct {
	desc *prometheus.Desc
	kind prometheus.ValueType
	of   func(s *S) float64
}

// Gauge is what goes up and down.
func Gauge[S any, T int | int64 | float64](name, help string, of func(s *S) T) Family[S] {
	return Family[S]{prometheus.NewDesc(name, help, nil, nil), prometheus.GaugeValue, func(s *S) float64 { return float64(of(s)) }}
}

// Counter is what only grows. Its name ends in _total.
func Counter[S any, T int | int64 | float64](name, help string, of func(s *S) T) Family[S] {
	f := Gauge(name, help, of)
	f.kind = prometheus.CounterValue
	return f
}

// Table is a [prometheus.Collector] of families over a snapshot. Info is a metric of value 1, with labels whose values are
// InfoLabels.
type Table[S any] struct {
	Families   []Family[S]
	Snapshot   func() S
	Info       *prometheus.Desc
	InfoLabels func(s *S) []string
}

// Describe implements prometheus.Collector.
func (t *Table[S]) Describe(ch chan<- *prometheus.Desc) {
	ch <- t.Info
	for _, f := range t.Families {
		ch <- f.desc
	}
}

// Collect implements prometheus.Collector.
func (t *Table[S]) Collect(ch chan<- prometheus.Metric) {
	s := t.Snapshot()
	ch <- prometheus.MustNewConstMetric(t.Info, prometheus.GaugeValue, 1, t.InfoLabels(&s)...)
	for _, f := range t.Families {
		ch <- prometheus.MustNewConstMetric(f.desc, f.kind, f.of(&s))
	}
}

// Listen serves /metrics, with those of Go and the process, and /healthz at addr, HOST:PORT, until stop is called. It returns the
// actual address.
func Listen(addr string, c prometheus.Collector, log *slog.Logger) (at net.Addr, stop func(), err error) {
	if host, _, err := net.SplitHostPort(addr); err != nil || host == "" {
		return nil, nil, fmt.Errorf("--admin %q: give HOST:PORT, such as 127.0.0.1:7072", addr)
	}
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return nil, nil, fmt.Errorf("--admin %s: %w (give another port)", addr, err)
	}
	reg := prometheus.NewRegistry()
	reg.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}), c)
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(reg, promhttp.HandlerOpts{EnableOpenMetrics: true}))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "ok\n") })
	h := &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second, ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelWarn)}
	var done sync.WaitGroup
	done.Go(func() {
		if err := h.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			log.Error("the admin address is no longer served", "address", addr, "error", err)
		}
	})
	return l.Addr(), func() { _ = h.Close(); done.Wait() }, nil
}
