package loader

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/internal/handover"
	"github.com/shoalfs/shoal/loader/feedpb"
)

// The layout of a slot's header (docs/protocol.md, "The slot's header").
const (
	slotMagic       = "SHOALSLT"
	slotVersion     = 1
	slotHeaderBytes = handover.SlotHeader
	slotPlaneBytes  = 64
	slotFilling     = 1 // flag
	maxSlotPlanes   = slotHeaderBytes/slotPlaneBytes - 1
)

// maxSlots bounds a client's slots. Beyond a few tens they only make the CPU's cache less useful.
const maxSlots = 256

// slotMemory is a memfd cut into slots of equal size, each a header and a batch's buffer. Its owner reserves the
// memory.
type slotMemory struct {
	file  *os.File
	data  []byte   // of all slots
	bytes int64    // of one
	fills []uint64 // of each slot, ever: the copies in the slots can be written by clients
}

// slotBytes returns the size of slots for batches of total bytes: whole pages, so that a single slot can be protected,
// registered with a device, or advised on.
func slotBytes(total int64) int64 {
	page := int64(os.Getpagesize())
	return (slotHeaderBytes + total + page - 1) / page * page
}

// newSlotMemory creates the memory.
func newSlotMemory(count int, bytes int64) (*slotMemory, error) {
	file, data, err := handover.Memfd("shoal-slots", int64(count)*bytes)
	if err != nil {
		return nil, fmt.Errorf("%d slots of %d bytes: %w", count, bytes, err)
	}
	// Huge pages make reading batches faster, if the kernel gives them to shared memory
	// (/sys/kernel/mm/transparent_hugepage/shmem_enabled; docs/tuning.md).
	_ = unix.Madvise(data, unix.MADV_HUGEPAGE)
	return &slotMemory{file: file, data: data, bytes: bytes, fills: make([]uint64, count)}, nil
}

// close unmaps the memory. Clients that have mapped it keep it.
func (m *slotMemory) close() error {
	err := errors.Join(unix.Munmap(m.data), m.file.Close())
	m.data = nil
	return err
}

// slot returns slot s, from 1.
func (m *slotMemory) slot(s uint32) []byte {
	off := int64(s-1) * m.bytes
	return m.data[off : off+m.bytes : off+m.bytes]
}

// count is the number of slots.
func (m *slotMemory) count() int { return len(m.fills) }

// room is the largest batch that fits.
func (m *slotMemory) room() int64 { return m.bytes - slotHeaderBytes }

// begin writes the header of slot s for a batch that is being built in it.
func (m *slotMemory) begin(s uint32, h *feedpb.BatchHeader) {
	b, le := m.slot(s)[:slotHeaderBytes], binary.LittleEndian
	m.fills[s-1]++
	clear(b)
	copy(b, slotMagic)
	le.PutUint32(b[8:], slotVersion)
	le.PutUint32(b[12:], slotHeaderBytes)
	le.PutUint32(b[16:], s)
	le.PutUint32(b[20:], slotFilling)
	le.PutUint64(b[24:], m.fills[s-1])
	le.PutUint32(b[32:], h.GetEpoch())
	le.PutUint32(b[36:], h.GetRows())
	le.PutUint64(b[40:], h.GetIndex())
	le.PutUint64(b[48:], h.GetTotalBytes())
	planes := h.GetPlanes()[:min(len(h.GetPlanes()), maxSlotPlanes)]
	le.PutUint32(b[56:], uint32(len(planes)))
	for i, p := range planes {
		e := b[slotPlaneBytes*(i+1):][:slotPlaneBytes]
		copy(e[:15], p.GetName()) // a zero ends it
		copy(e[16:27], p.GetDtype())
		le.PutUint32(e[28:], uint32(len(p.GetShape())))
		le.PutUint64(e[32:], p.GetOffset())
		le.PutUint64(e[40:], p.GetLength())
		for j, d := range p.GetShape()[:min(len(p.GetShape()), 4)] {
			le.PutUint32(e[48+4*j:], uint32(min(d, math.MaxUint32)))
		}
	}
}

// finish marks the slot's batch as complete.
func (m *slotMemory) finish(s uint32) {
	binary.LittleEndian.PutUint32(m.slot(s)[20:], 0)
}

// sizes describes the sizes of a dataset's samples.
type sizes struct {
	count      int
	sum, most  int64
	sumSquares float64
}

// sizesOf adds up all sizes. The result for a version never changes.
func sizesOf(ds Dataset) (z sizes) {
	z.count = ds.Len()
	for i := range z.count {
		n := ds.Size(i)
		z.sum += n
		z.most = max(z.most, n)
		z.sumSquares += float64(n) * float64(n)
	}
	return z
}

// slotted returns the size of the data plane for which slots of raw batches are laid out: the mean and six standard
// deviations of the sum of that many samples. One batch in 10^9 of a shuffled epoch exceeds it. It is at most rows
// times the largest sample, and at most twice the mean. Larger batches go in Chunks: those of orders that bring large
// samples together, and of datasets in which a few samples hold most of the bytes.
func (z sizes) slotted(rows int) int64 {
	if z.count == 0 {
		return 0
	}
	mean := float64(z.sum) / float64(z.count)
	deviation := math.Sqrt(max(0, z.sumSquares/float64(z.count)-mean*mean))
	n := mean * float64(rows)
	n += min(6*deviation*math.Sqrt(float64(rows)), n)
	return int64(math.Ceil(min(n, float64(z.most)*float64(rows))))
}

// A client that keeps all its slots is reported after slotWarning, and at most once every slotWarningEvery.
const (
	slotWarning      = 5 * time.Second
	slotWarningEvery = time.Minute
)

// slotWait is one wait for a slot. At its end window.starve(false) is due.
type slotWait struct {
	session  *session
	others   time.Time        // since when other sessions have held all slots
	patience <-chan time.Time // with them
	warning  <-chan time.Time // nil until the client has held all of its own, and wanted more
}

// wait waits for a change of the pass, or until the wait has lasted too long. The caller holds pass.mu.
func (w *slotWait) wait(ctx context.Context) {
	s := w.session
	p, l := s.pass, s.lease
	if len(l.refs) < l.limit && w.others.IsZero() {
		w.others, w.patience = time.Now(), time.After(sharePatience)
	}
	s.window.starve(l.given >= l.limit)
	if w.warning == nil && s.window.starving() {
		w.warning = time.After(slotWarning) // from now on: the wait may have begun long before
	}
	changed := p.changed
	p.mu.Unlock()
	defer p.mu.Lock()
	select {
	case <-changed:
	case <-ctx.Done():
	case <-w.patience:
	case <-w.warning:
		s.warnSlots()
	}
}

// warnSlots warns of a client that keeps all its slots and waits for another batch.
func (s *session) warnSlots() {
	now := time.Now().UnixNano()
	last := s.slotsWarned.Load()
	if !s.window.starving() || last != 0 && now-last < int64(slotWarningEvery) ||
		!s.slotsWarned.CompareAndSwap(last, now) {
		return
	}
	s.srv.log.Warn("a feed session waits: its client holds all its slots and wants another batch",
		"session", s.spec.session, "rank", s.spec.rank, "client", s.spec.client, "slots", s.lease.limit,
		"remedy", "release older batches, copy batches to keep them, or ask for more slots")
}
