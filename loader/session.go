package loader

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/shoalfs/shoal/loader/feedpb"
	"github.com/shoalfs/shoal/loader/internal/wire"
	"github.com/shoalfs/shoal/prefetch/order"
)

// session is one open stream: a producer that cuts the order into batches within the window, readers
// that fill the rows, and a sender that delivers the batches in order.
type session struct {
	srv    *Server
	ds     Dataset // the version that the session began with, to its end
	spec   *spec
	first  plan // of the first epoch
	window *window
	count  counters
	opened time.Time

	ctx    context.Context
	cancel context.CancelCauseFunc

	mu      sync.Mutex
	buffers map[*buffer]struct{} // not freed yet
}

// counters are a session's figures.
type counters struct {
	batches, samples, bad        atomic.Int64
	bytes                        atomic.Int64 // sent
	sourceBytes                  atomic.Int64 // of samples read
	fetch, decode                duration     // of all readers together
	stall, send, credit, reserve duration
	epoch, index                 atomic.Int64
}

// item is what the sender gets, in order: one of the three.
type item struct {
	batch *batch
	end   *feedpb.EpochEnd
	err   error
}

// feedStream is the part of the gRPC stream that a session uses.
type feedStream interface {
	Recv() (*feedpb.ClientMessage, error)
	SendMsg(m any) error
}

// run delivers the session. It returns when the last epoch is delivered, when the session's context
// ends, or at the first error.
func (s *session) run(stream feedStream) error {
	rows := make(chan *row)
	items := make(chan item, s.window.most+2)
	var workers sync.WaitGroup
	workers.Go(func() {
		defer close(items)
		defer close(rows)
		s.produce(rows, items)
	})
	for range s.srv.o.Readers {
		workers.Go(func() {
			for r := range rows {
				r.fill(s.ctx, s)
			}
		})
	}

	// A Recv, and a SendMsg to a client that has stopped reading, return only once this handler
	// has. So the two have goroutines that outlive it for a moment; the server waits for them.
	s.srv.streams.Go(func() { s.receive(stream) })
	sent := make(chan error, 1)
	s.srv.streams.Go(func() { sent <- s.deliver(stream, items) })

	var err error
	select {
	case err = <-sent:
		if s.ctx.Err() != nil {
			err = context.Cause(s.ctx)
		}
	case <-s.ctx.Done():
		err = context.Cause(s.ctx)
	}
	s.cancel(err)
	workers.Wait()
	s.abandon()
	return err
}

// abandon gives the reservations back that are still held. The memory itself may be on its way out
// and is left to the collector.
func (s *session) abandon() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for b := range s.buffers {
		b.release()
	}
	clear(s.buffers)
}

// receive takes credits until the client says no more.
func (s *session) receive(stream feedStream) {
	for {
		m, err := stream.Recv()
		switch {
		case errors.Is(err, io.EOF):
			s.window.close()
			return
		case err != nil:
			s.cancel(left(err))
			return
		case m.GetOpen() != nil:
			s.cancel(coded(codes.InvalidArgument, errors.New("a second Open on one stream: open another stream")))
			return
		}
		s.window.grant(m.GetCredit().GetN())
	}
}

// produce makes the batches of all epochs, and hands their rows to the readers and the batches to
// the sender, both in order.
func (s *session) produce(rows chan<- *row, items chan<- item) {
	put := func(it item) bool {
		select {
		case items <- it:
			return true
		case <-s.ctx.Done():
			return false
		}
	}
	p, epoch := s.first, s.spec.start.Epoch
	for n := 0; s.spec.epochs == 0 || n < s.spec.epochs; n++ {
		if n > 0 {
			var err error
			if p, err = s.spec.plan(s.ds.Len(), epoch, 0); err != nil {
				put(item{err: err})
				return
			}
		}
		if err := s.produceEpoch(p, epoch, rows, put); err != nil {
			put(item{err: err})
			return
		}
		next := s.spec.state(s.ds, epoch+1, 0)
		if !put(item{end: &feedpb.EpochEnd{Epoch: uint32(epoch), Batches: uint64(p.batches()), State: next.JSON()}}) {
			return
		}
		if epoch++; epoch > maxEpoch {
			return
		}
	}
}

