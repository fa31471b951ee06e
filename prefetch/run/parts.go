package run

import (
	"context"
	"iter"
	"slices"

	"github.com/shoalfs/shoal/cache/catalog"
)

// A stream whose reader needs parts of its samples still follows an order of the samples' files: positions, frontier
// and lead count samples. In planning, fetching and retaining, a file of the order stands for its unit: itself and
// its parts.

// Part returns the part with an extension of the sample at a position of the stream's first epoch; nil if it has
// none. It is called between Read of the position and the release of that. The bytes are valid and do not change
// until release.
func (s *Stream) Part(ctx context.Context, pos int, ext string) (data []byte, release func(), err error) {
	file, ok := s.Volume.Manifest().Part(s.first.At(pos), ext)
	if !ok {
		return nil, func() {}, nil
	}
	done := func() {}
	if !slices.Contains(s.Parts, ext) { // otherwise it is open with its sample
		s.runner.Opened(s.Volume, file, 0)
		done = func() { s.runner.Done(s.Volume, file) }
	}
	data, free, err := s.Volume.Sample(ctx, file)
	if err != nil {
		done()
		return nil, nil, err
	}
	if data == nil { // an empty file
		data = []byte{}
	}
	return data, func() { free(); done() }, nil
}

// appendUnit appends the file and those of its parts that the stream's reader needs.
func (s *brief) appendUnit(dst []int, file int) []int {
	dst = append(dst, file)
	for _, ext := range s.Parts {
		if part, ok := s.Volume.Manifest().Part(file, ext); ok && part != file {
			dst = append(dst, part)
		}
	}
	return dst
}

// units is a stream as prefetch.Parts. The runner's lock is held.
type units struct{ *Stream }

// Unit is appendUnit for planning, which requests the same file several times in a row.
func (u units) Unit(file int) []int {
	if len(u.unit) == 0 || u.unit[0] != file {
		u.unit = u.appendUnit(u.unit[:0], file)
	}
	return u.unit
}

func (u units) With(file int) iter.Seq[int] {
	return func(yield func(int) bool) {
		if !yield(file) {
			return
		}
		if _, ext, _ := catalog.Cut(u.Volume.Manifest().Name(file)); !slices.Contains(u.Parts, ext) {
			return
		}
		for f := range u.Samples.Beside(file) {
			if f != file && !yield(f) {
				return
			}
		}
	}
}

// meanOf returns roughly how many bytes the stream reads per position.
func (s *brief) meanOf() int64 {
	if m := s.Volume.Manifest(); len(s.Parts) == 0 && s.Ranges == nil {
		return max(m.Bytes()/int64(max(m.Len(), 1)), 1)
	}
	// The mean over all files says little if most are small parts, or ranges are read.
	const probes = 1000
	n := s.first.Len()
	step := max(n/probes, 1)
	var bytes, count int64
	var unit []int
	for pos := 0; pos < n; pos += step {
		unit = s.appendUnit(unit[:0], s.first.At(pos))
		for _, f := range unit {
			for x := range s.of.Extents(f) {
				bytes += s.of.ExtentBytes(f, x)
			}
		}
		count++
	}
	return max(bytes/max(count, 1), 1)
}
