package pillow

import (
	"bytes"
	"encoding/binary"
	"image"
	"math/rand/v2"
	"testing"

	"github.com/shoalfs/shoal/gpuingest/jpeg"
)

// TestLoopsAgree compares the vector loops with the portable ones, over sizes that do not fill a vector.
func TestLoopsAgree(t *testing.T) {
	if !haveSIMD {
		t.Skip("this CPU has no AVX2: one set of loops is all there is")
	}
	defer setSIMD(true)
	r := rand.New(rand.NewPCG(4, 4))
	for trial := range 60 {
		size := image.Pt(1+r.IntN(90), 1+r.IntN(70))
		src := make([]byte, 3*size.X*size.Y)
		for i := range src {
			src[i] = byte(r.Uint32())
		}
		if trial%3 == 0 {
			clear(src[:len(src)/2])
		}
		factor, k := r.Float64()*3, r.IntN(1<<16+1)
		m := &[6]float64{1 + r.NormFloat64()/3, r.NormFloat64() / 3, r.NormFloat64() * 9, r.NormFloat64() / 3,
			1 + r.NormFloat64()/3, r.NormFloat64() * 9}
		to := image.Pt(1+r.IntN(90), 1+r.IntN(70))
		kernel := image.Pt(1+2*r.IntN((size.X+1)/2), 1+2*r.IntN((size.Y+1)/2))
		other := bytes.Clone(src)
		r.Shuffle(len(other), func(i, j int) { other[i], other[j] = other[j], other[i] })
		for name, f := range map[string]func(pix, dst []byte) []byte{
			"saturation": func(pix, _ []byte) []byte { Saturation(pix, factor); return pix },
			"hue":        func(pix, _ []byte) []byte { Hue(pix, factor/6); return pix },
			"mix":        func(pix, _ []byte) []byte { Mix("uint8", pix, other, k); return pix },
			"sharpness": func(pix, dst []byte) []byte {
				Sharpness(dst, pix, size, factor, make([]byte, 3*size.X))
				return dst
			},
			"blur": func(pix, dst []byte) []byte { Blur(dst, pix, size, kernel, 0.1+factor); return dst },
			"bilinear": func(pix, _ []byte) []byte {
				dst := make([]byte, 3*to.X*to.Y)
				Affine(dst, to, pix, size, m, jpeg.Bilinear, [3]uint8{1, 2, 3})
				return dst
			},
			"bicubic": func(pix, _ []byte) []byte {
				dst := make([]byte, 3*to.X*to.Y)
				Affine(dst, to, pix, size, m, jpeg.Bicubic, [3]uint8{})
				return dst
			},
		} {
			setSIMD(true)
			fast := f(bytes.Clone(src), make([]byte, len(src)))
			setSIMD(false)
			if slow := f(bytes.Clone(src), make([]byte, len(src))); !bytes.Equal(fast, slow) {
				t.Errorf("%s of %v differs, trial %d", name, size, trial)
			}
		}
	}
}

// TestPadFar checks borders further out than the picture is wide against their definitions.
func TestPadFar(t *testing.T) {
	for b, want := range map[Border]string{
		Constant:  "......abc......",
		Edge:      "aaaaaaabccccccc",
		Reflect:   "cbabcbabcbabcba",
		Symmetric: "abccbaabccbaabc",
	} {
		row := func(s string) (pix []byte) {
			for i := range s {
				pix = append(pix, s[i], s[i], s[i])
			}
			return pix
		}
		box := image.Rect(-6, 0, 9, 1)
		dst := make([]byte, 3*box.Dx())
		Pad(dst, box, row("abc"), image.Pt(3, 1), b, [3]uint8{'.', '.', '.'})
		if !bytes.Equal(dst, row(want)) {
			t.Errorf("%s: %s, want %s", b, dst, row(want))
		}
	}
	for _, b := range []Border{Edge, Reflect, Symmetric} {
		dst := make([]byte, 5*5*3)
		Pad(dst, image.Rect(-2, -2, 3, 3), []byte{7, 8, 9}, image.Pt(1, 1), b, [3]uint8{})
		if !bytes.Equal(dst, bytes.Repeat([]byte{7, 8, 9}, 25)) {
			t.Errorf("%s of one pixel: %v", b, dst)
		}
	}
}

// TestMix checks the rounding against its definition, at the ends and between.
func TestMix(t *testing.T) {
	for _, k := range []int{0, 1, 12345, 32768, 65535, 65536} {
		for a := range 256 {
			x, y := make([]byte, 256), make([]byte, 256)
			for b := range 256 {
				x[b], y[b] = byte(a), byte(b)
			}
			Mix("uint8", x, y, k)
			for b := range 256 {
				if want := (a*k + b*(65536-k) + 32768) >> 16; int(x[b]) != want {
					t.Fatalf("%d and %d at %d: %d, want %d", a, b, k, x[b], want)
				}
			}
		}
	}
}

// TestMixFloat16Loops compares the vector loop with the portable one, which takes what is left of eight, over all
// halves.
func TestMixFloat16Loops(t *testing.T) {
	const n = 1 << 16
	make16 := func(f func(i int) uint16) []byte {
		b := make([]byte, 2*n)
		for i := range n {
			binary.NativeEndian.PutUint16(b[2*i:], f(i))
		}
		return b
	}
	for _, k := range []int{0, 1, 20000, 32768, 65536} {
		for _, step := range []int{1, 7919, 30011} {
			a := make16(func(i int) uint16 { return uint16(i) })
			b := make16(func(i int) uint16 { return uint16(i * step) })
			whole, pieces := bytes.Clone(a), bytes.Clone(a)
			Mix("fp16", whole, b, k)
			for i := 0; i < n; i += 4 {
				Mix("fp16", pieces[2*i:2*i+8], b[2*i:2*i+8], k)
			}
			for i := range n {
				x, y := binary.NativeEndian.Uint16(whole[2*i:]), binary.NativeEndian.Uint16(pieces[2*i:])
				if nan := x&0x7fff > 0x7c00 && y&0x7fff > 0x7c00; x != y && !nan {
					t.Fatalf("%04x and %04x at %d: %04x, in pieces %04x", i, i*step&0xffff, k, x, y)
				}
			}
		}
	}
}
