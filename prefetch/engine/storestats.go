package engine

import "github.com/shoalfs/shoal/cache/objstore"

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

// addStores adds up what the stores have counted.
func (e *Engine) addStores(s *Stats) {
	for _, r := range e.remotes() {
		m, l, t, of := r.meter.Stats(), r.limiter.Stats(), r.retrier.Stats(), &s.Store
		s.GetRequests, s.GetBytes, s.ListRequests = s.GetRequests+m.Reads, s.GetBytes+m.Bytes, s.ListRequests+m.Lists
		s.StatRequests, s.InFlight = s.StatRequests+m.Stats, s.InFlight+m.InFlight
		s.Silent = max(s.Silent, m.Silent.Seconds())
		for kind, n := range m.Errors {
			s.StoreErrors[kind] += n
		}
		for op, o := range m.Outcomes {
			of.Outcomes[op] = of.Outcomes[op].Add(o)
		}
		of.Sent, of.SlowDowns = of.Sent+m.Written, of.SlowDowns+m.SlowDowns
		of.Retries, of.GaveUp = of.Retries+t.Retries, of.GaveUp+t.GaveUp
		of.WaitingDemand, of.WaitingPrefetch = of.WaitingDemand+l.WaitingDemand, of.WaitingPrefetch+l.WaitingPrefetch
		of.GetLatency.Add(r.meter.Latency().Counts())
	}
}
