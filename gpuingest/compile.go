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

// args are an operation's arguments by name, including defaults. Who reads one puts its canonical form in its place.
// The first error is kept.
type args struct {
	p    *parser
	of   call
	list []param
	val  map[string]value
	err  error
}

// String is the canonical form of the call, once all arguments have been read.
func (a *args) String() string {
	var parts []string
	for _, q := range a.list {
		if q.name != "inplace" { // makes no difference
			parts = append(parts, q.name+"="+a.val[q.name].String())
		}
	}
	return a.of.name + "(" + strings.Join(parts, ", ") + ")"
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
	build  func(a *args) operation
}

// operations lists them with their parameters in torchvision's order.
var operations = map[string]operationKind{
	"RandomResizedCrop": {
		[]param{{"size", ""}, {"scale", "(0.08, 1.0)"}, {"ratio", "(0.75, 1.3333333333333333)"},
			{"interpolation", "'bilinear'"}, {"antialias", "True"}},
		func(a *args) operation {
			o := &randomResizedCrop{fixedSize: a.hw("size")}
			o.scale, o.ratio, o.filter = a.interval("scale", 1), a.interval("ratio", 1e4), a.filter()
			return o
		},
	},
	"Resize": {
		[]param{{"size", ""}, {"interpolation", "'bilinear'"}, {"max_size", "None"}, {"antialias", "True"}},
		buildResize,
	},
	"CenterCrop":           {[]param{{"size", ""}}, func(a *args) operation { return &centerCrop{a.hw("size")} }},
	"RandomHorizontalFlip": {[]param{{"p", "0.5"}}, buildFlip(stepMirror)},
	"RandomVerticalFlip":   {[]param{{"p", "0.5"}}, buildFlip(stepTurn)},
	"RandomCrop": {
		[]param{{"size", ""}, {"padding", "None"}, {"pad_if_needed", "False"}, {"fill", "0"},
			{"padding_mode", "'constant'"}},
		buildRandomCrop,
	},
	"Pad": {[]param{{"padding", ""}, {"fill", "0"}, {"padding_mode", "'constant'"}}, buildPad},
	"RandomRotation": {[]param{{"degrees", ""}, {"interpolation", "'nearest'"}, {"expand", "False"}, {"center", "None"},
		{"fill", "0"}}, buildRotation},
	"ColorJitter":  {[]param{{"brightness", "0"}, {"contrast", "0"}, {"saturation", "0"}, {"hue", "0"}}, buildJitter},
	"Grayscale":    {[]param{{"num_output_channels", "1"}}, buildGrayscale},
	"GaussianBlur": {[]param{{"kernel_size", ""}, {"sigma", "(0.1, 2.0)"}}, buildBlur},
	"RandAugment": {
		[]param{{"num_ops", "2"}, {"magnitude", "9"}, {"num_magnitude_bins", "31"}, {"interpolation", "'nearest'"},
			{"fill", "None"}},
		buildRandAugment,
	},
	"TrivialAugmentWide": {[]param{{"num_magnitude_bins", "31"}, {"interpolation", "'nearest'"}, {"fill", "None"}},
		buildTrivialAugment},
	"AutoAugment": {[]param{{"policy", "'imagenet'"}, {"interpolation", "'nearest'"}, {"fill", "None"}},
		buildAutoAugment},

	"RandomGrayscale":       {[]param{{"p", "0.1"}}, buildRecolouring(grey, 0, 0)},
	"RandomInvert":          {[]param{{"p", "0.5"}}, buildRecolouring(invert, 0, 0)},
	"RandomAutocontrast":    {[]param{{"p", "0.5"}}, buildRecolouring(autoContrast, 0, 0)},
	"RandomEqualize":        {[]param{{"p", "0.5"}}, buildRecolouring(equalize, 0, 0)},
	"RandomPosterize":       {[]param{{"bits", ""}, {"p", "0.5"}}, buildRecolouring(posterize, 0, 8)},
	"RandomSolarize":        {[]param{{"threshold", ""}, {"p", "0.5"}}, buildRecolouring(solarize, 0, 256)},
	"RandomAdjustSharpness": {[]param{{"sharpness_factor", ""}, {"p", "0.5"}}, buildRecolouring(sharpness, 0, 1e4)},
}

var normalizeParams = []param{{"mean", ""}, {"std", ""}, {"inplace", "False"}, {"dtype", "'fp32'"}}

// dtypes maps each type's word to its size in bytes.
var dtypes = map[string]int{"uint8": 1, "fp16": 2, "bf16": 2, "fp32": 4}

