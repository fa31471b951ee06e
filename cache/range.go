package cache

import (
	"iter"
	"time"

	"github.com/shoalfs/shoal/internal/trace"
)

// Range is n bytes from off in an extent of a file, which an order needs. Of a large file that is granules; of others it is the file.
type Range struct {
	File, Extent int
	Off, N       int
}

// hasGranules reports whether parts of an extent are fetched by granules.
func (v *Volume) hasGranules(file, x int) bool {
	return v.Extents(file) > 1 && v.ExtentBytes(file, x) > granuleSize
}

// pieces yields what a range stands for: granules, or its extent.
func (v *Volume) pieces(r Range) iter.Seq[extentKey] {
	return func(yield func(extentKey) bool) {
		k := v.key(v.extent(r.File, r.Extent))
		if !v.hasGranules(r.File, r.Extent) {
			yield(k)
			return
		}
		for g := r.Off / granuleSize; g <= (r.Off+r.N-1)/granuleSize; g++ {
			if !yield(k.granule(g)) {
				return
			}
		}
	}
}

// RangeBytes returns what is fetched for a range, if nothing of it is here.
func (v *Volume) RangeBytes(r Range) (n int64) {
	for k := range v.pieces(r) {
		n += int64(v.bytes(r.File, k.piece))
	}
	return n
}

// ClaimRange is Claim of a range.
func (v *Volume) ClaimRange(a *Account, r Range) bool {
	if !v.hasGranules(r.File, r.Extent) {
		return v.Claim(a, r.File, r.Extent)
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.key(v.extent(r.File, r.Extent)).here() || len(v.lacks(a, r)) == 0
}

// lacks claims the granules of a range that are here or on their way, and returns the others. v.mu is held.
func (v *Volume) lacks(a *Account, r Range) (parts []part) {
	for k := range v.pieces(r) {
		if !v.claimPiece(a, k) && v.granuleOnDisk(k).d == nil {
			parts = append(parts, part{key: k, file: r.File, account: a})
		}
	}
	return parts
}

// WhereRange is Where of a range.
func (v *Volume) WhereRange(r Range) Residence {
	if at := v.Where(r.File, r.Extent); at > InStore {
		return at
	}
	at := OnDisk
	v.mu.Lock()
	defer v.mu.Unlock()
	for k := range v.pieces(r) {
		if plain, _ := v.c.ring.forms(k); plain {
			at = min(at, InMemory)
		} else if v.flights[k.piece] != nil {
			at = OnWay
		} else if v.granuleOnDisk(k).d == nil {
			return InStore
		}
	}
	return at
}

// PrefetchRange is Prefetch of a range: done is called once for each of the pieces that it started. If the disk does not take granules,
// it fetches the extent if it would for a reader (see granules.go).
func (v *Volume) PrefetchRange(a *Account, r Range, due time.Time, done func(file int, err error)) (started int, out Outcome) {
	if !v.hasGranules(r.File, r.Extent) {
		out = v.Prefetch(a, r.File, r.Extent, due, done)
		return 1, out
	}
	q := &query{request: request{file: r.File, x: r.Extent, off: r.Off, n: r.N, purpose: ahead, due: due}, v: v}
	v.mu.Lock()
	defer v.mu.Unlock()
	e := v.extent(r.File, r.Extent)
	if v.key(e).here() {
		return 0, Present
	}
	parts := v.lacks(a, r)
	if len(parts) == 0 {
		return 0, Present
	}
	if v.takesGranules(r.File, r.Extent) {
		v.partial(e).planned = true
	}
	if q.isWorthAll(e, granulesOf(parts), 0) {
		parts = []part{{key: v.key(e), file: r.File, spent: true}} // the disk is about to have it
	}
	switch {
	case !v.c.ledger.TryReserve(sizeOf(parts), ForPrefetch):
		return 0, NoMemory
	case v.begin(q.request, trace.Span{}, parts, v.sources(ahead, r.File, r.Extent), done) == nil:
		return 0, Closed
	}
	count(&v.ds.count.Prefetched, len(parts))
	return len(parts), Started
}

// SpendRange is Spend of a range, but for what others want: it asks for what lies in the file from off to end.
func (v *Volume) SpendRange(r Range, wanted func(off, end int64) bool) {
	v.spend(func(yield func(extentKey) bool) {
		for k := range v.pieces(r) {
			off := int64(r.Extent)*ExtentSize + k.off()
			if !wanted(off, off+int64(v.bytes(r.File, k.piece))) && !yield(k) {
				return
			}
		}
	})
}
