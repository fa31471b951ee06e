package gpuingest

import (
	"fmt"
	"image"
	"maps"
	"math"
	"slices"
	"strings"

	"github.com/shoalfs/shoal/gpuingest/jpeg"
)

// param is one parameter of an operation, as torchvision names it.
type param struct {
	name string
	def  string // default as a literal; empty: required
}

// args are an operation's arguments by name, including defaults.
type args struct {
	p   *parser
	of  call
	val map[string]value
}

// maxSide bounds sizes in a SPEC, in pixels; maxOut bounds a sample's bytes.
const (
	maxSide = 16384
	maxOut  = math.MaxInt32
	maxOps  = 32
)

// operationKind says how an operation is built from its arguments.
type operationKind struct {
	params []param
	build  func(a *args) (operation, error)
}

// operations lists them with their parameters in torchvision's order.
var operations = map[string]operationKind{
	"RandomResizedCrop": {
		[]param{{"size", ""}, {"scale", "(0.08, 1.0)"}, {"ratio", "(0.75, 1.3333333333333333)"}, {"interpolation", "'bilinear'"}, {"antialias", "True"}},
		func(a *args) (operation, error) {
			o := &randomResizedCrop{}
			var err error
			if o.h, o.w, err = a.hw("size"); err != nil {
				return nil, err
			}
			if o.scale, err = a.interval("scale", 1); err != nil {
				return nil, err
			}
			if o.ratio, err = a.interval("ratio", 1e4); err != nil {
				return nil, err
			}
			o.filter, err = a.filter()
			return o, err
		},
	},
	"Resize": {
		[]param{{"size", ""}, {"interpolation", "'bilinear'"}, {"max_size", "None"}, {"antialias", "True"}},
		func(a *args) (operation, error) {
			filter, err := a.filter()
			if err != nil {
				return nil, err
			}
			size, limit := a.val["size"], a.val["max_size"]
			if size.kind == 't' && len(size.list) == 2 {
				if limit.kind != 'n' {
					return nil, a.bad(limit, "max_size requires a size that is one number")
				}
				h, w, err := a.hw("size")
				return &resizeTo{h, w, filter}, err
			}
			if size.kind == 't' && len(size.list) == 1 {
				size = size.list[0]
			}
			n, err := a.side(size, "size")
			if err != nil {
				return nil, err
			}
			o := &resizeShort{short: n, filter: filter}
			if limit.kind != 'n' {
				if o.maxSize, err = a.side(limit, "max_size"); err != nil {
					return nil, err
				}
				if o.maxSize <= n {
					return nil, a.bad(limit, "max_size must exceed size")
				}
			}
			return o, nil
		},
	},
	"CenterCrop": {
		[]param{{"size", ""}},
		func(a *args) (operation, error) {
			h, w, err := a.hw("size")
			return &centerCrop{h, w}, err
		},
	},
	"RandomHorizontalFlip": {
		[]param{{"p", "0.5"}},
		func(a *args) (operation, error) {
			p, err := a.probability("p")
			return &randomFlip{p, stepMirror}, err
		},
	},
	"RandomVerticalFlip": {
		[]param{{"p", "0.5"}},
		func(a *args) (operation, error) {
			p, err := a.probability("p")
			return &randomFlip{p, stepTurn}, err
		},
	},
	"RandomCrop": {
		[]param{{"size", ""}, {"padding", "None"}, {"pad_if_needed", "False"}, {"fill", "0"}, {"padding_mode", "'constant'"}},
		buildRandomCrop,
	},
	"Pad":            {[]param{{"padding", ""}, {"fill", "0"}, {"padding_mode", "'constant'"}}, buildPad},
	"RandomRotation": {[]param{{"degrees", ""}, {"interpolation", "'nearest'"}, {"expand", "False"}, {"center", "None"}, {"fill", "0"}}, buildRotation},
	"ColorJitter":    {[]param{{"brightness", "0"}, {"contrast", "0"}, {"saturation", "0"}, {"hue", "0"}}, buildJitter},
	"Grayscale":      {[]param{{"num_output_channels", "1"}}, buildGrayscale},
	"GaussianBlur":   {[]param{{"kernel_size", ""}, {"sigma", "(0.1, 2.0)"}}, buildBlur},
	"RandAugment": {
		[]param{{"num_ops", "2"}, {"magnitude", "9"}, {"num_magnitude_bins", "31"}, {"interpolation", "'nearest'"}, {"fill", "None"}},
		buildRandAugment,
	},
	"TrivialAugmentWide": {[]param{{"num_magnitude_bins", "31"}, {"interpolation", "'nearest'"}, {"fill", "None"}}, buildTrivialAugment},
	"AutoAugment":        {[]param{{"policy", "'imagenet'"}, {"interpolation", "'nearest'"}, {"fill", "None"}}, buildAutoAugment},

	"RandomGrayscale":       {[]param{{"p", "0.1"}}, buildRecolouring("RandomGrayscale", "", grey, 0, 0)},
	"RandomInvert":          {[]param{{"p", "0.5"}}, buildRecolouring("RandomInvert", "", invert, 0, 0)},
	"RandomAutocontrast":    {[]param{{"p", "0.5"}}, buildRecolouring("RandomAutocontrast", "", autoContrast, 0, 0)},
	"RandomEqualize":        {[]param{{"p", "0.5"}}, buildRecolouring("RandomEqualize", "", equalize, 0, 0)},
	"RandomPosterize":       {[]param{{"bits", ""}, {"p", "0.5"}}, buildRecolouring("RandomPosterize", "bits", posterize, 0, 8)},
	"RandomSolarize":        {[]param{{"threshold", ""}, {"p", "0.5"}}, buildRecolouring("RandomSolarize", "threshold", solarize, 0, 256)},
	"RandomAdjustSharpness": {[]param{{"sharpness_factor", ""}, {"p", "0.5"}}, buildRecolouring("RandomAdjustSharpness", "sharpness_factor", sharpness, 0, 1e4)},
}

