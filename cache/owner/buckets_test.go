package owner

import (
	"encoding/binary"
	"fmt"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// They must never change, for what is in checkpoints. They were computed by a program in Python.
func TestGoldenBuckets(t *testing.T) {
	var got []int
	for unit := range uint64(6) {
		got = append(got, Bucket(unit*golden))
	}
	if want := []int{0, 926218, 452489, 27717, 1018043, 111512}; !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

// In a placement each bucket has an owner.
func TestPlacedOwners(t *testing.T) {
	p := emulate(t, []uint32{1, 2, 3, 1 << 20, 1 << 21}, 1)
	of, owners := New(source, p.nodes), p.Owners(source, fileUnit)
	for i := range 1000 {
		if got, want := owners(i), of.Of(uint64(Bucket(fileUnit(i)))); got != want {
			t.Fatalf("node %d owns unit %d, want %d", got, i, want)
		}
	}
}

// A node owns the units of which it is the owner, whatever nodes there are.
func TestOwns(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var src [16]byte
		binary.LittleEndian.PutUint64(src[:], rapid.Uint64().Draw(t, "source"))
		nodes := drawNodes(t)
		o := New(src, nodes)
		for range 20 {
			unit := rapid.Uint64().Draw(t, "unit")
			for i := range nodes {
				if got, want := o.Owns(i, unit), o.Of(unit) == i; got != want {
					t.Fatalf("node %d owns %x: %v, want %v", i, unit, got, want)
				}
			}
		}
	})
	o := New(source, []Node{{"a", 7}, {"b", 9}, {"c", 0}})
	sets := []Set{o.Owned(0), o.Owned(1), o.Owned(2)}
	for b := range Buckets {
		for i, s := range sets {
			if s.Has(b) != (o.Of(uint64(b)) == i) {
				t.Fatalf("bucket %d and node %d", b, i)
			}
		}
	}
}

// A table is the same whether it was made anew or has followed changes, of which it was asked for some.
func TestTableFollows(t *testing.T) {
	const n = 301 // of the buckets
	rapid.Check(t, func(t *rapid.T) {
		nodes := drawNodes(t)
		table := NewTable(New(source, nodes))
		for range rapid.IntRange(1, 6).Draw(t, "changes") {
			for range rapid.IntRange(0, 2*n).Draw(t, "asked") {
				i := rapid.IntRange(0, n-1).Draw(t, "unit")
				if got, want := table.Of(i), table.o.Of(uint64(i)); got != want {
					t.Fatalf("%d: node %d, want %d", i, got, want)
				}
			}
			nodes = slices.Clone(nodes)
			switch i := rapid.IntRange(0, len(nodes)-1).Draw(t, "node"); rapid.SampledFrom(
				[]string{"join", "leave", "weight", "order"}).Draw(t, "change") {
			case "join":
				nodes = append(nodes, Node{fmt.Sprintf("%016x", rapid.Uint64().Draw(t, "id")),
					rapid.Uint32Range(0, 9).Draw(t, "weight")})
			case "leave":
				nodes = slices.Delete(nodes, i, i+1)
			case "weight":
				nodes[i].Weight = rapid.Uint32Range(0, 9).Draw(t, "weight")
			default:
				nodes = rapid.Permutation(nodes).Draw(t, "order")
			}
			if table = table.Next(New(source, nodes)); len(nodes) == 0 {
				return
			}
		}
		for i := range n {
			if got, want := table.Of(i), table.o.Of(uint64(i)); got != want {
				t.Fatalf("%d: node %d, want %d", i, got, want)
			}
		}
	})
}

// BenchmarkOwned is what a change of the nodes costs each.
func BenchmarkOwned(b *testing.B) {
	for _, n := range []int{4, 64, 1000} {
		var nodes []Node
		for i := range n + 1 {
			nodes = append(nodes, Node{fmt.Sprintf("%016x", mix(uint64(i))), 1 << 20})
		}
		o, more := New(source, nodes[:n]), New(source, nodes)
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			for b.Loop() {
				o.Owned(n / 2)
			}
		})
		table := NewTable(o)
		for i := range Buckets {
			table.Of(i)
		}
		b.Run(fmt.Sprintf("%d/join", n), func(b *testing.B) {
			for b.Loop() {
				table.Next(more)
			}
		})
	}
}
