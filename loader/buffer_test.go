package loader

import (
	"testing"
	"unsafe"
)

func TestBufferSize(t *testing.T) {
	var last int64
	sizes := map[int64]bool{}
	for n := int64(1); n < 1<<30; n += 1 + n/97 {
		size := bufferSize(n)
		if size < n || size < last || n > 4096 && size > n+n/16+64 || size%planeAlign != 0 || size < 4096 || bufferSize(size) != size {
			t.Fatalf("%d bytes get %d", n, size)
		}
		last = size
		sizes[size] = true
	}
	if len(sizes) > 32*20 {
		t.Errorf("%d different sizes", len(sizes))
	}
}

func TestPoolAlignment(t *testing.T) {
	var p pool
	for _, n := range []int64{1, 5000, 100_000, 10_000_000} {
		for range 3 {
			b := p.get(bufferSize(n))
			if int64(len(b)) != bufferSize(n) || cap(b) != len(b) {
				t.Fatalf("%d bytes: length %d, capacity %d", n, len(b), cap(b))
			}
			if uintptr(unsafe.Pointer(&b[0]))%planeAlign != 0 {
				t.Errorf("%d bytes at %p", n, &b[0])
			}
			p.put(b)
		}
	}
}
