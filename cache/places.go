package cache

import (
	"sort"
	"sync"
	"sync/atomic"

	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/cache/segment"
)

// places numbers the extents of a version, and knows where the kept record of each is, and which are to be kept. It
// costs 8 bytes an extent, and 4 more once a file is kept coded.
//
//   - A place is read without a lock. Two places of one extent are never confused: a reader that finds another record
//     than it expected has an error, and looks again.
//   - locs, kept and the counts of the admission change together, under mu.
type places struct {
	m     *catalog.Manifest
	codec Codec
	first []uint32     // number of each file's first extent; nil when no file has more than one
	locs  []uint64     // by extent: a segment.Loc with codedMark, 0 = not kept; atomic once the disk is attached
	kept  atomic.Int64 // extents kept
	coded codedFiles

	mu        sync.Mutex
	inherited bool // by a newer version, which would not hear of a new record; under mu
	admission atomic.Pointer[admission]
}

// codedMark is set in a Volume's places of coded records.
const codedMark = 1 << 63

// codedFiles is what a volume knows of its coded records.
type codedFiles struct {
	lengths              atomic.Pointer[[]uint32] // by extent; nil before the first
	files, before, after atomic.Int64             // kept so, their bytes, and the bytes of the records
}

func (c *codedFiles) count(sign int64, before int64, after int) {
	c.files.Add(sign)
	c.before.Add(sign * before)
	c.after.Add(sign * int64(after))
}

// admission chooses the kept set.
type admission struct {
	admit   func(file, extent int) bool
	yields  bool         // what is kept outside the set goes when the set needs its room
	counted uint32       // extents before this one are in the counts; under places.mu
	missing atomic.Int64 // extents of the set that are not kept
	outside atomic.Int64 // bytes kept outside the set
}

func (ps *places) number() {
	n := ps.m.Len()
	first, many := make([]uint32, n+1), false
	for f := range n {
		first[f+1] = first[f] + uint32(ps.Extents(f))
		many = many || ps.Extents(f) > 1
	}
	if many {
		ps.first, n = first, int(first[n])
	}
	ps.locs = make([]uint64, n)
}

// Manifest returns the version that the volume serves.
func (ps *places) Manifest() *catalog.Manifest { return ps.m }

// Extents implements prefetch.Sizes over file numbers.
func (ps *places) Extents(file int) int { return catalog.Extents(ps.m.Size(file)) }

// ExtentBytes implements prefetch.Sizes over file numbers.
func (ps *places) ExtentBytes(file, extent int) int64 {
	return min(ps.m.Size(file)-int64(extent)*ExtentSize, ExtentSize)
}

func (ps *places) extent(file, extent int) uint32 {
	if ps.first == nil {
		return uint32(file)
	}
	return ps.first[file] + uint32(extent)
}

// Numbered returns the file and the extent of a number among all of the version's extents.
func (ps *places) Numbered(n int) (file, x int) {
	file = ps.fileOf(uint32(n))
	return file, n - int(ps.extent(file, 0))
}

func (ps *places) fileOf(e uint32) int {
	if ps.first == nil {
		return int(e)
	}
	return sort.Search(ps.m.Len(), func(f int) bool { return ps.first[f+1] > e })
}

// bytes returns the length of a piece of the file.
func (ps *places) bytes(file int, p piece) int {
	n := ps.ExtentBytes(file, int(p.extent()-ps.extent(file, 0)))
	if p.kind() != whole && p.kind() != coded {
		n = min(n-p.off(), granuleSize)
	}
	return int(n)
}

// Kept returns how many of the volume's extents are on disk, and how many it has.
func (ps *places) Kept() (kept, extents int) { return int(ps.kept.Load()), len(ps.locs) }

// loc returns where the kept record of an extent is, a segment.Loc with codedMark if it is coded; 0 if it is not kept.
func (ps *places) loc(e uint32) uint64 { return atomic.LoadUint64(&ps.locs[e]) }

