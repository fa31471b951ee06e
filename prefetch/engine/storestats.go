package engine

import (
	"github.com/shoalfs/shoal/cache/objstore"
)

// StoreStats is the details of requests to the object store; with a shard set in place of the source's objects, to
// both. Sums and latencies are in Stats.
type StoreStats struct {
	Outcomes        map[string]objstore.Outcomes `json:"outcomes"`         // of finished requests, retries included: get, head, list, put, other
	Sent            int64                        `json:"sent_bytes"`       // stored
	Retries         int64                        `json:"retries"`          // tries after the first
	GaveUp          int64                        `json:"gave_up"`          // requests that ran out of tries or time
	SlowDowns       int64                        `json:"slow_downs"`       // answers that requested fewer requests
	WaitingDemand   int                          `json:"waiting_demand"`   // requests without a connection that a reader waits for
	WaitingPrefetch int                          `json:"waiting_prefetch"` // the others
	GetLatency      objstore.HistogramCounts     `json:"-"`                // of successful GETs, up to the last byte
}

// storeStats adds up the stores' details.
func (e *Engine) storeStats() StoreStats {
	s := StoreStats{Outcomes: map[string]objstore.Outcomes{}}
	for _, r := range e.remotes() {
		m, l, t := r.meter.Stats(), r.limiter.Stats(), r.retrier.Stats()
		for op, o := range m.Outcomes {
			s.Outcomes[op] = s.Outcomes[op].Add(o)
		}
		s.Sent += m.Written
		s.SlowDowns += m.SlowDowns
		s.Retries, s.GaveUp = s.Retries+t.Retries, s.GaveUp+t.GaveUp
		s.WaitingDemand, s.WaitingPrefetch = s.WaitingDemand+l.WaitingDemand, s.WaitingPrefetch+l.WaitingPrefetch
		s.GetLatency.Add(r.meter.Latency().Counts())
	}
	return s
}
