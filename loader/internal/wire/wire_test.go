package wire_test

import (
	"bytes"
	"testing"

	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/shoalfs/shoal/loader/feedpb"
	"github.com/shoalfs/shoal/loader/internal/wire"
)

// counter is a pool that counts what comes back.
type counter struct{ put int }

func (c *counter) Get(n int) *[]byte { b := make([]byte, n); return &b }
func (c *counter) Put(*[]byte)       { c.put++ }

// What the codec sends is what protobuf would, and it is not copied.
func TestChunkIsProtobuf(t *testing.T) {
	for _, n := range []int{0, 1, 127, 128, 5000, 16383, 16384, wire.MaxChunk} {
		payload := bytes.Repeat([]byte{7}, n)
		backing := make([]byte, n, max(n, 4096))
		copy(backing, payload)
		pool := &counter{}
		root := mem.NewBuffer(&backing, pool)
		out, err := wire.Codec().Marshal(&wire.Chunk{Data: root.Slice(0, n)})
		if err != nil {
			t.Fatal(err)
		}
		if last := out[len(out)-1].ReadOnlyData(); n > 0 && &last[0] != &backing[0] {
			t.Errorf("%d bytes: the payload was copied", n)
		}
		var m feedpb.ServerMessage
		if err := proto.Unmarshal(out.Materialize(), &m); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(m.GetChunk().GetData(), payload) || m.GetChunk() == nil {
			t.Errorf("%d bytes: protobuf reads another chunk", n)
		}
		in := wire.Incoming{Dst: make([]byte, n)}
		if err := wire.Codec().Unmarshal(out, &in); err != nil || !in.IsChunk || in.N != n ||
			!bytes.Equal(in.Dst, payload) {
			t.Errorf("%d bytes: came back as %d, %v", n, in.N, err)
		}
		out.Free()
		if pool.put != 0 {
			t.Errorf("%d bytes: freed while a reference was held", n)
		}
		if root.Free(); pool.put != 1 {
			t.Errorf("%d bytes: not freed", n)
		}
	}
}

func TestChunkThatDoesNotFit(t *testing.T) {
	data, err := proto.Marshal(chunk(100))
	if err != nil {
		t.Fatal(err)
	}
	later := append(bytes.Clone(data), protowire.AppendVarint(protowire.AppendTag(nil, 99, protowire.VarintType), 1)...)
	for _, message := range [][]byte{data, later} { // the short way and protobuf's
		in := wire.Incoming{Dst: make([]byte, 99)}
		if err := wire.Codec().Unmarshal(mem.BufferSlice{mem.SliceBuffer(message)}, &in); err == nil {
			t.Error("100 bytes went into 99")
		}
		in = wire.Incoming{Dst: make([]byte, 150)}
		if err := wire.Codec().Unmarshal(mem.BufferSlice{mem.SliceBuffer(message)}, &in); err != nil || in.N != 100 {
			t.Errorf("100 bytes into 150: %d, %v", in.N, err)
		}
	}
}

func chunk(n int) *feedpb.ServerMessage {
	return &feedpb.ServerMessage{
		Kind: &feedpb.ServerMessage_Chunk{Chunk: &feedpb.Chunk{Data: bytes.Repeat([]byte{9}, n)}}}
}

// FuzzUnmarshal compares with protobuf, for messages cut into buffers anywhere.
func FuzzUnmarshal(f *testing.F) {
	for _, m := range []*feedpb.ServerMessage{
		{}, chunk(0), chunk(3), chunk(300),
		{Kind: &feedpb.ServerMessage_EpochEnd{EpochEnd: &feedpb.EpochEnd{Epoch: 3}}},
	} {
		data, err := proto.Marshal(m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data, 1)
		f.Add(append(data, data...), 4)
	}
	f.Fuzz(func(t *testing.T, data []byte, cut int) {
		var want feedpb.ServerMessage
		wantErr := proto.Unmarshal(data, &want)
		slice := mem.BufferSlice{mem.SliceBuffer(data)}
		if cut > 0 && cut < len(data) {
			slice = mem.BufferSlice{mem.SliceBuffer(data[:cut]), mem.SliceBuffer(data[cut:])}
		}
		in := wire.Incoming{Dst: make([]byte, len(data))}
		if err := wire.Codec().Unmarshal(slice, &in); (err == nil) != (wantErr == nil) {
			t.Fatalf("error %v, protobuf's %v", err, wantErr)
		}
		if wantErr != nil {
			return
		}
		if in.IsChunk != (want.GetChunk() != nil) ||
			in.IsChunk && !bytes.Equal(in.Dst[:in.N], want.GetChunk().GetData()) {
			t.Fatalf("chunk %v of %d bytes, protobuf has %v", in.IsChunk, in.N, &want)
		}
		if !in.IsChunk && !proto.Equal(&in.Message, &want) {
			t.Fatalf("%v, protobuf has %v", &in.Message, &want)
		}
	})
}
