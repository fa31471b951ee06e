package order

import (
	"errors"
	"math"
	"slices"
	"strings"
	"testing"
)

func TestParse(t *testing.T) {
	for _, c := range []struct{ text, canonical, algorithm string }{
		{"torch:seed=1", "torch:seed=1", "torch@1"},
		{"torch:seed=-1", "torch:seed=18446744073709551615", "torch@1"},
		{"torch:drop_last=1,rank=0-7,world=8,epoch=3,seed=42", "torch:seed=42,epoch=3,world=8,rank=0-7,drop_last=1",
			"torch@1"},
		{"torch:seed=42,epoch=0,world=1,drop_last=0", "torch:seed=42", "torch@1"},
		{"torch:seed=0,world=8,rank=5-5", "torch:seed=0,world=8,rank=5", "torch@1"},
		{"torch:seed=0,world=8", "torch:seed=0,world=8", "torch@1"}, // the rank may come as a flag
		{"torch-loader:seed=9223372036854775807", "torch-loader:seed=9223372036854775807", "torch-loader@1"},
		{"uniform:seed=007", "uniform:seed=7", "uniform@1"},
		{"uniform:rank=1,world=2,seed=7", "uniform:seed=7,world=2,rank=1", "uniform@1"},
		{"windowed:window=16,seed=-1", "windowed:seed=18446744073709551615,window=16", "windowed@1"},
		{"windowed:rank=0-1,world=4,seed=7,epoch=2,window=2147483647",
			"windowed:seed=7,window=2147483647,epoch=2,world=4,rank=0-1", "windowed@1"},
		{"torch-loader:from=sampler,seed=1", "torch-loader:seed=1", "torch-loader@1"},
		{"torch-loader:epoch=2,persistent=1,from=manual_seed,seed=-1",
			"torch-loader:seed=18446744073709551615,from=manual_seed,persistent=1,epoch=2", "torch-loader@1"},
		{"torch-loader:seed=1,from=generator,samples=7,replacement=1,workers=0",
			"torch-loader:seed=1,from=generator,samples=7,replacement=1", "torch-loader@1"},
		{"mixture:weights=a*:0.5+@0-9:1.5,seed=3,samples=9", "mixture:seed=3,weights=a*:1+@0-9:3,samples=9",
			"mixture@2"},
		{"buckets:count=4,batch=8,seed=3,world=2,rank=1", "buckets:seed=3,batch=8,count=4,world=2,rank=1", "buckets@2"},
		{"list:/data/a=b.txt,epoch=3", "list:path=/data/a=b.txt,epoch=3", "list@1"},
		{"list:path=x", "list:path=x", "list@1"},
		{"sequential", "sequential", "sequential@1"},
		{"sequential:world=2,rank=1", "sequential:world=2,rank=1", "sequential@1"},
		{"plan", "plan", ""},
		{"auto", "auto", ""},
		{"none", "none", ""},
	} {
		s, err := Parse(c.text)
		if err != nil {
			t.Errorf("%s: %v", c.text, err)
			continue
		}
		if s.String() != c.canonical || s.Algorithm() != c.algorithm || s.Computed() != (c.algorithm != "") {
			t.Errorf("%s: %s, %s, want %s, %s", c.text, s, s.Algorithm(), c.canonical, c.algorithm)
		}
		if again, err := Parse(s.String()); err != nil || again != s {
			t.Errorf("%s: parsed again: %v, %v", s, again, err)
		}
	}
}

