package feedtest

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"

	"github.com/shoalfs/shoal/loader"
	"github.com/shoalfs/shoal/prefetch/order"
)

// Parted is a Dataset whose samples have parts.
type Parted struct {
	*Dataset
	Files    map[string]func(i int) []byte // by extension; nil bytes: the sample has none
	Numbered map[string]bool               // extensions that are numbered as samples
	Broken   map[string]error              // by extension: the store's error
	Flat     bool                          // no class folders
	Wanted   func(parts []string)          // told what is announced
}

// Label implements loader.Dataset.
func (d *Parted) Label(i int) int {
	if d.Flat {
		return -1
	}
	return d.Dataset.Label(i)
}

// Classes implements loader.Dataset.
func (d *Parted) Classes() []string {
	if d.Flat {
		return nil
	}
	return d.Dataset.Classes()
}

// Parts implements loader.Dataset.
func (d *Parted) Parts(ext string) (found, numbered bool) {
	return d.Files[ext] != nil, d.Numbered[ext]
}

// Begin implements loader.Dataset.
func (d *Parted) Begin(name string, seq order.Order, start, weight int, parts ...string) (loader.Stream, error) {
	if d.Wanted != nil {
		d.Wanted(parts)
	}
	s, err := d.Dataset.Begin(name, seq, start, weight)
	if err != nil {
		return nil, err
	}
	return partStream{s.(*stream), d}, nil
}

type partStream struct {
	*stream
	d *Parted
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

// Joined is a transform whose row is the parts of a sample: 16 bytes of each, zeros behind.
type Joined struct {
	Announced, Surprise []string // extensions
}

// joinedBytes is the length of a part in a row.
const joinedBytes = 16

// CompileJoined parses joined(EXT+EXT,EXT+EXT): the parts that are announced, and others that are read too.
func CompileJoined(ctx context.Context, spec string, ds loader.Dataset) (loader.Transform, error) {
	text, ok := strings.CutPrefix(spec, "joined(")
	if !ok {
		return Compile(ctx, spec, ds)
	}
	first, second, _ := strings.Cut(strings.TrimSuffix(text, ")"), ",")
	split := func(s string) []string { return strings.FieldsFunc(s, func(r rune) bool { return r == '+' }) }
	return Joined{split(first), split(second)}, nil
}

// Parts implements loader.Wants.
func (j Joined) Parts() []string { return j.Announced }

// Make implements loader.Transform. A part of "bad" makes a bad sample, as one that is missing does not.
func (j Joined) Make(s loader.Sample, _ loader.Draw, row *loader.Row) error {
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
func (j Joined) Fields() []loader.Field {
	n := joinedBytes * (len(j.Announced) + len(j.Surprise))
	return []loader.Field{{Name: "data", DType: "uint8", Shape: []int{n}, Bytes: n}}
}

// Layout implements loader.Transform.
func (Joined) Layout() string { return "" }

// String implements loader.Transform.
func (j Joined) String() string {
	return fmt.Sprintf("joined(%s,%s)", strings.Join(j.Announced, "+"), strings.Join(j.Surprise, "+"))
}

// Hash implements loader.Transform.
func (j Joined) Hash() string { return "hash of " + j.String() }
