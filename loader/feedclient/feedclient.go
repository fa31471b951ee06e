// Package feedclient is the Go client of the batch feed, used by `shoal feed`, tests and benchmarks.
// Trainers use python/shoal.
//
// Over a unix socket, batches come in memory that is shared with the server ([Slots]); without shared memory they
// come on the connection. Batches that the server was granted credit for wait in their slots, or in gRPC's receive
// window, which is large enough for one or two batches.
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
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/shoalfs/shoal/internal/handover"
	"github.com/shoalfs/shoal/loader/feedpb"
	"github.com/shoalfs/shoal/loader/internal/wire"
)

// The receive windows. A batch of 256 images of 224×224 is 38 MB; with gRPC's default window of 64 KiB every
// chunk costs 16 round trips.
const (
	streamWindow = 32 << 20
	connWindow   = 64 << 20
)

// Client is a connection to a feed. Safe for concurrent use.
type Client struct {
	// Transport is how batches come; set it before the first Open.
	Transport Transport

	addr string
	conn *grpc.ClientConn
	feed feedpb.FeedClient
}

// Dial prepares a connection to unix:///path, tcp://host:port or tls://host:port. It connects at the first use.
func Dial(addr string, security Security) (*Client, error) {
	target, encrypted, err := handover.Target(addr)
	if err != nil {
		return nil, err
	}
	credentials, err := security.dialOptions(encrypted)
	if err != nil {
		return nil, fmt.Errorf("feed address %q: %w", addr, err)
	}
	conn, err := grpc.NewClient(target, append(credentials,
		grpc.WithNoProxy(), // HTTP_PROXY and the like are for the web
		grpc.WithDefaultCallOptions(grpc.ForceCodecV2(wire.Codec())),
		grpc.WithStaticStreamWindowSize(streamWindow), grpc.WithStaticConnWindowSize(connWindow),
		grpc.WithReadBufferSize(128<<10),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 30 * time.Second, Timeout: 20 * time.Second}),
	)...)
	if err != nil {
		return nil, fmt.Errorf("feed address %q: %w", addr, err)
	}
	return &Client{addr: addr, conn: conn, feed: feedpb.NewFeedClient(conn)}, nil
}

// Close closes the connection and with it all streams.
func (c *Client) Close() error { return c.conn.Close() }

// Info describes the dataset that is served.
func (c *Client) Info(ctx context.Context) (*feedpb.InfoResponse, error) {
	r, err := c.feed.Info(ctx, &feedpb.InfoRequest{})
	return r, c.explain(err)
}

// Stats returns the server's counters, one JSON object.
func (c *Client) Stats(ctx context.Context) ([]byte, error) {
	r, err := c.feed.Stats(ctx, &feedpb.StatsRequest{})
	return []byte(r.GetJson()), c.explain(err)
}

// Healthy returns nil if the server takes new sessions. No token is needed.
func (c *Client) Healthy(ctx context.Context) error {
	r, err := grpc_health_v1.NewHealthClient(c.conn).Check(ctx,
		&grpc_health_v1.HealthCheckRequest{Service: feedpb.Feed_ServiceDesc.ServiceName})
	if err != nil {
		return c.explain(err)
	}
	if s := r.GetStatus(); s != grpc_health_v1.HealthCheckResponse_SERVING {
		return fmt.Errorf("feed %s: the server accepts no new sessions (%s): it is shutting down", c.addr, s)
	}
	return nil
}

// Error is a failure that the server reported, or a failure to connect to it.
type Error struct {
	Addr string
	Code codes.Code
	Text string
}

func (e *Error) Error() string {
	text := fmt.Sprintf("feed %s: %s", e.Addr, e.Text)
	if e.Code == codes.Unavailable {
		text += " (" + remedy(e.Text) + ")"
	}
	return text
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
	// gRPC's, of a plain error
	for _, wrapping := range []string{`connection error: desc = "`, "transport: Error while dialing: "} {
		if rest, ok := strings.CutPrefix(text, wrapping); ok {
			text = strings.TrimSuffix(rest, `"`)
		}
	}
	return &Error{c.addr, st.Code(), text}
}

