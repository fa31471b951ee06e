package peer

import (
	"bufio"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/shoalfs/shoal/cache"
	"github.com/shoalfs/shoal/internal/pause"
)

const (
	serverPlaces = 512 // most of them only wait for the store
	serverConns  = 4096
	idleServer   = 5 * time.Minute // longer than a client keeps a connection
	sendDeadline = 5 * time.Second // for one batch of frames
	batchBytes   = 256 << 10       // sent together
)

// Volume is one version of a dataset. [cache.Volume] has all but Terms, Received and Check.
type Volume interface {
	Terms() Terms
	Received() int64 // bytes, from the store until now
	// Check reports whether the version's file has that path and ETag. The number may be of no file.
	Check(file int, path [16]byte, etag string) bool
	Gather(files []int, due time.Time)
	Serve(ctx context.Context, file int, off int64, n int, due time.Time,
		held bool) (data []byte, release func(), err error)
	ServeCoded(ctx context.Context, file int, off int64, n int, form [8]byte) (data []byte, release func(), ok bool)
}

// Serving is what a server reads from.
type Serving interface {
	// Volume returns a version. It stays open until done is called.
	Volume(dataset [16]byte, version [32]byte) (v Volume, done func(), ok bool)
	// Opening returns what is closed when a dataset has been opened that is being opened now; nil: none.
	Opening(dataset [16]byte) <-chan struct{}
	// File opens a manifest, layout or table by its name: letters, digits and ".-_". Missing: [fs.ErrNotExist].
	File(name string) (r io.ReadCloser, size int64, err error)
}

// ServerConfig describes a server.
type ServerConfig struct {
	Self    string     // the node's ID
	Version string     // of the program, for others to see
	Info    func() any // what the node says of its datasets, as JSON
	Serving Serving
	Memory  int64       // most bytes of pieces that are being answered; at least those of one extent
	TLS     *tls.Config // of Listen; nil: plain
	Log     *slog.Logger
}

// Server answers other nodes. It is an [http.Handler] for paths that begin with /shoal/peer/.
type Server struct {
	cfg    ServerConfig
	mux    *http.ServeMux
	http   *http.Server
	ctx    context.Context
	cancel context.CancelFunc
	busy   atomic.Int64 // requests being answered
	budget *semaphore.Weighted
	memory atomic.Int64 // of pieces being sent, from budget

	mu    sync.Mutex
	most  int                        // connections; constant except in tests
	conns map[net.Conn]*atomic.Int64 // since when each is idle, in ns; 0: a request is being answered
	gone  sync.WaitGroup

	count struct{ requests, pieces, bytes, refused atomic.Int64 }
}

// ServerStats are counts since the start, and what is under way.
type ServerStats struct {
	Requests    int64 `json:"requests"`
	Pieces      int64 `json:"pieces"` // given
	Bytes       int64 `json:"bytes"`
	Busy        int64 `json:"busy"` // pieces refused for lack of a place, or of memory until the asker's deadline
	InFlight    int64 `json:"in_flight"`
	Memory      int64 `json:"memory_bytes"`
	Connections int   `json:"connections"`
}

// NewServer returns a server.
func NewServer(cfg ServerConfig) *Server {
	s := &Server{cfg: cfg, mux: http.NewServeMux(), most: serverConns, conns: map[net.Conn]*atomic.Int64{}}
	s.budget = semaphore.NewWeighted(max(cfg.Memory, extentSize))
	s.http = &http.Server{Handler: s.mux, ReadHeaderTimeout: sendDeadline, IdleTimeout: time.Minute,
		MaxHeaderBytes: 8 << 10, ErrorLog: slog.NewLogLogger(s.cfg.Log.Handler(), slog.LevelDebug)}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	s.mux.HandleFunc("GET "+basePath+"read", s.upgrade)
	s.mux.HandleFunc("GET "+basePath+"manifest/{name}", s.file)
	s.mux.HandleFunc("GET "+basePath+"node", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(map[string]any{"id": cfg.Self, "protocol": Protocol, "version": cfg.Version,
			"datasets": s.cfg.Info()})
	})
	return s
}

func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) { s.mux.ServeHTTP(w, r) }

// Stats returns a snapshot.
func (s *Server) Stats() ServerStats {
	s.mu.Lock()
	n := len(s.conns)
	s.mu.Unlock()
	return ServerStats{
		Requests: s.count.requests.Load(), Pieces: s.count.pieces.Load(), Bytes: s.count.bytes.Load(),
		Busy: s.count.refused.Load(), InFlight: s.busy.Load(), Memory: s.memory.Load(), Connections: n,
	}
}

