package export

import (
	"bytes"
	"log/slog"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/shoalfs/shoal/internal/trace"
	"github.com/shoalfs/shoal/lab/rig/otlp"
)

// The collectors of these tests answer, however late.
func TestMain(m *testing.M) {
	flushTime = time.Minute
	os.Exit(m.Run())
}

// environ sets variables for the SDK, which reads the process's own, and returns how Start asks for them. Those of
// whoever runs the tests are not theirs.
func environ(t *testing.T, vars map[string]string) func(string) string {
	t.Helper()
	for _, kv := range os.Environ() {
		if name, _, _ := strings.Cut(kv, "="); strings.HasPrefix(name, "OTEL_") {
			t.Setenv(name, "") // as if it were not set
		}
	}
	for name, v := range vars {
		t.Setenv(name, v)
	}
	return func(name string) string { return vars[name] }
}

func TestExport(t *testing.T) {
	c := otlp.Start()
	defer c.Close()
	stop, err := Start(t.Context(), "v9", environ(t, map[string]string{
		"OTEL_EXPORTER_OTLP_ENDPOINT": c.URL, "OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer%20tok",
		"OTEL_EXPORTER_OTLP_COMPRESSION": "gzip",
		"OTEL_SERVICE_NAME":              "mine", "OTEL_RESOURCE_ATTRIBUTES": "team=vision",
	}))
	if err != nil {
		t.Fatal(err)
	}
	_, s := trace.Start(t.Context(), "work")
	s.Str("shoal.key", "k")
	s.End(nil)
	stop()
	if trace.On() {
		t.Error("tracing is on after the end")
	}
	spans := c.Spans()
	if len(spans) != 1 || spans[0].Name != "work" || spans[0].Attributes["shoal.key"] != "k" {
		t.Fatalf("%+v", spans)
	}
	r := spans[0].Resource
	if r["service.name"] != "mine" || r["service.version"] != "v9" || r["team"] != "vision" || r["host.name"] == "" {
		t.Errorf("resource %v", r)
	}
	for name := range r {
		if strings.HasPrefix(name, "process.") {
			t.Errorf("%s is sent: a command line may hold anything", name)
		}
	}
	if got := c.Headers()[0].Get("Authorization"); got != "Bearer tok" {
		t.Errorf("authorization %q", got)
	}
}

func TestSampler(t *testing.T) {
	c := otlp.Start()
	defer c.Close()
	stop, err := Start(t.Context(), "v9",
		environ(t, map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": c.URL, "OTEL_TRACES_SAMPLER": "always_off"}))
	if err != nil {
		t.Fatal(err)
	}
	_, s := trace.Start(t.Context(), "work")
	s.End(nil)
	stop()
	if n := len(c.Spans()); n != 0 {
		t.Errorf("%d spans of a sampler that is off", n)
	}
}

func TestOffAndWrong(t *testing.T) {
	for _, off := range []map[string]string{
		{},
		{"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"},
		{"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"},
	} {
		stop, err := Start(t.Context(), "v", func(name string) string { return off[name] })
		if err != nil || trace.On() {
			t.Errorf("%v: on %v, %v", off, trace.On(), err)
		}
		stop()
	}
	for want, wrong := range map[string]map[string]string{
		"OTEL_TRACES_EXPORTER=zipkin: give otlp or none": {"OTEL_TRACES_EXPORTER": "zipkin"},
		"OTEL_EXPORTER_OTLP_PROTOCOL=http/json: give http/protobuf or grpc": {"OTEL_TRACES_EXPORTER": "otlp",
			"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"},
		"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=x: give http/protobuf or grpc": {"OTEL_TRACES_EXPORTER": "otlp",
			"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "x"},
	} {
		if _, err := Start(t.Context(), "v", func(name string) string { return wrong[name] }); err == nil ||
			err.Error() != want || trace.On() {
			t.Errorf("%v: %v", wrong, err)
		}
	}
}

// A collector that refuses or is not there is a warning, at the end of which the process goes on.
func TestNoCollector(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	nowhere := "http://user:hunter2@" + l.Addr().String()
	l.Close()
	c := otlp.Start()
	defer c.Close()
	c.Refuse()
	for _, url := range []string{nowhere, c.URL} {
		var log bytes.Buffer
		before := slog.Default()
		slog.SetDefault(slog.New(slog.NewTextHandler(&log, nil)))
		stop, err := Start(t.Context(), "v",
			environ(t, map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": url,
				"OTEL_EXPORTER_OTLP_HEADERS": "x-key=hunter2"}))
		if err != nil {
			t.Fatal(err)
		}
		_, s := trace.Start(t.Context(), "work")
		s.End(nil)
		start := time.Now()
		stop()
		slog.SetDefault(before)
		t.Logf("ended within %v", time.Since(start))
		if !strings.Contains(log.String(), "level=WARN") || strings.Contains(log.String(), "hunter2") {
			t.Errorf("%s: the log is %s", url, log.String())
		}
	}
}

// A setting that cannot be read is told without what it holds.
func TestUnreadableSettings(t *testing.T) {
	var log bytes.Buffer
	before := slog.Default()
	slog.SetDefault(slog.New(slog.NewTextHandler(&log, nil)))
	defer slog.SetDefault(before)
	for _, vars := range []map[string]string{
		{"OTEL_EXPORTER_OTLP_ENDPOINT": "http://user:hunter2@127.0.0.1:x%zz"},
		{"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_EXPORTER_OTLP_HEADERS": "x-key hunter2"},
	} {
		log.Reset()
		stop, err := Start(t.Context(), "v", environ(t, vars))
		stop()
		if err != nil && strings.Contains(err.Error(), "hunter2") || strings.Contains(log.String(), "hunter2") {
			t.Errorf("%v, %s", err, log.String())
		}
		if err == nil && !strings.Contains(log.String(), "OTEL_*") {
			t.Errorf("%v: nothing is told: %s", vars, log.String())
		}
	}
}
