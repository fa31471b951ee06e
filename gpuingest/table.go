package gpuingest

import (
	"bytes"
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
)

// Table is the Ingest of samples that are rows of a table, as in CSV: named columns become numbers. Statistics of the
// whole table, such as means and categories, come from a [Fit].
type Table struct {
	canonical
	ops   []tableOp
	dtype string // of the numbers
	fit   *Fit
}

// tableOp is the operation on one column.
type tableOp struct {
	Op      string  `json:"op"` // number, minmax, zscore, outliers, onehot, ordinal or label
	Column  string  `json:"column"`
	Clip    float64 `json:"clip,omitempty"`   // zscore: the largest distance from the mean, in standard deviations
	LowP    float64 `json:"low_p,omitempty"`  // outliers: the quantiles that values are clipped to
	HighP   float64 `json:"high_p,omitempty"` //
	Missing string  `json:"missing"`          // error, mean, category, or a number
}

var tableOps = map[string][]param{
	"number":   {{"column", ""}, {"missing", "'error'"}},
	"minmax":   {{"column", ""}, {"missing", "'error'"}},
	"zscore":   {{"column", ""}, {"clip", "None"}, {"missing", "'error'"}},
	"outliers": {{"column", ""}, {"low", "0.01"}, {"high", "0.99"}, {"missing", "'error'"}},
	"onehot":   {{"column", ""}, {"missing", "'error'"}},
	"ordinal":  {{"column", ""}, {"missing", "'error'"}},
	"label":    {{"column", ""}},
}

func (o *tableOp) numeric() bool { return o.Op != "onehot" && o.Op != "ordinal" && o.Op != "label" }

// compileTable parses
//
//	SPEC = table { "|" op } [ "|" fp32 | fp64 ]
//	op   = number(column) | minmax(column) | zscore(column, clip) | outliers(column, low, high)
//	     | onehot(column) | ordinal(column) | label(column)
//
// missing= defines the result of an empty value: 'error' (the row is a bad sample); for numbers 'mean' or a number; for
// onehot and ordinal 'category': a separate category.
func compileTable(p *parser, calls []call) (Ingest, error) {
	if len(calls[0].args) > 0 {
		return nil, p.fail(calls[0].pos, len(calls[0].name),
			"add an operation for each column, such as table()|zscore('age')", "table takes no arguments")
	}
	t := &Table{canonical: "table()"}
	numbers := false
	for _, c := range calls[1:] {
		if c.name == "fp32" || c.name == "float32" || c.name == "fp64" || c.name == "float64" {
			if t.dtype != "" || c.parens {
				return nil, p.fail(c.pos, len(c.name), "", "%s: one type is enough, without arguments", c.name)
			}
			t.dtype = "float" + c.name[len(c.name)-2:]
			continue
		}
		params, ok := tableOps[c.name]
		if !ok {
			names := slices.AppendSeq([]string{"fp32", "fp64"}, maps.Keys(tableOps))
			return nil, p.fail(c.pos, len(c.name), nearest(c.name, names), "unknown operation %s on a column", c.name)
		}
		a, err := bind(p, c, params)
		if err != nil {
			return nil, err
		}
		o, err := tableOpOf(a)
		if err != nil {
			return nil, err
		}
		if o.Op == "label" && slices.ContainsFunc(t.ops, func(o tableOp) bool { return o.Op == "label" }) {
			return nil, p.fail(c.pos, len(c.name), "", "a second label: one is enough")
		}
		numbers = numbers || o.numeric() || o.Op == "onehot"
		if t.ops = append(t.ops, o); len(t.ops) > 1024 {
			return nil, p.fail(c.pos, len(c.name), "", "more than 1024 columns")
		}
		t.canonical += canonical("|" + a.String())
	}
	if !numbers {
		return nil, p.fail(calls[0].pos, len(calls[0].name), "add one, such as |zscore('age')",
			"there is no operation on a column")
	}
	t.dtype = cmp.Or(t.dtype, "float32")
	t.canonical += "|" + map[string]canonical{"float32": "fp32", "float64": "fp64"}[t.dtype]
	return t, nil
}

