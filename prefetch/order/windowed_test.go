package order

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// drawGroups cuts 0..n-1, shuffled, into groups, some of them empty.
func drawGroups(t *rapid.T) listed {
	n := rapid.IntRange(0, 80).Draw(t, "n")
	all := rapid.Permutation(samples(Sequential(n))).Draw(t, "samples")
	var g listed
	for len(all) > 0 || rapid.IntRange(0, 3).Draw(t, "empty group at the end") == 0 {
		k := rapid.IntRange(0, min(len(all), 12)).Draw(t, "size")
		g = append(g, all[:k])
		all = all[k:]
	}
	return g
}

// overGroups is Windowed where nothing is wrong.
func overGroups(g Groups, seed uint64, epoch, window int) Locator {
	o, err := Windowed(g, seed, epoch, window)
	if err != nil {
		panic(err)
	}
	return o
}

func TestWindowedErrors(t *testing.T) {
	for words, f := range map[string]func() (Locator, error){
		"window 0":     func() (Locator, error) { return Windowed(Contiguous(3, 2), 0, 0, 0) },
		"epoch -1":     func() (Locator, error) { return Windowed(Contiguous(3, 2), 0, -1, 1) },
		"holds sample": func() (Locator, error) { return Windowed(listed{{0, 0}}, 0, 0, 1) },
	} {
		if o, err := f(); o != nil || err == nil || !strings.Contains(err.Error(), words) {
			t.Errorf("%v, %v, want %q", o, err, words)
		}
	}
}

// Each sample once; never more than the window's groups begun and not ended, and as many as there can
// be; nothing but (seed, epoch, groups, window) matters.
func TestWindowedModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		g := drawGroups(t)
		seed, epoch := rapid.Uint64().Draw(t, "seed"), rapid.IntRange(0, 5).Draw(t, "epoch")
		window := rapid.IntRange(1, 12).Draw(t, "window")
		o := overGroups(g, seed, epoch, window)
		n := 0
		groupOf, left := map[int]int{}, make([]int, len(g))
		for i, members := range g {
			n += len(members)
			left[i] = len(members)
			for _, s := range members {
				groupOf[s] = i
			}
		}
		if o.Len() != n {
			t.Fatalf("%d positions, want %d", o.Len(), n)
		}
		seen, open := map[int]bool{}, 0
		for pos := range n {
			s := o.At(pos)
			i, ok := groupOf[s]
			if !ok || seen[s] {
				t.Fatalf("position %d holds %d, which is no sample or not new", pos, s)
			}
			seen[s] = true
			if left[i] == len(g[i]) {
				open++
			}
			if open > window {
				t.Fatalf("position %d: %d groups open, window %d", pos, open, window)
			}
			if left[i]--; left[i] == 0 {
				open--
			}
			if p := o.Find(s, 0); p != pos || o.Find(s, pos) != pos || o.Find(s, pos+1) != -1 {
				t.Fatalf("sample %d is at %d, Find says %d", s, pos, p)
			}
		}
		if o.Find(-1, 0) != -1 || o.Find(n, 0) != -1 {
			t.Fatal("samples that are none are found")
		}
		if !slices.Equal(samples(o), samples(overGroups(g, seed, epoch, window))) {
			t.Fatal("another order the second time")
		}
	})
}

// The bits of windowed@1 are a promise. The values are those of another implementation, in Python,
// written from the comment.
func TestWindowedGolden(t *testing.T) {
	for _, c := range []struct {
		g      Groups
		seed   uint64
		epoch  int
		window int
		want   []int
	}{
		{Contiguous(12, 4), 0, 0, 2, []int{8, 7, 9, 5, 4, 6, 3, 1, 2, 11, 10, 0}},
		{Contiguous(12, 4), 0, 1, 2, []int{8, 11, 7, 4, 5, 10, 9, 0, 6, 3, 1, 2}},
		{Contiguous(10, 3), 42, 0, 9, []int{0, 5, 7, 2, 6, 9, 8, 1, 3, 4}},
		{listed{{}, {5, 1}, {}, {0, 3, 2}, {4}}, math.MaxUint64, 7, 2, []int{5, 1, 3, 0, 4, 2}},
	} {
		if got := samples(overGroups(c.g, c.seed, c.epoch, c.window)); !slices.Equal(got, c.want) {
			t.Errorf("%v seed=%d epoch=%d window=%d: %v, want %v", c.g, c.seed, c.epoch, c.window, got, c.want)
		}
	}
	h := sha256.New()
	o := overGroups(Contiguous(100_000, 1000), 1<<40, 3, 8)
	for pos := range o.Len() {
		h.Write(binary.LittleEndian.AppendUint32(nil, uint32(o.At(pos))))
	}
	if sum := hex.EncodeToString(h.Sum(nil)); sum !=
		"52ccad765f46a3acd67f05a5aa9e474b2ac859ec1c8238617ed5d85c75877bc7" {
		t.Errorf("100,000 samples: digest %s", sum)
	}
}