var normalizeParams = []param{{"mean", ""}, {"std", ""}, {"inplace", "False"}, {"dtype", "'fp32'"}}

// dtypes maps each type's word to its size in bytes.
var dtypes = map[string]int{"uint8": 1, "fp16": 2, "bf16": 2, "fp32": 4}

var layouts = []string{"nchw", "nhwc"}

const (
	rawWord    = "raw"
	pillowWord = "pillow"
	dctWord    = "dct"
	v2Word     = "v2"
	eraseWord  = "RandomErasing"
)

// pillowRules are the versions whose resize can be reproduced: 13 resizes vertically first if the height shrinks by more
// than twice as many pixels as the width. The first is the default.
var pillowRules = []string{"pillow(9.4)", "pillow(13)"}

// hints answer likely mistakes of torchvision's users.
var hints = map[string]string{
	"ToTensor":               "write fp32 (which scales to [0, 1]) and, optionally, nchw or nhwc",
	"PILToTensor":            "write uint8",
	"ToImage":                "write uint8",
	"ToDtype":                "write uint8, fp16, bf16 or fp32",
	"ConvertImageDtype":      "write uint8, fp16, bf16 or fp32",
	"Compose":                "separate operations by |",
	"float32":                "write fp32",
	"float16":                "write fp16",
	"half":                   "write fp16",
	"bfloat16":               "write bf16",
	"Detection":              "it comes first, before the operations",
	"Segmentation":           "it comes first, before the operations",
	"SanitizeBoundingBoxes":  "write min_size and min_area in Detection(...)",
	"SanitizeBoundingBox":    "write min_size and min_area in Detection(...)",
	"ClampBoundingBoxes":     "omit it: boxes never extend beyond the picture",
	"RandomHorizontallyFlip": "did you mean RandomHorizontalFlip?",
}

