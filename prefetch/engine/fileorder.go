package engine

import (
	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/prefetch/order"
)

// filesOf maps an order over samples to one over files. It takes what order.Index does.
func filesOf(o order.Order, samples *catalog.Samples) order.Locator {
	return fileOrder{order.Index(o), samples}
}

type fileOrder struct {
	samples order.Locator
	view    *catalog.Samples
}

func (o fileOrder) Len() int { return o.samples.Len() }

func (o fileOrder) At(pos int) int { return o.view.File(o.samples.At(pos)) }

func (o fileOrder) Find(file, from int) int {
	sample, ok := o.view.Sample(file)
	if !ok {
		return -1
	}
	return o.samples.Find(sample, from)
}
