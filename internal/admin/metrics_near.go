package admin

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/shoalfs/shoal/cache/objstore/near"
)

// nearMetrics are absent without a near tier.
var nearMetrics = []metric{
	ofNear(prometheus.CounterValue, "near_reads_total", "Reads of units (4 MiB of an object, or less), or of parts of one, that the near tier could answer.", func(s *near.Stats) int64 { return s.Reads }),
	ofNear(prometheus.CounterValue, "near_hits_total", "Of them, those that it answered.", func(s *near.Stats) int64 { return s.Hits }),
	ofNear(prometheus.CounterValue, "near_misses_total", "Of them, those that it had no copy for.", func(s *near.Stats) int64 { return s.Misses }),
	ofNear(prometheus.CounterValue, "near_passed_total", "Of them, those that did not ask it: it was left out, or had no place free.", func(s *near.Stats) int64 { return s.Passed }),
	ofNear(prometheus.CounterValue, "near_bytes_total", "Bytes that it answered with.", func(s *near.Stats) int64 { return s.Bytes }),
	ofNear(prometheus.CounterValue, "near_puts_total", "Copies put to it.", func(s *near.Stats) int64 { return s.Puts }),
	ofNear(prometheus.CounterValue, "near_put_bytes_total", "Bytes of them.", func(s *near.Stats) int64 { return s.PutBytes }),
	ofNear(prometheus.CounterValue, "near_dropped_total", "Copies that were not put: the queue was full, or the tier did not take any.", func(s *near.Stats) int64 { return s.Dropped }),
	ofNear(prometheus.CounterValue, "near_damaged_total", "Copies that did not match, and were read from the origin.", func(s *near.Stats) int64 { return s.Damaged }),
	ofNear(prometheus.CounterValue, "near_errors_total", "Requests to it that failed, or had no answer in time.", func(s *near.Stats) int64 { return s.Errors }),
	ofNear(prometheus.GaugeValue, "near_queued_bytes", "Memory in use for copies to be put and reads to be verified.", func(s *near.Stats) int64 { return s.Queued }),
	ofNear(prometheus.GaugeValue, "near_away", "1 while it is left out.", func(s *near.Stats) int64 { return is(s.State == "away") }),
	ofNear(prometheus.GaugeValue, "near_read_only", "1 while nothing is put, and it is still read.", func(s *near.Stats) int64 { return is(s.State == "read-only") }),
}

func ofNear(kind prometheus.ValueType, name, help string, of func(s *near.Stats) int64) metric {
	return ofPart(func(s *Snapshot) *near.Stats { return s.Near }, kind, name, help, of)
}

func is(b bool) int64 {
	if b {
		return 1
	}
	return 0
}