func words() []string {
	return slices.Concat(slices.Collect(maps.Keys(operations)), slices.Collect(maps.Keys(dtypes)), layouts, mixWords, slices.Collect(maps.Keys(families)), slices.Collect(maps.Keys(jointWords)),
		[]string{"Normalize", rawWord, pillowWord, dctWord, v2Word, eraseWord})
}

// Compile parses a transform SPEC.
//
//	SPEC      = "raw" | operation { "|" operation } { "|" word }
//	operation = a name of torchvision with its arguments: RandomResizedCrop(224), ColorJitter(0.4, hue=0.1), ...
//	word      = uint8 | fp16 | bf16 | fp32 | nchw | nhwc | Normalize(mean, std) | RandomErasing(p, scale, ratio, value)
//	          | MixUp(alpha) | CutMix(alpha) | RandomChoice([MixUp(alpha), CutMix(alpha)]) | dct | v2 | pillow(9.4)
//	          | pillow(13)
//
// Names, keywords, order of arguments and defaults are torchvision's, values are Python literals. uint8 is the default
// type, nchw the default layout (PyTorch's). uint8 gives pixels as they are, the other types value/255, or
// (value/255 - mean)/std with Normalize. The operations must end in a fixed size, since samples form batches.
// Words may come in any order; erasing works on the finished values, mixing on the batch. Errors are *SpecError.
func Compile(spec string) (*Transform, error) {
	calls, err := parseSpec(spec)
	if err != nil {
		return nil, err
	}
	v2 := slices.ContainsFunc(calls, func(c call) bool { return c.name == v2Word })
	c := &compiler{p: &parser{s: spec, v2: v2}, t: &Transform{dtype: "uint8", layout: "nchw"}, seen: map[string]string{}}
	if calls[0].name == rawWord {
		c.t.raw, c.t.dtype, c.t.layout = true, rawWord, rawWord
		if err := c.p.alone(calls); err != nil {
			return nil, err
		}
		return c.t, nil
	}
	if !jpeg.Available {
		return nil, c.p.fail(calls[0].pos, len(calls[0].name), "", "%v", jpeg.ErrUnavailable)
	}
	for _, call := range calls {
		if o, ok := operations[call.name]; ok {
			err = c.operation(call, o)
		} else {
			err = c.word(call)
		}
		if err != nil {
			return nil, err
		}
	}
	if err := c.t.fits(c.p, calls, c.norm); err != nil {
		return nil, err
	}
	if c.erase != nil {
		if c.t.erase, err = buildErase(c.erase, c.t.dtype); err != nil {
			return nil, err
		}
	}
	return c.t, nil
}

// compiler is the state of Compile.
type compiler struct {
	p           *parser
	t           *Transform
	norm, erase *args
	seen        map[string]string // choices made so far (type, layout, ...), and by which word
}

// once notes that a call makes a choice, which may be made once.
func (c *compiler) once(of call, what string) error {
	if was, ok := c.seen[what]; ok {
		return c.p.fail(of.pos, len(of.name), "", "%s after %s: one %s is enough", of.name, was, what)
	}
	c.seen[what] = of.name
	return nil
}

func (c *compiler) operation(of call, o operationKind) error {
	if len(c.seen) > 0 {
		return c.p.fail(of.pos, len(of.name), "", "%s after a word: operations come before type, layout, Normalize, RandomErasing and MixUp", of.name)
	}
	if len(c.t.ops) == maxOps {
		return c.p.fail(of.pos, len(of.name), "", "more than %d operations", maxOps)
	}
	blurs := func(o operation) bool { _, ok := o.(*gaussianBlur); return ok }
	if of.name == "RandomAdjustSharpness" && slices.ContainsFunc(c.t.ops, blurs) {
		return c.p.fail(of.pos, len(of.name), "put it before GaussianBlur, or sharpen in the trainer",
			"RandomAdjustSharpness after GaussianBlur, which differs from torchvision's in some values by one: that would grow")
	}
	a, err := bind(c.p, of, o.params)
	if err != nil {
		return err
	}
	op, err := o.build(a)
	if err == nil {
		c.t.ops = append(c.t.ops, op)
	}
	return err
}

