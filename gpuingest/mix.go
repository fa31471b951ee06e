package gpuingest

import (
	"fmt"
	"image"
	"math"
	"slices"
	"strings"

	"github.com/shoalfs/shoal/gpuingest/internal/pillow"
)

// mixWords are the steps over a batch, as torchvision.transforms.v2 names them.
var mixWords = []string{"MixUp", "CutMix", "RandomChoice"}

var (
	mixParams    = []param{{"alpha", "1.0"}, {"num_classes", "None"}}
	choiceParams = []param{{"transforms", ""}, {"p", "None"}}
)

// mixes reports whether a call is a step over a batch: MixUp, CutMix, or a RandomChoice that names one of them.
func mixes(c call) bool {
	inside := func(v value) bool { return v.call.name == "MixUp" || v.call.name == "CutMix" }
	return inside(value{call: c}) || c.name == "RandomChoice" && slices.ContainsFunc(c.args, func(a arg) bool {
		return slices.ContainsFunc(a.val.list, inside)
	})
}

// maxClasses bounds soft labels: a row of them is part of every sample.
const maxClasses = 1 << 20

// mixing blends each row of a batch with the one before it (the first with the last), like torchvision's MixUp and
// CutMix, with one draw of lambda from Beta(alpha, alpha) for each batch.
type mixing struct {
	kinds   []mixKind
	weights []float64 // of the kinds; nil: equal
	classes int       // 0: label_b and lam; else target
	text    string    // the canonical form
}

type mixKind struct {
	cut   bool
	alpha float64
}

func buildMix(p *parser, c call) (*mixing, error) {
	m := &mixing{}
	if c.name != "RandomChoice" {
		return m, m.add(p, c)
	}
	a, err := bind(p, c, choiceParams)
	if err != nil {
		return nil, err
	}
	list := a.val["transforms"]
	if list.kind != 't' || len(list.list) < 1 || len(list.list) > maxOps {
		a.bad(list, "transforms must be a list such as [MixUp(alpha=0.2), CutMix(alpha=1.0)]")
	}
	classes := 0
	for i, v := range list.list {
		if v.kind != 'c' || v.call.name != "MixUp" && v.call.name != "CutMix" {
			a.bad(v, "the choice is between MixUp(...) and CutMix(...)")
		}
		if a.err != nil {
			return nil, a.err
		}
		if err := m.add(p, v.call); err != nil {
			return nil, err
		}
		if i > 0 && m.classes != classes {
			return nil, p.fail(v.pos, v.len, "",
				"%s: num_classes must be the same for all, since batches have one shape", v.call.name)
		}
		classes = m.classes
	}
	m.weights = a.weights(len(m.kinds))
	weights := a.val["p"].String()
	if len(m.weights) > 1 { // as it has been hashed since before RandomChoice was an operation, too
		weights = strings.TrimSuffix(weights, ")") + ",)"
	}
	m.text = "RandomChoice(transforms=[" + m.text + "], p=" + weights + ")"
	return m, a.err
}

// add reads MixUp or CutMix.
func (m *mixing) add(p *parser, c call) error {
	a, err := bind(p, c, mixParams)
	if err != nil {
		return err
	}
	alpha := a.real("alpha", 1e-3, 1e3, "a number from 0.001 to 1000")
	m.classes = 0
	if v := a.val["num_classes"]; v.kind != 'n' {
		m.classes = a.integer("num_classes", 1, maxClasses)
	}
	if m.text != "" {
		m.text += ", "
	}
	m.text += a.String()
	m.kinds = append(m.kinds, mixKind{c.name == "CutMix", alpha})
	return a.err
}

// draw chooses the kind and its lambda.
func (m *mixing) draw(r *Rand) (mixKind, float64) {
	k := m.kinds[pick(len(m.kinds), m.weights, r)]
	return k, beta(r, k.alpha)
}

// beta draws from the distribution Beta(a, a): x/(x+y) with x and y from Gamma(a), by their logarithms, since small
// alphas give tiny numbers.
func beta(r *Rand, a float64) float64 {
	x, y := logGamma(r, a), logGamma(r, a)
	return 1 / (1 + math.Exp(y-x))
}

// logGamma draws the logarithm of a number from Gamma(a, 1) (Marsaglia, Tsang: "A simple method for generating gamma
// variables", 2000).
func logGamma(r *Rand, a float64) float64 {
	boost := 0.0
	if a < 1 {
		boost = math.Log(1-r.Float64()) / a
		a++
	}
	d := a - 1.0/3
	c := 1 / math.Sqrt(9*d)
	for {
		// One of Box and Muller's two numbers.
		n := math.Sqrt(-2*math.Log(1-r.Float64())) * math.Cos(2*math.Pi*r.Float64())
		v := 1 + c*n
		if v <= 0 {
			continue
		}
		v = v * v * v
		if math.Log(1-r.Float64()) < n*n/2+d-d*v+d*math.Log(v) {
			return math.Log(d) + math.Log(v) + boost
		}
	}
}

