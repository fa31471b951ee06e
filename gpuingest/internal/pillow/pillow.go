// Package pillow implements Pillow 9.4's ImageEnhance, ImageOps, ImageFilter and Image.transform for packed RGB, bit
// for bit, and the few operations that torchvision's path for PIL pictures adds in numpy or torch. Functions allocate
// only where documented.
package pillow

import (
	"image"
	"math"
	"unsafe"
)

// Table maps the 256 values of each of three channels.
type Table [3][256]uint8

// each makes a table that is the same for all channels.
func each(f func(v int) uint8) *Table {
	var t Table
	for v := range 256 {
		x := f(v)
		t[0][v], t[1][v], t[2][v] = x, x, x
	}
	return &t
}

// blend is Image.blend's value between a (alpha 0) and b (alpha 1), or beyond, in float32, truncated.
func blend(a, b int, alpha float32) uint8 {
	x := float32(alpha * float32(b-a)) // the conversion prevents a fused multiply-add
	return uint8(min(max(float32(a)+x, 0), 255))
}

// Brightness is ImageEnhance.Brightness.
func Brightness(pix []byte, factor float64) {
	each(func(v int) uint8 { return blend(0, v, float32(factor)) }).Apply(pix)
}

// Contrast is ImageEnhance.Contrast: it blends with the mean of the grey picture.
func Contrast(pix []byte, factor float64) {
	n := len(pix) / 3
	sum := lumaSum(pix)
	mean := int(float64(sum)/float64(n) + 0.5)
	each(func(v int) uint8 { return blend(mean, v, float32(factor)) }).Apply(pix)
}

// Invert is ImageOps.invert.
func Invert(pix []byte) { each(func(v int) uint8 { return uint8(255 - v) }).Apply(pix) }

// Posterize is ImageOps.posterize: it keeps the upper bits, 0 to 8 of them.
func Posterize(pix []byte, bits int) {
	each(func(v int) uint8 { return uint8(v &^ (1<<(8-bits) - 1)) }).Apply(pix)
}

// Solarize is ImageOps.solarize: it inverts values from the threshold up.
func Solarize(pix []byte, threshold float64) {
	each(func(v int) uint8 {
		if float64(v) < threshold {
			return uint8(v)
		}
		return uint8(255 - v)
	}).Apply(pix)
}

// AutoContrast is ImageOps.autocontrast without cutoff.
func AutoContrast(pix []byte) {
	h := histogram(pix)
	var t Table
	for c := range 3 {
		lo, hi := 0, 255
		for lo < 255 && h[c][lo] == 0 {
			lo++
		}
		for hi > 0 && h[c][hi] == 0 {
			hi--
		}
		scale, offset := 1.0, 0.0
		if hi > lo {
			scale = 255.0 / float64(hi-lo)
			offset = float64(-lo) * scale
		}
		for v := range 256 {
			x := float64(float64(v) * scale)
			t[c][v] = uint8(min(max(int(x+offset), 0), 255))
		}
	}
	t.Apply(pix)
}

// Equalize is ImageOps.equalize.
func Equalize(pix []byte) {
	h := histogram(pix)
	var t Table
	for c := range 3 {
		sum, last, kinds := 0, 0, 0
		for _, n := range h[c] {
			if n > 0 {
				sum, last, kinds = sum+int(n), int(n), kinds+1
			}
		}
		step := (sum - last) / 255
		n := step / 2
		for v := range 256 {
			t[c][v] = uint8(v)
			if kinds > 1 && step > 0 {
				t[c][v] = uint8(min(n/step, 255))
				n += int(h[c][v])
			}
		}
	}
	t.Apply(pix)
}

// Fill sets every pixel.
func Fill(pix []byte, colour [3]uint8) {
	if colour == [3]uint8{} {
		clear(pix)
		return
	}
	n := copy(pix, colour[:])
	for n < len(pix) {
		n += copy(pix[n:], pix[:n])
	}
}

// Border says how Pad continues a picture beyond its edges.
type Border uint8

// Borders, as numpy.pad and torchvision name them.
const (
	Constant  Border = iota
	Edge             // the edge's pixel again
	Reflect          // mirrored, without the edge
	Symmetric        // mirrored, with the edge
)

// String returns torchvision's name.
func (b Border) String() string {
	return [...]string{"constant", "edge", "reflect", "symmetric"}[b]
}

// index maps sample i to the sample of [0, n) that replaces it.
func (b Border) index(i, n int) int {
	period := 2 * n
	switch b {
	case Edge:
		return min(max(i, 0), n-1)
	case Reflect:
		if n == 1 {
			return 0
		}
		period -= 2
	}
	i %= period
	if i < 0 {
		i += period
	}
	if i < n {
		return i
	}
	if b == Reflect {
		return period - i
	}
	return period - 1 - i
}

// Pad copies box of src, which may extend beyond it, into dst.
func Pad(dst []byte, box image.Rectangle, src []byte, size image.Point, b Border, fill [3]uint8) {
	to := box.Size()
	check(dst, to)
	check(src, size)
	inside := box.Intersect(image.Rectangle{Max: size})
	if b == Constant {
		Fill(dst, fill)
		for y := inside.Min.Y; y < inside.Max.Y; y++ {
			copy(dst[((y-box.Min.Y)*to.X+inside.Min.X-box.Min.X)*3:],
				src[(y*size.X+inside.Min.X)*3:(y*size.X+inside.Max.X)*3])
		}
		return
	}
	for y := range to.Y {
		row, out := src[b.index(box.Min.Y+y, size.Y)*size.X*3:][:size.X*3], dst[y*to.X*3:][:to.X*3]
		for x := 0; x < to.X; {
			at := box.Min.X + x
			n := 1
			if i := b.index(at, size.X); at >= 0 && at < size.X {
				n = copy(out[3*x:], row[3*i:]) / 3
			} else {
				copy(out[3*x:3*x+3], row[3*i:])
			}
			x += n
		}
	}
}

func gauss(n int, sigma float64) []float32 {
	k := make([]float32, n)
	var sum float32
	for i := range k {
		x := (float32(i) - float32(n-1)*0.5) / float32(sigma)
		k[i] = float32(math.Exp(float64(-0.5 * x * x)))
		sum += k[i]
	}
	for i := range k {
		k[i] /= sum
	}
	return k
}

func pair(a, b []byte, k, elem int) {
	aligned := func(x []byte) bool { return uintptr(unsafe.Pointer(unsafe.SliceData(x)))%uintptr(elem) == 0 }
	if len(a) != len(b) || len(a)%elem != 0 || k < 0 || k > 1<<16 || !aligned(a) || !aligned(b) {
		panic("pillow: rows to mix that do not fit each other")
	}
}

// check keeps the C code within its buffers.
func check(pix []byte, size image.Point) {
	if size.X < 1 || size.Y < 1 || len(pix) != 3*size.X*size.Y {
		panic("pillow: pixels that are not of their size")
	}
}
