package objstore

import (
	"context"
	"sync"
	"time"

	"github.com/shoalfs/shoal/internal/trace"
)

// slowRequest is the duration from which a request is traced even if nobody waited for it and nothing failed: an
// order of magnitude above a small GET of object stores.
const slowRequest = time.Second

// traced is the trace of one request: under the span of its caller, or on its own once it is worth it. Its second GET
// and its retries come from other goroutines.
type traced struct {
	ctx     context.Context
	op, key string
	n       int64
	start   time.Time

	mu   sync.Mutex
	span trace.Span
}

type tracedKey struct{}

// tracedRequest begins a request, while tracing is on.
func tracedRequest(ctx context.Context, op, key string, n int64) (context.Context, *traced) {
	r := &traced{ctx: ctx, op: op, key: key, n: n, start: time.Now()}
	if !trace.Of(ctx).IsNone() {
		r.open()
	}
	return context.WithValue(ctx, tracedKey{}, r), r
}

// open makes the span, with the request's start time. r.mu is held, or r is new.
func (r *traced) open() {
	_, r.span = trace.StartAt(r.ctx, "store."+r.op, r.start)
	r.span.Str("shoal.key", r.key)
	r.span.Int("shoal.bytes", r.n)
	r.span.Str("shoal.priority", [...]string{Prefetch: "prefetch", Demand: "demand"}[PriorityOf(r.ctx)])
}

func (r *traced) event(name string, cause error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.span.IsNone() {
		r.open()
	}
	r.span.Event(name, cause)
}

func (r *traced) end(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.span.IsNone() && (err != nil && r.ctx.Err() == nil || time.Since(r.start) >= slowRequest) {
		r.open()
	}
	r.span.End(err)
}

// tell adds an event to ctx's request, or to the caller's span if there is no single request.
func tell(ctx context.Context, name string, cause error) {
	if !trace.On() {
		return
	}
	if r, ok := ctx.Value(tracedKey{}).(*traced); ok {
		r.event(name, cause)
		return
	}
	trace.Of(ctx).Event(name, cause)
}
