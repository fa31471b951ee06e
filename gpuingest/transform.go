// Package gpuingest turns the bytes of a sample into a trainer's input: decoded, cropped, resized, flipped,
// normalised, in the wanted type and layout, written to its place in a batch.
//
// A transform is text in torchvision's terms (Compile) and produces torchvision's pixels: those of its PIL path with
// Pillow 9.4, bit for bit, for JPEG, PNG and WebP. Its random choices have torchvision's distributions but are pure
// functions of (seed, epoch, sample, occurrence), see Draw.
//
// Rules for this code:
//   - Views of one picture (views.go) are what their chains alone would make, but for the numbers: view k's operations
//     have the places from 256 * k on, so view 0 has those of the chain without views, and no view changes another's.
//     A JPEG's part that any view needs is decoded once, at full size, unless it takes more than maxBetween.
//     The words behind views hold for all. What works on the batch, or moves boxes and masks, does not go with views.
//   - EXIF orientation and colour profiles are ignored and alpha is dropped, as in ImageFolder's convert("RGB").
//   - A resize after a flip or after another resize computes pixels in between, since Pillow rounds there too. So
//     flips should come last.
//   - The canonical form (String) is hashed into sessions: changing it breaks every resume.
package gpuingest

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"image"
	"math"
	"strings"
	"sync"
	"unsafe"

	"github.com/shoalfs/shoal/gpuingest/internal/pillow"
	"github.com/shoalfs/shoal/gpuingest/jpeg"
	"github.com/shoalfs/shoal/internal/rows"
)

// ErrBadSample is wrapped by all errors of Apply that the sample's bytes cause: truncated, corrupt, too large, or of an
// unknown format. A session's bad-sample policy applies to them.
var ErrBadSample = errors.New("cannot be decoded")

// Transform is a compiled SPEC. It is safe for concurrent use.
type Transform struct {
	ops           []compiled
	raw           bool
	dtype, layout string
	norm          string // the type in which Normalize computes; empty: none
	normText      string // Normalize's canonical form
	mean, std     [3]float64
	size          image.Point // of the result
	table         []byte      // 3 x 256 elements, nil for uint8
	verticalFirst bool        // Pillow 13's rule of resizing
	v2            bool        // torchvision's v2 where it differs from v1
	dct           bool        // decode at a fraction of the size if that is enough
	erase         *erasing    // nil: none
	mix           *mixing     // nil: none
	view          int         // its number in views, whose random numbers differ
}

// OutBytes returns a sample's length in bytes; 0 for raw, whose samples are as long as their files.
func (t *Transform) OutBytes() int { return t.size.X * t.size.Y * 3 * dtypes[t.dtype] }

// Layout returns nchw or nhwc; raw for raw.
func (t *Transform) Layout() string { return t.layout }

// String returns the canonical form, with every argument explicit and torchvision's names. It compiles to an equal
// transform.
func (t *Transform) String() string {
	if t.raw {
		return rawWord
	}
	return t.operationsText() + "|" + t.wordsText()
}

func (t *Transform) operationsText() string {
	parts := make([]string, len(t.ops))
	for i, o := range t.ops {
		parts[i] = o.text
	}
	return strings.Join(parts, "|")
}

func (t *Transform) wordsText() string {
	parts := []string{t.dtype, t.layout}
	if t.norm != "" {
		parts = append(parts, t.normText)
	}
	if t.erase != nil {
		parts = append(parts, t.erase.text)
	}
	if t.mix != nil {
		parts = append(parts, t.mix.text)
	}
	if t.v2 {
		parts = append(parts, v2Word)
	}
	rule := pillowRules[0]
	if t.verticalFirst {
		rule = pillowRules[1]
	}
	if t.dct {
		parts = append(parts, dctWord)
	}
	return strings.Join(append(parts, rule), "|")
}

// Hash returns the SHA-256 of the canonical form in hexadecimal: equal hashes mean equal pixels for equal draws.
func (t *Transform) Hash() string { return hashOf(t.String()) }

func hashOf(canonical string) string {
	sum := sha256.Sum256([]byte(canonical))
	return hex.EncodeToString(sum[:])
}

