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

// granules yields those of a range; none if it stands for the extent.
func (v *Volume) granules(r Range) iter.Seq[int] {
	return func(yield func(int) bool) {
		if v.Extents(r.File) == 1 || v.ExtentBytes(r.File, r.Extent) <= granuleSize {
			return
		}
		for g := r.Off / granuleSize; g <= (r.Off+r.N-1)/granuleSize; g++ {
			if !yield(g) {
				return
			}
		}
	}
}

// entire reports whether a range stands for its extent.
func (v *Volume) entire(r Range) bool {
	for range v.granules(r) {
		return false
	}
	return true
}

// RangeBytes returns what is fetched for a range, if nothing of it is here.
func (v *Volume) RangeBytes(r Range) (n int64) {
	if v.entire(r) {
		return v.ExtentBytes(r.File, r.Extent)
	}
	k := v.key(v.extent(r.File, r.Extent))
	for g := range v.granules(r) {
		n += int64(v.bytes(r.File, k.granule(g).piece))
	}
	return n
}

// ClaimRange is Claim of a range.
func (v *Volume) ClaimRange(a *Account, r Range) bool {
	if v.entire(r) {
		return v.Claim(a, r.File, r.Extent)
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.key(v.extent(r.File, r.Extent)).here() || len(v.lacks(a, r)) == 0
}

// lacks claims the granules of a range that are here or on their way, and returns the others. v.mu is held.
func (v *Volume) lacks(a *Account, r Range) (parts []part) {
	k := v.key(v.extent(r.File, r.Extent))
	for g := range v.granules(r) {
		k := k.granule(g)
		switch p := v.flights[k.piece]; {
		case p != nil:
			if p.spent || a.takes(p.account, p.size()) {
				p.assign(a)
			}
		case !v.c.ring.claim(k, a, false):
			parts = append(parts, part{key: k, file: r.File, account: a})
		}
	}
	return parts
}

// WhereRange is Where of a range.
func (v *Volume) WhereRange(r Range) Residence {
	at := v.Where(r.File, r.Extent)
	if at > InStore || v.entire(r) {
		return at
	}
	at = InMemory
	k := v.key(v.extent(r.File, r.Extent))
	v.mu.Lock()
	defer v.mu.Unlock()
	for g := range v.granules(r) {
		if plain, _ := v.c.ring.forms(k.granule(g)); plain {
			continue
		}
		if at = min(at, OnWay); v.flights[k.granule(g).piece] == nil {
			return InStore
		}
	}
	return at
}

// PrefetchRange is Prefetch of a range: done is called once for each of the pieces that it started. It fetches the extent if it would for
// a reader (see granules.go).
func (v *Volume) PrefetchRange(a *Account, r Range, due time.Time, done func(file int, err error)) (started int, out Outcome) {
	if v.entire(r) {
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
	parts, now := v.lacks(a, r), uint64(0)
	if len(parts) == 0 {
		return 0, Present
	}
	for _, p := range parts {
		now |= 1 << (p.key.kind() - 1)
	}
	if q.isWorthAll(e, now, 0) {
		parts = []part{{key: v.key(e), file: r.File, spent: true}} // the disk is about to have it
	}
	var need int64
	for i := range parts {
		need += parts[i].size()
	}
	switch {
	case !v.c.ledger.TryReserve(need, ForPrefetch):
		return 0, NoMemory
	case v.begin(q.request, trace.Span{}, parts, v.reach.Load().sources(ahead, r.File, r.Extent), done) == nil:
		return 0, Closed
	case parts[0].key.isGranule():
		v.sparse[e] |= now
	}
	count(&v.ds.count.Prefetched, len(parts))
	return len(parts), Started
}

// SpendRange is Spend of a range, but for what others want: it asks for what lies in the file from off to end.
func (v *Volume) SpendRange(r Range, wanted func(off, end int64) bool) {
	recycled, begin := false, int64(r.Extent)*ExtentSize
	if v.entire(r) {
		if !wanted(begin, begin+v.ExtentBytes(r.File, r.Extent)) {
			v.Spend(r.File)
		}
		return
	}
	k := v.key(v.extent(r.File, r.Extent))
	for g := range v.granules(r) {
		k := k.granule(g)
		if off := begin + k.off(); wanted(off, off+granuleSize) {
			continue
		}
		v.mu.Lock()
		if p := v.flights[k.piece]; p != nil {
			p.assign(nil)
			p.spent = true
		}
		v.mu.Unlock()
		recycled = v.c.ring.spend(k) || recycled
	}
	if recycled {
		v.c.relieve()
		v.c.notifyFreed()
	}
}
