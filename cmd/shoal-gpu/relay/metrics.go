package relay

import (
	"runtime"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/shoalfs/shoal/internal/prom"
)

// Metrics are the server's counters for Prometheus (docs/metrics.md). They are those of Stats.
func (s *Server) Metrics(version string) prom.Collector {
	return func(to prom.Sink) { s.Stats().Metrics(to, version) }
}

// Metrics sends the counters.
func (s Stats) Metrics(to prom.Sink, version string) {
	prom.Labeled(to, prometheus.GaugeValue, "shoal_gpu_info",
		"1, with the versions of shoal-gpu and Go, and the device.", "version", "goversion", "device",
		"uuid")(1, version, runtime.Version(), s.Device, s.UUID)
	prom.Gauge(to, "shoal_gpu_sessions", "Open sessions whose batches are finished on the device.", s.Sessions)
	prom.Gauge(to, "shoal_gpu_sessions_passed", "Open sessions whose batches are passed through to host memory.",
		s.Passed)
	prom.Counter(to, "shoal_gpu_sessions_fallen_back_total",
		"Sessions that the device could not serve; their batches went to host memory.", s.Fallen)
	prom.Gauge(to, "shoal_gpu_buffers", "Buffers on the device, of open sessions.", s.Buffers)
	prom.Gauge(to, "shoal_gpu_buffers_held", "Buffers that trainers hold.", s.Held)
	prom.Gauge(to, "shoal_gpu_buffers_bytes", "Device memory in buffers.", s.Bytes)
	prom.Counter(to, "shoal_gpu_batches_total", "Batches finished on the device.", s.Batches)
	prom.Counter(to, "shoal_gpu_finish_seconds_total",
		"Time from queueing a batch's copy to the device and its kernel until both are complete, summed over batches.",
		float64(s.Finished)/1e6)
	prom.Counter(to, "shoal_gpu_wait_seconds_total", "Time spent waiting for trainers to release buffers.",
		float64(s.Waited)/1e6)
}
