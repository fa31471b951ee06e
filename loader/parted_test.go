package loader_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"

	"github.com/shoalfs/shoal/loader"
	"github.com/shoalfs/shoal/prefetch/order"
)

// partedDataset is a testDataset whose samples have parts.
type partedDataset struct {
	*testDataset
	Files    map[string]func(i int) []byte // by extension; nil bytes: the sample has none
	Numbered map[string]bool               // extensions that are numbered as samples
	Broken   map[string]error              // by extension: the store's error
	Flat     bool                          // no class folders
	Wanted   func(parts []string)          // told what is announced
}

// Label implements loader.Dataset.
func (d *partedDataset) Label(i int) int {
	if d.Flat {
		return -1
	}
	return d.testDataset.Label(i)
}

// Classes implements loader.Dataset.
func (d *partedDataset) Classes() []string {
	if d.Flat {
		return nil
	}
	return d.testDataset.Classes()
}

// Parts implements loader.Dataset.
func (d *partedDataset) Parts(ext string) (found, numbered bool) {
	return d.Files[ext] != nil, d.Numbered[ext]
}

// Begin implements loader.Dataset.
func (d *partedDataset) Begin(name string, seq order.Order, start, weight int, parts ...string) (loader.Stream, error) {
	if d.Wanted != nil {
		d.Wanted(parts)
	}
	s, err := d.testDataset.Begin(name, seq, start, weight)
	if err != nil {
		return nil, err
	}
	return partStream{s.(*testStream), d}, nil
}

type partStream struct {
	*testStream
	d *partedDataset
}

// Part implements loader.PartStream.
func (s partStream) Part(_ context.Context, pos int, ext string) ([]byte, func(), error) {
	if !s.read[pos].Load() || s.closed.Load() {
		panic("part of a sample that is not being read")
	}
	if err := s.d.Broken[ext]; err != nil {
		return nil, nil, err
	}
	f := s.d.Files[ext]
	if f == nil {
		return nil, func() {}, nil
	}
	s.d.Reading.Add(1)
	return f(s.seq.At(pos)), sync.OnceFunc(func() { s.d.Reading.Add(-1) }), nil
}

// joined is a transform whose row is the parts of a sample: 16 bytes of each, zeros behind.
type joined struct {
	Announced, Surprise []string // extensions
}

// joinedBytes is the length of a part in a row.
const joinedBytes = 16

// compileJoined parses joined(EXT+EXT,EXT+EXT): the parts that are announced, and others that are read too.
func compileJoined(ctx context.Context, spec string, ds loader.Dataset) (loader.Transform, error) {
	text, ok := strings.CutPrefix(spec, "joined(")
	if !ok {
		return compileRamp(ctx, spec, ds)
	}
	first, second, _ := strings.Cut(strings.TrimSuffix(text, ")"), ",")
	split := func(s string) []string { return strings.FieldsFunc(s, func(r rune) bool { return r == '+' }) }
	return joined{split(first), split(second)}, nil
}

// Parts implements loader.Wants.
func (j joined) Parts() []string { return j.Announced }

// Make implements loader.Transform. A part of "bad" makes a bad sample, as one that is missing does not.
func (j joined) Make(s loader.Sample, _ loader.Draw, row *loader.Row) error {
	dst := row.Fields[0]
	clear(dst)
	for _, ext := range append(append([]string{}, j.Announced...), j.Surprise...) {
		data, err := s.Part(ext)
		if err != nil {
			return fmt.Errorf("reading: %w", err)
		}
		if string(data) == "bad" {
			return errors.New("bad part")
		}
		copy(dst[:joinedBytes], data)
		dst = dst[joinedBytes:]
	}
	return nil
}

// Fields implements loader.Transform.
func (j joined) Fields() []loader.Field {
	n := joinedBytes * (len(j.Announced) + len(j.Surprise))
	return []loader.Field{{Name: "data", DType: "uint8", Shape: []int{n}, Bytes: n}}
}

// Layout implements loader.Transform.
func (joined) Layout() string { return "" }

// String implements loader.Transform.
func (j joined) String() string {
	return fmt.Sprintf("joined(%s,%s)", strings.Join(j.Announced, "+"), strings.Join(j.Surprise, "+"))
}

// Hash implements loader.Transform.
func (j joined) Hash() string { return "hash of " + j.String() }