var layouts = []string{"nchw", "nhwc"}

const rawAlone = "raw gives the file as it is and stands alone"

const (
	rawWord    = "raw"
	pillowWord = "pillow"
	dctWord    = "dct"
	v2Word     = "v2"
	eraseWord  = "RandomErasing"
)

// pillowRules are the versions whose resize can be reproduced: 13 resizes vertically first if the height shrinks by
// more than twice as many pixels as the width. The first is the default.
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
	return slices.Concat(slices.Collect(maps.Keys(operations)), slices.Collect(maps.Keys(dtypes)), layouts, mixWords,
		slices.Collect(maps.Keys(families)), slices.Collect(maps.Keys(jointWords)),
		slices.Collect(maps.Keys(compounds)),
		[]string{"Normalize", rawWord, viewsWord, pillowWord, dctWord, v2Word, eraseWord})
}

// Compile parses a transform SPEC.
//
//	SPEC      = "raw" | operation { "|" operation } { "|" word }
//	          | "views(" N "x[" operation { "|" operation } "]" { "," N "x[" ... "]" } ")" { "|" word }     (by New only)
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
	p := newParser(spec, calls)
	if calls[0].name == rawWord {
		if len(calls) > 1 {
			return nil, p.fail(calls[1].pos, len(calls[1].name), "", rawAlone)
		}
		if calls[0].parens {
			return nil, p.fail(calls[0].pos, len(rawWord), "", "raw takes no arguments")
		}
		return &Transform{raw: true, dtype: rawWord, layout: rawWord}, nil
	}
	return compileCalls(p, calls, nil)
}

func newParser(spec string, calls []call) *parser {
	return &parser{s: spec, v2: slices.ContainsFunc(calls, func(c call) bool { return c.name == v2Word })}
}

// compileCalls compiles operations and words; the words behind views(...) are apart.
func compileCalls(p *parser, calls, words []call) (_ *Transform, err error) {
	c := &compiler{p: p, t: &Transform{dtype: "uint8", layout: "nchw"}, seen: map[string]string{}}
	if !jpeg.Available {
		return nil, c.p.fail(calls[0].pos, len(calls[0].name), "", "%v", jpeg.ErrUnavailable)
	}
	for _, call := range slices.Concat(calls, words) {
		if o, ok := operationOf(call); ok {
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
		c.t.erase = buildErase(c.erase, c.t.dtype)
		return c.t, c.erase.err
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
		return c.p.fail(of.pos, len(of.name), "",
			"%s after a word: operations come before type, layout, Normalize, RandomErasing and MixUp", of.name)
	}
	if len(c.t.ops) == maxOps {
		return c.p.fail(of.pos, len(of.name), "", "more than %d operations", maxOps)
	}
	a, err := bind(c.p, of, o.params)
	if err != nil {
		return err
	}
	c.t.ops = append(c.t.ops, compiled{o.build(a), a.String()})
	if a.err != nil {
		return a.err
	}
	// The text also holds what compounds hold.
	if _, after, _ := strings.Cut(c.t.operationsText(), "GaussianBlur("); strings.Contains(after,
		"RandomAdjustSharpness(") {
		return c.p.fail(of.pos, len(of.name), "put it before GaussianBlur, or sharpen in the trainer",
			"RandomAdjustSharpness after GaussianBlur, which differs from torchvision's in some values by one: that "+
				"would grow")
	}
	return nil
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
			t.setNorm(c.norm)
			return c.norm.err
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
	case of.name == viewsWord:
		return c.p.fail(of.pos, len(of.name), "write views(2x[...], 8x[...]) in place of the operations, alone",
			"views holds all operations, and has no boxes and masks")
	case of.name == rawWord:
		return c.p.fail(of.pos, len(of.name), "", rawAlone)
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

// verticalFirst reports whether the rules of a version of Pillow resize vertically first.
func verticalFirst(p *parser, c call) (bool, error) {
	a, err := bind(p, c, []param{{"version", ""}})
	if err != nil {
		return false, err
	}
	v := a.val["version"]
	i := slices.Index(pillowRules, pillowWord+"("+strings.TrimSuffix(v.String(), ".0")+")")
	if i < 0 || !v.number() {
		a.bad(v,
			"the supported rules are those of Pillow 9.4 and 13: write pillow(9.4), pillow(13), or omit it for 9.4")
	}
	return i == 1, a.err
}

// fits computes the size of a sample, and checks that samples of that size form a batch.
func (t *Transform) fits(p *parser, calls []call, norm *args) error {
	if norm != nil && t.dtype == "uint8" {
		return p.fail(norm.of.pos, len(norm.of.name), "add fp32, fp16 or bf16",
			"Normalize produces fractions, but the type is uint8")
	}
	for _, op := range t.ops {
		t.size = op.out(t.size)
	}
	if c := calls[len(calls)-1]; t.size == (image.Point{}) {
		return p.fail(c.pos, len(c.name), "add CenterCrop(224), or use Resize((224, 224)) or RandomResizedCrop(224)",
			"samples would differ in size and could not form a batch")
	}
	if n := int64(t.size.X) * int64(t.size.Y) * 3 * int64(dtypes[t.dtype]); t.size.X > maxSide || t.size.Y > maxSide ||
		n > maxOut {
		return p.fail(calls[0].pos, len(calls[0].name), "",
			"a sample of %dx%d %s takes %d bytes: the limits are %d a side and %d bytes", t.size.X, t.size.Y, t.dtype,
			n, maxSide, maxOut)
	}
	t.makeTable()
	return nil
}

// single binds the only call of a SPEC.
func (p *parser) single(calls []call, params []param) (*args, error) {
	if len(calls) > 1 {
		return nil, p.fail(calls[1].pos, len(calls[1].name), "", "%s cannot be combined with other operations",
			calls[0].name)
	}
	return bind(p, calls[0], params)
}

// bind assigns arguments to parameters and adds defaults.
func bind(p *parser, c call, params []param) (*args, error) {
	a := &args{p: p, of: c, list: params, val: map[string]value{}}
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
			hint := nearest(name, slices.Clone(names))
			if name == "p" {
				hint = fmt.Sprintf("write RandomApply([%s(...)], p=...)", c.name)
			}
			return nil, p.fail(g.pos, len(name), hint, "%s has no argument %s", c.name, name)
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
			return nil, p.fail(c.pos, len(c.name), fmt.Sprintf("write %s(%s)", c.name, example(params)), "%s needs %s",
				c.name, q.name)
		}
		v, _ := (&parser{s: q.def}).value(0) // without error: defaults are literals of this package
		v.pos, v.len = c.pos, len(c.name)
		a.val[q.name] = v
	}
	return a, nil
}

