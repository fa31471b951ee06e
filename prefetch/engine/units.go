package engine

import (
	"github.com/shoalfs/shoal/cache"
	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/cache/owner"
)

// units returns the unit of each extent: what a node of a cluster owns. It is what the kept set is chosen by (keepKey), named so
// that it stays the same when the dataset is listed again.
func units(m *catalog.Manifest, l *catalog.Layout) func(file, extent int) uint64 {
	if l != nil {
		return func(file, extent int) uint64 {
			shard, off := l.Locate(file)
			return owner.ShardUnit(shard.Key, (off+int64(extent)*cache.ExtentSize)/keepRun)
		}
	}
	return func(file, extent int) uint64 { return owner.FileUnit(m.PathHash(file), extent) }
}

// Source names the dataset for owners, in all its versions.
func (d *Dataset) Source() [16]byte { return d.e.dataset }

// Unit returns the unit of a sample's first extent.
func (d *Dataset) Unit(sample int) uint64 {
	return units(d.v.manifest, d.v.layout)(d.v.samples.File(sample), 0)
}
