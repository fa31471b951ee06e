package gpuingest

import (
	"cmp"
	"image"
	"math"
	"strings"

	"github.com/shoalfs/shoal/gpuingest/jpeg"
)

// deed is one of the operations that the automatic augmentations choose from.
type deed uint8

const (
	doNothing deed = iota
	doShearX
	doShearY
	doTranslateX
	doTranslateY
	doRotate
	doBrightness
	doColor
	doContrast
	doSharpness
	doPosterize
	doSolarize
	doAutoContrast
	doEqualize
	doInvert
)

// deeds is the number of those of RandAugment and TrivialAugment, in torchvision's order; Invert is AutoAugment's only.
const deeds = int(doEqualize) + 1

// signed deeds are applied in either direction with equal probability.
func (d deed) signed() bool { return d >= doShearX && d <= doSharpness }

// graded deeds have a magnitude.
func (d deed) graded() bool { return d >= doShearX && d <= doSolarize }

// linspace is the i-th of n numbers from 0 or lo to hi in float32, as torch.linspace computes it from both ends: by
// fused multiply-adds, which float64 equals here.
func linspace(lo, hi float64, n, i int) float64 {
	start, end := float32(lo), float32(hi)
	if n == 1 {
		return float64(start)
	}
	step := (end - start) / float32(n-1)
	if i < n/2 {
		return float64(float32(float64(start) + float64(step)*float64(i)))
	}
	return float64(float32(float64(end) - float64(step)*float64(n-i-1)))
}

// space is the range of magnitudes.
type space struct {
	shear, rotate, factor float64
	translate             float64 // pixels; 0: 150/331 of the side
	bits                  float64 // the most that Posterize removes
}

var (
	usualSpace = space{shear: 0.3, rotate: 30, factor: 0.9, bits: 4}
	wideSpace  = space{shear: 0.99, rotate: 135, factor: 0.99, translate: 32, bits: 6}
)

// canvas says how moved pictures are sampled and filled.
type canvas struct {
	sameSize
	filter jpeg.Filter
	fill   [3]uint8
	v2     bool
}

// magnitude is the i-th of n magnitudes of a space, for a picture of this size; 0 if the deed has none.
func (c *canvas) magnitude(s *space, d deed, n, i int, size image.Point) float64 {
	switch d {
	case doShearX, doShearY:
		return linspace(0, s.shear, n, i)
	case doTranslateX, doTranslateY:
		far, side := s.translate, size.X
		if d == doTranslateY {
			side = size.Y
		}
		far = cmp.Or(far, 150.0/331.0*float64(side))
		return linspace(0, far, n, i)
	case doRotate:
		return linspace(0, s.rotate, n, i)
	case doBrightness, doColor, doContrast, doSharpness:
		return linspace(0, s.factor, n, i)
	case doPosterize:
		return 8 - math.RoundToEven(float64(float32(i)/float32(float64(n-1)/s.bits)))
	case doSolarize:
		if c.v2 { // torchvision's v2 takes a number from 1 to 0
			return 255 * linspace(1, 0, n, i)
		}
		return linspace(255, 0, n, i)
	}
	return 0
}

// do appends the step of a deed with a magnitude.
func (c *canvas) do(steps []step, d deed, magnitude float64, size image.Point) []step {
	move := func(cx, cy, tx, ty, shearX, shearY float64) []step {
		return append(steps, step{kind: stepAffine, size: size,
			matrix: inverseAffine(cx, cy, 0, tx, ty, shearX, shearY), filter: c.filter, fill: c.fill})
	}
	switch d {
	case doShearX:
		return move(0, 0, 0, 0, degrees(math.Atan(magnitude)), 0)
	case doShearY:
		return move(0, 0, 0, 0, 0, degrees(math.Atan(magnitude)))
	case doTranslateX:
		return move(float64(size.X)*0.5, float64(size.Y)*0.5, math.Trunc(magnitude), 0, 0, 0)
	case doTranslateY:
		return move(float64(size.X)*0.5, float64(size.Y)*0.5, 0, math.Trunc(magnitude), 0, 0)
	case doRotate:
		return rotate(steps, size, magnitude, c.filter, false, nil, c.fill)
	case doNothing:
		return steps
	case doBrightness, doColor, doContrast, doSharpness:
		magnitude++ // a factor
	}
	return append(steps, step{kind: stepColour, colour: colours[d], amount: magnitude})
}