func example(params []param) string {
	var need []string
	for _, q := range params {
		if q.def == "" {
			need = append(need, map[string]string{"size": "224", "mean": "(0.485, 0.456, 0.406)",
				"std": "(0.229, 0.224, 0.225)", "version": "9.4",
				"shape": "(64, 64)", "key": "'arr_0'", "name": "'tensor'", "dtype": "'float32'", "length": "1024",
				"stored": "'npy:uint16'", "column": "'age'", "seconds": "2.0", "rate": "16000",
				"padding": "4", "degrees": "15", "kernel_size": "23", "bits": "2", "threshold": "192",
				"sharpness_factor": "2", "transforms": "[RandomGrayscale(0.2), ...]"}[q.name])
		}
	}
	return strings.Join(need, ", ")
}

// bad says what is wrong with an argument.
func (a *args) bad(v value, format string, x ...any) {
	if a.err == nil {
		a.err = a.p.fail(v.pos, v.len, "", "%s: %s, not %s", a.of.name, fmt.Sprintf(format, x...), v)
	}
}

// whole checks a whole number; what it is goes into the error.
func (a *args) whole(v value, name, what string, lo, hi int) int {
	if v.kind != 'i' || v.num < float64(lo) || v.num > float64(hi) {
		a.bad(v, "%s must be a %s from %d to %d", name, what, lo, hi)
	}
	return int(v.num)
}

func (a *args) side(v value, name string) int {
	return a.whole(v, name, "number of pixels", 1, maxSide)
}

// real parses a number from lo to hi, which must be what the error says.
func (a *args) real(name string, lo, hi float64, must string) float64 {
	v := a.val[name]
	if !v.number() || v.num < lo || v.num > hi {
		a.bad(v, "%s must be %s", name, must)
	}
	a.val[name] = float(v.num)
	return v.num
}

// hw parses one side for both, (side,) or (height, width).
func (a *args) hw(name string) (s fixedSize) {
	v := a.val[name]
	list := v.list
	if v.kind != 't' {
		list = []value{v}
	} else if len(list) != 1 && len(list) != 2 {
		a.bad(v, "%s must be one number or (height, width)", name)
		return s
	}
	s = fixedSize{a.side(list[0], name), a.side(list[len(list)-1], name)}
	a.val[name] = tuple(number, s.h, s.w)
	return s
}

