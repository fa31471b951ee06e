package loader

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/shoalfs/shoal/loader/feedpb"
	"github.com/shoalfs/shoal/loader/internal/wire"
)

// A client that has its slots may have the stream's messages beside them, on the connection that it got them by: a
// system call each, where gRPC costs more than all else that a reader of slots does (docs/protocol.md, "Messages on the
// handover connection"). The stream itself still begins and ends the session, and says how it ended.

// receiveFrames hears what the client sends on its handover connection, until that ends. The error is the client's.
func (s *session) receiveFrames(c *net.UnixConn) error {
	in := wire.NewFrameReader(c, wire.MaxClientFrame)
	for {
		var m feedpb.ClientMessage
		if err := in.RecvMsg(&m); errors.Is(err, wire.ErrFrame) {
			return coded(codes.InvalidArgument, fmt.Errorf("on the handover connection: %w", err))
		} else if err != nil {
			return nil //nolint:nilerr // its end, in whatever way
		}
		if err := s.hear(&m); err != nil {
			return err
		}
	}
}

// sendFrames returns what sends the session's messages on its handover connection. A session that is cancelled waits for
// no client that does not read. end says that nothing more comes, and, where err is nil, that this was all: without that
// word a connection that has broken would look like one that has ended. It stands for as long as the client uses the slots.
func (s *session) sendFrames(c *net.UnixConn) (frames sender, end func(err error) error) {
	to := frameSender{wire.NewFrameWriter(c)}
	stop := context.AfterFunc(s.ctx, func() { _ = c.SetWriteDeadline(time.Unix(1, 0)) })
	return to, func(err error) error {
		defer stop()
		s.lease.settle()
		if err != nil {
			_ = c.CloseWrite() // it may be gone
			return err
		}
		if to.End() != nil {
			return errLeaseGone
		}
		return nil
	}
}

// frameSender sends on the handover connection.
type frameSender struct{ *wire.FrameWriter }

// SendMsg implements sender.
func (f frameSender) SendMsg(m any) error {
	if f.FrameWriter.SendMsg(m) != nil {
		return errLeaseGone
	}
	return nil
}
