// Package jpeg decodes the part of a JPEG that a crop needs, resizes it like Pillow, flips it and stores it in the
// wanted layout and type, in one cgo call for each sample. It is the module's only package that calls libjpeg(-turbo).
//
// Results are byte-identical to Pillow 9.4 on the same libjpeg: Image.open(f).convert("RGB").crop(box).resize(size,
// filter) with BILINEAR, BICUBIC or NEAREST, the slow integer DCT and fancy upsampling. Job.VerticalFirst selects the
// resize of Pillow 13. Like Pillow, it ignores EXIF orientation and colour profiles, and tolerates libjpeg's warnings
// and bytes after the end marker. It is stricter in two cases: a file without end marker is always ErrTruncated, since
// a crop would hide the truncation; and a file of more than 500 scans is refused, since each costs a pass over the
// picture.
//
// It also recodes JPEGs to a smaller form that decodes faster, and restores them byte by byte: recode.go draws the
// format. More than 40 names are exported: both halves are one package, since each is useless without the other's C.
//
// Rules for this code:
//   - Rows below the crop are not decoded, unless they contain an unexpected marker: then libjpeg reads on and decides.
//   - Progressive files are held whole as coefficients, 2 bytes a sample, before the first row: MaxPixels bounds this.
//   - The C side's buffers are kept for reuse: at most one set for each CPU, at most 32 MiB each.
package jpeg

import (
	"errors"
	"fmt"
	"image"
)

// MaxPixels is the largest picture, checked before anything is allocated: above it, Pillow raises
// DecompressionBombError.
const MaxPixels = 2 * 89478485

// Errors that callers distinguish; each is wrapped in a message about the file.
var (
	// ErrTruncated means that the data end before the picture does.
	ErrTruncated = errors.New("truncated JPEG")
	// ErrCorrupt means that the data is not a JPEG, or one that libjpeg cannot decode.
	ErrCorrupt = errors.New("corrupt JPEG")
	// ErrUnsupported means a valid JPEG of a kind that Pillow does not read either.
	ErrUnsupported = errors.New("unsupported JPEG")
	// ErrTooLarge means more pixels, or more scans, than the limit.
	ErrTooLarge = errors.New("picture too large")
)

// ErrUnavailable is the error of every operation of a build without cgo.
var ErrUnavailable = errors.New(
	"this build has no libjpeg and no picture operations (install a release, or build with gcc, pkg-config and " +
		"libjpeg's header: libjpeg62-turbo-dev, libjpeg-turbo-devel)")

// Job describes the result, in this order: crop to Box, resize the crop to Size, take Window, flip, look up in Table,
// store. It is read-only during calls and may be shared.
type Job struct {
	// Box is the crop in pixels of the picture; it must lie within it. Empty means the whole picture.
	Box image.Rectangle
	// Size is what Box is resized to. Zero means no resize.
	Size image.Point
	// Window is the part to store, in pixels of the resized crop. Pixels outside of it are 0 before Table. Empty means
	// all.
	Window image.Rectangle
	// Filter is that of the resize.
	Filter Filter
	// VerticalFirst is the rule of Pillow 13: the vertical pass comes first if the height shrinks much more than
	// the width.
	VerticalFirst bool
	// DCT lets a JPEG be decoded at 1/2, 1/4 or 1/8 of its size if Box is then still as large as Size: faster, but the
	// pixels are not those of a full decode. They are those of Pillow's draft and resize(box=).
	DCT bool
	// Flip mirrors the window left to right, Turn top to bottom.
	Flip, Turn bool
	// Planar stores planes R, G, B (CHW) in place of pixels (HWC).
	Planar bool
	// FromPlanes means that Resample reads planes, as Planar stores them, and PlanesSlack bytes behind them: faster
	// than packed pixels.
	FromPlanes bool
	// Elem is the size of a stored element in bytes: 1, 2 or 4. Zero means 1.
	Elem int
	// Table maps each byte of each channel to a stored element: 3 x 256 x Elem bytes, channel first, in the machine's
	// byte order. Nil stores the bytes as they are and needs an Elem of 1.
	Table []byte
}

// Filter is the weighting of a resize, as in Pillow.
type Filter uint8

// The filters of Pillow that torchvision offers. Bilinear and Bicubic widen when they shrink a picture (antialiasing);
// Nearest does not.
const (
	Bilinear Filter = iota
	Bicubic
	Nearest
)

// String returns torchvision's name.
func (f Filter) String() string { return [...]string{"bilinear", "bicubic", "nearest"}[f] }

// PlanesSlack is how many bytes follow the planes that Resample reads, whatever they hold.
const PlanesSlack = 64

// maxSide bounds the sides in a Job, so that sizes in bytes fit an int32 in C. JPEG itself allows 65,535.
const maxSide = 1 << 16

// CheckSize reports a picture of too many pixels, or of a side that is too long for a Job.
func CheckSize(size image.Point) error {
	if n := int64(size.X) * int64(size.Y); n > MaxPixels || max(size.X, size.Y) > maxSide {
		return fmt.Errorf("%w: %dx%d is %d pixels, the limit is %d, which is Pillow's, and %d a side",
			ErrTooLarge, size.X, size.Y, n, MaxPixels, maxSide)
	}
	return nil
}

// DecodeRGB decodes a whole picture to packed RGB, like Pillow's convert("RGB").
func DecodeRGB(src []byte) (pix []byte, w, h int, err error) {
	if w, h, err = Size(src); err == nil {
		err = CheckSize(image.Pt(w, h))
	}
	if err == nil {
		pix = make([]byte, w*h*3)
		err = DecodeSized(pix, src, image.Pt(w, h), &Job{})
	}
	return pix, w, h, err
}

// Subsampling is how chroma is stored: 444 in full, 422 at half the width, 420 at half of both, and the rarer 440
// (half the height) and 411 (a quarter of the width).
type Subsampling int

// The subsamplings that Encode knows.
const (
	Sub444 Subsampling = 444
	Sub422 Subsampling = 422
	Sub420 Subsampling = 420
	Sub440 Subsampling = 440
	Sub411 Subsampling = 411
)

// Encoding says how EncodeWith stores a picture.
type Encoding struct {
	Quality     int // 1 to 100, as libjpeg and Pillow count
	Subsampling Subsampling
	Components  int  // 1 grey, 3 RGB, 4 CMYK; zero means 3
	YCCK        bool // of 4 components: store YCCK rather than CMYK
	Progressive bool
	Optimize    bool // Huffman tables made for the picture
	RestartRows int  // rows of blocks between restart markers; zero means none
}

// Encode appends packed RGB pixels to dst as a baseline JPEG.
func Encode(dst, rgb []byte, w, h, quality int, sub Subsampling) ([]byte, error) {
	return EncodeWith(dst, rgb, w, h, Encoding{Quality: quality, Subsampling: sub})
}
