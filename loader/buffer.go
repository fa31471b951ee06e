package loader

import (
	"math/bits"
	"slices"
	"sync"
	"unsafe"

	"google.golang.org/grpc/mem"
)

// planeAlign is the alignment of every plane, in the buffer and in memory: a cache line, which is also enough for
// the vectorised loads of numpy and torch.
const planeAlign = 64

func alignUp(n int64) int64 { return (n + planeAlign - 1) &^ (planeAlign - 1) }

// bufferSize rounds up so that there are few sizes, at most a sixteenth above the request. The minimum is a page,
// since gRPC does not count references to less.
func bufferSize(n int64) int64 {
	n = max(n, 4096)
	step := int64(1) << max(bits.Len64(uint64(n-1))-5, 6)
	return (n + step - 1) &^ (step - 1)
}

// pool recycles the memory of batches. It is not a sync.Pool: raw batches all differ in size, and fresh memory
// costs more than filling it, by a page fault for each 4 KiB (a fifth of the daemon's CPU on a raw feed,
// measured). The zero value is ready to use.
type pool struct {
	mu    sync.Mutex
	free  [][]byte // by age
	bytes int64
}

// maxFree bounds the pool's unused memory, which is not reserved: enough for the batches in flight of one session
// with raw photographs, 4 MB each. A single piece may be larger, up to maxPiece: one batch of 256 decoded
// pictures, which the next batch reuses.
const (
	maxFree  = 32 << 20
	maxPiece = 64 << 20
)

// get returns size bytes: the smallest free piece that is at most a quarter larger, or fresh memory.
func (p *pool) get(size int64) []byte {
	p.mu.Lock()
	best := -1
	for i, b := range p.free {
		if n := int64(cap(b)); n >= size && n <= size+size/4 && (best < 0 || n < int64(cap(p.free[best]))) {
			best = i
		}
	}
	if best >= 0 {
		b := p.free[best]
		p.free = slices.Delete(p.free, best, best+1)
		p.bytes -= int64(cap(b))
		p.mu.Unlock()
		return b[:size]
	}
	p.mu.Unlock()
	b := make([]byte, size+planeAlign)
	off := -uintptr(unsafe.Pointer(unsafe.SliceData(b))) & (planeAlign - 1)
	return b[off : int64(off)+size : int64(off)+size]
}

// put takes memory back. Above the bound, the pieces that were free longest are dropped.
func (p *pool) put(b []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.free = append(p.free, b)
	p.bytes += int64(cap(b))
	for p.bytes > maxFree && (len(p.free) > 1 || p.bytes > maxPiece) {
		p.bytes -= int64(cap(p.free[0]))
		p.free = slices.Delete(p.free, 0, 1)
	}
}

// drop releases all free memory.
func (p *pool) drop() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.free, p.bytes = nil, 0
}

// buffer is a batch's memory. It returns to the pool when gRPC drops the last reference to it, which may never
// happen if a connection breaks; the reservation is given back by the session's end in any case.
type buffer struct {
	data     []byte
	owner    *session
	released sync.Once
}

// newBuffer makes a buffer of bufferSize(n) bytes, which are reserved already.
func (s *session) newBuffer(n int64) *buffer {
	size := bufferSize(n)
	b := &buffer{data: s.srv.pool.get(size), owner: s}
	s.mu.Lock()
	s.buffers[b] = struct{}{}
	s.mu.Unlock()
	s.srv.counters.held.Add(size)
	return b
}

// release gives the reservation back, once.
func (b *buffer) release() {
	b.released.Do(func() {
		size := int64(len(b.data))
		b.owner.srv.counters.held.Add(-size)
		b.owner.srv.o.Memory.Release(size)
	})
}

// shared returns a counted reference to the first n bytes, for gRPC. The buffer is freed with the last reference to
// it or to a slice of it.
func (b *buffer) shared(n int64) mem.Buffer { return mem.NewBuffer(new(b.data[:n]), b) }

// Get implements mem.BufferPool. gRPC never asks the pool of a buffer for others.
func (*buffer) Get(n int) *[]byte { return new(make([]byte, n)) }

// Put gives memory and reservation back. Nobody uses the buffer any more.
func (b *buffer) Put(*[]byte) {
	b.owner.mu.Lock()
	delete(b.owner.buffers, b)
	b.owner.mu.Unlock()
	b.owner.srv.pool.put(b.data)
	b.release()
}
