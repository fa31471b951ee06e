package owner

import "sync/atomic"

// Table remembers the owners of the units 0..n-1, which it finds when they are first asked for. It takes 2 bytes a unit, and is safe
// for concurrent use.
type Table struct {
	o    *Owners
	unit func(i int) uint64
	cell []atomic.Uint32 // two owners each; 0 is one that is not known yet
}

// most is how many nodes have a number of 16 bits in a Table. With more nothing is remembered.
const most = 1<<16 - 1

// NewTable returns the owners of units.
func NewTable(o *Owners, n int, unit func(i int) uint64) *Table {
	t := &Table{o: o, unit: unit}
	if len(o.nodes) <= most {
		t.cell = make([]atomic.Uint32, (n+1)/2)
	}
	return t
}

// Of returns the index of the owner, -1 if there is none.
func (t *Table) Of(i int) int {
	if t.cell == nil {
		return t.o.Of(t.unit(i))
	}
	cell, shift := &t.cell[i/2], i%2*16
	if v := cell.Load() >> shift & most; v != 0 {
		return int(v) - 1
	}
	of := t.o.Of(t.unit(i))
	cell.Or(uint32(of+1) << shift) // two that find it at once write the same
	return of
}