// word parses a word that is not a step on a picture: how it is decoded, and the form of the batch.
func (c *compiler) word(of call) (err error) {
	choose := func(what string, take func() error) error {
		if err := c.once(of, what); err != nil {
			return err
		}
		return take()
	}
	plain := func(what string, take func()) error { // without arguments
		return choose(what, func() error {
			if take(); of.parens {
				return c.p.fail(of.pos, len(of.name), "", "%s takes no arguments", of.name)
			}
			return nil
		})
	}
	t := c.t
	switch {
	case of.name == "Normalize":
		return choose("normalization", func() error {
			if c.norm, err = bind(c.p, of, normalizeParams); err != nil {
				return err
			}
			return t.setNorm(c.norm)
		})
	case of.name == pillowWord:
		return choose("version of Pillow", func() error {
			t.verticalFirst, err = verticalFirst(c.p, of)
			return err
		})
	case of.name == eraseWord:
		return choose("erasing", func() error {
			c.erase, err = bind(c.p, of, eraseParams)
			return err
		})
	case slices.Contains(mixWords, of.name):
		return choose("mixing", func() error {
			t.mix, err = buildMix(c.p, of)
			return err
		})
	case of.name == rawWord:
		return c.p.fail(of.pos, len(of.name), "", "raw gives the file as it is and stands alone")
	case dtypes[of.name] > 0:
		return plain("type", func() { t.dtype = of.name })
	case of.name == dctWord:
		return plain("way to decode", func() { t.dct = true })
	case of.name == v2Word:
		return plain("version of torchvision", func() { t.v2 = true })
	case slices.Contains(layouts, of.name):
		return plain("layout", func() { t.layout = of.name })
	}
	hint, ok := hints[of.name]
	if !ok {
		hint = nearest(of.name, words())
	}
	return c.p.fail(of.pos, len(of.name), hint, "unknown operation %s", of.name)
}

// alone checks that there is nothing besides raw.
func (p *parser) alone(calls []call) error {
	if len(calls) > 1 {
		return p.fail(calls[1].pos, len(calls[1].name), "", "raw gives the file as it is and stands alone")
	}
	if calls[0].parens {
		return p.fail(calls[0].pos, len(rawWord), "", "raw takes no arguments")
	}
	return nil
}

// verticalFirst reports whether the rules of a version of Pillow resize vertically first.
func verticalFirst(p *parser, c call) (bool, error) {
	a, err := bind(p, c, []param{{"version", ""}})
	if err != nil {
		return false, err
	}
	v := a.val["version"]
	i := slices.Index(pillowRules, pillowWord+"("+strings.TrimSuffix(v.String(), ".0")+")")
	if i < 0 || !v.number() {
		return false, a.bad(v, "the supported rules are those of Pillow 9.4 and 13: write pillow(9.4), pillow(13), or omit it for 9.4")
	}
	return i == 1, nil
}

// fits computes the size of a sample, and checks that samples of that size form a batch.
func (t *Transform) fits(p *parser, calls []call, norm *args) error {
	if norm != nil && t.dtype == "uint8" {
		return p.fail(norm.of.pos, len(norm.of.name), "add fp32, fp16 or bf16", "Normalize produces fractions, but the type is uint8")
	}
	for _, op := range t.ops {
		t.size = op.out(t.size)
	}
	if c := calls[len(calls)-1]; t.size == (image.Point{}) {
		return p.fail(c.pos, len(c.name), "add CenterCrop(224), or use Resize((224, 224)) or RandomResizedCrop(224)",
			"samples would differ in size and could not form a batch")
	}
	if n := int64(t.size.X) * int64(t.size.Y) * 3 * int64(dtypes[t.dtype]); t.size.X > maxSide || t.size.Y > maxSide || n > maxOut {
		return p.fail(calls[0].pos, len(calls[0].name), "", "a sample of %dx%d %s takes %d bytes: the limits are %d a side and %d bytes", t.size.X, t.size.Y, t.dtype, n, maxSide, maxOut)
	}
	t.makeTable()
	return nil
}

