package loader

import (
	"context"
	"errors"
	"net"
	"time"

	"google.golang.org/grpc/peer"

	"github.com/shoalfs/shoal/internal/handover"
	"github.com/shoalfs/shoal/loader/feedpb"
	"github.com/shoalfs/shoal/loader/internal/wire"
)

// slots returns how many slots a session gets: those it asked for if it came through a unix socket, which is the
// only way to pass a descriptor.
func slots(ctx context.Context, o *feedpb.Open) int {
	p, ok := peer.FromContext(ctx)
	if !ok || p.Addr.Network() != "unix" {
		return 0
	}
	return int(min(o.GetSlots(), maxSlots))
}

// handover serves one connection that asks for a descriptor, until it closes.
func (s *Server) handover(c *net.UnixConn) {
	var frames *net.UnixConn
	var l *lease
	q, err := handover.ReadRequest(c)
	if q.Frames {
		frames = c
	}
	if err == nil {
		l, err = s.attach(q.Key, c, frames)
	}
	if err != nil {
		s.log.Warn("feed: a handover of slots failed", "error", err)
		_ = handover.WriteReply(c, handover.SlotsReply{V: handover.Version, Error: err.Error()}) // it may be gone
		return
	}
	defer l.gone()
	if err := l.handOver(c, q.Frames); err != nil {
		s.log.Warn("feed: a handover of slots failed", "error", err)
		return
	}
	_ = c.SetDeadline(time.Time{})
	close(l.ready) // last: after this the stream may end at once, and the memory with it
	// However the connection ends, the lease ends with it.
	if !q.Frames {
		_, _ = c.Read(make([]byte, 1)) // the client sends nothing more
		return
	}
	if err := l.session.receiveFrames(c); err != nil {
		l.session.cancel(err)
	}
}

// attach binds c to the lease with this key. frames is c, or nil if messages go on the stream.
func (s *Server) attach(key string, c net.Conn, frames *net.UnixConn) (*lease, error) {
	unknown := errors.New("no open session has this key: use the key in Opened.pool of a stream that is open")
	s.passMu.Lock()
	l := s.leases[key]
	s.passMu.Unlock()
	if l == nil {
		return nil, unknown
	}
	l.pass.mu.Lock()
	defer l.pass.mu.Unlock()
	switch {
	case l.over:
		return nil, unknown
	case l.used:
		return nil, errors.New("the key was used before: each stream's slots are handed over once")
	}
	l.used, l.conn, l.frames = true, c, frames
	return l, nil
}

// handOver sends the descriptor of the pass's memory.
func (l *lease) handOver(c *net.UnixConn, frames bool) error {
	m := l.pass.mem
	raw, err := m.file.SyscallConn()
	if err != nil {
		return err
	}
	failed := raw.Control(func(fd uintptr) { // Control keeps the file open meanwhile
		err = handover.WriteReply(c,
			handover.SlotsReply{V: handover.Version, Slots: uint32(m.count()), SlotBytes: uint64(m.bytes),
				Frames: frames}, int(fd))
	})
	return errors.Join(failed, err)
}

// A client with slots may have the stream's messages on the connection that handed the slots over: one system call
// each, while gRPC would be the main cost of a reader of slots (docs/protocol.md, "Messages on the handover
// connection"). The stream itself still begins and ends the session, and reports how it ended.

// receiveFrames handles the client's messages on its handover connection, until that ends. An error is the client's.
func (s *session) receiveFrames(c *net.UnixConn) error {
	in := wire.NewFrameReader(c, wire.MaxClientFrame)
	for {
		var m feedpb.ClientMessage
		if err := in.RecvMsg(&m); errors.Is(err, wire.ErrFrame) {
			return invalid("on the handover connection: %w", err)
		} else if err != nil {
			return nil //nolint:nilerr // its end, in whatever way
		}
		if err := s.hear(&m); err != nil {
			return err
		}
	}
}

// sendFrames returns a sender of the session's messages on its handover connection. Cancelling the session ends the
// wait for a client that does not read. end stops the sender and, if err is nil, writes the end marker: without it a
// broken connection would look like a complete one. The connection stays open for as long as the client uses the slots.
func (s *session) sendFrames(c *net.UnixConn) (to sender, end func(err error) error) {
	frames := wire.NewFrameWriter(c)
	to = func(m any) error {
		if frames.SendMsg(m) != nil {
			return errLeaseGone
		}
		return nil
	}
	stop := context.AfterFunc(s.ctx, func() { _ = c.SetWriteDeadline(time.Unix(1, 0)) })
	return to, func(err error) error {
		defer stop()
		s.lease.told.Store(true)
		if err != nil {
			_ = c.CloseWrite() // it may be gone
			return err
		}
		if frames.End() != nil {
			return errLeaseGone
		}
		return nil
	}
}
