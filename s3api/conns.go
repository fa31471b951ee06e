package s3api

import (
	"errors"
	"io"
	"net"
	"net/http"
	"sync"
	"time"
)

// patience is how long a connection keeps its place without a request at work. A client that has just connected, or
// goes on with its next request, is not silent.
const patience = 250 * time.Millisecond

// conns bounds the connections. Nobody holds a place by silence: if all are taken, a new connection gets that of the
// one that has been without a request at work for longest. While none has been for as long as patience, the new one
// waits.
type conns struct {
	most  int
	freed chan struct{} // told when a connection has left

	mu  sync.Mutex
	all map[net.Conn]*place
}

type place struct {
	since time.Time // when it came, or its last request ended
	busy  bool      // a request is at work
}

func (cs *conns) enter(c net.Conn) {
	for {
		wait := cs.take(c, time.Now())
		if wait <= 0 {
			return
		}
		select {
		case <-cs.freed:
		case <-time.After(wait):
		}
	}
}

// take finds a place for c, or returns how long to wait before the next try.
func (cs *conns) take(c net.Conn, now time.Time) (wait time.Duration) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	if len(cs.all) >= cs.most {
		var oldest net.Conn
		for x, p := range cs.all {
			if !p.busy && (oldest == nil || p.since.Before(cs.all[oldest].since)) {
				oldest = x
			}
		}
		if oldest == nil {
			return patience
		}
		if idle := now.Sub(cs.all[oldest].since); idle < patience {
			return patience - idle
		}
		delete(cs.all, oldest)
		go oldest.Close() // TLS says goodbye, which may take a while
	}
	cs.all[c] = &place{since: now}
	return 0
}

// work notes that a request begins or ends. It returns false if c has lost its place.
func (cs *conns) work(c net.Conn, busy bool) bool {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	p := cs.all[c]
	if p != nil {
		p.busy, p.since = busy, time.Now()
	}
	return p != nil
}

func (cs *conns) leave(c net.Conn) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	delete(cs.all, c)
	select {
	case cs.freed <- struct{}{}:
	default:
	}
}

type listener struct {
	net.Listener
	conns *conns
}

func (l *listener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	p := &placed{Conn: c, conns: l.conns}
	l.conns.enter(p)
	return p, nil
}

type placed struct {
	net.Conn
	conns *conns
}

// Write gives each piece a time of its own: an answer may begin long after its request, and go on for long.
func (c *placed) Write(p []byte) (int, error) {
	_ = c.SetWriteDeadline(time.Now().Add(pauseTime))
	return c.Conn.Write(p)
}

func (c *placed) Close() error {
	c.conns.leave(c)
	return c.Conn.Close()
}

// upload is the body of a request. It is read as long as the client goes on sending, and until the request is answered:
// net/http's transport may go on reading after an early answer of the origin.
type upload struct {
	io.ReadCloser
	control *http.ResponseController
	asks    bool // the client sends it only when it is told to, which the first Read does

	reading sync.Mutex    // held by Read
	got     int           // of the piece that is coming
	waited  time.Duration // for the client, since it began to come: the origin takes the time that it takes
	mu      sync.Mutex
	begun   bool
	over    bool
}

var errAnswered = errors.New("the request was answered")

func (u *upload) Read(p []byte) (int, error) {
	u.reading.Lock()
	defer u.reading.Unlock()
	begun := time.Now()
	if !u.deadline(begun.Add(pieceTime - u.waited)) {
		return 0, errAnswered
	}
	n, err := u.ReadCloser.Read(p)
	u.got, u.waited = u.got+n, u.waited+time.Since(begun)
	if u.got >= piece {
		u.got, u.waited = 0, 0
	}
	if err != nil { // from here on a silent client is one that waits for the answer
		u.deadline(time.Time{})
	}
	return n, err
}

// deadline sets that of the next Read, unless there must be none.
func (u *upload) deadline(t time.Time) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.over {
		return false
	}
	u.begun = true
	_ = u.control.SetReadDeadline(t)
	return true
}

// end lets no other Read begin, and waits for a running one, which ends if the client is silent for restTime.
func (u *upload) end() {
	u.mu.Lock()
	u.over = true
	_ = u.control.SetReadDeadline(time.Now().Add(restTime))
	u.mu.Unlock()
	u.reading.Lock()
	defer u.reading.Unlock()
	_ = u.control.SetReadDeadline(time.Time{})
}

// rest reads what is left of a body that was answered early: most clients see the answer only when they have sent all,
// and otherwise a broken connection instead of it.
func (u *upload) rest() {
	_ = u.control.Flush()
	u.end()
	if u.asks && !u.begun {
		return // it is not sent
	}
	for n := int64(0); n < maxRest; n += piece {
		_ = u.control.SetReadDeadline(time.Now().Add(restTime))
		if _, err := io.CopyN(io.Discard, u.ReadCloser, piece); err != nil {
			return
		}
	}
}
