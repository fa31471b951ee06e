package gpuingest

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

const (
	fitVersion = 1
	// maxCategories bounds the categories of a column, maxOneHot the numbers of a one-hot column.
	maxCategories = 1 << 20
	maxOneHot     = 1 << 14
	// maxExact bounds the values of a column with quantiles: all of them are kept in memory.
	maxExact = 1 << 26
)

// Fit is the statistics of the whole table for a transform. Its JSON is documented (docs/records.md), so that a model's
// numbers can be converted back to values long after.
type Fit struct {
	Version  int       `json:"v"`
	Dataset  string    `json:"dataset"` // the dataset version
	Spec     string    `json:"spec"`
	Columns  []string  `json:"columns"`
	Comma    string    `json:"comma"`
	Rows     int64     `json:"rows"`     // seen by the fit
	BadRows  int64     `json:"bad_rows"` // of these, with a wrong number of fields or with invalid numbers
	Width    int       `json:"width"`    // of data
	Features []Feature `json:"features"`
}

// Feature is the result of one column.
type Feature struct {
	tableOp
	At    int `json:"at"` // index in data; of ordinal columns, in categories
	Width int `json:"width"`

	Count       int64    `json:"count"` // values that are not missing
	MissingRows int64    `json:"missing_rows"`
	Fill        *float64 `json:"fill,omitempty"` // replaces missing values

	// Of numbers; Std divides by the number of values.
	Min  float64 `json:"min"`
	Max  float64 `json:"max"`
	Mean float64 `json:"mean"`
	Std  float64 `json:"std"`
	// Of outliers: the bounds to which values are clipped.
	Low  float64 `json:"low,omitempty"`
	High float64 `json:"high,omitempty"`
	// Of categories, sorted by code point; nil for labels that are whole numbers.
	Categories []string `json:"categories,omitempty"`
	Counts     []int64  `json:"counts,omitempty"`

	field int // of the column in a row
}

// JSON is the stored form.
func (f *Fit) JSON() []byte {
	b, err := json.Marshal(f)
	if err != nil {
		panic(err) // numbers are finite and strings are strings
	}
	return b
}

// ParseFit parses the JSON of a fit.
func ParseFit(b []byte) (*Fit, error) {
	var f Fit
	if err := json.Unmarshal(b, &f); err != nil {
		return nil, fmt.Errorf("fit: %w", err)
	}
	if f.Version != fitVersion || len(f.Comma) != 1 || f.Width < 0 || f.Width > maxOut/8 {
		return nil, fmt.Errorf("fit of version %d, but this version reads %d", f.Version, fitVersion)
	}
	for i := range f.Features {
		g := &f.Features[i]
		g.field = slices.Index(f.Columns, g.Column)
		if g.field < 0 || g.At < 0 || g.Width < 0 || g.Op == "onehot" && g.Width != len(g.Categories) ||
			g.Op != "ordinal" && g.Op != "label" && g.At+g.Width > f.Width ||
			g.Op == "ordinal" && g.At >= len(f.Features) || !slices.IsSorted(g.Categories) {
			return nil, fmt.Errorf("fit: column %q", g.Column)
		}
	}
	return &f, nil
}

// Fitter computes the statistics of a table, row by row, in order: the same rows give the same fit.
type Fitter struct {
	fit    Fit
	stats  []columnStats
	fields []string
}

type columnStats struct {
	m2     float64
	counts map[string]int64
	values []float64 // all of them, for quantiles
	words  bool      // there is a label that is not a whole number
}

// Fitter begins a fit. header is the table's first row; a column that it lacks is a *SpecError.
func (t *Table) Fitter(dataset string, header []byte, comma byte) (*Fitter, error) {
	columns, err := splitRow(header, comma, nil)
	if err != nil {
		return nil, err
	}
	if !utf8.Valid(header) { // JSON would store other names
		return nil, fmt.Errorf("the table's first row is not UTF-8: %.60q (iconv -t UTF-8 converts a table)", header)
	}
	f := &Fitter{stats: make([]columnStats, len(t.ops)),
		fit: Fit{Version: fitVersion, Dataset: dataset, Spec: t.String(), Columns: columns, Comma: string(comma)}}
	for i, o := range t.ops {
		g := Feature{tableOp: o, field: slices.Index(columns, o.Column)}
		if g.field < 0 {
			return nil, fmt.Errorf("the table has no column %q: %s", o.Column, nearest(o.Column, slices.Clone(columns)))
		}
		if slices.Index(columns[g.field+1:], o.Column) >= 0 {
			return nil, fmt.Errorf("the table has two columns %q", o.Column)
		}
		if !o.numeric() {
			f.stats[i].counts = map[string]int64{}
		}
		f.fit.Features = append(f.fit.Features, g)
	}
	return f, nil
}

