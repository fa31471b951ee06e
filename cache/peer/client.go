package peer

import (
	"bufio"
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/url"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/shoalfs/shoal/cache/objstore"
)

const (
	peerPlaces = 64
	allPlaces  = 256
	connecting = 8 // at once, to one peer
	idleClient = time.Minute
)

// places are for requests in flight, by priority, so that prefetches do not keep a reader waiting.
type places [2]*semaphore.Weighted

func newPlaces(n int64) places {
	return places{objstore.Prefetch: semaphore.NewWeighted(n), objstore.Demand: semaphore.NewWeighted(n)}
}

// Node is another node.
type Node struct {
	ID      string
	Address string // HOST:PORT
}

// ClientConfig describes a client.
type ClientConfig struct {
	TLS *tls.Config // nil: plain
	Log *slog.Logger
}

// Client asks other nodes. Safe for concurrent use.
type Client struct {
	cfg    ClientConfig
	http   *http.Client
	places places

	// Constant except in tests.
	silence, patience time.Duration
	dialer            func(ctx context.Context, network, address string) (net.Conn, error)
	now               func() time.Time // of the circuits

	late  atomic.Int64 // how late this process's timers have rung of late
	ctx   context.Context
	stop  context.CancelFunc
	pings sync.WaitGroup

	mu      sync.Mutex
	remotes map[string]*remote // by the nodes' IDs
}

// NewClient returns a client.
func NewClient(cfg ClientConfig) *Client {
	c := &Client{cfg: cfg, silence: silence, patience: patience, dialer: dialer.DialContext, now: time.Now,
		places: newPlaces(allPlaces), remotes: map[string]*remote{}}
	c.ctx, c.stop = context.WithCancel(context.Background())
	c.http = &http.Client{CheckRedirect: func(*http.Request, []*http.Request) error {
		return http.ErrUseLastResponse
	}, Transport: &http.Transport{DialContext: dialSteady, TLSClientConfig: cfg.TLS,
		TLSHandshakeTimeout: sendDeadline, ResponseHeaderTimeout: sendDeadline, MaxIdleConnsPerHost: -1}}
	return c
}

var dialer = &net.Dialer{Timeout: longest, KeepAlive: 15 * time.Second}

// remote is what a client knows of a node.
type remote struct {
	c       *Client
	circuit *objstore.Circuit
	places  places
	connect places       // for those that need a connection
	late    atomic.Int64 // in a row
	pinging atomic.Bool

	mu    sync.Mutex
	node  Node
	idle  []*clientConn // the longest idle first
	gone  bool
	stats Stats // what has been counted, and the last failure

	latency objstore.Histogram
}

// Stats are a client's counts for one node, since it was first seen: of pieces, errors and late of requests.
type Stats struct {
	Node     string           `json:"node"`
	Address  string           `json:"address"`
	State    string           `json:"state"`           // on, away
	Cause    string           `json:"cause,omitempty"` // of the last failure
	Asked    int64            `json:"asked"`
	Hits     int64            `json:"hits"`
	Bytes    int64            `json:"bytes"`
	No       map[string]int64 `json:"no,omitempty"` // by reason
	Passed   int64            `json:"passed"`       // not asked: the node was away, or no place was free in time
	Damaged  int64            `json:"damaged"`      // with a wrong checksum
	Errors   int64            `json:"errors"`
	Late     int64            `json:"late"`
	InFlight int64            `json:"in_flight"`
	Median   float64          `json:"latency_p50_seconds"`
	P99      float64          `json:"latency_p99_seconds"`
}

// Stats returns a snapshot, ordered by node.
func (c *Client) Stats() (all []Stats) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, r := range c.remotes {
		r.mu.Lock()
		s := r.stats
		s.Node, s.Address, s.No = r.node.ID, r.node.Address, maps.Clone(s.No)
		r.mu.Unlock()
		if s.State = "on"; r.circuit.IsOpen() {
			s.State = "away"
		}
		s.Median, s.P99 = r.latency.Quantile(0.5).Seconds(), r.latency.Quantile(0.99).Seconds()
		all = append(all, s)
	}
	slices.SortFunc(all, func(a, b Stats) int { return cmp.Compare(a.Node, b.Node) })
	return all
}

// count changes what has been counted.
func (r *remote) count(change func(s *Stats)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	change(&r.stats)
}

