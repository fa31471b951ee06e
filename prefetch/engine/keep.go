package engine

import (
	"math"
	"sync"
	"sync/atomic"

	"github.com/shoalfs/shoal/cache"
	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/cache/owner"
	"github.com/shoalfs/shoal/cache/segment"
	"github.com/shoalfs/shoal/cache/shard"
	"github.com/shoalfs/shoal/prefetch"
	"github.com/shoalfs/shoal/prefetch/order"
)

// keeping chooses which files of a version are kept if not all fit on the disk: among the files in use, which are
// those of an order and those that were opened. Before there is an order all files count. It chooses again when an
// order begins, and when its reader has finished an epoch, and so has opened all other files that it needs. In a
// cluster it chooses among all files, since others read them, and of these what the node owns.
type keeping struct {
	e *Engine
	v *view

	mu    sync.Mutex      // held while it is chosen
	owned owner.Set       // the buckets that the node owns; nil: no cluster
	read  []atomic.Uint32 // a bit a file; nil while all fit
	some  atomic.Bool     // an order has begun
	// the threshold from which others can tell, by prefetch.Admits, which buckets the node keeps of those that it owns
	below atomic.Uint64
}

func newKeeping(e *Engine, v *view) *keeping {
	k := &keeping{e: e, v: v}
	if v.manifest.Bytes() >= k.capacity()*9/10 {
		k.read = make([]atomic.Uint32, (v.manifest.Len()+31)/32)
		if v.layout != nil && v.layout.Chunk > 0 {
			e.log.Warn("not all rows fit into the cache: a full shuffle decodes a chunk for each of the others",
				"bytes", v.manifest.Bytes(), "cache", k.capacity(), "chunk", v.layout.Chunk,
				"remedy", "a larger --cache-size, more nodes, or an order such as windowed:seed=1,window=4")
		}
	}
	return k
}

func (k *keeping) Opened(file int) {
	if bit := uint32(1) << (file % 32); k.read != nil && k.read[file/32].Load()&bit == 0 {
		k.read[file/32].Or(bit)
	}
}

// Choose implements run.Keep: it chooses again. It takes some 100 ns per file.
func (k *keeping) Choose(o order.Order) {
	if k.read == nil {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if o != nil {
		for pos := range o.Len() {
			k.Opened(o.At(pos))
		}
		k.some.Store(true)
	}
	if k.owned == nil {
		k.v.volume.SetAdmit(k.admit())
	}
}

// own says which buckets the node owns, as one of a cluster. It chooses again.
func (k *keeping) own(owned owner.Set) {
	k.mu.Lock()
	k.owned = owned
	k.mu.Unlock()
	k.again()
}

// again chooses again, for a capacity that may have changed. It takes some 20 ns an extent.
func (k *keeping) again() {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.owned == nil {
		k.v.volume.SetAdmit(k.admit())
		return
	}
	v, unit, owned := k.v.volume, units(k.v.manifest, k.v.layout), k.owned
	sums, counts, given := make([]int64, owner.Buckets), make([]int, owner.Buckets), 0
	for file := range k.v.manifest.Len() {
		for x := range v.Extents(file) {
			if b := owner.Bucket(unit(file, x)); owned.Has(b) {
				sums[b] += k.onDisk(v.ExtentBytes(file, x))
				counts[b]++
			}
		}
	}
	below := prefetch.NewKeep(len(sums), func(b int) int64 { return sums[b] }, bucketKey, k.capacity()).Below()
	for b, n := range counts {
		if !prefetch.Admits(below, bucketKey(b)) {
			given += n
		}
	}
	v.SetGiven(given)
	v.SetOwned(func(file, x int) bool {
		b := owner.Bucket(unit(file, x))
		return owned.Has(b) && prefetch.Admits(below, bucketKey(b))
	})
	k.below.Store(below)
}

func (k *keeping) onDisk(n int64) int64 {
	return segment.RecordBytes(usualETag, int(n), k.e.host.Key != nil)
}

func (k *keeping) capacity() int64 {
	n := k.e.cache.Budget().Limit()
	if q := k.e.quota.Load(); q > 0 {
		n = min(n, q)
	}
	return n
}

// admit returns the choice; nil for all files.
func (k *keeping) admit() func(file, extent int) bool {
	m, capacity := k.v.manifest, k.capacity()
	if m.Bytes() < capacity*9/10 {
		return nil
	}
	// The choice is among the files in use now: those opened later wait for the next one.
	chosen := make([]uint32, (m.Len()+31)/32)
	known := k.read != nil && k.some.Load()
	for i := range chosen {
		if chosen[i] = math.MaxUint32; known {
			chosen[i] = k.read[i].Load()
		}
	}
	in := func(file int) bool { return chosen[file/32]>>(file%32)&1 != 0 }
	admit := keepOf(m, k.v.layout, capacity, func(file int) int64 {
		if !in(file) {
			return 0
		}
		whole, rest := m.Size(file)/cache.ExtentSize, m.Size(file)%cache.ExtentSize
		n := whole * k.onDisk(cache.ExtentSize)
		if rest > 0 {
			n += k.onDisk(rest)
		}
		return n
	})
	return func(file, _ int) bool { return in(file) && admit(file) }
}

// usualETag is the usual length of ETags of S3: an MD5 in hex and quotes, often with the number of parts.
const usualETag = 38

// runOf returns the run of a shard whose files are kept together or not at all: a request, or a chunk, if it has those.
func runOf(o objstore.Object) int64 { return max(prefetch.GroupBytes, shard.Run(o)) }

// keepOf chooses files of about capacity bytes, with the sizes of size, spread evenly over every order, and adjacent
// if they are in shards.
func keepOf(m *catalog.Manifest, l *catalog.Layout, capacity int64, size func(file int) int64) func(file int) bool {
	return prefetch.NewKeep(m.Len(), size, keepKey(m, l), capacity).Admit
}

// bucketKey is the key of a bucket in the choice of what a node of a cluster keeps.
func bucketKey(bucket int) uint64 { return uint64(bucket) }

// keepKey returns the key of a file in the choice of the kept set.
func keepKey(m *catalog.Manifest, l *catalog.Layout) func(file int) uint64 {
	if l != nil {
		return func(file int) uint64 {
			i, off := l.Where(file)
			return uint64(i)<<32 | uint64(off/runOf(l.Shard(i)))
		}
	}
	return func(file int) uint64 {
		id := m.ID(file)
		return id.Uint64()
	}
}
