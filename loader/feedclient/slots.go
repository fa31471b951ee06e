package feedclient

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/internal/handover"
	"github.com/shoalfs/shoal/loader/feedpb"
	"github.com/shoalfs/shoal/loader/internal/wire"
)

// Transport is how batches come to the client.
type Transport string

// The transports. Slots are memory shared with a server on the same host, over a unix socket; batches are views of
// it. Chunks are messages on the connection, which are copied.
const (
	Auto   Transport = ""       // Slots if the server offers them
	Slots  Transport = "slots"  // an error without them
	Chunks Transport = "chunks" // never Slots
)

// ParseTransport reads auto, slots or chunks.
func ParseTransport(text string) (Transport, error) {
	switch t := Transport(text); t {
	case Auto, Slots, Chunks:
		return t, nil
	case "auto":
		return Auto, nil
	}
	return "", fmt.Errorf("transport %q: must be auto, slots or chunks", text)
}

// mapping is a session's pool, mapped. It is unmapped once the stream is closed and all batches in it are released.
type mapping struct {
	data  []byte
	slots uint32
	bytes uint64            // of a slot
	limit int               // slots that this client may hold
	conn  net.Conn          // the lease: its end tells the server that the slots are no longer used
	in    *wire.FrameReader // of messages on conn; nil: they come on the stream
	out   *wire.FrameWriter
	refs  atomic.Int32
}

// slotHeader is the length of the header before a batch's buffer.
const slotHeader = 4096

// handOver fetches the descriptor of a pool and maps it.
func handOver(ctx context.Context, addr string, p *feedpb.Pool, limit int) (m *mapping, err error) {
	var reply poolReply
	c, files, err := handover.Ask(ctx, addr, handover.Request{Key: p.GetKey(), Frames: true}, &reply)
	if err != nil {
		return nil, err
	}
	defer func() {
		for _, f := range files {
			_ = unix.Close(f) // the mapping stays
		}
		if err != nil {
			c.Close()
		}
	}()
	size, err := reply.check(files, p)
	if err != nil {
		return nil, err
	}
	data, err := unix.Mmap(files[0], 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map %d bytes: %w", size, err)
	}
	_ = unix.Madvise(data, unix.MADV_HUGEPAGE) // as the server does
	m = &mapping{data: data, slots: p.GetSlots(), bytes: p.GetSlotBytes(), limit: limit, conn: c}
	m.refs.Store(1)
	if reply.Frames {
		m.in, m.out = wire.NewFrameReader(c, wire.MaxServerFrame), wire.NewFrameWriter(c)
	}
	return m, nil
}

// poolReply is the server's description of a pool.
type poolReply struct {
	V         int    `json:"v"`
	Slots     uint32 `json:"slots"`
	SlotBytes uint64 `json:"slot_bytes"`
	Frames    bool   `json:"frames"` // messages come on the handover's connection
	Error     string `json:"error"`
}

// check compares the memory handed over with the pool announced, and returns its size.
func (r *poolReply) check(files []int, p *feedpb.Pool) (size int, err error) {
	var st unix.Stat_t
	switch {
	case r.Error != "":
		return 0, errors.New(r.Error)
	case len(files) != 1:
		return 0, fmt.Errorf("the server sent %d descriptors instead of 1", len(files))
	case r.Slots != p.GetSlots() || r.SlotBytes != p.GetSlotBytes() || r.SlotBytes <= slotHeader || r.Slots == 0:
		return 0, fmt.Errorf("the server handed over %d slots of %d bytes, but announced %d of %d", r.Slots, r.SlotBytes, p.GetSlots(), p.GetSlotBytes())
	}
	if err := unix.Fstat(files[0], &st); err != nil {
		return 0, err
	}
	if want := int64(r.Slots) * int64(r.SlotBytes); want/int64(r.Slots) != int64(r.SlotBytes) || st.Size != want {
		return 0, fmt.Errorf("the descriptor's file has %d bytes for %d slots of %d", st.Size, r.Slots, r.SlotBytes)
	}
	seals, err := unix.FcntlInt(uintptr(files[0]), unix.F_GET_SEALS, 0)
	if err != nil || seals&unix.F_SEAL_SHRINK == 0 {
		return 0, errors.New("the descriptor's file is not sealed: its owner could truncate it while it is mapped here")
	}
	return int(st.Size), nil
}

// buffer returns the n bytes of the batch in a slot.
func (m *mapping) buffer(slot uint32, n uint64) ([]byte, error) {
	if slot > m.slots || n > m.bytes-slotHeader {
		return nil, fmt.Errorf("the server put a batch of %d bytes into slot %d; there are %d slots of %d bytes", n, slot, m.slots, m.bytes)
	}
	off := uint64(slot-1)*m.bytes + slotHeader
	return m.data[off : off+n : off+n], nil
}

func (m *mapping) drop() {
	if m.refs.Add(-1) == 0 {
		_ = unix.Munmap(m.data) // fails for wrong arguments only
		m.conn.Close()
	}
}
