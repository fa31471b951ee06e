package relay

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/shoalfs/shoal/gpuingest"
	"github.com/shoalfs/shoal/loader/feedpb"
)

const deviceWord = "|device" // requests the host's part of a transform from the server

// session is one trainer's stream of batches on the device.
type session struct {
	srv    *Server
	log    *slog.Logger
	ctx    context.Context
	cancel context.CancelCauseFunc
	up     feedpb.Feed_StreamClient
	upMu   sync.Mutex // of up.Send
	opened *feedpb.Opened
	slots  *slots
	ring   Ring
	pool   *pool
	finish *gpuingest.Finish // nil: batches come finished
	full   *layout           // of a full batch
	total  int               // bytes of a full batch, as the server sends it
	sent   int
}

// item is something for the trainer, in the server's order: a batch on its way through the device, or a message.
type item struct {
	message *feedpb.ServerMessage
	layout  *layout // of a batch; nil for other messages
	buffer  int
	slot    int
	started time.Time
}

var errLost = status.Error(codes.Canceled, "the client released its memory")

// open opens the session at the server, and prepares the device for it. An unserved error means that the server
// accepts the session but the device does not; nothing is held then.
func (s *Server) open(ctx context.Context, o *feedpb.Open, log *slog.Logger) (_ *session, err error) {
	ses := &session{srv: s, log: log}
	ses.ctx, ses.cancel = context.WithCancelCause(ctx)
	defer func() {
		if err != nil {
			ses.close()
		}
	}()
	o = proto.CloneOf(o)
	buffers := min(int(o.GetSlots()), maxBuffers)
	credits := o.GetCredits()
	// Without credits the server's stream cannot end before this process has its slots.
	o.Device, o.Slots, o.Readonly, o.Credits = "", credits+2, false, 0
	o.Transform, _ = gpuingest.CutDevice(o.GetTransform()) // which happens here anyway
	// The server reports errors in the transform.
	if part, err := gpuingest.Split(o.GetTransform()); err == nil && part != nil {
		ses.finish = part.Finish()
		o.Transform += deviceWord
	}
	if ses.up, err = s.feed.Stream(ses.ctx); err != nil {
		return nil, err
	}
	if err := ses.send(&feedpb.ClientMessage{Kind: &feedpb.ClientMessage_Open{Open: o}}); err != nil {
		return nil, err
	}
	first, err := ses.up.Recv()
	if err != nil {
		return nil, err
	}
	ses.opened = first.GetOpened()
	if ses.opened == nil {
		return nil, status.Errorf(codes.Internal, "the server's first message is %T", first.GetKind())
	}
	if err := ses.prepare(buffers, int(o.GetSlots())); err != nil {
		return nil, &unserved{err}
	}
	return ses, ses.send(&feedpb.ClientMessage{
		Kind: &feedpb.ClientMessage_Credit{Credit: &feedpb.Credit{N: credits}}})
}

// prepare makes ring and pool for the opened session.
func (ses *session) prepare(buffers, own int) error {
	o, dev := ses.opened, ses.srv.o.Device
	for _, p := range o.GetPlanes() {
		if p.GetName() == planeData && p.GetLength() == 0 {
			return errors.New("samples of different lengths do not fit buffers of one size")
		}
		ses.total = max(ses.total, int(p.GetOffset()+p.GetLength()))
	}
	var err error
	if ses.slots, err = openSlots(ses.ctx, ses.srv.o.Feed, o.GetPool(), own, ses.total); err != nil {
		return err
	}
	if ses.full, err = lay(o.GetPlanes(), int(o.GetBatch()), ses.slots.header, ses.finish); err != nil {
		return err
	}
	ses.full.job.Again = true
	if ses.ring, err = dev.Open(ses.slots.mem, ses.slots.bytes, buffers, ses.full.total); err != nil {
		return err
	}
	if ses.pool, err = newPool(dev, ses.ring, buffers, ses.full.total-ses.full.small, func() {
		ses.cancel(errLost)
	}); err != nil {
		return err
	}
	s := ses.srv
	s.mu.Lock()
	s.pools[ses.pool.key] = ses.pool
	s.mu.Unlock()
	s.sessions.Add(1)
	s.buffers.Add(int64(buffers))
	s.bytes.Add(int64(buffers * ses.ring.BufferBytes()))
	o.Planes, o.Pool = ses.full.planes, &feedpb.Pool{Key: ses.pool.key, Slots: uint32(buffers),
		SlotBytes: uint64(ses.ring.BufferBytes()), Device: dev.Name()}
	o.Transform, _ = gpuingest.CutDevice(o.GetTransform())
	if ses.finish != nil {
		o.Layout = ses.finish.Layout
	}
	ses.log.Info("session on the device", "device", dev.Name(), "buffers", buffers,
		"buffer_bytes", ses.ring.BufferBytes(),
		"transform", o.GetTransform(), "kernel", ses.finish != nil, "shared_memory", ses.slots.shared())
	return nil
}

