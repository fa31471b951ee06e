package gpuingest

import (
	"image"
	"math"
	"strconv"

	"github.com/shoalfs/shoal/gpuingest/jpeg"
)

func radians(degrees float64) float64 { return degrees * (math.Pi / 180) }

// degrees converts radians, rounded where Python rounds.
func degrees(radians float64) float64 { return radians * (180 / math.Pi) }

// inverseAffine is torchvision's matrix for affine of unit scale, in its order of operations: angle and shears in
// degrees, about a centre. (M = T C R C^-1, inverted.)
func inverseAffine(cx, cy, angle, tx, ty, shearX, shearY float64) [6]float64 {
	rot, sx, sy := radians(angle), radians(shearX), radians(shearY)
	a := math.Cos(rot-sy) / math.Cos(sy)
	b := float64(-math.Cos(rot-sy)*math.Tan(sx)/math.Cos(sy)) - math.Sin(rot)
	c := math.Sin(rot-sy) / math.Cos(sy)
	d := float64(-math.Sin(rot-sy)*math.Tan(sx)/math.Cos(sy)) + math.Cos(rot)
	m := [6]float64{d, -b, 0, -c, a, 0}
	m[2] += float64(m[0]*(-cx-tx)) + float64(m[1]*(-cy-ty))
	m[5] += float64(m[3]*(-cx-tx)) + float64(m[4]*(-cy-ty))
	m[2] += cx
	m[5] += cy
	return m
}

// round15 is Python's round(x, 15).
func round15(x float64) float64 {
	r, _ := strconv.ParseFloat(strconv.FormatFloat(x, 'f', 15, 64), 64) // without error: it was formatted here
	return r
}

// rotate appends the steps of Image.rotate: counter-clockwise by degrees, about the middle unless a centre is given.
func rotate(steps []step, size image.Point, angle float64, f jpeg.Filter, expand bool, centre *[2]float64,
	fill [3]uint8) []step {
	angle = math.Mod(angle, 360)
	if angle < 0 {
		angle += 360
	}
	w, h := float64(size.X), float64(size.Y)
	if centre == nil {
		turned := step{kind: stepAffine, size: image.Pt(size.Y, size.X), filter: jpeg.Nearest} // exact: a transposition
		switch {
		case angle == 0:
			return steps
		case angle == 180:
			return append(steps, step{kind: stepMirror}, step{kind: stepTurn})
		case angle == 90 && (expand || size.X == size.Y):
			turned.matrix = [6]float64{0, -1, w, 1, 0, 0}
			return append(steps, turned)
		case angle == 270 && (expand || size.X == size.Y):
			turned.matrix = [6]float64{0, 1, 0, -1, 0, h}
			return append(steps, turned)
		}
	}
	cx, cy := w/2, h/2
	if centre != nil {
		cx, cy = centre[0], centre[1]
	}
	rad := -radians(angle)
	cos, sin := round15(math.Cos(rad)), round15(math.Sin(rad))
	m := [6]float64{cos, sin, 0, round15(-math.Sin(rad)), cos, 0}
	through := func(x, y float64) (float64, float64) {
		return float64(m[0]*x) + float64(m[1]*y) + m[2], float64(m[3]*x) + float64(m[4]*y) + m[5]
	}
	m[2], m[5] = through(-cx, -cy)
	m[2] += cx
	m[5] += cy
	to := size
	if expand {
		x0, y0 := through(0, 0)
		x1, y1 := through(w, 0)
		x2, y2 := through(w, h)
		x3, y3 := through(0, h)
		nw := math.Ceil(max(x0, x1, x2, x3)) - math.Floor(min(x0, x1, x2, x3))
		nh := math.Ceil(max(y0, y1, y2, y3)) - math.Floor(min(y0, y1, y2, y3))
		m[2], m[5] = through(-(nw-w)/2, -(nh-h)/2)
		to = image.Pt(int(nw), int(nh))
	}
	return append(steps, step{kind: stepAffine, size: to, matrix: m, filter: f, fill: fill})
}

// randomRotation is torchvision's.
type randomRotation struct {
	degrees [2]float64
	filter  jpeg.Filter
	expand  bool
	centre  *[2]float64
	fill    [3]uint8
}

func buildRotation(a *args) operation {
	o := &randomRotation{}
	v := a.val["degrees"]
	pair, ok := v.pair()
	if v.number() {
		pair, ok = [2]float64{-v.num, v.num}, v.num >= 0
	}
	if !ok || pair[0] > pair[1] || pair[0] < -1e6 || pair[1] > 1e6 {
		a.bad(v, "degrees must be a number of at least 0, or (min, max)")
	}
	o.degrees = pair
	a.val["degrees"] = tuple(float, pair[:]...)
	if v = a.val["center"]; v.kind != 'n' {
		if pair, ok = v.pair(); !ok || math.Abs(pair[0]) > maxSide || math.Abs(pair[1]) > maxSide {
			a.bad(v, "center must be None or (x, y)")
		}
		o.centre = &pair
		a.val["center"] = tuple(float, pair[:]...)
	}
	o.expand, o.filter, o.fill = a.truth("expand"), a.interpolation(), a.fill()
	return o
}

func (o *randomRotation) draw(steps []step, size image.Point, r *Rand) []step {
	return rotate(steps, size, r.Uniform(o.degrees[0], o.degrees[1]), o.filter, o.expand, o.centre, o.fill)
}

func (o *randomRotation) out(in image.Point) image.Point {
	if o.expand {
		return image.Point{}
	}
	return in
}