// makeTable computes ToTensor and Normalize of torch for each byte value of each channel: in Normalize's type, each
// step rounded to it, then rounded to the batch's, half to even.
func (t *Transform) makeTable() {
	if t.dtype == "uint8" {
		return
	}
	elem := dtypes[t.dtype]
	words := make([]uint32, 3*256*elem/4) // words, so that the table is aligned for the C side
	t.table = unsafe.Slice((*byte)(unsafe.Pointer(&words[0])), len(words)*4)
	for c := range 3 {
		mean, std := rounded(float32(t.mean[c]), t.norm), rounded(float32(t.std[c]), t.norm)
		for v := range 256 {
			x := float32(v) / 255
			if t.v2 { // Tensor.mul_(1 / 255)
				x = float32(v) * float32(1.0/255)
			}
			if t.norm != "" {
				x = rounded(rounded(x, t.norm)-mean, t.norm)
				x = rounded(x/std, t.norm)
			}
			copy(t.table[(c*256+v)*elem:], element(t.dtype, float64(x)))
		}
	}
}

// rounded is the nearest number of a type.
func rounded(x float32, dtype string) float32 {
	switch dtype {
	case "fp16":
		return float32(fromFloat16(toFloat16(float64(x))))
	case "bf16":
		return math.Float32frombits(uint32(bfloat16(x)) << 16)
	}
	return x
}

// bfloat16 rounds to nearest, half to even. x must not be NaN.
func bfloat16(x float32) uint16 {
	b := math.Float32bits(x)
	return uint16((b + 0x7fff + b>>16&1) >> 16)
}

// picture is a sample in progress: the source of its pixels, and the view of them.
type picture struct {
	view
	src    []byte // a JPEG, or packed RGB
	isJPEG bool
	planes bool        // src is three planes
	size0  image.Point // of src
	buf    *[]byte     // backs src if that is packed RGB from the pool
	rand   Rand        // scratch of plan
	steps  []step      // as drawn; its memory is kept with the picture

	verticalFirst, dct bool // as in the transform
}

// pictures avoids Apply's only allocation: a picture escapes through the operation interface.
var pictures = sync.Pool{New: func() any { return new(picture) }}

// buffers hold pixels between two operations that do not fold into one.
var buffers = sync.Pool{New: func() any { return new([]byte) }}

// maxBetween is the largest such buffer, or decoded picture of another format, that stays in the pool.
const maxBetween = 32 << 20

func getBuffer(n int) *[]byte {
	b := buffers.Get().(*[]byte)
	if cap(*b) < n {
		*b = make([]byte, n)
	}
	*b = (*b)[:n]
	return b
}

func putBuffer(b *[]byte) {
	if b != nil && cap(*b) <= maxBetween {
		buffers.Put(b)
	}
}

// store writes the view's pixels to dst.
func (p *picture) store(dst []byte, j *jpeg.Job) error {
	j.VerticalFirst, j.DCT, j.FromPlanes = p.verticalFirst, p.dct, p.planes
	if p.isJPEG {
		return jpeg.DecodeSized(dst, p.src, p.size0, j)
	}
	return jpeg.Resample(dst, p.src, p.size0, j)
}

// pixels computes the view's pixels, and makes them the new source.
func (p *picture) pixels() error {
	size := p.size()
	if err := jpeg.CheckSize(size); err != nil {
		return fmt.Errorf("%w: after resize: %w", ErrBadSample, err)
	}
	b := getBuffer(size.X * size.Y * 3)
	j := p.job
	if err := p.store(*b, &j); err != nil {
		putBuffer(b)
		return err
	}
	putBuffer(p.buf)
	p.view, p.src, p.isJPEG, p.planes, p.size0, p.buf = viewOf(size), *b, false, false, size, b
	return nil
}

// do applies a step.
func (p *picture) do(s *step) error {
	switch s.kind {
	case stepCrop:
		switch {
		case s.box.In(image.Rectangle{Max: p.size()}):
		case s.border != pillow.Constant || s.fill != [3]uint8{}:
			return p.pad(s)
		case !(image.Rectangle{Max: p.job.Size}).In(p.job.Window): // cropped pixels must not come back
			if err := p.pixels(); err != nil {
				return err
			}
		}
		p.crop(s.box)
	case stepResize:
		return p.resizeTo(s.size, s.filter)
	case stepMirror:
		p.job.Flip = !p.job.Flip
	case stepTurn:
		p.job.Turn = !p.job.Turn
	case stepAffine:
		return p.affine(s)
	case stepColour:
		return p.recolour(s)
	case stepRefuse:
		return fmt.Errorf(
			"%w: a picture of %v is smaller than the crop of %v: resize first, or set pad_if_needed=True", ErrBadSample,
			p.size(), s.size)
	}
	return nil
}