// Stream is one rank's batches. It is for one goroutine, but any goroutine may release batches.
type Stream struct {
	client *Client
	stream grpc.BidiStreamingClient[feedpb.ClientMessage, feedpb.ServerMessage]
	cancel context.CancelFunc
	opened *feedpb.Opened
	state  string
	memory *mapping      // nil: no slots
	frames bool          // messages come on the handover connection, and the stream only reports its end
	broken bool          // the handover connection ended without an end marker
	over   chan error    // the stream's end, with frames; a receiver puts it back
	last   time.Duration // how long to wait for messages after it
	stall  time.Duration
	ended  int
	views  int    // slots that the caller may keep without stalling the server
	owed   uint32 // credits for batches that were taken

	closed sync.Once

	mu   sync.Mutex
	free [][]byte
}

// Open opens a session. Credits of 0 mean 2: one batch to work on and one on its way. Slots of 0 mean two more than
// credits, at most 8, if the server offers slots.
func (c *Client) Open(ctx context.Context, o *feedpb.Open) (*Stream, error) {
	o = proto.CloneOf(o)
	if o.GetCredits() == 0 {
		o.Credits = 2
	}
	local := strings.HasPrefix(c.addr, "unix://")
	switch {
	case c.Transport == Slots && !local:
		return nil, fmt.Errorf("feed %s: slots need a server on this host: use unix:///PATH, or transport auto", c.addr)
	case c.Transport == Chunks || !local:
		o.Slots = 0
	case o.GetSlots() == 0:
		o.Slots = min(o.GetCredits(), autoCredits) + 2
	}
	s, err := c.open(ctx, o)
	if err != nil || o.GetSlots() == 0 {
		return s, err
	}
	pool := s.opened.GetPool()
	if pool != nil && pool.GetDevice() == "" {
		if s.memory, err = handOver(ctx, c.addr, pool, int(min(o.GetSlots(), pool.GetSlots()))); err == nil {
			s.views = s.memory.limit - int(o.GetCredits())
			s.watch(ctx)
			return s, nil
		}
		err = fmt.Errorf("feed %s: shared memory: %w", c.addr, err)
	} else if err = fmt.Errorf("feed %s: the server has no shared memory for this session: its log says why",
		c.addr); pool == nil && c.Transport != Slots {
		return s, nil
	}
	s.Close()
	if c.Transport == Slots || ctx.Err() != nil {
		return nil, err
	}
	// Another mount namespace, or a forwarded socket: go on without slots.
	o.Slots = 0
	return c.open(ctx, o)
}

// autoCredits is the default number of credits of sessions with slots. More do not help, whether the server or
// the client is the faster side.
const autoCredits = 6

func (c *Client) open(ctx context.Context, o *feedpb.Open) (*Stream, error) {
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
	if err := stream.Send(&feedpb.ClientMessage{Kind: &feedpb.ClientMessage_Open{Open: o}}); err != nil &&
		!errors.Is(err, io.EOF) {
		return fail(err)
	}
	m, err := stream.Recv()
	if err != nil {
		return fail(err)
	}
	if m.GetOpened() == nil {
		return fail(fmt.Errorf("the server's first message is %T: not a Shoal feed of version 1", m.GetKind()))
	}
	return &Stream{client: c, stream: stream, cancel: cancel, opened: m.GetOpened(),
		state: m.GetOpened().GetState()}, nil
}

// Opened describes the session.
func (s *Stream) Opened() *feedpb.Opened { return s.opened }

// State is the argument to Open that continues after the last batch that Next returned.
func (s *Stream) State() string { return s.state }

// Stalled is the total time that Next has waited for batches to begin.
func (s *Stream) Stalled() time.Duration { return s.stall }

// Epochs is the number of epochs that Next has seen the end of.
func (s *Stream) Epochs() int { return s.ended }