// colours are the changes that deeds make to colours.
var colours = [...]colour{
	doBrightness: brightness, doColor: saturation, doContrast: contrast, doSharpness: sharpness, doPosterize: posterize,
	doSolarize: solarize, doAutoContrast: autoContrast, doEqualize: equalize, doInvert: invert,
}

func (a *args) canvas() canvas {
	return canvas{filter: a.interpolation(), fill: a.fill(), v2: a.p.v2}
}

// maxDeeds and maxBins bound the arguments of an augmentation.
const (
	maxDeeds = 16
	maxBins  = 1024
)

// randAugment is torchvision's: n operations of one magnitude.
type randAugment struct {
	canvas
	n, magnitude, bins int
}

func buildRandAugment(a *args) operation {
	o := &randAugment{n: a.integer("num_ops", 0, maxDeeds), bins: a.integer("num_magnitude_bins", 2, maxBins)}
	o.magnitude, o.canvas = a.integer("magnitude", 0, o.bins-1), a.canvas()
	return o
}

func (o *randAugment) draw(steps []step, size image.Point, r *Rand) []step {
	for range o.n {
		d := deed(r.IntN(deeds))
		m := o.canvas.magnitude(&usualSpace, d, o.bins, o.magnitude, size)
		if d.signed() && r.IntN(2) == 1 {
			m = -m
		}
		steps = o.do(steps, d, m, size)
	}
	return steps
}

// trivialAugment is torchvision's TrivialAugmentWide: one operation of any magnitude.
type trivialAugment struct {
	canvas
	bins int
}

func buildTrivialAugment(a *args) operation {
	return &trivialAugment{bins: a.integer("num_magnitude_bins", 2, maxBins), canvas: a.canvas()}
}

func (o *trivialAugment) draw(steps []step, size image.Point, r *Rand) []step {
	d, m := deed(r.IntN(deeds)), 0.0
	if d.graded() {
		m = o.magnitude(&wideSpace, d, o.bins, r.IntN(o.bins), size)
	}
	if d.signed() && r.IntN(2) == 1 {
		m = -m
	}
	return o.do(steps, d, m, size)
}

// autoAugment is torchvision's: one of a policy's pairs of operations.
type autoAugment struct {
	canvas
	policy string
}

func buildAutoAugment(a *args) operation {
	o := &autoAugment{}
	v := a.val["policy"]
	for name := range policies {
		if v.kind == 's' && (v.str == name || v.str == "AutoAugmentPolicy."+strings.ToUpper(name)) {
			o.policy = name
		}
	}
	if o.policy == "" {
		a.bad(v, "policy must be 'imagenet', 'cifar10' or 'svhn'")
	}
	a.val["policy"] = value{kind: 's', str: o.policy}
	o.canvas = a.canvas()
	return o
}

func (o *autoAugment) draw(steps []step, size image.Point, r *Rand) []step {
	pair := policies[o.policy][r.IntN(len(policies[o.policy]))]
	chance := [2]float64{r.Float64(), r.Float64()}
	negative := [2]bool{r.IntN(2) == 0, r.IntN(2) == 0}
	for i, q := range pair {
		if chance[i] > q.p {
			continue
		}
		m := o.magnitude(&usualSpace, q.deed, 10, q.level, size)
		if q.deed.signed() && negative[i] {
			m = -m
		}
		steps = o.do(steps, q.deed, m, size)
	}
	return steps
}
