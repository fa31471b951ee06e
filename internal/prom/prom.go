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

// Family is one metric: what it has of a snapshot, which may be nothing.
type Family[S any] struct {
	desc *prometheus.Desc
	of   func(s *S, put func(prometheus.Metric))
}

// Gauge is what goes up and down.
func Gauge[S any, T int | int64 | float64](name, help string, of func(s *S) T) Family[S] {
	return one(prometheus.GaugeValue, name, help, of)
}

// Counter is what only grows. Its name ends in _total.
func Counter[S any, T int | int64 | float64](name, help string, of func(s *S) T) Family[S] {
	return one(prometheus.CounterValue, name, help, of)
}

func one[S any, T int | int64 | float64](kind prometheus.ValueType, name, help string, of func(s *S) T) Family[S] {
	return Labeled(kind, name, help, nil, func(s *S, put func(float64, ...string)) { put(float64(of(s))) })
}

// Labeled is a family whose samples have labels. of puts each of them.
func Labeled[S any](kind prometheus.ValueType, name, help string, labels []string,
	of func(s *S, put func(value float64, labels ...string))) Family[S] {
	desc := prometheus.NewDesc(name, help, labels, nil)
	return Family[S]{desc, func(s *S, put func(prometheus.Metric)) {
		of(s, func(v float64, labels ...string) {
			for i := range labels { // a path may be any bytes
				labels[i] = strings.ToValidUTF8(labels[i], "\uFFFD")
			}
			put(prometheus.MustNewConstMetric(desc, kind, v, labels...))
		})
	}}
}

// Info is 1, with labels.
func Info[S any](name, help string, labels []string, of func(s *S) []string) Family[S] {
	return Labeled(prometheus.GaugeValue, name, help, labels, func(s *S, put func(float64, ...string)) {
		put(1, of(s)...)
	})
}

// Histogram has so many values up to each of some bounds.
func Histogram[S any](name, help string,
	of func(s *S) (count uint64, sum float64, below map[float64]uint64)) Family[S] {
	desc := prometheus.NewDesc(name, help, nil, nil)
	return Family[S]{desc, func(s *S, put func(prometheus.Metric)) {
		count, sum, below := of(s)
		put(prometheus.MustNewConstHistogram(desc, count, sum, below))
	}}
}

// Part are the families of a part of a snapshot, which are absent without it.
func Part[S, P any](part func(s *S) *P, families ...Family[P]) (all []Family[S]) {
	for _, f := range families {
		all = append(all, Family[S]{f.desc, func(s *S, put func(prometheus.Metric)) {
			if p := part(s); p != nil {
				f.of(p, put)
			}
		}})
	}
	return all
}

// Table is a [prometheus.Collector] of families over a snapshot.
type Table[S any] struct {
	Families []Family[S]
	Snapshot func() (s S, ok bool) // not ok: there is none now, and no metric
}

// Always is the Snapshot of what has one at any time.
func Always[S any](of func() S) func() (S, bool) { return func() (S, bool) { return of(), true } }

// Describe implements prometheus.Collector.
func (t *Table[S]) Describe(ch chan<- *prometheus.Desc) {
	for _, f := range t.Families {
		ch <- f.desc
	}
}

// Collect implements prometheus.Collector.
func (t *Table[S]) Collect(ch chan<- prometheus.Metric) {
	s, ok := t.Snapshot()
	if !ok {
		return
	}
	for _, f := range t.Families {
		f.of(&s, func(m prometheus.Metric) { ch <- m })
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
