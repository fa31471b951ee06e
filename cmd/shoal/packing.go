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
	list []*keptPacking // the last used one last
}

// keptPacking is computed once. A packing depends only on the spec and the sizes of the documents.
type keptPacking struct {
	spec      string
	documents int
	sizes     uint64 // their hash

	once   sync.Once
	packed *loader.Packed
	err    error
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
	k := c.entry(spec, ds.Len(), h.Sum64())
	k.once.Do(func() { k.packed, k.err = loader.Pack(ds, p.Length, p.Cut, p.Tokens) })
	if k.err != nil {
		return nil, k.err
	}
	return k.packed.Over(ds), nil
}

func (c *packingCache) entry(spec string, documents int, sizes uint64) *keptPacking {
	c.mu.Lock()
	defer c.mu.Unlock()
	k := &keptPacking{spec: spec, documents: documents, sizes: sizes}
	if i := slices.IndexFunc(c.list, func(o *keptPacking) bool {
		return o.spec == spec && o.documents == documents && o.sizes == sizes
	}); i >= 0 {
		k = c.list[i]
		c.list = slices.Delete(c.list, i, i+1)
	}
	c.list = append(c.list, k)
	if len(c.list) > keptPackings {
		c.list = slices.Delete(c.list, 0, 1)
	}
	return k
}
