// Package feedclient is a client of the batch feed in Go: what `shoal feed`, tests and benchmarks
// use. Trainers use python/shoal.
//
// A stream has no goroutine of its own: batches that the server was given credit for wait in gRPC's
// receive window, which is made large enough for a batch or two.
package feedclient

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash"
	"io"
	"strings"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"

	"github.com/shoalfs/shoal/loader/feedpb"
	"github.com/shoalfs/shoal/loader/internal/wire"
)

// The receive windows. A batch of 256 images of 224×224 has 38 MB; with a window of 64 KiB, gRPC's
// own, every chunk costs 16 round trips.
const (
	streamWindow = 32 << 20
	connWindow   = 64 << 20
)

// Client is a connection to a feed. Safe for concurrent use.
type Client struct {
	addr string
	conn *grpc.ClientConn
	feed feedpb.FeedClient
}

// Dial prepares a connection to unix:///path or tcp://host:port. It is made at the first use.
func Dial(addr string) (*Client, error) {
	target := addr
	if host, ok := strings.CutPrefix(addr, "tcp://"); ok {
		target = "dns:///" + host
	} else if !strings.HasPrefix(addr, "unix:///") {
		return nil, fmt.Errorf("feed address %q: must be unix:///PATH or tcp://HOST:PORT", addr)
	}
	conn, err := grpc.NewClient(target,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithNoProxy(), // the proxy of the environment is for the web
		grpc.WithDefaultCallOptions(grpc.ForceCodecV2(wire.Codec())),
		grpc.WithStaticStreamWindowSize(streamWindow), grpc.WithStaticConnWindowSize(connWindow),
		grpc.WithReadBufferSize(128<<10),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 30 * time.Second, Timeout: 20 * time.Second}),
	)
	if err != nil {
		return nil, fmt.Errorf("feed address %q: %w", addr, err)
	}
	return &Client{addr, conn, feedpb.NewFeedClient(conn)}, nil
}

// Close closes the connection and with it all streams.
func (c *Client) Close() error { return c.conn.Close() }

// Info tells what is being served.
func (c *Client) Info(ctx context.Context) (*feedpb.InfoResponse, error) {
	r, err := c.feed.Info(ctx, &feedpb.InfoRequest{})
	return r, c.explain(err)
}

// Stats returns the server's counters, one JSON object.
func (c *Client) Stats(ctx context.Context) ([]byte, error) {
	r, err := c.feed.Stats(ctx, &feedpb.StatsRequest{})
	return []byte(r.GetJson()), c.explain(err)
}

// Error is a failure that the server reported, or that of reaching it.
type Error struct {
	Addr string
	Code codes.Code
	Text string
}

// Error implements error.
func (e *Error) Error() string {
	if e.Code == codes.Unavailable && strings.HasSuffix(e.Text, syscall.EACCES.Error()) {
		return fmt.Sprintf("feed %s: %s (the socket is for others: see --socket-mode and --socket-group of `shoal serve`)", e.Addr, e.Text)
	}
	if e.Code == codes.Unavailable {
		return fmt.Sprintf("feed %s: %s (is `shoal serve` running there? start it, or check the address)", e.Addr, e.Text)
	}
	return fmt.Sprintf("feed %s: %s", e.Addr, e.Text)
}

func (c *Client) explain(err error) error {
	if err == nil || errors.Is(err, io.EOF) {
		return err
	}
	st, ok := status.FromError(err)
	if !ok {
		return fmt.Errorf("feed %s: %w", c.addr, err)
	}
	text := st.Message()
	for _, wrapping := range []string{`connection error: desc = "`, "transport: Error while dialing: "} { // gRPC's, of a plain error
		if rest, ok := strings.CutPrefix(text, wrapping); ok {
			text = strings.TrimSuffix(rest, `"`)
		}
	}
	return &Error{c.addr, st.Code(), text}
}

// Stream is one rank's batches. It is for one goroutine.
type Stream struct {
	client *Client
	stream grpc.BidiStreamingClient[feedpb.ClientMessage, feedpb.ServerMessage]
	cancel context.CancelFunc
	opened *feedpb.Opened
	state  string
	free   [][]byte
	owed   uint32 // credits for batches that were taken
	stall  time.Duration
	ended  int
}

// Open opens a session. Credits, if 0, become 2: one batch to work on and one on its way.
func (c *Client) Open(ctx context.Context, o *feedpb.Open) (*Stream, error) {
	if o.GetCredits() == 0 {
		o.Credits = 2
	}
	ctx, cancel := context.WithCancel(ctx)
	fail := func(err error) (*Stream, error) {
		cancel()
		return nil, c.explain(err)
	}
	stream, err := c.feed.Stream(ctx)
	if err != nil {
		return fail(err)
	}
	// io.EOF means that the stream has ended; Recv knows why.
	if err := stream.Send(&feedpb.ClientMessage{Kind: &feedpb.ClientMessage_Open{Open: o}}); err != nil && !errors.Is(err, io.EOF) {
		return fail(err)
	}
	m, err := stream.Recv()
	if err != nil {
		return fail(err)
	}
	if m.GetOpened() == nil {
		return fail(fmt.Errorf("the server's first message is %T: not a Shoal feed of version 1", m.GetKind()))
	}
	return &Stream{client: c, stream: stream, cancel: cancel, opened: m.GetOpened(), state: m.GetOpened().GetState()}, nil
}

// Opened describes the session.
func (s *Stream) Opened() *feedpb.Opened { return s.opened }

// State is what Open needs to go on after the last batch that Next returned.
func (s *Stream) State() string { return s.state }

// Stalled is the time that Next has waited for batches to begin.
func (s *Stream) Stalled() time.Duration { return s.stall }

