package proxy

import (
	"bufio"
	"bytes"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"time"
)

const (
	clientBuffer = 16 << 10
	// upstreamBuffer takes a whole sample of the usual size with its head, so that it is read and
	// written in one system call each.
	upstreamBuffer = 160 << 10
	// idleLimit is the age at which an unused upstream connection is replaced rather than
	// trusted: the server may be closing it at this moment.
	idleLimit = 2 * time.Second
)

// session is one client connection with its upstream connection. All its work is done by one
// goroutine.
type session struct {
	p      *Proxy
	client net.Conn
	cr     *bufio.Reader
	up     net.Conn // nil until the first request
	ur     *bufio.Reader
	used   time.Time // when up was last used
}

func newSession(p *Proxy, c net.Conn) *session {
	return &session{
		p:      p,
		client: c,
		cr:     bufio.NewReaderSize(c, clientBuffer),
		ur:     bufio.NewReaderSize(nil, upstreamBuffer),
	}
}

func (s *session) close() {
	s.p.closeConn(s.client)
	s.dropUpstream()
}

func (s *session) dropUpstream() {
	if s.up != nil {
		s.p.closeConn(s.up)
		s.up = nil
	}
}

func (s *session) dial() error {
	s.dropUpstream()
	c, err := net.DialTimeout("tcp", s.p.upstream, 10*time.Second)
	if err != nil {
		return err
	}
	if !s.p.track(c) {
		return net.ErrClosed
	}
	s.up = c
	s.ur.Reset(c)
	return nil
}

// serve answers requests until the connection ends. Which side closed it, and why, is the
// client's to judge: there is nobody else to tell.
func (s *session) serve() {
	for s.serveOne() {
	}
}

// serveOne answers one request and reports whether the connection can take another one.
func (s *session) serveOne() bool {
	head, err := readHead(s.cr)
	if err != nil {
		if errors.Is(err, errHead) {
			s.refuse(400, "BadRequest", err.Error(), false, false)
		}
		return false
	}
	start := time.Now()
	req, err := parseRequest(head)
	var f framing
	if err == nil {
		f, err = parseHeaders(head)
	}
	if err != nil {
		s.refuse(400, "BadRequest", err.Error(), false, false)
		return false
	}
	s.count(req.op)
	defer s.p.count(func(c *Stats) { c.InFlight-- })
	sh := s.p.shape.Load()
	fault := sh.pick(req.op, req.key)
	due := start.Add(sh.delay())
	if fault != nil {
		s.p.count(func(c *Stats) { c.Faults[string(fault.Kind)]++ })
		if fault.Kind == Slow {
			due = due.Add(fault.For)
		}
		if fault.Kind == Unavailable || fault.Kind == ETag && f.ifMatch {
			_, _ = s.cr.Discard(len(head))
			// Without the server nothing says 100 Continue, so such a body never comes: the
			// connection cannot be kept.
			if f.expect {
				f.length, f.chunked, f.close = -1, false, true
			}
			if _, err := relayBody(s.cr, io.Discard, f); err != nil {
				return false
			}
			if !s.p.sleep(time.Until(due)) {
				return false
			}
			keep := !f.close && !req.http10
			if fault.Kind == Unavailable {
				s.refuse(503, "SlowDown", "injected by the proxy", req.method == "HEAD", keep)
			} else {
				s.refuse(412, "PreconditionFailed", "injected by the proxy", req.method == "HEAD", keep)
			}
			return keep
		}
	}

	reused := s.up != nil && time.Since(s.used) < idleLimit
	if !reused {
		if err := s.dial(); err != nil {
			s.refuse(502, "BadGateway", err.Error(), req.method == "HEAD", false)
			return false
		}
	}
	noBody := f.length <= 0 && !f.chunked
	respHead, whole, err := s.exchange(head, f, due)
	if err != nil && reused && noBody {
		// The server closed the idle connection just now; a request without a body can be sent
		// again, and head is still in the buffer.
		if err = s.dial(); err == nil {
			respHead, whole, err = s.exchange(head, f, due)
		}
	}
	if err != nil {
		s.refuse(502, "BadGateway", err.Error(), req.method == "HEAD", false)
		return false
	}
	if noBody {
		_, _ = s.cr.Discard(len(head))
	}
	keep, err := s.respond(req, respHead, fault, sh)
	s.used = time.Now()
	return err == nil && keep && whole && !f.close && !req.http10
}

func (s *session) count(op Op) {
	s.p.count(func(c *Stats) {
		c.Requests++
		switch op {
		case OpGet:
			c.Gets++
		case OpHead:
			c.Heads++
		case OpList:
			c.Lists++
		case OpPut:
			c.Puts++
		}
		c.InFlight++
		c.MaxInFlight = max(c.MaxInFlight, c.InFlight)
	})
}

