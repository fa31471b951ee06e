package gpuingest

import (
	"fmt"
	"image"

	"github.com/shoalfs/shoal/gpuingest/internal/pillow"
	"github.com/shoalfs/shoal/gpuingest/jpeg"
)

// colour is the kind of a stepColour; the step's amount is its parameter.
type colour uint8

const (
	noColour     colour = iota
	brightness          // factor
	contrast            // factor
	saturation          // factor
	hue                 // turns of the colour wheel, -0.5 to 0.5
	sharpness           // factor
	posterize           // bits kept
	solarize            // threshold
	autoContrast        // no amount
	equalize            // no amount
	invert              // no amount
	grey                // no amount
	blur                // sigma; the step's size is the kernel's
)

// inPlace are the changes that need no second picture.
var inPlace = [...]func(pix []byte, amount float64){
	brightness: pillow.Brightness, contrast: pillow.Contrast, saturation: pillow.Saturation, hue: pillow.Hue,
	solarize:     pillow.Solarize,
	posterize:    func(pix []byte, bits float64) { pillow.Posterize(pix, int(bits)) },
	autoContrast: func(pix []byte, _ float64) { pillow.AutoContrast(pix) },
	equalize:     func(pix []byte, _ float64) { pillow.Equalize(pix) },
	invert:       func(pix []byte, _ float64) { pillow.Invert(pix) },
	grey:         func(pix []byte, _ float64) { pillow.Grey(pix) },
}

// recolour applies a stepColour.
func (p *picture) recolour(s *step) error {
	if s.colour == noColour {
		return nil
	}
	if err := p.own(); err != nil {
		return err
	}
	pix := p.src
	switch s.colour {
	default:
		inPlace[s.colour](pix, s.amount)
	case sharpness:
		row := getBuffer(3 * p.size0.X)
		defer putBuffer(row)
		return p.remake(p.size0, func(dst []byte) { pillow.Sharpness(dst, pix, p.size0, s.amount, *row) })
	case blur:
		if s.size.X/2 >= p.size0.X || s.size.Y/2 >= p.size0.Y {
			return fmt.Errorf(
				"%w: a picture of %v is too small for a blur of %v with reflected borders: resize first", ErrBadSample,
				p.size0, s.size)
		}
		return p.remake(p.size0, func(dst []byte) { pillow.Blur(dst, pix, p.size0, s.size, s.amount) })
	}
	return nil
}

// own makes the picture packed RGB in memory that may be written to.
func (p *picture) own() error {
	if p.buf != nil && p.plain() { // without buf, src is the caller's
		return nil
	}
	return p.pixels()
}

// remake replaces the picture by the result of f. The picture is owned.
func (p *picture) remake(size image.Point, f func(dst []byte)) error {
	if err := jpeg.CheckSize(size); err != nil {
		return fmt.Errorf("%w: made of %v: %w", ErrBadSample, p.size0, err)
	}
	b := getBuffer(size.X * size.Y * 3)
	f(*b)
	putBuffer(p.buf)
	p.view, p.src, p.size0, p.buf = viewOf(size), *b, size, b
	return nil
}

// affine applies a stepAffine.
func (p *picture) affine(s *step) error {
	if err := p.own(); err != nil {
		return err
	}
	return p.remake(s.size, func(dst []byte) {
		pillow.Affine(dst, s.size, p.src, p.size0, &s.matrix, s.filter, s.fill)
	})
}

// pad applies a stepCrop that extends beyond the picture.
func (p *picture) pad(s *step) error {
	if err := p.own(); err != nil {
		return err
	}
	return p.remake(s.box.Size(), func(dst []byte) { pillow.Pad(dst, s.box, p.src, p.size0, s.border, s.fill) })
}

// jitter is torchvision's ColorJitter: up to four changes in random order.
type jitter struct {
	sameSize
	on     [4]bool // brightness, contrast, saturation, hue
	ranges [4][2]float64
}

var jitterNames = [4]string{"brightness", "contrast", "saturation", "hue"}

