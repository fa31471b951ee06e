package cache

import (
	"iter"
	"time"

	"github.com/shoalfs/shoal/internal/trace"
)

// Range is n bytes from off in an extent of a file, which an order needs. Of a large file that is granules; of others
// it is the file. 0 bytes are the extent.
type Range struct {
	File, Extent int
	Off, N       int
}

// hasGranules reports whether parts of an extent are fetched by granules.
func (ps *places) hasGranules(file, x int) bool {
	return ps.Extents(file) > 1 && ps.ExtentBytes(file, x) > granuleSize
}

// pieces yields what a range stands for: granules, or its extent.
func (r Range) pieces(v *Volume) iter.Seq[extentKey] {
	return func(yield func(extentKey) bool) {
		k := v.key(r.File, r.Extent)
		if r.N == 0 || !v.hasGranules(r.File, r.Extent) {
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

// Bytes returns what is fetched for a range, if nothing of it is here.
func (r Range) Bytes(v *Volume) (n int64) {
	for k := range r.pieces(v) {
		n += int64(v.bytes(r.File, k.piece))
	}
	return n
}

// ClaimRange is Claim of a range.
func (v *Volume) ClaimRange(a *Account, r Range) bool {
	if v.KeptExtent(r.File, r.Extent) {
		return true
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	return len(r.lacks(v, a)) == 0
}

// lacks claims what is here or on its way of a range, and returns what is not. v.mu is held.
func (r Range) lacks(v *Volume, a *Account) (parts []part) {
	for k := range r.pieces(v) {
		switch {
		case k.isGranule() && k.as(whole).here():
			return nil
		case !k.claim(a, false):
			parts = append(parts, part{key: k, file: r.File, account: a})
		}
	}
	return parts
}

// WhereRange is Where of a range.
func (v *Volume) WhereRange(r Range) Residence {
	k := v.key(r.File, r.Extent)
	if at := k.staged(); at > InStore {
		return at
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	at := k.where()
	if at == InStore {
		at = OnDisk
		for k := range r.pieces(v) {
			at = min(at, k.where())
		}
	}
	return at
}

// Prefetch starts to fetch an extent that nobody waits for yet, on account a, which may be nil. due is when a reader
// will need it, zero if unknown. It never blocks. done is called once after Started, from another goroutine.
func (v *Volume) Prefetch(a *Account, file, x int, due time.Time, done func(file int, err error)) Outcome {
	_, out := v.PrefetchRange(a, Range{File: file, Extent: x}, due, done)
	return out
}

// PrefetchRange is Prefetch of a range: done is called once for each of the pieces that it started. If the disk does
// not take granules, it fetches the extent if it would for a reader (see granules.go).
func (v *Volume) PrefetchRange(a *Account, r Range, due time.Time, done func(file int, err error)) (
	started int, out Outcome) {
	v.mu.Lock()
	defer v.mu.Unlock()
	parts := r.lacks(v, a)
	if len(parts) == 0 {
		return 0, Present
	}
	if k := parts[0].key; k.isGranule() {
		if k.takesGranules() {
			p := v.parts[k.extent()]
			p.planned = true
			v.parts[k.extent()] = p
		}
		if k.isWorthAll(granulesOf(parts), 0) {
			parts = []part{{key: k.as(whole), file: r.File, spent: true}} // the disk is about to have it
		}
	}
	if !v.c.ledger.TryReserve(sizeOf(parts), ForPrefetch) {
		return 0, NoMemory
	}
	if v.begin(ahead, due, trace.Span{}, parts, nil, done) == nil {
		return 0, Closed
	}
	return len(parts), Started
}

// SpendRange is Spend of a range, but for what others want: it asks for what lies in the file from off to end.
func (v *Volume) SpendRange(r Range, wanted func(off, end int64) bool) {
	recycled := false
	for k := range r.pieces(v) {
		off := int64(r.Extent)*ExtentSize + k.off()
		if wanted(off, off+int64(v.bytes(r.File, k.piece))) {
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
		v.c.spent()
	}
}