// Next returns the next batch, across epochs, and io.EOF after the last. The batch is the caller's until its
// Release. Of the batches not yet released, as many are views of the server's slots as there are slots beyond the
// credits, at least one; the others are copies, so that the server always has a slot to fill.
func (s *Stream) Next() (*Batch, error) {
	if s.owed > 0 {
		m := &feedpb.ClientMessage{Kind: &feedpb.ClientMessage_Credit{Credit: &feedpb.Credit{N: s.owed}}}
		if err := s.send(m); err != nil && !errors.Is(err, io.EOF) {
			return nil, s.client.explain(err)
		}
		s.owed = 0
	}
	start := time.Now()
	var in wire.Incoming
	for {
		if err := s.recv(&in); err != nil {
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
	b := &Batch{Header: in.Message.GetBatch(), stream: s}
	if err := b.receive(&in); err != nil {
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return nil, s.client.explain(err)
	}
	s.state = b.Header.GetState()
	s.owed++
	return b, nil
}

// endPatience is how long to wait for a message on the handover connection once the stream is over. If both
// processes are healthy its end follows at once.
const endPatience = 5 * time.Second

// watch waits for the stream's end while messages come on the handover connection: gRPC's pings are the only sign of
// a server that hangs. The caller's own ctx ends the wait at once.
func (s *Stream) watch(ctx context.Context) {
	if s.memory.in == nil {
		return
	}
	s.frames, s.over = true, make(chan error, 1)
	go func() {
		err := s.stream.RecvMsg(&wire.Incoming{})
		if err == nil {
			err = errors.New("a message came on the stream instead of the handover connection")
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		if ctx.Err() == nil {
			s.last = endPatience
		}
		s.over <- err
		_ = s.memory.conn.SetReadDeadline(time.Now().Add(s.last)) // fails if it is closed
	}()
}

// late restarts the wait for a caller that was busy when the stream ended: the server's messages are already in
// the connection, but could not be read after the deadline.
func (s *Stream) late() {
	s.mu.Lock()
	defer s.mu.Unlock()
	select {
	case err := <-s.over:
		s.over <- err
		_ = s.memory.conn.SetReadDeadline(time.Now().Add(s.last))
	default:
	}
}

// recv receives the next message.
func (s *Stream) recv(in *wire.Incoming) error {
	if s.frames {
		s.late()
		err := s.memory.in.RecvMsg(in)
		if err == nil || errors.Is(err, wire.ErrFrame) {
			return err
		}
		s.frames, s.broken = false, !errors.Is(err, io.EOF)
	}
	if s.over == nil {
		return s.stream.RecvMsg(in)
	}
	err := <-s.over // the stream's own status
	s.over <- err
	if s.broken && errors.Is(err, io.EOF) { // there was more
		return status.Error(codes.Unavailable, "the handover connection closed before its last message")
	}
	return err
}

// send sends a message, from any goroutine. If the stream is over, the next recv reports it.
func (s *Stream) send(m *feedpb.ClientMessage) error {
	if s.memory != nil && s.memory.out != nil {
		_ = s.memory.out.SendMsg(m)
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.stream.Send(m)
}

// giveBack releases a slot. An error shows at the next Recv.
func (s *Stream) giveBack(slot uint32) {
	_ = s.send(&feedpb.ClientMessage{
		Kind: &feedpb.ClientMessage_Release{Release: &feedpb.Release{Slots: []uint32{slot}}}})
}

// Close ends the session. Batches that were not released stay valid.
func (s *Stream) Close() {
	s.cancel()
	if m := s.memory; m != nil {
		s.closed.Do(m.drop)
	}
	if s.over != nil {
		s.over <- <-s.over
		return
	}
	for { // until gRPC has let go of the stream
		if err := s.stream.RecvMsg(&wire.Incoming{}); err != nil {
			return
		}
	}
}

// Batch is one batch. Its memory is its own until Release, even after the stream's Close: a batch that is never
// released keeps the memory of its stream's slots mapped.
type Batch struct {
	Header *feedpb.BatchHeader

	stream *Stream
	memory *mapping // that buf is a view of; nil: it is the stream's own
	buf    []byte
	data   []byte
	views  [][]byte // those behind the first, which is data
	ids    []byte
	labels []byte
	valid  []byte
	off    []byte
}

// receive finds or fills the batch's memory, and locates its planes.
func (b *Batch) receive(in *wire.Incoming) error {
	s, n := b.stream, b.Header.GetTotalBytes()
	if slot := b.Header.GetSlot(); slot != 0 {
		if s.memory == nil {
			return fmt.Errorf("the server sent a batch in slot %d on a stream without slots", slot)
		}
		view, err := s.memory.buffer(slot, n)
		if err != nil {
			return err
		}
		if int(s.memory.refs.Load()) <= max(s.views, 1) { // one is the stream's
			s.memory.refs.Add(1)
			b.buf, b.memory = view, s.memory
		} else {
			b.buf = s.buffer(n)
			copy(b.buf, view)
			s.giveBack(slot)
		}
		return b.cut()
	}
	b.buf = s.buffer(n)
	for in.Dst = b.buf; len(in.Dst) > 0; in.Dst = in.Dst[in.N:] {
		if err := s.recv(in); err != nil {
			return err
		}
		if !in.IsChunk {
			return fmt.Errorf("the server sent %T in the middle of a batch", in.Message.GetKind())
		}
	}
	return b.cut()
}

// buffer returns n bytes of the stream's own memory.
func (s *Stream) buffer(n uint64) []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	if k := len(s.free); k > 0 && uint64(cap(s.free[k-1])) >= n {
		b := s.free[k-1][:n]
		s.free = s.free[:k-1]
		return b
	}
	return make([]byte, n)
}

// cut locates the planes.
func (b *Batch) cut() error {
	rows := uint64(b.Header.GetRows())
	for _, p := range b.Header.GetPlanes() {
		end := p.GetOffset() + p.GetLength()
		if end < p.GetOffset() || end > uint64(len(b.buf)) {
			return fmt.Errorf("plane %s lies outside the batch", p.GetName())
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
		default:
			if strings.HasPrefix(p.GetName(), "view") {
				b.views = append(b.views, plane)
			}
		}
		if want != uint64(len(plane)) {
			return fmt.Errorf("plane %s has %d bytes for %d rows", p.GetName(), len(plane), rows)
		}
	}
	last := uint64(0)
	for at := 0; at < len(b.off); at += 8 {
		end := binary.LittleEndian.Uint64(b.off[at:])
		if end < last || end > uint64(len(b.data)) {
			return fmt.Errorf("row %d lies outside the batch's data", at/8)
		}
		last = end
	}
	if b.ids == nil || b.labels == nil || b.valid == nil || b.data == nil && rows > 0 {
		return errors.New("a batch without its planes")
	}
	return nil
}

// Release lets the memory of the batch be reused: the caller must not access it any more.
func (b *Batch) Release() {
	s := b.stream
	if s == nil {
		return // released already
	}
	if b.memory != nil {
		s.giveBack(b.Header.GetSlot())
		b.memory.drop()
	} else {
		s.mu.Lock()
		s.free = append(s.free, b.buf)
		s.mu.Unlock()
	}
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

// Digest is SHA-256 over (sample as u64 little-endian, length as u64 little-endian, bytes) of all valid rows in order
// of delivery, with each further view of a sample behind its row. Padding and skipped samples are left out.
type Digest struct{ h hash.Hash }

// NewDigest returns an empty digest.
func NewDigest() *Digest { return &Digest{sha256.New()} }

// Add adds a batch.
func (d *Digest) Add(b *Batch) {
	for i := range b.Rows() {
		if b.Valid(i) {
			d.AddSample(uint64(b.ID(i)), b.Row(i))
			for _, v := range b.views {
				n := len(v) / b.Rows()
				d.AddSample(uint64(b.ID(i)), v[i*n:(i+1)*n])
			}
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