// bind assigns arguments to parameters and adds defaults.
func bind(p *parser, c call, params []param) (*args, error) {
	a := &args{p: p, of: c, val: map[string]value{}}
	names := make([]string, len(params))
	for i, q := range params {
		names[i] = q.name
	}
	for i, g := range c.args {
		name := g.name
		if name == "" {
			if i >= len(params) {
				return nil, p.fail(g.val.pos, g.val.len, "", "%s takes at most %d arguments", c.name, len(params))
			}
			name = names[i]
		}
		if !slices.Contains(names, name) {
			return nil, p.fail(g.pos, len(name), nearest(name, slices.Clone(names)), "%s has no argument %s", c.name, name)
		}
		if _, ok := a.val[name]; ok {
			return nil, p.fail(g.pos, max(len(g.name), 1), "", "%s is given twice", name)
		}
		a.val[name] = g.val
	}
	for _, q := range params {
		if _, ok := a.val[q.name]; ok {
			continue
		}
		if q.def == "" {
			return nil, p.fail(c.pos, len(c.name), fmt.Sprintf("write %s(%s)", c.name, example(params)), "%s needs %s", c.name, q.name)
		}
		d := &parser{s: q.def}
		v, err := d.value(0)
		if err != nil {
			return nil, err // unreachable: defaults are literals of this file
		}
		v.pos, v.len = c.pos, len(c.name)
		a.val[q.name] = v
	}
	return a, nil
}

func example(params []param) string {
	var need []string
	for _, q := range params {
		if q.def == "" {
			need = append(need, map[string]string{"size": "224", "mean": "(0.485, 0.456, 0.406)", "std": "(0.229, 0.224, 0.225)", "version": "9.4",
				"shape": "(64, 64)", "key": "'arr_0'", "name": "'tensor'", "dtype": "'float32'", "length": "1024", "stored": "'npy:uint16'", "column": "'age'", "seconds": "2.0", "rate": "16000",
				"padding": "4", "degrees": "15", "kernel_size": "23", "bits": "2", "threshold": "192", "sharpness_factor": "2"}[q.name])
		}
	}
	return strings.Join(need, ", ")
}

func (a *args) bad(v value, format string, x ...any) error {
	return a.p.fail(v.pos, v.len, "", "%s: %s, not %s", a.of.name, fmt.Sprintf(format, x...), v)
}

func (a *args) side(v value, name string) (int, error) {
	if v.kind != 'i' || v.num < 1 || v.num > maxSide {
		return 0, a.bad(v, "%s must be a number of pixels from 1 to %d", name, maxSide)
	}
	return int(v.num), nil
}

// hw parses one side for both, (side,) or (height, width).
func (a *args) hw(name string) (h, w int, err error) {
	v := a.val[name]
	if v.kind != 't' {
		h, err = a.side(v, name)
		return h, h, err
	}
	if len(v.list) != 1 && len(v.list) != 2 {
		return 0, 0, a.bad(v, "%s must be one number or (height, width)", name)
	}
	if h, err = a.side(v.list[0], name); err != nil {
		return 0, 0, err
	}
	w, err = a.side(v.list[len(v.list)-1], name)
	return h, w, err
}