// exchange sends the request and returns, not before due, the head of the final response,
// unconsumed. The request's head is consumed from the client's buffer only when a body follows it.
// whole is false when the server answered before it had the whole body: the connection is then out
// of step.
func (s *session) exchange(head []byte, f framing, due time.Time) (resp []byte, whole bool, err error) {
	if _, err := s.up.Write(head); err != nil {
		return nil, false, err
	}
	if f.length <= 0 && !f.chunked {
		resp, err = s.finalHead(due)
		return resp, true, err
	}
	_, _ = s.cr.Discard(len(head))
	if f.expect {
		interim, err := readHead(s.ur)
		if err != nil {
			return nil, false, err
		}
		status, err := parseStatus(interim)
		if err != nil {
			return nil, false, err
		}
		if status != 100 {
			return interim, false, nil
		}
		if _, err := s.client.Write(interim); err != nil {
			return nil, false, err
		}
		_, _ = s.ur.Discard(len(interim))
	}
	n, err := relayBody(s.cr, s.up, f)
	s.p.count(func(c *Stats) { c.PutBytes += n })
	if err != nil {
		// The server may have answered and closed before it had read all: that answer counts.
		if h, herr := s.finalHead(due); herr == nil {
			return h, false, nil
		}
		return nil, false, err
	}
	resp, err = s.finalHead(due)
	return resp, true, err
}

// finalHead waits until due and returns the next head that is not an interim (1xx) one. It looks
// only after the wait: the response gathers in the socket meanwhile, and one wake-up is saved.
func (s *session) finalHead(due time.Time) ([]byte, error) {
	if !s.p.sleep(time.Until(due)) {
		return nil, net.ErrClosed
	}
	for {
		h, err := readHead(s.ur)
		if err != nil {
			return nil, err
		}
		status, err := parseStatus(h)
		if err != nil {
			return nil, err
		}
		if status >= 200 {
			return h, nil
		}
		if _, err := s.ur.Discard(len(h)); err != nil {
			return nil, err
		}
	}
}

// respond passes the response on, with the fault if there is one, and reports whether the
// connection can be kept.
func (s *session) respond(req request, head []byte, fault *Fault, sh *shape) (bool, error) {
	status, err := parseStatus(head)
	if err != nil {
		return false, err
	}
	f, err := parseHeaders(head)
	if err != nil {
		return false, err
	}
	if status >= 400 {
		s.p.count(func(c *Stats) { c.Errors++ })
	}
	bodyless := req.method == "HEAD" || status == 204 || status == 304
	if fault != nil && fault.Kind == ETag && f.etagTo > f.etagFrom {
		changeETag(head[f.etagFrom:f.etagTo])
	}
	switch {
	case bodyless:
		_, err = s.client.Write(head)
		if err == nil && fault != nil {
			err = s.strike(fault)
		}
		if err == nil {
			_, err = s.ur.Discard(len(head))
		}
		return !f.close, err
	case f.length < 0:
		// S3 gives the length of every object. A body without one is a listing or an error: faults
		// strike after its head, and the bandwidth limit passes it by.
		if _, err := s.client.Write(head); err != nil {
			return false, err
		}
		if _, err := s.ur.Discard(len(head)); err != nil {
			return false, err
		}
		if fault != nil {
			if err := s.strike(fault); err != nil {
				return false, err
			}
		}
		if !f.chunked {
			_, err := io.Copy(s.client, s.ur)
			return false, err
		}
		_, err := relayBody(s.ur, s.client, f)
		return !f.close, err
	}
	w := bodyWriter{s: s, sh: sh, fault: fault, left: int64(len(head)) + f.length, sent: -int64(len(head))}
	if fault != nil {
		w.strikeAt = max(min(int64(fault.At*float64(f.length)), f.length-1), 0)
	}
	w.isGet = req.op == OpGet
	err = w.relay(s.ur)
	return !f.close, err
}

// errStruck ends a connection by a fault.
var errStruck = errors.New("fault injected")

// strike carries out the faults that break or delay a response at a point. It returns errStruck
// when the connection must end.
func (s *session) strike(fault *Fault) error {
	switch fault.Kind {
	case Reset:
		if c, ok := s.client.(*net.TCPConn); ok {
			_ = c.SetLinger(0)
		}
		return errStruck
	case Truncate:
		return errStruck
	case Stall:
		return s.stall(fault.For)
	}
	return nil
}

