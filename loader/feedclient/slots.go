package feedclient

import (
	"context"
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
	refs  atomic.Int32 // the stream's, and the caller's batches in slots
}

// handOver fetches the descriptor of a pool and maps it.
func handOver(ctx context.Context, addr string, p *feedpb.Pool, limit int) (*mapping, error) {
	data, frames, c, err := handover.AskSlots(ctx, addr, handover.Request{Key: p.GetKey(), Frames: true}, p.GetSlots(),
		p.GetSlotBytes())
	if err != nil {
		return nil, err
	}
	_ = unix.Madvise(data, unix.MADV_HUGEPAGE) // as the server does
	m := &mapping{data: data, slots: p.GetSlots(), bytes: p.GetSlotBytes(), limit: limit, conn: c}
	m.refs.Store(1)
	if frames {
		m.in, m.out = wire.NewFrameReader(c, wire.MaxServerFrame), wire.NewFrameWriter(c)
	}
	return m, nil
}

// buffer returns the n bytes of the batch in a slot.
func (m *mapping) buffer(slot uint32, n uint64) ([]byte, error) {
	if slot > m.slots || n > m.bytes-handover.SlotHeader {
		return nil, fmt.Errorf("the server put a batch of %d bytes into slot %d; there are %d slots of %d bytes",
			n, slot, m.slots, m.bytes)
	}
	off := uint64(slot-1)*m.bytes + handover.SlotHeader
	return m.data[off : off+n : off+n], nil
}

func (m *mapping) drop() {
	if m.refs.Add(-1) == 0 {
		_ = unix.Munmap(m.data) // fails for wrong arguments only
		m.conn.Close()
	}
}