// Retain forgets all nodes but these.
func (c *Client) Retain(nodes []Node) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for id, r := range c.remotes {
		if !slices.ContainsFunc(nodes, func(n Node) bool { return n.ID == id }) {
			delete(c.remotes, id)
			r.mu.Lock()
			r.gone = true
			r.mu.Unlock()
			r.drain()
		}
	}
}

// Close closes idle connections, and each other one when its request is done.
func (c *Client) Close() {
	c.mu.Lock()
	c.stop()
	c.mu.Unlock()
	c.Retain(nil)
	c.pings.Wait()
	c.http.CloseIdleConnections()
}

// Ready reports whether a node would be asked now.
func (c *Client) Ready(id string) bool {
	c.mu.Lock()
	r := c.remotes[id]
	c.mu.Unlock()
	return r == nil || r.circuit.Ready()
}

// remote returns what is known of a node.
func (c *Client) remote(n Node) *remote {
	c.mu.Lock()
	r := c.remotes[n.ID]
	if r == nil {
		r = &remote{c: c, node: n, places: newPlaces(peerPlaces), connect: newPlaces(connecting),
			gone: c.ctx.Err() != nil, stats: Stats{No: map[string]int64{}}}
		r.circuit = objstore.NewCircuit(c.now, r.say)
		if !r.gone {
			c.remotes[n.ID] = r
		}
	}
	c.mu.Unlock()
	r.mu.Lock()
	moved := r.node.Address != n.Address
	r.node = n
	r.mu.Unlock()
	if moved {
		r.drain()
	}
	return r
}

// say logs that a node went away, or came back.
func (r *remote) say(cause error) {
	r.mu.Lock()
	node := r.node
	r.mu.Unlock()
	if cause != nil {
		r.c.cfg.Log.Warn("a node does not answer as it should: what it has is read from the store", "node", node.ID,
			"address", node.Address, "cause", cause)
	} else {
		r.c.cfg.Log.Info("the node is asked again", "node", node.ID, "address", node.Address)
	}
}

// Read asks a node for pieces, and sets Filled of those that it got. It ends with the bytes, with a refusal, or soon:
// see the rules. It returns the terms that the node told; nil: none.
func (c *Client) Read(ctx context.Context, node Node, req Request, pieces []Piece) *Terms {
	r := c.remote(node)
	start := time.Now()
	if slices.ContainsFunc(pieces, func(p Piece) bool {
		return len(p.P) == 0 || len(p.P) > extentSize || len(p.ETag) > mostETag
	}) {
		r.count(func(s *Stats) { s.Passed += int64(len(pieces)) })
		return nil
	}
	w := &watch{r: r, ctx: ctx, start: start}
	if objstore.PriorityOf(ctx) == objstore.Demand {
		w.waits = start
	}
	req.due = longest
	if due, ok := objstore.DueOf(ctx); ok {
		req.due = max(due.Sub(start), 0)
	}
	for len(pieces) > 0 {
		n, total := 0, 0
		for n < len(pieces) && n < mostPieces {
			if total += len(pieces[n].P); total > mostBytes && n > 0 {
				break
			}
			n++
		}
		asked, answered := r.read(w, req, pieces[:n])
		if asked {
			pieces = pieces[n:]
		}
		if !answered {
			r.count(func(s *Stats) { s.Passed += int64(len(pieces)) })
			break
		}
	}
	return w.terms
}

// watch tells how long a read may go on. Its times are those of now.
type watch struct {
	r     *remote
	ctx   context.Context
	probe bool
	start time.Time
	waits time.Time     // since when somebody waits for it; zero: nobody does
	sent  time.Time     // when the request was; zero: it has waited for a place only
	heard time.Time     // when the last byte came, or the request was sent
	told  bool          // that the peer fetches
	moved time.Time     // when the peer last said that its store brings bytes
	doubt bool          // its silence has been noted
	late  time.Duration // by which timers have rung late
	terms *Terms        // that the peer told last; nil: none
}

// now is the time without what this process has slept through.
func (w *watch) now() time.Time { return time.Now().Add(-w.late) }

// rang notes a timer that was to ring at a time.
func (w *watch) rang(at time.Time) {
	late := max(time.Since(at), 0)
	w.late += late
	w.r.c.rang(late)
}

