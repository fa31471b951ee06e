package loader

import (
	"cmp"
	"context"
	"errors"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"github.com/shoalfs/shoal/internal/audit"
	"github.com/shoalfs/shoal/internal/pause"
	"github.com/shoalfs/shoal/internal/trace"
	"github.com/shoalfs/shoal/loader/feedpb"
	"github.com/shoalfs/shoal/loader/internal/wire"
	"github.com/shoalfs/shoal/prefetch/order"
)

// session is one open stream: a producer that cuts the order into batches within the window, the readers of its pass
// that fill the rows, and a sender that delivers the batches in order.
type session struct {
	srv    *Server
	ds     Dataset // the version that the session began with, to its end
	served Dataset // the same, or what ds is derived from
	spec   *spec
	first  plan // of the first epoch
	window *window
	count  counters
	opened time.Time
	peer   *audit.Peer
	span   trace.Span
	named  bool // the client named its trace, to which the batches belong too

	pass        *pass
	lease       *lease // nil: batches go in Chunks
	slotsWarned atomic.Int64

	// The producer's.
	source    *source // of the last batch built
	begun     int     // 1 + the epoch in which a source was last begun
	again     int     // how many more sources were begun in that epoch
	impatient bool    // other sessions have held all slots for too long

	ctx    context.Context
	cancel context.CancelCauseFunc

	mu      sync.Mutex
	buffers map[*buffer]struct{} // not freed yet
}

// counters are a session's statistics.
type counters struct {
	batches, samples, bad atomic.Int64
	bytes                 atomic.Int64 // sent
	sourceBytes           atomic.Int64 // of samples read
	fetch, decode         pause.Total  // of all readers together
	send, credit, reserve pause.Total
	epoch, index          atomic.Int64
	inSlots               atomic.Int64 // of batches, those delivered in slots
	shared                atomic.Int64 // of batches, those built for another session
}

// item is what the producer passes to the sender, in order: one of the three.
type item struct {
	batch *batch
	quota int // of bad samples in the batch's epoch
	end   *feedpb.EpochEnd
	err   error
}

// sender sends a session's messages. An error ends the session.
type sender func(m any) error

// run delivers the session. It returns after the last epoch, when the session's context ends, or at the first error.
func (s *session) run(stream feedpb.Feed_StreamServer) error {
	items := make(chan item, s.window.most+2)
	producer := make(chan struct{})
	put := func(it item) error {
		select {
		case items <- it:
			return nil
		case <-s.ctx.Done():
			return context.Cause(s.ctx)
		}
	}
	go func() {
		defer close(producer)
		defer close(items)
		if err := s.produce(put); err != nil {
			_ = put(item{err: err}) // or the session is over
		}
	}()

	// A Recv, and a SendMsg to a client that has stopped reading, return only after this handler. So both run in
	// goroutines that outlive it for a moment; the server waits for them.
	s.srv.streams.Go(func() { s.receive(stream) })
	sent := make(chan error, 1)
	s.srv.streams.Go(func() { sent <- s.deliver(stream, items) })

	var err error
	select {
	case err = <-sent:
	case <-s.ctx.Done():
	}
	err = cmp.Or(context.Cause(s.ctx), err)
	s.cancel(err)
	<-producer
	err = cmp.Or(err, s.pass.leave(s.lease))
	s.abandon()
	return err
}

// abandon gives back the reservations that are still held. gRPC may still be sending the memory, so that is left to
// the garbage collector.
func (s *session) abandon() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for b := range s.buffers {
		b.release()
	}
	clear(s.buffers)
}

// receive handles the client's messages until it sends no more.
func (s *session) receive(stream feedpb.Feed_StreamServer) {
	for {
		m, err := stream.Recv()
		switch {
		case errors.Is(err, io.EOF):
			s.window.close()
			return
		case err != nil:
			s.cancel(left(err))
			return
		}
		if err := s.hear(m); err != nil {
			s.cancel(err)
			return
		}
	}
}

