package jpeg

import (
	"bytes"
	"cmp"
	"compress/flate"
	"io"
	"math"
	"slices"
)

// escapes are the symbols that stand for an escape, by kind; -1: none.
var escapes = [kinds]int{0x80, -1, 0, 0, 0, 0, 0x80, 0x80}

// counts is how often each symbol occurs.
type counts [256]uint32

// lane is one lane of a file that tables are trained from.
type lane struct {
	kind int
	counts
}

// lengths are those of the codes of one table; 0: no code.
type lengths [256]uint8

// trainTables returns the lengths of all codes, 4 bits each.
func trainTables(lanes []lane) []byte {
	var byKind [kinds][]counts
	for i := range lanes {
		byKind[lanes[i].kind] = append(byKind[lanes[i].kind], lanes[i].counts)
	}
	b := make([]byte, 0, tablesSize)
	for kind, l := range byKind {
		for _, t := range cluster(l, escapes[kind]) {
			for s := 0; s < len(t); s += 2 {
				b = append(b, t[s]|t[s+1]<<4)
			}
		}
	}
	return b
}

// packTables compresses tables.
func packTables(raw []byte) []byte {
	var b bytes.Buffer
	b.WriteString(tablesMagic)
	w, _ := flate.NewWriter(&b, flate.BestCompression) // fails for bad levels only, a Buffer never
	_, _ = w.Write(raw)
	_ = w.Close()
	return b.Bytes()
}

// unpackTables returns nil for what packTables did not make.
func unpackTables(b []byte) []byte {
	packed, ok := bytes.CutPrefix(b, []byte(tablesMagic))
	if !ok {
		return nil
	}
	r := bytes.NewReader(packed)
	raw, err := io.ReadAll(io.LimitReader(flate.NewReader(r), tablesSize+1))
	if err != nil || r.Len() > 0 {
		return nil
	}
	return raw
}

// cluster makes the tables of one kind: it begins with groups of lanes that compress about equally well, and moves each
// lane to the table that suits it best.
func cluster(lanes []counts, escape int) (tables [choices]lengths) {
	var all counts
	for i := range lanes {
		all.add(&lanes[i])
	}
	first := codeLengths(&all, escape)
	for i := range tables {
		tables[i] = first
	}
	if len(lanes) < choices {
		return tables
	}
	slices.SortFunc(lanes, func(a, b counts) int {
		x, y := float64(first.bits(&a, escape))/float64(a.sum()+1), float64(first.bits(&b, escape))/float64(b.sum()+1)
		return int(math.Copysign(1, x-y))
	})
	group := make([]int, len(lanes))
	for i := range group {
		group[i] = i * choices / len(group)
	}
	for range 8 {
		var sums [choices]counts
		for i, g := range group {
			sums[g].add(&lanes[i])
		}
		for g := range tables {
			if sums[g].sum() > 0 {
				tables[g] = codeLengths(&sums[g], escape)
			}
		}
		for i := range lanes {
			best := uint64(math.MaxUint64)
			for g := range tables {
				if bits := tables[g].bits(&lanes[i], escape); bits < best {
					best, group[i] = bits, g
				}
			}
		}
	}
	return tables
}

func (c *counts) add(o *counts) {
	for s, n := range o {
		c[s] += n
	}
}

func (c *counts) sum() (n uint64) {
	for _, v := range c {
		n += uint64(v)
	}
	return n
}

// bits is how many the symbols take.
func (t *lengths) bits(c *counts, escape int) (n uint64) {
	escaped := uint64(0)
	if escape >= 0 {
		escaped = uint64(t[escape]) + 16
	}
	for s, v := range c {
		switch {
		case v == 0:
		case t[s] == 0:
			n += uint64(v) * escaped
		default:
			n += uint64(v) * uint64(t[s])
		}
	}
	return n
}

// codeLengths returns the lengths of a Huffman code of at most maxCode bits, by package-merge (Larmore and Hirschberg).
// Where there is an escape, symbols that do not occur have no code: a code of 12 bits costs each other symbol more than
// the rare escape does.
func codeLengths(c *counts, escape int) (t lengths) {
	type item struct {
		weight      uint64
		symbol      int
		left, right *item
	}
	var leaves []*item
	total := c.sum()
	for s, n := range c {
		w := uint64(n) << 10
		if s == escape {
			w = max(w, total>>3, 1)
		}
		if escape < 0 {
			w = max(w, 1)
		}
		if w > 0 {
			leaves = append(leaves, &item{weight: w, symbol: s})
		}
	}
	if len(leaves) < 2 { // a code of one symbol does not fill the code space
		leaves = append(leaves, &item{symbol: escape ^ 1})
	}
	byWeight := func(a, b *item) int { return cmp.Compare(a.weight, b.weight) }
	slices.SortStableFunc(leaves, byWeight)
	list := leaves
	for range maxCode - 1 {
		var next []*item
		for i := 0; i+1 < len(list); i += 2 {
			next = append(next, &item{list[i].weight + list[i+1].weight, -1, list[i], list[i+1]})
		}
		list = append(slices.Clone(leaves), next...)
		slices.SortStableFunc(list, byWeight)
	}
	var count func(i *item)
	count = func(i *item) {
		if i.symbol >= 0 {
			t[i.symbol]++
			return
		}
		count(i.left)
		count(i.right)
	}
	for _, i := range list[:2*len(leaves)-2] {
		count(i)
	}
	return t
}