// rang notes by how much a timer was late. It is forgotten as others are in time.
func (c *Client) rang(late time.Duration) {
	before := c.late.Load()
	c.late.Store(max(int64(late), before-before/8))
}

var (
	errAway   = errors.New("the node is away")
	errLate   = errors.New("no answer in time")
	errSilent = fmt.Errorf("silent for %v", silence)
)

// isSilence reports whether err means that nothing came for a while.
func isSilence(err error) bool {
	return errors.Is(err, errSilent) || errors.Is(err, os.ErrDeadlineExceeded) ||
		errors.Is(err, context.DeadlineExceeded)
}

// tick is how often a read looks at its watch.
const tick = 100 * time.Millisecond

// check returns why the read is to be given up.
func (w *watch) check() error {
	now := w.now()
	if w.waits.IsZero() && objstore.PriorityOf(w.ctx) == objstore.Demand {
		w.waits = now
	}
	most, quiet := w.r.c.patience, time.Duration(0)
	if w.told {
		most = max(most, fetching)
	}
	if !w.heard.IsZero() {
		quiet = now.Sub(w.heard)
	}
	silent := quiet > w.r.c.silence
	if silent && !w.probe {
		w.suspect()
	}
	switch {
	case w.ctx.Err() != nil:
		return w.ctx.Err()
	case !w.probe && w.r.circuit.IsOpen():
		return errAway
	case silent && (w.probe || !w.waits.IsZero()), quiet > 3*w.r.c.silence:
		return errSilent
	case now.Sub(w.start) > longest, !w.waits.IsZero() && min(now.Sub(w.waits), now.Sub(w.moved)) > most:
		return errLate
	}
	return nil
}

// suspect has a peer pinged that was silent, unless it is being pinged; once for each request.
func (w *watch) suspect() {
	r, again := w.r, w.doubt
	w.doubt = true
	r.c.mu.Lock()
	defer r.c.mu.Unlock()
	if again || r.c.ctx.Err() != nil || !r.pinging.CompareAndSwap(false, true) {
		return
	}
	r.c.pings.Go(func() {
		defer r.pinging.Store(false)
		err := r.ping()
		switch {
		case err != nil:
			err = fmt.Errorf("%w, and does not answer a ping: %w", errSilent, err)
		case r.late.Add(1) >= mostLate:
			err = errSilent
		}
		if err != nil && r.c.ctx.Err() == nil {
			r.fail(false, err)
		}
	})
}

// ping makes a connection, which is then used.
func (r *remote) ping() (err error) {
	for range 3 {
		limit := min(max(r.c.silence, 4*r.latency.Quantile(0.9)), fetching) *
			min(tick+time.Duration(r.c.late.Load()), 4*tick) / tick
		until := time.Now().Add(limit)
		c, e := r.dial(r.c.ctx, limit)
		switch {
		case e == nil:
			r.putIdle(c)
			return nil
		case errors.Is(e, errFull):
			return nil
		}
		late := time.Since(until)
		if err = e; late < tick {
			break
		}
		r.c.rang(late)
	}
	return err
}

// fail ends a request, or a ping, after which the peer is away.
func (r *remote) fail(probe bool, err error) {
	r.count(func(s *Stats) { s.Cause = err.Error() })
	r.circuit.Leave(probe, err)
}

// read asks for pieces by one request. It reports whether it did, and whether the node answered.
func (r *remote) read(w *watch, req Request, pieces []Piece) (asked, answered bool) {
	w.sent, w.heard, w.probe, w.doubt = time.Time{}, time.Time{}, false, false
	leave := r.place(w)
	if leave == nil {
		return false, false
	}
	defer leave()
	probe, ok := r.circuit.Enter()
	if !ok {
		return false, false
	}
	start := w.now()
	w.probe = probe
	err := r.exchange(w, req, pieces)
	if errors.Is(err, errAway) {
		return false, false
	}
	r.count(func(s *Stats) { s.tally(pieces) })
	switch {
	case errors.Is(err, errFull):
		r.count(func(s *Stats) { s.No[Busy.String()] += int64(len(pieces)) })
		r.circuit.Leave(probe, nil)
		return true, false
	case err == nil:
		r.latency.Record(w.now().Sub(start))
		r.late.Store(0)
		r.circuit.Leave(probe, nil)
		return true, true
	case w.ctx.Err() != nil:
		r.circuit.Withdraw(probe)
		return true, false
	case isSilence(err), errors.Is(err, errLate):
		r.count(func(s *Stats) { s.Late++ })
		if isSilence(err) && !probe {
			w.suspect()
			return true, false
		}
		if !probe && (w.sent.IsZero() || w.now().Sub(w.sent) < r.c.silence || r.late.Add(1) < mostLate) {
			return true, false
		}
	case errors.Is(err, errDamaged):
		r.count(func(s *Stats) { s.Damaged++ })
	default:
		r.count(func(s *Stats) { s.Errors++ })
	}
	r.fail(probe, err)
	return true, false
}