func TestWindowedDiffers(t *testing.T) {
	g := Contiguous(10_000, 100)
	a := overGroups(g, 1, 0, 8)
	for name, b := range map[string]Order{
		"epoch": overGroups(g, 1, 1, 8), "seed": overGroups(g, 2, 0, 8), "seed and epoch": overGroups(g, 0, 1, 8),
	} {
		same := 0
		for pos := range a.Len() {
			if a.At(pos) == b.At(pos) {
				same++
			}
		}
		// About one shard in a hundred is open at the same time, of which one sample in a hundred is the same.
		if same > 60 {
			t.Errorf("another %s: %d of %d positions hold the same sample", name, same, a.Len())
		}
	}
}

func TestWindowedStatistics(t *testing.T) {
	t.Run("first sample", func(t *testing.T) {
		// Its group, its place in the group, and the group that is opened first after the window.
		groups, places, late := make([]int, 20), make([]int, 25), make([]int, 20)
		each(20_000, func(seed uint64, epoch int) {
			o := overGroups(Contiguous(500, 25), seed, epoch, 4)
			groups[o.At(0)/25]++
			places[o.At(0)%25]++
			var opened []int
			for pos := 0; len(opened) < 5; pos++ {
				if g := o.At(pos) / 25; !slices.Contains(opened, g) {
					opened = append(opened, g)
				}
			}
			late[opened[4]]++
		})
		chi2(t, "group", groups, len(groups)-1)
		chi2(t, "place in the group", places, len(places)-1)
		chi2(t, "first group after the window", late, len(late)-1)
	})
	t.Run("all open", func(t *testing.T) {
		// A uniform shuffle, also where the groups differ in size.
		counts := make([]int, 120)
		each(200*120, func(seed uint64, epoch int) {
			rank := 0 // Lehmer code
			p := samples(overGroups(listed{{3}, {0, 4, 1}, {2}}, seed, epoch, 3))
			for i := range p {
				below := 0
				for _, x := range p[i+1:] {
					if x < p[i] {
						below++
					}
				}
				rank = rank*(5-i) + below
			}
			counts[rank]++
		})
		chi2(t, "permutation", counts, 119)
	})
	t.Run("within a group", func(t *testing.T) {
		// The order of a group's own samples is uniform at any window.
		for _, window := range []int{1, 3} {
			counts := make([]int, 16)
			each(16*300, func(seed uint64, epoch int) {
				i := 0
				o := overGroups(Contiguous(40, 4), seed, epoch, window)
				for pos := range o.Len() {
					if s := o.At(pos); s/4 == 5 {
						counts[i*4+s%4]++
						i++
					}
				}
			})
			chi2(t, fmt.Sprint("window ", window), counts, 9)
		}
	})
	t.Run("place in time", func(t *testing.T) {
		// Over many keys no sample comes early or late.
		const n, parts = 300, 10
		counts := make([]int, n*parts)
		each(40*n, func(seed uint64, epoch int) {
			o := overGroups(Contiguous(n, 30), seed, epoch, 3)
			for pos := range n {
				counts[o.At(pos)*parts+pos*parts/n]++
			}
		})
		// The samples of a group come together, so that the counts of a group vary as one: far fewer
		// degrees of freedom than cells, and a larger sum. Groups are compared instead.
		groups := make([]int, 10*parts)
		for i, c := range counts {
			groups[i/parts/30*parts+i%parts] += c
		}
		for i, c := range groups {
			// 30 samples of 40·300 keys in one of ten parts of the time; all 30 may come at once.
			if mean, sd := 30*40*n/parts, 30*math.Sqrt(40*n*0.1*0.9); math.Abs(float64(c-mean)) > 5*sd {
				t.Errorf("group %d has %d samples in part %d, want %d ± %.0f", i/parts, c, i%parts, mean, sd)
			}
		}
	})
}

