package loader

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/reflection"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/internal/audit"
	"github.com/shoalfs/shoal/internal/handover"
	"github.com/shoalfs/shoal/loader/feedpb"
	"github.com/shoalfs/shoal/loader/internal/wire"
)

// Options are the server's settings. The zero value is usable.
type Options struct {
	Version string       // of the server, told to clients
	Compile Compiler     // nil: raw samples only
	Memory  Memory       // nil: no limit but the sessions' windows
	Log     *slog.Logger // nil: none
	Audit   *audit.Log   // records who opens sessions; nil: none
	Tokens  *Tokens      // of which clients must present one; nil: no token is required

	// Stats builds the result of the Stats call from the feed's counters, so that a daemon can add its own beside
	// member feed; nil: that member alone. The result is marshalled to JSON.
	Stats func(feed Stats) any

	// Node returns the id of this daemon's node and the weight of its cache; "", 0 and false outside of a cluster. It
	// may be nil.
	Node func() (id string, weight uint32, ok bool)

	// Delivered is called with the number of samples of each batch sent; may be nil.
	Delivered func(samples int)

	// Workers is how many transforms run at once, over all sessions; default GOMAXPROCS.
	Workers int
	// Readers is how many samples a session reads at once; default 4*Workers, at least 8. More
	// than Workers, because a reader may wait for the store while the processors are idle.
	Readers int
	// LookAhead is how many batches a session builds beyond the client's credits, so that one is ready when the next
	// credit arrives; default 2.
	LookAhead int
	// MaxWindow is the most batches of a session in memory at once, whatever credits the client grants; default 16.
	MaxWindow int
	// MaxBatchBytes is the largest batch; default 1 GiB.
	MaxBatchBytes int64
}

func (o Options) withDefaults() Options {
	o.Workers = cmp.Or(o.Workers, runtime.GOMAXPROCS(0))
	o.Readers = cmp.Or(o.Readers, max(8, 4*o.Workers))
	o.LookAhead = cmp.Or(o.LookAhead, 2)
	o.MaxWindow = cmp.Or(o.MaxWindow, 16)
	o.MaxBatchBytes = cmp.Or(o.MaxBatchBytes, 1<<30)
	o.Memory = cmp.Or(o.Memory, Memory(unlimited{}))
	o.Log = cmp.Or(o.Log, slog.New(slog.DiscardHandler))
	if o.Node == nil {
		o.Node = func() (string, uint32, bool) { return "", 0, false }
	}
	if o.Delivered == nil {
		o.Delivered = func(int) {}
	}
	if o.Stats == nil {
		o.Stats = func(feed Stats) any { return map[string]Stats{"feed": feed} }
	}
	return o
}

type unlimited struct{}

func (unlimited) Reserve(ctx context.Context, _ int64) error { return ctx.Err() }
func (unlimited) TryReserve(int64) bool                      { return true }
func (unlimited) Release(int64)                              {}

// Server serves a dataset to any number of sessions. They share only the processors and the memory, unless they agree
// to share a pass. A session keeps the version that it began with.
type Server struct {
	ds  func() Dataset
	o   Options
	log *slog.Logger
	cpu chan struct{} // semaphore: one place for each running transform

	decoding objstore.Histogram
	pool     pool
	grpc     *grpc.Server
	health   *health.Server

	streams sync.WaitGroup // goroutines that outlive their handlers

	passMu sync.Mutex
	passes map[passKey]*pass // the passes that sessions may share
	leases map[string]*lease // by the key of their handover

	mu       sync.Mutex
	stopping bool
	idle     chan struct{}         // made by Drain, closed once no session is left
	sessions map[*session]struct{} // all open ones
	serial   int64
	total    struct { // of a whole dataset, computed once for each version
		version string
		sizes   sizes
	}
	counters struct {
		held                   atomic.Int64
		opened, fenced, failed int64
		ended                  SessionStats   // sums over ended sessions
		lately                 []SessionStats // the latest of them
	}
}

