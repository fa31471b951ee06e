// Package prom shows the counters of a daemon to Prometheus, from a snapshot of them, at an address of its own.
package prom

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/shoalfs/shoal/internal/cli"
)

// Collector sends metrics, all of one snapshot, each time that it is asked. It is an unchecked
// [prometheus.Collector]: which metrics there are depends on the snapshot.
type Collector func(to Sink)

// Sink takes metrics.
type Sink chan<- prometheus.Metric

// Describe implements prometheus.Collector.
func (Collector) Describe(chan<- *prometheus.Desc) {}

// Collect implements prometheus.Collector.
func (c Collector) Collect(to chan<- prometheus.Metric) { c(to) }

// Gauge sends what goes up and down.
func Gauge[T int | int64 | float64](to Sink, name, help string, value T) {
	Labeled(to, prometheus.GaugeValue, name, help)(float64(value))
}

// Counter sends what only grows. Its name ends in _total.
func Counter[T int | int64 | float64](to Sink, name, help string, value T) {
	Labeled(to, prometheus.CounterValue, name, help)(float64(value))
}

// Labeled returns what sends each sample of a metric with labels.
func Labeled(to Sink, kind prometheus.ValueType, name, help string, labels ...string) (
	put func(value float64, labels ...string)) {
	desc := prometheus.NewDesc(name, help, labels, nil)
	return func(value float64, labels ...string) {
		for i := range labels { // a path may be any bytes
			labels[i] = strings.ToValidUTF8(labels[i], "\uFFFD")
		}
		to <- prometheus.MustNewConstMetric(desc, kind, value, labels...)
	}
}

// Handle has mux answer /metrics, with those of Go and the process, in the format that a scraper requests, such as
// OpenMetrics, and /healthz.
func Handle(mux *http.ServeMux, c prometheus.Collector) {
	reg := prometheus.NewRegistry()
	reg.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}), c)
	mux.Handle("GET /metrics",
		promhttp.HandlerFor(reg, promhttp.HandlerOpts{Registry: reg, EnableOpenMetrics: true, MaxRequestsInFlight: 4}))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "ok\n") })
}

// Listen serves /metrics and /healthz at addr, HOST:PORT, until stop is called. It returns the actual address.
func Listen(addr string, c prometheus.Collector, log *slog.Logger) (at net.Addr, stop func(), err error) {
	if host, _, err := net.SplitHostPort(addr); err != nil || host == "" {
		return nil, nil, cli.Usagef("--admin %q: give HOST:PORT, such as 127.0.0.1:7072", addr)
	}
	mux := http.NewServeMux()
	Handle(mux, c)
	return Serve(addr, mux, log)
}

// Serve serves h at an admin address until stop is called, which ends requests in progress, and waits for them.
func Serve(addr string, h http.Handler, log *slog.Logger) (at net.Addr, stop func(), err error) {
	l, err := net.Listen("tcp", addr)
	if errors.Is(err, syscall.EADDRINUSE) {
		return nil, nil, fmt.Errorf("--admin %s: another process listens there: stop it or choose another port", addr)
	}
	if wrong, ok := errors.AsType[*net.AddrError](err); ok {
		return nil, nil, cli.Usagef("--admin %s: %s (give HOST:PORT, such as 127.0.0.1:7071)", addr, wrong.Err)
	}
	if err != nil {
		return nil, nil, fmt.Errorf("--admin %s: %w (give another port)", addr, err)
	}
	s := &http.Server{Handler: h, ReadHeaderTimeout: 5 * time.Second,
		ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelWarn)}
	var done sync.WaitGroup
	done.Go(func() {
		if err := s.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			log.Error("the admin address is no longer served", "address", l.Addr(), "error", err)
		}
	})
	return l.Addr(), func() { _ = s.Close(); done.Wait() }, nil
}