func TestParseErrors(t *testing.T) {
	for _, c := range []struct {
		text  string
		words []string // what the message has to contain
	}{
		{"", []string{"column 1", `""`}},
		{"torhc:seed=1", []string{"column 1", `"torhc"`, `did you mean "torch"?`}},
		{"zzz", []string{`no order is called "zzz"; there are torch, `}},
		{"unifrom", []string{"column 1", `did you mean "uniform"?`}},
		{"torch_loader:seed=1", []string{`did you mean "torch-loader"?`}},
		{"torch:sed=1", []string{"column 7", `"sed"`, `did you mean "seed"?`, "drop_last"}},
		{"torch:seed=1,wrold=2", []string{"column 14", `"wrold"`, `did you mean "world"?`}},
		{"torch:seed=1,droplast=1", []string{"column 14", `did you mean "drop_last"?`}},
		{"torch:seed=1, rank=2", []string{"column 14", `" rank"`, `did you mean "rank"?`}},
		{"torch:seed=1,é=2,x=1", []string{"column 14", `"é"`}},
		{"torch:seed=1,seed=2", []string{"column 14", "twice"}},
		{"torch:seed=1,", []string{"column 14"}},
		{"torch", []string{"column 6", "needs a seed", "torch:seed=…"}},
		{"torch:", []string{"column 7"}},
		{"uniform:epoch=1", []string{"column 16", "needs a seed"}},
		{"torch:seed", []string{"column 7", "no value"}},
		{"torch:seed=", []string{"column 12", "integer"}},
		{"torch:seed=1.5", []string{"column 12", `"1.5"`}},
		{"torch:seed=18446744073709551616", []string{"column 12", "2^64-1"}},
		{"torch:seed=-9223372036854775809", []string{"column 12", "-2^63"}},
		{"torch:seed=1,epoch=-1", []string{"column 20", "epoch"}},
		{"torch:seed=1,world=0", []string{"column 20", "world"}},
		{"torch:seed=1,rank=3-1", []string{"column 19", "0-7"}},
		{"torch:seed=1,rank=-1", []string{"column 19", "rank"}},
		{"torch:seed=1,drop_last=yes", []string{"column 24", "0 or 1"}},
		{"uniform:seed=1,drop_last=1", []string{"column 16", `"drop_last"`}},
		{"plan:seed=1", []string{"column 6", "takes no keys"}},
		{"list", []string{"column 5", "needs a path"}},
		{"list:", []string{"column 6", "list:PATH"}},
		{"list:a,b", []string{"column 8", `no key "b"`}},
		{"buckets:seed=1", []string{"needs a batch"}},
		{"buckets:seed=1,batch=0", []string{"column 22", "1 to 2^31-1"}},
		{"mixture:seed=1", []string{"needs a weights"}},
		{"torch-loader:seed=1,persistent=yes", []string{"column 32", "0 or 1"}},
		{"windowed:seed=1", []string{"column 16", "needs a window", "windowed:seed=…,window=…"}},
		{"windowed:window=2", []string{"column 18", "needs a seed"}},
		{"windowed:seed=1,window=0", []string{"column 24", `window="0"`, "1 to 2^31-1"}},
		{"windowed:seed=1,windows=4", []string{"column 17", `did you mean "window"?`}},
	} {
		_, err := Parse(c.text)
		if err == nil {
			t.Errorf("%q: no error", c.text)
			continue
		}
		for _, w := range c.words {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("%q: %q lacks %q", c.text, err, w)
			}
		}
	}
}

