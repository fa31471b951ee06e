package order

import (
	"cmp"
	"fmt"
	"math"
	"slices"
)

// Index makes an order searchable. An order that is a Locator already is returned as it is; otherwise a table is built
// in O(Len) time: 4 bytes for each sample number up to the largest that occurs, and 8 bytes for each occurrence of a
// sample beyond its first (torch's padding). It panics if the order has more than 2^32-2 positions, which no order of
// this package without a Find of its own has.
//
// It takes tens of milliseconds a million positions, so call it outside locks that readers need.
func Index(o Order) Locator {
	if l, ok := o.(Locator); ok {
		return l
	}
	n := o.Len()
	if n >= math.MaxUint32 {
		panic(fmt.Sprintf("order: no index for %d positions", n))
	}
	size := 0
	for pos := range n {
		size = max(size, o.At(pos)+1)
	}
	t := &table{Order: o, first: make([]uint32, size)}
	// Backwards, so that the entry that stays in first is that of the smallest position.
	for pos := n - 1; pos >= 0; pos-- {
		s := o.At(pos)
		if p := t.first[s]; p != 0 {
			t.again = append(t.again, occurrence{uint32(s), p - 1})
		}
		t.first[s] = uint32(pos) + 1
	}
	slices.SortFunc(t.again, occurrence.compare)
	return t
}

type table struct {
	Order
	first []uint32     // by sample: its smallest position + 1, or 0
	again []occurrence // all further ones, sorted
}

type occurrence struct{ sample, pos uint32 }

func (a occurrence) compare(b occurrence) int {
	return cmp.Or(cmp.Compare(a.sample, b.sample), cmp.Compare(a.pos, b.pos))
}

func (t *table) Find(sample, from int) int {
	if sample < 0 || sample >= len(t.first) || t.first[sample] == 0 {
		return -1
	}
	if p := int(t.first[sample]) - 1; p >= from {
		return p
	}
	least := occurrence{uint32(sample), uint32(min(from, math.MaxUint32))}
	i, _ := slices.BinarySearchFunc(t.again, least, occurrence.compare)
	if i < len(t.again) && int(t.again[i].sample) == sample {
		return int(t.again[i].pos)
	}
	return -1
}
