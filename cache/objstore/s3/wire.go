package s3

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http/httputil"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// wires are the connections for an S3 store's GETs: HTTP/1.1, one request at a time each.
//
// net/http runs two goroutines per connection, and each request and answer passes between three. Together with the
// header maps that was half of the processor time of a GET of 60 KB (ADR 0019). Here the caller's goroutine writes,
// waits and reads, and the body goes from the socket into the caller's slice. All other requests use net/http.
type wires struct {
	dial    func(ctx context.Context) (net.Conn, error)
	maxIdle int

	mu     sync.Mutex
	idle   []*wire // least recently used first, so that unneeded ones age at the front
	reaper *time.Timer
	closed bool
}

const (
	// idleTimeout is how long a connection waits for its next request. Most servers allow longer.
	idleTimeout = 90 * time.Second
	// headTimeout is how long an answer may take to start. Loaded stores answer slowly, but after 20 s without an
	// answer it is better to ask again. The retry policy ends bodies that stall.
	headTimeout = 20 * time.Second
	// headBuffer fits any usual head. Body bytes that arrive with it are copied.
	headBuffer = 4 << 10
)

// wire is one connection and the answer on it, whose body it is: [wire.Read] and [wire.Close], which returns the
// connection.
type wire struct {
	pool *wires
	conn net.Conn
	used bool      // has served a request
	free time.Time // since when it waits

	out, scratch []byte // request heads
	in           []byte // bytes read together with the head; [from:] is not used yet
	from         int
	head         answerHead
	left         int64 // of the body; -1: until the connection ends
	stop         func() bool
}

// get returns a connection: unless fresh is set, the most recently used idle one, if any.
func (ws *wires) get(ctx context.Context, fresh bool) (*wire, error) {
	ws.mu.Lock()
	for n := len(ws.idle); n > 0 && !fresh; n = len(ws.idle) {
		w := ws.idle[n-1]
		ws.idle[n-1] = nil
		ws.idle = ws.idle[:n-1]
		ws.mu.Unlock()
		if w.silent() {
			return w, nil
		}
		_ = w.conn.Close()
		ws.mu.Lock()
	}
	ws.mu.Unlock()
	conn, err := ws.dial(ctx)
	if err != nil {
		return nil, err
	}
	return &wire{pool: ws, conn: conn, in: make([]byte, 0, headBuffer)}, nil
}

// silent reports whether an idle connection received nothing: neither its end, nor an unexpected answer that would be
// taken for the next one's. TLS has read ahead, and gives that at once; with this deadline it reads no more.
func (w *wire) silent() bool {
	conn := w.conn
	if t, ok := conn.(*tls.Conn); ok {
		_ = t.SetReadDeadline(past)
		if _, err := t.Read(w.in[:1]); !errors.Is(err, os.ErrDeadlineExceeded) {
			return false
		}
		conn = t.NetConn()
	}
	c, ok := conn.(syscall.Conn)
	if !ok {
		return true
	}
	raw, err := c.SyscallConn()
	if err != nil {
		return false
	}
	silent := false
	err = raw.Control(func(fd uintptr) {
		var b [1]byte
		_, _, err := unix.Recvfrom(int(fd), b[:], unix.MSG_PEEK|unix.MSG_DONTWAIT)
		silent = errors.Is(err, unix.EAGAIN)
	})
	return err == nil && silent
}

// put keeps w for the next request.
func (ws *wires) put(w *wire) {
	w.used, w.free = true, time.Now()
	ws.mu.Lock()
	defer ws.mu.Unlock()
	if ws.closed || len(ws.idle) >= ws.maxIdle {
		_ = w.conn.Close()
		return
	}
	ws.idle = append(ws.idle, w)
	if ws.reaper == nil {
		ws.reaper = time.AfterFunc(idleTimeout, ws.reap)
	}
}

// reap closes connections that were idle for too long.
func (ws *wires) reap() {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	old := time.Now().Add(-idleTimeout)
	n := 0
	for n < len(ws.idle) && !ws.idle[n].free.After(old) {
		_ = ws.idle[n].conn.Close()
		n++
	}
	ws.idle, ws.reaper = slices.Delete(ws.idle, 0, n), nil
	if len(ws.idle) > 0 {
		ws.reaper = time.AfterFunc(time.Until(ws.idle[0].free.Add(idleTimeout)), ws.reap)
	}
}

// close closes the idle connections, and each other one when its request is done.
func (ws *wires) close() {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	ws.closed = true
	if ws.reaper != nil {
		ws.reaper.Stop()
		ws.reaper = nil
	}
	for _, w := range ws.idle {
		_ = w.conn.Close()
	}
	ws.idle = nil
}

// do sends the request whose head build appends, and returns the connection after reading the answer's head. A server
// may close an idle connection at any time, or send an answer there that nobody asked for. So a request on a reused one
// that received no byte of an answer, or one of another ETag than etag, unless that is "", is sent once more, on a new
// one; all requests here may be repeated.
func (ws *wires) do(ctx context.Context, etag string, build func(b, scratch []byte) (head, spare []byte)) (
	*wire, error) {
	for fresh := false; ; fresh = true {
		w, err := ws.get(ctx, fresh)
		if err != nil {
			return nil, err
		}
		err = w.exchange(ctx, build)
		stray := w.used && w.head.status/100 == 2 && !bytes.Contains(w.head.etag, []byte(etag))
		if err == nil && !stray {
			return w, nil
		}
		again := w.used && (err == nil || len(w.in) == 0 && reset(err)) && ctx.Err() == nil
		w.left = 1 // the connection is in an unknown state
		_ = w.Close()
		if !again {
			return nil, cmp.Or(err, ctx.Err())
		}
	}
}

