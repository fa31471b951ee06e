package owner

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/big"
	"slices"
	"sync"
	"testing"

	"pgregory.net/rapid"
)

var source = [16]byte{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}

// fileUnit is a unit as of an extent.
func fileUnit(i int) uint64 { return mix(uint64(i)) }

const golden = 0x9e3779b97f4a7c15 // 2^64 divided by the golden ratio: its multiples are spread evenly

// The owners here were computed by a program in Python, with logarithms of 60 digits. They must never change: nodes of
// two releases in one cluster would fetch everything twice.
func TestGoldenOwners(t *testing.T) {
	o := New(source, []Node{{"0123456789abcdef", 102400}, {"fedcba9876543210", 102400}, {"00000000000000aa", 204800},
		{"00000000000000bb", 1}, {"node-5", 107374}})
	var got []int
	for unit := range uint64(24) {
		got = append(got, o.Of(unit*golden))
	}
	for unit := range uint64(64) {
		got = append(got, o.Of(unit))
	}
	var many []Node
	for i := range uint64(300) {
		many = append(many, Node{fmt.Sprintf("%016x", mix(i+1)), uint32(1 + i%7)})
	}
	o = New(source, many)
	for unit := range uint64(20) {
		got = append(got, o.Of(unit))
	}
	want := []int{
		2, 0, 2, 2, 1, 2, 0, 1, 2, 2, 2, 1, 0, 0, 2, 0, 2, 2, 2, 2, 2, 2, 2, 0,
		2, 1, 4, 0, 0, 0, 2, 1, 1, 1, 4, 4, 1, 0, 2, 1, 2, 1, 4, 0, 2, 4, 1, 4, 2, 1, 0, 2,
		4, 2, 2, 2, 0, 2, 0, 0, 2, 0, 2, 0, 2, 2, 4, 2, 2, 1, 1, 2, 2, 4, 0, 2, 1, 0, 2, 2, 2, 2, 4, 0, 2, 2, 2, 0,
		44, 118, 50, 59, 276, 165, 6, 112, 180, 26, 167, 241, 188, 241, 6, 278, 265, 177, 179, 26,
	}
	if !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

func TestGoldenUnits(t *testing.T) {
	got := []uint64{ShardUnits("train/shard-00017.tar")(0), ShardUnits("train/shard-00017.tar")(255)}
	want := []uint64{0xb63c68b2588a5b0a, 0xae257e1a7a740ec0}
	if !slices.Equal(got, want) {
		t.Errorf("got %x, want %x", got, want)
	}
}

// The logarithms here are rounded down, and ours are up to one more.
func TestLogarithm(t *testing.T) {
	for h, want := range map[uint64]uint64{
		0: 0, 1: 0, 1 << 32: 48408812, 1 << 63: 144115188075855872, 0xc000000000000000: 288230376151711744,
		0x0123456789abcdef: 926122988537751, 0xfedcba9876543210: 1126084545955828433, ^uint64(1): 1 << 63,
		^uint64(0): 1 << 63,
	} {
		if got := exponential(h); got-want > 1 {
			t.Errorf("%x: got %d, want %d", h, got, want)
		}
	}
}

// What is ruled out by a bound would not have won.
func FuzzLogarithm(f *testing.F) {
	for shift := range 64 {
		f.Add(uint64(1)<<shift, uint64(1))
		f.Add(^uint64(0)<<shift, uint64(1))
	}
	f.Fuzz(func(t *testing.T, h, more uint64) {
		for _, weight := range []uint32{1, 7, 1 << 20, math.MaxUint32} {
			o := New(source, []Node{{"a", weight}})
			lo, hi := o.bounds(0, h)
			if draw := float64(exponential(h)) * 0x1p-57 / float64(weight); lo >= draw || hi <= draw ||
				h > 1<<21 && float64(h>>1)*o.rates[0] > draw {
				t.Errorf("%x of weight %d: %g is not between %g and %g, or below %g",
					h, weight, draw, lo, hi, float64(h>>1)*o.rates[0])
			}
		}
		if g := h + more; g >= h && exponential(g) < exponential(h) {
			t.Errorf("%x and %x: %d falls to %d", h, g, exponential(h), exponential(g))
		}
	})
}

func drawNodes(t *rapid.T) []Node {
	ids := rapid.SliceOfNDistinct(rapid.Uint64(), 1, 20, rapid.ID).Draw(t, "ids")
	nodes := make([]Node, len(ids))
	for i, id := range ids {
		nodes[i] = Node{fmt.Sprintf("%016x", id),
			rapid.OneOf(rapid.Uint32(), rapid.Uint32Range(0, 3)).Draw(t, "weight")}
	}
	return nodes
}

func id(o *Owners, unit uint64) string {
	if i := o.Of(unit); i >= 0 {
		return o.nodes[i].ID
	}
	return ""
}

// plain is Of without the shortcut.
func plain(o *Owners, unit uint64) string {
	m, best := mix(unit^o.source), -1
	for i := range o.nodes {
		if o.nodes[i].Weight == 0 {
			continue
		}
		if best < 0 {
			best = i
			continue
		}
		var mine, its big.Int
		mine.Mul(new(big.Int).SetUint64(exponential(mix(m+o.seeds[i]))), big.NewInt(int64(o.nodes[best].Weight)))
		its.Mul(new(big.Int).SetUint64(exponential(mix(m+o.seeds[best]))), big.NewInt(int64(o.nodes[i].Weight)))
		if c := mine.Cmp(&its); c < 0 || c == 0 && o.nodes[i].ID < o.nodes[best].ID {
			best = i
		}
	}
	if best < 0 {
		return ""
	}
	return o.nodes[best].ID
}

func TestProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var src [16]byte
		binary.LittleEndian.PutUint64(src[:], rapid.Uint64().Draw(t, "source"))
		nodes := drawNodes(t)
		o, mixed := New(src, nodes), New(src, rapid.Permutation(nodes).Draw(t, "order"))
		one := rapid.IntRange(0, len(nodes)-1).Draw(t, "one")
		without := New(src, slices.Delete(slices.Clone(nodes), one, one+1))
		heavier := slices.Clone(nodes)
		heavier[one].Weight = max(heavier[one].Weight, rapid.Uint32().Draw(t, "heavier"))
		more := New(src, heavier)
		for range 50 {
			unit := rapid.Uint64().Draw(t, "unit")
			owner := id(o, unit)
			if want := plain(o, unit); owner != want {
				t.Fatalf("%x: %s owns it, but %s has drawn the least", unit, owner, want)
			}
			if got := id(mixed, unit); got != owner {
				t.Fatalf("%x: %s owns it, and in another order %s", unit, owner, got)
			}
			if got := id(without, unit); owner != nodes[one].ID && got != owner {
				t.Fatalf("%x moved from %s to %s because %s left", unit, owner, got, nodes[one].ID)
			}
			if got := id(more, unit); got != owner && got != nodes[one].ID {
				t.Fatalf("%x moved from %s to %s because %s grew", unit, owner, got, nodes[one].ID)
			}
			if owner == "" && slices.ContainsFunc(nodes, func(n Node) bool { return n.Weight > 0 }) {
				t.Fatalf("%x has no owner", unit)
			}
		}
	})
}