// cutBox is the box that CutMix copies from the partner, perhaps empty.
func cutBox(size image.Point, lam float64, r *Rand) image.Rectangle {
	x, y := r.IntN(size.X), r.IntN(size.Y)
	half := 0.5 * math.Sqrt(1-lam)
	w, h := int(half*float64(size.X)), int(half*float64(size.Y))
	return image.Rect(x-w, y-h, x+w, y+h).Intersect(image.Rectangle{Max: size})
}

// mixedIngest is a Transform with a step over the batch, once its rows are done.
type mixedIngest struct{ *Transform }

// ingest is the transform as an Ingest for New.
func (t *Transform) ingest() Ingest {
	if t.mix != nil {
		return &mixedIngest{t}
	}
	return t
}

// Fields implements Ingest: the partner's label and the weight of the row's own label, or soft labels.
func (t *mixedIngest) Fields() []Field {
	if k := t.mix.classes; k > 0 {
		return append(t.Transform.Fields(), Field{Name: "target", DType: "fp32", Shape: []int{k}, Bytes: 4 * k})
	}
	return append(t.Transform.Fields(), Field{Name: "label_b", DType: "int64", Bytes: 8},
		Field{Name: "lam", DType: "fp32", Bytes: 4})
}

// Make implements Ingest. The row is its own partner until Mix.
func (t *mixedIngest) Make(src Sample, at Draw, row *Row) error {
	if k := t.mix.classes; k > 0 && (row.Label < 0 || row.Label >= int64(k)) {
		return fmt.Errorf(
			"gpuingest: sample %d has label %d and %s makes soft labels of %d classes: raise num_classes, or omit it",
			at.Sample, row.Label, t.mix.text, k)
	}
	if err := t.Transform.Make(src, at, row); err != nil {
		return err
	}
	t.mix.label(row, row.Label, 1)
	return nil
}

// label writes the mixed label of a row.
func (m *mixing) label(row *Row, partner int64, lam float32) {
	if m.classes == 0 {
		native.PutUint64(row.Fields[1], uint64(partner))
		native.PutUint32(row.Fields[2], math.Float32bits(lam))
		return
	}
	target := row.Fields[1]
	clear(target)
	native.PutUint32(target[4*row.Label:], math.Float32bits(lam))
	other := target[4*partner:]
	native.PutUint32(other, math.Float32bits(math.Float32frombits(native.Uint32(other))+(1-lam)))
}

// Mix changes rows in place; those without a sample are nil. at.Sample is the batch's number in its epoch,
// at.Occurrence the rank. Rows of uint8 become (a*k + b*(65536-k) + 32768) >> 16 with lam = k/65536; rows of floats
// lam*a + (1-lam)*b in float32, rounded once to the type.
func (t *mixedIngest) Mix(at Draw, rows []*Row) {
	rows = slices.DeleteFunc(slices.Clone(rows), func(r *Row) bool { return r == nil })
	if len(rows) == 0 {
		return
	}
	r := at.Rand(mixOperation)
	kind, lam := t.mix.draw(&r)
	k := int(math.Round(lam * (1 << 16)))
	var box image.Rectangle
	if kind.cut {
		box = cutBox(t.size, lam, &r)
		lam = 1 - float64(box.Dx()*box.Dy())/float64(t.size.X*t.size.Y)
	} else {
		lam = float64(k) / (1 << 16)
	}
	// From the last row down, so that each partner is still unmixed.
	last := getBuffer(t.OutBytes())
	defer putBuffer(last)
	copy(*last, rows[len(rows)-1].Fields[0])
	for i := len(rows) - 1; i >= 0; i-- {
		a, b, partner := rows[i].Fields[0], *last, rows[len(rows)-1]
		if i > 0 {
			partner = rows[i-1]
			b = partner.Fields[0]
		}
		if kind.cut {
			t.paste(a, b, box)
		} else {
			pillow.Mix(t.dtype, a, b, k)
		}
		t.mix.label(rows[i], partner.Label, float32(lam))
	}
}

// paste copies a box from b to a.
func (t *mixedIngest) paste(a, b []byte, box image.Rectangle) {
	elem, w := dtypes[t.dtype], t.size.X
	planes := 3
	if t.layout == "nhwc" {
		elem, planes = elem*3, 1
	}
	for p := range planes {
		for y := box.Min.Y; y < box.Max.Y; y++ {
			row := (p*t.size.Y + y) * w
			lo, hi := (row+box.Min.X)*elem, (row+box.Max.X)*elem
			copy(a[lo:hi], b[lo:hi])
		}
	}
}