// HTTP/2 tuning. The client's window limits batches; these are the server's settings.
const (
	// writeBuffer gathers frames of 16 KiB (gRPC's fixed size) into one write. From 32 KiB, the default, to 512 KiB
	// the processor time of both ends together is the same within 5%, with the least at 128 KiB: fewer system calls,
	// and the copy is still in the cache when the kernel reads it.
	writeBuffer = 128 << 10
	// Clients send little. A window of a fixed size, gRPC's default, avoids the pings with which gRPC would estimate a
	// better one: one for nearly every message, which would be the main cost of readers of slots.
	requestWindow = 64 << 10
	// Open is the largest message that a client sends; its state and specs are far smaller than this.
	maxRequest = 1 << 20
	// Handshakes must complete within this time, and one that does not holds up the end of the server for as long.
	handshakeTime = 10 * time.Second
	// A trainer has one stream for each rank; more than this on one connection means a faulty client.
	maxStreams = 1024
)

// NewServer returns a server. ds returns the dataset: it is called whenever a session opens, and may then return
// another version. Close the server even if it never serves.
func NewServer(ds func() Dataset, o Options) *Server {
	o = o.withDefaults()
	s := &Server{ds: ds, o: o, log: o.Log, cpu: make(chan struct{}, o.Workers),
		passes: map[passKey]*pass{}, leases: map[string]*lease{}, sessions: map[*session]struct{}{}}
	s.grpc = grpc.NewServer(append(o.Tokens.guard(o.Log, o.Audit),
		grpc.ForceServerCodecV2(wire.Codec()),
		grpc.ConnectionTimeout(handshakeTime),
		grpc.MaxConcurrentStreams(maxStreams),
		grpc.WriteBufferSize(writeBuffer),
		grpc.MaxRecvMsgSize(maxRequest),
		grpc.StaticStreamWindowSize(requestWindow), grpc.StaticConnWindowSize(requestWindow),
		// A trainer that hangs, or whose host is gone, is noticed within a minute.
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: 30 * time.Second, Timeout: 20 * time.Second}),
		grpc.KeepaliveEnforcementPolicy(
			keepalive.EnforcementPolicy{MinTime: 5 * time.Second, PermitWithoutStream: true}),
	)...)
	feedpb.RegisterFeedServer(s.grpc, service{s: s})
	s.health = health.NewServer()
	s.health.SetServingStatus(feedpb.Feed_ServiceDesc.ServiceName, grpc_health_v1.HealthCheckResponse_SERVING)
	grpc_health_v1.RegisterHealthServer(s.grpc, s.health)
	reflection.Register(s.grpc)
	return s
}

