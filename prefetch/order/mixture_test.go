package order

import (
	"errors"
	"math"
	"slices"
	"strconv"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// drawMixture draws a dataset of classes in runs, and weights over some of them.
func drawMixture(t *rapid.T) (Facts, Spec, []int) {
	classes := []string{"apple", "avocado", "banana", "cherry"}
	labels := rapid.SliceOfN(rapid.IntRange(-1, 3), 4, 60).Draw(t, "labels")
	for i := range classes { // each occurs
		labels[i] = i
	}
	if rapid.Bool().Draw(t, "sorted") {
		slices.Sort(labels)
	}
	f := Facts{Samples: len(labels), Classes: func() []string {
		return classes
	}, Label: func(s int) int { return labels[s] }}
	weights := rapid.SliceOfN(rapid.SampledFrom([]string{"1", "2", "7", "0.5", "0.125", "100", "33.3"}), 3,
		3).Draw(t, "weights")
	text := "mixture:seed=" + rapid.SampledFrom(seedsOfTorch).Draw(t, "seed") + ",weights=a*:" + weights[0] +
		"+cherry:" + weights[1] + "+[ab]*:" + weights[2]
	s, err := Parse(text)
	if err != nil {
		t.Fatal(err)
	}
	if n := rapid.IntRange(0, 150).Draw(t, "samples"); n > 0 {
		if s, err = s.With("samples", itoa(n)); err != nil {
			t.Fatal(err)
		}
	}
	source := make([]int, len(labels)) // of each sample, -1 for none
	for i, l := range labels {
		source[i] = map[int]int{-1: -1, 0: 0, 1: 0, 2: 2, 3: 1}[l]
	}
	return f, s, source
}

// Over the epochs each source keeps its share to within what schedule says; its samples come equally often to
// within one; Find is a search; occurrences are told apart.
func TestMixtureModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		f, s, source := drawMixture(t)
		w, err := parseWeights(s.weights)
		if err != nil {
			t.Fatal(err)
		}
		sum := 0
		for _, x := range w {
			sum += x.weight
		}
		times := make([]int, len(source))
		count, read := make([]int, len(w)), 0
		for epoch := range rapid.IntRange(1, 3).Draw(t, "epochs") {
			o, err := s.Over(f, epoch)
			if err != nil {
				t.Fatal(err)
			}
			want := samples(o)
			type occurrence struct{ sample, number int }
			seen := map[occurrence]bool{}
			for pos, sample := range want {
				read++
				if source[sample] < 0 {
					t.Fatalf("sample %d is of no source", sample)
				}
				count[source[sample]]++
				times[sample]++
				for i := range w {
					share := float64(w[i].weight) / float64(sum)
					if d := math.Abs(float64(count[i]) - share*float64(read)); d >= 5*(1+share) {
						t.Fatalf("after %d positions source %d is %.3f off its share", read, i, d)
					}
				}
				at := occurrence{sample, o.(Repeating).Occurrence(pos)}
				if seen[at] || at.number < 0 {
					t.Fatalf("position %d: %v again", pos, at)
				}
				seen[at] = true
			}
			l := o.(Locator)
			for sample := -1; sample <= len(source); sample++ {
				for from := -1; from <= len(want)+1; from += 1 + len(want)/7 {
					expect := -1
					if i := slices.Index(want[min(max(from, 0), len(want)):], sample); i >= 0 {
						expect = max(from, 0) + i
					}
					if got := l.Find(sample, from); got != expect {
						t.Fatalf("Find(%d, %d) = %d, want %d", sample, from, got, expect)
					}
				}
			}
		}
		for i := range w {
			least, most := math.MaxInt, 0
			for sample, x := range times {
				if source[sample] == i {
					least, most = min(least, x), max(most, x)
				}
			}
			if most-least > 1 {
				t.Fatalf("samples of source %d came %d to %d times", i, least, most)
			}
		}
	})
}

