package owner

import "sync/atomic"

// Table remembers the owners of buckets, found when first asked for. It takes 4 MiB, and is safe for concurrent use.
type Table struct {
	o    *Owners
	cell [Buckets]atomic.Uint32 // 1 more than the owner; 0: not known yet
}

// NewTable returns the owners of all buckets.
func NewTable(o *Owners) *Table { return &Table{o: o} }

// Next returns the table with other owners. What t knows it knows, too, unless the owner has gone or become lighter:
// each of these buckets costs a contest with the nodes that have come or become heavier.
func (t *Table) Next(o *Owners) *Table {
	next := NewTable(o)
	at, stay, rivals := make(map[string]int, len(t.o.nodes)), make([]int, len(t.o.nodes)), []int(nil)
	for i, n := range t.o.nodes {
		at[n.ID], stay[i] = i, -1
	}
	for i, n := range o.nodes {
		was, known := at[n.ID]
		if known && n.Weight >= t.o.nodes[was].Weight {
			stay[was] = i
		}
		if !known || n.Weight > t.o.nodes[was].Weight {
			rivals = append(rivals, i)
		}
	}
	if 2*len(rivals) > len(o.nodes) {
		return next
	}
	for i := range t.cell {
		of := int(t.cell[i].Load()) - 1
		if of < 0 || stay[of] < 0 {
			continue
		}
		if of = stay[of]; len(rivals) > 0 {
			of = o.contest(uint64(i), of, rivals, false)
		}
		next.cell[i].Store(uint32(of + 1))
	}
	return next
}

// Of returns the index of a bucket's owner, -1 if there is none.
func (t *Table) Of(i int) int {
	if known := t.cell[i].Load(); known > 0 {
		return int(known) - 1
	}
	of := t.o.Of(uint64(i))
	t.cell[i].Store(uint32(of + 1))
	return of
}

// Set is some of the buckets.
type Set []uint64

// Owned returns the buckets that node i owns.
func (o *Owners) Owned(i int) Set {
	s := make(Set, Buckets/64)
	for b := range Buckets {
		if o.Owns(i, uint64(b)) {
			s[b/64] |= 1 << (b % 64)
		}
	}
	return s
}

// Has reports whether the set has a bucket.
func (s Set) Has(bucket int) bool { return s[bucket/64]>>(bucket%64)&1 != 0 }
