package certificate

import (
	"math"
	"strconv"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/shoalfs/shoal/prefetch/order"
)

// The certificate is what its definition says, computed with sets and squares instead of pairs.
func TestOfAgainstDefinition(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(1, 60).Draw(t, "n")
		seq := rapid.SliceOfN(rapid.Uint32Range(0, uint32(n-1)), 1, 90).Draw(t, "sequence")
		batch := rapid.IntRange(1, len(seq)).Draw(t, "batch")
		shard := rapid.SliceOfN(rapid.IntRange(0, 6), n, n).Draw(t, "shards")
		label := rapid.SliceOfN(rapid.IntRange(-1, 4), n, n).Draw(t, "labels")
		c, err := Of(Subject{Order: order.List(seq), Batch: batch, Samples: n,
			Shard: func(s int) int { return shard[s] }, Label: func(s int) int { return label[s] }})
		if err != nil {
			t.Fatal(err)
		}
		near := func(name string, got, want float64) {
			if math.Abs(got-want) > 1e-9*max(1, math.Abs(want)) {
				t.Fatalf("%s: %v, want %v", name, got, want)
			}
		}
		seen := map[uint32]bool{}
		for _, s := range seq {
			seen[s] = true
		}
		if c.Missing != n-len(seen) || c.Repeated != len(seq)-len(seen) || c.Batches != len(seq)/batch ||
			c.Positions != len(seq) {
			t.Fatalf("%+v", c)
		}
		// Pairs, and those of all batches that can be drawn: each pair is in one as often as any other.
		same, all, inBatches := 0.0, 0.0, 0.0
		for i := range seq {
			for j := range i {
				all++
				if shard[seq[i]] == shard[seq[j]] {
					same++
					if i/batch == j/batch && i/batch < c.Batches {
						inBatches++
					}
				}
			}
		}
		near("pairs", c.Shards.Pairs, inBatches/float64(c.Batches))
		if all > 0 {
			near("random pairs", c.Shards.Random, same/all*float64(batch*(batch-1)/2))
		}
		open := 0
		for pos := range seq {
			now := map[int]bool{}
			for i := 0; i <= pos; i++ {
				for j := pos; j < len(seq); j++ {
					if shard[seq[i]] == shard[seq[j]] {
						now[shard[seq[i]]] = true
					}
				}
			}
			open = max(open, len(now))
		}
		if c.Shards.Open != open {
			t.Fatalf("%d open, want %d", c.Shards.Open, open)
		}
		whole := map[int]float64{}
		for _, s := range seq {
			whole[label[s]] += 1 / float64(len(seq))
		}
		sum, worst := 0.0, 0.0
		for k := range c.Batches {
			part := map[int]float64{}
			for _, s := range seq[k*batch : (k+1)*batch] {
				part[label[s]] += 1 / float64(batch)
			}
			tv := 0.0
			for l, p := range whole {
				tv += math.Abs(part[l]-p) / 2
			}
			sum += tv
			worst = max(worst, tv)
		}
		near("total variation", c.Labels.Variation, sum/float64(c.Batches))
		near("worst total variation", c.Labels.Worst, worst)
	})
}

// D is the ratio of variances that it claims to be, where the batches hold the epoch.
func TestDesignEffectIsVariance(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		batch, batches := rapid.IntRange(2, 8).Draw(t, "batch"), rapid.IntRange(2, 8).Draw(t, "batches")
		n := batch * batches
		shard := rapid.SliceOfN(rapid.IntRange(0, 4), n, n).Draw(t, "shards")
		c, err := Of(Subject{Order: order.Sequential(n), Batch: batch, Samples: n, Shard: func(s int) int {
			return shard[s]
		}})
		if err != nil {
			t.Fatal(err)
		}
		share := make([]float64, 5)
		for _, g := range shard {
			share[g] += 1 / float64(n)
		}
		spread, random := 0.0, 0.0
		for k := range batches {
			part := make([]float64, 5)
			for _, g := range shard[k*batch : (k+1)*batch] {
				part[g] += 1 / float64(batch)
			}
			for g := range part {
				spread += (part[g] - share[g]) * (part[g] - share[g]) / float64(batches)
			}
		}
		for _, p := range share {
			random += p * (1 - p) / float64(batch) * float64(n-batch) / float64(n-1)
		}
		if random < 1e-9 {
			return
		}
		if math.Abs(c.Shards.Design-spread/random) > 1e-6*(1+spread/random) {
			t.Fatalf("D = %v, want %v", c.Shards.Design, spread/random)
		}
	})
}

// The closed form is the sum.
func TestAbsoluteDeviation(t *testing.T) {
	for n := 1; n <= 25; n++ {
		for marked := 0; marked <= n; marked++ {
			for draws := 1; draws <= n; draws++ {
				mean, want := float64(draws)*float64(marked)/float64(n), 0.0
				for x := 0; x <= draws; x++ {
					want += math.Abs(float64(x)-mean) * math.Exp(choose(marked, x)+choose(n-marked, draws-x)-
						choose(n, draws))
				}
				if got := absoluteDeviation(n, marked, draws); math.Abs(got-want) > 1e-9 {
					t.Fatalf("%d draws of %d, %d marked: %v, want %v", draws, n, marked, got, want)
				}
			}
		}
	}
}

