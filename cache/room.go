package cache

import (
	"context"
	"math"
)

// maxFetch bounds how much of a just opened file is read from the disk: the READ that follows asks for no more.
const maxFetch = 512 << 10

// WillRead says that the file was opened and is about to be read from its start. It loads what the disk has of that
// into memory meanwhile.
func (v *Volume) WillRead(file int) {
	if v.Extents(file) == 0 {
		return
	}
	if k := v.keptRecord(file, 0); k.d != nil && !v.key(k.e).maybe() {
		k.d.store.Fetch(k.loc, min(k.n, maxFetch))
	}
}

// DiskRoom returns how many bytes more of the volume's dataset fit on disk, with what goes for them; 0 without a disk.
func (v *Volume) DiskRoom() int64 {
	d := v.ds.readable()
	if d == nil {
		return 0
	}
	room, yields := int64(math.MaxInt64), int64(0)
	if a := v.admission.Load(); a != nil && a.yields {
		yields = a.outside.Load()
	}
	if limit := d.limit.Load(); limit > 0 {
		room = limit - d.used.Load() + yields
	}
	if b := v.c.budget; b != nil {
		room = min(room, b.Limit()-b.Used()+yields)
	}
	return max(room, 0)
}

// Flush waits until all fetched extents of the volume's dataset are on disk or were declined.
func (v *Volume) Flush(ctx context.Context) error {
	d := v.ds.disk.Load()
	if d == nil {
		return nil
	}
	return d.writer.do(ctx, func() {})
}

// PrefetchRoom returns how many bytes could be prefetched now.
func (c *Cache) PrefetchRoom() int64 {
	return max(c.ledger.room(ForPrefetch)+c.ring.idle(c.ledger.Limit()/againShare), 0)
}
