package fleet

import (
	"net"
	"sync"
)

// door is the one address of the store: it hands each connection to the proxy of the node that it comes from.
type door struct {
	net.Listener
	nodes map[string]*side // by IP address; not changed once serve runs
}

// side is a node's side of the door, a listener.
type side struct {
	at    net.Addr
	conns chan net.Conn
	done  chan struct{}
	once  sync.Once
}

func (d *door) of(ip string) *side {
	s := &side{at: d.Addr(), conns: make(chan net.Conn), done: make(chan struct{})}
	d.nodes[ip] = s
	return s
}

func (d *door) serve() {
	for {
		c, err := d.Accept()
		if err != nil {
			return
		}
		ip, _, _ := net.SplitHostPort(c.RemoteAddr().String())
		s := d.nodes[ip]
		if s == nil {
			_ = c.Close() // not a node
			continue
		}
		select {
		case s.conns <- c:
		case <-s.done:
			_ = c.Close()
		}
	}
}

func (s *side) Accept() (net.Conn, error) {
	select {
	case c := <-s.conns:
		return c, nil
	case <-s.done:
		return nil, net.ErrClosed
	}
}

func (s *side) Close() error {
	s.once.Do(func() { close(s.done) })
	return nil
}

func (s *side) Addr() net.Addr { return s.at }