// Serve accepts connections on all listeners until Close, and then returns nil. It closes the listeners. If one
// fails, the server goes on with the others, and Serve returns the error at the end.
func (s *Server) Serve(listeners ...net.Listener) error {
	errs := make([]error, len(listeners))
	var wg sync.WaitGroup
	for i, l := range listeners {
		if l.Addr().Network() == "unix" {
			l = handover.Mux(l, s.log, s.handover)
		}
		if s.o.Audit != nil {
			l = audit.Listener{Listener: l, Refused: func(who *audit.Peer) { // before its first call
				s.o.Audit.Write(audit.Event{Event: "feed_connect", Outcome: "refused", Peer: who,
					Cause: "the TLS handshake did not end: no certificate, none that is trusted, or no TLS"})
			}}
		}
		wg.Go(func() {
			if err := s.grpc.Serve(l); err != nil && !errors.Is(err, grpc.ErrServerStopped) {
				errs[i] = fmt.Errorf("feed on %s: %w", l.Addr(), err)
				s.log.Error("feed listener failed", "error", errs[i])
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// Drain refuses new sessions and lets open ones finish: each gets the batches that it has granted credits for, and
// then the error that the server is stopping. Drain returns when no session is left or ctx ends, with the number of
// sessions that there were and of those still open, which [Server.Close] then ends. It is called once.
func (s *Server) Drain(ctx context.Context) (sessions, left int) {
	s.mu.Lock()
	s.stopping = true
	sessions = len(s.sessions)
	for open := range s.sessions {
		open.window.freeze()
	}
	idle := make(chan struct{})
	if s.idle = idle; sessions == 0 {
		close(idle)
	}
	s.mu.Unlock()
	s.health.Shutdown() // last: once health says so, sessions really are refused
	select {
	case <-idle:
		return sessions, 0
	case <-ctx.Done():
		s.mu.Lock()
		defer s.mu.Unlock()
		return sessions, len(s.sessions)
	}
}

// closeGrace is how long Close waits for clients to take the last message.
const closeGrace = time.Second

// Close ends all sessions, tells their clients that the server is stopping, and waits until the sessions are gone.
func (s *Server) Close() {
	s.health.Shutdown()
	s.mu.Lock()
	s.stopping = true
	for open := range s.sessions {
		open.cancel(errStopping)
	}
	s.mu.Unlock()
	late := time.AfterFunc(closeGrace, s.grpc.Stop) // makes GracefulStop return
	s.grpc.GracefulStop()
	late.Stop()
	s.streams.Wait()
}

// service is the gRPC side of a Server.
type service struct {
	feedpb.UnimplementedFeedServer
	s *Server
}

func (v service) Info(context.Context, *feedpb.InfoRequest) (*feedpb.InfoResponse, error) {
	ds := v.s.ds()
	id, weight, _ := v.s.o.Node()
	return &feedpb.InfoResponse{Dataset: ds.Version(), Samples: uint64(ds.Len()), Bytes: uint64(v.s.sizesOf(ds).sum),
		Classes: ds.Classes(), Server: v.s.o.Version, Node: id, Weight: weight}, nil
}

// sizesOf describes the sizes of a dataset's samples.
func (s *Server) sizesOf(ds Dataset) sizes {
	s.mu.Lock()
	defer s.mu.Unlock()
	if version := ds.Version(); s.total.version != version {
		s.total.version, s.total.sizes = version, sizesOf(ds)
	}
	return s.total.sizes
}

func (v service) Stats(context.Context, *feedpb.StatsRequest) (*feedpb.StatsResponse, error) {
	b, err := json.Marshal(v.s.o.Stats(v.s.Stats()))
	if err != nil {
		return nil, toStatus(err)
	}
	return &feedpb.StatsResponse{Json: string(b)}, nil
}

// Stream implements feedpb.FeedServer: one session.
func (v service) Stream(stream feedpb.Feed_StreamServer) error {
	m, err := stream.Recv()
	if err != nil {
		return err
	}
	if m.GetOpen() == nil {
		return toStatus(invalid("the first message on a stream must be an Open"))
	}
	ctx, span, named := sessionSpan(stream.Context(), m.GetOpen())
	open, err := v.s.open(ctx, m.GetOpen())
	if err != nil {
		span.End(err)
		v.s.auditRefused(stream.Context(), m.GetOpen(), err)
		return toStatus(err)
	}
	open.span, open.named, open.peer = span, named, peerOf(ctx, v.s.o.Tokens != nil)
	v.s.o.Audit.Write(open.event("feed_open"))
	open.pass, open.lease = v.s.join(open, slots(stream.Context(), m.GetOpen()), int(m.GetOpen().GetCredits()),
		m.GetOpen().GetReadonly())
	err = open.run(stream)
	v.s.ended(open, err)
	open.endSpan(err)
	v.s.auditEnded(open, err)
	return toStatus(err)
}

// open makes a session and fences its predecessor.
func (s *Server) open(ctx context.Context, o *feedpb.Open) (*session, error) {
	current := s.versionFor(o)
	if why, ok := current.(interface{ NoSamples() error }); ok && current.Len() == 0 {
		return nil, invalid("%w", why.NoSamples())
	}
	sp, err := resolve(ctx, o, current, s.o.Compile, s.o.MaxBatchBytes)
	if err != nil {
		return nil, err
	}
	if sp.placement != nil {
		if err := s.place(sp); err != nil {
			return nil, err
		}
	}
	ds := sp.ds
	first, err := sp.plan(ds, sp.start.Epoch, sp.start.Cursor)
	if err != nil {
		return nil, err
	}
	if sp.perEpoch(first) == 0 {
		return nil, invalid("an epoch of %d samples holds no batch for rank %d: %d ranks of %d samples each make a "+
			"global batch of %d (tail %s): lower the batch size, or use tail=pad",
			ds.Len(), sp.rank, sp.world, sp.batch, sp.global(), sp.tail)
	}

	open := &session{srv: s, ds: ds, served: current, spec: sp, first: first,
		window: newWindow(s.o.LookAhead, s.o.MaxWindow),
		opened: time.Now(), buffers: map[*buffer]struct{}{}}
	open.ctx, open.cancel = context.WithCancelCause(ctx)
	open.window.grant(o.GetCredits())

	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopping {
		open.cancel(errStopping)
		return nil, errStopping
	}
	s.serial++
	sp.session = cmp.Or(sp.session, fmt.Sprintf("unnamed-%d", s.serial))
	if err := s.agree(open); err != nil {
		open.cancel(err)
		return nil, err
	}
	s.fence(open)
	s.sessions[open] = struct{}{}
	s.counters.opened++
	s.log.Info("feed session opened", "session", sp.session, "rank", sp.rank, "world", sp.world, "client", sp.client,
		"order", sp.orderName, "batch", sp.batch, "transform", sp.transformName(), "epoch", sp.start.Epoch,
		"cursor", sp.start.Cursor)
	s.warnAway(sp)
	if p, ok := ds.(*Packed); ok {
		s.log.Info("documents packed", "session", sp.session, "packing", p.waste.String())
	}
	return open, nil
}

// versionFor returns the dataset for a session: that of the job's other ranks, even if there is a newer one by now.
func (s *Server) versionFor(o *feedpb.Open) Dataset {
	of := spec{world: int(o.GetWorld()), rank: int(o.GetRank())}
	_ = of.resolveOrder(o, nil) // its keys may name them, too; what is wrong with it is an error later
	s.mu.Lock()
	defer s.mu.Unlock()
	for open := range s.sessions {
		if open.besides(o.GetSession(), of.world, of.rank) {
			return open.served
		}
	}
	return s.ds()
}

// fence ends the session that a newer one replaces, and those of the same job with another number of ranks: a job
// that comes back smaller leaves no rank of its last run behind. The caller holds s.mu.
func (s *Server) fence(by *session) {
	for old := range s.sessions {
		if old.spec.session != by.spec.session || old.spec.rank != by.spec.rank && old.spec.world == by.spec.world ||
			old.ctx.Err() != nil {
			continue
		}
		s.counters.fenced++
		old.cancel(errFenced)
		level := slog.LevelWarn
		// the client reconnected before its old stream ended
		if by.spec.client != "" && by.spec.client == old.spec.client {
			level = slog.LevelInfo
		}
		s.log.Log(by.ctx, level, "feed session taken over", "session", by.spec.session, "rank", old.spec.rank,
			"world", old.spec.world, "by", by.spec.client)
	}
}

// ended removes a session from the lists.
func (s *Server) ended(open *session, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if delete(s.sessions, open); len(s.sessions) == 0 {
		s.pool.drop()
		if s.idle != nil {
			close(s.idle)
			s.idle = nil
		}
	}
	s.counters.ended.add(open)
	lately := append(s.counters.lately, open.stats())
	s.counters.lately = lately[max(len(lately)-keptSessions, 0):]
	level := slog.LevelInfo
	if err != nil && !errors.Is(err, errFenced) && !errors.Is(err, errStopping) && !errors.Is(err, errLeaseGone) &&
		Code(err) != codes.Canceled {
		s.counters.failed++
		level = slog.LevelWarn
	}
	s.log.Log(context.Background(), level, "feed session ended", "session", open.spec.session, "rank", open.spec.rank,
		"batches", open.count.batches.Load(), "samples", open.count.samples.Load(), "cause", err)
}
