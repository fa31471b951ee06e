// Package export sends the spans of package trace to a collector, configured by OpenTelemetry's standard environment
// variables (docs/tracing.md). It is separate because it depends on OpenTelemetry's SDK.
package export

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/go-logr/logr"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/sdk/resource"
	sdk "go.opentelemetry.io/otel/sdk/trace"

	"github.com/shoalfs/shoal/internal/trace"
)

var flushTime = 3 * time.Second // for the collector at the end of a process; tests change it

// Start turns tracing on if the environment requests it: with an endpoint (OTEL_EXPORTER_OTLP_ENDPOINT, or
// _TRACES_ENDPOINT) or with OTEL_TRACES_EXPORTER=otlp. stop sends the remaining spans. An error is a wrong variable,
// which it names. A collector that does not answer is not an error; it causes a warning in the log from time to time.
//
// getenv decides whether tracing is on; the SDK reads the other variables from the process's environment.
func Start(ctx context.Context, version string, getenv func(string) string) (stop func(), err error) {
	stop = func() {}
	first := func(names ...string) (name, value string) {
		for _, name := range names {
			if v := strings.TrimSpace(getenv(name)); v != "" {
				return name, v
			}
		}
		return "", ""
	}
	_, endpoint := first("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
	_, exporter := first("OTEL_TRACES_EXPORTER")
	switch {
	case strings.EqualFold(getenv("OTEL_SDK_DISABLED"), "true"), exporter == "none", exporter == "" && endpoint == "":
		return stop, nil
	case exporter != "" && exporter != "otlp":
		return stop, fmt.Errorf("OTEL_TRACES_EXPORTER=%s: give otlp or none", exporter)
	}
	otel.SetLogger(logr.New(settingsSink{})) // before the exporter, which reports the settings that it cannot read
	var client otlptrace.Client
	switch name, protocol := first("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"); protocol {
	case "", "http/protobuf":
		client = otlptracehttp.NewClient()
	case "grpc":
		client = otlptracegrpc.NewClient()
	default:
		return stop, fmt.Errorf("%s=%s: give http/protobuf or grpc", name, protocol)
	}
	to, err := otlptrace.New(ctx, client)
	if err != nil {
		return stop, fmt.Errorf("OpenTelemetry's exporter: %w (see the variables OTEL_EXPORTER_OTLP_*)", err)
	}
	what, err := resource.New(ctx, // neither the command line nor the environment is sent
		resource.WithAttributes(attribute.String("service.name", "shoal"),
			attribute.String("service.version", version)),
		resource.WithTelemetrySDK(), resource.WithHost(), resource.WithFromEnv())
	if err != nil {
		return stop, errors.Join(fmt.Errorf("OTEL_RESOURCE_ATTRIBUTES: %w", err), to.Shutdown(ctx))
	}
	otel.SetErrorHandler(otel.ErrorHandlerFunc(func(err error) {
		slog.Warn("spans were not sent", "cause", err, "remedy",
			"see the variables OTEL_EXPORTER_OTLP_*, and whether the collector runs")
	}))
	p := sdk.NewTracerProvider(sdk.WithBatcher(to), sdk.WithResource(what))
	trace.Use(p.Tracer("github.com/shoalfs/shoal"))
	return func() {
		trace.Use(nil)
		ctx, cancel := context.WithTimeout(context.Background(), flushTime)
		defer cancel()
		if err := p.Shutdown(ctx); err != nil {
			slog.Warn("the last spans were not sent", "cause", err)
		}
	}, nil
}

// settingsSink receives the SDK's errors about its settings. They quote the settings, which may contain a key or a
// password: so it logs only the place.
type settingsSink struct{}

func (settingsSink) Init(logr.RuntimeInfo) {}

// Enabled implements logr.LogSink. Errors are sent regardless.
func (settingsSink) Enabled(int) bool { return false }

func (settingsSink) Info(int, string, ...any) {}

func (settingsSink) Error(_ error, at string, _ ...any) {
	slog.Warn("ignoring an OpenTelemetry setting that cannot be read", "at", at, "remedy", "see the variables OTEL_*")
}

func (s settingsSink) WithValues(...any) logr.LogSink { return s }

func (s settingsSink) WithName(string) logr.LogSink { return s }
