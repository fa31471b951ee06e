package cache

import (
	"math"

	"github.com/shoalfs/shoal/cache/segment"
)

// adoption makes the records found on disk resident, if the volume's manifest still names them.
//
// A record table notes the number that the file had when the record was written. If the manifest has the same version
// of the object under that number, one comparison is enough. All other records (files that moved in the order,
// records that no table covers) are looked up together, in one pass over the manifest after all tables were read.
// Records not found stay unclaimed.
type adoption struct {
	v         *Volume
	moved     []movedRecord
	unclaimed []segment.Loc
}

type movedRecord struct {
	loc    segment.Loc
	id     segment.VersionID
	extent uint32
	length uint32
	next   uint32 // of the same version, as an index in moved + 1
}

func (a *adoption) visit(x segment.Extent, loc segment.Loc) {
	extent := x.Offset / ExtentSize
	switch {
	case x.Dataset != a.v.ds.id || x.Offset%ExtentSize != 0 || extent > math.MaxUint32:
		a.unclaimed = append(a.unclaimed, loc)
	case int64(x.File) < int64(a.v.m.Len()) && a.v.m.ID(int(x.File)) == x.ID:
		a.take(int(x.File), int(extent), loc, x.Length)
	default:
		a.moved = append(a.moved, movedRecord{loc: loc, id: x.ID, extent: uint32(extent), length: uint32(x.Length)})
	}
}

// take makes a record of the file resident. The volume is not in use yet. Of a plain record and a coded one the coded one
// stays: the other was to be given up when the process ended.
func (a *adoption) take(file, x int, loc segment.Loc, length int) {
	v, coded := a.v, 0
	if v.codec != nil && v.Extents(file) == 1 && x == 0 && int64(length) < v.m.Size(file) {
		coded = length
	}
	if x >= v.Extents(file) || coded == 0 && length != int(v.ExtentBytes(file, x)) {
		a.unclaimed = append(a.unclaimed, loc)
		return
	}
	e := v.extent(file, x)
	if before, was := v.at(e); before == 0 || was == 0 && coded > 0 {
		v.move(e, before, loc, coded)
		loc = before
	}
	if loc != 0 {
		a.unclaimed = append(a.unclaimed, loc)
	}
}

// finish looks up the records that were not where their hint says. It returns those that belong to no file.
func (a *adoption) finish() []segment.Loc {
	if len(a.moved) == 0 {
		return a.unclaimed
	}
	first := make(map[segment.VersionID]uint32, len(a.moved)) // the first of the records of a version, as an index in moved + 1
	// Of two records of an extent the older stays: the other is a copy made when a crash came, with others in its segment.
	for i := len(a.moved) - 1; i >= 0; i-- {
		id := a.moved[i].id
		a.moved[i].next, first[id] = first[id], uint32(i+1)
	}
	for f := range a.v.m.Len() {
		for i := first[a.v.m.ID(f)]; i != 0; i = a.moved[i-1].next {
			r := &a.moved[i-1]
			a.take(f, int(r.extent), r.loc, int(r.length))
			r.loc = 0
		}
	}
	for _, r := range a.moved {
		if r.loc != 0 {
			a.unclaimed = append(a.unclaimed, r.loc)
		}
	}
	return a.unclaimed
}