// hear handles one message of the client.
func (s *session) hear(m *feedpb.ClientMessage) error {
	switch {
	case m.GetOpen() != nil:
		return invalid("a second Open on one stream: open another stream")
	case m.GetRelease() != nil && s.lease == nil:
		return invalid("release of slots %v on a stream without slots", m.GetRelease().GetSlots())
	case m.GetRelease() != nil:
		return s.lease.release(m.GetRelease().GetSlots())
	}
	s.window.grant(m.GetCredit().GetN())
	s.pass.poke()
	return nil
}

// produce makes the batches of all epochs, and passes their rows to the readers and the batches to the sender, both
// in order.
func (s *session) produce(put func(item) error) error {
	p, epoch := s.first, s.spec.start.Epoch
	for n := 1; ; n++ {
		err := s.produceEpoch(p, epoch, put)
		if err != nil {
			return err
		}
		end := &feedpb.EpochEnd{Epoch: uint32(epoch), Batches: uint64(p.batches()),
			State: s.spec.state(s.ds, epoch+1, 0).JSON()}
		if err := put(item{end: end}); err != nil || n == s.spec.epochs || epoch == maxEpoch {
			return err
		}
		epoch++
		if p, err = s.spec.plan(s.ds, epoch, 0); err != nil {
			return err
		}
	}
}

func (s *session) produceEpoch(p plan, epoch int, put func(item) error) error {
	defer s.adopt(nil)
	quota := s.spec.bad.allows(p.seq.Len())
	for k := range p.batches() {
		if err := s.window.start(s.ctx); err != nil {
			return err
		}
		s.count.reserve.Add(1)
		b, err := s.newBatch(s.ctx, p, k, epoch)
		s.count.reserve.Add(-1)
		if err != nil {
			return err
		}
		if err := put(item{batch: b, quota: quota}); err != nil {
			return err
		}
		if b.by != s {
			continue
		}
		select { // do not take memory for the next batch before a reader can fill it
		case <-b.taken:
		case <-s.ctx.Done():
			return context.Cause(s.ctx)
		}
	}
	return nil
}

// deliver sends the batches as credits allow.
func (s *session) deliver(stream feedpb.Feed_StreamServer, items <-chan item) (err error) {
	to := sender(func(m any) error {
		if err := stream.SendMsg(m); err != nil {
			return left(err)
		}
		return nil
	})
	if err := to(s.hello()); err != nil {
		return err
	}
	if err := s.handedOver(); err != nil {
		return err
	}
	if s.lease != nil && s.lease.frames != nil {
		frames, end := s.sendFrames(s.lease.frames)
		defer func() { err = end(err) }()
		to = frames
	}
	bad := s.spec.start.Bad
	for it := range items {
		switch {
		case it.err != nil:
			return it.err
		case it.end != nil:
			bad = 0
			if err := to(&feedpb.ServerMessage{Kind: &feedpb.ServerMessage_EpochEnd{EpochEnd: it.end}}); err != nil {
				return err
			}
			continue
		}
		s.count.credit.Add(1)
		ok, err := s.window.send(s.ctx)
		s.count.credit.Add(-1)
		if err != nil || !ok {
			return err
		}
		select {
		case <-it.batch.done:
		case <-s.ctx.Done():
			return context.Cause(s.ctx)
		}
		s.window.busy(true)
		if s.ctx.Err() != nil { // a fenced stream delivers nothing more, even if batches are ready
			return context.Cause(s.ctx)
		}
		if err := it.batch.settle(s.spec, it.quota, &bad); err != nil {
			return err
		}
		s.count.send.Add(1)
		err = s.send(to, it.batch, it.batch.headerAfter(bad))
		s.count.send.Add(-1)
		if err != nil {
			return err
		}
		s.window.done()
	}
	return context.Cause(s.ctx)
}

