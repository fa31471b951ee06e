package cache

import "github.com/shoalfs/shoal/cache/segment"

// Place returns where the bytes of a whole file lie on disk, in one piece and verified, for readers in other processes. They stay
// right: for another version of the file there is another volume. With check it verifies what is in memory.
func (v *Volume) Place(file int, check bool) (segment.Place, bool) {
	d := v.ds.readable()
	if d == nil || v.Extents(file) != 1 {
		return segment.Place{}, false
	}
	loc, coded := v.at(v.extent(file, 0))
	if loc == 0 || coded > 0 {
		return segment.Place{}, false
	}
	return d.store.Place(loc, int(v.m.Size(file)), check)
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
