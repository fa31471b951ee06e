package gpuingest

import (
	"image"
	"math"
)

// The random numbers of erasing and of mixing come after those of the operations.
const (
	eraseOperation = 1<<16 - 1 - iota
	mixOperation
)

var eraseParams = []param{{"p", "0.5"}, {"scale", "(0.02, 0.33)"}, {"ratio", "(0.3, 3.3)"}, {"value", "0"},
	{"inplace", "False"}}

// erasing is torchvision's RandomErasing: a box of the finished sample gets one value, of the sample's type and not
// normalised.
type erasing struct {
	p            float64
	scale, ratio [2]float64
	elements     [3][]byte // the value as stored
	text         string
}

func buildErase(a *args, dtype string) *erasing {
	o := &erasing{p: a.probability("p"), scale: a.interval("scale", 1), ratio: a.interval("ratio", 1e4)}
	v := a.val["value"]
	list := v.spread(3, 1, 3)
	if list == nil {
		a.bad(v, "value must be one number or (red, green, blue)")
	}
	for c, x := range list {
		if !x.number() || math.Abs(x.num) > math.MaxFloat32 || dtype == "uint8" && (x.num < 0 || x.num > 255) {
			a.bad(x, "value must be finite, and 0 to 255 for uint8")
		}
		list[c] = float(x.num)
		o.elements[c] = element(dtype, x.num)
	}
	a.val["value"] = value{kind: 't', list: list}
	o.text = a.String()
	return o
}

// element converts a number to an element of a type, as torch does.
func element(dtype string, v float64) []byte {
	b := make([]byte, dtypes[dtype])
	switch dtype {
	case "uint8":
		b[0] = uint8(v)
	case "fp32":
		native.PutUint32(b, math.Float32bits(float32(v)))
	case "fp16":
		native.PutUint16(b, toFloat16(float64(float32(v))))
	case "bf16":
		native.PutUint16(b, bfloat16(float32(v)))
	}
	return b
}

// box draws the erased box, empty for none.
func (o *erasing) box(in image.Point, r *Rand) image.Rectangle {
	if r.Float64() >= o.p {
		return image.Rectangle{}
	}
	box, _ := tries(in, o.scale, o.ratio, r, func(h, w int) (int, int, bool) { return w, h, h < in.Y && w < in.X })
	return box
}

func (o *erasing) apply(dst []byte, t *Transform, r *Rand) {
	b := o.box(t.size, r)
	elem := dtypes[t.dtype]
	for c := range 3 {
		for y := b.Min.Y; y < b.Max.Y; y++ {
			at, step := (c*t.size.Y+y)*t.size.X+b.Min.X, 1
			if t.layout == "nhwc" {
				at, step = (y*t.size.X+b.Min.X)*3+c, 3
			}
			for range b.Dx() {
				copy(dst[at*elem:(at+1)*elem], o.elements[c])
				at += step
			}
		}
	}
}
