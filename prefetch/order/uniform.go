package order

import (
	"fmt"
	"math/bits"
)

// Uniform returns a pseudo-random permutation of [0,n) keyed by (seed, epoch), in O(1) memory and O(1) expected time a
// position, for n up to 2^60. It panics on an n outside 0..2^60 and on a negative epoch.
//
// The algorithm, uniform@1, is a Feistel network with cycle walking (J. Black and P. Rogaway, "Ciphers with Arbitrary
// Finite Domains", CT-RSA 2002), as used for shuffling by R. Mitchell, D. Stokes, E. Frank and G. Holmes
// ("Bandwidth-Optimal Random Shuffling for GPUs", ACM TOPC 9(1), 2022): a position is encrypted to the smallest power
// of two that is not below n, again until the result is below n. That is under two encryptions a position on average. A
// domain has at least 8 bits, since a Feistel network on a handful of values mixes badly: below n = 128 it takes 256/n
// encryptions, and still at most 256 for the whole epoch.
//
// One half of the bits is alternately XORed with a keyed hash of the other. The hash is the finaliser "Mix13" by D.
// Stafford (better known from SplitMix64: G. Steele, D. Lea and C. Flood, "Fast Splittable Pseudorandom Number
// Generators", OOPSLA 2014), the round keys are SplitMix64's output. It is for shuffling, not for secrecy.
func Uniform(n int, seed uint64, epoch int) Locator {
	if n < 0 || n > 1<<60 || epoch < 0 {
		panic(fmt.Sprintf("order: uniform order of %d samples, epoch %d", n, epoch))
	}
	return new(newUniform(n, seed, epoch))
}

// newUniform is Uniform without checks, and without an allocation.
func newUniform(n int, seed uint64, epoch int) uniform {
	w := uint(8)
	if n > 1 {
		w = max(w, uint(bits.Len(uint(n-1))))
	}
	u := uniform{n: n, right: w / 2}
	u.rmask = 1<<u.right - 1
	u.lmask = 1<<(w-u.right) - 1
	k := key(seed, epoch)
	for i := range u.keys {
		k += golden
		u.keys[i] = mix13(k)
	}
	return u
}

// uniformRounds: the statistical tests fail at 4 rounds and pass from 6 on; twice that costs some
// 25 ns. It is even, since rounds come in pairs.
const uniformRounds = 12

type uniform struct {
	n            int
	right        uint // width of the right half
	lmask, rmask uint64
	keys         [uniformRounds]uint64
}

// golden is 2^64 divided by the golden ratio, SplitMix64's increment.
const golden = 0x9e3779b97f4a7c15

// key returns the state with which SplitMix64 begins. Seed and epoch are each mixed before they meet, so
// that (seed, epoch+1) and (seed+1, epoch) have nothing in common.
func key(seed uint64, epoch int) uint64 {
	return mix13(seed+golden) ^ mix13(mix13(uint64(epoch))+golden)
}

func mix13(z uint64) uint64 {
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}

// draws are numbers from SplitMix64.
type draws uint64

// below draws one below m.
func (k *draws) below(m int) int {
	*k += golden
	hi, _ := bits.Mul64(mix13(uint64(*k)), uint64(m))
	return int(hi)
}

// shuffle is the shuffle by R. A. Fisher and F. Yates, forwards.
func shuffle[T any](list []T, k *draws) {
	for i := range len(list) - 1 {
		z := i + k.below(len(list)-i)
		list[i], list[z] = list[z], list[i]
	}
}

func (u *uniform) Len() int { return u.n }

func (u *uniform) At(pos int) int {
	check(pos, u.n)
	for x := uint64(pos); ; {
		l, r := x>>u.right, x&u.rmask
		for i := 0; i < uniformRounds; i += 2 {
			l ^= mix13(r^u.keys[i]) & u.lmask
			r ^= mix13(l^u.keys[i+1]) & u.rmask
		}
		if x = l<<u.right | r; x < uint64(u.n) {
			return int(x)
		}
	}
}

// Find walks the same cycle backwards: every round is its own inverse.
func (u *uniform) Find(sample, from int) int {
	if sample < 0 || sample >= u.n {
		return -1
	}
	for x := uint64(sample); ; {
		l, r := x>>u.right, x&u.rmask
		for i := uniformRounds - 2; i >= 0; i -= 2 {
			r ^= mix13(l^u.keys[i+1]) & u.rmask
			l ^= mix13(r^u.keys[i]) & u.lmask
		}
		if x = l<<u.right | r; x < uint64(u.n) {
			if int(x) < from {
				return -1
			}
			return int(x)
		}
	}
}
