package loader_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/shoalfs/shoal/loader"
	"github.com/shoalfs/shoal/loader/feedclient"
	"github.com/shoalfs/shoal/loader/feedpb"
	"github.com/shoalfs/shoal/loader/internal/wire"
)

// framed opens a stream by hand, with its messages on the handover connection.
func framed(t *testing.T, addr string, o *feedpb.Open) (
	grpc.BidiStreamingClient[feedpb.ClientMessage, feedpb.ServerMessage], net.Conn) {
	t.Helper()
	stream, opened := plain(t, addr, o)
	c, answer := ask(t, addr, map[string]any{"v": 1, "key": opened.GetPool().GetKey(), "frames": true})
	if answer["frames"] != true {
		t.Fatalf("got %v", answer)
	}
	return stream, c
}

func credit(n uint32) *feedpb.ClientMessage {
	return &feedpb.ClientMessage{Kind: &feedpb.ClientMessage_Credit{Credit: &feedpb.Credit{N: n}}}
}

// frame is a message as it stands on the connection.
func frame(t *testing.T, m proto.Message) []byte {
	t.Helper()
	b, err := proto.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	return append(binary.LittleEndian.AppendUint32(nil, uint32(len(b))), b...)
}

// Headers, epochs' ends and batches that fit in no slot come on the handover connection, in order; credits and slots go
// on it or on the stream; the connection ends with the session, and the stream says how.
func TestFrames(t *testing.T) {
	for _, by := range []string{"connection", "stream"} {
		t.Run(by, func(t *testing.T) {
			r := start(t, &testDataset{Samples: 100}, loader.Options{}, 0)
			stream, c := framed(t, r.addr,
				&feedpb.Open{Batch: 8, Slots: 3, Credits: 1, Transform: "ramp(4,4)", Epochs: 2, Tail: "uneven"})
			say := func(m *feedpb.ClientMessage) {
				var err error
				if by == "stream" {
					err = stream.Send(m)
				} else {
					_, err = c.Write(frame(t, m))
				}
				if err != nil && r.server.Stats().Open > 0 { // the last ones may come too late
					t.Fatal(err)
				}
			}
			in := wire.NewFrameReader(c, wire.MaxServerFrame)
			var got []string
			for {
				var m feedpb.ServerMessage
				if err := in.RecvMsg(&m); errors.Is(err, io.EOF) {
					break
				} else if err != nil {
					t.Fatal(err)
				}
				switch {
				case m.GetBatch() != nil:
					got = append(got, fmt.Sprint(m.GetBatch().GetEpoch(), ".", m.GetBatch().GetIndex()))
					if m.GetBatch().GetSlot() == 0 {
						t.Error("a batch without a slot")
					}
					say(release(m.GetBatch().GetSlot()))
					say(credit(1))
				case m.GetEpochEnd() != nil:
					got = append(got, fmt.Sprint("end ", m.GetEpochEnd().GetEpoch()))
				}
			}
			var want []string
			for epoch := range 2 {
				for k := range 13 {
					want = append(want, fmt.Sprint(epoch, ".", k))
				}
				want = append(want, fmt.Sprint("end ", epoch))
			}
			if strings.Join(got, " ") != strings.Join(want, " ") {
				t.Errorf("got %v", got)
			}
			if m, err := stream.Recv(); !errors.Is(err, io.EOF) {
				t.Errorf("the stream has %v, %v", m, err)
			}
			r.empty(t)
		})
	}
}

// Nothing that a client writes on its handover connection harms anybody else: its session ends, and the stream says
// why.
func TestWrongFrames(t *testing.T) {
	r := start(t, &testDataset{Samples: 1000}, loader.Options{}, 0)
	long := binary.LittleEndian.AppendUint32(nil, 1<<31)
	for name, c := range map[string]struct {
		bytes []byte
		code  codes.Code
		text  string
	}{
		"too long":     {long, codes.InvalidArgument, "malformed frame: 2147483648 bytes, the limit is 65536"},
		"no message":   {[]byte("\x05\x00\x00\x00\xff\xff\xff\xff\xff"), codes.InvalidArgument, "malformed frame"},
		"not its slot": {frame(t, release(3)), codes.InvalidArgument, "release a slot once"},
		"a second Open": {frame(t, &feedpb.ClientMessage{Kind: &feedpb.ClientMessage_Open{Open: &feedpb.Open{}}}),
			codes.InvalidArgument, "a second Open"},
		"the end":         {nil, codes.Unavailable, "handover connection has closed"},
		"half a frame":    {[]byte("\x05\x00\x00"), codes.Unavailable, "handover connection has closed"},
		"half a message":  {[]byte("\x05\x00\x00\x00\x12"), codes.Unavailable, "handover connection has closed"},
		"an HTTP request": {[]byte("GET / HTTP/1.1\r\n\r\n"), codes.InvalidArgument, "malformed frame"},
	} {
		t.Run(name, func(t *testing.T) {
			stream, conn := framed(t, r.addr, &feedpb.Open{Batch: 4, Slots: 3, Credits: 1, Transform: "ramp(4,4)"})
			if _, err := conn.Write(c.bytes); err != nil {
				t.Fatal(err)
			}
			if c.code == codes.Unavailable {
				conn.Close()
			}
			_, err := stream.Recv()
			if loader.Code(err) != c.code || !strings.Contains(err.Error(), c.text) {
				t.Errorf("got %v", err)
			}
			r.empty(t)
		})
	}
}