func must(t *testing.T, text string) Spec {
	t.Helper()
	s, err := Parse(text)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestWith(t *testing.T) {
	for _, c := range []struct{ text, key, value, want string }{
		{"torch:seed=1", "epoch", "4", "torch:seed=1,epoch=4"},
		{"torch:seed=1,world=4,rank=3", "world", "8", "torch:seed=1,world=8,rank=3"},
		{"torch:seed=1,world=4,rank=3", "rank", "0-1", "torch:seed=1,world=4,rank=0-1"},
		{"uniform:seed=1", "seed", "2", "uniform:seed=2"},
		{"torch:seed=1,drop_last=1", "drop_last", "0", "torch:seed=1"},
		{"windowed:seed=1,window=4", "window", "8", "windowed:seed=1,window=8"},
		{"windowed:seed=1,window=4", "world", "2", "windowed:seed=1,window=4,world=2"},
		{"plan", "world", "1", "plan"},
		{"plan", "rank", "0", "plan"},
		{"torch-loader:seed=1", "epoch", "0", "torch-loader:seed=1"},
	} {
		if s, err := must(t, c.text).With(c.key, c.value); err != nil || s != must(t, c.want) {
			t.Errorf("%s with %s=%s: %v, %v", c.text, c.key, c.value, s, err)
		}
	}
	for _, c := range [][3]string{
		{"plan", "world", "2"}, {"torch-loader:seed=1", "rank", "1"},
		{"torch:seed=1", "epoch", "x"}, {"torch:seed=1", "window", "3"}, {"uniform:seed=1", "drop_last", "0"},
		{"uniform:seed=1", "window", "4"}, {"windowed:seed=1,window=4", "window", "0"},
	} {
		if s, err := must(t, c[0]).With(c[1], c[2]); err == nil {
			t.Errorf("%s with %s=%s: no error: %s", c[0], c[1], c[2], s)
		}
	}
}

func TestAccessors(t *testing.T) {
	s := must(t, "torch:seed=5,epoch=2,world=8,rank=1-3")
	if s.Name() != "torch" || s.seed != 5 || s.Epoch() != 2 || s.World() != 8 || s.Ranks() != (Ranks{1, 3}) {
		t.Errorf("%s %d %d %d %v", s.Name(), s.seed, s.Epoch(), s.World(), s.Ranks())
	}
	if w := must(t, "sequential").World(); w != 1 {
		t.Errorf("world %d", w)
	}
}

func TestSpecOrder(t *testing.T) {
	for _, c := range []struct {
		text string
		n    int
		want []int
	}{
		{"sequential", 4, []int{0, 1, 2, 3}},
		{"sequential:world=3,rank=1", 8, []int{1, 4, 7}},
		{"sequential:world=3,rank=2", 8, []int{2, 5}},
		{"sequential:world=3,rank=0-1", 8, []int{0, 1, 3, 4, 6, 7}},
		{"sequential:world=5,rank=4", 3, nil},
		{"uniform:seed=0", 10, []int{3, 9, 7, 6, 8, 1, 0, 5, 4, 2}},
		{"uniform:seed=0,world=2,rank=1", 10, []int{9, 6, 1, 5, 2}},
		{"uniform:seed=0", 0, nil},
	} {
		o, err := must(t, c.text).Order(c.n, 0)
		if err != nil {
			t.Errorf("%s: %v", c.text, err)
		} else if got := samples(o); !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, want %v", c.text, got, c.want)
		}
	}
	// The spec's epoch is where a run starts; Order does not add it.
	a, err1 := must(t, "uniform:seed=3,epoch=5").Order(100, 1)
	b, err2 := must(t, "uniform:seed=3").Order(100, 1)
	if err1 != nil || err2 != nil || !slices.Equal(samples(a), samples(b)) {
		t.Errorf("epoch is added: %v, %v", err1, err2)
	}
}

