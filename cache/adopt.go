package cache

import (
	"math"

	"github.com/shoalfs/shoal/cache/segment"
)

// adoption makes the records found on disk resident, if the volume's manifest still names them.
//
// A record table notes the number that the file had when the record was written. If the manifest has the same version
// of the object under that number, one comparison is enough. All others (files that moved in the order, records that no
// table covers) are looked up together, in one pass over the manifest after all tables. Those not found stay unclaimed.
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

// take makes a record of the file resident. The volume is not in use yet. Of several the last stays: the others were
// given up, since they were damaged, recoded, could not be restored, or were copied to be dropped.
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
	if before, _ := v.at(e); loc > before {
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
	files := make(map[segment.VersionID]uint32, len(a.moved)) // the number of each version, and 1
	for _, r := range a.moved {
		files[r.id] = 0
	}
	for f := range a.v.m.Len() {
		id := a.v.m.ID(f)
		if _, sought := files[id]; sought {
			files[id] = uint32(f + 1)
		}
	}
	for _, r := range a.moved {
		if f := files[r.id]; f > 0 {
			a.take(int(f-1), int(r.extent), r.loc, int(r.length))
		} else {
			a.unclaimed = append(a.unclaimed, r.loc)
		}
	}
	return a.unclaimed
}
