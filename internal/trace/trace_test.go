package trace

import (
	"context"
	"errors"
	"testing"
	"time"

	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
)

var errAny = errors.New("any")

// everything is what a hot path may call.
func everything(ctx context.Context) {
	ctx, s := Start(ctx, "a")
	s.Str("k", "v")
	s.Int("n", 1)
	s.Event("e", errAny)
	_, t := StartUnder(With(ctx, Of(ctx)), s, "b")
	_, u := StartBeside(ctx, s, "c")
	_, w := StartAt(ctx, "d", time.Unix(1, 0))
	u.End(nil)
	w.End(errAny)
	t.End(nil)
	s.End(errAny)
}

// Off costs nothing that a collector of garbage sees.
func TestOffAllocatesNothing(t *testing.T) {
	ctx := t.Context()
	if n := testing.AllocsPerRun(100, func() { everything(ctx) }); n != 0 {
		t.Errorf("%v allocations while tracing is off", n)
	}
	if _, named := Remote(ctx, func(string) string { t.Error("a header is looked at"); return "" }); named || On() {
		t.Error("tracing is on")
	}
}

func BenchmarkOff(b *testing.B) {
	ctx := b.Context()
	b.ReportAllocs()
	for b.Loop() {
		everything(ctx)
	}
}

func TestSpans(t *testing.T) {
	kept := tracetest.NewInMemoryExporter()
	p := sdk.NewTracerProvider(sdk.WithSyncer(kept))
	Use(p.Tracer("t"))
	defer Use(nil)

	const header = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	ctx, named := Remote(t.Context(), func(name string) string {
		if name == "traceparent" {
			return header
		}
		return ""
	})
	if !named {
		t.Fatal("the caller's span is not found")
	}
	if _, named := Remote(t.Context(), func(string) string { return "nonsense" }); named {
		t.Error("nonsense is a span")
	}
	everything(ctx)
	_, gone := Start(ctx, "given up")
	gone.End(context.Canceled)
	spans := map[string]tracetest.SpanStub{}
	for _, s := range kept.GetSpans() {
		spans[s.Name] = s
	}
	a, b, c, d := spans["a"], spans["b"], spans["c"], spans["d"]
	if got := a.SpanContext.TraceID().String(); got != header[3:35] || a.Parent.SpanID().String() != header[36:52] {
		t.Errorf("a is of trace %s under %s", got, a.Parent.SpanID())
	}
	if b.Parent.SpanID() != a.SpanContext.SpanID() || d.Parent.SpanID() != a.SpanContext.SpanID() ||
		!d.StartTime.Equal(time.Unix(1, 0)) {
		t.Errorf("b %+v, d %+v", b, d)
	}
	if c.Parent.IsValid() || c.SpanContext.TraceID() == a.SpanContext.TraceID() || len(c.Links) != 1 ||
		c.Links[0].SpanContext.SpanID() != a.SpanContext.SpanID() {
		t.Errorf("c is beside a: %+v", c)
	}
	if len(a.Events) != 1 || a.Events[0].Name != "e" || a.Status.Description != "any" || len(a.Attributes) != 3 {
		t.Errorf("a holds %+v, %+v, %+v", a.Events, a.Status, a.Attributes)
	}
	if s := spans["given up"].Status; s.Description != "" {
		t.Errorf("a caller who gave up is a failure: %+v", s)
	}
}
