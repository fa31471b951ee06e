package e2e

import (
	"context"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// wire is the connection of one trainer to a feed, as a place where things may happen: at a given byte, in
// either direction, it stops, tells, and goes on or is cut. It waits for a server that is being started,
// so that nobody else has to.
type wire struct {
	addr     string // for the trainer
	upstream string // the server's
	listener net.Listener
	ctx      context.Context
	cancel   context.CancelFunc
	conns    sync.WaitGroup

	mu     sync.Mutex
	open   map[net.Conn]struct{}
	left   int64 // bytes until it happens
	up     bool  // counted of what the trainer sends; else of what it receives
	happen func()
}

// network splits an address of a feed. TLS goes through as it is.
func network(addr string) (network, address string) {
	scheme, rest, _ := strings.Cut(addr, "://")
	if scheme == "unix" {
		return "unix", rest
	}
	return "tcp", rest
}

// newWire lays a wire from at, a unix path or an address of loopback, to a server. happen, if it is not
// nil, is called once, when the given number of bytes has passed.
func newWire(t testing.TB, at, upstream string, up bool, after int64, happen func()) *wire {
	t.Helper()
	kind, address := network(at)
	l, err := net.Listen(kind, address)
	if err != nil {
		t.Fatal(err)
	}
	scheme, _, _ := strings.Cut(upstream, "://")
	w := &wire{addr: scheme + "://" + l.Addr().String(), upstream: upstream, listener: l, open: map[net.Conn]struct{}{},
		left: after, up: up, happen: happen}
	w.ctx, w.cancel = context.WithCancel(context.Background())
	w.conns.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			w.conns.Go(func() { w.join(c) })
		}
	})
	return w
}

// close cuts everything and waits until nothing of it is left.
func (w *wire) close() {
	w.cancel()
	w.listener.Close()
	w.cut()
	w.conns.Wait()
}

// cut ends the connections that there are.
func (w *wire) cut() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for c := range w.open {
		c.Close()
	}
}

// join copies between a trainer and the server until either ends.
func (w *wire) join(trainer net.Conn) {
	defer trainer.Close()
	kind, address := network(w.upstream)
	var server net.Conn
	for {
		var err error
		if server, err = net.Dial(kind, address); err == nil {
			break
		}
		select {
		case <-w.ctx.Done():
			return
		case <-time.After(2 * time.Millisecond): // until it is there
		}
	}
	w.mu.Lock()
	w.open[trainer], w.open[server] = struct{}{}, struct{}{}
	w.mu.Unlock()
	if w.ctx.Err() != nil { // closed in between
		w.cut()
	}
	var both sync.WaitGroup
	both.Go(func() { w.copy(server, trainer, true) })
	w.copy(trainer, server, false)
	both.Wait()
	w.mu.Lock()
	delete(w.open, trainer)
	delete(w.open, server)
	w.mu.Unlock()
}

func (w *wire) copy(to, from net.Conn, up bool) {
	defer to.Close()
	defer from.Close()
	buf, rights := make([]byte, 32<<10), make([]byte, 256)
	for {
		n, passed, err := receive(from, buf, rights)
		first, happen := w.pass(n, up)
		if first > 0 {
			if !send(to, buf[:first], rights[:passed]) {
				return
			}
			passed = 0
		}
		if happen != nil {
			happen()
		}
		if n > first && !send(to, buf[first:n], rights[:passed]) || err != nil {
			return
		}
	}
}

// receive reads, on a unix socket with the descriptors that are passed along.
func receive(c net.Conn, buf, rights []byte) (n, passed int, err error) {
	if u, ok := c.(*net.UnixConn); ok {
		n, passed, _, _, err = u.ReadMsgUnix(buf, rights)
		return n, passed, err
	}
	n, err = c.Read(buf)
	return n, 0, err
}

// send writes what receive has read, and closes its own copies of the descriptors.
func send(c net.Conn, buf, rights []byte) bool {
	if len(rights) == 0 {
		_, err := c.Write(buf)
		return err == nil
	}
	_, _, err := c.(*net.UnixConn).WriteMsgUnix(buf, rights, nil)
	messages, _ := unix.ParseSocketControlMessage(rights)
	for i := range messages {
		fds, _ := unix.ParseUnixRights(&messages[i])
		for _, fd := range fds {
			_ = unix.Close(fd)
		}
	}
	return err == nil
}

// pass counts n bytes. It returns how many go before what happens, and that.
func (w *wire) pass(n int, up bool) (first int, happen func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.happen == nil || up != w.up {
		return n, nil
	}
	if int64(n) <= w.left {
		w.left -= int64(n)
		return n, nil
	}
	first, happen, w.happen = int(w.left), w.happen, nil
	return first, happen
}