// tally counts what came of pieces.
func (s *Stats) tally(pieces []Piece) {
	s.Asked += int64(len(pieces))
	for _, p := range pieces {
		if p.Filled {
			s.Hits++
			s.Bytes += int64(cmp.Or(p.Coded, len(p.P)))
		} else if p.no > 0 {
			s.No[p.no.String()]++
		}
	}
}

// take waits for one of several places. It returns nil if there is none in time, or the node is away.
func (r *remote) take(all places, w *watch) (leave func()) {
	for {
		s := all[objstore.PriorityOf(w.ctx)]
		if s.TryAcquire(1) {
			return func() { s.Release(1) }
		}
		if w.check() != nil || !r.circuit.Ready() {
			return nil
		}
		ctx, cancel := context.WithTimeout(w.ctx, tick)
		err := s.Acquire(ctx, 1)
		cancel()
		if err == nil {
			return func() { s.Release(1) }
		}
	}
}

// place waits for a place of the node's and one of all nodes'.
func (r *remote) place(w *watch) (leave func()) {
	one := r.take(r.places, w)
	if one == nil {
		return nil
	}
	other := r.take(r.c.places, w)
	if other == nil {
		one()
		return nil
	}
	r.count(func(s *Stats) { s.InFlight++ })
	return func() {
		r.count(func(s *Stats) { s.InFlight-- })
		other()
		one()
	}
}

// obtain returns a connection, and whether it was used before. Few requests connect at once, and the others take what
// gets idle meanwhile: handshakes are work, and a node that is late with them would count as away. A probe is alone.
func (r *remote) obtain(w *watch) (c *clientConn, used bool, err error) {
	if c = r.takeIdle(); c != nil {
		return c, true, nil
	}
	if !w.probe {
		leave := r.take(r.connect, w)
		if leave == nil {
			return nil, false, cmp.Or(w.check(), errAway)
		}
		defer leave()
		if c = r.takeIdle(); c != nil {
			return c, true, nil
		}
	}
	c, err = r.dial(w.ctx, r.c.silence)
	return c, false, err
}

// exchange sends a request and reads its answer; a second time, on a new connection, if an idle one was closed.
func (r *remote) exchange(w *watch, req Request, pieces []Piece) error {
	for again := false; ; again = true {
		c, used, err := r.obtain(w)
		if err != nil {
			return err
		}
		err = c.do(w, req, pieces)
		if err == nil {
			r.putIdle(c)
			return nil
		}
		_ = c.conn.Close()
		if !used || again || c.heard || !closed(err) {
			return err
		}
		r.drain() // the node closed the others, too
	}
}

// closed reports whether err means that the other end closed the connection.
func closed(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, syscall.ECONNRESET) ||
		errors.Is(err, syscall.EPIPE)
}

// takeIdle returns the connection that was used last, or nil.
func (r *remote) takeIdle() *clientConn {
	r.mu.Lock()
	defer r.mu.Unlock()
	old := time.Now().Add(-idleClient)
	for len(r.idle) > 0 && r.idle[0].since.Before(old) {
		_ = r.idle[0].conn.Close()
		r.idle = slices.Delete(r.idle, 0, 1)
	}
	if len(r.idle) == 0 {
		return nil
	}
	c := r.idle[len(r.idle)-1]
	r.idle = r.idle[:len(r.idle)-1]
	return c
}