// Add adds a row. Invalid rows are counted and skipped; errors are limits of the fit.
func (f *Fitter) Add(row []byte) error {
	f.fit.Rows++
	fields, err := splitRow(row, f.fit.Comma[0], f.fields[:0])
	if err != nil || len(fields) != len(f.fit.Columns) {
		f.fit.BadRows++
		return nil //nolint:nilerr // a bad row is a bad sample later, by the session's policy
	}
	f.fields = fields
	bad := false
	for i := range f.fit.Features {
		g, s := &f.fit.Features[i], &f.stats[i]
		value := fields[g.field]
		if g.numeric() {
			value = strings.TrimSpace(value)
		}
		if isMissing(value) {
			if g.MissingRows++; g.Missing == "category" {
				s.counts[""]++
			}
			continue
		}
		if s.counts != nil {
			if !utf8.ValidString(value) {
				return fmt.Errorf("column %q has a value that is not UTF-8: %.60q (iconv -t UTF-8 converts a table)",
					g.Column, value)
			}
			if g.Count++; s.counts[value] == 0 && len(s.counts) == maxCategories {
				return fmt.Errorf("column %q has more than %d different values", g.Column, maxCategories)
			}
			s.counts[value]++
			if g.Op == "label" && !s.words {
				_, err := strconv.ParseInt(strings.TrimSpace(value), 10, 64)
				s.words = err != nil
			}
			continue
		}
		x, err := parseNumber(value)
		if err != nil {
			bad = true
			continue
		}
		if g.Count++; g.Count == 1 {
			g.Min, g.Max = x, x
		}
		g.Min, g.Max = min(g.Min, x), max(g.Max, x)
		d := x - g.Mean // Welford, "Note on a method for calculating corrected sums of squares and products", 1962
		g.Mean += d / float64(g.Count)
		s.m2 += d * (x - g.Mean)
		if g.Op == "outliers" {
			if len(s.values) == maxExact {
				return fmt.Errorf("column %q has more than %d values, the limit for quantiles", g.Column, maxExact)
			}
			s.values = append(s.values, x)
		}
	}
	if bad {
		f.fit.BadRows++
	}
	return nil
}

// Fit returns the fit.
func (f *Fitter) Fit() (*Fit, error) {
	width, ordinals := 0, 0
	for i := range f.fit.Features {
		g, s := &f.fit.Features[i], &f.stats[i]
		if g.Count == 0 {
			return nil, fmt.Errorf("column %q has no valid value for %s in %d rows", g.Column, g.Op, f.fit.Rows)
		}
		g.At, g.Width = width, 1
		switch g.Op {
		case "label", "ordinal", "onehot":
			if g.Op == "label" && !s.words {
				g.At, g.Width = 0, 0
				continue
			}
			g.Categories = slices.Sorted(maps.Keys(s.counts))
			for _, c := range g.Categories {
				g.Counts = append(g.Counts, s.counts[c])
			}
			switch g.Op {
			case "label":
				g.At, g.Width = 0, 0
			case "ordinal":
				g.At = ordinals
				ordinals++
			default:
				if g.Width = len(g.Categories); g.Width > maxOneHot {
					return nil, fmt.Errorf(
						"onehot: column %q has %d categories, the limit is %d (ordinal allows more)", g.Column,
						g.Width, maxOneHot)
				}
				width += g.Width
			}
			continue
		case "outliers":
			slices.Sort(s.values)
			g.Low, g.High = quantile(s.values, g.LowP), quantile(s.values, g.HighP)
		}
		if g.Std = math.Sqrt(s.m2 / float64(g.Count)); math.IsInf(g.Mean, 0) || math.IsNaN(g.Mean) ||
			math.IsInf(g.Std, 0) || math.IsNaN(g.Std) || math.IsInf(g.Max-g.Min, 0) {
			return nil, fmt.Errorf("column %q: its values, %g to %g, are too large for a mean", g.Column, g.Min, g.Max)
		}
		if g.Missing != "error" {
			fill := g.Mean
			if g.Missing != "mean" {
				var err error
				if fill, err = strconv.ParseFloat(g.Missing, 64); err != nil {
					return nil, err
				}
			}
			g.Fill = &fill
		}
		width++
	}
	if width > maxOut/8 {
		return nil, errors.New("the row has too many numbers")
	}
	f.fit.Width = width
	return &f.fit, nil
}
