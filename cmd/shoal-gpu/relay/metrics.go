package relay

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"runtime"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// Metrics are the server's counters for Prometheus (docs/metrics.md). They are those of Stats.
func (s *Server) Metrics(version string) prometheus.Collector { return &collector{s, version} }

type collector struct {
	s       *Server
	version string
}

type metric struct {
	desc *prometheus.Desc
	kind prometheus.ValueType
	of   func(s *Stats) float64
}

func gauge(name, help string, of func(s *Stats) int64) metric {
	return metric{prometheus.NewDesc("shoal_gpu_"+name, help, nil, nil), prometheus.GaugeValue, func(s *Stats) float64 { return float64(of(s)) }}
}

func counter(name, help string, of func(s *Stats) int64) metric {
	m := gauge(name, help, of)
	m.kind = prometheus.CounterValue
	return m
}

// seconds is a counter kept in microseconds and reported in seconds.
func seconds(name, help string, of func(s *Stats) int64) metric {
	m := counter(name, help, of)
	m.of = func(s *Stats) float64 { return float64(of(s)) / 1e6 }
	return m
}

var (
	infoDesc = prometheus.NewDesc("shoal_gpu_info", "1, with the versions of shoal-gpu and Go, and the device.", []string{"version", "goversion", "device", "uuid"}, nil)
	families = []metric{
		gauge("sessions", "Open sessions whose batches are finished on the device.", func(s *Stats) int64 { return s.Sessions }),
		gauge("sessions_passed", "Open sessions whose batches are passed through to host memory.", func(s *Stats) int64 { return s.Passed }),
		counter("sessions_fallen_back_total", "Sessions that the device could not serve; their batches went to host memory.", func(s *Stats) int64 { return s.Fallen }),
		gauge("buffers", "Buffers on the device, of open sessions.", func(s *Stats) int64 { return s.Buffers }),
		gauge("buffers_held", "Of them, those that trainers hold.", func(s *Stats) int64 { return s.Held }),
		gauge("buffers_bytes", "Memory of the device in buffers.", func(s *Stats) int64 { return s.Bytes }),
		counter("batches_total", "Batches finished on the device.", func(s *Stats) int64 { return s.Batches }),
		seconds("finish_seconds_total", "Time from queueing a batch's copy to the device and its kernel until both are complete, summed over batches.", func(s *Stats) int64 { return s.Finished }),
		seconds("wait_seconds_total", "Time of waiting for trainers to release buffers.", func(s *Stats) int64 { return s.Waited }),
	}
)

// Describe implements prometheus.Collector.
func (c *collector) Describe(ch chan<- *prometheus.Desc) {
	ch <- infoDesc
	for _, m := range families {
		ch <- m.desc
	}
}

// Collect implements prometheus.Collector.
func (c *collector) Collect(ch chan<- prometheus.Metric) {
	s := c.s.Stats()
	ch <- prometheus.MustNewConstMetric(infoDesc, prometheus.GaugeValue, 1, c.version, runtime.Version(), s.Device, s.UUID)
	for _, m := range families {
		ch <- prometheus.MustNewConstMetric(m.desc, m.kind, m.of(&s))
	}
}

// ListenAdmin serves /metrics and /healthz at addr, HOST:PORT, until stop is called. It returns the actual address.
func (s *Server) ListenAdmin(addr, version string, log *slog.Logger) (at net.Addr, stop func(), err error) {
	if host, _, err := net.SplitHostPort(addr); err != nil || host == "" {
		return nil, nil, fmt.Errorf("--admin %q: give HOST:PORT, such as 127.0.0.1:7072", addr)
	}
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return nil, nil, fmt.Errorf("--admin %s: %w (give another port)", addr, err)
	}
	reg := prometheus.NewRegistry()
	reg.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}), s.Metrics(version))
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
