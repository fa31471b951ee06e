package jpeg

/*
#cgo pkg-config: libjpeg
#cgo CFLAGS: -O3 -std=c11 -Wall -Wextra
#cgo LDFLAGS: -lm
#include "shoaljpeg.h"
*/
import "C"

import (
	"cmp"
	"fmt"
	"image"
	"math"
	"unsafe"
)

// Available tells that this build decodes JPEG.
const Available = true

// The loops: plain C; AVX2, or NEON on arm64; and AVX-512 with VBMI and VNNI.
const (
	portable = iota
	avx2
	vnni
)

var haveSIMD = setSIMD(vnni)

// setSIMD selects the loops, at most the given ones, and returns those in use. Not safe during calls.
func setSIMD(most int) int { return int(C.sj_set_simd(C.int(most))) }

var scratches = &pool[*C.sj_scratch]{func() *C.sj_scratch {
	return C.sj_new()
}, func(s *C.sj_scratch) { C.sj_free(s) }, func(s *C.sj_scratch) int { return int(C.sj_bytes(s)) }}

// DecodeSized decodes the JPEG src, of the size that Size has read, into dst as j describes; dst must have exactly the
// length that the job stores. src may be recoded, by tables that are registered: the pixels are those of the original.
// Safe for concurrent use; allocates no Go memory.
func DecodeSized(dst, src []byte, size image.Point, j *Job) error {
	if err := CheckSize(size); err != nil {
		return err
	}
	if IsRecoded(src) {
		return decodeRecoded(dst, src, size, j)
	}
	if len(src) == 0 {
		return fmt.Errorf("%w: no bytes", ErrTruncated)
	}
	return j.with("decode", decodeNeeds(src), dst, src, size, func(s *C.sj_scratch) C.int {
		return C.sj_decode(s, bytePtr(src), C.size_t(len(src)), bytePtr(j.Table), bytePtr(dst))
	})
}

// with does work with a scratch, which may take so much memory beside that for the resize.
func (j *Job) with(what string, need int64, dst, src []byte, size image.Point, work func(*C.sj_scratch) C.int) error {
	need += j.needs(size)
	s, o, err := scratches.get(need, what)
	if err != nil {
		return err
	}
	defer scratches.put(s, o, need)
	if err := j.fill(C.sj_req(s), size, len(dst)); err != nil {
		return err
	}
	C.sj_req(s).most = C.long(need)
	return result(s, work(s), size, len(src))
}

// Resample applies j to RGB pixels of the given size. It is DecodeSized's resize for pictures of other formats, and
// for chains of two resizes.
func Resample(dst, rgb []byte, size image.Point, j *Job) error {
	length := size.X * size.Y * 3
	if j.FromPlanes {
		length += PlanesSlack
	}
	if size.X <= 0 || size.Y <= 0 || size.X > maxSide || size.Y > maxSide || len(rgb) != length {
		return fmt.Errorf("jpeg: %d bytes are not %dx%d RGB pixels", len(rgb), size.X, size.Y)
	}
	return j.with("resize", 0, dst, rgb, size, func(s *C.sj_scratch) C.int {
		return C.sj_resample(s, bytePtr(rgb), bytePtr(j.Table), bytePtr(dst))
	})
}

// parts returns Box, Size and Window where they are not given, too.
func (j *Job) parts(size image.Point) (box image.Rectangle, out image.Point, win image.Rectangle) {
	box, out, win = j.Box, j.Size, j.Window
	if box.Empty() {
		box = image.Rectangle{Max: size}
	}
	if out == (image.Point{}) {
		out = box.Size()
	}
	if win.Empty() {
		win = image.Rectangle{Max: out}
	}
	return box, out, win
}

const slack = 192 // bytes behind a row, at most

// needs bounds the memory for the resize: the taps of both axes, and the rows between the passes.
func (j *Job) needs(size image.Point) int64 {
	box, out, win := j.parts(size)
	axis := func(in, out, seen int) int64 {
		support := max(float64(in)/float64(max(out, 1)), 1)
		if j.Filter == Bicubic {
			support *= 2
		}
		return 8 * int64(seen+1) * (2*int64(support+2) + 4)
	}
	w, h := min(out.X, win.Dx()), min(out.Y, win.Dy())
	n := axis(size.X, out.X, w) + axis(size.Y, out.Y, h) + 1100*int64(w+16) // the last: spread, or widened
	stride := 3*int64(w+slack) + slack
	if fewer := box.Dy() - out.Y; j.VerticalFirst && (j.DCT || fewer > 0 && fewer > 2*(box.Dx()-out.X)) {
		stride = max(stride, 4*int64(size.X)+slack)
	}
	n += stride*int64(box.Dy()+8) + 3*int64(win.Dx()) + 4*int64(size.X+slack)*8
	return n + min(n/4, 1<<20) + 64<<10
}

