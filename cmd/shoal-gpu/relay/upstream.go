package relay

import (
	"context"
	"errors"
	"fmt"
	"net"

	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/internal/handover"
	"github.com/shoalfs/shoal/loader/feedpb"
)

// slots is memory for batches from the server: shared with it, or, without shared memory, this process's own, in which
// the Chunks of batches are gathered.
type slots struct {
	mem    []byte
	bytes  int // of one
	count  int
	header int      // bytes before a batch in a slot
	conn   net.Conn // of the handover; nil: the memory is this process's own
	free   chan int // of its own slots
}

// openSlots maps the server's slots, or allocates some for batches of total bytes.
func openSlots(ctx context.Context, feed string, p *feedpb.Pool, own, total int) (*slots, error) {
	if p != nil {
		mem, _, c, err := handover.AskSlots(ctx, feed, handover.Request{Key: p.GetKey()}, p.GetSlots(),
			p.GetSlotBytes())
		if err != nil {
			return nil, fmt.Errorf("shared memory: %w", err)
		}
		return &slots{mem: mem, bytes: int(p.GetSlotBytes()), count: int(p.GetSlots()), header: handover.SlotHeader,
			conn: c}, nil
	}
	page := unix.Getpagesize()
	s := &slots{bytes: (max(total, 1) + page - 1) / page * page, count: own, free: make(chan int, own)}
	var err error
	if s.mem, err = unix.Mmap(-1, 0, own*s.bytes, unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS); err != nil {
		return nil, fmt.Errorf("memory for %d batches of %d bytes: %w", own, total, err)
	}
	for i := range own {
		s.free <- i
	}
	return s, nil
}

// shared reports whether the memory is the server's.
func (s *slots) shared() bool { return s.conn != nil }

// slot returns slot i, from 0.
func (s *slots) slot(i int) []byte { return s.mem[i*s.bytes:][:s.bytes] }

// close gives the slots back. Memory that the device may be using stays mapped.
func (s *slots) close(inUse bool) (err error) {
	if !inUse {
		err = unix.Munmap(s.mem)
	}
	if s.conn != nil {
		err = errors.Join(err, s.conn.Close())
	}
	return err
}
