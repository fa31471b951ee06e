package cache

import "github.com/shoalfs/shoal/cache/segment"

// Place returns where the bytes of a whole file lie on disk, in one piece and verified, for readers in other processes. They stay
// right: for another version of the file there is another volume. With check it verifies what is in memory.
func (v *Volume) Place(file int, check bool) (segment.Place, bool) {
	if v.Extents(file) != 1 {
		return segment.Place{}, false
	}
	k := v.keptRecord(file, 0)
	if k.d == nil || k.coded {
		return segment.Place{}, false
	}
	return k.d.store.Place(k.loc, k.n, check)
}

// Damaged returns how many records of the dataset were found damaged so far. Places that were given before may be of one.
func (v *Volume) Damaged() int64 { return v.ds.count.corrupt.Load() }

// SegmentDir returns the folder of the segments, or "" if there are none.
func (v *Volume) SegmentDir() string {
	if d := v.ds.readable(); d != nil {
		return d.dir
	}
	return ""
}