// interval parses (min, max) with 0 < min <= max <= top.
func (a *args) interval(name string, top float64) [2]float64 {
	v := a.val[name]
	r, ok := v.pair()
	if !ok || r[0] < 1/1e6 || r[0] > r[1] || r[1] > top {
		a.bad(v, "%s must be (min, max) with 0 < min <= max <= %g", name, top)
	}
	a.val[name] = tuple(float, r[:]...)
	return r
}

// probability parses a number from 0 to 1.
func (a *args) probability(name string) float64 {
	return a.real(name, 0, 1, "a probability from 0 to 1")
}

// truth parses True or False.
func (a *args) truth(name string) bool {
	v := a.val[name]
	if v.kind != 'b' {
		a.bad(v, "%s must be True or False", name)
	}
	return v.num != 0
}

// integer parses a whole number.
func (a *args) integer(name string, lo, hi int) int {
	return a.whole(a.val[name], name, "whole number", lo, hi)
}

// fill parses a colour: None, one number or (red, green, blue), 0 to 255, truncated to integers.
func (a *args) fill() (c [3]uint8) {
	v := a.val["fill"]
	if list := v.spread(3, 1, 3); list == nil && v.kind != 'n' {
		a.bad(v, "fill must be None, one number or (red, green, blue)")
	} else {
		for i, x := range list {
			if !x.number() || x.num < 0 || x.num > 255 {
				a.bad(x, "fill must contain numbers from 0 to 255")
			}
			c[i] = uint8(x.num)
		}
	}
	a.val["fill"] = tuple(number, c[:]...)
	return c
}

// interpolation parses one of torchvision's modes.
func (a *args) interpolation() jpeg.Filter {
	v := a.val["interpolation"]
	name := strings.ToLower(strings.TrimPrefix(v.str, "InterpolationMode."))
	for f := jpeg.Bilinear; f <= jpeg.Nearest; f++ {
		if v.kind == 's' && name == f.String() {
			a.val["interpolation"] = value{kind: 's', str: name}
			return f
		}
	}
	a.bad(v, "interpolation must be 'bilinear', 'bicubic' or 'nearest'")
	return 0
}

// filter parses interpolation, and rejects antialias=False: Pillow always antialiases.
func (a *args) filter() jpeg.Filter {
	if v := a.val["antialias"]; v.kind != 'n' && (v.kind != 'b' || v.num == 0) {
		a.bad(v, "Pillow always resizes with antialias=True")
	}
	a.val["antialias"] = value{kind: 'b', num: 1}
	return a.interpolation()
}

// oneOf parses one of several words.
func (a *args) oneOf(name string, of ...string) string {
	v := a.val[name]
	if v.kind != 's' || !slices.Contains(of, v.str) {
		a.bad(v, "%s must be one of '%s'", name, strings.Join(of, "', '"))
	}
	return v.str
}

// crop parses which part of a longer sample is used; "" for None: longer ones are bad.
func (a *args) crop(of ...string) string {
	v := a.val["crop"]
	if v.kind != 'n' && (v.kind != 's' || !slices.Contains(of, v.str)) {
		a.bad(v, "crop must be '%s' or None", strings.Join(of, "', '"))
	}
	return v.str
}

// text parses a name.
func (a *args) text(name string) string {
	v := a.val[name]
	if v.kind != 's' || v.str == "" {
		a.bad(v, "%s must be a name in quotes", name)
	}
	return v.str
}

// setNorm parses mean and std: three numbers, or one for all channels.
func (t *Transform) setNorm(a *args) {
	if t.norm = a.oneOf("dtype", "fp32", "fp16", "bf16"); t.norm == "fp32" {
		a.list = a.list[:2] // the canonical form without dtype is the older one
	}
	read := func(name string, to *[3]float64, zero bool) {
		v := a.val[name]
		list := v.spread(3, 1, 3)
		if v.kind != 't' || list == nil {
			a.bad(v, "%s must be a tuple of 3 numbers, or of 1 for all channels", name)
		}
		for c, x := range list {
			f := math.Abs(float64(rounded(float32(x.num), t.norm)))
			if !x.number() || math.IsInf(f, 0) || !zero && f == 0 {
				a.bad(x, "%s must contain finite numbers of %s, and std no 0", name, t.norm)
			}
			to[c] = x.num
		}
		a.val[name] = tuple(float, to[:]...)
	}
	read("mean", &t.mean, true)
	read("std", &t.std, false)
	t.normText = a.String()
}