// Epochs is the number of epochs that Next has seen the end of.
func (s *Stream) Epochs() int { return s.ended }

// Next returns the next batch, over epochs' ends, and io.EOF after the last. The batch is the
// caller's until its Release.
func (s *Stream) Next() (*Batch, error) {
	if s.owed > 0 {
		m := &feedpb.ClientMessage{Kind: &feedpb.ClientMessage_Credit{Credit: &feedpb.Credit{N: s.owed}}}
		if err := s.stream.Send(m); err != nil && !errors.Is(err, io.EOF) {
			return nil, s.client.explain(err)
		}
		s.owed = 0
	}
	start := time.Now()
	var in wire.Incoming
	for {
		if err := s.stream.RecvMsg(&in); err != nil {
			return nil, s.client.explain(err)
		}
		if end := in.Message.GetEpochEnd(); end != nil {
			s.state = end.GetState()
			s.ended++
			continue
		}
		if in.Message.GetBatch() != nil {
			break
		}
	}
	s.stall += time.Since(start)
	h := in.Message.GetBatch()
	b, err := newBatch(s, h)
	if err != nil {
		return nil, err
	}
	for in.Dst = b.buf; len(in.Dst) > 0; in.Dst = in.Dst[in.N:] {
		if err := s.stream.RecvMsg(&in); err != nil {
			return nil, s.client.explain(err)
		}
		if !in.IsChunk {
			return nil, fmt.Errorf("feed %s: %T in the middle of a batch", s.client.addr, in.Message.GetKind())
		}
	}
	s.state = h.GetState()
	s.owed++
	return b, nil
}

// Close ends the session.
func (s *Stream) Close() {
	s.cancel()
	for { // until gRPC has let go of the stream
		if err := s.stream.RecvMsg(&wire.Incoming{}); err != nil {
			return
		}
	}
}

// Batch is one batch.
type Batch struct {
	Header *feedpb.BatchHeader

	stream *Stream
	buf    []byte
	data   []byte
	ids    []byte
	labels []byte
	valid  []byte
	off    []byte
}

func newBatch(s *Stream, h *feedpb.BatchHeader) (*Batch, error) {
	b := &Batch{Header: h, stream: s}
	n := h.GetTotalBytes()
	if k := len(s.free); k > 0 && uint64(cap(s.free[k-1])) >= n {
		b.buf = s.free[k-1][:n]
		s.free = s.free[:k-1]
	} else {
		b.buf = make([]byte, n)
	}
	rows := uint64(h.GetRows())
	for _, p := range h.GetPlanes() {
		end := p.GetOffset() + p.GetLength()
		if end < p.GetOffset() || end > n {
			return nil, fmt.Errorf("feed %s: plane %s lies outside the batch", s.client.addr, p.GetName())
		}
		plane := b.buf[p.GetOffset():end]
		want := uint64(len(plane))
		switch p.GetName() {
		case "data":
			b.data = plane
		case "label":
			b.labels, want = plane, 8*rows
		case "id":
			b.ids, want = plane, 8*rows
		case "valid":
			b.valid, want = plane, rows
		case "offsets":
			b.off, want = plane, 8*(rows+1)
		}
		if want != uint64(len(plane)) {
			return nil, fmt.Errorf("feed %s: plane %s has %d bytes for %d rows", s.client.addr, p.GetName(), len(plane), rows)
		}
	}
	if b.ids == nil || b.labels == nil || b.valid == nil || b.data == nil && rows > 0 {
		return nil, fmt.Errorf("feed %s: a batch without its planes", s.client.addr)
	}
	return b, nil
}

// Release lets the memory of the batch be used for another.
func (b *Batch) Release() {
	b.stream.free = append(b.stream.free, b.buf)
	*b = Batch{Header: b.Header}
}

// Rows returns the number of rows.
func (b *Batch) Rows() int { return len(b.valid) }

// Valid reports whether row i holds a sample.
func (b *Batch) Valid(i int) bool { return b.valid[i] != 0 }

// ID returns row i's sample number, -1 for padding.
func (b *Batch) ID(i int) int64 { return int64(binary.LittleEndian.Uint64(b.ids[8*i:])) }

// Label returns row i's class number, -100 if the row is not valid.
func (b *Batch) Label(i int) int64 { return int64(binary.LittleEndian.Uint64(b.labels[8*i:])) }

// Row returns row i's bytes.
func (b *Batch) Row(i int) []byte {
	if b.off != nil {
		from, to := binary.LittleEndian.Uint64(b.off[8*i:]), binary.LittleEndian.Uint64(b.off[8*i+8:])
		return b.data[from:to]
	}
	n := len(b.data) / b.Rows()
	return b.data[i*n : (i+1)*n]
}

// Bytes returns the whole buffer.
func (b *Batch) Bytes() []byte { return b.buf }

// Digest is SHA-256 over (sample as u64 little-endian, length as u64 little-endian, bytes) of all
// valid rows in order of delivery. Padding and skipped samples are left out.
type Digest struct{ h hash.Hash }

// NewDigest returns the digest of nothing.
func NewDigest() *Digest { return &Digest{sha256.New()} }

// Add adds a batch.
func (d *Digest) Add(b *Batch) {
	for i := range b.Rows() {
		if b.Valid(i) {
			d.AddSample(uint64(b.ID(i)), b.Row(i))
		}
	}
}

// AddSample adds one sample.
func (d *Digest) AddSample(id uint64, data []byte) {
	var head [16]byte
	binary.LittleEndian.PutUint64(head[:], id)
	binary.LittleEndian.PutUint64(head[8:], uint64(len(data)))
	d.h.Write(head[:])
	d.h.Write(data)
}

// Sum returns the digest so far.
func (d *Digest) Sum() []byte { return d.h.Sum(nil) }
