package relay

import (
	"runtime"
	"slices"

	"github.com/shoalfs/shoal/internal/prom"
)

// Metrics are the server's counters for Prometheus (docs/metrics.md). They are those of Stats.
func (s *Server) Metrics(version string) *prom.Table[Stats] {
	info := prom.Info("shoal_gpu_info", "1, with the versions of shoal-gpu and Go, and the device.",
		[]string{"version", "goversion", "device", "uuid"},
		func(s *Stats) []string { return []string{version, runtime.Version(), s.Device, s.UUID} })
	return &prom.Table[Stats]{Families: append(slices.Clip(families), info), Snapshot: prom.Always(s.Stats)}
}

var families = []prom.Family[Stats]{
	prom.Gauge("shoal_gpu_sessions", "Open sessions whose batches are finished on the device.", func(s *Stats) int64 {
		return s.Sessions
	}),
	prom.Gauge("shoal_gpu_sessions_passed", "Open sessions whose batches are passed through to host memory.",
		func(s *Stats) int64 { return s.Passed }),
	prom.Counter("shoal_gpu_sessions_fallen_back_total",
		"Sessions that the device could not serve; their batches went to host memory.", func(s *Stats) int64 {
			return s.Fallen
		}),
	prom.Gauge("shoal_gpu_buffers", "Buffers on the device, of open sessions.", func(s *Stats) int64 {
		return s.Buffers
	}),
	prom.Gauge("shoal_gpu_buffers_held", "Of them, those that trainers hold.", func(s *Stats) int64 { return s.Held }),
	prom.Gauge("shoal_gpu_buffers_bytes", "Memory of the device in buffers.", func(s *Stats) int64 { return s.Bytes }),
	prom.Counter("shoal_gpu_batches_total", "Batches finished on the device.", func(s *Stats) int64 {
		return s.Batches
	}),
	prom.Counter("shoal_gpu_finish_seconds_total",
		"Time from queueing a batch's copy to the device and its kernel until both are complete, summed over batches.",
		func(s *Stats) float64 { return float64(s.Finished) / 1e6 }),
	prom.Counter("shoal_gpu_wait_seconds_total", "Time of waiting for trainers to release buffers.",
		func(s *Stats) float64 { return float64(s.Waited) / 1e6 }),
}