// at returns the place of an extent, and the length of its record if that is coded, else 0.
func (ps *places) at(e uint32) (loc segment.Loc, coded int) {
	at := ps.loc(e)
	if at&codedMark != 0 {
		coded = int(atomic.LoadUint32(&(*ps.coded.lengths.Load())[e]))
	}
	return segment.Loc(at &^ codedMark), coded
}

// put writes the place of an extent: mu is held, or the volume not in use yet. The length goes first: whoever sees the
// mark sees the length.
func (ps *places) put(e uint32, loc segment.Loc, coded int) {
	if _, n := ps.at(e); n > 0 {
		ps.coded.count(-1, ps.m.Size(ps.fileOf(e)), n)
	}
	if coded > 0 {
		if ps.coded.lengths.Load() == nil {
			ps.coded.lengths.Store(new(make([]uint32, len(ps.locs))))
		}
		atomic.StoreUint32(&(*ps.coded.lengths.Load())[e], uint32(coded))
		ps.coded.count(1, ps.m.Size(ps.fileOf(e)), coded)
		loc |= codedMark
	}
	atomic.StoreUint64(&ps.locs[e], uint64(loc))
}

// unplace forgets the place of an extent, if it is still loc.
func (ps *places) unplace(e uint32, loc segment.Loc) bool { return ps.move(e, loc, 0, 0) }

// move changes the place of an extent, if it is still from; 0 is none. coded is the length of a new coded record.
func (ps *places) move(e uint32, from, to segment.Loc, coded int) bool {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	if loc, _ := ps.at(e); loc != from || from == 0 && ps.inherited {
		return false
	}
	ps.put(e, to, coded)
	if from != 0 && to != 0 {
		return true
	}
	kept := int64(1)
	if to == 0 {
		kept = -1
	}
	ps.kept.Add(kept)
	if a := ps.admission.Load(); a != nil && e < a.counted {
		file, x := ps.Numbered(int(e))
		a.count(ps, file, x, kept)
	}
	return true
}

// forget drops the places of records that are gone.
func (ps *places) forget(gone func(loc segment.Loc) bool) {
	for e := range ps.locs {
		if loc, _ := ps.at(uint32(e)); loc != 0 && gone(loc) {
			ps.unplace(uint32(e), loc)
		}
	}
}

// choose puts an admission in force, and counts what it makes of the extents. It does so in steps, so that nobody waits
// for long who places an extent or forgets one.
func (ps *places) choose(a *admission) {
	a.missing.Store(1) // nothing beside the set is kept before all is counted
	ps.mu.Lock()
	ps.admission.Store(a)
	ps.mu.Unlock()
	for f := 0; f < ps.m.Len(); {
		ps.mu.Lock()
		for end := min(f+1024, ps.m.Len()); f < end; f++ {
			for x := range ps.Extents(f) {
				if a.admit(f, x) {
					a.missing.Add(1)
				}
				if ps.loc(ps.extent(f, x)) != 0 {
					a.count(ps, f, x, 1)
				}
			}
		}
		a.counted = ps.extent(f, 0)
		ps.mu.Unlock()
	}
	a.missing.Add(-1)
}

// Chooses reports whether an extent of the file is of the kept set.
func (ps *places) Chooses(file, x int) bool {
	a := ps.admission.Load()
	return a == nil || a.admit(file, x)
}

// wanted reports whether an extent of the file may be kept: it is of the set, or an extra beside the whole set.
func (ps *places) wanted(file, x int) bool {
	a := ps.admission.Load()
	return a == nil || a.admit(file, x) || a.missing.Load() == 0
}

// count notes that an extent was kept, which is 1 more, or -1.
func (a *admission) count(p *places, file, x int, kept int64) {
	if a.admit(file, x) {
		a.missing.Add(-kept)
	} else {
		a.outside.Add(kept * p.ExtentBytes(file, x))
	}
}
