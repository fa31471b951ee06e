package gpuingest

import (
	"fmt"
	"image"
	"math"

	"github.com/shoalfs/shoal/gpuingest/jpeg"
)

// view is a picture as the operations so far have left it: nothing is computed until pixels must exist. Crops and flips
// fold into one jpeg.Job beside a single resize; a second resize, or a resize of something flipped or padded, first
// makes the pixels (pixels, in transform.go), since only then are the bytes those of Pillow.
type view struct {
	job     jpeg.Job // Box, Size, Window and Flip, all set
	resized bool
}

func viewOf(size image.Point) view {
	all := image.Rectangle{Max: size}
	return view{job: jpeg.Job{Box: all, Size: size, Window: all}}
}

// size is that of the picture as it stands.
func (v *view) size() image.Point { return v.job.Window.Size() }

// crop takes r of the picture as it stands; what lies outside is zero.
func (v *view) crop(r image.Rectangle) {
	w := v.job.Window
	if v.job.Flip {
		r.Min.X, r.Max.X = w.Dx()-r.Max.X, w.Dx()-r.Min.X
	}
	v.job.Window = r.Add(w.Min)
}

func (v *view) flip() { v.job.Flip = !v.job.Flip }

// foldable tells whether a resize can join the job.
func (v *view) foldable() bool {
	return !v.resized && !v.job.Flip && v.job.Window.In(image.Rectangle{Max: v.job.Size})
}

// resize needs a foldable view.
func (v *view) resize(to image.Point) {
	box := v.job.Window.Add(v.job.Box.Min)
	v.job.Box, v.job.Size, v.job.Window, v.resized = box, to, image.Rectangle{Max: to}, true
}

// operation is one geometric step of a transform.
type operation interface {
	// apply decides on the step's parameters and takes it.
	apply(p *picture, r *Rand) error
	// out is the size of the result for an input of the given size; the zero Point means a size that varies.
	out(in image.Point) image.Point
	// String is the canonical form.
	String() string
}

// rounding to even, as Python's round does.
func pyRound(f float64) int { return int(math.RoundToEven(f)) }

// randomResizedCrop is torchvision's: ten tries at a box of random area and aspect ratio, then the largest central one.
type randomResizedCrop struct {
	h, w         int
	scale, ratio [2]float64
}

func (o *randomResizedCrop) box(in image.Point, r *Rand) image.Rectangle {
	area := float64(in.X) * float64(in.Y)
	lo, hi := math.Log(o.ratio[0]), math.Log(o.ratio[1])
	for range 10 {
		target := area * r.Uniform(o.scale[0], o.scale[1])
		aspect := math.Exp(r.Uniform(lo, hi))
		w, h := pyRound(math.Sqrt(target*aspect)), pyRound(math.Sqrt(target/aspect))
		if w > 0 && w <= in.X && h > 0 && h <= in.Y {
			y := r.IntN(in.Y - h + 1)
			x := r.IntN(in.X - w + 1)
			return image.Rect(x, y, x+w, y+h)
		}
	}
	w, h := in.X, in.Y
	switch got := float64(w) / float64(h); {
	case got < o.ratio[0]:
		h = max(1, pyRound(float64(w)/o.ratio[0]))
	case got > o.ratio[1]:
		w = max(1, pyRound(float64(h)*o.ratio[1]))
	}
	x, y := floorHalf(in.X-w), floorHalf(in.Y-h)
	return image.Rect(x, y, x+w, y+h)
}

// floorHalf is Python's n // 2.
func floorHalf(n int) int { return n >> 1 }

func (o *randomResizedCrop) apply(p *picture, r *Rand) error {
	p.crop(o.box(p.size(), r))
	return p.resizeTo(image.Pt(o.w, o.h))
}

func (o *randomResizedCrop) out(image.Point) image.Point { return image.Pt(o.w, o.h) }

func (o *randomResizedCrop) String() string {
	return fmt.Sprintf("RandomResizedCrop(size=(%d, %d), scale=(%s, %s), ratio=(%s, %s), interpolation='bilinear', antialias=True)",
		o.h, o.w, pyFloat(o.scale[0]), pyFloat(o.scale[1]), pyFloat(o.ratio[0]), pyFloat(o.ratio[1]))
}

// resizeTo is torchvision's Resize((h, w)).
type resizeTo struct{ h, w int }

func (o *resizeTo) apply(p *picture, _ *Rand) error { return p.resizeTo(image.Pt(o.w, o.h)) }

func (o *resizeTo) out(image.Point) image.Point { return image.Pt(o.w, o.h) }

func (o *resizeTo) String() string {
	return fmt.Sprintf("Resize(size=(%d, %d), interpolation='bilinear', max_size=None, antialias=True)", o.h, o.w)
}

// resizeShort is torchvision's Resize(n): the shorter side becomes n, the longer in proportion, cut to an integer.
type resizeShort struct {
	short   int
	maxSize int // 0: none
}

func (o *resizeShort) target(in image.Point) image.Point {
	short, long := min(in.X, in.Y), max(in.X, in.Y)
	s, l := o.short, int(float64(o.short*long)/float64(short))
	if o.maxSize > 0 && l > o.maxSize {
		s, l = int(float64(o.maxSize*s)/float64(l)), o.maxSize
	}
	if in.X <= in.Y {
		return image.Pt(s, l)
	}
	return image.Pt(l, s)
}

func (o *resizeShort) apply(p *picture, _ *Rand) error { return p.resizeTo(o.target(p.size())) }

func (o *resizeShort) out(in image.Point) image.Point {
	if in == (image.Point{}) {
		return in
	}
	return o.target(in)
}

func (o *resizeShort) String() string {
	limit := "None"
	if o.maxSize > 0 {
		limit = fmt.Sprint(o.maxSize)
	}
	return fmt.Sprintf("Resize(size=%d, interpolation='bilinear', max_size=%s, antialias=True)", o.short, limit)
}

// centerCrop is torchvision's: pads with zeros where the picture is smaller.
type centerCrop struct{ h, w int }

func (o *centerCrop) apply(p *picture, _ *Rand) error {
	x, w := center(p.size().X, o.w)
	y, h := center(p.size().Y, o.h)
	p.crop(image.Rect(x, y, x+w, y+h))
	return nil
}

// center places a crop of n in a side of m. Too short a side is padded first, less on the near side.
func center(m, n int) (at, size int) {
	if n > m {
		return -((n - m) / 2), n
	}
	return pyRound(float64(m-n) / 2), n
}

func (o *centerCrop) out(image.Point) image.Point { return image.Pt(o.w, o.h) }

func (o *centerCrop) String() string { return fmt.Sprintf("CenterCrop(size=(%d, %d))", o.h, o.w) }

// randomHorizontalFlip mirrors with probability p.
type randomHorizontalFlip struct{ p float64 }

func (o *randomHorizontalFlip) apply(p *picture, r *Rand) error {
	if r.Float64() < o.p {
		p.flip()
	}
	return nil
}

func (o *randomHorizontalFlip) out(in image.Point) image.Point { return in }

func (o *randomHorizontalFlip) String() string {
	return fmt.Sprintf("RandomHorizontalFlip(p=%s)", pyFloat(o.p))
}
