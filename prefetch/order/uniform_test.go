package order

import (
	"fmt"
	"math"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

func TestUniformIsBijective(t *testing.T) {
	for n := range 2001 {
		u := Uniform(n, uint64(n)*7919, n%5)
		if u.Len() != n {
			t.Fatalf("length %d, want %d", u.Len(), n)
		}
		seen := make([]bool, n)
		for pos := range n {
			s := u.At(pos)
			if s < 0 || s >= n || seen[s] {
				t.Fatalf("n=%d: position %d holds %d, out of range or for the second time", n, pos, s)
			}
			seen[s] = true
			if p := u.Find(s, 0); p != pos {
				t.Fatalf("n=%d: sample %d is at %d, Find says %d", n, s, pos, p)
			}
		}
	}
}

func TestUniformRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(1, 1<<rapid.IntRange(0, 60).Draw(t, "bits")).Draw(t, "n")
		u := Uniform(n, rapid.Uint64().Draw(t, "seed"), rapid.IntRange(0, 1000).Draw(t, "epoch"))
		pos := rapid.IntRange(0, n-1).Draw(t, "pos")
		s := u.At(pos)
		if s < 0 || s >= n {
			t.Fatalf("sample %d of %d", s, n)
		}
		if p := u.Find(s, 0); p != pos {
			t.Fatalf("Find(%d) = %d, want %d", s, p, pos)
		}
		if u.Find(s, pos) != pos || u.Find(s, pos+1) != -1 || u.Find(n, 0) != -1 || u.Find(-1, 0) != -1 {
			t.Fatal("Find ignores its bounds")
		}
	})
}

// The bits of uniform@1 are a promise.
func TestUniformGolden(t *testing.T) {
	for _, c := range []struct {
		n     int
		seed  uint64
		epoch int
		want  []int
	}{
		{10, 0, 0, []int{3, 9, 7, 6, 8, 1, 0, 5, 4, 2}},
		{1000, 42, 0, []int{306, 267, 170, 837, 342, 711, 218, 805, 738, 456}},
		{1000, 42, 1, []int{491, 434, 808, 82, 315, 803, 999, 957, 654, 482}},
		{1_000_000_000_000, math.MaxUint64, 7,
			[]int{43412837452, 510423710752, 69660241401, 137657156165, 677237589403, 652757048383, 581796788695,
				933977670262, 852945246040, 23345401417}},
	} {
		u := Uniform(c.n, c.seed, c.epoch)
		if got := samples(Slice(u, 0, 10)); !slices.Equal(got, c.want) {
			t.Errorf("n=%d seed=%d epoch=%d: %v, want %v", c.n, c.seed, c.epoch, got, c.want)
		}
	}
}

// chi2 fails the test if the counts are too uneven for independent uniform draws, or too even.
// The statistic is normal to a good approximation here, as there are hundreds of degrees of
// freedom or many expected counts; 5 standard deviations happen once in 2 million tests, and the
// keys are fixed.
func chi2(t *testing.T, name string, counts []int, freedom int) {
	t.Helper()
	total := 0
	for _, c := range counts {
		total += c
	}
	expected := float64(total) / float64(len(counts))
	sum := 0.0
	for _, c := range counts {
		d := float64(c) - expected
		sum += d * d / expected
	}
	// Wilson and Hilferty's cube root makes chi-squared normal also for few degrees of freedom.
	k := float64(freedom)
	z := (math.Cbrt(sum/k) - (1 - 2/(9*k))) / math.Sqrt(2/(9*k))
	if math.Abs(z) > 5 {
		t.Errorf("%s: chi-squared %.0f at %d degrees of freedom, z = %.1f", name, sum, freedom, z)
	}
}

// keys yields independent-looking but related keys, as users choose them: small seeds, first
// epochs.
func keys(yield func(seed uint64, epoch int) bool) {
	for i := 0; ; i++ {
		if !yield(uint64(i/8), i%8) {
			return
		}
	}
}

func each(count int, f func(seed uint64, epoch int)) {
	for seed, epoch := range keys {
		if count--; count < 0 {
			return
		}
		f(seed, epoch)
	}
}

