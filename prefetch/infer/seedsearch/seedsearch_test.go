package seedsearch

import (
	"fmt"
	"math"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/shoalfs/shoal/prefetch/order"
)

// perm is torch's permutation, by the code that the orders' golden tests check against torch.
func perm(seed uint32, n int) []uint32 { return order.NewGenerator(uint64(seed)).RandPerm(n) }

func collect(k kernel, f Filter, lo, hi uint32) (seeds []uint32) {
	search(k, f, lo, hi, func(s uint32) bool { seeds = append(seeds, s); return true })
	return seeds
}

// sparse draws a filter that a given seed passes.
func sparse(t *rapid.T, n int, p []uint32) Filter {
	f := Filter{N: uint32(n)}
	for _, pos := range rapid.SliceOfNDistinct(rapid.IntRange(0, min(MaxPos, n-2)), 0, 4, rapid.ID).Draw(t,
		"positions") {
		samples := rapid.SliceOfN(rapid.Uint32Range(0, uint32(n-1)), 0, 40).Draw(t, "others")
		f.Targets = append(f.Targets, Target{pos, append(samples, p[pos])})
	}
	return f
}

// Every seed whose permutation passes is found (samples below their position excepted, see Target), and
// what is found draws what was wanted.
func TestSearchAgainstPermutations(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(2, 500).Draw(t, "n")
		lo := rapid.Uint32().Draw(t, "lo")
		hi := uint32(min(uint64(lo)+rapid.Uint64Range(0, 300).Draw(t, "range"), math.MaxUint32))
		f := sparse(t, n, perm(lo, n))
		var want, first []uint32
		for seed := uint64(lo); seed <= uint64(hi); seed++ {
			p := perm(uint32(seed), n)
			all, exact := true, true
			for _, t := range f.Targets {
				all = all && p[t.Pos] >= uint32(t.Pos) && slices.Contains(t.Samples, p[t.Pos])
				exact = exact && t.Pos == 0
			}
			if all {
				want = append(want, uint32(seed))
			}
			if exact && all {
				first = append(first, uint32(seed))
			}
		}
		for _, k := range kernels {
			got := collect(k, f, lo, hi)
			for _, s := range want {
				if _, ok := slices.BinarySearch(got, s); !ok {
					t.Fatalf("%s: seed %d passes and is not found", k.name, s)
				}
			}
			if len(first) > 0 && !slices.Equal(got, first) {
				t.Fatalf("%s: position 0 alone: found %d, want %d", k.name, got, first)
			}
		}
	})
}

// The model that found must equal: the draws themselves, one seed at a time, by the generator of order.
func drawn(f Filter, lo, hi uint32) (seeds []uint32) {
	for seed := uint64(lo); seed <= uint64(hi); seed++ {
		var u [MaxPos + 1]uint32
		g := order.NewGenerator(seed)
		for i := range u {
			u[i] = g.Random()
		}
		pass := true
		for _, t := range f.Targets {
			z := u[t.Pos] % (f.N - uint32(t.Pos))
			pass = pass && slices.Contains(t.Samples, z+uint32(t.Pos))
		}
		if pass {
			seeds = append(seeds, uint32(seed))
		}
	}
	return seeds
}

func TestKernelsAgainstDraws(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		f := Filter{N: rapid.OneOf(rapid.Uint32Range(2, 1000), rapid.Uint32Range(2, MaxN)).Draw(t, "n")}
		lo := rapid.OneOf(rapid.Uint32(), rapid.Uint32Range(math.MaxUint32-600, math.MaxUint32)).Draw(t, "lo")
		hi := uint32(min(uint64(lo)+rapid.Uint64Range(0, 500).Draw(t, "range"), math.MaxUint32))
		seed := rapid.Uint32Range(lo, hi).Draw(t, "seed")
		g := order.NewGenerator(uint64(seed))
		var u [MaxPos + 1]uint32
		for i := range u {
			u[i] = g.Random()
		}
		for range rapid.IntRange(0, 4).Draw(t, "targets") {
			pos := rapid.Uint32Range(0, min(MaxPos, f.N-2)).Draw(t, "pos")
			samples := rapid.SliceOfN(rapid.Uint32(), 0, 50).Draw(t, "others")
			f.Targets = append(f.Targets, Target{int(pos), append(samples, pos+u[pos]%(f.N-pos))})
		}
		want := drawn(f, lo, hi)
		if !slices.Contains(want, seed) {
			t.Fatal("the model misses the seed that the filter was made from")
		}
		for _, k := range kernels {
			if got := collect(k, f, lo, hi); !slices.Equal(got, want) {
				t.Fatalf("%s: found %d, want %d", k.name, got, want)
			}
		}
	})
}

