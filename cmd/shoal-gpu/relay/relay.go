// Package relay is the feed that shoal-gpu serves: for each session of a trainer it opens one at `shoal serve`,
// finishes the batches on a device, and passes everything else on.
//
//	shoal serve ──slots──► receive ──Ring.Start──► device ──Ring.Wait──► send ──► trainer
//	     ▲                                                                          │
//	     └───────────────────────── credits, releases ──────────────────────────────┘
//
// A slot of the server is held from its arrival until the device has copied it, a buffer of the device from then
// until the trainer's Release. A batch never waits in either for a later one.
//
// If the device cannot serve a session, the session is passed through unchanged: batches in Chunks, finished by
// `shoal serve`, with the same states. The log says why.
package relay

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"

	"github.com/shoalfs/shoal/gpuingest"
	"github.com/shoalfs/shoal/internal/handover"
	"github.com/shoalfs/shoal/loader/feedpb"
)

// Ring processes one stream of batches, from slots to buffers of a device, which another process can import. It is for
// one goroutine, except Wait, which another one may call.
type Ring interface {
	// Start queues the work that makes the slot's batch in the buffer. From then on until Wait has returned for the
	// buffer, nobody may write to the slot or read the buffer.
	Start(slot, buffer int, j *gpuingest.Job) error
	// Wait returns when the buffer's batch is complete, or with an error, after which a ring can only be closed.
	Wait(buffer int) error
	// End waits for the work and lets go of the slots. After an error they must stay mapped: the device may still be
	// reading them. Only Export and Close may follow.
	End() error
	Close() error     // ends it, and frees the buffers
	BufferBytes() int // of each, until Close
	// Export returns a descriptor of each buffer, which the caller closes, and handles of two events: batch complete,
	// and buffer free.
	Export() (fds []int, ready, free [][]byte, err error)
	// Free reports whether the other process's work is done after which it recorded that the buffer is free. It does
	// not wait.
	Free(buffer int) (bool, error)
}

// Device is the destination of batches.
type Device interface {
	Name() string
	UUID() string
	Open(slots []byte, slotBytes, buffers, bufferBytes int) (Ring, error)
}

// Options are a Server's settings.
type Options struct {
	Feed   string // address of `shoal serve`: unix:///PATH or tcp://HOST:PORT
	Device Device
	Log    *slog.Logger // nil: none

	// Range marks a time span for a profiler, until the returned function is called; nil: none.
	Range func(name string) func()
}

// Stats are a Server's counters.
type Stats struct {
	Device   string `json:"device"`
	UUID     string `json:"uuid"`
	Sessions int64  `json:"sessions"`      // open, on the device
	Passed   int64  `json:"passed"`        // open, passed through
	Buffers  int64  `json:"buffers"`       // of open sessions
	Bytes    int64  `json:"buffer_bytes"`  // device memory in buffers, of trainers whose session has ended, too
	Held     int64  `json:"buffers_held"`  // by trainers
	Batches  int64  `json:"batches"`       // delivered on the device
	Fallen   int64  `json:"fallen_back"`   // sessions that the device could not serve
	Waited   int64  `json:"wait_micros"`   // waiting for trainers to release buffers
	Finished int64  `json:"finish_micros"` // from queueing to completion, summed over batches
}

// Server is the feed. Close it even if it never serves.
type Server struct {
	o    Options
	conn *grpc.ClientConn
	feed feedpb.FeedClient
	grpc *grpc.Server

	streams sync.WaitGroup // goroutines that outlive their handlers

	mu    sync.Mutex
	pools map[string]*pool // by key, until they are handed over or their session ends

	sessions, passed, buffers, bytes, held, batches, fallen, waited, finished atomic.Int64
}

const streamWindow, connWindow = 32 << 20, 64 << 20 // to receive in: without shared memory batches come in Chunks

// New returns a server. It connects to the feed when a trainer connects.
func New(o Options) (*Server, error) {
	o.Log = cmp.Or(o.Log, slog.New(slog.DiscardHandler))
	if o.Range == nil {
		o.Range = func(string) func() { return func() {} }
	}
	target, encrypted, err := handover.Target(o.Feed)
	if err != nil || encrypted {
		return nil, fmt.Errorf("feed address %q: must be unix:///PATH or tcp://HOST:PORT", o.Feed)
	}
	conn, err := grpc.NewClient(target, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithNoProxy(),
		grpc.WithStaticStreamWindowSize(streamWindow), grpc.WithStaticConnWindowSize(connWindow),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 30 * time.Second, Timeout: 20 * time.Second}))
	if err != nil {
		return nil, fmt.Errorf("feed address %q: %w", o.Feed, err)
	}
	s := &Server{o: o, conn: conn, feed: feedpb.NewFeedClient(conn), pools: map[string]*pool{}}
	s.grpc = grpc.NewServer(grpc.WaitForHandlers(true),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: 30 * time.Second, Timeout: 20 * time.Second}),
		grpc.KeepaliveEnforcementPolicy(
			keepalive.EnforcementPolicy{MinTime: 5 * time.Second, PermitWithoutStream: true}))
	feedpb.RegisterFeedServer(s.grpc, service{s: s})
	return s, nil
}

