package relay

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/internal/handover"
)

// pool is a session's device buffers, and host memory for the planes that the host reads.
type pool struct {
	key       string
	device    Device
	ring      Ring
	host      *os.File // a piece of hostBytes for each buffer
	hostMem   []byte
	hostBytes int
	lost      func() // called when the client's handover connection ends

	mu   sync.Mutex
	free []int         // buffers, in the order in which they became free
	out  []bool        // buffers that the client has
	over bool          // releases are ignored
	wake chan struct{} // something has become free

	claimed chan struct{} // closed once the client has the descriptors, or was refused them
	gone    chan struct{} // closed when a client that has them has closed their connection
}

const maxBuffers = 64 // of a client: descriptors go in one message, which holds 253

func newPool(d Device, ring Ring, count, hostBytes int, lost func()) (*pool, error) {
	page := os.Getpagesize()
	p := &pool{key: rand.Text(), device: d, ring: ring, hostBytes: (max(hostBytes, 1) + page - 1) / page * page,
		lost: lost, out: make([]bool, count), wake: make(chan struct{}, 1), claimed: make(chan struct{}),
		gone: make(chan struct{})}
	var err error
	if p.host, p.hostMem, err = handover.Memfd("shoal-gpu-host", int64(count*p.hostBytes)); err != nil {
		return nil, err
	}
	for i := range count {
		p.free = append(p.free, i)
	}
	return p, nil
}

// take returns the buffer that was released first, if the device is done with it too. If there is none, b is negative,
// and released reports whether a released buffer still waits for the device.
func (p *pool) take() (b int, released bool, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i, b := range p.free {
		if free, err := p.ring.Free(b); err != nil || free {
			p.free = slices.Delete(p.free, i, i+1)
			return b, true, err
		}
	}
	return -1, len(p.free) > 0, nil
}

// give marks a buffer as the client's.
func (p *pool) give(b int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.out[b] = true
}

// release takes buffers back, by their numbers from 1. It returns how many were valid.
func (p *pool) release(slots []uint32) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.over {
		return 0, nil
	}
	for i, s := range slots {
		if s < 1 || int(s) > len(p.out) || !p.out[s-1] {
			return i, fmt.Errorf("the client released slot %d, which it does not have", s)
		}
		p.out[s-1] = false
		p.free = append(p.free, int(s-1))
	}
	select {
	case p.wake <- struct{}{}:
	default:
	}
	return len(slots), nil
}

// abandon returns the number of buffers that the client has, and accepts no more releases.
func (p *pool) abandon() (n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.over = true
	for _, out := range p.out {
		if out {
			n++
		}
	}
	return n
}

// close frees the host's memory.
func (p *pool) close() error { return errors.Join(unix.Munmap(p.hostMem), p.host.Close()) }

// poolReply is the answer to a client that asks for a pool's descriptors.
type poolReply struct {
	V         int     `json:"v"`
	Slots     int     `json:"slots,omitempty"`
	SlotBytes int     `json:"slot_bytes,omitempty"`
	Device    string  `json:"device,omitempty"`
	UUID      string  `json:"uuid,omitempty"`
	HostBytes int     `json:"host_bytes,omitempty"`
	Events    []event `json:"events,omitempty"`
	Error     string  `json:"error,omitempty"`
}

type event struct {
	Ready string `json:"ready"`
	Free  string `json:"free"`
}

// handOver serves one connection until it closes.
func (s *Server) handOver(c *net.UnixConn) {
	p, err := s.claim(c)
	if err == nil {
		defer close(p.gone)
		defer p.lost()
		err = p.handOver(c)
		close(p.claimed)
	}
	if err != nil {
		s.o.Log.Warn("a handover failed", "error", err)
		_ = handover.WriteReply(c, poolReply{V: handover.Version, Error: err.Error()}) // it may be gone
		return
	}
	_ = c.SetDeadline(time.Time{})
	_, _ = c.Read(make([]byte, 1)) // nothing more comes but its end
}

// claim reads the request and finds the pool; a key works once.
func (s *Server) claim(c io.Reader) (*pool, error) {
	q, err := handover.ReadRequest(c)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.pools[q.Key]
	if p == nil {
		return nil, errors.New(
			"no open session has this key, or it was used before: use the key in Opened.pool of a stream that is open")
	}
	delete(s.pools, q.Key)
	return p, nil
}

// handOver sends the descriptors.
func (p *pool) handOver(c *net.UnixConn) error {
	fds, ready, free, err := p.ring.Export()
	defer func() {
		for _, fd := range fds {
			_ = unix.Close(fd) // the client has its own copy
		}
	}()
	if err != nil {
		return err
	}
	r := poolReply{V: handover.Version, Slots: len(p.out), SlotBytes: p.ring.BufferBytes(), Device: p.device.Name(),
		UUID: p.device.UUID(), HostBytes: p.hostBytes}
	for i := range ready {
		r.Events = append(r.Events, event{hex.EncodeToString(ready[i]), hex.EncodeToString(free[i])})
	}
	return handover.WriteReply(c, r, append(fds[:len(fds):len(fds)], int(p.host.Fd()))...)
}
