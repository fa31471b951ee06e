package handover

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// mux separates the handovers among a listener's connections from gRPC's. A silent connection does not make others
// wait.
type mux struct {
	net.Listener
	serve func(*net.UnixConn)
	log   *slog.Logger
	conns chan net.Conn
	ended chan struct{} // closed when it accepts no more

	ctx    context.Context // ends with Close, and with it the connections that gRPC does not have
	cancel func()
	wg     sync.WaitGroup
}

// Mux accepts the connections of l until it is closed. It passes handovers to serve, each on its own goroutine, and
// returns the others from Accept, untouched. It closes a connection when serve returns.
func Mux(l net.Listener, log *slog.Logger, serve func(*net.UnixConn)) net.Listener {
	m := &mux{Listener: l, serve: serve, log: log, conns: make(chan net.Conn), ended: make(chan struct{})}
	m.ctx, m.cancel = context.WithCancel(context.Background())
	m.wg.Go(m.accept)
	return m
}

// Accept returns the next connection that is not a handover.
func (m *mux) Accept() (net.Conn, error) {
	select {
	case c := <-m.conns:
		return c, nil
	case <-m.ended:
		return nil, net.ErrClosed
	}
}

// Close ends the handovers too, and waits for them.
func (m *mux) Close() error {
	m.cancel()
	err := m.Listener.Close()
	m.wg.Wait()
	return err
}

func (m *mux) accept() {
	defer close(m.ended)
	for {
		c, err := Accept(m.Listener.Accept, m.log)
		if err != nil {
			return
		}
		m.wg.Go(func() { m.sort(c) })
	}
}

// Accept returns what accept, a listener's, does: the next connection, or an error once the listener is closed. It
// waits while connections fail, most likely for lack of descriptors: others will be closed.
func Accept[C net.Conn](accept func() (C, error), log *slog.Logger) (C, error) {
	for pause := 5 * time.Millisecond; ; pause = min(2*pause, time.Second) {
		c, err := accept()
		if err == nil || errors.Is(err, net.ErrClosed) {
			return c, err
		}
		log.Warn("cannot accept a connection now", "cause", err)
		time.Sleep(pause)
	}
}

// sort identifies a connection by its first byte, which it leaves in place: neither HTTP/2 nor TLS begins with an S.
func (m *mux) sort(c net.Conn) {
	stop := context.AfterFunc(m.ctx, func() { _ = c.Close() }) // its reader closes it again
	u, ok := c.(*net.UnixConn)
	if ok {
		_ = u.SetReadDeadline(time.Now().Add(Timeout)) // a connection that is closed fails below
		first, err := peek(u)
		if err == nil && first == magic[0] {
			m.serve(u)
		}
		if err != nil || first == magic[0] {
			stop()
			_ = c.Close()
			return
		}
		_ = u.SetReadDeadline(time.Time{})
	}
	if !stop() { // it is closed
		return
	}
	select {
	case m.conns <- c:
	case <-m.ctx.Done():
		_ = c.Close()
	}
}

// peek returns the first byte that arrives, without consuming it.
func peek(c *net.UnixConn) (byte, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return 0, err
	}
	var first [1]byte
	var n int
	var failed error
	err = raw.Read(func(fd uintptr) bool {
		for {
			n, _, failed = unix.Recvfrom(int(fd), first[:], unix.MSG_PEEK)
			if !errors.Is(failed, syscall.EINTR) {
				return !errors.Is(failed, syscall.EAGAIN)
			}
		}
	})
	switch {
	case err != nil:
		return 0, err
	case failed != nil:
		return 0, failed
	case n == 0:
		return 0, io.EOF
	}
	return first[0], nil
}