func tableOpOf(a *args) (tableOp, error) {
	o := tableOp{Op: a.of.name, Column: a.text("column"), Missing: "error"}
	if v, ok := a.val["clip"]; ok && v.kind != 'n' {
		if o.Clip = v.num; !v.number() || v.num <= 0 {
			a.bad(v, "clip must be a number of standard deviations above 0")
		}
		a.val["clip"] = float(v.num)
	}
	if v, ok := a.val["low"]; ok {
		w := a.val["high"]
		if o.LowP, o.HighP = v.num, w.num; !v.number() || !w.number() || v.num < 0 || v.num >= w.num || w.num > 1 {
			a.bad(v, "low and high are quantiles, 0 <= low < high <= 1")
		}
		a.val["low"], a.val["high"] = float(v.num), float(w.num)
	}
	switch v, ok := a.val["missing"]; {
	case !ok:
	case v.kind == 's' && (v.str == "error" || v.str == "mean" && o.numeric() || v.str == "category" && !o.numeric()):
		o.Missing = v.str
	case v.number() && o.numeric():
		o.Missing = v.String()
	case o.numeric():
		a.bad(v, "missing must be 'error', 'mean' or a number")
	default:
		a.bad(v, "missing must be 'error' or 'category'")
	}
	return o, a.err
}

// Hash implements Ingest: with a fit, it identifies the fit too.
func (t *Table) Hash() string {
	if t.fit == nil {
		return hashOf(t.String())
	}
	return hashOf(t.String() + " fitted by " + string(t.fit.JSON()))
}

// Fields implements Ingest: the numbers and, with ordinal columns, their categories. Without a fit the number of
// one-hot categories is unknown, and assumed to be 1.
func (t *Table) Fields() []Field {
	width, ordinals := len(t.ops), 0
	for _, o := range t.ops {
		if o.Op == "ordinal" {
			ordinals++
		}
		if o.Op == "ordinal" || o.Op == "label" {
			width--
		}
	}
	if t.fit != nil {
		width = t.fit.Width
	}
	f := []Field{{Name: "data", DType: map[string]string{"float32": "fp32", "float64": "float64"}[t.dtype],
		Shape: []int{width}, Bytes: width * elementSize[t.dtype]}}
	if ordinals > 0 {
		f = append(f, Field{Name: "categories", DType: "int64", Shape: []int{ordinals}, Bytes: 8 * ordinals})
	}
	return f
}

// With returns the table with its fit, which must have the same columns and operations.
func (t *Table) With(f *Fit) (*Table, error) {
	if f.Version != fitVersion || f.Spec != t.String() || len(f.Features) != len(t.ops) {
		return nil, fmt.Errorf("the fit is of %s, version %d", f.Spec, f.Version)
	}
	u := *t
	u.fit = f
	return &u, nil
}

// Make implements Ingest.
func (t *Table) Make(src Sample, _ Draw, row *Row) error {
	if t.fit == nil {
		return fmt.Errorf("gpuingest: %s has no fit", t)
	}
	fields, err := splitRow(src.Data, t.fit.Comma[0], nil)
	if err != nil {
		return err
	}
	if len(fields) != len(t.fit.Columns) {
		return badArray("a row of %d fields, the table has %d columns", len(fields), len(t.fit.Columns))
	}
	clear(row.Fields[0])
	for i := range t.fit.Features {
		f := &t.fit.Features[i]
		value := fields[f.field]
		switch f.Op {
		case "label":
			if row.Label, err = f.label(value); err != nil {
				return err
			}
		case "onehot", "ordinal":
			k, err := f.category(value)
			if err != nil {
				return err
			}
			if f.Op == "ordinal" {
				native.PutUint64(row.Fields[1][8*f.At:], uint64(k))
			} else {
				t.put(row.Fields[0], f.At+k, 1)
			}
		default:
			x, err := f.number(value)
			if err != nil {
				return err
			}
			t.put(row.Fields[0], f.At, x)
		}
	}
	return nil
}

