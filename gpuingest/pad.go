package gpuingest

import (
	"image"

	"github.com/shoalfs/shoal/gpuingest/internal/pillow"
)

// margins are a padding's pixels left, top, right and bottom.
type margins [4]int

// around is the picture's rectangle with the margins, in the picture's coordinates.
func (m margins) around(size image.Point) image.Rectangle {
	return image.Rect(-m[0], -m[1], size.X+m[2], size.Y+m[3])
}

func (m margins) add(size image.Point) image.Point { return m.around(size).Size() }

// padding parses a number, (left and right, top and bottom) or (left, top, right, bottom).
func (a *args) padding(name string) (m margins) {
	v := a.val[name]
	list := v.spread(4, 1, 2, 4)
	if list == nil {
		a.bad(v, "%s must be one number of pixels, (sides, top and bottom), or (left, top, right, bottom)", name)
	}
	for i, x := range list {
		if x.kind != 'i' || x.num < 0 || x.num > maxSide {
			a.bad(x, "%s must be in pixels from 0 to %d", name, maxSide)
		}
		m[i] = int(x.num)
	}
	a.val[name] = tuple(number, m[:]...)
	return m
}

func (a *args) border() pillow.Border {
	v := a.val["padding_mode"]
	for b := pillow.Constant; b <= pillow.Symmetric; b++ {
		if v.kind == 's' && v.str == b.String() {
			return b
		}
	}
	a.bad(v, "padding_mode must be 'constant', 'edge', 'reflect' or 'symmetric'")
	return 0
}

// padOp is torchvision's Pad.
type padOp struct {
	margins margins
	fill    [3]uint8
	border  pillow.Border
}

func buildPad(a *args) operation {
	return &padOp{a.padding("padding"), a.fill(), a.border()}
}

func (o *padOp) draw(steps []step, size image.Point, _ *Rand) []step {
	return append(steps, step{kind: stepCrop, box: o.margins.around(size), border: o.border, fill: o.fill})
}

func (o *padOp) out(in image.Point) image.Point {
	if in == (image.Point{}) {
		return in
	}
	return o.margins.add(in)
}

// randomCrop is torchvision's RandomCrop.
type randomCrop struct {
	fixedSize
	padded   bool
	margins  margins
	ifNeeded bool
	fill     [3]uint8
	border   pillow.Border
}

func buildRandomCrop(a *args) operation {
	o := &randomCrop{fixedSize: a.hw("size"), padded: a.val["padding"].kind != 'n'}
	if o.padded {
		o.margins = a.padding("padding")
	}
	o.ifNeeded, o.fill, o.border = a.truth("pad_if_needed"), a.fill(), a.border()
	return o
}

func (o *randomCrop) draw(steps []step, size image.Point, r *Rand) []step {
	pad := func(m margins) {
		steps = append(steps, step{kind: stepCrop, box: m.around(size), border: o.border, fill: o.fill})
		size = m.add(size)
	}
	if o.padded {
		pad(o.margins)
	}
	if n := o.w - size.X; o.ifNeeded && n > 0 {
		pad(margins{n, 0, n, 0})
	}
	if n := o.h - size.Y; o.ifNeeded && n > 0 {
		pad(margins{0, n, 0, n})
	}
	if size.X < o.w || size.Y < o.h {
		return append(steps, step{kind: stepRefuse, size: image.Pt(o.w, o.h)})
	}
	y := r.IntN(size.Y - o.h + 1)
	x := r.IntN(size.X - o.w + 1)
	return append(steps, step{kind: stepCrop, box: image.Rect(x, y, x+o.w, y+o.h)})
}
