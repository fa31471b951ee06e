package cache

import (
	"math/bits"
	"sync"
	"sync/atomic"
)

// Buffer holds the bytes of one extent. It is counted by reference: whoever holds a reference may
// read Bytes, nobody may write, and the last Release gives memory and reservation back.
type Buffer struct {
	data   []byte
	refs   atomic.Int32
	size   int64 // what the ledger was asked for
	class  Class
	ledger *Ledger
}

// Bytes returns the content, valid until the holder's Release.
func (b *Buffer) Bytes() []byte { return b.data }

// Retain adds a reference. The caller must hold one.
func (b *Buffer) Retain() { b.refs.Add(1) }

// Release drops a reference.
func (b *Buffer) Release() {
	switch n := b.refs.Add(-1); {
	case n == 0:
		putBytes(b.data)
		b.data = nil
		b.ledger.Release(b.size, b.class)
	case n < 0:
		panic("cache: buffer released twice")
	}
}

// newBuffer returns a buffer of n bytes with one reference, over bytes that are reserved already
// (footprint(n) of class c).
func newBuffer(l *Ledger, n int, c Class) *Buffer {
	b := &Buffer{data: getBytes(n), size: footprint(n), class: c, ledger: l}
	b.refs.Store(1)
	return b
}

// Extents come in every size. They are pooled in four classes an octave, which wastes at most a
// fifth and an eighth on average; without pooling the collector runs once every few hundred extents.
var pools [64 * 4]sync.Pool

func sizeClass(n int) (class, size int) {
	n = max(n, 4096)
	octave := bits.Len(uint(n-1)) - 1 // 2^octave < n <= 2^(octave+1), or n == 2^octave+…
	step := 1 << max(octave-2, 0)
	base := 1 << octave
	k := (n - base + step - 1) / step // 1..4
	return octave*4 + k - 1, base + k*step
}

// footprint returns the bytes that a buffer of n bytes occupies.
func footprint(n int) int64 {
	_, size := sizeClass(n)
	return int64(size)
}

func getBytes(n int) []byte {
	class, size := sizeClass(n)
	if p, ok := pools[class].Get().(*[]byte); ok {
		return (*p)[:n]
	}
	return make([]byte, n, size)
}

func putBytes(p []byte) {
	class, size := sizeClass(cap(p))
	if size != cap(p) {
		return
	}
	p = p[:cap(p)]
	pools[class].Put(&p)
}