func (t *Table) put(dst []byte, at int, x float64) {
	if t.dtype == "float32" {
		native.PutUint32(dst[4*at:], math.Float32bits(float32(x)))
	} else {
		native.PutUint64(dst[8*at:], math.Float64bits(x))
	}
}

// isMissing reports whether a value counts as missing, as in pandas.
func isMissing(s string) bool {
	switch s {
	case "", "NA", "N/A", "NaN", "nan", "NULL", "null", "None":
		return true
	}
	return false
}

// parseNumber parses a finite decimal number.
func parseNumber(s string) (float64, error) {
	x, err := strconv.ParseFloat(s, 64)
	if err != nil || math.IsInf(x, 0) || math.IsNaN(x) || strings.ContainsAny(s, "xX_pP") {
		return 0, fmt.Errorf("%.40q is not a finite number", s)
	}
	return x, nil
}

// number is the value of a numeric feature.
func (f *Feature) number(value string) (float64, error) {
	value = strings.TrimSpace(value)
	var x float64
	if isMissing(value) {
		if f.Fill == nil {
			return 0, badArray("column %q is missing (missing= names a value)", f.Column)
		}
		x = *f.Fill
	} else {
		var err error
		if x, err = parseNumber(value); err != nil {
			return 0, badArray("column %q: %w", f.Column, err)
		}
	}
	switch f.Op {
	case "minmax":
		return (x - f.Min) / cmp.Or(f.Max-f.Min, 1), nil // a constant column is 0
	case "zscore":
		x = (x - f.Mean) / cmp.Or(f.Std, 1)
		if f.Clip > 0 {
			x = min(max(x, -f.Clip), f.Clip)
		}
	case "outliers":
		x = min(max(x, f.Low), f.High)
	}
	return x, nil
}

// category is the index of a value among the sorted categories.
func (f *Feature) category(value string) (int, error) {
	if isMissing(value) {
		if f.Missing == "error" {
			return 0, badArray("column %q is missing (missing='category' makes it a category)", f.Column)
		}
		value = ""
	}
	k, ok := slices.BinarySearch(f.Categories, value)
	if !ok {
		return 0, badArray("column %q: the fit has no category %.40q", f.Column, value)
	}
	return k, nil
}

func (f *Feature) label(value string) (int64, error) {
	if isMissing(value) {
		return 0, badArray("the label, column %q, is missing", f.Column)
	}
	if f.Categories == nil {
		n, err := strconv.ParseInt(strings.TrimSpace(value), 10, 64)
		if err != nil {
			return 0, badArray("the label, column %q: %w", f.Column, err)
		}
		return n, nil
	}
	k, err := f.category(value)
	return int64(k), err
}

// splitRow splits a row into its fields by RFC 4180.
func splitRow(b []byte, comma byte, fields []string) ([]string, error) {
	for more := true; more; {
		var quoted []byte
		for q := []byte(`"`); bytes.HasPrefix(b, q); { // two quotes are one
			part, rest, ok := bytes.Cut(b[1:], q)
			if !ok {
				return nil, badArray("a row has an unterminated quote")
			}
			if quoted, b = append(quoted, part...), rest; bytes.HasPrefix(b, q) {
				quoted = append(quoted, '"')
			}
		}
		var rest []byte // behind the closing quote it belongs to the field too
		rest, b, more = bytes.Cut(b, []byte{comma})
		fields = append(fields, string(quoted)+string(rest))
	}
	return fields, nil
}

// quantile is numpy's, linear between neighbours; sorted must not be empty.
func quantile(sorted []float64, p float64) float64 {
	at := p * float64(len(sorted)-1)
	i := int(math.Floor(at))
	if i+1 >= len(sorted) {
		return sorted[len(sorted)-1]
	}
	lo, hi, t := sorted[i], sorted[i+1], at-float64(i)
	if t >= 0.5 { // as in numpy's lerp, so that both ends are exact
		return hi - (hi-lo)*(1-t)
	}
	return lo + (hi-lo)*t
}