// close ends the session. None of its goroutines runs any more. A trainer that still works on batches has a connection
// open for their memory: that and its events, which no other process may use once they are destroyed, stay until then.
func (ses *session) close() {
	ses.cancel(nil)
	for err := error(nil); ses.up != nil && err == nil; { // until gRPC has let go of the stream
		_, err = ses.up.Recv()
	}
	var errs []error
	if ses.ring != nil {
		errs = append(errs, ses.ring.End())
	}
	if ses.slots != nil {
		errs = append(errs, ses.slots.close(errors.Join(errs...) != nil))
	}
	s, p, unclaimed := ses.srv, ses.pool, true
	if p != nil {
		s.mu.Lock()
		_, unclaimed = s.pools[p.key]
		delete(s.pools, p.key)
		s.mu.Unlock()
		s.sessions.Add(-1)
		s.buffers.Add(-int64(len(p.out)))
		s.held.Add(-int64(p.abandon()))
	}
	if unclaimed {
		ses.free(errs)
	} else {
		s.streams.Go(func() {
			<-p.gone
			ses.free(errs)
		})
	}
}

// free frees what the trainer may have.
func (ses *session) free(errs []error) {
	if p := ses.pool; p != nil {
		ses.srv.bytes.Add(-int64(len(p.out) * ses.ring.BufferBytes()))
		errs = append(errs, p.close())
	}
	if ses.ring != nil {
		errs = append(errs, ses.ring.Close())
	}
	if err := errors.Join(errs...); err != nil {
		ses.log.Error("closing a session on the device", "error", err)
	}
}

// send sends to the server, from any goroutine. That the stream has ended is no error here: Recv knows why.
func (ses *session) send(m *feedpb.ClientMessage) error {
	ses.upMu.Lock()
	defer ses.upMu.Unlock()
	if err := ses.up.Send(m); !errors.Is(err, io.EOF) {
		return err
	}
	return nil
}

// run serves the session to its end.
func (ses *session) run(down feedpb.Feed_StreamServer) error {
	defer ses.close()
	items := make(chan item, len(ses.pool.out))
	var ended error
	go func() { // ends when the session is cancelled; items is closed then
		defer close(items)
		ended = ses.receive(items)
	}()
	ses.srv.streams.Go(func() { ses.requests(down) }) // ends with the handler's context
	err := down.Send(&feedpb.ServerMessage{Kind: &feedpb.ServerMessage_Opened{Opened: ses.opened}})
	if err == nil {
		// A short stream could end before the client has fetched the memory that its batches lie in.
		select {
		case <-ses.pool.claimed:
		case <-ses.ctx.Done():
		}
	}
	for it := range items {
		if err == nil {
			err = context.Cause(ses.ctx)
		}
		if err == nil {
			err = ses.deliver(down, it)
		}
		if err != nil {
			ses.cancel(err)
		}
	}
	// The server's error comes after all batches before it.
	if err == nil && !errors.Is(ended, io.EOF) {
		err = ended
	}
	return err
}

// receive reads the server's messages and starts their delivery. It returns why there are no more: io.EOF at the end.
func (ses *session) receive(items chan<- item) error {
	for {
		end := ses.srv.o.Range("shoal: wait for the server")
		m, err := ses.up.Recv()
		end()
		if err != nil {
			if cause := context.Cause(ses.ctx); cause != nil {
				return cause
			}
			return err
		}
		it := item{message: m}
		if m.GetBatch() != nil {
			if it, err = ses.start(m); err != nil {
				return err
			}
		}
		select {
		case items <- it:
		case <-ses.ctx.Done():
			return context.Cause(ses.ctx)
		}
	}
}

// start begins the transfer of a batch to a buffer.
func (ses *session) start(m *feedpb.ServerMessage) (item, error) {
	l, h := ses.full, m.GetBatch()
	if h.GetRows() != ses.opened.GetBatch() || h.GetTotalBytes() != uint64(ses.total) {
		var err error
		if l, err = lay(h.GetPlanes(), int(h.GetRows()), ses.slots.header, ses.finish); err != nil {
			return item{}, err
		}
	}
	slot, err := ses.arrive(h)
	if err != nil {
		return item{}, err
	}
	buffer, err := ses.buffer()
	if err != nil {
		return item{}, err
	}
	it := item{message: m, layout: l, buffer: buffer, slot: slot, started: time.Now()}
	if err := ses.ring.Start(slot, buffer, l.job); err != nil {
		return item{}, deviceFailed(err)
	}
	return it, nil
}