// Known orders: uniform has D near 1 and the label variation that is expected of it, a sequential one
// over class-sorted shards the worst of both, a windowed one what the formula says.
func TestOfOrders(t *testing.T) {
	const shards, size, batch = 128, 1000, 256
	const n = shards * size
	by := func(s int) int { return s / size }
	measure := func(o order.Order) Certificate {
		c, err := Of(Subject{Order: o, Batch: batch, Samples: n, Shard: by, Label: by})
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	for epoch := range 3 {
		c := measure(order.Uniform(n, 1, epoch))
		if math.Abs(c.Shards.Design-1) > 0.05 || math.Abs(c.Labels.Variation/c.Labels.Random-1) > 0.02 ||
			c.Missing+c.Repeated != 0 {
			t.Errorf("uniform: %+v %+v", c.Shards, c.Labels)
		}
		c = measure(windowed(order.Contiguous(n, size), 5, epoch, 16))
		if c.Shards.Open != 16 || math.Abs(c.Shards.Design/c.Shards.Formula-1) > 0.1 {
			t.Errorf("windowed: %+v", c.Shards)
		}
		if c.Labels.Variation < 1.2*c.Labels.Random {
			t.Errorf("16 of 128 classes open, and the labels look random: %+v", c.Labels)
		}
	}
	c := measure(order.Sequential(n))
	if c.Shards.Design < 0.8*batch || c.Labels.Variation < 0.98 || c.Shards.Open != 1 ||
		c.Labels.Worst < c.Labels.Variation {
		t.Errorf("sequential: %+v %+v", c.Shards, c.Labels)
	}
}

func TestOfErrors(t *testing.T) {
	for words, s := range map[string]Subject{
		"at least 1":    {Order: order.Sequential(3), Samples: 3},
		"smaller batch": {Order: order.Sequential(3), Samples: 3, Batch: 4},
		"sample 2 of 2": {Order: order.Sequential(3), Samples: 2, Batch: 1},
		"shard of":      {Order: order.Sequential(3), Samples: 3, Batch: 1, Shard: func(int) int { return -1 }},
		"label of":      {Order: order.Sequential(3), Samples: 3, Batch: 1, Label: func(int) int { return -2 }},
	} {
		if _, err := Of(s); err == nil || !strings.Contains(err.Error(), words) {
			t.Errorf("%v, want %q", err, words)
		}
	}
}

// No order that shuffles gives a rank other classes than the rest, however the classes lie in the dataset: sorted, or
// in turns of which the number of ranks is a multiple. (sequential and list are read as they are.)
func TestRanksSeeAllClasses(t *testing.T) {
	const n, classes = 9600, 4
	for lie, label := range map[string]func(int) int{
		"sorted":  func(s int) int { return s * classes / n },
		"turns":   func(s int) int { return s % classes },
		"batches": func(s int) int { return s / 16 % classes },
	} {
		// Neighbours in length are of different classes too.
		f := order.Facts{Samples: n, Shards: func() order.Groups { return order.Contiguous(n, 100) }, Label: label,
			Size:    func(s int) int64 { return int64(1000 + s) },
			Classes: func() []string { return []string{"a", "b", "c", "d"} }}
		for _, text := range []string{"uniform:seed=1", "torch:seed=1", "windowed:seed=1,window=4",
			"windowed:seed=1,window=1",
			"buckets:seed=1,batch=48", "buckets:seed=1,batch=48,count=50", "buckets:seed=1,batch=48,count=200",
			"mixture:seed=1,weights=*:1", "mixture:seed=1,weights=a:1+b:1+c:1+d:1",
			"mixture:seed=1,weights=a:3+[b-d]:1"} {
			for _, world := range []int{2, 3, 4, 8, 16} {
				spec, err := order.Parse(text + ",world=" + strconv.Itoa(world) + ",rank=0-" + strconv.Itoa(world-1))
				if err != nil {
					t.Fatal(err)
				}
				o, err := spec.Over(f, 0)
				if err != nil {
					t.Fatal(err)
				}
				c, err := Of(Subject{Order: o, Batch: 48, Samples: n, Label: label, World: world})
				if err != nil {
					t.Fatal(err)
				}
				if len(c.Ranks) != world {
					t.Fatalf("%d ranks of %d", len(c.Ranks), world)
				}
				for _, r := range c.Ranks {
					if r.Classes != classes || r.Variation > 3*r.Random {
						t.Errorf("%s over classes in %s, world %d: %+v", text, lie, world, r)
					}
				}
			}
		}
	}
}

// windowed is order.Windowed where nothing is wrong.
func windowed(g order.Groups, seed uint64, epoch, window int) order.Locator {
	o, err := order.Windowed(g, seed, epoch, window)
	if err != nil {
		panic(err)
	}
	return o
}
