package engine

import (
	"github.com/shoalfs/shoal/prefetch"
	"github.com/shoalfs/shoal/prefetch/order"
	"github.com/shoalfs/shoal/prefetch/run"
)

// Forecast is what a prediction needs to know of a dataset, by file number, as streams go. It is valid until
// the engine is closed.
type Forecast struct {
	Files   int
	Samples int
	Bytes   int64
	Memory  int64 // for samples, of the daemon's
	Sizes   prefetch.Sizes
	Places  prefetch.Places // nil where each file is an object of its own
	Key     func(file int) uint64

	v *view
}

// Forecast returns it for the version in force.
func (e *Engine) Forecast() Forecast {
	v := e.cur.Load()
	f := Forecast{
		Files: v.manifest.Len(), Samples: v.samples.Len(), Bytes: v.manifest.Bytes(), Memory: e.cache.Ledger().Limit(),
		Sizes: v.volume, Key: keepKey(v.manifest, v.layout), v: v,
	}
	if v.layout != nil {
		f.Places = run.Packed(v.layout, v.volume)
	}
	return f
}

// Order returns what spec says for an epoch, over file numbers.
func (f Forecast) Order(spec order.Spec, epoch int) (order.Order, error) {
	o, err := f.v.orderOf(spec, epoch)
	if err != nil {
		return nil, err
	}
	return fileOrder{o, f.v.samples}, nil
}