// stall waits for d, or until the client gives up: it then closes the connection, which a read
// notices.
func (s *session) stall(d time.Duration) error {
	if s.cr.Buffered() > 0 { // a pipelined request hides the close
		if !s.p.sleep(d) {
			return net.ErrClosed
		}
		return nil
	}
	if err := s.client.SetReadDeadline(time.Now().Add(d)); err != nil {
		return err
	}
	_, err := s.cr.Peek(1)
	if rerr := s.client.SetReadDeadline(time.Time{}); rerr != nil {
		return rerr
	}
	var ne net.Error
	if err == nil || errors.As(err, &ne) && ne.Timeout() {
		return nil
	}
	return err
}

// bodyWriter passes on a head and a body of known length, and lets a fault strike at its place.
type bodyWriter struct {
	s        *session
	sh       *shape
	isGet    bool
	left     int64  // bytes still to come, the head's included
	sent     int64  // body bytes sent; negative while in the head
	fault    *Fault // nil when there is none, or none any more
	strikeAt int64  // body offset of the fault
}

// bandwidthChunk is the grain of the bandwidth limit.
const bandwidthChunk = 64 << 10

func (w *bodyWriter) relay(br *bufio.Reader) error {
	for w.left > 0 {
		if _, err := br.Peek(1); err != nil {
			return err
		}
		n := min(int64(br.Buffered()), w.left)
		if w.sh.bandwidth > 0 {
			n = min(n, bandwidthChunk)
		}
		if w.fault != nil {
			if w.sent < w.strikeAt {
				n = min(n, w.strikeAt-w.sent)
			} else {
				fault := w.fault
				w.fault = nil
				if err := w.s.strike(fault); err != nil {
					return err
				}
			}
		}
		b, err := br.Peek(int(n))
		if err != nil {
			return err
		}
		if w.sh.bandwidth > 0 {
			if d := w.sh.reserve(len(b), time.Now()); d > 0 && !w.s.p.sleep(d) {
				return net.ErrClosed
			}
		}
		if w.isGet { // counted first, so that a client that has it all finds it in the counters
			w.s.p.count(func(c *Stats) { c.GetBytes += max(w.sent+n, 0) - max(w.sent, 0) })
		}
		if _, err := w.s.client.Write(b); err != nil {
			return err
		}
		if _, err := br.Discard(len(b)); err != nil {
			return err
		}
		w.sent += n
		w.left -= n
	}
	if w.fault != nil { // the body is empty
		return w.s.strike(w.fault)
	}
	return nil
}

// changeETag makes another ETag of the same length out of one, quotes kept.
func changeETag(v []byte) {
	for i, c := range v {
		switch {
		case c == '0':
			v[i] = 'f'
			return
		case '1' <= c && c <= '9', 'a' <= c && c <= 'f', 'A' <= c && c <= 'F':
			v[i] = '0'
			return
		}
	}
}

// refuse answers with an S3 error of the proxy's own. keep says whether the connection stays.
func (s *session) refuse(status int, code, message string, bodyless, keep bool) {
	s.p.count(func(c *Stats) { c.Errors++ })
	var text bytes.Buffer
	_ = xml.EscapeText(&text, []byte(message)) // a buffer never fails
	body := fmt.Sprintf("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<Error><Code>%s</Code><Message>%s</Message></Error>", code, &text)
	connection := "close"
	if keep {
		connection = "keep-alive"
	}
	head := fmt.Sprintf("HTTP/1.1 %d %s\r\nContent-Type: application/xml\r\nContent-Length: %d\r\nConnection: %s\r\n\r\n",
		status, code, len(body), connection)
	if bodyless {
		body = ""
	}
	_, _ = io.WriteString(s.client, head+body)
}

// relayBody copies a message body with its framing from br to w and returns the bytes copied.
func relayBody(br *bufio.Reader, w io.Writer, f framing) (int64, error) {
	if !f.chunked {
		if f.length <= 0 {
			return 0, nil
		}
		return io.CopyN(w, br, f.length)
	}
	var total int64
	for {
		line, err := br.ReadSlice('\n')
		if err != nil {
			return total, err
		}
		size, _, _ := bytes.Cut(bytes.TrimRight(line, "\r\n"), []byte(";"))
		n, err := strconv.ParseInt(string(bytes.TrimSpace(size)), 16, 64)
		if err != nil || n < 0 {
			return total, errHead
		}
		if _, err := w.Write(line); err != nil {
			return total, err
		}
		if n == 0 {
			break
		}
		m, err := io.CopyN(w, br, n+2) // with the line end
		total += m
		if err != nil {
			return total, err
		}
	}
	for { // trailers, up to and with the empty line
		line, err := br.ReadSlice('\n')
		if err != nil {
			return total, err
		}
		if _, err := w.Write(line); err != nil {
			return total, err
		}
		if len(bytes.TrimRight(line, "\r\n")) == 0 {
			return total, nil
		}
	}
}
