package cache

import (
	"cmp"
	"errors"
	"math"
	"slices"

	humanize "github.com/dustin/go-humanize"

	"github.com/shoalfs/shoal/cache/segment"
)

// GiveBack makes the segments under dir, of a dataset that is not open, smaller by need bytes, by the rule of the
// package comment, and returns how many segments that cost. o has no Budget: the caller counts what is left.
func (c *Cache) GiveBack(dir string, o segment.Options, need int64) (segments int, err error) {
	d := &disk{c: c, ds: &dataset{c: c}, dir: dir}
	if d.store, err = segment.Open(dir, o, nil); err != nil {
		return 0, err
	}
	segments, _, err = d.giveBack(need)
	return segments, errors.Join(err, d.store.Close())
}

// over returns by how much n bytes more would exceed the budget of all datasets; 0 or less if they would not.
func (c *Cache) over(n int64) int64 {
	limit := cmp.Or(c.budget.Limit(), math.MaxInt64/2) // who subtracts from it does not overflow
	return c.budget.Used() + n - limit
}

// shrink gives back what exceeds the quota and the budget of all datasets. For the budget the sequence is: this
// dataset's data outside its kept set, datasets that are not open, this dataset's kept set.
func (d *disk) shrink() error {
	segments, bytes := 0, int64(0)
	give := func(need int64) error {
		if need <= 0 {
			return nil
		}
		n, freed, err := d.giveBack(need)
		segments, bytes = segments+n, bytes+freed
		return err
	}
	over, limit := int64(0), d.limit.Load()
	if limit > 0 {
		over = d.store.Used() - limit
	}
	if more := d.c.over(0); more > 0 {
		beside := int64(0)
		for _, s := range d.survey() {
			beside += max(0, s.Live+s.Garbage-s.wanted)
		}
		over = max(over, min(more, beside))
	}
	err := give(over)
	if more := d.c.over(0); err == nil && more > 0 {
		d.askHost(more)
		err = give(d.c.over(0))
	}
	if segments > 0 {
		if b := d.c.budget.Limit(); limit == 0 || b > 0 && b < limit {
			limit = b
		}
		d.c.log.Warn("cached data was dropped: it exceeded the limit (raise --cache-size, or the quota)",
			"source", d.ds.name, "gave_back", humanize.IBytes(uint64(bytes)), "segments", segments,
			"left", humanize.IBytes(uint64(d.store.Used())), "limit", humanize.IBytes(uint64(limit)))
	}
	return err
}

// giveBack frees need bytes of the store, or everything if it has less, by the rule of the package comment. segments
// are those that it dropped for them after what is outside the set was not enough.
func (d *disk) giveBack(need int64) (segments int, freed int64, err error) {
	for _, v := range d.ds.list() {
		freed += d.emptySlots(v, nil)
	}
	more, err := d.evict(need - freed)
	if freed += more; err != nil || freed >= need {
		return 0, freed, err
	}
	segs := d.survey()
	// the older first
	slices.SortStableFunc(segs, func(a, b share) int { return cmp.Compare(a.of(a.wanted), b.of(b.wanted)) })
	for _, s := range segs {
		if freed >= need || err != nil {
			break
		}
		d.progress()
		var n int64
		if spare := s.Bytes - (need - freed); spare > 0 {
			n, err = d.condense(s.ID, d.owners(s.ID), spare)
		} else {
			n, err = d.store.DropSegment(s.ID)
		}
		segments, freed = segments+1, freed+n
	}
	d.forget()
	return segments, freed, err
}

// share is a segment, and how many bytes of it are of the kept set.
type share struct {
	segment.SegmentInfo
	wanted int64
}

func (s share) of(n int64) float64 { return float64(n) / float64(s.Bytes) }

// survey returns the segments. If nothing chooses a set, all that is live is of it.
func (d *disk) survey() (all []share) {
	volumes := d.ds.list()
	chosen, wanted := len(volumes) > 0, make(map[uint32]int64)
	for _, v := range volumes {
		chosen = chosen && v.admission.Load() != nil
	}
	for i := 0; chosen && i < len(volumes); i++ {
		v := volumes[i]
		for f := range v.m.Len() {
			if f%(1<<16) == 0 {
				d.progress() // of a large version it may take seconds
			}
			for x := range v.Extents(f) {
				if k := v.key(f, x).record(f); k.loc != 0 && v.Chooses(f, x) {
					wanted[k.loc.Segment()] += k.loc.Bytes(k.n)
				}
			}
		}
	}
	for _, s := range d.store.Segments() {
		one := share{s, s.Live}
		if chosen {
			one.wanted = wanted[s.ID]
		}
		all = append(all, one)
	}
	return all
}

// owners are the extents that a segment's records are of, in the latest version that has them; nil if none is open.
type owners map[segment.Loc]extentKey