// Listen serves l until Close: with TLS if the server has a configuration for it.
func (s *Server) Listen(l net.Listener) error {
	if s.cfg.TLS != nil {
		l = tls.NewListener(l, s.cfg.TLS)
	}
	err := s.http.Serve(l)
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return err
}

// Close ends all connections, also those that wait for a fetch, and then returns. No volume is used any more.
func (s *Server) Close() {
	s.cancel()
	_ = s.http.Close()
	s.mu.Lock()
	for c := range s.conns {
		_ = c.Close()
	}
	s.mu.Unlock()
	s.gone.Wait()
}

var nameOfFile = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]*$`)

// file sends a manifest, layout or table.
func (s *Server) file(w http.ResponseWriter, r *http.Request) {
	name := r.PathValue("name")
	if !nameOfFile.MatchString(name) {
		http.NotFound(w, r)
		return
	}
	f, size, err := s.cfg.Serving.File(name)
	if err != nil {
		http.Error(w, err.Error(), http.StatusNotFound)
		return
	}
	defer func() { _ = f.Close() }()
	w.Header().Set("Content-Type", "application/octet-stream")
	w.Header().Set("Content-Length", strconv.FormatInt(size, 10))
	for c := http.NewResponseController(w); err == nil; _, err = io.CopyN(w, f, batchBytes) { // who gets less sees it
		_ = c.SetWriteDeadline(time.Now().Add(sendDeadline))
	}
}

// upgrade takes a connection over from HTTP.
func (s *Server) upgrade(w http.ResponseWriter, r *http.Request) {
	w.Header().Set(nodeHeader, s.cfg.Self)
	if r.Header.Get("Upgrade") != upgradeTo {
		w.Header().Set("Upgrade", upgradeTo)
		http.Error(w, "this node speaks "+upgradeTo, http.StatusUpgradeRequired)
		return
	}
	c, err := s.take(w)
	if err != nil {
		status := http.StatusServiceUnavailable
		if errors.Is(err, errFull) {
			status = http.StatusTooManyRequests
		}
		http.Error(w, err.Error(), status)
		return
	}
	conn := c.conn
	defer s.give(conn)
	if _, plain := conn.(*net.TCPConn); !plain {
		c.out = bufio.NewWriterSize(conn, 16<<10) // a record of TLS
	}
	_ = conn.SetDeadline(time.Now().Add(sendDeadline))
	_, err = io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: "+upgradeTo+
		"\r\n"+nodeHeader+": "+s.cfg.Self+"\r\n\r\n")
	for err == nil {
		err = c.answer()
	}
	if errors.Is(err, errProtocol) {
		s.cfg.Log.Debug("a peer's request makes no sense: its connection is closed", "peer", conn.RemoteAddr().String(),
			"cause", err)
	}
}

var errFull = errors.New("too many connections, and none of them is idle")

// take takes over a connection, which give ends. If there are too many, it closes the one that has been idle longest.
func (s *Server) take(w http.ResponseWriter) (*serverConn, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ctx.Err() != nil {
		return nil, errors.New("the node ends")
	}
	if len(s.conns) >= s.most {
		var oldest net.Conn
		since := time.Now().UnixNano()
		for conn, idle := range s.conns {
			if at := idle.Load(); at > 0 && at < since {
				oldest, since = conn, at
			}
		}
		if oldest == nil {
			return nil, errFull
		}
		_ = oldest.Close()
		delete(s.conns, oldest)
	}
	conn, buf, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return nil, err
	}
	c := &serverConn{s: s, conn: conn, idle: new(atomic.Int64), in: buf.Reader, heads: make([]byte, 0, headsSize)}
	c.idle.Store(time.Now().Add(sendDeadline).UnixNano()) // its first request is on its way
	s.conns[conn] = c.idle
	s.gone.Add(1)
	return c, nil
}

func (s *Server) give(conn net.Conn) {
	_ = conn.Close()
	s.mu.Lock()
	delete(s.conns, conn)
	s.mu.Unlock()
	s.gone.Done()
}

// headsSize fits the frames of a batch: when what is left may not fit a frame, the batch is sent.
const headsSize = 16 << 10

// serverConn is one connection, used by one goroutine.
type serverConn struct {
	s    *Server
	conn net.Conn
	idle *atomic.Int64
	in   *bufio.Reader
	out  *bufio.Writer // nil: frames go to the connection by one system call

	number  uint32 // of the request
	request []byte
	pieces  []asked
	pending []int // pieces that are to be fetched
	files   []int // theirs

	// A batch of frames to be sent.
	heads    []byte
	bufs     net.Buffers
	size     int
	claimed  int // of the server's budget
	releases []func()
}

// answer answers one request. An error ends the connection.
func (c *serverConn) answer() error {
	_ = c.conn.SetReadDeadline(time.Now().Add(idleServer))
	var length [4]byte
	if _, err := io.ReadFull(c.in, length[:]); err != nil {
		return err
	}
	c.idle.Store(0)
	n, err := requestLength(length[:])
	if err != nil {
		return err
	}
	if n > c.in.Buffered() {
		_ = c.conn.SetReadDeadline(time.Now().Add(sendDeadline))
	}
	c.request = slices.Grow(c.request[:0], n)[:n]
	if _, err := io.ReadFull(c.in, c.request); err != nil {
		return err
	}
	r, pieces, err := parseRequest(c.request, c.pieces[:0])
	if err != nil {
		return err
	}
	c.pieces = pieces
	c.s.count.requests.Add(1)
	free := c.s.busy.Add(1) <= serverPlaces
	defer c.s.busy.Add(-1)
	defer func() { c.idle.Store(time.Now().UnixNano()) }()
	return c.serve(r, free)
}

// serve sends the frames of a request: first those of pieces that are here.
func (c *serverConn) serve(r Request, free bool) error {
	s := c.s
	due := time.Now().Add(r.due)
	c.number = r.number
	v, done, ok, err := c.volume(r, due, free)
	if err != nil {
		return err
	}
	if ok {
		defer done()
	}
	defer c.drop() // before done
	if ok {
		if err := c.add(v.Terms().frame(), nil, nil); err != nil {
			return err
		}
	}
	c.pending, c.files = c.pending[:0], c.files[:0]
	for i, p := range c.pieces {
		var why Reason
		switch {
		case !free:
			why = Busy
		case !ok:
			why = Version
		case !v.Check(p.file, p.path, p.etag):
			why = ETag
		default:
			data, release, err := c.find(s.ctx, v, r, i, due, false)
			if errors.Is(err, cache.ErrMemory) || errors.Is(err, cache.ErrNotHeld) && !r.Held {
				c.pending, c.files = append(c.pending, i), append(c.files, p.file)
				continue
			}
			if err := c.give(i, data, release, err); err != nil {
				return err
			}
			continue
		}
		if err := c.refuse(i, why); err != nil {
			return err
		}
	}
	if len(c.pending) > 1 && !r.Held {
		v.Gather(c.files, due)
	}
	for _, i := range c.pending {
		if err := c.fetch(v, r, i, due); err != nil {
			return err
		}
	}
	return c.flush()
}

// volume returns the version that is asked for. If the dataset is being opened it waits, if it may, since nodes that
// start together would otherwise read from the store what this one is about to keep.
func (c *serverConn) volume(r Request, due time.Time, wait bool) (v Volume, done func(), ok bool, err error) {
	for waits := 0; ; waits++ {
		opened := c.s.cfg.Serving.Opening(r.Dataset)
		v, done, ok = c.s.cfg.Serving.Volume(r.Dataset, r.Version)
		if ok || opened == nil || !wait || time.Now().After(due) && waits > int(fetching/waitEvery)-2 {
			return v, done, ok, nil
		}
		select {
		case <-opened:
		case <-time.After(waitEvery):
			if err := errors.Join(c.add(frame{kind: frameWait}, nil, nil), c.flush(), c.s.ctx.Err()); err != nil {
				return nil, nil, false, err
			}
		}
	}
}

// pressEvery is how often a piece is looked for again for which the cache has no memory.
const pressEvery = 10 * time.Millisecond

// find lends a piece, for which it has then claimed memory, in the asked form if it is kept so. wait: it may have to be
// fetched, or wait for memory, until ctx ends.
func (c *serverConn) find(ctx context.Context, v Volume, r Request, i int, due time.Time,
	wait bool) (data []byte, release func(), err error) {
	p := c.pieces[i]
	for {
		if !c.s.budget.TryAcquire(int64(p.n)) && (!wait || c.s.budget.Acquire(ctx, int64(p.n)) != nil) {
			return nil, nil, cache.ErrMemory
		}
		coded := false
		if !wait && r.Form != [8]byte{} {
			data, release, coded = v.ServeCoded(ctx, p.file, p.off, p.n, r.Form)
		}
		if !coded {
			data, release, err = v.Serve(ctx, p.file, p.off, p.n, due, r.Held || !wait)
		}
		if err == nil {
			c.s.memory.Add(int64(p.n))
			return data, release, nil
		}
		c.s.budget.Release(int64(p.n))
		if !wait || !errors.Is(err, cache.ErrMemory) {
			return nil, nil, err
		}
		if pause.For(ctx, pressEvery) != nil {
			return nil, nil, err
		}
	}
}

// fetch sends a piece that is to be fetched, or waits for memory, and says all the while that it does.
func (c *serverConn) fetch(v Volume, r Request, i int, due time.Time) error {
	start, limit, before := time.Now(), max(r.due, fetching), v.Received()
	data, release, err := c.find(c.s.ctx, v, r, i, due, false) // it may have landed
	again := errors.Is(err, cache.ErrNotHeld) && !r.Held || errors.Is(err, cache.ErrMemory)
	for waits := 0; again; waits++ {
		if err := c.flush(); err != nil { // who waits for memory holds none
			return err
		}
		ctx, cancel := context.WithTimeout(c.s.ctx, waitEvery)
		data, release, err = c.find(ctx, v, r, i, due, true)
		again = waits < mostWaits && (ctx.Err() != nil && errors.Is(err, context.DeadlineExceeded) ||
			errors.Is(err, cache.ErrMemory) && time.Since(start) < limit)
		cancel()
		if again {
			moved := 0
			if received := v.Received(); received > before { // flights end, and give memory back
				moved, before, limit = 1, received, max(limit, time.Since(start)+fetching)
			}
			if err := c.add(frame{kind: frameWait, n: moved}, nil, nil); err != nil {
				return err
			}
		}
	}
	return c.give(i, data, release, err)
}

// give adds what Serve returned for a piece.
func (c *serverConn) give(i int, data []byte, release func(), err error) error {
	switch {
	case err == nil:
		c.s.count.pieces.Add(1)
		c.s.count.bytes.Add(int64(len(data)))
		f := frame{kind: frameData, piece: i, n: len(data)}
		if len(data) < c.pieces[i].n {
			f.kind = frameCoded
		}
		return c.add(f, data, release)
	case c.s.ctx.Err() != nil:
		return c.s.ctx.Err()
	case errors.Is(err, cache.ErrNotHeld):
		return c.refuse(i, NotHeld)
	case errors.Is(err, cache.ErrMemory):
		return c.refuse(i, Memory)
	case errors.Is(err, cache.ErrBusy):
		return c.refuse(i, Busy)
	}
	return c.refuse(i, Failed)
}

func (c *serverConn) refuse(i int, why Reason) error {
	if why == Busy || why == Memory {
		c.s.count.refused.Add(1)
	}
	return c.add(frame{kind: frameNo, reason: why, piece: i}, nil, nil)
}

// add adds a frame to the batch. release is called when it was sent, or cannot be.
func (c *serverConn) add(f frame, data []byte, release func()) error {
	if len(c.heads)+frameSize+4*sumsOf(len(data)) > headsSize || c.size > 0 && c.size+len(data) > batchBytes {
		if err := c.flush(); err != nil {
			if release != nil {
				release()
				c.unclaim(c.pieces[f.piece].n)
			}
			return err
		}
	}
	f.request = c.number
	at := len(c.heads)
	c.heads = appendSums(appendFrame(c.heads, f), data)
	c.bufs = append(c.bufs, c.heads[at:])
	if release != nil {
		c.bufs, c.releases = append(c.bufs, data), append(c.releases, release)
		c.claimed += c.pieces[f.piece].n
	}
	c.size += len(data)
	return nil
}

// flush sends the batch.
func (c *serverConn) flush() error {
	if len(c.bufs) == 0 {
		return nil
	}
	defer c.drop()
	_ = c.conn.SetWriteDeadline(time.Now().Add(sendDeadline))
	if c.out == nil {
		bufs := c.bufs
		_, err := bufs.WriteTo(c.conn)
		return err
	}
	for _, b := range c.bufs {
		if _, err := c.out.Write(b); err != nil {
			return err
		}
	}
	return c.out.Flush()
}

// drop forgets the batch.
func (c *serverConn) drop() {
	for _, release := range c.releases {
		release()
	}
	c.unclaim(c.claimed)
	clear(c.releases)
	clear(c.bufs[:cap(c.bufs)])
	c.heads, c.bufs, c.size, c.claimed, c.releases = c.heads[:0], c.bufs[:0], 0, 0, c.releases[:0]
}

func (c *serverConn) unclaim(n int) {
	c.s.memory.Add(-int64(n))
	c.s.budget.Release(int64(n))
}