func buildJitter(a *args) operation {
	o := &jitter{}
	for i, name := range jitterNames {
		v := a.val[name]
		centre, low, top := 1.0, 0.0, 1e6
		if name == "hue" {
			centre, low, top = 0, -0.5, 0.5
		}
		r, ok := v.pair()
		switch {
		case v.number() && v.num >= 0 && v.num <= top:
			r = [2]float64{max(centre-v.num, low), centre + v.num}
		case ok && (r[0] < low || r[0] > r[1] || r[1] > top):
			a.bad(v, "%s must be (min, max) with %g <= min <= max <= %g", name, low, top)
		case !ok && centre == 0:
			a.bad(v, "hue must be one number from 0 to 0.5, or (min, max) within -0.5 to 0.5")
		case !ok:
			a.bad(v, "%s must be a number of at least 0, or (min, max)", name)
		}
		o.ranges[i], o.on[i] = r, r[0] != r[1] || r[0] != centre
		a.val[name] = tuple(float, r[:]...)
	}
	return o
}

func (o *jitter) draw(steps []step, _ image.Point, r *Rand) []step {
	order := [4]int{0, 1, 2, 3}
	for i := range 3 {
		j := i + r.IntN(4-i)
		order[i], order[j] = order[j], order[i]
	}
	var amount [4]float64
	for i, q := range o.ranges {
		amount[i] = r.Uniform(q[0], q[1]) // drawn even if off, so that the other draws do not depend on it
	}
	for _, i := range order {
		if o.on[i] {
			steps = append(steps, step{kind: stepColour, colour: brightness + colour(i), amount: amount[i]})
		}
	}
	return steps
}

// recolouring is one change of colour with a probability: RandomGrayscale, RandomInvert, ...
type recolouring struct {
	sameSize
	colour    colour
	amount, p float64
}

// buildRecolouring returns the builder of an operation whose first parameter, if that is not p, is an amount from lo to
// hi.
func buildRecolouring(c colour, lo, hi float64) func(a *args) operation {
	return func(a *args) operation {
		o := &recolouring{colour: c}
		if arg := a.list[0].name; arg != "p" {
			v := a.val[arg]
			if !v.number() || v.num < lo || v.num > hi || c == posterize && v.kind != 'i' {
				a.bad(v, "%s must be a number from %g to %g", arg, lo, hi)
			}
			if o.amount = v.num; c != posterize {
				a.val[arg] = float(v.num)
			}
		}
		o.p = a.probability("p")
		return o
	}
}

func (o *recolouring) draw(steps []step, _ image.Point, r *Rand) []step {
	if r.Float64() < o.p {
		steps = append(steps, step{kind: stepColour, colour: o.colour, amount: o.amount})
	}
	return steps
}

// grayscale is torchvision's Grayscale(3).
type grayscale struct{ sameSize }

func buildGrayscale(a *args) operation {
	if v := a.val["num_output_channels"]; v.kind != 'i' || v.num != 3 {
		a.bad(v, "samples have three channels: write Grayscale(3)")
	}
	return grayscale{}
}

func (grayscale) draw(steps []step, _ image.Point, _ *Rand) []step {
	return append(steps, step{kind: stepColour, colour: grey})
}

// gaussianBlur is torchvision's, with a random sigma.
type gaussianBlur struct {
	sameSize
	kernel image.Point
	sigma  [2]float64
}

// maxKernel bounds a blur's kernel, since the cost is proportional to it.
const maxKernel = 255

func buildBlur(a *args) operation {
	v := a.val["kernel_size"]
	k := v.spread(2, 1, 2)
	if k == nil {
		a.bad(v, "kernel_size must be one odd number, or (width, height)")
		return nil
	}
	for _, x := range k {
		if x.kind != 'i' || x.num < 1 || x.num > maxKernel || int(x.num)%2 == 0 {
			a.bad(x, "kernel_size must be an odd number from 1 to %d", maxKernel)
		}
	}
	a.val["kernel_size"] = value{kind: 't', list: k}
	if s := a.val["sigma"]; s.number() && s.num >= 1e-3 && s.num <= 1e4 {
		s.kind, s.list = 't', []value{s, s}
		a.val["sigma"] = s
	}
	return &gaussianBlur{kernel: image.Pt(int(k[0].num), int(k[1].num)), sigma: a.interval("sigma", 1e4)}
}

func (o *gaussianBlur) draw(steps []step, _ image.Point, r *Rand) []step {
	return append(steps, step{kind: stepColour, colour: blur, size: o.kernel,
		amount: r.Uniform(o.sigma[0], o.sigma[1])})
}
