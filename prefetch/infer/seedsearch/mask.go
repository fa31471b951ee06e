package seedsearch

import (
	"math/bits"
	"slices"
)

// mask is a set of the seeds of a block.
type mask [blockSize / 64]uint64

// fill puts the first n seeds into the set.
func (m *mask) fill(n uint64) {
	for w := range m {
		from := uint64(w) * 64
		m[w] = 1<<(max(n, from)-from) - 1 // a shift by 64 or more leaves 0, so all are in it
	}
}

// each calls do for every seed in ascending order until it returns false, and says whether it never did.
func (m *mask) each(do func(i int) bool) bool {
	for w, word := range m {
		for ; word != 0; word &= word - 1 {
			if !do(w*64 + bits.TrailingZeros64(word)) {
				return false
			}
		}
	}
	return true
}

// retain leaves the seeds in the set whose numbers pass, and says whether any does.
func (t *test) retain(left *mask, numbers *block) bool {
	var some uint64
	for w := range left {
		var pass uint64
		for i, u := range numbers[w*64 : w*64+64] {
			z, _ := bits.Mul64(t.magic*uint64(u), t.d)
			pass |= t.sieve[z%sieveBits/64] >> (z % 64) & 1 << i
		}
		pass &= left[w]
		left[w] = pass
		for ; pass != 0; pass &= pass - 1 {
			i := bits.TrailingZeros64(pass)
			z, _ := bits.Mul64(t.magic*uint64(numbers[w*64+i]), t.d)
			if _, ok := slices.BinarySearch(t.wanted, uint32(z)); !ok {
				left[w] &^= 1 << i
			}
		}
		some |= left[w]
	}
	return some != 0
}
