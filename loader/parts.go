package loader

import (
	"context"
	"fmt"
	"slices"
)

// PartStream is a Stream that reads parts.
type PartStream interface {
	Stream
	// Part returns a part of the sample at a position, nil without error if it has none. It is called by one goroutine,
	// between Read of that position and the release of Read's result. The bytes are valid and immutable until release
	// is called, once.
	Part(ctx context.Context, pos int, ext string) (data []byte, release func(), err error)
}

// Wants is a Transform that reads parts of samples, which are then prefetched with them.
type Wants interface {
	// Parts returns the extensions; the caller must not change it.
	Parts() []string
}

// wantedParts returns the extensions of the parts that the session reads of every sample.
func (s *spec) wantedParts() (exts []string) {
	if w, ok := s.transform.(Wants); ok {
		exts = append(exts, w.Parts()...)
	}
	if ext := s.label.part(); ext != "" {
		exts = append(exts, ext)
	}
	slices.Sort(exts)
	return slices.Compact(exts)
}

// checkParts refuses parts that no sample has.
func (s *spec) checkParts(ds Dataset) error {
	for _, ext := range s.parts {
		switch found, numbered := ds.Parts(ext); {
		case !found:
			return fmt.Errorf("no sample has a .%s file beside it (same folder, same name up to the first dot), "+
				"which %s needs: check the extension", ext, s.needs(ext))
		case numbered:
			return fmt.Errorf(".%s files are samples themselves here, but %s reads them as parts of samples: "+
				"serve with --samples .jpg, or the extensions that your samples have", ext, s.needs(ext))
		}
	}
	return nil
}

// needs names the reader of a part, for errors.
func (s *spec) needs(ext string) string {
	if ext == s.label.part() {
		return "label " + s.label.String()
	}
	return "the transform"
}

// parts reads the parts of one row's sample.
type parts struct {
	s    *session
	r    *row
	have []part
	err  error // of the store
}

type part struct {
	ext     string
	data    []byte
	release func()
}

// read reads the parts that the session reads of every sample.
func (p *parts) read(ctx context.Context) error {
	for _, ext := range p.s.spec.parts {
		if _, err := p.get(ctx, ext); err != nil {
			return err
		}
	}
	return nil
}

// get returns a part, read earlier or now; nil if there is none.
func (p *parts) get(ctx context.Context, ext string) ([]byte, error) {
	if data, ok := p.find(ext); ok {
		return data, nil
	}
	from, ok := p.r.batch.source.stream.(PartStream)
	if !ok {
		return nil, nil
	}
	data, release, err := from.Part(ctx, p.r.pos, ext)
	if err != nil {
		p.err = fmt.Errorf("part .%s: %w", ext, err)
		return nil, p.err
	}
	p.s.count.sourceBytes.Add(int64(len(data)))
	p.have = append(p.have, part{ext, data, release})
	return data, nil
}

// find returns a part that was read.
func (p *parts) find(ext string) (data []byte, ok bool) {
	for _, h := range p.have {
		if h.ext == ext {
			return h.data, true
		}
	}
	return nil, false
}

// apply is Sample.Part. A part that was not prefetched is read while other goroutines may decode.
func (p *parts) apply(ctx context.Context, ext string) ([]byte, error) {
	if data, ok := p.find(ext); ok {
		return data, nil
	}
	<-p.s.srv.cpu
	data, err := p.get(ctx, ext)
	p.s.srv.cpu <- struct{}{}
	return data, err
}

func (p *parts) release() {
	for _, h := range p.have {
		h.release()
	}
}
