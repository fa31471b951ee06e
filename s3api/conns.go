package s3api

import (
	"net"
	"net/http"
	"sync"
	"time"
)

// conns bounds the connections. Nobody holds a place by silence: if all are taken, a new connection gets that of the one that has been
// without a request at work for longest. Only if a request is at work on each is it refused.
type conns struct {
	most int

	mu  sync.Mutex
	all map[net.Conn]*place
}

// place is what is known of a connection.
type place struct {
	since time.Time // when it came, or its last request ended
	busy  bool      // a request is at work
}

func newConns(most int) *conns { return &conns{most: max(most, 1), all: map[net.Conn]*place{}} }

// enter finds a place for c.
func (cs *conns) enter(c net.Conn) bool {
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
			return false
		}
		delete(cs.all, oldest)
		go oldest.Close() // TLS says goodbye, which may take a while
	}
	cs.all[c] = &place{since: time.Now()}
	return true
}

// work notes that a request begins or ends. It returns false if c has lost its place.
func (cs *conns) work(c net.Conn, busy bool) bool {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	p := cs.all[c]
	if p != nil {
		p.busy, p.since = busy, time.Now()
	}
	return p != nil || c == nil
}

func (cs *conns) leave(c net.Conn) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	delete(cs.all, c)
}

// listener gives each connection a place.
type listener struct {
	net.Listener
	conns *conns
}

// Accept implements [net.Listener].
func (l *listener) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		p := &placed{Conn: c, conns: l.conns}
		if l.conns.enter(p) {
			return p, nil
		}
		go refuse(c)
	}
}

// refuse answers a connection for which there is no place.
func refuse(c net.Conn) {
	_ = c.SetDeadline(time.Now().Add(time.Second))
	_ = (&http.Response{StatusCode: http.StatusServiceUnavailable, ProtoMajor: 1, ProtoMinor: 1, Header: http.Header{"Retry-After": {"1"}}, Close: true}).Write(c)
	_ = c.Close()
}

// placed is a connection with a place.
type placed struct {
	net.Conn
	conns *conns
}

// Close implements [net.Conn].
func (c *placed) Close() error {
	c.conns.leave(c)
	return c.Conn.Close()
}
