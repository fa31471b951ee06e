package wire_test

import (
	"bytes"
	"errors"
	"io"
	"testing"
	"testing/iotest"

	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"

	"github.com/shoalfs/shoal/loader/feedpb"
	"github.com/shoalfs/shoal/loader/internal/wire"
)

// What is sent comes, a byte at a time too, and the end is no error.
func TestFrames(t *testing.T) {
	var to bytes.Buffer
	w := wire.NewFrameWriter(&to)
	header := &feedpb.ServerMessage{
		Kind: &feedpb.ServerMessage_Batch{Batch: &feedpb.BatchHeader{Index: 7, TotalBytes: 5000, State: "{}"}}}
	payload := bytes.Repeat([]byte{3}, 5000)
	pool := &counter{}
	backing := bytes.Clone(payload)
	for _, m := range []any{header, &wire.Chunk{Data: mem.NewBuffer(&backing, pool)}, header} {
		if err := w.SendMsg(m); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.End(); err != nil {
		t.Fatal(err)
	}
	if pool.put != 1 {
		t.Errorf("the chunk was freed %d times", pool.put)
	}
	r := wire.NewFrameReader(iotest.OneByteReader(&to), 1<<20)
	in := wire.Incoming{Dst: make([]byte, 5000)}
	for i, want := range []proto.Message{header, nil, header} {
		if err := r.RecvMsg(&in); err != nil {
			t.Fatal(err)
		}
		if want == nil {
			if !in.IsChunk || !bytes.Equal(in.Dst[:in.N], payload) {
				t.Errorf("message %d is another chunk", i)
			}
		} else if in.IsChunk || !proto.Equal(&in.Message, want) {
			t.Errorf("message %d is %v", i, &in.Message)
		}
	}
	if err := r.RecvMsg(&in); !errors.Is(err, io.EOF) {
		t.Errorf("at the end: %v", err)
	}
	if err := r.RecvMsg(&in); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("at the connection's end: %v", err)
	}
}

// FuzzFrames: whatever comes, a frame is a message or an error, and no more is kept than is allowed.
func FuzzFrames(f *testing.F) {
	f.Add([]byte("\x02\x00\x00\x00\x12\x00\x00\x00\x00\x00"))
	f.Add([]byte("\xff\xff\xff\xff"))
	f.Add([]byte("\x01\x00\x00\x00\xff"))
	f.Add([]byte("\x05\x00\x00\x00\x12"))
	f.Fuzz(func(t *testing.T, data []byte) {
		r := wire.NewFrameReader(bytes.NewReader(data), 100)
		for read := 0; ; {
			var m feedpb.ClientMessage
			err := r.RecvMsg(&m)
			if err != nil {
				if !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) && !errors.Is(err, wire.ErrFrame) {
					t.Fatal(err)
				}
				return
			}
			if read += 4; read > len(data) {
				t.Fatalf("more frames than bytes: %q", data)
			}
		}
	})
}