// interval parses (min, max) with 0 < min <= max <= top.
func (a *args) interval(name string, top float64) (r [2]float64, err error) {
	v := a.val[name]
	if v.kind != 't' || len(v.list) != 2 || !v.list[0].number() || !v.list[1].number() ||
		v.list[0].num < 1/1e6 || v.list[0].num > v.list[1].num || v.list[1].num > top {
		return r, a.bad(v, "%s must be (min, max) with 0 < min <= max <= %g", name, top)
	}
	return [2]float64{v.list[0].num, v.list[1].num}, nil
}

// probability parses a number from 0 to 1.
func (a *args) probability(name string) (float64, error) {
	p := a.val[name]
	if !p.number() || p.num < 0 || p.num > 1 {
		return 0, a.bad(p, "%s must be a probability from 0 to 1", name)
	}
	return p.num, nil
}

// truth parses True or False.
func (a *args) truth(name string) (bool, error) {
	v := a.val[name]
	if v.kind != 'b' {
		return false, a.bad(v, "%s must be True or False", name)
	}
	return v.num != 0, nil
}

// integer parses a whole number.
func (a *args) integer(name string, lo, hi int) (int, error) {
	v := a.val[name]
	if v.kind != 'i' || v.num < float64(lo) || v.num > float64(hi) {
		return 0, a.bad(v, "%s must be a whole number from %d to %d", name, lo, hi)
	}
	return int(v.num), nil
}

// fill parses a colour: None, one number or (red, green, blue), 0 to 255, truncated to integers.
func (a *args) fill() (c [3]uint8, err error) {
	v := a.val["fill"]
	list := v.list
	switch {
	case v.kind == 'n':
		return c, nil
	case v.number():
		list = []value{v}
	case v.kind != 't' || len(list) != 1 && len(list) != 3:
		return c, a.bad(v, "fill must be None, one number or (red, green, blue)")
	}
	for i := range c {
		x := list[i%len(list)]
		if !x.number() || x.num < 0 || x.num > 255 {
			return c, a.bad(x, "fill must contain numbers from 0 to 255")
		}
		c[i] = uint8(x.num)
	}
	return c, nil
}

// interpolation parses one of torchvision's modes.
func (a *args) interpolation() (jpeg.Filter, error) {
	v := a.val["interpolation"]
	name := strings.ToLower(strings.TrimPrefix(v.str, "InterpolationMode."))
	for f := jpeg.Bilinear; f <= jpeg.Nearest; f++ {
		if v.kind == 's' && name == f.String() {
			return f, nil
		}
	}
	return 0, a.bad(v, "interpolation must be 'bilinear', 'bicubic' or 'nearest'")
}

// filter parses interpolation, and rejects antialias=False: Pillow always antialiases.
func (a *args) filter() (jpeg.Filter, error) {
	if v := a.val["antialias"]; v.kind != 'n' && (v.kind != 'b' || v.num == 0) {
		return 0, a.bad(v, "Pillow always resizes with antialias=True")
	}
	return a.interpolation()
}

// setNorm parses mean and std: three numbers, or one for all channels.
func (t *Transform) setNorm(a *args) error {
	read := func(name string, to *[3]float64, zero bool) error {
		v := a.val[name]
		list := v.list
		if v.kind != 't' || len(list) != 1 && len(list) != 3 {
			return a.bad(v, "%s must be a tuple of 3 numbers, or of 1 for all channels", name)
		}
		for c := range 3 {
			x := list[c%len(list)]
			f := math.Abs(float64(rounded(float32(x.num), t.norm)))
			if !x.number() || math.IsInf(f, 0) || !zero && f == 0 {
				return a.bad(x, "%s must contain finite numbers of %s, and std no 0", name, t.norm)
			}
			to[c] = x.num
		}
		return nil
	}
	var err error
	if t.norm, err = a.oneOf("dtype", "fp32", "fp16", "bf16"); err != nil {
		return err
	}
	if err := read("mean", &t.mean, true); err != nil {
		return err
	}
	return read("std", &t.std, false)
}