func (r *remote) putIdle(c *clientConn) {
	r.c.mu.Lock()
	most := max(1, 2*allPlaces/max(1, len(r.c.remotes)))
	r.c.mu.Unlock()
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.gone || c.address != r.node.Address || c.in.Buffered() > 0 { // more than the answer came
		_ = c.conn.Close()
		return
	}
	if c.since, c.w = time.Now(), nil; len(r.idle) >= most {
		_ = r.idle[0].conn.Close()
		r.idle = slices.Delete(r.idle, 0, 1)
	}
	r.idle = append(r.idle, c)
}

// drain closes idle connections.
func (r *remote) drain() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, c := range r.idle {
		_ = c.conn.Close()
	}
	r.idle = nil
}

// clientConn is a connection that speaks the protocol.
type clientConn struct {
	conn    net.Conn
	address string
	since   time.Time // it is idle
	until   time.Time // a read from it may take

	w      *watch // of the request that it carries
	number uint32
	heard  bool // a byte of the answer
	out    []byte
	in     *bufio.Reader // of Read
	head   [frameSize]byte
	sums   [4 * extentSize / granuleSize]byte
	seen   []bool // by piece: its frame came
}

// dial makes a connection within a time.
func (r *remote) dial(ctx context.Context, within time.Duration) (*clientConn, error) {
	r.mu.Lock()
	node := r.node
	r.mu.Unlock()
	until := time.Now().Add(within)
	ctx, cancel := context.WithDeadline(ctx, until)
	defer cancel()
	conn, err := r.c.dialer(ctx, "tcp", node.Address)
	if err != nil {
		return nil, err
	}
	_ = conn.SetDeadline(until)
	if r.c.cfg.TLS != nil {
		t := tls.Client(conn, r.c.cfg.TLS)
		if err := t.HandshakeContext(ctx); err != nil {
			_ = conn.Close()
			return nil, inClear(err)
		}
		conn = t
	}
	c := &clientConn{conn: conn, address: node.Address}
	c.in = bufio.NewReaderSize(c, 4<<10)
	if err := c.upgrade(node); err != nil {
		_ = conn.Close()
		return nil, err
	}
	return c, nil
}

// upgrade agrees on the protocol.
func (c *clientConn) upgrade(node Node) error {
	if _, err := fmt.Fprintf(c.conn, "GET %sread HTTP/1.1\r\nHost: %s\r\nConnection: Upgrade\r\nUpgrade: %s\r\n\r\n",
		basePath, node.Address, upgradeTo); err != nil {
		return err
	}
	b := bufio.NewReader(io.LimitReader(c.conn, 8<<10))
	answer, err := http.ReadResponse(b, nil)
	if err != nil {
		return err
	}
	_ = answer.Body.Close()
	switch {
	case answer.StatusCode == http.StatusUpgradeRequired, answer.StatusCode == http.StatusNotFound:
		return fmt.Errorf("the node does not speak %s, but %q: run one version of Shoal on all nodes",
			upgradeTo, answer.Header.Get("Upgrade"))
	case answer.StatusCode == http.StatusBadRequest:
		return errWantsTLS
	case answer.StatusCode == http.StatusTooManyRequests:
		return errFull
	case answer.StatusCode != http.StatusSwitchingProtocols, answer.Header.Get("Upgrade") != upgradeTo,
		b.Buffered() > 0:
		return fmt.Errorf("no upgrade to %s: %s", upgradeTo, answer.Status)
	case answer.Header.Get(nodeHeader) != node.ID:
		return fmt.Errorf("another node answers there: %q", answer.Header.Get(nodeHeader))
	}
	return nil
}

var errWantsTLS = errors.New(
	"the node speaks TLS only: give this one --cluster-cert, --cluster-key and --cluster-ca, too")

// inClear says what is wrong with a node that answers without TLS.
func inClear(err error) error {
	if errors.As(err, new(tls.RecordHeaderError)) || errors.Is(err, http.ErrSchemeMismatch) {
		return errors.New("the node is without TLS: give it --cluster-cert, --cluster-key and --cluster-ca instead " +
			"of --cluster-insecure")
	}
	return err
}

