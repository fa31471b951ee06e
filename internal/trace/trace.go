// Package trace makes spans for informative events: a reader that waits, a batch, a listing, a request that failed. It
// is OpenTelemetry's API with one difference: while nothing exports spans (package export), a call costs one load of a
// pointer, and allocates nothing. So it has no lists of attributes; each attribute is a call.
//
// A fetch that no reader waits for and that succeeds makes no span: there are thousands a second, all alike. One that
// is retried, hedged or fails is recorded from its beginning, as a trace of its own.
package trace

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	otel "go.opentelemetry.io/otel/trace"
)

var tracer atomic.Pointer[otel.Tracer] // nil while tracing is off

// Use makes spans with t from now on, none if it is nil.
func Use(t otel.Tracer) {
	if t == nil {
		tracer.Store(nil)
		return
	}
	tracer.Store(&t)
}

// Span is one span. The zero value is no span; all its methods do nothing.
type Span struct{ s otel.Span }

// Start begins a span under the context's, or a new trace if there is none.
func Start(ctx context.Context, name string) (context.Context, Span) {
	t := tracer.Load()
	if t == nil {
		return ctx, Span{}
	}
	return started((*t).Start(ctx, name))
}

// StartAt is Start for a span that began earlier.
func StartAt(ctx context.Context, name string, at time.Time) (context.Context, Span) {
	t := tracer.Load()
	if t == nil {
		return ctx, Span{}
	}
	return started((*t).Start(ctx, name, otel.WithTimestamp(at)))
}

// StartUnder begins a span under parent, in ctx; a new trace if parent is none.
func StartUnder(ctx context.Context, parent Span, name string) (context.Context, Span) {
	return Start(With(ctx, parent), name)
}

// StartBeside begins a trace in ctx that links to a span instead of extending its trace.
func StartBeside(ctx context.Context, to Span, name string) (context.Context, Span) {
	t := tracer.Load()
	if t == nil {
		return ctx, Span{}
	}
	o := []otel.SpanStartOption{otel.WithNewRoot()}
	if to.s != nil {
		o = append(o, otel.WithLinks(otel.Link{SpanContext: to.s.SpanContext()}))
	}
	return started((*t).Start(ctx, name, o...))
}

func started(ctx context.Context, s otel.Span) (context.Context, Span) { return ctx, Span{s} }

// Of returns the context's span.
func Of(ctx context.Context) Span {
	if tracer.Load() == nil {
		return Span{}
	}
	if s := otel.SpanFromContext(ctx); s.SpanContext().IsValid() {
		return Span{s}
	}
	return Span{}
}

// With returns ctx with the span.
func With(ctx context.Context, s Span) context.Context {
	if s.s == nil {
		return ctx
	}
	return otel.ContextWithSpan(ctx, s.s)
}

// On reports whether tracing is on.
func On() bool { return tracer.Load() != nil }

// IsNone reports whether there is no span.
func (s Span) IsNone() bool { return s.s == nil }

// Str sets an attribute.
func (s Span) Str(key, value string) {
	if s.s != nil {
		s.s.SetAttributes(attribute.String(key, value))
	}
}

// Int sets an attribute.
func (s Span) Int(key string, value int64) {
	if s.s != nil {
		s.s.SetAttributes(attribute.Int64(key, value))
	}
}

// Event records an event and its cause, which may be nil.
func (s Span) Event(name string, cause error) {
	if s.s == nil {
		return
	}
	if cause == nil {
		s.s.AddEvent(name)
		return
	}
	s.s.AddEvent(name, otel.WithAttributes(attribute.String("cause", cause.Error())))
}

// End ends the span with err, which may be nil; cancellation by the caller is not a failure.
func (s Span) End(err error) {
	if s.s == nil {
		return
	}
	if err != nil {
		s.s.SetAttributes(attribute.String("cause", err.Error()))
		if !errors.Is(err, context.Canceled) {
			s.s.SetStatus(codes.Error, err.Error())
		}
	}
	s.s.End()
}

// Remote returns ctx under the span that a caller named in W3C's headers traceparent and tracestate, if it named one
// and tracing is on. get returns a header's value.
func Remote(ctx context.Context, get func(header string) string) (_ context.Context, named bool) {
	if tracer.Load() == nil {
		return ctx, false
	}
	carried := propagation.MapCarrier{}
	for _, name := range (propagation.TraceContext{}).Fields() {
		if v := get(name); v != "" {
			carried[name] = v
		}
	}
	ctx = propagation.TraceContext{}.Extract(ctx, carried)
	return ctx, otel.SpanContextFromContext(ctx).IsRemote()
}
