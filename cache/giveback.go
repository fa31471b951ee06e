package cache

import (
	"cmp"
	"errors"
	"slices"
	"sync/atomic"

	humanize "github.com/dustin/go-humanize"

	"github.com/shoalfs/shoal/cache/segment"
)

// owner is the place of a record in a volume.
type owner struct {
	v      *Volume
	extent uint32
	file   int
}

// GiveBack makes the segments under dir, of a dataset that is not open, smaller by need bytes, by the rule of the
// package comment, and returns how many segments that cost. o has no Budget: the caller counts what is left.
func (c *Cache) GiveBack(dir string, o segment.Options, need int64) (segments int, err error) {
	d := &disk{c: c, dir: dir, fs: o.FS}
	if d.store, err = segment.Open(dir, o, nil); err != nil {
		return 0, err
	}
	segments, _, err = d.giveBack(need, nil)
	return segments, errors.Join(err, d.store.Close())
}

// shrink gives back what exceeds the quota and the budget of all datasets. For the budget the sequence is: this
// dataset's data outside its kept set, datasets that are not open, this dataset's kept set.
func (d *disk) shrink(volumes []*Volume) error {
	var segments int
	var bytes int64
	give := func(need int64) error {
		if need <= 0 {
			return nil
		}
		n, freed, err := d.giveBack(need, volumes)
		segments, bytes = segments+n, bytes+freed
		return err
	}
	overBudget := func() int64 {
		if b := d.c.budget; b != nil {
			return b.Used() - b.Limit()
		}
		return 0
	}
	over := int64(0)
	if limit := d.limit.Load(); limit > 0 {
		over = d.store.Used() - limit
	}
	if more := overBudget(); more > 0 {
		over = max(over, min(more, d.beside(volumes)))
	}
	err := give(over)
	if more := overBudget(); err == nil && more > 0 {
		d.askHost(more)
	}
	if err == nil {
		err = give(overBudget())
	}
	if segments > 0 {
		limit := d.limit.Load()
		if b := d.c.budget; b != nil && (limit == 0 || b.Limit() < limit) {
			limit = b.Limit()
		}
		d.c.log.Warn("cached data was dropped: it exceeded the limit (raise --cache-size, or the quota)", "source", d.ds.name,
			"gave_back", humanize.IBytes(uint64(bytes)), "segments", segments, "left", humanize.IBytes(uint64(d.store.Used())), "limit", humanize.IBytes(uint64(limit)))
	}
	return err
}

// giveBack frees need bytes of the store, or everything if it has less, by the rule of the package comment.
func (d *disk) giveBack(need int64, volumes []*Volume) (segments int, freed int64, err error) {
	wanted := d.wanted(volumes)
	segs := d.store.Segments()
	slices.SortStableFunc(segs, func(a, b segment.SegmentInfo) int { // the older first
		return cmp.Compare(float64(wanted[a.ID])/float64(a.Bytes), float64(wanted[b.ID])/float64(b.Bytes))
	})
	gone := make(map[uint32]bool)
	for _, s := range segs {
		if freed >= need || err != nil {
			break
		}
		d.progress()
		var n int64
		if spare := s.Bytes - (need - freed); spare > 0 {
			n, err = d.condense(s.ID, spare, volumes)
		} else {
			n, err = d.store.DropSegment(s.ID, nil)
		}
		gone[s.ID] = true
		segments, freed = segments+1, freed+n
	}
	for _, v := range volumes {
		v.forget(gone)
	}
	return segments, freed, err
}

// wanted returns the bytes of the kept set in each segment; all live bytes if nothing chooses a set.
func (d *disk) wanted(volumes []*Volume) map[uint32]int64 {
	wanted := make(map[uint32]int64)
	for _, v := range volumes {
		a := v.admission.Load()
		if a == nil {
			clear(wanted)
			volumes = nil
			break
		}
		for f := range v.m.Len() {
			for x := range v.Extents(f) {
				if loc := segment.Loc(v.loc(v.extent(f, x))); loc != 0 && a.admit(f, x) {
					wanted[loc.Segment()] += loc.Bytes(int(v.ExtentBytes(f, x)))
				}
			}
		}
	}
	if len(volumes) == 0 {
		for _, s := range d.store.Segments() {
			wanted[s.ID] = s.Live
		}
	}
	return wanted
}

// beside returns how many bytes of the store are outside the kept set.
func (d *disk) beside(volumes []*Volume) int64 {
	n, wanted := int64(0), d.wanted(volumes)
	for _, s := range d.store.Segments() {
		n += max(0, s.Live+s.Garbage-wanted[s.ID])
	}
	return n
}

// condense drops a segment except for spare bytes of it, kept set first. The volumes have yet to forget the rest.
func (d *disk) condense(id uint32, spare int64, volumes []*Volume) (freed int64, err error) {
	owners := make(map[segment.Loc][]owner)
	for _, v := range volumes {
		for e := range v.locs {
			if loc := segment.Loc(v.loc(uint32(e))); loc != 0 && loc.Segment() == id {
				owners[loc] = append(owners[loc], owner{v, uint32(e), v.fileOf(uint32(e))})
			}
		}
	}
	first := func(_ segment.Record, loc segment.Loc) bool {
		return slices.ContainsFunc(owners[loc], func(o owner) bool {
			a := o.v.admission.Load()
			return a == nil || a.admit(o.file, int(o.extent-o.v.extent(o.file, 0)))
		})
	}
	room, err := d.room() // the copies are written before the segment goes
	if err != nil {
		return 0, err
	}
	return d.store.Condense(id, min(spare, room), first, func(from, to segment.Loc) {
		d.progress()
		used := len(volumes) == 0
		for _, o := range owners[from] {
			used = atomic.CompareAndSwapUint64(&o.v.locs[o.extent], uint64(from), uint64(to)) || used
		}
		if !used { // a reader found it damaged meanwhile
			d.store.Free(to)
		}
	})
}

// progress tells the writer's watch, if there is one, that the disk answers.
func (d *disk) progress() {
	if d.writer != nil {
		d.watch.begin()
	}
}
