package gpuingest

import (
	"fmt"
	"image"

	"github.com/shoalfs/shoal/gpuingest/internal/pillow"
)

// margins are a padding's pixels left, top, right and bottom.
type margins [4]int

func (m margins) String() string { return fmt.Sprintf("(%d, %d, %d, %d)", m[0], m[1], m[2], m[3]) }

// around is the picture's rectangle with the margins, in the picture's coordinates.
func (m margins) around(size image.Point) image.Rectangle {
	return image.Rect(-m[0], -m[1], size.X+m[2], size.Y+m[3])
}

func (m margins) add(size image.Point) image.Point { return m.around(size).Size() }

// padding parses a number, (left and right, top and bottom) or (left, top, right, bottom).
func (a *args) padding(name string) (m margins, err error) {
	v := a.val[name]
	list := v.list
	if v.kind == 'i' {
		list = []value{v}
	}
	if n := len(list); n != 1 && n != 2 && n != 4 {
		return m, a.bad(v, "%s must be one number of pixels, (sides, top and bottom), or (left, top, right, bottom)", name)
	}
	for i := range m {
		x := list[i%len(list)]
		if x.kind != 'i' || x.num < 0 || x.num > maxSide {
			return m, a.bad(x, "%s must be in pixels from 0 to %d", name, maxSide)
		}
		m[i] = int(x.num)
	}
	return m, nil
}

func (a *args) border() (pillow.Border, error) {
	v := a.val["padding_mode"]
	for b := pillow.Constant; b <= pillow.Symmetric; b++ {
		if v.kind == 's' && v.str == b.String() {
			return b, nil
		}
	}
	return 0, a.bad(v, "padding_mode must be 'constant', 'edge', 'reflect' or 'symmetric'")
}

// padOp is torchvision's Pad.
type padOp struct {
	margins margins
	fill    [3]uint8
	border  pillow.Border
}

func buildPad(a *args) (operation, error) {
	o := &padOp{}
	var err error
	if o.margins, err = a.padding("padding"); err != nil {
		return nil, err
	}
	if o.fill, err = a.fill(); err != nil {
		return nil, err
	}
	o.border, err = a.border()
	return o, err
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

func (o *padOp) String() string {
	return fmt.Sprintf("Pad(padding=%s, fill=%s, padding_mode='%s')", o.margins, triple(o.fill), o.border)
}

// randomCrop is torchvision's RandomCrop.
type randomCrop struct {
	h, w     int
	padded   bool
	margins  margins
	ifNeeded bool
	fill     [3]uint8
	border   pillow.Border
}

func buildRandomCrop(a *args) (operation, error) {
	o := &randomCrop{}
	var err error
	if o.h, o.w, err = a.hw("size"); err != nil {
		return nil, err
	}
	if a.val["padding"].kind != 'n' {
		o.padded = true
		if o.margins, err = a.padding("padding"); err != nil {
			return nil, err
		}
	}
	if o.ifNeeded, err = a.truth("pad_if_needed"); err != nil {
		return nil, err
	}
	if o.fill, err = a.fill(); err != nil {
		return nil, err
	}
	o.border, err = a.border()
	return o, err
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

func (o *randomCrop) out(image.Point) image.Point { return image.Pt(o.w, o.h) }

func (o *randomCrop) String() string {
	padding, needed := "None", "False"
	if o.padded {
		padding = o.margins.String()
	}
	if o.ifNeeded {
		needed = "True"
	}
	return fmt.Sprintf("RandomCrop(size=(%d, %d), padding=%s, pad_if_needed=%s, fill=%s, padding_mode='%s')",
		o.h, o.w, padding, needed, triple(o.fill), o.border)
}