// past as a connection's deadline ends its reads and writes at once.
var past = time.Unix(1, 0)

// exchange sends a request and reads the answer's head.
func (w *wire) exchange(ctx context.Context, build func(b, scratch []byte) (head, spare []byte)) error {
	w.in, w.from = w.in[:0], 0
	if err := w.conn.SetDeadline(time.Now().Add(headTimeout)); err != nil {
		return err
	}
	w.stop = context.AfterFunc(ctx, func() { _ = w.conn.SetDeadline(past) })
	w.out, w.scratch = build(w.out[:0], w.scratch)
	if _, err := w.conn.Write(w.out); err != nil {
		return err
	}
	for {
		if err := w.readHead(); err != nil {
			return err
		}
		if w.head.status >= 200 {
			break
		}
		if w.head.status == 101 { // nobody asked for another protocol
			return errBadHead
		}
	}
	// From here on only ctx ends a read. Its deadline may just have been overwritten.
	if err := w.conn.SetDeadline(time.Time{}); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	w.left = w.head.length
	if w.head.status == 204 || w.head.status == 304 {
		w.left = 0
	}
	return nil
}

// readHead reads one head, even an interim one, and keeps the bytes after it.
func (w *wire) readHead() error {
	w.in = append(w.in[:0], w.in[w.from:]...) // after an interim answer
	w.from = 0
	for seen := 0; ; {
		if n := headEnd(w.in, seen); n >= 0 {
			var err error
			w.head, err = parseHead(w.in[:n])
			w.from = n
			return err
		}
		seen = len(w.in)
		if seen == cap(w.in) {
			if seen >= maxHead {
				return errBadHead
			}
			w.in = append(make([]byte, 0, min(4*seen, maxHead)), w.in...)
		}
		n, err := w.conn.Read(w.in[seen:cap(w.in)])
		w.in = w.in[:seen+n]
		if err != nil && n == 0 {
			if errors.Is(err, io.EOF) {
				err = io.ErrUnexpectedEOF
			}
			return err
		}
	}
}

// Read implements [io.Reader] for the body.
func (w *wire) Read(p []byte) (int, error) {
	if w.left == 0 {
		return 0, io.EOF
	}
	if w.left > 0 && int64(len(p)) > w.left {
		p = p[:w.left]
	}
	var n int
	var err error
	if w.from < len(w.in) {
		n = copy(p, w.in[w.from:])
		w.from += n
	} else {
		n, err = w.conn.Read(p)
	}
	if w.left > 0 {
		w.left -= int64(n)
		if errors.Is(err, io.EOF) && w.left > 0 {
			err = io.ErrUnexpectedEOF
		}
	}
	return n, err
}

// Close returns the connection, or closes it if it is not at the end of an answer.
func (w *wire) Close() error {
	if w.stop == nil {
		return nil
	}
	quiet := w.stop() // otherwise its deadline has passed, or will at any moment
	w.stop = nil
	if quiet && w.left == 0 && w.from == len(w.in) && !w.head.close && !w.head.chunked {
		w.pool.put(w)
		return nil
	}
	return w.conn.Close()
}

// body returns the answer's body without its transfer coding. Closing it closes w.
func (w *wire) body() io.ReadCloser {
	if !w.head.chunked {
		return w
	}
	return struct {
		io.Reader
		io.Closer
	}{httputil.NewChunkedReader(w), w}
}

const (
	dialTime  = 5 * time.Second        // for all addresses, and then for TLS
	dialShare = 500 * time.Millisecond // for each but the last: a live store answers a SYN in milliseconds
)

var lookup = net.DefaultResolver.LookupHost // tests have their own

// dial connects to one of a host's addresses, from both ends of their list: it is sorted by family, and one of these
// may lead nowhere. A [net.Dialer] would give each 2 s, and never try the last of four if the others are away.
func dial(ctx context.Context, network, addr string) (conn net.Conn, err error) {
	ctx, cancel := context.WithTimeout(ctx, dialTime)
	defer cancel()
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, err
	}
	addrs, err := lookup(ctx, host)
	for d := (net.Dialer{KeepAlive: 15 * time.Second}); len(addrs) > 0; slices.Reverse(addrs) {
		if d.Timeout = dialShare; len(addrs) == 1 {
			d.Timeout = dialTime
		}
		if conn, err = d.DialContext(ctx, network, net.JoinHostPort(addrs[0], port)); err == nil {
			break
		}
		addrs = addrs[1:]
	}
	return conn, err
}

// dialer returns a function that connects to host[:port].
func dialer(host string, secure bool, config *tls.Config) func(ctx context.Context) (net.Conn, error) {
	addr := withPort(host, "80")
	if secure {
		addr, config = withPort(host, "443"), config.Clone()
		config.ServerName, _, _ = net.SplitHostPort(addr)
	}
	return func(ctx context.Context) (net.Conn, error) {
		conn, err := dial(ctx, "tcp", addr)
		if err != nil || !secure {
			return conn, err
		}
		ctx, cancel := context.WithTimeout(ctx, dialTime)
		defer cancel()
		over := tls.Client(conn, config)
		if err = over.HandshakeContext(ctx); err != nil {
			_ = conn.Close()
		}
		return over, err
	}
}

// withPort adds the port if host has none.
func withPort(host, port string) string {
	if _, _, err := net.SplitHostPort(host); err == nil {
		return host
	}
	return net.JoinHostPort(strings.Trim(host, "[]"), port)
}

// reset reports whether err means that the other side closed the connection.
func reset(err error) bool {
	return errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE)
}