func TestUniformStatistics(t *testing.T) {
	t.Run("permutations", func(t *testing.T) {
		for n, all := range map[int]int{3: 6, 4: 24, 5: 120} {
			counts := make([]int, all)
			each(200*all, func(seed uint64, epoch int) {
				p := samples(Uniform(n, seed, epoch))
				rank := 0 // Lehmer code
				for i := range p {
					below := 0
					for _, x := range p[i+1:] {
						if x < p[i] {
							below++
						}
					}
					rank = rank*(n-i) + below
				}
				counts[rank]++
			})
			chi2(t, fmt.Sprint("n=", n), counts, all-1)
		}
	})
	// 64 and 100 walk cycles, 256 and 512 fill their domain.
	for _, n := range []int{64, 100, 256, 512} {
		t.Run(fmt.Sprint("n=", n), func(t *testing.T) {
			positions, successions := make([]int, n*n), make([]int, n*n)
			epochs := make([]int, n*n)
			each(40*n, func(seed uint64, epoch int) {
				p, next := samples(Uniform(n, seed, epoch)), Uniform(n, seed, epoch+1)
				for i, s := range p {
					positions[i*n+s]++
					successions[(p[(i+1)%n]-s+n)%n*n+i]++
					epochs[s*n+next.At(i)]++
				}
			})
			chi2(t, "sample at position", positions, (n-1)*(n-1))
			chi2(t, "difference of neighbours by position", successions[n:], (n-2)*n)
			chi2(t, "sample at the same position of the next epoch", epochs, (n-1)*(n-1))
		})
	}
	t.Run("fixed points", func(t *testing.T) {
		// Poisson with mean 1, so the sum over 4,000 keys is 4,000 +- 63.
		fixed := 0
		each(4000, func(seed uint64, epoch int) {
			u := Uniform(300, seed, epoch)
			for i := range u.Len() {
				if u.At(i) == i {
					fixed++
				}
			}
		})
		if fixed < 4000-5*63 || fixed > 4000+5*63 {
			t.Errorf("%d fixed points, want about 4,000", fixed)
		}
	})
	t.Run("correlation", func(t *testing.T) {
		const n = 20000
		correlate := func(name string, a, b Order) {
			// Pearson of uniform ranks; its standard deviation is 1/sqrt(n).
			sum := 0.0
			for i := range n {
				sum += (float64(a.At(i)) - (n-1)/2.0) * (float64(b.At(i)) - (n-1)/2.0)
			}
			if r := sum / n / ((n*n - 1) / 12.0); math.Abs(r) > 5/math.Sqrt(n) {
				t.Errorf("%s: correlation %.4f", name, r)
			}
		}
		for seed := range uint64(20) {
			u := Uniform(n, seed, 0)
			correlate("with position", u, Sequential(n))
			correlate("with next epoch", u, Uniform(n, seed, 1))
			correlate("with next seed", u, Uniform(n, seed+1, 0))
			correlate("seed against epoch", Uniform(n, seed, 1), Uniform(n, seed+1, 0))
			half := n / 2
			correlate("with neighbour", u, List(append(
				list32(Slice(u, 1, n)), uint32(u.At(half)))))
		}
	})
}

// Where n is too large to read an epoch, the beginning of it is what can be looked at: it has to fall
// evenly on the dataset, and successions in it too. n of 10^12 cycle-walks, 2^40 does not; 2^60 is the largest.
func TestUniformLarge(t *testing.T) {
	const cells, perCell = 1000, 100
	for _, n := range []int{1_000_000_000, 1_000_000_000_000, 1 << 40, 1 << 60} {
		// Scaled by floats: a cell's bound may be off by a sample, of millions.
		cell := func(sample int) int { return min(cells-1, int(float64(sample)/float64(n)*cells)) }
		for seed := range uint64(4) {
			u, next := Uniform(n, seed, 0), Uniform(n, seed, 1)
			prefix, far, low := make([]int, cells), make([]int, cells), make([]int, cells)
			steps, epochs := make([]int, cells), make([]int, cells)
			for i := range cells * perCell {
				s := u.At(i)
				prefix[cell(s)]++
				low[s%cells]++
				far[cell(u.At(n/2+i*(n/(4*cells*perCell))))]++
				step := u.At(i+1) - s
				steps[cell((step+n)%n)]++
				epochs[cell((next.At(i)-s+n)%n)]++
			}
			name := fmt.Sprintf("n=%d, seed %d: ", n, seed)
			chi2(t, name+"prefix", prefix, cells-1)
			chi2(t, name+"low digits of the prefix", low, cells-1)
			chi2(t, name+"positions far apart", far, cells-1)
			chi2(t, name+"steps", steps, cells-1)
			chi2(t, name+"difference to the next epoch", epochs, cells-1)
			discrepancy(t, name, u, cells*perCell)
		}
	}
}

// discrepancy fails the test if the first k samples do not fall evenly on the dataset: Kolmogorov and
// Smirnov's statistic is above 2.8/√k once in 3 million tests.
func discrepancy(t *testing.T, name string, u Order, k int) {
	t.Helper()
	x := make([]float64, k)
	for i := range x {
		x[i] = float64(u.At(i)) / float64(u.Len())
	}
	slices.Sort(x)
	most := 0.0
	for i, v := range x {
		most = max(most, math.Abs(v-float64(i)/float64(k)), math.Abs(float64(i+1)/float64(k)-v))
	}
	if most > 2.8/math.Sqrt(float64(k)) {
		t.Errorf("%sthe first %d samples have discrepancy %.5f", name, k, most)
	}
}

// All prefixes of an epoch that fits memory are even, short and long ones; long ones even more so, as the
// epoch is a permutation.
func TestUniformPrefixes(t *testing.T) {
	for seed := range uint64(5) {
		for epoch := range 3 {
			u := Uniform(100_003, seed, epoch)
			for _, k := range []int{10, 100, 1000, 10_000, 50_000, 100_003} {
				discrepancy(t, fmt.Sprintf("seed %d, epoch %d: ", seed, epoch), u, k)
			}
		}
	}
}

func list32(o Order) []uint32 {
	l := make([]uint32, o.Len())
	for i := range l {
		l[i] = uint32(o.At(i))
	}
	return l
}

func BenchmarkUniformAt(b *testing.B) {
	for _, n := range []int{1_000_000, 1<<20 + 1, 1_000_000_000_000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			u := Uniform(n, 1, 0)
			pos := 0
			for b.Loop() {
				u.At(pos)
				if pos++; pos == n {
					pos = 0
				}
			}
		})
	}
}