// do sends a request and reads its answer.
func (c *clientConn) do(w *watch, req Request, pieces []Piece) error {
	c.number++
	c.w, c.heard, req.number = w, false, c.number
	c.out = appendRequest(c.out[:0], req, pieces)
	w.sent = w.now()
	w.heard = w.sent
	if err := c.conn.SetDeadline(time.Now().Add(w.r.c.silence)); err != nil {
		return err
	}
	if _, err := c.conn.Write(c.out); err != nil {
		return err
	}
	if err := c.soon(); err != nil {
		return err
	}
	c.seen = slices.Grow(c.seen[:0], len(pieces))[:len(pieces)]
	clear(c.seen)
	for left, waits := len(pieces), 0; left > 0; {
		if _, err := io.ReadFull(c.in, c.head[:]); err != nil {
			return err
		}
		f, err := parseFrame(c.head[:], req, pieces)
		switch {
		case err != nil:
			return err
		case f.kind == frameWait || f.kind == frameTerms:
			if waits++; waits > mostWaits {
				return fmt.Errorf("%w: too many waits", errProtocol)
			}
			if f.kind == frameTerms {
				w.terms = f.terms()
			} else if w.told = true; f.n > 0 {
				w.moved = w.heard
			}
			continue
		case c.seen[f.piece]:
			return fmt.Errorf("%w: piece %d twice", errProtocol, f.piece)
		}
		c.seen[f.piece] = true
		left--
		if f.kind == frameNo {
			pieces[f.piece].no = f.reason
			continue
		}
		p := &pieces[f.piece]
		if err := c.data(p.P[:f.n]); err != nil {
			return err
		}
		if p.Filled = true; f.kind == frameCoded {
			p.Coded = f.n
		}
	}
	return nil
}

var errDamaged = errors.New("wrong checksum")

// data reads the bytes of a piece.
func (c *clientConn) data(p []byte) error {
	sums := c.sums[:4*sumsOf(len(p))]
	for _, b := range [][]byte{sums, p} {
		if _, err := io.ReadFull(c.in, b); err != nil {
			return err
		}
	}
	if !checkSums(sums, p) {
		return errDamaged
	}
	return nil
}

// Read reads from the connection, and looks at the watch at each tick.
func (c *clientConn) Read(p []byte) (int, error) {
	for w := c.w; ; {
		n, err := c.conn.Read(p)
		if n > 0 {
			w.heard, c.heard = w.now(), true
			return n, nil
		}
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			return 0, cmp.Or(err, io.ErrNoProgress)
		}
		w.rang(c.until)
		if err := w.check(); err != nil {
			return 0, err
		}
		if err := c.soon(); err != nil {
			return 0, err
		}
	}
}

// soon has the next read from the connection end at the next tick.
func (c *clientConn) soon() error {
	c.until = time.Now().Add(tick)
	return c.conn.SetReadDeadline(c.until)
}

// File opens a manifest, layout or table of a node, which is not verified. A read fails when nothing comes for a while.
func (c *Client) File(ctx context.Context, node Node, name string) (io.ReadCloser, error) {
	return c.get(ctx, node, "manifest/"+url.PathEscape(name))
}

// Info returns what a node says of itself, which is JSON. It waits for at most two seconds.
func (c *Client) Info(ctx context.Context, node Node) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*silence)
	defer cancel()
	body, err := c.get(ctx, node, "node")
	if err != nil {
		return nil, err
	}
	defer func() { _ = body.Close() }()
	return io.ReadAll(io.LimitReader(body, 1<<20))
}

func (c *Client) get(ctx context.Context, node Node, path string) (io.ReadCloser, error) {
	scheme := "http://"
	if c.cfg.TLS != nil {
		scheme = "https://"
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, scheme+node.Address+basePath+path, nil)
	if err != nil {
		return nil, err
	}
	answer, err := c.http.Do(req)
	if err == nil && answer.StatusCode != http.StatusOK {
		_ = answer.Body.Close()
		if err = fmt.Errorf("GET %s: %s", path, answer.Status); answer.StatusCode == http.StatusBadRequest {
			err = errWantsTLS
		}
	}
	if err != nil {
		return nil, inClear(err)
	}
	return answer.Body, nil
}

// steady is a connection from which a read fails when nothing comes for a while.
type steady struct{ net.Conn }

func dialSteady(ctx context.Context, network, address string) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, sendDeadline)
	defer cancel()
	conn, err := dialer.DialContext(ctx, network, address)
	return steady{conn}, err
}

func (c steady) Read(p []byte) (int, error) {
	_ = c.SetReadDeadline(time.Now().Add(sendDeadline))
	return c.Conn.Read(p)
}
