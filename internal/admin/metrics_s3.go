package admin

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/shoalfs/shoal/s3api"
)

// s3Metrics are absent without an S3 endpoint.
var s3Metrics = []metric{
	ofS3(prometheus.CounterValue, "s3_requests_total", "Requests to the S3 endpoint.", func(s *s3api.Stats) int64 { return s.Requests }),
	ofS3(prometheus.CounterValue, "s3_errors_total", "Of them, those that it refused or failed; errors of the origin are not counted.", func(s *s3api.Stats) int64 { return s.Errors }),
	ofS3(prometheus.CounterValue, "s3_forwarded_total", "Of them, those that it sent to the origin.", func(s *s3api.Stats) int64 { return s.Forwarded }),
	ofS3(prometheus.CounterValue, "s3_sent_bytes_total", "Bytes of objects, and of the origin's answers, that it sent.", func(s *s3api.Stats) int64 { return s.Sent }),
	ofS3(prometheus.GaugeValue, "s3_connections", "Open connections of its clients.", func(s *s3api.Stats) int64 { return s.Connections }),
}

func ofS3(kind prometheus.ValueType, name, help string, of func(s *s3api.Stats) int64) metric {
	return ofPart(func(s *Snapshot) *s3api.Stats { return s.S3 }, kind, name, help, of)
}
