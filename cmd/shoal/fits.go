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
	"strings"
	"sync"

	"github.com/shoalfs/shoal/gpuingest"
	"github.com/shoalfs/shoal/loader"
	"github.com/shoalfs/shoal/prefetch/order"
)

// fitting lets one session compute a fit at a time: the others then find the result.
var fitting sync.Mutex

// fitTable gives a table's transform the statistics of the whole dataset: from the cache directory, or from one pass
// over the rows.
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
