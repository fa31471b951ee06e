package order

import (
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// drawOrder draws an order of any kind, with what it should contain.
func drawOrder(t *rapid.T) (Order, []int) {
	n := rapid.IntRange(0, 60).Draw(t, "n")
	var o Order
	switch rapid.SampledFrom([]string{"sequential", "uniform", "torch", "list", "windowed"}).Draw(t, "kind") {
	case "sequential":
		o = Sequential(n)
	case "uniform":
		o = Uniform(n, rapid.Uint64().Draw(t, "seed"), 0)
	case "torch":
		o = Torch(n, rapid.Uint64().Draw(t, "seed"), 1, 7, 2, 5, rapid.Bool().Draw(t, "drop"))
	case "windowed":
		o = overGroups(Contiguous(n, rapid.IntRange(1, 20).Draw(t, "size")), rapid.Uint64().Draw(t, "seed"), 3,
			rapid.IntRange(1, 9).Draw(t, "window"))
	case "list":
		o = List(rapid.SliceOfN(rapid.Uint32Range(0, 20), n, n).Draw(t, "list"))
	}
	want := samples(o)
	if rapid.Bool().Draw(t, "index first") {
		o = Index(o)
	}
	if rapid.Bool().Draw(t, "slice") {
		from := rapid.IntRange(0, len(want)).Draw(t, "from")
		to := rapid.IntRange(from, len(want)).Draw(t, "to")
		o, want = Slice(o, from, to), want[from:to]
	}
	if rapid.Bool().Draw(t, "stripe") {
		world := rapid.IntRange(1, 9).Draw(t, "world")
		first := rapid.IntRange(0, world-1).Draw(t, "first")
		last := rapid.IntRange(first, world-1).Draw(t, "last")
		var striped []int
		for i, s := range want {
			if i%world >= first && i%world <= last {
				striped = append(striped, s)
			}
		}
		o, want = Stripe(o, world, first, last), striped
	}
	return o, want
}

func TestViewsAndIndex(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		o, want := drawOrder(t)
		if got := samples(o); !slices.Equal(got, want) && len(got)+len(want) > 0 {
			t.Fatalf("got %v, want %v", got, want)
		}
		l := Index(o)
		if l.Len() != len(want) {
			t.Fatalf("index has %d positions, want %d", l.Len(), len(want))
		}
		for sample := -1; sample < 62; sample++ {
			for from := -1; from <= len(want)+1; from++ {
				expect := -1
				for p := len(want) - 1; p >= max(from, 0); p-- {
					if want[p] == sample {
						expect = p
					}
				}
				if p := l.Find(sample, from); p != expect {
					t.Fatalf("Find(%d, %d) = %d, want %d in %v", sample, from, p, expect, want)
				}
			}
		}
	})
}

func TestAtPanics(t *testing.T) {
	for _, o := range []Order{
		Sequential(3), Uniform(3, 0, 0), List([]uint32{1, 2, 3}), Torch(3, 0, 0, 1, 0, 0, false),
		Slice(Sequential(9), 2, 5), Stripe(List(make([]uint32, 9)), 3, 1, 1), Index(List([]uint32{1, 2, 3})),
		overGroups(Contiguous(3, 2), 0, 0, 1),
	} {
		for _, pos := range []int{-1, 3} {
			func() {
				defer func() {
					if recover() == nil {
						t.Errorf("%T.At(%d) did not panic", o, pos)
					}
				}()
				o.At(pos)
			}()
		}
	}
}

func TestConstructorsPanic(t *testing.T) {
	for name, f := range map[string]func(){
		"sequential": func() { Sequential(-1) },
		"uniform":    func() { Uniform(-1, 0, 0) },
		"epoch":      func() { Uniform(1, 0, -1) },
		"contiguous": func() { Contiguous(3, 0) },
		"slice":      func() { Slice(Sequential(3), 2, 4) },
		"stripe":     func() { Stripe(Sequential(3), 2, 0, 2) },
		"randperm":   func() { NewGenerator(0).RandPerm(1 << 32) },
		"index":      func() { Index(struct{ Order }{Sequential(1 << 33)}) },
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s did not panic", name)
				}
			}()
			f()
		}()
	}
}