func TestSpecOrderErrors(t *testing.T) {
	for _, c := range []struct {
		text     string
		n, epoch int
		is       error
		words    []string
	}{
		{"plan", 1, 0, ErrNotComputed, nil},
		{"auto", 1, 0, ErrNotComputed, nil},
		{"none", 1, 0, ErrNotComputed, nil},
		{"torch-loader:seed=1", 10, 1, ErrEpochUnknown, []string{"epoch 1"}},
		{"torch:seed=1,world=8", 10, 0, nil, []string{"rank=R", "rank=0-7"}},
		{"torch:seed=1,world=8,rank=8", 10, 0, nil, []string{"rank 8", "0 to 7"}},
		{"uniform:seed=1,rank=1", 10, 0, nil, []string{"rank 1", "world of 1", "world=W"}},
		{"torch:seed=1", math.MaxUint32, 0, nil, []string{"uniform:seed=S"}},
		{"torch:seed=1,world=2147483647,rank=0", 1 << 31, 0, nil, []string{"uniform:seed=S"}},
		{"uniform:seed=1", 1<<60 + 1, 0, nil, []string{"2^60"}},
		{"windowed:seed=1,window=4", 10, 0, ErrNeedsShards,
			[]string{"windowed:seed=1,window=4", "shoal pack", "uniform:seed=1"}},
		{"windowed:seed=1,window=4,world=2", 10, 0, nil, []string{"rank=R"}},
		{"sequential", -1, 0, nil, []string{"-1"}},
	} {
		_, err := must(t, c.text).Order(c.n, c.epoch)
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
}

// grouped returns an epoch's order over samples that lie in groups.
func grouped(s Spec, g Groups, epoch int) (Order, error) {
	n := 0
	for i := range g.Len() {
		n += g.Size(i)
	}
	return s.Over(Facts{Samples: n, Shards: func() Groups { return g }}, epoch)
}

func TestSpecOverGroups(t *testing.T) {
	g := Contiguous(50, 7)
	s := must(t, "windowed:seed=3,window=2,epoch=5,world=3,rank=1")
	if !s.NeedsGroups() || s.window != 2 || must(t, "uniform:seed=3").NeedsGroups() || !s.Computed() {
		t.Error("NeedsGroups, Window or Computed is wrong")
	}
	whole := samples(overGroups(g, 3, 1, 2))
	var share []int
	for pos := 1; pos < len(whole); pos += 3 {
		share = append(share, whole[pos])
	}
	if o, err := grouped(s, g, 1); err != nil || !slices.Equal(samples(o), share) {
		t.Errorf("%v, want rank 1 of 3 of epoch 1: %v", err, share)
	} else if _, ok := o.(Locator); !ok {
		t.Error("a rank's share cannot be searched")
	}
	plain := must(t, "uniform:seed=3")
	a, err1 := grouped(plain, g, 4)
	b, err2 := plain.Order(50, 4)
	if err1 != nil || err2 != nil || !slices.Equal(samples(a), samples(b)) {
		t.Errorf("groups change a uniform order: %v, %v", err1, err2)
	}
	for name, bad := range map[string]Groups{
		"twice":   listed{{0, 1}, {1, 2}},
		"beyond":  listed{{0, 1}, {4}},
		"missing": listed{{0}, {-1}},
		"last":    listed{{0, 1}, {2, 3}, {4, 5}, {6, 6}},
	} {
		for _, text := range []string{"windowed:seed=1,window=1", "windowed:seed=1,window=9"} {
			if o, err := grouped(must(t, text), bad, 0); err == nil || !strings.Contains(err.Error(), "holds sample") {
				t.Errorf("%s, %s: %v, %v", name, text, o, err)
			}
		}
	}
	if _, err := grouped(must(t, "windowed:seed=1,window=4,rank=2"), g, 0); err == nil {
		t.Error("rank 2 of 1 is accepted")
	}
	if _, err := grouped(s, g, -1); err == nil {
		t.Error("epoch -1 is accepted")
	}
	if _, err := grouped(must(t, "windowed:seed=1,window=4"), huge{}, 0); err == nil ||
		!strings.Contains(err.Error(), "2^32") {
		t.Errorf("2^40 samples: %v", err)
	}
}

// listed are groups written out.
type listed [][]int

func (l listed) Len() int        { return len(l) }
func (l listed) Size(g int) int  { return len(l[g]) }
func (l listed) At(g, i int) int { return l[g][i] }

// huge is a single group of more samples than an order in memory can have.
type huge struct{}

func (huge) Len() int        { return 1 }
func (huge) Size(int) int    { return 1 << 40 }
func (huge) At(int, int) int { panic("read") }

func FuzzParse(f *testing.F) {
	for _, text := range []string{
		"torch:seed=1,epoch=2,world=8,rank=0-7,drop_last=1", "torch-loader:seed=-5", "uniform:seed=0", "sequential",
		"plan", "auto", "none", "windowed:seed=1,window=2,world=3,rank=1", "torch:seed", "torch:,,=", "é:é=é",
		"\xff:\xff",
		"torch-loader:seed=1,from=manual_seed,persistent=1", "mixture:seed=1,weights=@0-4:1.5+a*:2",
		"mixture:seed=1,weights=@3-4:1+@0-9:70", "buckets:seed=1,batch=3,count=2", "list:x=y", "list:path=,",
	} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		s, err := Parse(text)
		if err != nil {
			if !strings.Contains(err.Error(), "column ") {
				t.Errorf("%q: %q names no column", text, err)
			}
			return
		}
		if again, err := Parse(s.String()); err != nil || again != s {
			t.Errorf("%q became %q, which became %q, %v", text, s, again, err)
		}
		if again, err := ParseVersioned(s.Versioned()); s.Computed() &&
			(err != nil || again.Versioned() != s.Versioned()) {
			t.Errorf("%q has the versioned name %q, which became %q, %v", text, s.Versioned(), again, err)
		}
		if s.samples > 1000 {
			return // takes memory
		}
		facts := Facts{Samples: 17, Shards: func() Groups {
			return Contiguous(17, 5)
		}, Size: func(s int) int64 { return int64(s % 5) },
			Classes: func() []string { return []string{"a", "b"} }, Label: func(s int) int { return s / 9 },
			List: func(string) ([]uint32, error) { return []uint32{3, 16, 3}, nil }}
		if o, err := s.Over(facts, 0); err == nil && s.World() < 100 {
			for i := range o.Len() {
				if x := o.At(i); x < 0 || x >= 17 {
					t.Errorf("%q: sample %d of 17", text, x)
				}
			}
		}
	})
}
