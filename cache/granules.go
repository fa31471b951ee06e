package cache

import (
	"math"
	"math/bits"
	"time"
)

// Large files. A reader who jumps about in a file of several extents would fetch 4 MiB for each few KiB that it wants.
// So of such a file a reader fetches granules, as many as it asks for:
//
//   - A read that continues where others ended fetches twice as many granules as lie before it in one run, but at most
//     mostSparse, and none beyond its extent. So who reads a piece of 2 MiB fetches little more than that.
//   - A run of mostSparse granules or more that reaches the start of an extent fetches it whole. Who reads on then gets
//     up to mostAhead extents before it asks (readAhead).
//   - A read at the start of the file fetches its first extent: most readers go on from there.
//   - An extent that the disk would keep is fetched whole once a granule is fetched for the second time, or half of the
//     extent was, without the run that the read continues. So what is read often ends up on disk, and costs at most
//     twice its extents.
//   - What an order of files needs next is fetched in whole extents, as ever; and of what a reader says that it will
//     read (WillReadRange), the extents of which it takes more than half.
//   - What an order of ranges needs is fetched in granules (PrefetchRange), and of those extents the disk takes every
//     granule: see partial.go.
//
// Granules are entries of the ring beside the extents. Those that readers fetch are spent from the beginning: they stay
// until memory is needed, and no account holds them. A reader looks for the extent first, so one that is there whole,
// or on its way, is what is read. Of an extent that is not, Volume.parts remembers which granules readers fetched, even
// if they have left memory.
const (
	granuleSize = ExtentSize / 64
	mostSparse  = 64 / 2 // granules
	mostAhead   = 8      // extents: 32 MiB in flight fill 1 GB/s at 30 ms; and an eighth of the memory
)

// boardGranule finds the granule with which a request begins, if it is here or on its way. v.mu is held.
func (q *query) boardGranule(k extentKey) (b boarding, ok bool) {
	if !q.v.hasGranules(q.file, q.x) || q.p == nil && int64(q.off+q.n) > k.off()+granuleSize {
		return boarding{}, false
	}
	if b.buf, _ = q.v.c.ring.get(k, 0); b.buf != nil || q.p == nil {
		return b, b.buf != nil
	}
	if p := q.v.flights[k.piece]; p != nil {
		b, _ = q.joining(p)
		return b, true
	}
	b.kept = k.granuleOnDisk()
	return b, b.kept.d != nil
}

// missing is what is fetched for a request whose beginning is nowhere: granules of extent e, or all. v.mu is held.
func (q *query) missing(e extentKey) (parts []part) {
	if q.p == nil || !q.v.hasGranules(q.file, q.x) {
		return q.whole()
	}
	size := q.v.ExtentBytes(q.file, q.x)
	lo, hi, all := q.off/granuleSize, (q.off+q.n-1)/granuleSize+1, int((size+granuleSize-1)/granuleSize)
	run := q.runBefore(e, lo)
	if lo == 0 && (q.x == 0 || max(hi, 2*run) >= all) && !e.hasSlot() {
		return q.whole()
	}
	for g := lo; g < min(max(hi, lo+min(2*run, mostSparse)), all); g++ {
		// the first was not, though the disk may be in use again by now
		if k := e.granule(g); g == lo || !k.here() {
			parts = append(parts, part{key: k, file: q.file, spent: true})
		}
	}
	if e.isWorthAll(granulesOf(parts), min(run, lo)) {
		return q.whole()
	}
	return parts
}

func granulesOf(parts []part) (bits uint64) {
	for i := range parts {
		bits |= parts[i].key.bit()
	}
	return bits
}

// fetchesPart reports whether an extent is fetched for a peer that asks for a part, and notes that. v.mu is held.
func (q *query) fetchesPart(e extentKey) bool {
	if q.n == int(q.v.ExtentBytes(q.file, q.x)) || q.v.Extents(q.file) == 1 {
		return true
	}
	now := uint64(1)<<((q.off+q.n-1)/granuleSize+1) - 1<<(q.off/granuleSize) // from the first to the last
	if e.isWorthAll(now, 0) {
		return true
	}
	e.fetched(now)
	return false
}

// isWorthAll reports whether the extent is to be fetched whole for these granules, because so much of it was fetched,
// without a run that the read continues, and the disk would keep it. The volume's lock is held.
func (k extentKey) isWorthAll(granules uint64, run int) bool {
	before := k.v.parts[k.extent()].fetched
	if before&granules == 0 && bits.OnesCount64(before|granules)-run <= mostSparse {
		return false
	}
	return k.v.wanted(k.v.Numbered(int(k.extent()))) && k.v.DiskRoom() >= ExtentSize
}

// runBefore returns how many granules that were fetched lie before granule lo without a gap, in this extent and the one
// before it. v.mu is held.
func (q *query) runBefore(e extentKey, lo int) int {
	run := min(bits.LeadingZeros64(^(q.v.parts[e.extent()].fetched << (64 - lo))), lo)
	if run < lo || q.x == 0 {
		return run
	}
	before := q.v.key(q.file, q.x-1)
	if before.here() {
		return run + 64
	}
	return run + bits.LeadingZeros64(^q.v.parts[before.extent()].fetched)
}

// readAhead prefetches what follows an extent that a sequential reader has reached: as many extents as it has read, up
// to mostAhead, and up to one of which the disk has granules.
func (q *query) readAhead() {
	v, file, x := q.v, q.file, q.x
	if q.off > 0 || x == 0 {
		return
	}
	most := int(min(int64(x), mostAhead, v.c.ledger.Limit()/8/ExtentSize))
	v.mu.Lock()
	read, ahead := 0, 0
	for read < most && v.key(file, x-read-1).here() {
		read++
	}
	for ahead < read && x+1+ahead < v.Extents(file) && !v.key(file, x+1+ahead).hasSlot() {
		ahead++
	}
	v.mu.Unlock()
	for next := x + 1; next <= x+ahead; next++ {
		v.Prefetch(nil, file, next, time.Time{}, nil)
	}
}

// WillReadRange says that n bytes of the file from off are about to be read, by reads that are smaller. The extents of
// which those are more than half are fetched whole, if the disk would keep them: up to mostAhead from now on, as memory
// allows, the others when they are read. It never blocks.
func (v *Volume) WillReadRange(file int, off, n int64) {
	if v.Extents(file) < 2 || v.DiskRoom() < ExtentSize {
		return
	}
	for x, most := int(off/ExtentSize), mostAhead; int64(x)*ExtentSize < off+n; x++ {
		first, size := int64(x)*ExtentSize, v.ExtentBytes(file, x)
		if !v.wanted(file, x) || min(off+n, first+size)-max(off, first) <= size/2 {
			continue
		}
		v.mu.Lock()
		if k := v.key(file, x); !k.here() {
			k.fetched(math.MaxUint64) // each granule of it comes for the second time
		}
		v.mu.Unlock()
		if most--; most >= 0 {
			v.Prefetch(nil, file, x, time.Time{}, nil)
		}
	}
}
