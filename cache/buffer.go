package cache

import (
	"math/bits"
	"sync"
	"sync/atomic"
)

// buffer holds the bytes of one extent, with a reference count. Who holds a reference may read data; nobody may write.
type buffer struct {
	data   []byte
	coded  int // length of data if that is the coded form of a file, in the memory of the whole file; 0: as it came
	refs   atomic.Int32
	size   int64 // what the ledger was asked for
	class  Class
	ledger *Ledger
	lent   *phase       // in which it was fetched, if other nodes ask this one for it, which is not to keep it
	detour bool         // it was fetched for one of them
	asked  atomic.Int32 // how often they did, if it is lent
	read   atomic.Bool  // here, if it is lent
}

// Release drops a reference, if b is not nil. The last one frees the memory and its reservation.
func (b *buffer) Release() {
	if b == nil {
		return
	}
	switch n := b.refs.Add(-1); {
	case n == 0:
		putBytes(b.data)
		b.data = nil
		b.ledger.Release(b.size, b.class)
		if b.detour && b.asked.Load() < 2 && !b.read.Load() {
			b.lent.judge(false)
		}
	case n < 0:
		panic("cache: buffer released twice")
	}
}

// wanted notes who gets it: a reader here, or another node.
func (b *buffer) wanted(here bool) {
	if b.lent != nil && (here && !b.read.Swap(true) && b.detour || !here && (b.asked.Add(1) > 1 || !b.detour)) {
		b.lent.judge(true)
	}
}

// newBuffer returns a buffer of n bytes with one reference. Its bytes (footprint(n) of class c) are reserved already.
func newBuffer(l *Ledger, n int, c Class) *buffer {
	b := &buffer{data: getBytes(n), size: footprint(n), class: c, ledger: l}
	b.refs.Store(1)
	return b
}

// Extents come in every size. Their memory is reused in four size classes per octave, which wastes at most a fifth,
// and an eighth on average. These free lists are not a sync.Pool: the garbage collector empties that, and touching
// fresh memory costs more than filling it (16 page faults for 62 KB, 20 to 30 µs).
var free struct {
	mu      sync.Mutex
	classes [64 * 4][][]byte
	bytes   int
}

// maxFree bounds the free lists, which the ledger does not count: the memory of 256 requests of 62 KB in flight.
const maxFree = 16 << 20

func sizeClass(n int) (class, size int) {
	n = max(n, 4096)
	octave := bits.Len(uint(n-1)) - 1 // 2^octave < n <= 2^(octave+1)
	step := 1 << max(octave-2, 0)
	base := 1 << octave
	k := (n - base + step - 1) / step // 1..4
	return octave*4 + k - 1, base + k*step
}

func footprint(n int) int64 {
	_, size := sizeClass(n)
	return int64(size)
}

func getBytes(n int) []byte {
	class, size := sizeClass(n)
	free.mu.Lock()
	if list := free.classes[class]; len(list) > 0 {
		p := list[len(list)-1]
		free.classes[class] = list[:len(list)-1]
		free.bytes -= size
		free.mu.Unlock()
		return p[:n]
	}
	free.mu.Unlock()
	return make([]byte, n, size)
}

func putBytes(p []byte) {
	class, size := sizeClass(cap(p))
	free.mu.Lock()
	defer free.mu.Unlock()
	if free.bytes+size <= maxFree {
		free.classes[class] = append(free.classes[class], p[:0])
		free.bytes += size
	}
}
