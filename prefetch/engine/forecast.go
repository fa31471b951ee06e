package engine

import (
	"github.com/shoalfs/shoal/prefetch"
	"github.com/shoalfs/shoal/prefetch/order"
)

// Forecast is a prediction's input about a dataset, by file number, as in streams. It is valid until the engine ends.
type Forecast struct {
	Files   int
	Samples int
	Bytes   int64
	Read    int64 // bytes of the samples
	Memory  int64 // the daemon's memory for samples
	Sizes   prefetch.Sizes
	Places  prefetch.Places // nil where each file is an object of its own
	Key     func(file int) uint64

	v *view
}

// Forecast returns the Forecast of the version in force.
func (e *Engine) Forecast() Forecast {
	v := e.cur.Load()
	f := Forecast{
		Files: v.manifest.Len(), Samples: v.samples.Len(), Bytes: v.manifest.Bytes(), Memory: e.cache.Ledger().Limit(),
		Sizes: v.volume, Key: keepKey(v.manifest, v.layout), v: v,
	}
	for sample := range f.Samples {
		f.Read += v.manifest.Size(v.samples.File(sample))
	}
	if v.layout != nil {
		f.Places = v.layout
	}
	return f
}

// Order returns the order of spec for an epoch, over file numbers.
func (f Forecast) Order(spec order.Spec, epoch int) (order.Order, error) {
	o, err := spec.Over(f.v.facts(), epoch)
	if err != nil {
		return nil, err
	}
	return filesOf(o, f.v.samples), nil
}
