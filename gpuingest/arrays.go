package gpuingest

import (
	"cmp"
	"fmt"
	"slices"
)

// arrayIngest is the Ingest of samples that are one array each: npy, npz, safetensors, or bare numbers. Without crop
// and pad, an array of another shape is a bad sample. Shapes and values are numpy's, bit for bit.
type arrayIngest struct {
	source string // npy, npz, safetensors or raw_array
	canonical
	key     string // the member of an npz, the tensor's name
	shape   []int  // of the row: the stored array after crop and padding
	dtype   string // of the row: numpy's name, or bfloat16
	crop    string // "", center or random
	pad     *value // nil: smaller arrays are bad
	axes    []int  // of the row, as in numpy's transpose; nil: as stored
	rawType string // raw_array's
	stored  []int  // raw_array's, with one -1 at most
	out     []int
}

// shortTypes maps numpy's type names to the names that all transforms share.
var shortTypes = map[string]string{"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}

// elementSize is the length of an element in bytes.
var elementSize = map[string]int{
	"bool": 1, "int8": 1, "uint8": 1, "int16": 2, "uint16": 2, "int32": 4, "uint32": 4, "int64": 8, "uint64": 8,
	"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8,
}

// typeNamed parses a type's name, ours or numpy's.
func typeNamed(s string) (string, bool) {
	for long, short := range shortTypes {
		if s == short {
			return long, true
		}
	}
	_, ok := elementSize[s]
	return s, ok
}

// shortType is the name of numpy's type in specs and fields.
func shortType(dtype string) string { return cmp.Or(shortTypes[dtype], dtype) }

const maxDims = 8

var arraySources = map[string][]param{
	"npy":         {{"shape", ""}, {"crop", "None"}, {"pad", "None"}},
	"npz":         {{"key", ""}, {"shape", ""}, {"crop", "None"}, {"pad", "None"}},
	"safetensors": {{"name", ""}, {"shape", ""}, {"crop", "None"}, {"pad", "None"}},
	"raw_array":   {{"shape", ""}, {"dtype", ""}, {"stored", "None"}, {"crop", "None"}, {"pad", "None"}},
}

// compileArray parses
//
//	SPEC   = source { "|" step }
//	source = npy(shape) | npz(key, shape) | safetensors(name, shape) | raw_array(shape, dtype, stored)
//	step   = a type | transpose(axes)
//
// Every source also accepts crop='center' or 'random' and pad=VALUE. The type is numpy's name or fp16, bf16, fp32.
func compileArray(p *parser, calls []call) (Ingest, error) {
	c := calls[0]
	a, err := bind(p, c, arraySources[c.name])
	if err != nil {
		return nil, err
	}
	t := &arrayIngest{source: c.name, shape: a.dims("shape", false)}
	for _, name := range []string{"key", "name"} {
		if _, ok := a.val[name]; ok {
			t.key = a.text(name)
		}
	}
	if t.fit(a); a.err != nil {
		return nil, a.err
	}
	for _, c := range calls[1:] {
		if err := t.step(p, c); err != nil {
			return nil, err
		}
	}
	if t.dtype == "" {
		if t.dtype = t.rawType; t.dtype == "" {
			return nil, p.fail(c.pos, len(c.name), "add one, such as |fp32",
				"%s: the type of the rows is missing", c.name)
		}
	}
	t.out, t.canonical = slices.Clone(t.shape), canonical(a.String())
	if t.axes != nil {
		t.canonical += canonical("|transpose" + tuple(number, t.axes...).String())
	}
	t.canonical += canonical("|" + shortType(t.dtype))
	for i, axis := range t.axes {
		t.out[i] = t.shape[axis]
	}
	if limits, ok := integers[t.dtype]; ok && t.pad != nil && (t.pad.num < limits[0] || t.pad.num >= limits[1]) {
		return nil, p.fail(t.pad.pos, t.pad.len, "", "pad=%s does not fit %s", t.pad, t.dtype)
	}
	if n, ok := byteSize(t.shape, t.dtype); !ok || n > maxOut {
		return nil, p.fail(c.pos, len(c.name), "", "a row of shape %v %s takes more than %d bytes", t.shape,
			t.dtype, maxOut)
	}
	return t, nil
}

// fit parses how arrays of other shapes become rows.
func (t *arrayIngest) fit(a *args) {
	t.crop = a.crop("center", "random")
	switch v := a.val["pad"]; {
	case v.kind == 'n':
	case v.number() || v.kind == 'b':
		t.pad = &v
	default:
		a.bad(v, "pad must be None or the padding value")
	}
	v, ok := a.val["dtype"]
	if !ok {
		return
	}
	if t.rawType, ok = typeNamed(v.str); v.kind != 's' || !ok {
		a.bad(v, "dtype must be a type such as 'float32'")
	}
	a.val["dtype"] = value{kind: 's', str: t.rawType}
	if v = a.val["stored"]; v.kind == 'n' {
		t.stored, a.val["stored"] = t.shape, a.val["shape"]
	} else if t.stored = a.dims("stored", true); len(t.stored) != len(t.shape) {
		a.bad(v, "stored has %d dimensions, shape %d", len(t.stored), len(t.shape))
	}
}

// step parses one word after the source.
func (t *arrayIngest) step(p *parser, c call) error {
	if c.name == "transpose" {
		if t.axes != nil {
			return p.fail(c.pos, len(c.name), "", "a second transpose: one is enough")
		}
		for _, g := range c.args {
			list := []value{g.val}
			if g.val.kind == 't' {
				list = g.val.list
			}
			for _, v := range list {
				if g.name != "" || v.kind != 'i' || v.num < 0 || int(v.num) >= len(t.shape) ||
					slices.Contains(t.axes, int(v.num)) {
					return p.fail(g.val.pos, g.val.len, "", "transpose takes each axis from 0 to %d once",
						len(t.shape)-1)
				}
				t.axes = append(t.axes, int(v.num))
			}
		}
		if len(t.axes) != len(t.shape) {
			return p.fail(c.pos, len(c.name), "", "transpose of %d axes, the shape has %d", len(t.axes), len(t.shape))
		}
		return nil
	}
	dtype, ok := typeNamed(c.name)
	if !ok {
		names := []string{"transpose"}
		for n := range elementSize {
			names = append(names, n, shortType(n))
		}
		return p.fail(c.pos, len(c.name), nearest(c.name, slices.Compact(slices.Sorted(slices.Values(names)))),
			"%s does not follow %s", c.name, t.source)
	}
	if c.parens || t.dtype != "" {
		return p.fail(c.pos, len(c.name), "", "%s: one type is enough, without arguments", c.name)
	}
	t.dtype = dtype
	return nil
}

// dims parses a shape. open allows one -1.
func (a *args) dims(name string, open bool) (shape []int) {
	v := a.val[name]
	list := v.list
	if v.kind == 'i' {
		list = []value{v}
	}
	if len(list) == 0 || len(list) > maxDims {
		a.bad(v, "%s must be a tuple of 1 to %d sizes", name, maxDims)
	}
	for _, x := range list {
		if x.kind != 'i' || x.num > maxOut || x.num < 1 && !(open && x.num == -1 && !slices.Contains(shape, -1)) {
			a.bad(x, "%s must contain whole numbers from 1", name)
		}
		shape = append(shape, int(x.num))
	}
	a.val[name] = tuple(number, shape...)
	return shape
}

// byteSize returns the length of an array, false if it has more than 2^40 bytes.
func byteSize(shape []int, dtype string) (int64, bool) {
	n := int64(elementSize[dtype])
	for _, d := range shape {
		if d < 0 || d > 0 && n > 1<<40/int64(d) {
			return 0, false
		}
		n *= int64(d)
	}
	return n, true
}

func (t *arrayIngest) Fields() []Field {
	n, _ := byteSize(t.out, t.dtype)
	return []Field{{Name: "data", DType: shortType(t.dtype), Shape: t.out, Bytes: int(n)}}
}

// array is a stored array: elements of dtype, back to back in C order, or in Fortran's.
type array struct {
	dtype   string
	big     bool // byte order
	fortran bool
	shape   []int
	data    []byte
}

func badArray(format string, a ...any) error {
	return fmt.Errorf("%w: %w", ErrBadSample, fmt.Errorf(format, a...))
}

func (t *arrayIngest) read(b []byte) (array, error) {
	switch t.source {
	case "npy":
		return parseNpy(b)
	case "npz":
		return parseNpz(b, t.key)
	case "safetensors":
		return parseSafetensors(b, t.key)
	}
	return parseRaw(b, t.stored, t.rawType)
}

// parseRaw gives bare numbers the shape stored, whose -1 is computed from the length.
func parseRaw(b []byte, stored []int, dtype string) (array, error) {
	shape := slices.Clone(stored)
	if i := slices.Index(shape, -1); i >= 0 {
		shape[i] = 1
		if n, ok := byteSize(shape, dtype); ok && n > 0 {
			shape[i] = int(int64(len(b)) / n)
		}
	}
	if n, ok := byteSize(shape, dtype); !ok || n != int64(len(b)) {
		return array{}, badArray("%d bytes are not an array of %s of shape %v", len(b), dtype, stored)
	}
	return array{dtype: dtype, shape: shape, data: b}, nil
}

func (t *arrayIngest) Make(src Sample, at Draw, row *Row) error {
	a, err := t.read(src.Data)
	if err != nil {
		return err
	}
	if len(a.shape) != len(t.shape) {
		return badArray("an array of shape %v instead of %v", a.shape, t.shape)
	}
	from := make([]int, len(t.shape)) // where the crop begins in the stored array
	size := make([]int, len(t.shape))
	rand := at.Rand(0)
	for i, want := range t.shape {
		have := a.shape[i]
		size[i] = min(have, want)
		switch {
		case have > want && t.crop == "center":
			from[i] = (have - want) / 2
		case have > want && t.crop == "random":
			from[i] = rand.IntN(have - want + 1)
		case have > want:
			return badArray("an array of shape %v instead of %v (crop= cuts out a part)", a.shape, t.shape)
		case have < want && t.pad == nil:
			return badArray("an array of shape %v instead of %v (pad= extends it)", a.shape, t.shape)
		}
	}
	dst := row.Fields[0]
	if !slices.Equal(size, t.shape) {
		fill(dst, t.dtype, *t.pad)
	}
	return t.place(&a, from, size, dst)
}

// fill fills dst with a value, which fits the type.
func fill(dst []byte, dtype string, v value) {
	c := converter{to: dtype}
	c.b.kind, c.b.f[0], c.b.i[0] = 'i', v.num, int64(v.num)
	if v.kind == 'f' {
		c.b.kind = 'f'
	}
	if len(dst) > 0 {
		_ = c.store(dst, &c.b, 1)
	}
	for i := elementSize[dtype]; i < len(dst); i *= 2 {
		copy(dst[i:], dst[:i])
	}
}

// place copies the crop, element by element if types or order differ.
func (t *arrayIngest) place(a *array, from, size []int, dst []byte) error {
	n := len(size)
	src, to := elementSize[a.dtype], elementSize[t.dtype]
	srcStep, dstStep := make([]int, n), make([]int, n) // in bytes, by axis of the row
	stored := make([]int, n)
	for i, step := 0, src; i < n; i++ {
		axis := n - 1 - i
		if a.fortran {
			axis = i
		}
		stored[axis] = step
		step *= a.shape[axis]
	}
	rowSize := make([]int, n)
	srcAt, dstAt := 0, 0
	for i, step := n-1, to; i >= 0; i-- {
		axis := i
		if t.axes != nil {
			axis = t.axes[i]
		}
		rowSize[i], srcStep[i], dstStep[i] = size[axis], stored[axis], step
		srcAt += from[axis] * stored[axis]
		step *= t.out[i]
	}
	if slices.Contains(rowSize, 0) {
		return nil
	}
	// Merge axes that are contiguous on both sides.
	for n > 1 && srcStep[n-2] == srcStep[n-1]*rowSize[n-1] && dstStep[n-2] == dstStep[n-1]*rowSize[n-1] {
		rowSize[n-2] *= rowSize[n-1]
		srcStep[n-2], dstStep[n-2] = srcStep[n-1], dstStep[n-1]
		n--
	}
	c := converter{from: a.dtype, big: a.big, to: t.dtype}
	index := make([]int, n-1)
	for {
		if err := c.run(dst[dstAt:], a.data[srcAt:], srcStep[n-1], rowSize[n-1]); err != nil {
			return err
		}
		axis := n - 2
		for ; axis >= 0; axis-- {
			srcAt += srcStep[axis]
			dstAt += dstStep[axis]
			if index[axis]++; index[axis] < rowSize[axis] {
				break
			}
			srcAt -= srcStep[axis] * rowSize[axis]
			dstAt -= dstStep[axis] * rowSize[axis]
			index[axis] = 0
		}
		if axis < 0 {
			return nil
		}
	}
}

// npyPicture makes a picture of an npy array: a view of its pixels if they are RGB, a copy otherwise.
func (p *picture) npyPicture() error {
	a, err := parseNpy(p.src)
	if err != nil {
		return err
	}
	channels := 1
	if len(a.shape) == 3 {
		channels = a.shape[2]
	}
	if a.dtype != "uint8" || a.fortran || len(a.shape) < 2 || len(a.shape) > 3 ||
		channels != 1 && channels != 3 && channels != 4 {
		return badArray("npy array of %v %s: a picture is uint8 of height x width x 3 (also x 4, x 1, or none) in C "+
			"order: read other arrays with npy(shape)", a.shape, a.dtype)
	}
	h, w := a.shape[0], a.shape[1]
	if h < 1 || w < 1 || h > 1<<24 || w > 1<<24 {
		return badArray("npy picture of %dx%d pixels", w, h)
	}
	if err := tooLarge("npy", w, h); err != nil {
		return err
	}
	p.size0.X, p.size0.Y, p.src = w, h, a.data
	if channels == 3 {
		return nil
	}
	p.buf = getBuffer(w * h * 3)
	for i := range w * h {
		px := a.data[i*channels:]
		if channels == 1 {
			(*p.buf)[3*i], (*p.buf)[3*i+1], (*p.buf)[3*i+2] = px[0], px[0], px[0]
		} else {
			copy((*p.buf)[3*i:3*i+3], px)
		}
	}
	p.src = *p.buf
	return nil
}