// Halves of a range, searched one by one, give what the whole gives; found ends the search.
func TestSearchByRangesAndStop(t *testing.T) {
	f := Filter{N: 100, Targets: []Target{{0, []uint32{1, 2, 3, 4}}}}
	whole := collect(fastest, f, 1000, 4999)
	halves := append(collect(fastest, f, 1000, 2222), collect(fastest, f, 2223, 4999)...)
	if !slices.Equal(whole, halves) || len(whole) < 100 {
		t.Errorf("%d seeds in the whole, %d in the halves", len(whole), len(halves))
	}
	var got []uint32
	Search(f, 1000, 4999, func(s uint32) bool { got = append(got, s); return len(got) < 5 })
	if !slices.Equal(got, whole[:5]) {
		t.Errorf("stopped after 5: %d, want %d", got, whole[:5])
	}
}

func TestSearchPanics(t *testing.T) {
	for _, f := range []Filter{{N: 0}, {N: MaxN + 1}, {N: 10, Targets: []Target{{Pos: -1}}},
		{N: 10, Targets: []Target{{Pos: 9}}}, {N: 1000, Targets: []Target{{Pos: MaxPos + 1}}}} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%+v: no panic", f)
				}
			}()
			Search(f, 0, 1, func(uint32) bool { return true })
		}()
	}
}

func FuzzKernels(f *testing.F) {
	f.Add(uint32(0), uint16(130), uint32(1281167), uint8(0), uint8(7), uint32(5))
	f.Add(uint32(math.MaxUint32-100), uint16(65535), uint32(50), uint8(226), uint8(3), uint32(9))
	f.Fuzz(func(t *testing.T, lo uint32, length uint16, n uint32, p, q uint8, sample uint32) {
		n = 2 + n%(MaxN-2)
		filter := Filter{N: n}
		for _, pos := range []uint32{uint32(p), uint32(q)} {
			pos = min(pos, MaxPos, n-2)
			filter.Targets = append(filter.Targets, Target{int(pos), []uint32{sample % n, sample / 2 % n, pos}})
		}
		hi := uint32(min(uint64(lo)+uint64(length), math.MaxUint32))
		want := collect(plain, filter, lo, hi)
		for _, k := range kernels[1:] {
			if got := collect(k, filter, lo, hi); !slices.Equal(got, want) {
				t.Errorf("%s: found %d, want %d", k.name, got, want)
			}
		}
	})
}

// One sample at position 0, as the fastest case; long lists at eight positions; and a dataset so small that
// every block has seeds which pass the first test.
func BenchmarkSearch(b *testing.B) {
	p := perm(123456789, 1281167)
	filters := []struct {
		name string
		Filter
	}{
		{"one", Filter{1281167, []Target{{0, p[:1]}}}},
		{"8x64", Filter{1281167, func() (t []Target) {
			for pos := range 8 {
				t = append(t, Target{pos, p[:64]})
			}
			return t
		}()}},
		{"small", Filter{1000, []Target{{0, perm(1, 1000)[:64]}, {1, perm(1, 1000)[:64]}}}},
	}
	for _, k := range kernels {
		for _, f := range filters {
			b.Run(fmt.Sprintf("%s/%s", k.name, f.name), func(b *testing.B) {
				const seeds = 1 << 16
				for b.Loop() {
					search(k, f.Filter, 1<<31, 1<<31+seeds-1, func(uint32) bool { return true })
				}
				ns := float64(b.Elapsed().Nanoseconds()) / float64(b.N) / seeds
				b.ReportMetric(ns, "ns/seed")
				b.ReportMetric(ns*(1<<32)/2e9, "s/space/2cores")
			})
		}
	}
}
