package order

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"os/exec"
	"slices"
	"testing"
)

// oracle is a question to the installed torch; testdata/oracle.py answers.
type oracle struct {
	Kind     string `json:"kind"`
	N        int    `json:"n"`
	Seed     uint64 `json:"seed"`
	Epoch    int    `json:"epoch"`
	World    int    `json:"world"`
	First    int    `json:"first"`
	Last     int    `json:"last"`
	DropLast bool   `json:"drop_last"`
	Workers  int    `json:"workers"`
	Epochs   int    `json:"epochs"`
}

func ask[Case any](t *testing.T, cases []Case) []json.RawMessage {
	t.Helper()
	in, err := json.Marshal(cases)
	if err != nil {
		t.Fatal(err)
	}
	// Debian's interpreter by path: it is the one that has Debian's python3-torch.
	cmd := exec.Command("/usr/bin/python3", "testdata/oracle.py")
	var stderr bytes.Buffer
	cmd.Stdin, cmd.Stderr = bytes.NewReader(in), &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("oracle: %v\n%s\ninstall python3-torch and python3-numpy", err, stderr.Bytes())
	}
	var answers []json.RawMessage
	if err := json.Unmarshal(out, &answers); err != nil {
		t.Fatal(err)
	}
	if len(answers) != len(cases) {
		t.Fatalf("%d answers to %d cases", len(answers), len(cases))
	}
	return answers
}

func decode[T any](t *testing.T, raw json.RawMessage) (v T) {
	t.Helper()
	if err := json.Unmarshal(raw, &v); err != nil {
		t.Fatal(err)
	}
	return v
}

func samples(o Order) []int {
	s := make([]int, o.Len())
	for i := range s {
		s[i] = o.At(i)
	}
	return s
}

func equal(t *testing.T, name string, got, want []int) {
	t.Helper()
	if len(got) != len(want) {
		t.Fatalf("%s: %d positions, want %d", name, len(got), len(want))
	}
	for i := range got {
		if got[i] != want[i] {
			t.Fatalf("%s: position %d holds %d, want %d", name, i, got[i], want[i])
		}
	}
}

func TestAgainstTorch(t *testing.T) {
	seeds := []uint64{0, 1, 42, 1 << 31, math.MaxUint32, 1<<32 + 5, math.MaxInt64}
	var cases []oracle
	for _, n := range []int{0, 1, 2, 3, 7, 100, 1000, 4097, 50000} {
		for _, seed := range seeds {
			add := func(epoch, world, first, last int, dropLast bool) {
				cases = append(cases, oracle{Kind: "distributed", N: n, Seed: seed, Epoch: epoch, World: world,
					First: first, Last: last, DropLast: dropLast})
			}
			add(0, 1, 0, 0, false)
			add(1, 1, 0, 0, true)
			add(1, 2, 1, 1, false)
			add(5, 3, 0, 0, true)
			if n == 50000 && seed != 42 {
				continue // the same code again; it only takes long in Python
			}
			add(2, 3, 2, 2, false)
			add(100, 8, 3, 3, false)
			add(3, 8, 0, 7, false)
			add(3, 8, 2, 5, true)
			add(1, 64, 60, 63, false)
			add(1, 64, 0, 1, true)
		}
	}
	distributed := len(cases)
	for _, seed := range seeds {
		cases = append(cases, oracle{Kind: "words", Seed: seed, N: 1500})
	}
	wide := len(cases)
	for i, n := range []int{0, 1, 2, 10, 3000} {
		cases = append(cases, oracle{Kind: "wide", Seed: uint64(7 * i), N: n})
	}
	loader := len(cases)
	cases = append(cases,
		oracle{Kind: "loader", Seed: 0, N: 10, Epochs: 3},
		oracle{Kind: "loader", Seed: 1<<32 + 5, N: 1000, Epochs: 3},
		oracle{Kind: "loader", Seed: 42, N: 100, Epochs: 3, Workers: 1})

	answers := ask(t, cases)
	for i, c := range cases[:distributed] {
		text := fmt.Sprintf("torch:seed=%d,world=%d,rank=%v", c.Seed, c.World, Ranks{c.First, c.Last})
		if c.DropLast {
			text += ",drop_last=1"
		}
		s, err := Parse(text)
		if err != nil {
			t.Fatal(err)
		}
		o, err := s.Order(c.N, c.Epoch)
		if err != nil {
			t.Fatal(err)
		}
		equal(t, fmt.Sprintf("%s of %d, epoch %d", s, c.N, c.Epoch), samples(o), decode[[]int](t, answers[i]))
	}
	for i, c := range cases[distributed:wide] {
		g := NewGenerator(c.Seed)
		want := decode[[]uint64](t, answers[distributed+i])
		for j := 0; j < len(want); j += 2 {
			if r := g.Random() % (1 << 20); uint64(r) != want[j] {
				t.Fatalf("seed %d: word %d is %d, want %d", c.Seed, j, r, want[j])
			}
			if r := g.Int63(); r != want[j+1] {
				t.Fatalf("seed %d: word %d is %d, want %d", c.Seed, j+1, r, want[j+1])
			}
		}
	}
	for i, c := range cases[wide:loader] {
		r := make([]uint32, c.N)
		NewGenerator(c.Seed).shuffleWide(r)
		equal(t, fmt.Sprintf("wide shuffle of %d", c.N), samples(List(r)), decode[[]int](t, answers[wide+i]))
	}
	for i, c := range cases[loader:] {
		type epoch struct {
			Base    uint64
			Samples []int
		}
		g, base := NewGenerator(c.Seed), uint64(0)
		for e, want := range decode[[]epoch](t, answers[loader+i]) {
			if e == 0 || c.Workers == 0 { // its workers are persistent
				base = g.Int63()
			}
			sampler := g.Int63()
			if base != want.Base {
				t.Errorf("manual_seed(%d), %d workers, epoch %d: base seed %d, want %d",
					c.Seed, c.Workers, e, base, want.Base)
			}
			s, err := Parse(fmt.Sprintf("torch-loader:seed=%d", sampler))
			if err != nil {
				t.Fatal(err)
			}
			o, err := s.Order(c.N, 0)
			if err != nil {
				t.Fatal(err)
			}
			equal(t, fmt.Sprintf("loader after manual_seed(%d), epoch %d", c.Seed, e), samples(o), want.Samples)
		}
	}
}

