package seedsearch

const (
	multiplier = 1812433253 // of MT19937's seeding
	period     = 397        // MT19937's m: a number takes its bulk from the word that many on
	matrix     = 0x9908b0df // MT19937's a
)

// blockSize is how many seeds are tested side by side: enough words for all the registers.
const blockSize = 128

// block holds one word of the state, or one number, for each of the seeds.
type block [blockSize]uint32

// kernel is the arithmetic, for the processor at hand. All kernels give the same.
//
// What bounds it: 397 steps a seed, each a shift, an xor, a multiplication and an addition. Plain code does one
// multiplication a cycle: 397 cycles a seed. AVX2 on a core that issues four vector instructions a cycle takes
// 397·4/8/4 = 50 cycles, and needs five vectors or more in turn to hide the step's latency. AVX-512 on a core of that
// width saves instructions, not cycles. All of it is registers: no step touches memory.
type kernel struct {
	name string
	// advance takes every word from s[from] to s[to] of its seed's state, to >= from.
	advance func(s *block, from, to uint32)
	// number gives the k-th number of the generators, 0 <= k <= MaxPos, from s[k], s[k+1] and s[k+397].
	number func(s, next, far, out *block)
}

var plain = kernel{"plain", advancePlain, numberPlain}

var fastest = kernels[len(kernels)-1]

// advancePlain steps eight seeds at a time, so that no multiplication waits for the one before.
func advancePlain(s *block, from, to uint32) {
	for o := 0; o < blockSize; o += 8 {
		w := (*[8]uint32)(s[o:])
		a, b, c, d, e, f, g, h := w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7]
		for i := from + 1; i <= to; i++ {
			a = multiplier*(a^a>>30) + i
			b = multiplier*(b^b>>30) + i
			c = multiplier*(c^c>>30) + i
			d = multiplier*(d^d>>30) + i
			e = multiplier*(e^e>>30) + i
			f = multiplier*(f^f>>30) + i
			g = multiplier*(g^g>>30) + i
			h = multiplier*(h^h>>30) + i
		}
		w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7] = a, b, c, d, e, f, g, h
	}
}

func numberPlain(s, next, far, out *block) {
	for i := range out {
		y := s[i]&0x80000000 | next[i]&0x7fffffff
		y = far[i] ^ y>>1 ^ -(next[i]&1)&matrix
		y ^= y >> 11
		y ^= y << 7 & 0x9d2c5680
		y ^= y << 15 & 0xefc60000
		out[i] = y ^ y>>18
	}
}