func TestNobodyOwnsWithoutNodes(t *testing.T) {
	for _, nodes := range [][]Node{nil, {{"a", 0}}} {
		if got := New(source, nodes).Of(1); got != -1 {
			t.Errorf("%v: node %d owns", nodes, got)
		}
		if got := NewTable(New(source, nodes)).Of(1); got != -1 {
			t.Errorf("%v: node %d owns in a table", nodes, got)
		}
	}
}

// Two sources share no pattern of owners, nor do the extents of a file.
func TestIndependence(t *testing.T) {
	nodes := []Node{{"a", 1}, {"b", 1}, {"c", 1}, {"d", 1}}
	o, other := New(source, nodes), New([16]byte{1}, nodes)
	var bySource, byExtent int
	const n = 100_000
	for i := range n {
		unit := fileUnit(i)
		bySource += b2i(o.Of(unit) == other.Of(unit))
		byExtent += b2i(o.Of(unit) == o.Of(fileUnit(i+1)))
	}
	for _, same := range []int{bySource, byExtent} {
		if same < n/4-700 || same > n/4+700 { // five deviations
			t.Errorf("%d of %d have the same owner, about a quarter should", same, n)
		}
	}
}

func b2i(b bool) int {
	if b {
		return 1
	}
	return 0
}

func TestTable(t *testing.T) {
	var nodes []Node
	for i := range 50 {
		nodes = append(nodes, Node{fmt.Sprint(i), uint32(i)})
	}
	o := New(source, nodes)
	const n = 1001
	table := NewTable(o)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for i := range n {
				for range 2 {
					if got, want := table.Of(i), o.Of(uint64(i)); got != want {
						t.Errorf("%d: got %d, want %d", i, got, want)
					}
				}
			}
		})
	}
	wg.Wait()
}
