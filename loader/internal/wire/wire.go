// Package wire is the gRPC codec of the batch feed: protobuf, except that the payload of a Chunk is neither
// marshalled nor unmarshalled. The server sends it straight from the batch's buffer; the client copies it once,
// from the transport's buffers to its destination.
//
// The bytes on the wire are those of shoal.feed.v1, so the peer can use any protobuf implementation.
package wire

import (
	"encoding/binary"
	"fmt"
	"io"

	"google.golang.org/grpc/encoding"
	// The codec for everything that is not a chunk.
	_ "google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"

	"github.com/shoalfs/shoal/loader/feedpb"
)

// MaxChunk is the largest payload of a Chunk. Python's receiver accepts messages of at most 4 MiB by default,
// and messages of 32 MiB cut its throughput to a quarter.
const MaxChunk = 1 << 20

// The tags of ServerMessage.chunk and Chunk.data, both length-delimited.
const (
	tagChunk = 3<<3 | 2
	tagData  = 1<<3 | 2
)

// Chunk is a ServerMessage that holds a Chunk. Sending it passes the sender's reference to Data on to gRPC, which
// drops it once the bytes are sent.
type Chunk struct{ Data mem.Buffer }

// Incoming receives a ServerMessage. A Chunk's payload is copied to the start of Dst; a chunk that does not fit is
// an error.
type Incoming struct {
	Dst []byte

	IsChunk bool
	N       int                  // length of the payload, when IsChunk
	Message feedpb.ServerMessage // otherwise
}

// Codec returns the codec, for grpc.ForceServerCodecV2 and grpc.ForceCodecV2.
func Codec() encoding.CodecV2 { return codec{encoding.GetCodecV2("proto")} }

type codec struct{ proto encoding.CodecV2 }

// Name implements encoding.CodecV2. It is protobuf's, since those are the bytes on the wire.
func (codec) Name() string { return "proto" }

func (c codec) Marshal(v any) (mem.BufferSlice, error) {
	chunk, ok := v.(*Chunk)
	if !ok {
		return c.proto.Marshal(v)
	}
	n := uint64(chunk.Data.Len())
	inner := binary.AppendUvarint([]byte{tagData}, n)
	head := binary.AppendUvarint([]byte{tagChunk}, uint64(len(inner))+n)
	return mem.BufferSlice{mem.SliceBuffer(append(head, inner...)), chunk.Data}, nil
}

func (c codec) Unmarshal(data mem.BufferSlice, v any) error {
	in, ok := v.(*Incoming)
	if !ok {
		return c.proto.Unmarshal(data, v)
	}
	in.IsChunk, in.N = false, 0
	ok, err := in.chunk(data)
	if ok || err != nil {
		return err
	}
	// Chunks with fields of a later protocol version also come here, the slow way.
	if err := c.proto.Unmarshal(data, &in.Message); err != nil {
		return err
	}
	if k := in.Message.GetChunk(); k != nil {
		if len(k.GetData()) > len(in.Dst) {
			return tooLong(len(k.GetData()), len(in.Dst))
		}
		in.IsChunk, in.N = true, copy(in.Dst, k.GetData())
	}
	return nil
}

// chunk decodes data if it is a plain chunk.
func (in *Incoming) chunk(data mem.BufferSlice) (bool, error) {
	r := data.Reader()
	defer func() { _ = r.Close() }() // it only releases buffers
	if tag, err := r.ReadByte(); err != nil || tag != tagChunk {
		return false, nil // an empty message is valid: an unknown member of the oneof
	}
	size, err := binary.ReadUvarint(r)
	if err != nil || size != uint64(r.Remaining()) {
		return false, nil
	}
	if size == 0 {
		in.IsChunk = true
		return true, nil
	}
	if tag, err := r.ReadByte(); err != nil || tag != tagData {
		return false, nil
	}
	size, err = binary.ReadUvarint(r)
	if err != nil || size != uint64(r.Remaining()) {
		return false, nil
	}
	if size > uint64(len(in.Dst)) {
		return false, tooLong(int(size), len(in.Dst))
	}
	in.IsChunk, in.N = true, int(size)
	if _, err := io.ReadFull(r, in.Dst[:size]); err != nil {
		return false, fmt.Errorf("feed: read a chunk: %w", err)
	}
	return true, nil
}

func tooLong(n, room int) error {
	return fmt.Errorf("feed: chunk of %d bytes where %d are expected: the server sent more than it announced", n, room)
}
