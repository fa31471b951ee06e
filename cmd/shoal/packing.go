package main

import (
	"context"
	"encoding/binary"
	"slices"
	"sync"

	"github.com/cespare/xxhash/v2"

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

// keptPacking is computed once. A packing depends only on the spec and the sizes of the documents, of which it has a hash.
type keptPacking struct {
	spec      string
	documents int
	sizes     uint64
	packed    func() (*loader.Packed, error)
}

// of packs the dataset, or returns a kept packing.
func (c *packingCache) of(ctx context.Context, ds loader.Dataset, spec string, p gpuingest.Packing) (*loader.Packed, error) {
	h := xxhash.New()
	var b [8]byte
	for i := range ds.Len() {
		if i%(1<<20) == 0 && ctx.Err() != nil {
			return nil, ctx.Err()
		}
		binary.LittleEndian.PutUint64(b[:], uint64(ds.Size(i)))
		_, _ = h.Write(b[:]) // never fails
	}
	packed, err := c.entry(keptPacking{spec, ds.Len(), h.Sum64(), sync.OnceValues(func() (*loader.Packed, error) {
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
	if i := slices.IndexFunc(c.list, func(o keptPacking) bool {
		return o.spec == k.spec && o.documents == k.documents && o.sizes == k.sizes
	}); i >= 0 {
		k = c.list[i]
		c.list = slices.Delete(c.list, i, i+1)
	}
	c.list = append(c.list, k)
	c.list = c.list[max(len(c.list)-keptPackings, 0):]
	return k.packed
}
