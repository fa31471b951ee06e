package main

import (
	"slices"
	"sync"

	"github.com/shoalfs/shoal/gpuingest"
	"github.com/shoalfs/shoal/loader"
)

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
