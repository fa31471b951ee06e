package gpuingest

import (
	"errors"
	"fmt"
	"image"
	"maps"
	"slices"
	"strings"
)

// joint is a picture with its boxes, its mask, or both; all go through the picture's steps.
type joint struct {
	canonical
	picture *Transform
	beside  []beside // boxes come first
	fields  []Field
	parts   []string
}

// beside computes fields from a file beside the picture.
type beside interface {
	about() *annotation
	// fields are those for a result of this size.
	fields(size image.Point) []Field
	// make writes a row's fields; part is nil if there is no file.
	make(part []byte, size image.Point, steps []step, out [][]byte) error
}

// annotation is what all of them have.
type annotation struct {
	what string // boxes or mask
	ext  string // of the file
	text string // the canonical form
	at   int    // the first of its fields in a row
}

func (a *annotation) about() *annotation { return a }

// jointWords begin a SPEC of a joint transform, in any order, each once.
var jointWords = map[string]func(p *parser, c call) (beside, error){
	"Detection": compileDetection, "Segmentation": compileSegmentation,
}

// compileJoint parses Detection(...), Segmentation(...) or both, followed by a SPEC of Compile.
func compileJoint(p *parser, calls []call) (Ingest, error) {
	j := &joint{}
	seen := map[string]beside{}
	for len(calls) > 0 && jointWords[calls[0].name] != nil {
		c := calls[0]
		if seen[c.name] != nil {
			return nil, p.fail(c.pos, len(c.name), "", "%s is given twice", c.name)
		}
		b, err := jointWords[c.name](p, c)
		if err != nil {
			return nil, err
		}
		seen[c.name], calls = b, calls[1:]
	}
	if len(calls) == 0 {
		return nil, p.fail(len(p.s), 1, "add |Resize((640, 640)) or another operation that ends in one size",
			"there is no operation on the picture")
	}
	rest := calls[0].pos
	var err error
	if j.picture, err = Compile(p.s[rest:]); err != nil {
		if se, ok := errors.AsType[*SpecError](err); ok {
			se.Spec, se.Pos = p.s, se.Pos+rest
		}
		return nil, err
	}
	if j.picture.raw {
		return nil, p.fail(rest, len(rawWord), "",
			"raw does not change the picture: remove Detection and Segmentation, or add operations")
	}
	if j.picture.mix != nil {
		at := slices.IndexFunc(calls, mixes)
		return nil, p.fail(calls[at].pos, len(calls[at].name), "leave it out",
			"%s blends whole pictures, which boxes and masks cannot follow", calls[at].name)
	}
	j.fields = j.picture.Fields()
	for _, name := range slices.Sorted(maps.Keys(seen)) {
		b := seen[name]
		b.about().at = len(j.fields)
		j.canonical += canonical(b.about().text + "|")
		j.beside, j.fields = append(j.beside, b), append(j.fields, b.fields(j.picture.size)...)
		if ext := b.about().ext; !slices.Contains(j.parts, ext) {
			j.parts = append(j.parts, ext)
		}
	}
	j.canonical += canonical(j.picture.String())
	return j, nil
}

func (j *joint) Fields() []Field { return j.fields }

// Parts returns the extensions of the files that belong to a sample; the caller must not change it.
func (j *joint) Parts() []string { return j.parts }

func (j *joint) Layout() string { return j.picture.Layout() }

// Decodes is [Transform.Decodes].
func (j *joint) Decodes() bool { return true }

// Make implements Ingest. Boxes and masks are parsed before the picture's pixels are decoded, which costs the most.
func (j *joint) Make(src Sample, at Draw, row *Row) error {
	return j.picture.applyWith(src.Data, at, row.Fields[0], func(size image.Point, steps []step) error {
		row.Width, row.Height = uint32(size.X), uint32(size.Y)
		for _, b := range j.beside {
			a := b.about()
			var part []byte
			if src.Part != nil {
				var err error
				if part, err = src.Part(a.ext); err != nil {
					return err
				}
			}
			if err := b.make(part, size, steps, row.Fields[a.at:]); err != nil {
				return fmt.Errorf("%w: %s in its .%s: %w", ErrBadSample, a.what, a.ext, err)
			}
		}
		return nil
	})
}

// errNoPart says that a required file of a sample is missing.
var errNoPart = errors.New("the file is missing (same folder, same name up to the first dot)")

// ext parses the extension of a part.
func (a *args) ext(name string) string {
	v := a.val[name]
	if v.kind != 's' || v.str == "" || len(v.str) > 64 || strings.ContainsAny(v.str, `/|`) || v.str[0] == '.' {
		a.bad(v, "%s must be the extension of a file beside the picture, such as 'json' or 'mask.png'", name)
	}
	return v.str
}