// resizeTo resizes the current picture. The same size is no change, as in torchvision.
func (p *picture) resizeTo(to image.Point, f jpeg.Filter) error {
	if to == p.size() {
		return nil
	}
	if to.X < 1 || to.Y < 1 || to.X > 4*maxSide || to.Y > 4*maxSide {
		return fmt.Errorf("%w: a picture of %v would be resized to %v, sides must lie between 1 and %d",
			ErrBadSample, p.size(), to, 4*maxSide)
	}
	if !p.foldable() {
		if err := p.pixels(); err != nil {
			return err
		}
	}
	p.resize(to, f)
	return nil
}

// Apply transforms the sample's bytes src into dst, whose length must be OutBytes (len(src) for raw). The result is a
// pure function of src and at. Errors caused by src wrap ErrBadSample, and one of package jpeg's errors if it applies;
// then dst holds arbitrary bytes.
func (t *Transform) Apply(src []byte, at Draw, dst []byte) error {
	return t.applyWith(src, at, dst, nil)
}

// applyWith is Apply that first passes the picture's size and steps to with, which must not keep them.
func (t *Transform) applyWith(src []byte, at Draw, dst []byte, with func(size image.Point, steps []step) error) error {
	if err := checkDraw(at); err != nil {
		return err
	}
	if t.raw {
		if len(dst) != len(src) {
			return fmt.Errorf("gpuingest: destination of %d bytes for a raw sample of %d", len(dst), len(src))
		}
		copy(dst, src)
		return nil
	}
	if len(dst) != t.OutBytes() {
		return fmt.Errorf("gpuingest: destination of %d bytes, %s needs %d", len(dst), t, t.OutBytes())
	}
	p := pictures.Get().(*picture)
	err := t.apply(p, src, at, dst, with)
	p.close()
	return ofSample(err)
}

func checkDraw(at Draw) error {
	if at.Sample > rows.MaxSample || at.Occurrence > rows.MaxOccurrence {
		return fmt.Errorf("gpuingest: sample %d, occurrence %d: random numbers are limited to samples below 2^48 and "+
			"occurrences below 2^16", at.Sample, at.Occurrence)
	}
	return nil
}

// ofSample wraps package jpeg's errors that a sample's bytes cause.
func ofSample(err error) error {
	for _, of := range []error{jpeg.ErrTruncated, jpeg.ErrCorrupt, jpeg.ErrUnsupported, jpeg.ErrTooLarge} {
		if errors.Is(err, of) && !errors.Is(err, ErrBadSample) {
			return fmt.Errorf("%w: %w", ErrBadSample, err)
		}
	}
	return err
}

// open reads the header of a sample, and decodes it if it is not a JPEG. close must follow.
func (p *picture) open(src []byte) error {
	p.src = src
	if bytes.HasPrefix(p.src, []byte("\xff\xd8")) || jpeg.IsRecoded(p.src) {
		w, h, err := jpeg.Size(p.src)
		if err == nil {
			err = jpeg.CheckSize(image.Pt(w, h)) // before anybody takes memory for it
		}
		if err != nil {
			return err
		}
		p.isJPEG, p.size0 = true, image.Pt(w, h)
	} else if err := p.decodeOther(); err != nil {
		return err
	}
	p.view = viewOf(p.size0)
	return nil
}

// close returns the picture to the pool.
func (p *picture) close() {
	putBuffer(p.buf)
	*p = picture{steps: p.steps[:0]} // drops the reference to the sample
	pictures.Put(p)
}

func (t *Transform) apply(p *picture, src []byte, at Draw, dst []byte,
	with func(size image.Point, steps []step) error) error {
	if err := p.open(src); err != nil {
		return err
	}
	p.steps = t.plan(p.steps[:0], p.size0, at, &p.rand)
	if with != nil {
		if err := with(p.size0, p.steps); err != nil {
			return err
		}
	}
	return t.take(p, p.steps, at, dst)
}

// take puts the picture through its steps, and stores it in the transform's type and layout.
func (t *Transform) take(p *picture, steps []step, at Draw, dst []byte) error {
	p.verticalFirst, p.dct = t.verticalFirst, t.dct
	for i := range steps {
		if err := p.do(&steps[i]); err != nil {
			return err
		}
	}
	j := p.job
	j.Planar, j.Elem, j.Table = t.layout == "nchw", dtypes[t.dtype], t.table
	if err := p.store(dst, &j); err != nil {
		return err
	}
	if t.erase != nil {
		p.rand = at.Rand(eraseOperation - t.view*viewPlaces)
		t.erase.apply(dst, t, &p.rand)
	}
	return nil
}