// A session whose client reads no frames, and which is in the middle of a batch in Chunks, can be fenced: its memory
// comes back.
func TestFramesUnread(t *testing.T) {
	large, small := make([]byte, 8<<20), make([]byte, 100)
	r := start(t, &testDataset{Samples: 1000, Bytes: func(i int) []byte {
		if i == 0 {
			return large
		}
		return small
	}}, loader.Options{}, 0)
	open := &feedpb.Open{Session: "job", Batch: 1, Slots: 2, Credits: 1, Order: "sequential"}
	stream, unread := framed(t, r.addr, open)
	if _, err := io.ReadFull(unread, make([]byte, 1000)); err != nil { // more than a socket's buffer is still to come
		t.Fatal(err)
	}
	next, c := framed(t, r.addr, open)
	if _, err := stream.Recv(); loader.Code(err) != codes.Aborted {
		t.Errorf("got %v", err)
	}
	in := wire.NewFrameReader(c, wire.MaxServerFrame)
	total, dst := 0, make([]byte, wire.MaxChunk)
	for total < len(large) {
		m := wire.Incoming{Dst: dst}
		if err := in.RecvMsg(&m); err != nil {
			t.Fatalf("after %d bytes: %v", total, err)
		}
		total += m.N
	}
	c.Close()
	if _, err := next.Recv(); loader.Code(err) != codes.Unavailable {
		t.Errorf("got %v", err)
	}
	r.empty(t)
}

// A connection that loses what is on its way does not look like the end of the epoch, though the session has ended
// well.
func TestBrokenFrames(t *testing.T) {
	r := start(t, &testDataset{Samples: 16}, loader.Options{}, 0)
	between, err := net.Listen("unix", filepath.Join(t.TempDir(), "between.sock"))
	if err != nil {
		t.Fatal(err)
	}
	var relays sync.WaitGroup
	defer relays.Wait()
	defer between.Close()
	relays.Go(func() {
		for {
			c, err := between.Accept()
			if err != nil {
				return
			}
			relays.Go(func() { losing(t, c, strings.TrimPrefix(r.addr, "unix://")) })
		}
	})
	client, err := feedclient.Dial("unix://"+between.Addr().String(), feedclient.Security{})
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	s, err := client.Open(t.Context(), &feedpb.Open{Batch: 4, Slots: 8, Credits: 8, Transform: "ramp(4,4)", Epochs: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	for err == nil {
		_, err = s.Next()
	}
	var e *feedclient.Error
	if !errors.As(err, &e) || e.Code != codes.Unavailable || !strings.Contains(e.Text, "before its last message") {
		t.Errorf("got %v", err)
	}
}

// losing copies between a client and the server; of what comes on a handover connection behind the reply, only the
// first bytes.
func losing(t *testing.T, client net.Conn, to string) {
	defer client.Close()
	server, err := net.Dial("unix", to)
	if err != nil {
		t.Error(err)
		return
	}
	defer server.Close()
	first := make([]byte, 1)
	if _, err := io.ReadFull(client, first); err != nil {
		return
	}
	if _, err := server.Write(first); err != nil {
		return
	}
	go func() {
		_, _ = io.Copy(server, client) // ends with either
		_ = server.(*net.UnixConn).CloseWrite()
	}()
	if first[0] != 'S' {
		_, _ = io.Copy(client, server)
		return
	}
	head, oob := make([]byte, 4), make([]byte, 64)
	_, oobn, _, _, err := server.(*net.UnixConn).ReadMsgUnix(head, oob)
	if err != nil {
		return
	}
	_, _, err = client.(*net.UnixConn).WriteMsgUnix(head, oob[:oobn], nil)
	messages, parse := syscall.ParseSocketControlMessage(oob[:oobn])
	if parse != nil || len(messages) != 1 {
		t.Errorf("%d messages, %v", len(messages), parse)
		return
	}
	fds, parse := syscall.ParseUnixRights(&messages[0])
	for _, fd := range fds {
		_ = syscall.Close(fd) // this process's
	}
	if err != nil || parse != nil {
		return
	}
	_, _ = io.CopyN(client, server, int64(binary.LittleEndian.Uint32(head))+10)
	_, _ = io.Copy(io.Discard, server)
}
