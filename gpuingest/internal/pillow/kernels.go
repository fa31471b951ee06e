package pillow

/*
#cgo CFLAGS: -O3 -std=c11 -Wall -Wextra
#cgo LDFLAGS: -lm
#cgo noescape sp_lookup
#cgo nocallback sp_lookup
#cgo noescape sp_histogram
#cgo nocallback sp_histogram
#include "kernels.h"
*/
import "C"

import (
	"image"
	"unsafe"

	"github.com/shoalfs/shoal/gpuingest/jpeg"
)

var haveSIMD = setSIMD(true)

// setSIMD selects the loops, and reports whether vector ones are used. Not safe during calls.
func setSIMD(on bool) bool {
	var v C.int
	if on {
		v = 1
	}
	return C.sp_set_simd(v) != 0
}

func ptr(b []byte) *C.uint8_t { return (*C.uint8_t)(unsafe.Pointer(unsafe.SliceData(b))) }

// Apply looks up every value of pix.
func (t *Table) Apply(pix []byte) {
	C.sp_lookup(ptr(pix), C.size_t(len(pix)/3), (*C.uint8_t)(unsafe.Pointer(t)))
}

// Saturation is ImageEnhance.Color.
func Saturation(pix []byte, factor float64) {
	C.sp_saturate(ptr(pix), C.size_t(len(pix)/3), C.float(factor))
}

// Hue is torchvision's adjust_hue: by factor x 255 steps of Pillow's HSV, towards zero, factor in [-0.5, 0.5].
func Hue(pix []byte, factor float64) {
	C.sp_hue(ptr(pix), C.size_t(len(pix)/3), C.uint8_t(uint8(int(factor*255))))
}

// Grey is convert("L"), in all three channels.
func Grey(pix []byte) { C.sp_grey(ptr(pix), C.size_t(len(pix)/3)) }

func histogram(pix []byte) (h [3][256]uint32) {
	C.sp_histogram(ptr(pix), C.size_t(len(pix)/3), (*C.uint32_t)(unsafe.Pointer(&h)))
	return h
}

// Sharpness is ImageEnhance.Sharpness of src, into dst. row is scratch of a row's length.
func Sharpness(dst, src []byte, size image.Point, factor float64, row []byte) {
	check(dst, size)
	check(src, size)
	C.sp_sharpen(ptr(dst), ptr(src), C.int(size.X), C.int(size.Y), C.float(factor), ptr(row[:3*size.X]))
}

// Affine is Image.transform(to, AFFINE, m, filter, fillcolor=fill). m maps points of the result to points of src.
func Affine(dst []byte, to image.Point, src []byte, size image.Point, m *[6]float64, f jpeg.Filter, fill [3]uint8) {
	check(dst, to)
	check(src, size)
	Fill(dst, fill)
	C.sp_affine(ptr(dst), C.int(to.X), C.int(to.Y), ptr(src), C.int(size.X), C.int(size.Y),
		(*C.double)(unsafe.Pointer(m)), C.int(f))
}

// Blur is torchvision's gaussian_blur of a uint8 picture, into dst: reflected borders, float32, half to even. It sums
// rows and then columns while torch sums the product of both, so a value may differ by one if the sum is within
// float32's error of a half. It allocates. The kernel's radius must be less than each side.
func Blur(dst, src []byte, size image.Point, kernel image.Point, sigma float64) {
	check(dst, size)
	check(src, size)
	kx, ky := gauss(kernel.X, sigma), gauss(kernel.Y, sigma)
	tmp, line := make([]float32, 3*size.X*size.Y), make([]float32, 3*(size.X+kernel.X))
	f := func(s []float32) *C.float { return (*C.float)(unsafe.Pointer(unsafe.SliceData(s))) }
	C.sp_blur(ptr(dst), ptr(src), C.int(size.X), C.int(size.Y), f(kx), C.int(kernel.X), f(ky), C.int(kernel.Y),
		f(tmp), f(line))
}

var elements = map[string]int{"uint8": 1, "fp16": 2, "bf16": 2, "fp32": 4} // bytes, by type

// Mix sets a to the weighted mean of a and b, of a type, where a's weight is k/65536. uint8 becomes
// (a*k + b*(65536-k) + 32768) >> 16; fp32 becomes a*w + b*(1-w) with w = k/65536, each product rounded; fp16 and bf16
// are widened for that, and rounded to nearest, half to even. The values of bf16 must be finite.
func Mix(dtype string, a, b []byte, k int) {
	elem := elements[dtype]
	pair(a, b, k, elem)
	x, y, n, w := unsafe.Pointer(ptr(a)), unsafe.Pointer(ptr(b)), C.size_t(len(a)/elem), C.float(float32(k)/(1<<16))
	switch dtype {
	case "uint8":
		C.sp_mix(ptr(a), ptr(b), n, C.uint32_t(k))
	case "fp16":
		C.sp_mix_f16((*C.uint16_t)(x), (*C.uint16_t)(y), n, w)
	case "bf16":
		C.sp_mix_bf16((*C.uint16_t)(x), (*C.uint16_t)(y), n, w)
	case "fp32":
		C.sp_mix_f32((*C.float)(x), (*C.float)(y), n, w)
	}
}

func lumaSum(pix []byte) uint64 { return uint64(C.sp_luma_sum(ptr(pix), C.size_t(len(pix)/3))) }
