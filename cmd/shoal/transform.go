package main

import (
	"context"
	"fmt"

	"github.com/shoalfs/shoal/gpuingest"
	"github.com/shoalfs/shoal/loader"
)

// deriving is a transform with rows of several samples: it is loader.Deriving.
type deriving struct {
	loader.Transform
	ds loader.Dataset
}

func (t deriving) Derived() loader.Dataset { return t.ds }

// compileTransform is loader.Compiler: a gpuingest.Ingest is a loader.Transform.
func compileTransform(ctx context.Context, spec string, ds loader.Dataset) (loader.Transform, error) {
	in, err := gpuingest.New(spec)
	if err != nil {
		return nil, err
	}
	served, ok := ds.(feedDataset)
	if !ok { // only the text is to be checked
		return in, nil
	}
	if t, ok := in.(*gpuingest.Table); ok {
		if in, err = fitTable(ctx, t, served); err != nil {
			return nil, fmt.Errorf("transform %s: %w", t, err)
		}
	}
	if t, ok := in.(*gpuingest.Tokens); ok && ds.Len() > 0 {
		if t, err = t.Of(ds.Path(0)); err != nil {
			return nil, err
		}
		in = t
		if p, ok := t.Packing(); ok {
			packed, err := packings.of(served, t.String(), p)
			if err != nil {
				return nil, fmt.Errorf("transform %s: %w", t, err)
			}
			return deriving{t.Packed(packed.Waste().Most), packed}, nil
		}
	}
	return in, nil
}
