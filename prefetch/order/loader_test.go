package order

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// loaderCase is a question to testdata/oracle.py.
type loaderCase struct {
	Kind        string `json:"kind"`
	From        string `json:"from"`
	N           int    `json:"n"`
	Seed        string `json:"seed"` // decimal, of any sign
	Workers     int    `json:"workers"`
	Persistent  bool   `json:"persistent"`
	Samples     int    `json:"samples"`
	Replacement bool   `json:"replacement"`
	Batch       int    `json:"batch"`
	Epochs      int    `json:"epochs"`
}

func (c loaderCase) spec() string {
	text := "torch-loader:seed=" + c.Seed + ",from=" + c.From
	if c.Persistent {
		text += ",persistent=1"
	}
	if c.Samples > 0 {
		text += fmt.Sprintf(",samples=%d", c.Samples)
	}
	if c.Replacement {
		text += ",replacement=1"
	}
	return text
}

// seedsOfTorch are those at which a conversion could go wrong.
var seedsOfTorch = []string{"0", "1", "42", "-1", "-9223372036854775808", "2147483648", "4294967295", "4294967296",
	"9223372036854775807", "9223372036854775808", "18446744073709551615"}

func TestLoaderAgainstTorch(t *testing.T) {
	var cases []loaderCase
	for _, from := range []string{"manual_seed", "generator"} {
		for i, seed := range seedsOfTorch {
			for _, n := range []int{1, 2, 3, 100, 4097} {
				// The batch divides the samples or not: exhaustion is noticed either way.
				cases = append(cases, loaderCase{Kind: "dataloader", From: from, N: n, Seed: seed, Batch: 1 + i%7,
					Epochs: 4})
			}
			for _, samples := range []int{1, 10, 11, 12, 33, 64} {
				cases = append(cases,
					loaderCase{Kind: "dataloader", From: from, N: 11, Seed: seed, Batch: 5, Epochs: 3,
						Samples: samples},
					loaderCase{Kind: "dataloader", From: from, N: 11, Seed: seed, Batch: 5, Epochs: 3, Samples: samples,
						Replacement: true})
			}
		}
		cases = append(cases,
			loaderCase{Kind: "dataloader", From: from, N: 40, Seed: "6", Workers: 2, Batch: 4, Epochs: 3},
			loaderCase{Kind: "dataloader", From: from, N: 40, Seed: "6", Workers: 2, Batch: 4, Epochs: 3,
				Persistent: true},
			loaderCase{Kind: "dataloader", From: from, N: 40, Seed: "6", Workers: 2, Batch: 7, Epochs: 3,
				Persistent: true, Samples: 90},
			loaderCase{Kind: "dataloader", From: from, N: 50_000, Seed: "123456789", Batch: 512, Epochs: 3})
	}
	for _, n := range []int{1, 2, 1000} {
		cases = append(cases, loaderCase{Kind: "privately", From: "stateful", N: n, Seed: "1", Epochs: 4})
	}
	for i, raw := range ask(t, cases) {
		s := must(t, cases[i].spec())
		for epoch, want := range decode[[][]int](t, raw) {
			o, err := s.Order(cases[i].N, epoch)
			if err != nil {
				t.Fatalf("%s: %v", s, err)
			}
			equal(t, fmt.Sprintf("%s of %d, epoch %d", s, cases[i].N, epoch), samples(o), want)
		}
	}
}

func TestRandPermAgainstTorch(t *testing.T) {
	var cases []loaderCase
	for _, seed := range seedsOfTorch {
		for _, n := range []int{0, 1, 2, 3, 623, 624, 625, 1 << 16} {
			cases = append(cases, loaderCase{Kind: "permutation", N: n, Seed: seed})
		}
	}
	cases = append(cases, loaderCase{Kind: "permutation", N: 10_000_000, Seed: "77"},
		loaderCase{Kind: "permutation", N: 1_281_167, Seed: "-2"})
	for i, raw := range ask(t, cases) {
		want := decode[struct {
			SHA256 string
			After  uint64
		}](t, raw)
		seed, err := parseSeed(cases[i].Seed)
		if err != nil {
			t.Fatal(err)
		}
		g := NewGenerator(seed)
		h := sha256.New()
		var buf []byte
		for _, x := range g.RandPerm(cases[i].N) {
			if buf = binary.LittleEndian.AppendUint32(buf, x); len(buf) == 1<<16 {
				h.Write(buf)
				buf = buf[:0]
			}
		}
		h.Write(buf)
		if sum := hex.EncodeToString(h.Sum(nil)); sum != want.SHA256 {
			t.Errorf("randperm(%d), seed %s: another permutation", cases[i].N, cases[i].Seed)
		}
		if after := g.Int63(); after != want.After {
			t.Errorf("randperm(%d), seed %s: the generator draws %d next, torch's %d",
				cases[i].N, cases[i].Seed, after, want.After)
		}
	}
}

