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

// A client with slots may have the stream's messages on the connection that handed the slots over: one system call
// each, while gRPC would be the main cost of a reader of slots (docs/protocol.md, "Messages on the handover
// connection"). The stream itself still begins and ends the session, and reports how it ended.

// receiveFrames handles the client's messages on its handover connection, until that ends. An error is the client's.
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

// sendFrames returns a sender of the session's messages on its handover connection. Cancelling the session ends the wait
// for a client that does not read. end stops the sender and, if err is nil, writes the end marker: without it a broken
// connection would look like a complete one. The connection stays open for as long as the client uses the slots.
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

func (f frameSender) SendMsg(m any) error {
	if f.FrameWriter.SendMsg(m) != nil {
		return errLeaseGone
	}
	return nil
}
