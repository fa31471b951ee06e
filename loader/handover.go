package loader

import (
	"context"
	"errors"
	"net"
	"time"

	"google.golang.org/grpc/peer"

	"github.com/shoalfs/shoal/internal/handover"
	"github.com/shoalfs/shoal/loader/feedpb"
)

// handoverReply comes with the descriptor, or with an error.
type handoverReply struct {
	V         int    `json:"v"`
	Slots     int    `json:"slots,omitempty"`
	SlotBytes int64  `json:"slot_bytes,omitempty"`
	Frames    bool   `json:"frames,omitempty"` // the stream's messages come on this connection
	Error     string `json:"error,omitempty"`
}

// slots returns how many slots a session is to have: those it asked for, if it came through a unix
// socket, since nobody else can be handed a descriptor.
func slots(ctx context.Context, o *feedpb.Open) int {
	p, ok := peer.FromContext(ctx)
	if !ok || p.Addr.Network() != "unix" {
		return 0
	}
	return int(min(o.GetSlots(), maxSlots))
}

// handover serves one connection that wants a descriptor, for as long as it stands.
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
		_ = handover.WriteReply(c, handoverReply{V: handover.Version, Error: err.Error()}) // it may be gone
		return
	}
	defer l.gone()
	if err := l.handOver(c, q.Frames); err != nil {
		s.log.Warn("feed: a handover of slots failed", "error", err)
		return
	}
	_ = c.SetDeadline(time.Time{})
	close(l.ready) // not before: the stream may end at once, and the memory with it
	// The end of the connection, whatever the way, is the end of the lease.
	if !q.Frames {
		_, _ = c.Read(make([]byte, 1)) // the client has no more to say on it
		return
	}
	if err := l.session.receiveFrames(c); err != nil {
		l.session.cancel(err)
	}
}

// attach makes c the connection of the lease that a key names. frames is c, or nil where messages go on the stream.
func (s *Server) attach(key string, c net.Conn, frames *net.UnixConn) (*lease, error) {
	unknown := errors.New("the key is of no session that is open: take it from Opened.pool of a stream, while that is open")
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
		return nil, errors.New("the key was used already: each stream's slots are handed over once")
	}
	l.used, l.conn, l.frames = true, c, frames
	return l, nil
}

// handOver sends the pass's memory.
func (l *lease) handOver(c *net.UnixConn, frames bool) error {
	m := l.pass.mem
	raw, err := m.file.SyscallConn()
	if err != nil {
		return err
	}
	failed := raw.Control(func(fd uintptr) { // the memory is not closed meanwhile
		err = handover.WriteReply(c, handoverReply{V: handover.Version, Slots: m.count(), SlotBytes: m.bytes, Frames: frames}, int(fd))
	})
	return errors.Join(failed, err)
}
