package gpuingest

import (
	"image"
	"math"

	"github.com/shoalfs/shoal/gpuingest/jpeg"
)

// operation is one operation of a transform.
type operation interface {
	// draw appends its steps for a picture of this size, which depend on nothing else but r.
	draw(steps []step, size image.Point, r *Rand) []step
	// out is the size of the result for an input of the given size; the zero Point means a varying size.
	out(in image.Point) image.Point
}

// compiled is an operation with its canonical form.
type compiled struct {
	operation
	text string
}

// next is draw, which returns the size after the steps too.
func (c compiled) next(steps []step, size image.Point, r *Rand) ([]step, image.Point) {
	n := len(steps)
	steps = c.draw(steps, size, r)
	for i := n; i < len(steps); i++ {
		size = steps[i].after(size)
	}
	return steps, size
}

// sameSize is part of operations that do not change a picture's size.
type sameSize struct{}

func (sameSize) out(in image.Point) image.Point { return in }

// fixedSize is part of operations whose results have one size.
type fixedSize struct{ h, w int }

func (o fixedSize) out(image.Point) image.Point { return image.Pt(o.w, o.h) }

// rounding to even, as Python's round does.
func pyRound(f float64) int { return int(math.RoundToEven(f)) }

// tries is torchvision's ten tries at a box of random area and aspect ratio. fits makes a size of its two sides.
func tries(in image.Point, scale, ratio [2]float64, r *Rand, fits func(a, b int) (w, h int, ok bool)) (
	box image.Rectangle, ok bool) {
	area := float64(in.X) * float64(in.Y)
	lo, hi := math.Log(ratio[0]), math.Log(ratio[1])
	for range 10 {
		target := area * r.Uniform(scale[0], scale[1])
		aspect := math.Exp(r.Uniform(lo, hi))
		if w, h, ok := fits(pyRound(math.Sqrt(target*aspect)), pyRound(math.Sqrt(target/aspect))); ok {
			y := r.IntN(in.Y - h + 1)
			x := r.IntN(in.X - w + 1)
			return image.Rect(x, y, x+w, y+h), true
		}
	}
	return box, false
}

// randomResizedCrop is torchvision's: ten tries, then the largest central box.
type randomResizedCrop struct {
	fixedSize
	scale, ratio [2]float64
	filter       jpeg.Filter
}

func (o *randomResizedCrop) box(in image.Point, r *Rand) image.Rectangle {
	fits := func(w, h int) (int, int, bool) { return w, h, w > 0 && w <= in.X && h > 0 && h <= in.Y }
	if box, ok := tries(in, o.scale, o.ratio, r, fits); ok {
		return box
	}
	w, h := in.X, in.Y
	switch got := float64(w) / float64(h); {
	case got < o.ratio[0]:
		h = max(1, pyRound(float64(w)/o.ratio[0]))
	case got > o.ratio[1]:
		w = max(1, pyRound(float64(h)*o.ratio[1]))
	}
	x, y := (in.X-w)/2, (in.Y-h)/2
	return image.Rect(x, y, x+w, y+h)
}

func (o *randomResizedCrop) draw(steps []step, size image.Point, r *Rand) []step {
	return append(steps, step{kind: stepCrop, box: o.box(size, r)},
		step{kind: stepResize, size: image.Pt(o.w, o.h), filter: o.filter})
}

// resizeTo is torchvision's Resize((h, w)).
type resizeTo struct {
	fixedSize
	filter jpeg.Filter
}

func (o *resizeTo) draw(steps []step, _ image.Point, _ *Rand) []step {
	return append(steps, step{kind: stepResize, size: image.Pt(o.w, o.h), filter: o.filter})
}

// resizeShort is torchvision's Resize(n): the shorter side becomes n, the longer in proportion, truncated.
type resizeShort struct {
	short   int
	maxSize int // 0: none
	filter  jpeg.Filter
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

func (o *resizeShort) draw(steps []step, size image.Point, _ *Rand) []step {
	return append(steps, step{kind: stepResize, size: o.target(size), filter: o.filter})
}

func (o *resizeShort) out(in image.Point) image.Point {
	if in == (image.Point{}) {
		return in
	}
	return o.target(in)
}

func buildResize(a *args) operation {
	filter := a.filter()
	size, limit := a.val["size"], a.val["max_size"]
	if size.kind == 't' && len(size.list) == 2 {
		if limit.kind != 'n' {
			a.bad(limit, "max_size requires a size that is one number")
		}
		return &resizeTo{a.hw("size"), filter}
	}
	if size.kind == 't' && len(size.list) == 1 {
		size = size.list[0]
	}
	a.val["size"] = size
	o := &resizeShort{short: a.side(size, "size"), filter: filter}
	if limit.kind != 'n' {
		if o.maxSize = a.side(limit, "max_size"); o.maxSize <= o.short {
			a.bad(limit, "max_size must exceed size")
		}
	}
	return o
}

// centerCrop is torchvision's: it pads smaller pictures with zeros.
type centerCrop struct{ fixedSize }

func (o *centerCrop) draw(steps []step, size image.Point, _ *Rand) []step {
	x, w := center(size.X, o.w)
	y, h := center(size.Y, o.h)
	return append(steps, step{kind: stepCrop, box: image.Rect(x, y, x+w, y+h)})
}

// center places a crop of n in a side of m. A shorter side is padded first, with less on the near side.
func center(m, n int) (at, size int) {
	if n > m {
		return -((n - m) / 2), n
	}
	return pyRound(float64(m-n) / 2), n
}

// randomFlip mirrors, or turns upside down, with probability p.
type randomFlip struct {
	sameSize
	p    float64
	kind stepKind // stepMirror or stepTurn
}

func buildFlip(kind stepKind) func(a *args) operation {
	return func(a *args) operation { return &randomFlip{p: a.probability("p"), kind: kind} }
}

func (o *randomFlip) draw(steps []step, _ image.Point, r *Rand) []step {
	if r.Float64() < o.p {
		steps = append(steps, step{kind: o.kind})
	}
	return steps
}
