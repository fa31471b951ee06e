package engine

import (
	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/prefetch/order"
)

// filesOf maps an order over samples to one over files. It can be searched without an index if the order can, like
// uniform; torch's is indexed by order.Index, in 4 bytes a file.
func filesOf(o order.Order, samples *catalog.Samples) order.Order {
	files := fileOrder{o, samples}
	if l, ok := o.(order.Locator); ok {
		return fileLocator{files, l}
	}
	return files
}

type fileOrder struct {
	samples order.Order
	view    *catalog.Samples
}

// Len implements order.Order.
func (o fileOrder) Len() int { return o.samples.Len() }

// At implements order.Order.
func (o fileOrder) At(pos int) int { return o.view.File(o.samples.At(pos)) }

type fileLocator struct {
	fileOrder
	by order.Locator
}

// Find implements order.Locator.
func (o fileLocator) Find(file, from int) int {
	sample, ok := o.view.Sample(file)
	if !ok {
		return -1
	}
	return o.by.Find(sample, from)
}
