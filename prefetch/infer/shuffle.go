package infer

import "math/bits"

// Numbers of the Mersenne Twister (see order.Generator).
const (
	mtN = 624
	mtM = 397
)

// words writes the first numbers that a generator seeded with seed draws; at most mtN-mtM, which need only a part of
// the first turn of the state and of the seeding.
func words(seed uint32, out []uint32) {
	var s [mtN]uint32
	s[0] = seed
	for i := uint32(1); i < mtM+uint32(len(out)); i++ {
		p := s[i-1]
		s[i] = 1812433253*(p^p>>30) + i
	}
	for i := range out {
		u, v := s[i], s[i+1]
		y := s[i+mtM] ^ (u&0x80000000|v&0x7fffffff)>>1 ^ -(v&1)&0x9908b0df
		y ^= y >> 11
		y ^= y << 7 & 0x9d2c5680
		y ^= y << 15 & 0xefc60000
		out[i] = y ^ y>>18
	}
}

// headLen is how many positions the quick test uses: two rounds of a world of 64, and a rank's first eight samples in
// a world of 16.
const headLen = 128

// swapped is the identity except where Fisher-Yates has swapped: a hash table of places with open addressing. Its
// size does not depend on the length of the permutation.
type swapped struct {
	slots []slot
	shift int
}

type slot struct {
	place  uint32 // + 1; 0: free
	sample uint32
}

// newSwapped returns one for the given number of positions at the most.
func newSwapped(positions int) *swapped {
	log := bits.Len(uint(positions)) + 1 // no more than half full
	return &swapped{make([]slot, 1<<log), 32 - log}
}

func (s *swapped) slot(place uint32) *slot {
	for h := place * 0x9e3779b1 >> s.shift; ; h = (h + 1) % uint32(len(s.slots)) {
		if x := &s.slots[h]; x.place == 0 || x.place == place+1 {
			return x
		}
	}
}

// head writes the first samples of torch.randperm(n), which draws by the given words, into out, which holds as many.
func (s *swapped) head(n int, draws, out []uint32) {
	clear(s.slots)
	for i := range out {
		here := uint32(i)
		if x := s.slot(here); x.place != 0 {
			here = x.sample
		}
		if i == n-1 {
			out[i] = here
			return
		}
		z := uint32(i) + draws[i]%uint32(n-i)
		if z == uint32(i) {
			out[i] = here
			continue
		}
		x := s.slot(z)
		if out[i] = z; x.place != 0 {
			out[i] = x.sample
		}
		x.place, x.sample = z+1, here
	}
}
