package relay

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/internal/handover"
	"github.com/shoalfs/shoal/loader/feedpb"
)

// target is gRPC's form of a feed's address.
func target(addr string) (string, error) {
	if host, ok := strings.CutPrefix(addr, "tcp://"); ok {
		return "dns:///" + host, nil
	}
	if strings.HasPrefix(addr, "unix:///") {
		return addr, nil
	}
	return "", fmt.Errorf("feed address %q: must be unix:///PATH or tcp://HOST:PORT", addr)
}

// slotHeader is the length of the header before a batch in a slot of the server.
const slotHeader = 4096

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
		return mapSlots(ctx, feed, p)
	}
	page := unix.Getpagesize()
	s := &slots{bytes: (max(total, 1) + page - 1) / page * page, count: own, free: make(chan int, own)}
	var err error
	if s.mem, err = unix.Mmap(-1, 0, own*s.bytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS); err != nil {
		return nil, fmt.Errorf("memory for %d batches of %d bytes: %w", own, total, err)
	}
	for i := range own {
		s.free <- i
	}
	return s, nil
}

// mapSlots maps the slots that the server hands over.
func mapSlots(ctx context.Context, feed string, p *feedpb.Pool) (s *slots, err error) {
	var r poolReply
	c, files, err := handover.Ask(ctx, feed, handover.Request{Key: p.GetKey()}, &r)
	if err != nil {
		return nil, fmt.Errorf("shared memory: %w", err)
	}
	defer func() {
		for _, f := range files {
			_ = unix.Close(f) // the mapping stays
		}
		if err != nil {
			err = errors.Join(fmt.Errorf("shared memory: %w", err), c.Close())
		}
	}()
	switch {
	case r.Error != "":
		return nil, errors.New(r.Error)
	case len(files) != 1:
		return nil, fmt.Errorf("the server sent %d descriptors instead of 1", len(files))
	}
	var st unix.Stat_t
	if err := unix.Fstat(files[0], &st); err != nil {
		return nil, err
	}
	if r.Slots < 1 || r.SlotBytes <= slotHeader || r.Slots != int(p.GetSlots()) || r.SlotBytes != int(p.GetSlotBytes()) || st.Size != int64(r.Slots)*int64(r.SlotBytes) {
		return nil, fmt.Errorf("the server handed over %d slots of %d bytes in a file of %d, but announced %d of %d", r.Slots, r.SlotBytes, st.Size, p.GetSlots(), p.GetSlotBytes())
	}
	s = &slots{bytes: r.SlotBytes, count: r.Slots, header: slotHeader, conn: c}
	if s.mem, err = unix.Mmap(files[0], 0, int(st.Size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
		return nil, fmt.Errorf("map %d bytes: %w", st.Size, err)
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
