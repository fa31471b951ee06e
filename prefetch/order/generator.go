package order

import "math"

// Generator is PyTorch's CPU random generator: MT19937 (Matsumoto and Nishimura, "Mersenne Twister", ACM TOMACS 8(1),
// 1998), seeded with the low 32 bits of the seed. It produces the same numbers as torch.Generator after
// manual_seed(seed) (ATen/core/MT19937RNGEngine.h and CPUGeneratorImpl.cpp). It is not safe for concurrent use.
type Generator struct {
	state [mtN]uint32
	next  int // index into state of the next word; mtN means that the state must be turned first
}

const (
	mtN = 624
	mtM = 397
)

// NewGenerator returns a generator in the state that manual_seed(seed) leaves. Only the low 32
// bits of seed matter. A negative seed in Python is its two's complement here, as in torch.
func NewGenerator(seed uint64) *Generator {
	g := &Generator{next: mtN}
	g.state[0] = uint32(seed)
	for i := uint32(1); i < mtN; i++ {
		p := g.state[i-1]
		g.state[i] = 1812433253*(p^p>>30) + i
	}
	return g
}

func (g *Generator) turn() {
	twist := func(u, v uint32) uint32 {
		// The matrix is applied where the low bit of v is set.
		return (u&0x80000000|v&0x7fffffff)>>1 ^ -(v&1)&0x9908b0df
	}
	s := &g.state
	for i := range mtN - mtM {
		s[i] = s[i+mtM] ^ twist(s[i], s[i+1])
	}
	for i := mtN - mtM; i < mtN-1; i++ {
		s[i] = s[i+mtM-mtN] ^ twist(s[i], s[i+1])
	}
	s[mtN-1] = s[mtM-1] ^ twist(s[mtN-1], s[0])
	g.next = 0
}

// Random returns the next 32-bit word, torch's generator->random().
func (g *Generator) Random() uint32 {
	if g.next == mtN {
		g.turn()
	}
	y := g.state[g.next]
	g.next++
	y ^= y >> 11
	y ^= y << 7 & 0x9d2c5680
	y ^= y << 15 & 0xefc60000
	return y ^ y>>18
}

// Random64 returns the next two words as one, the first one high: torch's generator->random64().
func (g *Generator) Random64() uint64 {
	hi := uint64(g.Random())
	return hi<<32 | uint64(g.Random())
}

// Skip draws k words and drops them.
func (g *Generator) Skip(k int) {
	for k > mtN-g.next {
		k -= mtN - g.next
		g.turn()
	}
	g.next += k
}

// Int63 returns what torch.empty((), dtype=torch.int64).random_() draws: it is how DataLoader and
// RandomSampler draw seeds.
func (g *Generator) Int63() uint64 { return g.Random64() & math.MaxInt64 }

// randPermWide is the number of samples from which torch switches to 64-bit draws.
const randPermWide = math.MaxUint32 / 20

// RandPerm returns torch.randperm(n, generator=g) and leaves g as torch does. It takes 4n bytes. It panics if n is
// negative or above 2^32-1: a trainer would need 34 GB a rank for such an order, and more in Python.
//
// From n = 214,748,364 on it is the 64-bit variant that torch has had since early 2025
// (ATen/native/TensorFactories.cpp, randperm_cpu; pull request 143682). Older versions, 1.13 among
// them, use the 32-bit variant there too, so orders of that size agree with current torch only.
func (g *Generator) RandPerm(n int) []uint32 {
	if n < 0 || n > math.MaxUint32 {
		panic("order: RandPerm is for 0 to 2^32-1 samples")
	}
	r := make([]uint32, n)
	if n < randPermWide {
		g.shuffle(r)
	} else {
		g.shuffleWide(r)
	}
	return r
}

// shuffle is Fisher and Yates, forwards. The modulo is biased and has to stay so.
func (g *Generator) shuffle(r []uint32) {
	for i := range r {
		r[i] = uint32(i)
	}
	for i := 0; i < len(r)-1; i++ {
		z := i + int(g.Random()%uint32(len(r)-i))
		r[i], r[z] = r[z], r[i]
	}
}

// shuffleWide is the inside-out variant.
func (g *Generator) shuffleWide(r []uint32) {
	for i := range r {
		z := int(g.Random64() % uint64(i+1))
		r[i] = r[z] // for z == i this leaves the 0 that the next line overwrites
		r[z] = uint32(i)
	}
}