// handoverPatience is how long a client may take to fetch its slots.
const handoverPatience = time.Minute

// handedOver waits for the handover of the session's slots. Without this, a session that is short, or fails at once,
// would be over before its client has the memory.
func (s *session) handedOver() error {
	if s.lease == nil {
		return nil
	}
	s.window.busy(true)
	defer s.window.busy(false)
	select {
	case <-s.lease.ready:
		return nil
	case <-s.ctx.Done():
		return context.Cause(s.ctx)
	case <-time.After(handoverPatience):
		return refused("the client asked for slots and did not fetch them within %v: open with slots 0",
			handoverPatience)
	}
}

// send sends one batch. Then the client owns its slot, or gRPC its buffer.
func (s *session) send(to sender, b *batch, h *feedpb.BatchHeader) error {
	total := int(h.GetTotalBytes())
	head := &feedpb.ServerMessage{Kind: &feedpb.ServerMessage_Batch{Batch: h}}
	if b.slot != 0 {
		if !s.lease.give(b) {
			return context.Cause(s.ctx)
		}
		if err := to(head); err != nil {
			return err
		}
		s.count.inSlots.Add(1)
	} else if err := s.sendChunks(to, head, b.buf, total); err != nil {
		return err
	}
	s.count.batches.Add(1)
	s.count.samples.Add(int64(h.GetValid()))
	s.srv.o.Delivered(int(h.GetValid()))
	s.count.bad.Add(int64(len(h.GetBad())))
	s.count.bytes.Add(int64(total))
	s.count.epoch.Store(int64(h.GetEpoch()))
	s.count.index.Store(int64(h.GetIndex()) + 1)
	return nil
}

func (s *session) sendChunks(to sender, head *feedpb.ServerMessage, buf *buffer, total int) error {
	shared := buf.shared(int64(total))
	defer shared.Free()
	if err := to(head); err != nil {
		return err
	}
	for off := 0; off < total; off += wire.MaxChunk {
		if s.ctx.Err() != nil {
			return context.Cause(s.ctx)
		}
		if err := to(&wire.Chunk{Data: shared.Slice(off, min(off+wire.MaxChunk, total))}); err != nil {
			return err
		}
	}
	return nil
}

// hello describes the session to its client.
func (s *session) hello() *feedpb.ServerMessage {
	sp, ds := s.spec, s.ds
	o := &feedpb.Opened{
		Session: sp.session, Dataset: ds.Version(), Samples: uint64(ds.Len()),
		Batch: uint32(sp.batch), GlobalBatch: uint64(sp.global()), World: uint32(sp.world), Rank: uint32(sp.rank),
		Batches: uint64(s.first.batches()), PerEpoch: uint64(sp.perEpoch(s.first)),
		Transform: sp.transformName(), TransformHash: sp.hash, Order: sp.orderName, Tail: string(sp.tail),
		Bad: sp.bad.text, Epoch: uint32(sp.start.Epoch), State: sp.start.JSON(), Label: sp.label.String(),
	}
	if sp.transform != nil {
		o.Layout = sp.transform.Layout()
	}
	o.Planes, _ = planes(sp.transform, sp.batch, 0)
	if s.lease != nil {
		mem := s.pass.mem
		o.Pool = &feedpb.Pool{Key: s.lease.key, Slots: uint32(mem.count()), SlotBytes: uint64(mem.bytes)}
	}
	return &feedpb.ServerMessage{Kind: &feedpb.ServerMessage_Opened{Opened: o}}
}

// perEpoch returns the rank's number of batches in a whole epoch. It depends on lengths only, so no order has to be
// computed again.
func (s *spec) perEpoch(p plan) int {
	share := order.Stripe(order.Sequential(p.n), s.world, s.rank, s.rank)
	return plan{seq: share, n: p.n, batch: s.batch, world: s.world, tail: s.tail}.batches()
}