// fill checks the job against the picture and writes it to the C request.
func (j *Job) fill(q *C.sj_request, size image.Point, dst int) error {
	box, out, win := j.parts(size)
	if !box.In(image.Rectangle{Max: size}) {
		return fmt.Errorf("jpeg: crop box %v lies outside of the %dx%d picture", box, size.X, size.Y)
	}
	elem := max(j.Elem, 1)
	if out.X <= 0 || out.Y <= 0 || out.X > maxSide || out.Y > maxSide || win.Dx() > maxSide || win.Dy() > maxSide ||
		win.Min.X < -maxSide || win.Min.Y < -maxSide || win.Max.X > 2*maxSide || win.Max.Y > 2*maxSide {
		return fmt.Errorf("jpeg: resize to %v and window %v: sides must lie between 1 and %d", out, win, maxSide)
	}
	switch {
	case j.Filter > Nearest:
		return fmt.Errorf("jpeg: filter %d: want Bilinear, Bicubic or Nearest", j.Filter)
	case elem != 1 && elem != 2 && elem != 4:
		return fmt.Errorf("jpeg: elements of %d bytes: want 1, 2 or 4", elem)
	case j.Table == nil && elem != 1:
		return fmt.Errorf("jpeg: elements of %d bytes need a table", elem)
	case j.Table != nil && len(j.Table) != 3*256*elem:
		return fmt.Errorf("jpeg: table of %d bytes: want 3 x 256 x %d", len(j.Table), elem)
	case elem > 1 && uintptr(unsafe.Pointer(unsafe.SliceData(j.Table)))%uintptr(elem) != 0:
		return fmt.Errorf("jpeg: table is not aligned to its elements of %d bytes", elem)
	}
	want := int64(win.Dx()) * int64(win.Dy()) * 3 * int64(elem)
	if want > math.MaxInt32 || int64(dst) != want {
		return fmt.Errorf("jpeg: destination of %d bytes: a window of %dx%d with elements of %d bytes takes %d",
			dst, win.Dx(), win.Dy(), elem, want)
	}
	*q = C.sj_request{
		img_w: C.int(size.X), img_h: C.int(size.Y),
		box_x: C.int(box.Min.X), box_y: C.int(box.Min.Y), box_w: C.int(box.Dx()), box_h: C.int(box.Dy()),
		out_w: C.int(out.X), out_h: C.int(out.Y),
		win_x: C.int(win.Min.X), win_y: C.int(win.Min.Y), win_w: C.int(win.Dx()), win_h: C.int(win.Dy()),
		filter: C.int(j.Filter), vertical_first: cbool(j.VerticalFirst), dct: cbool(j.DCT), flip: cbool(j.Flip),
		turn: cbool(j.Turn), planar: cbool(j.Planar), planes: cbool(j.FromPlanes), elem: C.int(elem),
	}
	return nil
}

func result(s *C.sj_scratch, rc C.int, size image.Point, n int) error {
	switch rc {
	case C.SJ_OK:
		return nil
	case C.SJ_TRUNCATED:
		return fmt.Errorf(
			"%w: %d bytes of a %dx%d picture hold no end marker, or end before it: fetch or copy the file again",
			ErrTruncated, n, size.X, size.Y)
	case C.SJ_MEMORY:
		return fmt.Errorf("jpeg: out of memory for a %dx%d picture", size.X, size.Y)
	case C.SJ_SIZE:
		return fmt.Errorf("%w: libjpeg's size differs from the header's %dx%d", ErrCorrupt, size.X, size.Y)
	case C.SJ_SCANS:
		return fmt.Errorf("%w: more than %d scans", ErrTooLarge, int(C.SJ_MAX_SCANS))
	case C.SJ_COLOR:
		return fmt.Errorf("%w: neither grey, nor colour of 3 or 4 components", ErrUnsupported)
	default:
		return fmt.Errorf("%w: libjpeg: %s", ErrCorrupt, C.GoString(C.sj_message(s)))
	}
}

func bytePtr(b []byte) *C.uint8_t { return (*C.uint8_t)(unsafe.Pointer(unsafe.SliceData(b))) }

func cbool(b bool) C.int {
	if b {
		return 1
	}
	return 0
}

// EncodeWith appends packed pixels of e.Components bytes each to dst as a JPEG.
func EncodeWith(dst, pix []byte, w, h int, e Encoding) ([]byte, error) {
	e.Components = cmp.Or(e.Components, 3)
	factors, ok := map[Subsampling][2]int{Sub444: {1, 1}, Sub422: {2, 1}, Sub420: {2, 2}, Sub440: {1, 2},
		Sub411: {4, 1}}[e.Subsampling]
	switch {
	case !ok && e.Components != 1:
		return dst, fmt.Errorf("jpeg: subsampling %d: want 444, 422, 420, 440 or 411", e.Subsampling)
	case e.Components != 1 && e.Components != 3 && e.Components != 4:
		return dst, fmt.Errorf("jpeg: %d components: want 1, 3 or 4", e.Components)
	case e.Quality < 1 || e.Quality > 100:
		return dst, fmt.Errorf("jpeg: quality %d: want 1 to 100", e.Quality)
	case w < 1 || h < 1 || w > 65500 || h > 65500 || len(pix) != w*h*e.Components:
		return dst, fmt.Errorf("jpeg: %d bytes are not %dx%d pixels of %d components, or a side exceeds 65,500",
			len(pix), w, h, e.Components)
	}
	need := int64(len(pix))/2 + 1<<20
	if e.Progressive || e.Optimize { // the coefficients are kept
		need += 2*int64(len(pix)) + 64*int64(w+h)*int64(e.Components)
	}
	s, o, err := scratches.get(need, "encode")
	if err != nil {
		return dst, err
	}
	defer scratches.put(s, o, need)
	c := C.sj_encoding{
		w: C.int(w), h: C.int(h), components: C.int(e.Components), ycck: cbool(e.YCCK),
		h_samp: C.int(factors[0]), v_samp: C.int(factors[1]), quality: C.int(e.Quality),
		progressive: cbool(e.Progressive), optimize: cbool(e.Optimize), restart_rows: C.int(e.RestartRows),
	}
	if rc := C.sj_encode(s, &c, bytePtr(pix)); rc != C.SJ_OK {
		return dst, fmt.Errorf("jpeg: encoding a %dx%d picture failed: %s (code %d)",
			w, h, C.GoString(C.sj_message(s)), int(rc))
	}
	var n C.size_t
	p := C.sj_output(s, &n)
	return append(dst, unsafe.Slice((*byte)(unsafe.Pointer(p)), int(n))...), nil
}