// Successive epochs of torchdata's StatefulDataLoader(range(n), batch_size=4, shuffle=True) after
// torch.manual_seed, as torchdata 0.10.1 and 0.11.0 gave them (with torch 1.13): torchdata is not
// among what tests can expect to be installed.
func TestLoaderGoldenTorchdata(t *testing.T) {
	for _, c := range []struct {
		text  string
		short [][]int  // three epochs of 6 samples, seed 9
		long  []string // the digests of those of 1,000, seed -3
	}{
		{"torch-loader:seed=1,from=stateful",
			[][]int{{1, 5, 2, 0, 3, 4}, {2, 5, 0, 1, 3, 4}, {0, 4, 1, 2, 5, 3}},
			[]string{"eb90a813ec321d4f", "5dec6cad9105dd88", "d9f436e42bbee57d"}},
		{"torch-loader:seed=SEED,from=stateful_manual_seed",
			[][]int{{4, 5, 1, 2, 0, 3}, {4, 3, 1, 0, 2, 5}, {3, 0, 2, 4, 5, 1}},
			[]string{"d7f4d3448ae649b7", "6ddfd8dd762dbb94", "6429652c3928c786"}},
		{"torch-loader:seed=SEED,from=stateful_manual_seed,workers=1",
			[][]int{{4, 3, 1, 0, 2, 5}, {3, 4, 2, 5, 1, 0}, {1, 4, 3, 5, 2, 0}},
			[]string{"6ddfd8dd762dbb94", "d4648e1dbcbbc510", "f7d8a917742bb29e"}},
		{"torch-loader:seed=SEED,from=stateful_manual_seed,persistent=1,workers=1",
			[][]int{{4, 3, 1, 0, 2, 5}, {3, 0, 2, 4, 5, 1}, {3, 4, 2, 5, 1, 0}},
			[]string{"6ddfd8dd762dbb94", "6429652c3928c786", "d4648e1dbcbbc510"}},
	} {
		for epoch := range 3 {
			text := strings.Replace(c.text, "SEED", "9", 1)
			o, err := must(t, text).Order(6, epoch)
			if err != nil {
				t.Fatal(err)
			}
			equal(t, fmt.Sprintf("%s, epoch %d", text, epoch), samples(o), c.short[epoch])
			text = strings.Replace(c.text, "SEED", "-3", 1)
			if o, err = must(t, text).Order(1000, epoch); err != nil {
				t.Fatal(err)
			}
			list := strings.ReplaceAll(fmt.Sprint(samples(o)), " ", ",")
			if sum := sha256.Sum256([]byte(list)); hex.EncodeToString(sum[:8]) != c.long[epoch] {
				t.Errorf("%s, epoch %d: another order of 1,000", text, epoch)
			}
		}
	}
}

// Skipping is drawing.
func TestGeneratorSkip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		a, b := NewGenerator(5), NewGenerator(5)
		for _, k := range rapid.SliceOf(rapid.IntRange(0, 2000)).Draw(t, "skips") {
			a.Skip(k)
			for range k {
				b.Random()
			}
			if x, y := a.Random(), b.Random(); x != y {
				t.Fatalf("after %d: %d, want %d", k, x, y)
			}
		}
	})
}

func TestLoaderErrors(t *testing.T) {
	for _, c := range []struct {
		text  string
		n     int
		epoch int
		is    error
		words []string
	}{
		{"torch-loader:seed=1", 10, 1, ErrEpochUnknown, []string{"from=manual_seed", "torch:seed=S"}},
		{"torch-loader:seed=1,from=sampler,epoch=2", 10, 0, ErrEpochUnknown, []string{"epoch 2"}},
		{"torch-loader:seed=1,from=stateful,samples=3", 10, 0, nil, []string{"leave them out"}},
		{"torch-loader:seed=1,from=generator,replacement=1", 1 << 28, 0, nil, []string{"2^28"}},
		{"torch-loader:seed=1,from=generator", math.MaxUint32, 0, nil, []string{"2^32-1"}},
		{"torch-loader:seed=1,from=generator", 1000, 1 << 31, ErrEpochUnknown, []string{"torch:seed=S"}},
		{"torch-loader:seed=1,from=stateful", 1000, 1 << 31, ErrEpochUnknown, nil},
		{"torch-loader:seed=1,from=stateful_manual_seed,workers=1", 1000, 1 << 31, ErrEpochUnknown, nil},
		{"torch-loader:seed=1,from=generator,replacement=1,samples=2000000000", 10, 100, ErrEpochUnknown, nil},
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
	if _, err := Parse("torch-loader:seed=1,from=generatr"); err == nil ||
		!strings.Contains(err.Error(), `did you mean "generator"`) {
		t.Errorf("%v", err)
	}
	if o, err := must(t, "torch-loader:seed=1,from=generator").Order(0, 3); err != nil || o.Len() != 0 {
		t.Errorf("no samples: %v", err)
	}
}

// What comes after the first epoch of a wide permutation, from the definition: each sample takes two words.
func TestLoaderWideDraws(t *testing.T) {
	if w := permWords(randPermWide); w != 2*randPermWide {
		t.Errorf("%d words for %d samples", w, randPermWide)
	}
	if w := permWords(randPermWide - 1); w != randPermWide-2 {
		t.Errorf("%d words for %d samples", w, randPermWide-1)
	}
	const n = 1000
	a, b := NewGenerator(3), NewGenerator(3)
	a.shuffleWide(make([]uint32, n))
	b.Skip(2 * n)
	if x, y := a.Random(), b.Random(); x != y {
		t.Error("a wide shuffle draws another number of words")
	}
	if !slices.Equal(samples(List(NewGenerator(1).RandPerm(1))), []int{0}) {
		t.Error("one sample")
	}
}
