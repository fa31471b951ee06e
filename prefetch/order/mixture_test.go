package order

import (
	"errors"
	"math"
	"slices"
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
	f := Facts{Samples: len(labels), Classes: func() []string { return classes }, Label: func(s int) int { return labels[s] }}
	weights := rapid.SliceOfN(rapid.SampledFrom([]string{"1", "2", "7", "0.5", "0.125", "100", "33.3"}), 3, 3).Draw(t, "weights")
	text := "mixture:seed=" + rapid.SampledFrom(seedsOfTorch).Draw(t, "seed") + ",weights=a*:" + weights[0] + "+cherry:" + weights[1] + "+[ab]*:" + weights[2]
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

// Over any prefix each source has its share to within one; its samples come equally often to within
// one over the epochs; Find is a search; occurrences are told apart.
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
		for epoch := range rapid.IntRange(1, 3).Draw(t, "epochs") {
			o, err := s.Over(f, epoch)
			if err != nil {
				t.Fatal(err)
			}
			count := make([]int, len(w))
			want := samples(o)
			type occurrence struct{ sample, number int }
			seen := map[occurrence]bool{}
			for pos, sample := range want {
				if source[sample] < 0 {
					t.Fatalf("sample %d is of no source", sample)
				}
				count[source[sample]]++
				times[sample]++
				for i := range w {
					if d := math.Abs(float64(count[i]) - float64(w[i].weight)*float64(pos+1)/float64(sum)); d >= 1 {
						t.Fatalf("after %d positions source %d is %.3f off its share", pos+1, i, d)
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

// The bits of mixture@1 are a promise. The values are those of another implementation, in Python,
// written from the comments.
func TestMixtureGolden(t *testing.T) {
	for _, c := range []struct {
		text  string
		n     int
		epoch int
		want  []int
	}{
		{"mixture:seed=1,weights=@0-4:1+@5-19:2", 20, 0, []int{17, 2, 8, 14, 4, 10, 9, 1, 13, 19, 3, 11, 16, 0, 12, 6, 1, 15, 5, 0}},
		{"mixture:seed=1,weights=@0-4:1+@5-19:2", 20, 1, []int{7, 2, 18, 9, 3, 16, 15, 4, 11, 8, 1, 6, 12, 4, 10, 18, 0, 13, 19, 2}},
		{"mixture:seed=-1,weights=@4-9:2+@0-3:0.5+@10-11:1.5,samples=17", 12, 7, []int{7, 10, 4, 11, 8, 2, 10, 6, 7, 11, 5, 10, 9, 1, 11, 8, 4}},
	} {
		o, err := must(t, c.text).Order(c.n, c.epoch)
		if err != nil {
			t.Fatal(err)
		}
		if got := samples(o); !slices.Equal(got, c.want) {
			t.Errorf("%s, epoch %d: %#v", c.text, c.epoch, got)
		}
	}
}

// Weights in any form keep the bound of Tijdeman's theorem.
func TestScheduleBound(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		k := rapid.IntRange(1, 12).Draw(t, "sources")
		w := make(weights, k)
		period := 0
		for i := range w {
			w[i].weight = rapid.OneOf(rapid.IntRange(1, 3), rapid.IntRange(1, 200)).Draw(t, "weight")
			period += w[i].weight
		}
		bound := 1.0
		if k > 1 {
			bound = 1 - 1/float64(2*k-2)
		}
		count := make([]int, k)
		for pos, i := range w.schedule() {
			count[i]++
			for j := range w {
				if d := math.Abs(float64(count[j]) - float64(w[j].weight)*float64(pos+1)/float64(period)); d > bound+1e-9 {
					t.Fatalf("after %d positions source %d of %v is %.4f off, at most %.4f", pos+1, j, w, d, bound)
				}
			}
		}
	})
}

func TestMixtureErrors(t *testing.T) {
	f := Facts{Samples: 10, Classes: func() []string { return []string{"a", "b"} }, Label: func(s int) int { return s / 5 }}
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
	for _, bad := range []string{"a", "a:", ":1", "a:0", "a:-1", "a:1e3", "a:0.1234567", "a:1+", "[:1", "@5:1", "@3-1:1", "a:1000000+b:0.000001", "a:9999999"} {
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
