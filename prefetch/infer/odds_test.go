package infer

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/shoalfs/shoal/prefetch/order"
)

// others are ways of reading that are not torch's shuffles. Some draw by the same generator.
var others = []struct {
	name string
	read func(n int, seed uint32, rng *rand.Rand) []int
}{
	{"sequential", func(n int, _ uint32, _ *rand.Rand) []int { return upTo(n) }},
	{"backwards", func(n int, _ uint32, _ *rand.Rand) []int { s := upTo(n); slices.Reverse(s); return s }},
	{"strided", func(n int, seed uint32, _ *rand.Rand) (s []int) {
		step := int(seed)%90 + 10
		for first := range step {
			for i := first; i < n; i += step {
				s = append(s, i)
			}
		}
		return s
	}},
	{"random with replacement", func(n int, _ uint32, rng *rand.Rand) (s []int) {
		for range n {
			s = append(s, rng.IntN(n))
		}
		return s
	}},
	{"another generator", func(n int, _ uint32, rng *rand.Rand) []int { return rng.Perm(n) }},
	{"numpy.random.RandomState.shuffle", func(n int, seed uint32, _ *rand.Rand) []int {
		// The same seeding and the same words, but backwards, and masked with rejection.
		g := order.NewGenerator(uint64(seed))
		s := upTo(n)
		for i := n - 1; i > 0; i-- {
			mask := uint32(1)<<(32-leadingZeros(uint32(i))) - 1
			j := g.Random() & mask
			for j > uint32(i) {
				j = g.Random() & mask
			}
			s[i], s[j] = s[j], s[i]
		}
		return s
	}},
	{"random.shuffle", func(n int, seed uint32, _ *rand.Rand) []int {
		// Python's algorithm by the same words: the high bits, with rejection.
		g := order.NewGenerator(uint64(seed))
		s := upTo(n)
		for i := n - 1; i > 0; i-- {
			shift := leadingZeros(uint32(i + 1))
			j := g.Random() >> shift
			for j > uint32(i) {
				j = g.Random() >> shift
			}
			s[i], s[j] = s[j], s[i]
		}
		return s
	}},
	{"a shuffle buffer", func(n int, _ uint32, rng *rand.Rand) (s []int) {
		// As DALI and WebDataset do: a random one of a few hundred that were read in sequence.
		buffer := upTo(min(n, 256))
		for next := len(buffer); len(buffer) > 0; {
			i := rng.IntN(len(buffer))
			s = append(s, buffer[i])
			if next < n {
				buffer[i] = next
				next++
			} else {
				buffer = slices.Delete(buffer, i, i+1)
			}
		}
		return s
	}},
}

func leadingZeros(x uint32) (n int) {
	for ; x>>31 == 0; n++ {
		x <<= 1
	}
	return n
}

// traces returns 26 traces each of all the ways, read by a few processes or by nobody knows who.
func traces(yield func(name string, n int, opens []Open) bool) {
	rng := rand.New(rand.NewPCG(5, 6))
	for _, other := range others {
		for i := range 26 {
			n := []int{150, 300, 600, 1000}[i%4]
			l := loader{order: list(other.read(n, uint32(i), rng)), world: 1, ranks: []int{0}, batch: 8 << (i % 3),
				workers: i % 5, ahead: 2, pids: i%2 == 0, first: 7}
			if !yield(other.name, n, l.opens(rng)) {
				return
			}
		}
	}
}

func list(samples []int) order.Order {
	l := make([]uint32, len(samples))
	for i, s := range samples {
		l[i] = uint32(s)
	}
	return order.List(l)
}

// Of 208 traces that are none of torch's, none gives a lock. Each is searched after some opens, by a few
// of the steps in turn.
func TestNoFalseLock(t *testing.T) {
	i, stride := 0, 32
	if testing.Short() {
		stride = 256
	}
	traces(func(name string, n int, opens []Open) bool {
		i++
		tr := newTrace(Subset{Len: n})
		for _, o := range opens[:min(len(opens), 40*(i%6)+40)] {
			tr.add(o)
		}
		s := &Search{}
		s.addUsual(newLook(tr.opens, tr.subset, wanted))
		for step := i % stride; step < s.Steps(); step += stride {
			s.Run(step, never, func(f Finding) { t.Errorf("%s of %d samples: %+v", name, n, f) })
		}
		return true
	})
	if i < 200 {
		t.Errorf("only %d traces", i)
	}
}