// certificate measures the design effect of the batches of o from the sequence alone: the variance of a
// batch's mean of a value that is the same for all samples of a group, in units of the variance that
// batches drawn at random without replacement have. The values do not appear: for independent values of
// variance 1 it is the expectation, from how the batch falls on the groups.
func certificate(o Order, groupOf func(sample int) int, groups, batch int) float64 {
	n := o.Len()
	sizes := make([]float64, groups)
	for pos := range n {
		sizes[groupOf(o.At(pos))]++
	}
	// E(mean of a batch - mean of all)² = Σ over groups of (share of the batch - share of all)².
	spread, batches := 0.0, 0
	for from := 0; from+batch <= n; from += batch {
		share := make([]float64, groups)
		for pos := from; pos < from+batch; pos++ {
			share[groupOf(o.At(pos))] += 1 / float64(batch)
		}
		for g, s := range share {
			d := s - sizes[g]/float64(n)
			spread += d * d
		}
		batches++
	}
	spread /= float64(batches)
	// A batch drawn without replacement: Σ p(1-p)/B · (n-B)/(n-1), with p a group's share of all.
	random := 0.0
	for _, size := range sizes {
		p := size / float64(n)
		random += p * (1 - p)
	}
	random *= float64(n-batch) / float64(n-1) / float64(batch)
	return spread / random
}

func TestWindowedDesignEffect(t *testing.T) {
	const batch = 256
	for _, c := range []struct {
		groups, size, window int
		tolerance            float64 // of D, relative
	}{
		{512, 500, 8, 0.06},
		{512, 500, 64, 0.06},
		{128, 1000, 16, 0.06},
		{64, 1000, 16, 0.12},
		{32, 1000, 16, 0.12},
		{100, 1000, 1, 0.10}, // a quarter of the batches is cut in two by a group's end
		{16, 1000, 16, 0.15}, // D = 1: the noise is relative to 1
		{16, 1000, 100, 0.15},
	} {
		d := 0.0
		const epochs = 3
		for epoch := range epochs {
			o := overGroups(Contiguous(c.groups*c.size, c.size), 5, epoch, c.window)
			d += certificate(o, func(s int) int { return s / c.size }, c.groups, batch) / epochs
		}
		w := float64(min(c.window, c.groups))
		s, g := float64(c.size), float64(c.groups)
		want := 1 + (batch-1)*(s-1)/(w*s-1)*(1-w/g)
		t.Logf("%d of %d groups of %d: D = %.2f, formula %.2f", c.window, c.groups, c.size, d, want)
		if math.Abs(d-want) > c.tolerance*want {
			t.Errorf("%d of %d groups of %d open: D = %.2f, want %.2f ± %.0f%%",
				c.window, c.groups, c.size, d, want, 100*c.tolerance)
		}
	}
	// The certificate itself: a uniform order has D = 1, a sequential one the batch.
	groupOf := func(s int) int { return s / 1000 }
	if d := certificate(Uniform(100_000, 1, 0), groupOf, 100, batch); d < 0.95 || d > 1.05 {
		t.Errorf("uniform: D = %.2f", d)
	}
	if d := certificate(Sequential(102_400), func(s int) int { return s / 1024 }, 100, batch); d < 0.99*batch ||
		d > 1.02*batch {
		t.Errorf("sequential: D = %.2f", d)
	}
}

// New groups come evenly, so that what has to be fetched does.
func TestWindowedOpensEvenly(t *testing.T) {
	const groups, size, window = 128, 1000, 16
	for seed := range uint64(3) {
		o := overGroups(Contiguous(groups*size, size), seed, 0, window)
		var at []int // positions at which a group is met for the first time
		met := map[int]bool{}
		for pos := range o.Len() {
			if g := o.At(pos) / size; !met[g] {
				met[g] = true
				at = append(at, pos)
			}
		}
		for i, pos := range at[window:] {
			j := i
			for j < len(at)-window && at[window+j] < pos+size {
				j++
			}
			if j-i > 6 {
				t.Errorf("seed %d: %d groups are opened within %d positions from %d on", seed, j-i, size, pos)
			}
		}
	}
}

func BenchmarkWindowed1M(b *testing.B) {
	b.ReportAllocs()
	for b.Loop() {
		overGroups(Contiguous(1_000_000, 1000), 1, 0, 16)
	}
}
