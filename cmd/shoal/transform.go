package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/shoalfs/shoal/gpuingest"
	"github.com/shoalfs/shoal/loader"
	"github.com/shoalfs/shoal/prefetch/order"
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

// fitting lets one session compute a fit at a time: the others then find the result.
var fitting sync.Mutex

// fitTable gives a table's transform the statistics of all rows: the cache directory's, or those of one pass.
func fitTable(ctx context.Context, t *gpuingest.Table, ds feedDataset) (_ *gpuingest.Table, err error) {
	var header []byte
	var path string
	if ds.Len() > 0 {
		if header, path, err = ds.Columns(ctx); err != nil {
			return nil, err
		}
	}
	if header == nil {
		return nil, errors.New("the dataset's samples are not rows of a table: serve .csv or .tsv with --samples rows")
	}
	sum := sha256.Sum256([]byte(ds.Selection() + "\x00" + t.String()))
	name := hex.EncodeToString(sum[:]) + ".json"
	file := filepath.Join(ds.FitsDir(), name)
	fitting.Lock()
	defer fitting.Unlock()
	if b, err := os.ReadFile(file); err == nil {
		b, _ = ds.OpenFit(name, b) // nil if it is damaged: it is computed again
		if fit, err := gpuingest.ParseFit(b); err == nil && fit.Dataset == ds.Version() {
			if fitted, err := t.With(fit); err == nil {
				return fitted, nil
			}
		}
	}
	comma := byte(',')
	if strings.EqualFold(filepath.Ext(path), ".tsv") {
		comma = '\t'
	}
	fitter, err := t.Fitter(ds.Version(), header, comma)
	if err != nil {
		return nil, err
	}
	if err := eachSample(ctx, ds, "fit/"+hex.EncodeToString(sum[:6]), fitter.Add); err != nil {
		return nil, err
	}
	fit, err := fitter.Fit()
	if err != nil {
		return nil, err
	}
	if err = os.MkdirAll(ds.FitsDir(), 0o700); err == nil {
		err = writeWhole(file, ds.SealFit(name, fit.JSON()))
	}
	if err != nil {
		slog.Warn("a table's fit was not saved; the next session computes it again", "cause", err)
	}
	return t.With(fit)
}

// eachSample reads a dataset once, in stored order.
func eachSample(ctx context.Context, ds loader.Dataset, name string, f func(data []byte) error) (err error) {
	s, err := ds.Begin(name, order.Sequential(ds.Len()), 0, 1)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	for i := range ds.Len() {
		data, release, err := s.Read(ctx, i)
		if err != nil {
			return fmt.Errorf("sample %d (%s): %w", i, ds.Path(i), err)
		}
		err = f(data)
		release()
		if err != nil {
			return err
		}
	}
	return nil
}
