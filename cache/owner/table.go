package owner

import "sync/atomic"

// Table remembers the owners of the units 0..n-1, which it finds when they are first asked for. It takes 2 bytes a unit, and is safe
// for concurrent use.
type Table struct {
	o    *Owners
	n    int
	unit func(i int) uint64
	cell []atomic.Uint32 // two owners each; 0 is one that is not known yet
}

// most is how many nodes have a number of 16 bits in a Table. With more nothing is remembered.
const most = 1<<16 - 1

// NewTable returns the owners of units.
func NewTable(o *Owners, n int, unit func(i int) uint64) *Table {
	t := &Table{o: o, n: n, unit: unit}
	if len(o.nodes) <= most {
		t.cell = make([]atomic.Uint32, (n+1)/2)
	}
	return t
}

// NewBuckets returns the owners of all buckets.
func NewBuckets(o *Owners) *Table {
	return NewTable(o, Buckets, func(i int) uint64 { return uint64(i) })
}

// Next returns the table of the same units with other owners. What t knows of them it knows, too, unless the owner has gone or become
// lighter: each of these units costs a contest with the nodes that have come or become heavier.
func (t *Table) Next(o *Owners) *Table {
	next := NewTable(o, t.n, t.unit)
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
	if next.cell == nil || t.cell == nil || 2*len(rivals) > len(o.nodes) {
		return next
	}
	for i := range t.n {
		of, known := t.known(i)
		if !known || of < 0 || stay[of] < 0 {
			continue
		}
		if of = stay[of]; len(rivals) > 0 {
			of = o.contest(t.unit(i), of, rivals, false)
		}
		next.learn(i, of)
	}
	return next
}

// Of returns the index of the owner, -1 if there is none.
func (t *Table) Of(i int) int {
	if t.cell == nil {
		return t.o.Of(t.unit(i))
	}
	if of, known := t.known(i); known {
		return of
	}
	of := t.o.Of(t.unit(i))
	t.learn(i, of)
	return of
}

func (t *Table) known(i int) (of int, known bool) {
	v := t.cell[i/2].Load() >> (i % 2 * 16) & most
	return int(v) - 1, v != 0
}

// learn notes an owner: two that find it at once note the same.
func (t *Table) learn(i, of int) { t.cell[i/2].Or(uint32(of+1) << (i % 2 * 16)) }

// Set is some of the buckets.
type Set []uint64

// Owned returns the buckets that node i owns.
func (o *Owners) Owned(i int) Set {
	s := make(Set, Buckets/64)
	for b := range Buckets {
		if o.Owns(i, uint64(b)) {
			s.Add(b)
		}
	}
	return s
}

// Add adds a bucket.
func (s Set) Add(bucket int) { s[bucket/64] |= 1 << (bucket % 64) }

// Has reports whether the set has a bucket.
func (s Set) Has(bucket int) bool { return s[bucket/64]>>(bucket%64)&1 != 0 }
