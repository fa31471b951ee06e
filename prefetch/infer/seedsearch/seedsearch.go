// Package seedsearch finds the seeds of torch's shuffles among all 2^32, given what a few positions
// of the permutation are.
//
// torch.Generator().manual_seed(seed) fills MT19937's state by
//
//	s[0] = seed mod 2^32,   s[i] = 1812433253·(s[i−1] ^ s[i−1]>>30) + i,
//
// and the k-th number that the generator gives (k < 227) depends on s[k], s[k+1] and s[k+397] alone. randperm(n) takes
// one number a position: z = number mod (n−k), and puts the k+z-th of what is left at position k. So what stands at
// position k tells (but for a rare swap, see Target) one number modulo n−k, and to test a seed takes 397+k
// multiplications, each of which needs the one before: the speed is in testing many seeds side by side (kernel.go).
//
// Makoto Matsumoto and Takuji Nishimura: Mersenne Twister, ACM TOMACS 8(1), 1998, and their mt19937ar.c
// of 2002, whose init_genrand the seeding is; torch: aten/src/ATen/core/MT19937RNGEngine.h and
// randperm_cpu in aten/src/ATen/native/TensorFactories.cpp.
package seedsearch

import (
	"cmp"
	"fmt"
	"slices"
)

const (
	// MaxPos is the last position that a Target may name: later numbers need more of the state.
	MaxPos = 226
	// MaxN is the largest permutation for which torch draws 32 bits a position.
	MaxN = (1<<32-1)/20 - 1
)

// Filter says which permutations are wanted: those that pass every target. Without targets every seed passes.
type Filter struct {
	N       uint32 // samples in the permutation, 1..MaxN
	Targets []Target
}

// Target wants one of Samples at position Pos (0..MaxPos, below N−1) of the permutation.
//
// The test takes the permutation to be untouched by the swaps of the earlier positions. For samples
// from Pos on no seed is missed by that, since such a sample can only come to Pos by being drawn there;
// a seed passes wrongly, in about Pos of N cases, if an earlier position took the sample away. A sample
// below Pos comes to Pos by two swaps or more; it is not looked for.
type Target struct {
	Pos     int
	Samples []uint32
}

// Search calls found for every seed in [lo, hi], in ascending order, that passes the filter, until found returns false.
// It is a pure function of its arguments and takes some tens of nanoseconds a seed, so a caller that must share the
// processor gives it a range of a few hundred thousand at a time. It panics on a filter that is out of bounds.
func Search(f Filter, lo, hi uint32, found func(seed uint32) bool) {
	search(fastest, f, lo, hi, found)
}

func search(k kernel, f Filter, lo, hi uint32, found func(seed uint32) bool) {
	if f.N < 1 || f.N > MaxN {
		panic(fmt.Sprintf("seedsearch: %d samples: must be 1..%d", f.N, MaxN))
	}
	var tests []test
	for _, t := range f.Targets {
		if t.Pos < 0 || t.Pos > MaxPos || t.Pos+1 >= int(f.N) {
			panic(fmt.Sprintf("seedsearch: position %d of %d samples: must be 0..%d and not the last",
				t.Pos, f.N, MaxPos))
		}
		tests = append(tests, newTest(f.N, t))
	}
	// The state only moves on, so the tests go by position. The first leaves few seeds, and mostly none of a block.
	slices.SortStableFunc(tests, func(a, b test) int { return cmp.Compare(a.pos, b.pos) })

	var s, head, next, far, numbers block
	for first := uint64(lo); first <= uint64(hi); first += blockSize {
		for i := range s {
			s[i] = uint32(first) + uint32(i)
		}
		// left are the seeds of the block that have passed so far, one bit each.
		var left mask
		left.fill(min(uint64(hi)-first+1, blockSize))
		head, far = s, s
		var at, farAt uint32 // the steps that head and far have taken
		for i := range tests {
			t := &tests[i]
			k.advance(&head, at, t.pos)
			at = t.pos
			next = head
			k.advance(&next, at, at+1)
			if i == 0 {
				far, farAt = next, at+1
			}
			k.advance(&far, farAt, at+period)
			farAt = at + period
			k.number(&head, &next, &far, &numbers)
			if !t.retain(&left, &numbers) {
				break
			}
		}
		if !left.each(func(i int) bool { return found(uint32(first) + uint32(i)) }) {
			return
		}
	}
}

// test is a Target made ready.
type test struct {
	pos uint32
	// The number modulo d = n−pos, by two multiplications: Daniel Lemire, Owen Kaser, Nathan Kurz:
	// Faster Remainder by Direct Computation, Software: Practice and Experience 49(6), 2019.
	d     uint64
	magic uint64 // ⌈2^64 / d⌉ mod 2^64
	// sieve has the bit z mod sieveBits of every wanted z, so that nearly all seeds leave without a look at the list.
	sieve  [sieveBits / 64]uint64
	wanted []uint32 // ascending
}

const sieveBits = 4096

func newTest(n uint32, t Target) test {
	d := uint64(n) - uint64(t.Pos)
	r := test{pos: uint32(t.Pos), d: d, magic: ^uint64(0)/d + 1}
	for _, s := range t.Samples {
		if s < uint32(t.Pos) || s >= n {
			continue
		}
		z := s - uint32(t.Pos)
		r.wanted = append(r.wanted, z)
		r.sieve[z%sieveBits/64] |= 1 << (z % 64)
	}
	slices.Sort(r.wanted)
	return r
}