func TestMixtureLength(t *testing.T) {
	// All of the samples in the sources, not of the dataset.
	o, err := must(t, "mixture:seed=1,weights=@0-9:1+@20-49:3").Order(100, 0)
	if err != nil || o.Len() != 40 {
		t.Fatalf("%v", err)
	}
	seen := map[int]bool{}
	for _, s := range samples(o) {
		if seen[s] || s >= 10 && s < 20 || s >= 50 {
			t.Errorf("sample %d again, or of no source", s)
		}
		seen[s] = true
	}
	a, _ := must(t, "mixture:seed=1,weights=@0-9:1+@20-49:3").Order(100, 1)
	if slices.Equal(samples(o), samples(a)) {
		t.Error("both epochs are the same")
	}
	// Ranges win over later globs, and are cut by earlier ones.
	f := Facts{Samples: 4, Classes: func() []string { return []string{"x"} }, Label: func(int) int { return 0 }}
	if o, err = must(t, "mixture:seed=1,weights=@1-2:1+*:1").Over(f, 0); err != nil || o.Len() != 4 {
		t.Errorf("%v", err)
	}
}

// The bits of mixture@2 are a promise. The values are those of another implementation, in Python,
// written from the comments.
func TestMixtureGolden(t *testing.T) {
	for _, c := range []struct {
		text  string
		n     int
		epoch int
		want  []int // the last positions of the epoch
	}{
		{"mixture:seed=1,weights=@0-4:1+@5-19:2", 20, 0,
			[]int{2, 4, 1, 3, 17, 8, 14, 10, 9, 0, 13, 19, 11, 1, 16, 12, 0, 2, 3, 6}},
		{"mixture:seed=1,weights=@0-4:1+@5-19:2", 20, 1,
			[]int{4, 1, 15, 5, 7, 18, 9, 16, 4, 15, 11, 0, 8, 2, 6, 12, 3, 10, 18, 4}},
		{"mixture:seed=-1,weights=@4-9:2+@0-3:0.5+@10-11:1.5,samples=17", 12, 7,
			[]int{10, 11, 9, 9, 6, 5, 10, 7, 4, 11, 8, 11, 0, 10, 2, 6, 7}},
		{"mixture:seed=3,weights=@0-4:1+@5-19:2,samples=8000", 20, 1,
			[]int{1, 15, 14, 9, 3, 5, 10, 4, 17, 13, 12, 16, 1, 7, 2, 4, 6, 3, 8, 6}},
	} {
		o, err := must(t, c.text).Order(c.n, c.epoch)
		if err != nil {
			t.Fatal(err)
		}
		if got := samples(o); !slices.Equal(got[len(got)-len(c.want):], c.want) {
			t.Errorf("%s, epoch %d: %#v", c.text, c.epoch, got)
		}
	}
}

// Any run of a turn, wherever it begins, has each source's share to within the bound of schedule.
func TestScheduleBound(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := make(weights, rapid.IntRange(2, 12).Draw(t, "sources"))
		period := 0
		for i := range w {
			w[i].weight = rapid.OneOf(rapid.IntRange(1, 3), rapid.IntRange(1, 200)).Draw(t, "weight")
			period += w[i].weight
		}
		slots, n := w.schedule(rapid.Uint64().Draw(t, "seed"))
		for j, s := range w {
			share := float64(s.weight) / float64(period)
			if n[j]*period != s.weight*len(slots) {
				t.Fatalf("source %d comes %d times of %d, want a share of %.4f", j, n[j], len(slots), share)
			}
			// A run's deviation is the difference of two prefixes'.
			least, most, count := 0.0, 0.0, 0
			for pos, i := range slots {
				if int(i) == j {
					count++
				}
				d := float64(count) - share*float64(pos+1)
				least, most = min(least, d), max(most, d)
			}
			if bound := 5 * (1 + float64(len(w)-2)*share); most-least >= bound {
				t.Fatalf("source %d of %v is %.3f off in a run, the bound is %.3f", j, w, most-least, bound)
			}
		}
	})
}

