// Package otlp is a collector of traces in this process: it takes what OpenTelemetry's exporters send by
// OTLP/HTTP, decodes it, and keeps it for a test to look at.
package otlp

import (
	"compress/gzip"
	"encoding/hex"
	"io"
	"net/http"
	"net/http/httptest"
	"strconv"
	"sync"
	"time"

	collect "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	common "go.opentelemetry.io/proto/otlp/common/v1"
	trace "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/proto"
)

// Span is one span as it was sent.
type Span struct {
	Name       string
	Trace, ID  string   // hex
	Parent     string   // hex; empty for a root
	Links      []string // traces
	Attributes map[string]string
	Events     []Event
	Failed     bool
	Start, End time.Time
	Resource   map[string]string
}

// Event is one of a span's events.
type Event struct {
	Name       string
	Attributes map[string]string
}

// Collector listens on loopback, at URL, as OTEL_EXPORTER_OTLP_ENDPOINT takes it. Close it.
type Collector struct {
	*httptest.Server

	mu      sync.Mutex
	spans   []Span
	headers []http.Header
	refuse  bool
}

// Start starts a collector.
func Start() *Collector {
	c := &Collector{}
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/traces", c.take)
	c.Server = httptest.NewServer(mux)
	return c
}

// Refuse makes it answer 403 to everything from now on.
func (c *Collector) Refuse() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.refuse = true
}

// Spans returns what has come so far.
func (c *Collector) Spans() []Span {
	c.mu.Lock()
	defer c.mu.Unlock()
	return append([]Span(nil), c.spans...)
}

// Headers returns those of the requests so far.
func (c *Collector) Headers() []http.Header {
	c.mu.Lock()
	defer c.mu.Unlock()
	return append([]http.Header(nil), c.headers...)
}

func (c *Collector) take(w http.ResponseWriter, r *http.Request) {
	spans, err := decode(r)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.headers = append(c.headers, r.Header.Clone())
	switch {
	case c.refuse:
		http.Error(w, "refused", http.StatusForbidden)
	case err != nil:
		http.Error(w, err.Error(), http.StatusBadRequest)
	default:
		c.spans = append(c.spans, spans...)
		w.Header().Set("Content-Type", "application/x-protobuf") // an empty body is an empty answer
	}
}

func decode(r *http.Request) ([]Span, error) {
	var body io.Reader = r.Body
	if r.Header.Get("Content-Encoding") == "gzip" {
		z, err := gzip.NewReader(r.Body)
		if err != nil {
			return nil, err
		}
		body = z
	}
	b, err := io.ReadAll(body)
	if err != nil {
		return nil, err
	}
	var m collect.ExportTraceServiceRequest
	if err := proto.Unmarshal(b, &m); err != nil {
		return nil, err
	}
	var out []Span
	for _, rs := range m.GetResourceSpans() {
		resource := attributes(rs.GetResource().GetAttributes())
		for _, ss := range rs.GetScopeSpans() {
			for _, s := range ss.GetSpans() {
				out = append(out, span(s, resource))
			}
		}
	}
	return out, nil
}

func span(s *trace.Span, resource map[string]string) Span {
	out := Span{
		Name: s.GetName(), Trace: hex.EncodeToString(s.GetTraceId()), ID: hex.EncodeToString(s.GetSpanId()),
		Parent:     hex.EncodeToString(s.GetParentSpanId()),
		Attributes: attributes(s.GetAttributes()), Failed: s.GetStatus().GetCode() == trace.Status_STATUS_CODE_ERROR,
		Start: time.Unix(0, int64(s.GetStartTimeUnixNano())), End: time.Unix(0, int64(s.GetEndTimeUnixNano())),
		Resource: resource,
	}
	for _, l := range s.GetLinks() {
		out.Links = append(out.Links, hex.EncodeToString(l.GetTraceId()))
	}
	for _, e := range s.GetEvents() {
		out.Events = append(out.Events, Event{e.GetName(), attributes(e.GetAttributes())})
	}
	return out
}

func attributes(list []*common.KeyValue) map[string]string {
	out := make(map[string]string, len(list))
	for _, kv := range list {
		switch v := kv.GetValue().GetValue().(type) {
		case *common.AnyValue_StringValue:
			out[kv.GetKey()] = v.StringValue
		case *common.AnyValue_IntValue:
			out[kv.GetKey()] = strconv.FormatInt(v.IntValue, 10)
		default:
			out[kv.GetKey()] = kv.GetValue().String()
		}
	}
	return out
}