func (s *session) produceEpoch(p plan, epoch int, rows chan<- *row, put func(item) bool) error {
	name := fmt.Sprintf("feed/%s/rank%d/epoch%d", s.spec.session, s.spec.rank, epoch)
	stream, err := s.ds.Begin(name, p.seq, p.start)
	if err != nil {
		return fmt.Errorf("begin %s: %w", name, err)
	}
	src := &source{stream: stream}
	src.refs.Store(1)
	defer src.drop()
	for k := range p.batches() {
		if err := s.window.start(s.ctx); err != nil {
			return err
		}
		start := time.Now()
		b, err := s.newBatch(s.ctx, p, k, epoch, src)
		s.count.reserve.add(time.Since(start))
		if err != nil {
			return err
		}
		if !put(item{batch: b}) {
			src.refs.Add(-int32(len(b.rows)))
			return context.Cause(s.ctx)
		}
		for i := range b.rows {
			select {
			case rows <- &b.rows[i]:
			case <-s.ctx.Done():
				b.rows[i].fill(s.ctx, s) // settles the row without reading it
			}
		}
	}
	return nil
}

// deliver sends what was produced as credits allow.
func (s *session) deliver(stream feedStream, items <-chan item) error {
	if err := stream.SendMsg(s.hello()); err != nil {
		return left(err)
	}
	bad := 0
	for it := range items {
		switch {
		case it.err != nil:
			return it.err
		case it.end != nil:
			bad = 0
			if err := stream.SendMsg(&feedpb.ServerMessage{Kind: &feedpb.ServerMessage_EpochEnd{EpochEnd: it.end}}); err != nil {
				return left(err)
			}
			continue
		}
		start := time.Now()
		ok, err := s.window.send(s.ctx)
		s.count.credit.add(time.Since(start))
		if err != nil || !ok {
			return err
		}
		start = time.Now()
		select {
		case <-it.batch.done:
		case <-s.ctx.Done():
			return context.Cause(s.ctx)
		}
		s.count.stall.add(time.Since(start))
		if err := it.batch.settle(s, &bad); err != nil {
			return err
		}
		start = time.Now()
		if err := s.send(stream, it.batch); err != nil {
			return err
		}
		s.count.send.add(time.Since(start))
		s.window.done()
	}
	if s.ctx.Err() != nil {
		return context.Cause(s.ctx)
	}
	return nil
}

// send sends one batch and gives its buffer over to gRPC.
func (s *session) send(stream feedStream, b *batch) error {
	h, total := b.header, int(b.header.GetTotalBytes())
	shared := b.buf.shared(int64(total))
	defer shared.Free()
	if err := stream.SendMsg(&feedpb.ServerMessage{Kind: &feedpb.ServerMessage_Batch{Batch: h}}); err != nil {
		return left(err)
	}
	for off := 0; off < total; off += wire.MaxChunk {
		if err := stream.SendMsg(&wire.Chunk{Data: shared.Slice(off, min(off+wire.MaxChunk, total))}); err != nil {
			return left(err)
		}
	}
	s.count.batches.Add(1)
	s.count.samples.Add(int64(h.GetValid()))
	s.count.bad.Add(int64(len(h.GetBad())))
	s.count.bytes.Add(int64(total))
	s.count.epoch.Store(int64(h.GetEpoch()))
	s.count.index.Store(int64(h.GetIndex()) + 1)
	return nil
}

// hello describes the session to its client.
func (s *session) hello() *feedpb.ServerMessage {
	sp, ds := s.spec, s.ds
	o := &feedpb.Opened{
		Session: sp.session, Dataset: ds.Version(), Samples: uint64(ds.Len()),
		Batch: uint32(sp.batch), GlobalBatch: uint64(sp.global()), World: uint32(sp.world), Rank: uint32(sp.rank),
		Batches: uint64(s.first.batches()), PerEpoch: uint64(sp.perEpoch(s.first)),
		Transform: sp.transformName(), TransformHash: sp.hash, Order: sp.orderName, Tail: string(sp.tail), Bad: sp.bad.text,
		Epoch: uint32(sp.start.Epoch), State: sp.start.JSON(),
	}
	if sp.transform != nil {
		o.Layout = sp.transform.Layout()
	}
	o.Planes, _ = planes(sp.transform, sp.batch, 0)
	return &feedpb.ServerMessage{Kind: &feedpb.ServerMessage_Opened{Opened: o}}
}

// perEpoch returns the rank's batches in an epoch that is read from its beginning. It depends on
// lengths only, so no order has to be computed again.
func (s *spec) perEpoch(p plan) int {
	whole := plan{seq: order.Sequential(p.n / s.world), n: p.n, batch: s.batch, world: s.world, tail: s.tail}
	if !ranked(s.order) {
		whole.seq = order.Stripe(order.Sequential(p.n), s.world, s.rank, s.rank)
	}
	return whole.batches()
}