// Whatever the world, each rank has each source's share: over an epoch to within what chance does to
// a rank that draws at random, and at each stretch of the epoch, the same for both epochs and many seeds
// together, so that a small lean would show.
func TestMixtureRanks(t *testing.T) {
	for _, weights := range []string{"1+1", "3+1", "1+1+1+1", "7+1", "5+3", "1+15", "2+1+1", "8+4+2+1+1", "5001+4999",
		"1+63", "101+9595"} {
		ws := strings.Split(weights, "+")
		terms := make([]string, len(ws))
		sum := 0.0
		shares := make([]float64, len(ws))
		for i, w := range ws {
			terms[i] = "@" + itoa(100*i) + "-" + itoa(100*i+99) + ":" + w
			shares[i], _ = strconv.ParseFloat(w, 64)
			sum += shares[i]
		}
		for world := 1; world <= 16; world++ {
			const seeds, stretch, stretches = 4, 2000, 4
			lean := make([]float64, world*len(ws))
			for seed := range seeds {
				o, err := must(t, "mixture:seed="+itoa(seed)+",weights="+strings.Join(terms, "+")+",samples="+
					itoa(stretch*stretches)).Order(100*len(ws), seed%2)
				if err != nil {
					t.Fatal(err)
				}
				for from := 0; from < o.Len(); from += stretch {
					count, positions := make([]int, world*len(ws)), make([]int, world)
					for pos := from; pos < from+stretch; pos++ {
						count[pos%world*len(ws)+o.At(pos)/100]++
						positions[pos%world]++
					}
					for j, c := range count {
						p := shares[j%len(ws)] / sum
						off := float64(c) - p*float64(positions[j/len(ws)])
						chance := math.Sqrt(p * (1 - p) * float64(positions[j/len(ws)]))
						if math.Abs(off) > 5*chance+1 {
							t.Errorf("weights %s, seed %d: rank %d of %d has %d of source %d in the %d positions "+
								"from %d on, %.1f off its share",
								weights, seed, j/len(ws), world, c, j%len(ws), stretch, from, off)
						}
						lean[j] += off / chance
					}
				}
			}
			for j, l := range lean {
				if l /= math.Sqrt(seeds * stretches); math.Abs(l) > 5 {
					t.Errorf("weights %s: rank %d of %d leans %.1f standard deviations on source %d",
						weights, j/len(ws), world, l, j%len(ws))
				}
			}
		}
	}
}

func TestMixtureErrors(t *testing.T) {
	f := Facts{Samples: 10, Classes: func() []string {
		return []string{"a", "b"}
	}, Label: func(s int) int { return s / 5 }}
	none := Facts{Samples: 10, Classes: func() []string { return nil }, Label: func(int) int { return -1 }}
	for _, c := range []struct {
		text  string
		f     Facts
		is    error
		words []string
	}{
		{"mixture:seed=1,weights=a:1", Facts{Samples: 10}, ErrNeedsFacts, []string{"classes"}},
		{"mixture:seed=1,weights=a:1+c*:2", f, nil, []string{`"c*" has no sample`, "there are a, b"}},
		{"mixture:seed=1,weights=a*:1+a:2", f, nil, []string{`"a" has no sample`, "earlier source"}},
		{"mixture:seed=1,weights=a:1", none, nil, []string{"no class folders", "@FIRST-LAST"}},
		{"mixture:seed=1,weights=@5-10:1", f, nil, []string{"0 to 9 only"}},
		{"mixture:seed=1,weights=@0-9:1", Facts{Samples: math.MaxUint32}, nil, []string{"2^32-2"}},
	} {
		_, err := must(t, c.text).Over(c.f, 0)
		if err == nil || c.is != nil && !errors.Is(err, c.is) {
			t.Errorf("%s: %v, want %v", c.text, err, c.is)
			continue
		}
		for _, w := range c.words {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("%s: %q lacks %q", c.text, err, w)
			}
		}
	}
	for _, bad := range []string{"a", "a:", ":1", "a:0", "a:-1", "a:1e3", "a:0.1234567", "a:1+", "[:1", "@5:1",
		"@3-1:1", "a:1000000+b:0.000001", "a:9999999"} {
		if s, err := Parse("mixture:seed=1,weights=" + bad); err == nil {
			t.Errorf("weights %q are accepted as %s", bad, s)
		} else if !strings.Contains(err.Error(), "column 24") {
			t.Errorf("weights %q: %v names no column", bad, err)
		}
	}
	if s := must(t, "mixture:seed=1,weights=a:0.75+b:0.25"); s.String() != "mixture:seed=1,weights=a:3+b:1" {
		t.Errorf("canonical: %s", s)
	}
}

func BenchmarkMixtureAt(b *testing.B) {
	s, err := Parse("mixture:seed=1,weights=@0-99999:0.7+@100000-999999:0.3")
	if err != nil {
		b.Fatal(err)
	}
	o, err := s.Order(1_000_000, 0)
	if err != nil {
		b.Fatal(err)
	}
	pos := 0
	for b.Loop() {
		o.At(pos)
		if pos++; pos == o.Len() {
			pos = 0
		}
	}
}
