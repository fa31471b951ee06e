package loader

import (
	"math/bits"
	"sync"
	"sync/atomic"
	"unsafe"

	"google.golang.org/grpc/mem"
)

// planeAlign is the alignment of every plane, in the buffer and in memory: a cache line, and what
// numpy and torch take for vectorised loads.
const planeAlign = 64

func alignUp(n int64) int64 { return (n + planeAlign - 1) &^ (planeAlign - 1) }

// bufferSize rounds up so that few sizes exist, at most a sixteenth more than asked for. gRPC does
// not count references to less than a page, so that is the least.
func bufferSize(n int64) int64 {
	n = max(n, 4096)
	step := int64(1) << max(bits.Len64(uint64(n-1))-5, 6)
	return (n + step - 1) &^ (step - 1)
}

// pool recycles the memory of batches by size.
type pool struct{ sizes sync.Map } // int64 -> *sync.Pool of []byte

func (p *pool) get(size int64) []byte {
	if v, ok := p.sizes.Load(size); ok {
		if b, ok := v.(*sync.Pool).Get().(*[]byte); ok {
			return *b
		}
	}
	b := make([]byte, size+planeAlign)
	off := -uintptr(unsafe.Pointer(unsafe.SliceData(b))) & (planeAlign - 1)
	return b[off : int64(off)+size : int64(off)+size]
}

func (p *pool) put(b []byte) {
	v, ok := p.sizes.Load(int64(len(b)))
	if !ok {
		v, _ = p.sizes.LoadOrStore(int64(len(b)), new(sync.Pool))
	}
	v.(*sync.Pool).Put(&b)
}

// buffer is a batch's memory. It goes back to the pool when gRPC has dropped the last reference to
// it, which it may never do if a connection breaks; the reservation is given back by the session's
// end in any case.
type buffer struct {
	data     []byte
	owner    *session
	reserved atomic.Bool
}

// newBuffer makes a buffer of bufferSize(n) bytes, which are reserved already.
func (s *session) newBuffer(n int64) *buffer {
	size := bufferSize(n)
	b := &buffer{data: s.srv.pool.get(size), owner: s}
	b.reserved.Store(true)
	s.mu.Lock()
	s.buffers[b] = struct{}{}
	s.mu.Unlock()
	s.srv.counters.held.Add(size)
	return b
}

// release gives the reservation back, once.
func (b *buffer) release() {
	if !b.reserved.CompareAndSwap(true, false) {
		return
	}
	size := int64(len(b.data))
	b.owner.srv.counters.held.Add(-size)
	b.owner.srv.memory.Release(size)
}

// free gives memory and reservation back. Nobody may use the buffer any more.
func (b *buffer) free() {
	b.owner.mu.Lock()
	delete(b.owner.buffers, b)
	b.owner.mu.Unlock()
	b.owner.srv.pool.put(b.data)
	b.release()
}

// shared returns a counted reference to the first n bytes, for gRPC. The buffer is freed when it and
// all its slices are.
func (b *buffer) shared(n int64) mem.Buffer {
	data := b.data[:n]
	return mem.NewBuffer(&data, freer{b})
}

// freer is how a mem.Buffer tells that its last reference is gone.
type freer struct{ b *buffer }

// Get implements mem.BufferPool. gRPC never asks the pool of a buffer for others.
func (freer) Get(n int) *[]byte {
	b := make([]byte, n)
	return &b
}

// Put implements mem.BufferPool.
func (f freer) Put(*[]byte) { f.b.free() }
