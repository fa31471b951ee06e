package rows

import "math/bits"

// philox is Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011): it
// computes a block of four words from a counter and a key, without state. So any random number of any sample can be
// computed at once, on any machine, in any order.
func philox(ctr [4]uint32, key [2]uint32) [4]uint32 {
	const (
		m0, m1 = 0xD2511F53, 0xCD9E8D57
		w0, w1 = 0x9E3779B9, 0xBB67AE85 // the golden ratio and sqrt(3)-1: Weyl steps of the key
	)
	for range 10 {
		hi0, lo0 := bits.Mul32(m0, ctr[0])
		hi1, lo1 := bits.Mul32(m1, ctr[2])
		ctr = [4]uint32{hi1 ^ ctr[1] ^ key[0], lo1, hi0 ^ ctr[3] ^ key[1], lo0}
		key[0] += w0
		key[1] += w1
	}
	return ctr
}

// Draw identifies one run of one sample through a transform. It determines all its random numbers, so a batch does not
// depend on threads, machines or world size, and a resumed epoch is the same as an uninterrupted one.
type Draw struct {
	Seed       uint64 // the session's
	Epoch      uint32 // counts from 0
	Sample     uint64 // the sample's number in the dataset, below 2^48
	Occurrence uint32 // counts repeats of the sample within the epoch (padding, weighted mixtures), below 2^16
}

// The largest numbers of a Draw.
const (
	MaxSample     = 1<<48 - 1
	MaxOccurrence = 1<<16 - 1
)

// Rand returns the numbers of one operation of the transform; operation counts from 0 and is below 2^16. Each operation
// has its own sequence, so that adding a flip does not change the crops.
//
// The packing is part of the format, since resumed runs depend on it. Key: seed, low word first. Counter words:
//
//	c0 = sample, low 32 bits
//	c1 = sample, high 16 bits << 16 | occurrence
//	c2 = epoch
//	c3 = operation << 16 | block, counted from 0
//
// A block's four words give two 64-bit numbers: word 1 << 32 | word 0, then word 3 << 32 | word 2.
func (d Draw) Rand(operation int) Rand {
	return Rand{
		key: [2]uint32{uint32(d.Seed), uint32(d.Seed >> 32)},
		ctr: [4]uint32{uint32(d.Sample), uint32(d.Sample>>32)<<16 | d.Occurrence&MaxOccurrence, d.Epoch,
			uint32(operation) << 16},
	}
}

// Rand is a sequence of up to 131,072 numbers, after which it repeats; operations use a few dozen. The zero Rand is the
// sequence of the zero Draw. A Rand is not safe for concurrent use.
type Rand struct {
	key  [2]uint32
	ctr  [4]uint32
	rest uint64 // the second number of the block, while half is set
	half bool
}

// Uint64 returns 64 uniform bits.
func (r *Rand) Uint64() uint64 {
	if r.half {
		r.half = false
		return r.rest
	}
	b := philox(r.ctr, r.key)
	r.ctr[3] = r.ctr[3]&^0xffff | (r.ctr[3]+1)&0xffff
	r.rest, r.half = uint64(b[3])<<32|uint64(b[2]), true
	return uint64(b[1])<<32 | uint64(b[0])
}

// Float64 returns a uniform multiple of 2^-53 in [0, 1).
func (r *Rand) Float64() float64 { return float64(r.Uint64()>>11) * 0x1p-53 }

// Uniform returns a uniform number in [lo, hi).
func (r *Rand) Uniform(lo, hi float64) float64 { return lo + float64(r.Float64()*(hi-lo)) }

// IntN returns a uniform integer in [0, n), without bias (Lemire: "Fast random integer generation in an interval",
// 2019). It panics if n is not positive.
func (r *Rand) IntN(n int) int {
	if n <= 0 {
		panic("rows: IntN of nothing")
	}
	u := uint64(n)
	hi, lo := bits.Mul64(r.Uint64(), u)
	if lo < u {
		for reject := -u % u; lo < reject; {
			hi, lo = bits.Mul64(r.Uint64(), u)
		}
	}
	return int(hi)
}