// deviceFailed is the error that a trainer gets when the device fails in the middle of its stream.
func deviceFailed(err error) error {
	return status.Errorf(codes.Unavailable, "shoal-gpu: %v: open again with the last state, or at `shoal serve`'s own "+
		"socket to go on without the device", err)
}

// arrive returns the slot of a batch, once all of the batch is there.
func (ses *session) arrive(h *feedpb.BatchHeader) (int, error) {
	s := ses.slots
	slot := int(h.GetSlot()) - 1
	if s.shared() {
		if slot < 0 || slot >= s.count {
			return 0, status.Errorf(codes.Internal, "the server names slot %d of %d for a batch of %d bytes",
				slot+1, s.count, h.GetTotalBytes())
		}
		return slot, nil
	}
	select {
	case slot = <-s.free:
	case <-ses.ctx.Done():
		return 0, context.Cause(ses.ctx)
	}
	mem := s.slot(slot)
	if h.GetTotalBytes() > uint64(len(mem)) {
		return 0, status.Errorf(codes.Internal, "a batch of %d bytes where %d were announced",
			h.GetTotalBytes(), len(mem))
	}
	for rest := mem[:h.GetTotalBytes()]; len(rest) > 0; {
		m, err := ses.up.Recv()
		if err != nil {
			return 0, err
		}
		data := m.GetChunk().GetData()
		if m.GetChunk() == nil || len(data) > len(rest) {
			return 0, status.Errorf(codes.Internal, "the server sent %T of %d bytes in the middle of a batch",
				m.GetKind(), len(data))
		}
		rest = rest[copy(rest, data):]
	}
	return slot, nil
}

// freePoll is the interval of checks whether the trainer's work on a released buffer is over. The device could wait for
// that by itself, but a trainer that is killed may leave it waiting for ever.
const freePoll = 200 * time.Microsecond

// buffer waits for a free buffer.
func (ses *session) buffer() (int, error) {
	begin := time.Now()
	defer ses.srv.o.Range("shoal: wait for a free buffer")()
	for {
		b, released, err := ses.pool.take()
		if err != nil {
			return 0, deviceFailed(err)
		}
		if b >= 0 {
			ses.srv.waited.Add(time.Since(begin).Microseconds())
			return b, nil
		}
		var soon <-chan time.Time
		if released { // no message reports the end of another process's work
			soon = time.After(freePoll)
		}
		select {
		case <-ses.pool.wake:
		case <-soon:
		case <-ses.ctx.Done():
			return 0, context.Cause(ses.ctx)
		}
	}
}

// deliver waits for the device and notifies the trainer.
func (ses *session) deliver(down feedpb.Feed_StreamServer, it item) error {
	if it.layout == nil {
		return down.Send(it.message)
	}
	if err := ses.ring.Wait(it.buffer); err != nil {
		return deviceFailed(err)
	}
	h := it.message.GetBatch()
	p := ses.pool
	it.layout.host(p.hostMem[it.buffer*p.hostBytes:][:p.hostBytes], ses.slots.slot(it.slot))
	if ses.slots.shared() {
		if err := ses.send(&feedpb.ClientMessage{Kind: &feedpb.ClientMessage_Release{
			Release: &feedpb.Release{Slots: []uint32{h.GetSlot()}}}}); err != nil {
			return err
		}
	} else {
		ses.slots.free <- it.slot
	}
	ses.srv.finished.Add(time.Since(it.started).Microseconds())
	h.Planes, h.TotalBytes, h.Slot = it.layout.planes, uint64(it.layout.total), uint32(it.buffer)+1
	ses.pool.give(it.buffer)
	ses.srv.held.Add(1)
	end := ses.srv.o.Range("shoal: tell the trainer")
	err := down.Send(it.message)
	end()
	if err != nil {
		return err
	}
	ses.sent++
	ses.srv.batches.Add(1)
	return nil
}

// requests handles the trainer's messages until it sends no more.
func (ses *session) requests(down feedpb.Feed_StreamServer) {
	for {
		m, err := down.Recv()
		switch {
		case errors.Is(err, io.EOF): // this side still gives slots back
			return
		case err != nil:
			ses.cancel(err)
			return
		}
		if r := m.GetRelease(); r != nil {
			n, err := ses.pool.release(r.GetSlots())
			ses.srv.held.Add(-int64(n))
			if err != nil {
				ses.cancel(status.Error(codes.InvalidArgument, err.Error()))
				return
			}
			continue
		}
		if err := ses.send(m); err != nil {
			return // receive knows why
		}
	}
}
