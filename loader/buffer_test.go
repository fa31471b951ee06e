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
		if size < n || size < last || n > 4096 && size > n+n/16+64 || size%planeAlign != 0 || size < 4096 ||
			bufferSize(size) != size {
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
			if int64(len(b)) != bufferSize(n) {
				t.Fatalf("%d bytes: length %d, capacity %d", n, len(b), cap(b))
			}
			if uintptr(unsafe.Pointer(&b[0]))%planeAlign != 0 {
				t.Errorf("%d bytes at %p", n, &b[0])
			}
			p.put(b)
		}
	}
}

func TestPoolReuses(t *testing.T) {
	var p pool
	a, b := p.get(1<<20), p.get(3<<20)
	p.put(a)
	p.put(b)
	if got := p.get(900 << 10); &got[0] != &a[0] || len(got) != 900<<10 {
		t.Errorf("%d bytes, not from what was free", len(got))
	}
	if got := p.get(900 << 10); &got[0] == &b[0] {
		t.Error("three times the memory that was asked for")
	}
	p.put(a)
	for range 2 * maxFree >> 20 {
		p.put(make([]byte, 1<<20))
	}
	if p.bytes > maxFree || int64(len(p.free)) != p.bytes>>20 {
		t.Errorf("%d bytes in %d pieces", p.bytes, len(p.free))
	}
	if p.drop(); len(p.free) != 0 || p.bytes != 0 {
		t.Error("not empty")
	}
}
