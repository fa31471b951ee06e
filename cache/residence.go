package cache

import (
	"math"
	"sync/atomic"

	"github.com/shoalfs/shoal/cache/segment"
)

// Residence is where bytes are.
type Residence uint8

// The places, from far to near.
const (
	InStore  Residence = iota // to be fetched
	OnWay                     // being fetched
	InMemory                  // staged in the ring
	OnDisk                    // kept
)

// Residence returns where the file is; of several extents, the farthest place.
func (v *Volume) Residence(file int) Residence {
	where := OnDisk
	for x := 0; x < v.Extents(file) && where > InStore; x++ {
		if !v.KeptExtent(file, x) {
			where = min(where, v.Where(file, x))
		}
	}
	return where
}

// Where tells where a read of the extent would find it now, in memory first. It may move at any moment.
func (v *Volume) Where(file, x int) Residence { return v.WhereRange(Range{File: file, Extent: x}) }

// where looks in the order in which a piece moves on. The volume's lock is held.
func (k extentKey) where() Residence {
	if k.v.flights[k.piece] != nil {
		return OnWay
	}
	return k.staged()
}

// staged looks in memory and on disk; for a granule the volume's lock is held.
func (k extentKey) staged() Residence {
	plain, isCoded := k.v.c.ring.forms(k)
	switch {
	case plain || isCoded:
		return InMemory
	case k.onDisk():
		return OnDisk
	}
	return InStore
}

// here reports whether a piece is here or on its way. The volume's lock is held.
func (k extentKey) here() bool { return k.where() > InStore }

// onDisk reports whether a piece can be read from the disk; for a granule the volume's lock is held.
func (k extentKey) onDisk() bool {
	if k.isGranule() {
		return k.granuleOnDisk().d != nil
	}
	return k.v.loc(k.extent()) != 0 && k.v.ds.readable() != nil
}

// KeptExtent reports whether the extent is on disk.
func (v *Volume) KeptExtent(file, x int) bool { return v.key(file, x).onDisk() }

// Place returns where the bytes of a whole file lie on disk, in one piece and verified, for readers in other processes.
// They stay right: for another version of the file there is another volume. With check it verifies what is in memory.
func (v *Volume) Place(file int, check bool) (segment.Place, bool) {
	if v.Extents(file) != 1 {
		return segment.Place{}, false
	}
	k := v.key(file, 0).record(file)
	if k.d == nil || k.coded {
		return segment.Place{}, false
	}
	return k.d.store.Place(k.loc, k.n, check)
}

// Damaged returns how many records of the dataset were found damaged. Places that were given before may be of one.
func (v *Volume) Damaged() int64 { return atomic.LoadInt64(&v.ds.count.Corrupt) }

// SegmentDir returns the folder of the segments, or "" if there are none.
func (v *Volume) SegmentDir() string {
	if d := v.ds.readable(); d != nil {
		return d.dir
	}
	return ""
}

// maxFetch bounds how much of a just opened file is read from the disk: the READ that follows asks for no more.
const maxFetch = 512 << 10

// WillRead says that the file is about to be read from its start. Meanwhile it loads what the disk has of that.
func (v *Volume) WillRead(file int) {
	if v.Extents(file) == 0 {
		return
	}
	if k := v.key(file, 0).record(file); k.d != nil && !k.maybe() {
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
		room = limit - d.store.Used() + yields
	}
	return max(min(room, yields-v.c.over(0)), 0)
}
