package s3api

import (
	"net"
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

// place is what is known of a connection.
type place struct {
	since time.Time // when it came, or its last request ended
	busy  bool      // a request is at work
}

// enter waits for a place for c.
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
	_ = c.SetWriteDeadline(time.Now().Add(pieceTime))
	return c.Conn.Write(p)
}

func (c *placed) Close() error {
	c.conns.leave(c)
	return c.Conn.Close()
}