// Evidence has the odds that it claims: b bits by chance with a probability of 2^-b at most, whatever the
// trace.
func TestEvidenceIsHonest(t *testing.T) {
	const shuffles = 40
	var reached [16]int // at least so many bits
	all := 0
	seed := uint32(1 << 20) // not among those that the traces were made from
	traces(func(name string, n int, opens []Open) bool {
		tr := newTrace(Subset{Len: n})
		for _, o := range opens[:min(len(opens), 80)] {
			tr.add(o)
		}
		for i := range shuffles {
			all++
			seed++
			place := make([]int, n)
			o := order.Torch(n, uint64(seed), 0, 1, 0, 0, false)
			for pos := range n {
				place[o.At(pos)] = pos
			}
			m, most := newModel(n, n, i%2 == 0), 0.0
			for j, o := range tr.opens {
				m.open(o.Process, place[o.Sample], n-j)
				most = max(most, m.bits)
			}
			for b := range reached {
				if most >= float64(b) {
					reached[b]++
				}
			}
		}
		return true
	})
	t.Logf("of %d pairs of trace and shuffle, this many reached 0, 1, 2, … bits: %v", all, reached)
	for b, n := range reached {
		if want := float64(all) * math.Exp2(float64(-b)); float64(n) > want+5*math.Sqrt(want)+1 {
			t.Errorf("%d reached %d bits, want %.1f at most", n, b, want)
		}
	}
}

// Whatever the loader, a finding names the right shuffle and ranks; and there is one if the trace
// carries enough.
func TestFindingsAreRight(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(60, 20000).Draw(t, "samples")
		world := rapid.SampledFrom([]int{1, 1, 2, 3, 8}).Draw(t, "world")
		first := rapid.IntRange(0, world-1).Draw(t, "first rank")
		last := rapid.IntRange(first, world-1).Draw(t, "last rank")
		seed := rapid.Uint32().Draw(t, "seed")
		noise := rapid.IntRange(0, 20).Draw(t, "percent of other opens")
		lost := rapid.IntRange(0, 20).Draw(t, "percent lost")
		l := loader{
			order: order.Torch(n, uint64(seed), 0, world, 0, world-1, false), world: world,
			ranks: upTo(world)[first : last+1],
			batch: rapid.IntRange(1, 64).Draw(t, "batch"), workers: rapid.IntRange(0, 8).Draw(t, "workers"),
			ahead: rapid.IntRange(1, 4).Draw(t, "prefetch factor"),
			pids:  rapid.Bool().Draw(t, "processes known"), first: 50,
		}
		rng := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "interleaving"), 0))
		tr := newTrace(Subset{Len: n})
		reads := l.opens(rng)
		for _, o := range reads {
			if rng.IntN(100) < noise {
				tr.add(Open{o.Process, uint32(rng.IntN(n))})
			}
			if rng.IntN(100) >= lost {
				tr.add(o)
			}
			if len(tr.opens) >= n/2 || len(tr.opens) >= 1000 {
				break
			}
		}
		look := newLook(tr.opens, tr.subset, wanted)
		var found *Finding
		look.verify(look.scratch(never), Source{Kind: Drawn, Seed: seed}, func(f Finding) { found = &f })
		if found == nil {
			if len(look.opens) >= 400 && noise <= 10 {
				t.Fatalf("%d opens gave no finding", len(look.opens))
			}
			return
		}
		if lost == 0 && noise == 0 && l.batch > 2 && found.World > world {
			t.Errorf("world %d of %d", found.World, world)
		}
		if found.World == world && world > 1 && (found.First < first || found.Last > last) && noise == 0 {
			t.Errorf("ranks %d to %d, want %d to %d at most", found.First, found.Last, first, last)
		}
		look.verify(look.scratch(never), Source{Kind: Drawn, Seed: seed + 1}, func(f Finding) {
			t.Errorf("the wrong seed: %+v", f)
		})
	})
}

// The search of all seeds does not lose the right one to its filter.
func TestFilterKeepsTheSeed(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 8))
	const rounds = 200
	for _, n := range []int{300, 1000, 50000, 1281167} {
		lost, others := 0, 0
		for i := range rounds {
			seed := rng.Uint32()
			tr := newTrace(Subset{Len: n})
			l := loader{order: slicedOrder{order.Torch(n, uint64(seed), 0, 1, 0, 0, false), min(n, 2000)}, world: 1,
				ranks: []int{0},
				batch: 4 << (i % 4), workers: i % 5, ahead: 2, pids: i%2 == 0, first: 9}
			for _, o := range l.opens(rng)[:200] {
				tr.add(o)
			}
			look := newLook(tr.opens, tr.subset, wanted)
			s := &Search{}
			s.addSeeds(look, look.filter(), seed-min(seed, 100), seed+min(100, math.MaxUint32-seed))
			var found []Finding
			s.Run(0, never, func(f Finding) { found = append(found, f) })
			if len(found) != 1 {
				lost++
				others += max(0, len(found)-1)
			} else if found[0].Source != (Source{Kind: Drawn, Seed: seed}) {
				t.Errorf("n=%d: %+v, want seed %d", n, found[0], seed)
			}
		}
		t.Logf("n=%d: %d of %d lost", n, lost, rounds)
		if lost > rounds/50+rounds*30/n || others > 0 {
			t.Errorf("n=%d: %d of %d lost, %d others found", n, lost, rounds, others)
		}
		if n > 10000 {
			break // permuting takes the time
		}
	}
}

// slicedOrder is the beginning of an order.
type slicedOrder struct {
	order.Order
	n int
}

func (o slicedOrder) Len() int { return o.n }

func never() bool { return false }
