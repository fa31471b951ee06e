package main

import (
	"context"
	"fmt"

	"github.com/shoalfs/shoal/gpuingest"
	"github.com/shoalfs/shoal/loader"
)

// transform adapts gpuingest to the feed: it is loader.Transform.
type transform struct{ gpuingest.Ingest }

// mixer is a transform with a step over the batch: it is loader.Mixer.
type mixer struct {
	transform
	m gpuingest.Mixer
}

// Parts implements loader.Wants.
func (t transform) Parts() []string {
	if w, ok := t.Ingest.(gpuingest.Wants); ok {
		return w.Parts()
	}
	return nil
}

// Decodes implements loader.Decodes: pictures are made from recoded JPEGs too.
func (t transform) Decodes() bool {
	switch in := t.Ingest.(type) {
	case *gpuingest.Transform:
		return in.DType() != "raw"
	case *gpuingest.Mixed:
		return true
	}
	return false
}

func (t transform) Apply(ctx context.Context, src loader.Sample, at loader.Draw, row *loader.Row) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	s := gpuingest.Sample{Data: src.Data}
	if src.Part != nil {
		s.Part = func(ext string) ([]byte, error) { return src.Part(ctx, ext) }
	}
	return t.Make(s, at, row)
}

func (t mixer) Mix(at loader.Draw, rows []*loader.Row) {
	t.m.Mix(at, rows)
}

// deriving is a transform with rows of several samples: it is loader.Deriving.
type deriving struct {
	transform
	ds loader.Dataset
}

func (t deriving) Derived() loader.Dataset { return t.ds }

// compileTransform is loader.Compiler.
func compileTransform(ctx context.Context, spec string, ds loader.Dataset) (loader.Transform, error) {
	in, err := gpuingest.New(spec)
	if err != nil {
		return nil, err
	}
	if t, ok := in.(*gpuingest.Table); ok && ds != nil {
		if in, err = fitTable(ctx, t, ds); err != nil {
			return nil, fmt.Errorf("transform %s: %w", t, err)
		}
	}
	if t, ok := in.(*gpuingest.Tokens); ok && ds != nil {
		if p, ok := t.Packing(); ok {
			packed, err := packings.of(ctx, ds, t.String(), p)
			if err != nil {
				return nil, fmt.Errorf("transform %s: %w", t, err)
			}
			return deriving{transform{t.Packed(packed.Waste().Most)}, packed}, nil
		}
	}
	if m, ok := in.(gpuingest.Mixer); ok {
		return mixer{transform{in}, m}, nil
	}
	return transform{in}, nil
}
