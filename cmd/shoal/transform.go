package main

import (
	"context"
	"fmt"
	"slices"
	"sync"

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

// packings keeps the latest packings of sessions, so that the ranks and streams of a job share one.
var packings packingCache

// keptPackings is the number to keep: a packing uses up to 8 bytes for each document.
const keptPackings = 4

type packingCache struct {
	mu   sync.Mutex
	list []keptPacking // the last used one last
}

// keptPacking is computed once. A packing depends only on the samples and the spec, which key names.
type keptPacking struct {
	key    string
	packed func() (*loader.Packed, error)
}

// of packs the dataset, or returns a kept packing.
func (c *packingCache) of(ds feedDataset, spec string, p gpuingest.Packing) (*loader.Packed, error) {
	packed, err := c.entry(keptPacking{ds.Selection() + "\x00" + spec, sync.OnceValues(func() (*loader.Packed, error) {
		return loader.Pack(ds, p.Length, p.Cut, p.Tokens)
	})})()
	if err != nil {
		return nil, err
	}
	return packed.Over(ds), nil
}

// entry returns what computes k, or the same that is kept.
func (c *packingCache) entry(k keptPacking) func() (*loader.Packed, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if i := slices.IndexFunc(c.list, func(o keptPacking) bool { return o.key == k.key }); i >= 0 {
		k = c.list[i]
		c.list = slices.Delete(c.list, i, i+1)
	}
	c.list = append(c.list, k)
	c.list = c.list[max(len(c.list)-keptPackings, 0):]
	return k.packed
}