func (d *disk) owners(id uint32) (in owners) {
	for _, v := range d.ds.list() {
		if in == nil {
			in = make(owners)
		}
		for e := range v.locs {
			if loc, _ := v.at(uint32(e)); loc != 0 && loc.Segment() == id {
				in[loc] = extentKey{v, piece(e) << 8}
			}
		}
	}
	return in
}

func (in owners) wants(loc segment.Loc) bool {
	k, ok := in[loc]
	return ok && k.v.Chooses(k.v.Numbered(int(k.extent())))
}

// condense drops a segment but for spare bytes of it, kept set first. The places of the rest are yet to be forgotten.
func (d *disk) condense(id uint32, in owners, spare int64) (freed int64, err error) {
	room, err := d.room() // the copies are written before the segment goes
	if err != nil {
		return 0, err
	}
	first := func(_ segment.Record, loc segment.Loc) bool {
		d.progress() // a header was read
		return in.wants(loc)
	}
	return d.store.Condense(id, min(spare, room), first, func(from, to segment.Loc) {
		d.progress()
		// a reader, or a verification, found it damaged meanwhile
		if k, ok := in[from]; in != nil && (!ok || !k.moved(from, to, 0)) {
			_ = d.store.Void(to) // so that it does not come back; if that fails, it is freed
		}
	})
}

// moved says that the record of an extent at from has a copy at to, or its other form: coded, of so many bytes, or
// isPlain. Every version that has the record gets that instead, also one that inherits meanwhile. It reports whether
// there is any.
func (k extentKey) moved(from, to segment.Loc, coded int) (used bool) {
	file, x := k.v.Numbered(int(k.extent()))
	path, ds := k.v.m.Path(file), k.v.ds
	ds.moving.Lock()
	defer ds.moving.Unlock()
	for _, v := range ds.list() {
		node, ok := v.m.Find(path)
		if !ok || node.IsDir || x >= v.Extents(node.Index) || coded > 0 && v.codec == nil {
			continue
		}
		e := v.extent(node.Index, x)
		_, was := v.at(e)
		used = v.move(e, from, to, cmp.Or(coded, was)) || used
	}
	return used
}

// leastOutside is the part of a segment outside the set from which it is rewritten for the room. Whatever the share, a
// change of owners writes the cache once at most: what is written anew is of the set. Below this a record's room would
// cost more than 30 of it, for a thirtieth of the cache.
const leastOutside = 1.0 / 32

// evict frees some more than n bytes, if what is outside the set yields so much (see [Volume.SetOwned]), and returns
// how many. It costs nothing if none is left since owners changed: every extent that finds the store full comes here.
func (d *disk) evict(n int64) (freed int64, err error) {
	for _, v := range d.ds.list() {
		if a := v.admission.Load(); a == nil || !a.yields {
			return 0, nil
		}
	}
	if d.chosen.Swap(false) {
		outside := func(s share) float64 { return s.of(s.Live - s.wanted) }
		d.outside = slices.DeleteFunc(d.survey(), func(s share) bool { return outside(s) < leastOutside })
		slices.SortStableFunc(d.outside, func(a, b share) int { return cmp.Compare(outside(a), outside(b)) })
	}
	rest := d.outside
	for last := len(rest) - 1; err == nil && last >= 0 && freed < n+overhead; last-- {
		d.progress()
		more, e := d.rewrite(rest[last].ID, false)
		if err = e; err == nil {
			d.outside, freed = rest[:last], freed+more
		}
	}
	if errors.Is(err, errNoRoom) {
		err = nil
	}
	if len(d.outside) < len(rest) || err != nil {
		d.forget()
	}
	return freed, err
}

// purge rewrites a segment without what is not live, and reports whether it did.
func (d *disk) purge(id uint32) bool {
	defer d.forget()
	_, err := d.rewrite(id, true)
	if !errors.Is(err, errNoRoom) {
		d.heed("reclaim", err)
	}
	return err == nil
}

// rewrite drops a segment; what it holds of the sets, or all that is live, is written anew, and the places of the rest
// are still to be forgotten. If the disk has no room it fails with errNoRoom: no part of the set is given up for it.
func (d *disk) rewrite(id uint32, all bool) (freed int64, err error) {
	in := d.owners(id)
	wanted := int64(overhead)
	for loc, k := range in {
		if all || in.wants(loc) {
			wanted += loc.Bytes(k.record(k.v.fileOf(k.extent())).n)
		}
	}
	if err := d.checkSpace(wanted); err != nil {
		return 0, err
	}
	return d.condense(id, in, wanted)
}

// progress tells the writer's watch, if there is one, that the disk answers, or is not waited for. What was reported
// counts as hanging until its end.
func (d *disk) progress() {
	if d.writer != nil && d.late.Stop() {
		d.begin()
	}
}
