package loader

import (
	"context"

	"google.golang.org/grpc/metadata"

	"github.com/shoalfs/shoal/internal/trace"
	"github.com/shoalfs/shoal/loader/feedpb"
)

// sessionSpan begins a session's span: under the span that the client names in its metadata (traceparent), if any.
func sessionSpan(ctx context.Context, o *feedpb.Open) (_ context.Context, _ trace.Span, named bool) {
	if !trace.On() {
		return ctx, trace.Span{}, false
	}
	ctx, named = trace.Remote(ctx, func(header string) string {
		return append(metadata.ValueFromIncomingContext(ctx, header), "")[0]
	})
	ctx, span := trace.Start(ctx, "feed.session")
	span.Str("shoal.client", o.GetClient())
	return ctx, span, named
}

func (s *session) endSpan(err error) {
	s.span.Str("shoal.session", s.spec.session)
	s.span.Int("shoal.rank", int64(s.spec.rank))
	s.span.Int("shoal.world", int64(s.spec.world))
	s.span.Str("shoal.order", s.spec.orderName)
	s.span.Str("shoal.transform", s.spec.transformName())
	s.span.Int("shoal.batches", s.count.batches.Load())
	s.span.Int("shoal.samples", s.count.samples.Load())
	s.span.End(err)
}

// startSpan begins the span of a batch that the session builds: in the client's trace if the client named one, else in
// a trace of its own that links to the session. A session may have a million batches, too many for one trace.
func (s *session) startSpan(b *batch) {
	if s.span.IsNone() {
		return
	}
	if s.named {
		b.ctx, b.span = trace.StartUnder(b.ctx, s.span, "feed.batch")
	} else {
		b.ctx, b.span = trace.StartBeside(b.ctx, s.span, "feed.batch")
	}
	b.span.Str("shoal.session", s.spec.session)
	b.span.Int("shoal.rank", int64(s.spec.rank))
	b.span.Int("shoal.epoch", int64(b.header.GetEpoch()))
	b.span.Int("shoal.batch", int64(b.header.GetIndex()))
	b.span.Int("shoal.samples", int64(len(b.rows)))
	b.span.Int("shoal.bytes", int64(b.header.GetTotalBytes()))
}

// endSpan ends a batch's span once its rows are settled, with the first error of any row. A bad sample counts as one,
// since the policy has not been applied yet.
func (b *batch) endSpan() {
	var err error
	for i := 0; i < len(b.rows) && err == nil && !b.span.IsNone(); i++ { // nobody looks at it without tracing
		err = b.rows[i].err
	}
	b.span.Int("shoal.bad_samples", int64(len(b.header.GetBad())))
	b.span.End(err)
}