// The first outputs of MT19937 for its standard seed are published with it (and required of
// std::mt19937 by the C++ standard: the 10,000th is 4123659995).
func TestGeneratorStandard(t *testing.T) {
	g := NewGenerator(5489)
	if x := g.Random(); x != 3499211612 {
		t.Errorf("first word %d", x)
	}
	for range 9998 {
		g.Random()
	}
	if x := g.Random(); x != 4123659995 {
		t.Errorf("10,000th word %d", x)
	}
	g = NewGenerator(1 << 40)
	if a, b := g.Random64(), NewGenerator(0).Random64(); a != b {
		t.Errorf("bits above 32 of the seed matter: %d, %d", a, b)
	}
}

func TestRandPermWideBoundary(t *testing.T) {
	if randPermWide != 214748364 {
		t.Errorf("boundary %d", randPermWide)
	}
}

// Some values of torch itself, so that a wrong oracle cannot hide.
func TestTorchGolden(t *testing.T) {
	for _, c := range []struct {
		text string
		n    int
		want []int
	}{
		{"torch:seed=0", 10, []int{4, 1, 7, 5, 3, 9, 0, 8, 6, 2}},
		{"torch:seed=0,world=3,rank=1", 10, []int{1, 3, 8, 4}},
		{"torch:seed=0,world=3,rank=1,drop_last=1", 10, []int{1, 3, 8}},
		{"torch:seed=0,world=8,rank=0-7", 3, []int{2, 0, 1, 2, 0, 1, 2, 0}},
	} {
		s, err := Parse(c.text)
		if err != nil {
			t.Fatal(err)
		}
		o, err := s.Order(c.n, s.Epoch())
		if err != nil {
			t.Fatal(err)
		}
		if got := samples(o); !slices.Equal(got, c.want) {
			t.Errorf("%s of %d: %v, want %v", s, c.n, got, c.want)
		}
	}
}

func BenchmarkRandPerm1M(b *testing.B) {
	b.ReportAllocs()
	for b.Loop() {
		NewGenerator(1).RandPerm(1_000_000)
	}
}

func BenchmarkIndex1M(b *testing.B) {
	o := Torch(1_000_000, 1, 0, 8, 0, 7, false)
	b.ReportAllocs()
	for b.Loop() {
		Index(o)
	}
}
