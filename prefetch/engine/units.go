package engine

import (
	"github.com/shoalfs/shoal/cache"
	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/cache/owner"
)

// units returns the unit of each extent, of which an owner's bucket is made: a run of a shard, or an extent of a
// version of a file. It stays the same when the dataset is listed again.
func units(m *catalog.Manifest, l *catalog.Layout) func(file, extent int) uint64 {
	if l != nil {
		run := make([]func(int64) uint64, l.Shards())
		for i := range run {
			unit, length := owner.ShardUnits(l.Shard(i).Key), runOf(l.Shard(i))
			run[i] = func(off int64) uint64 { return unit(off / length) }
		}
		return func(file, extent int) uint64 {
			shard, off := l.Where(file)
			return run[shard](off + int64(extent)*cache.ExtentSize)
		}
	}
	return func(file, extent int) uint64 {
		id := m.ID(file)
		return id.Uint64() + uint64(extent)
	}
}

// Source names the dataset for owners, in all its versions.
func (d *Dataset) Source() [16]byte { return d.e.dataset }

// Units returns the units of the samples' first extents.
func (d *Dataset) Units() func(sample int) uint64 {
	unit := units(d.v.manifest, d.v.layout)
	return func(sample int) uint64 { return unit(d.v.samples.File(sample), 0) }
}
