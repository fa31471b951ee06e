package wire

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"

	"google.golang.org/protobuf/proto"

	"google.golang.org/grpc/mem"
)

// The longest frames accepted. A client sends credits and slots; a server sends a Chunk at most, or a header
// with the causes of many bad samples.
const (
	MaxClientFrame = 64 << 10
	MaxServerFrame = 8 << 20
)

const frameHead = 4 // the message's length, u32 LE

// FrameWriter sends messages on a plain connection, each preceded by its length; a length of 0 marks the end. Safe for
// concurrent use.
type FrameWriter struct {
	w io.Writer

	mu  sync.Mutex
	buf []byte
}

// NewFrameWriter returns a writer to w.
func NewFrameWriter(w io.Writer) *FrameWriter { return &FrameWriter{w: w} }

// SendMsg sends a protobuf message or a *Chunk, and drops the sender's reference to the chunk.
func (f *FrameWriter) SendMsg(m any) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if chunk, ok := m.(*Chunk); ok {
		return f.sendChunk(chunk)
	}
	b, err := proto.MarshalOptions{}.MarshalAppend(append(f.buf[:0], 0, 0, 0, 0), m.(proto.Message))
	if err != nil {
		return err
	}
	f.buf = b
	binary.LittleEndian.PutUint32(b, uint32(len(b)-frameHead))
	_, err = f.w.Write(b)
	return err
}

// End sends the end marker: no message follows.
func (f *FrameWriter) End() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	_, err := f.w.Write(make([]byte, frameHead))
	return err
}

func (f *FrameWriter) sendChunk(chunk *Chunk) error {
	data, err := codec{}.Marshal(chunk)
	if err != nil {
		return err
	}
	defer data.Free()
	parts := net.Buffers{binary.LittleEndian.AppendUint32(nil, uint32(data.Len()))}
	for _, b := range data {
		parts = append(parts, b.ReadOnlyData())
	}
	_, err = parts.WriteTo(f.w)
	return err
}

// FrameReader receives what a FrameWriter sends. It is for one goroutine.
type FrameReader struct {
	r    *bufio.Reader
	most uint32
	buf  []byte
}

// NewFrameReader returns a reader of frames of at most this many bytes. It reads ahead of the frames.
func NewFrameReader(r io.Reader, most uint32) *FrameReader {
	return &FrameReader{r: bufio.NewReaderSize(r, 16<<10), most: most}
}

// ErrFrame is the error of a malformed or too long frame.
var ErrFrame = errors.New("malformed frame")

// RecvMsg receives into a protobuf message or an *Incoming. The error is io.EOF after the end marker, an ErrFrame,
// or the connection's: io.ErrUnexpectedEOF if it ended early.
func (f *FrameReader) RecvMsg(m any) error {
	var head [frameHead]byte
	if err := f.fill(head[:]); err != nil {
		return err
	}
	n := binary.LittleEndian.Uint32(head[:])
	if n == 0 {
		return io.EOF
	}
	if n > f.most {
		return fmt.Errorf("%w: %d bytes, the limit is %d", ErrFrame, n, f.most)
	}
	if int(n) > cap(f.buf) {
		f.buf = make([]byte, n)
	}
	b := f.buf[:n]
	if err := f.fill(b); err != nil {
		return err
	}
	var err error
	if message, ok := m.(proto.Message); ok {
		err = proto.Unmarshal(b, message)
	} else {
		err = Codec().Unmarshal(mem.BufferSlice{mem.SliceBuffer(b)}, m)
	}
	if err != nil {
		return fmt.Errorf("%w: %w", ErrFrame, err)
	}
	return nil
}

func (f *FrameReader) fill(b []byte) error {
	_, err := io.ReadFull(f.r, b)
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	return err
}
