package gpuingest

import (
	"errors"
	"fmt"
	"image"
	"slices"
	"strings"
)

// joint is a picture with its boxes, its mask, or both; all go through the picture's steps.
type joint struct {
	picture *Transform
	boxes   *detection
	mask    *segmentation
	fields  []Field
	parts   []string
}

// jointWords begin a SPEC of a joint transform, in any order, each once.
var jointWords = map[string]func(j *joint, p *parser, c call) error{
	"Detection": func(j *joint, p *parser, c call) (err error) {
		j.boxes, err = compileDetection(p, c)
		return err
	},
	"Segmentation": func(j *joint, p *parser, c call) (err error) {
		j.mask, err = compileSegmentation(p, c)
		return err
	},
}

// compileJoint parses Detection(...), Segmentation(...) or both, followed by a SPEC of Compile.
func compileJoint(p *parser, calls []call) (Ingest, error) {
	j := &joint{}
	seen := map[string]bool{}
	for len(calls) > 0 && jointWords[calls[0].name] != nil {
		c := calls[0]
		if seen[c.name] {
			return nil, p.fail(c.pos, len(c.name), "", "%s is given twice", c.name)
		}
		seen[c.name] = true
		if err := jointWords[c.name](j, p, c); err != nil {
			return nil, err
		}
		calls = calls[1:]
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
	_, h, w := j.picture.OutShape()
	if j.boxes != nil {
		j.fields = append(j.fields, j.boxes.fields()...)
		j.parts = append(j.parts, j.boxes.ext)
	}
	if j.mask != nil {
		j.fields = append(j.fields, j.mask.field(h, w))
		if !slices.Contains(j.parts, j.mask.ext) {
			j.parts = append(j.parts, j.mask.ext)
		}
	}
	return j, nil
}

func (j *joint) Fields() []Field { return j.fields }

// Parts returns the extensions of the files that belong to a sample; the caller must not change it.
func (j *joint) Parts() []string { return j.parts }

func (j *joint) Layout() string { return j.picture.Layout() }

func (j *joint) String() string {
	var parts []string
	if j.boxes != nil {
		parts = append(parts, j.boxes.text)
	}
	if j.mask != nil {
		parts = append(parts, j.mask.text)
	}
	return strings.Join(append(parts, j.picture.String()), "|")
}

// Decodes is [Transform.Decodes].
func (j *joint) Decodes() bool { return true }

func (j *joint) Hash() string { return hashOf(j.String()) }

// Make implements Ingest. Boxes and masks are parsed before the picture's pixels are decoded, which costs the most.
func (j *joint) Make(src Sample, at Draw, row *Row) error {
	out := row.Fields[1:]
	return j.picture.applyWith(src.Data, at, row.Fields[0], func(size image.Point, steps []step) error {
		row.Width, row.Height = uint32(size.X), uint32(size.Y)
		if j.boxes != nil {
			part, err := partOf(src, j.boxes.ext)
			if err != nil {
				return err
			}
			if err := j.boxes.make(part, size, steps, out); err != nil {
				return fmt.Errorf("%w: boxes in its .%s: %w", ErrBadSample, j.boxes.ext, err)
			}
			out = out[len(j.boxes.fields()):]
		}
		if j.mask != nil {
			part, err := partOf(src, j.mask.ext)
			if err != nil {
				return err
			}
			if err := j.mask.make(part, size, steps, out[0]); err != nil {
				return fmt.Errorf("%w: mask in its .%s: %w", ErrBadSample, j.mask.ext, err)
			}
		}
		return nil
	})
}

// partOf returns a file of the sample, nil if there is none.
func partOf(s Sample, ext string) ([]byte, error) {
	if s.Part == nil {
		return nil, nil
	}
	return s.Part(ext)
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