// Serve accepts connections on a unix socket until Close, and then returns nil.
func (s *Server) Serve(l net.Listener) error {
	m := handover.Mux(l, s.o.Log, s.handOver)
	if err := s.grpc.Serve(m); err != nil && !errors.Is(err, grpc.ErrServerStopped) {
		return fmt.Errorf("feed on %s: %w", l.Addr(), err)
	}
	return nil
}

// Close ends all sessions and waits until the device holds nothing of them.
func (s *Server) Close() error {
	s.grpc.Stop() // waits for handlers
	s.streams.Wait()
	return s.conn.Close()
}

// Stats returns the counters.
func (s *Server) Stats() Stats {
	return Stats{Device: s.o.Device.Name(), UUID: s.o.Device.UUID(), Sessions: s.sessions.Load(),
		Passed: s.passed.Load(), Buffers: s.buffers.Load(), Bytes: s.bytes.Load(), Held: s.held.Load(),
		Batches: s.batches.Load(), Fallen: s.fallen.Load(), Waited: s.waited.Load(), Finished: s.finished.Load()}
}

type service struct {
	feedpb.UnimplementedFeedServer
	s *Server
}

func (v service) Info(ctx context.Context, r *feedpb.InfoRequest) (*feedpb.InfoResponse, error) {
	return v.s.feed.Info(ctx, r)
}

// Stats implements feedpb.FeedServer: the server's counters, and this process's as member gpu.
func (v service) Stats(ctx context.Context, r *feedpb.StatsRequest) (*feedpb.StatsResponse, error) {
	got, err := v.s.feed.Stats(ctx, r)
	if err != nil {
		return nil, err
	}
	all := map[string]any{}
	if err := json.Unmarshal([]byte(got.GetJson()), &all); err != nil {
		return nil, fmt.Errorf("the server's counters: %w", err)
	}
	all["gpu"] = v.s.Stats()
	text, err := json.Marshal(all)
	if err != nil {
		return nil, err
	}
	return &feedpb.StatsResponse{Json: string(text)}, nil
}

// Stream implements feedpb.FeedServer: one session.
func (v service) Stream(down feedpb.Feed_StreamServer) error {
	m, err := down.Recv()
	if err != nil {
		return err
	}
	o := m.GetOpen()
	if o.GetDevice() == "" || o.GetSlots() == 0 { // or no Open: the server reports the error
		return v.s.pass(down, m)
	}
	log := v.s.o.Log.With("session", o.GetSession(), "rank", o.GetRank(), "client", o.GetClient())
	if o.GetDevice() != v.s.o.Device.Name() {
		log.Warn("the trainer requests another device: batches go to host memory", "wants", o.GetDevice(),
			"device", v.s.o.Device.Name())
		v.s.fallen.Add(1)
		return v.s.pass(down, m)
	}
	ses, err := v.s.open(down.Context(), o, log)
	if no, ok := errors.AsType[*unserved](err); ok {
		log.Warn("the device does not serve this session: batches go to host memory", "cause", no.cause)
		v.s.fallen.Add(1)
		return v.s.pass(down, m)
	}
	if err != nil {
		return err
	}
	err = ses.run(down)
	log.Info("session on the device ended", "batches", ses.sent, "cause", err)
	return err
}

// pass forwards a session to the server unchanged, except for features that need a server on this host and a client
// that shares its memory.
func (s *Server) pass(down feedpb.Feed_StreamServer, first *feedpb.ClientMessage) error {
	s.passed.Add(1)
	defer s.passed.Add(-1)
	if o := first.GetOpen(); o != nil {
		o.Transform, _ = gpuingest.CutDevice(o.GetTransform()) // host memory needs finished rows
		o.Device, o.Slots = "", 0
	}
	ctx, cancel := context.WithCancel(down.Context())
	defer cancel()
	up, err := s.feed.Stream(ctx)
	if err != nil {
		return err
	}
	if err := up.Send(first); err == nil { // otherwise Recv knows why
		s.streams.Go(func() {
			for {
				m, err := down.Recv()
				if errors.Is(err, io.EOF) {
					_ = up.CloseSend()
				}
				if err != nil || up.Send(m) != nil {
					return
				}
			}
		})
	}
	for {
		m, err := up.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if err := down.Send(m); err != nil {
			return err
		}
	}
}

// unserved is the reason why the device does not serve a session that the server could.
type unserved struct{ cause error }

func (e *unserved) Error() string { return e.cause.Error() }
