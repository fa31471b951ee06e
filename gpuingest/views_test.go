package gpuingest

import (
	"bytes"
	"errors"
	"fmt"
	"image"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/shoalfs/shoal/gpuingest/internal/oracle"
	"github.com/shoalfs/shoal/gpuingest/jpeg"
)

func views(t testing.TB, spec string) *viewsIngest {
	t.Helper()
	in, err := New(spec)
	if err != nil {
		t.Fatalf("%s: %v", spec, err)
	}
	v, ok := in.(*viewsIngest)
	if !ok {
		t.Fatalf("%s: %T", spec, in)
	}
	return v
}

// made is a row of views.
func (v *viewsIngest) made(t testing.TB, src []byte, at Draw) [][]byte {
	t.Helper()
	row := Row{}
	for _, f := range v.Fields() {
		row.Fields = append(row.Fields, make([]byte, f.Bytes))
	}
	if err := v.Make(Sample{Data: src}, at, &row); err != nil {
		t.Fatalf("%s: %v", v, err)
	}
	return row.Fields
}

// TestViewsCanonical pins canonical forms and names: sessions and trainers depend on them.
func TestViewsCanonical(t *testing.T) {
	const (
		three = "CenterCrop(size=(3, 3))"
		four  = "CenterCrop(size=(4, 4))|RandomHorizontalFlip(p=0.5)"
	)
	for spec, want := range map[string]string{
		"views([CenterCrop(3)])": "views(1x[" + three + "])|uint8|nchw|pillow(9.4)",
		" views ( 2x [ CenterCrop(3) ] , 1x[CenterCrop((3,3))],8x[CenterCrop(4)|RandomHorizontalFlip()], ) | fp16 " +
			"| nhwc ": "views(3x[" + three + "], 8x[" + four + "])|fp16|nhwc|pillow(9.4)",
		"views([CenterCrop(4)|RandomHorizontalFlip()],[CenterCrop(3)],[CenterCrop(4)|RandomHorizontalFlip()])|fp32|Normalize((1,),(2,))|RandomErasing()|v2|pillow(13)": "views(1x[" + four + "], 1x[" + three + "], 1x[" + four +
			"])|fp32|nchw|Normalize(mean=(1.0, 1.0, 1.0), std=(2.0, 2.0, 2.0))|RandomErasing(p=0.5, scale=(0.02, " +
			"0.33), ratio=(0.3, 3.3), value=(0.0, 0.0, 0.0))|v2|pillow(13)",
	} {
		v := views(t, spec)
		if v.String() != want {
			t.Errorf("%s\n got %s\nwant %s", spec, v, want)
		}
		if again := views(t, want); again.String() != want || again.Hash() != v.Hash() ||
			len(again.views) != len(v.views) {
			t.Errorf("the canonical form of %s does not compile to itself", spec)
		}
	}
	v := views(t, "views(2x[CenterCrop((3, 5))], [CenterCrop(4)])|fp16")
	if got, want := fmt.Sprint(v.Fields()),
		"[{data fp16 [3 3 5] 90} {view1 fp16 [3 3 5] 90} {view2 fp16 [3 4 4] 96}]"; got != want {
		t.Errorf("fields %s, want %s", got, want)
	}
	// A device finishes one picture of a sample: views come finished.
	if in, err := New("views(2x[CenterCrop(3)])|fp16|device"); err != nil ||
		in.String() != views(t, "views(2x[CenterCrop(3)])|fp16").String() {
		t.Errorf("with device: %v, %v", in, err)
	}
}

func TestViewsErrors(t *testing.T) {
	for _, c := range []struct {
		spec string
		pos  int
		says string
	}{
		{"views", 0, "needs the operations of at least one view"},
		{"views()", 0, "needs the operations of at least one view"},
		{"views(", 6, "expected the operations of a view in brackets, found the end"},
		{"views(CenterCrop(3))", 6, "in brackets"},
		{"views(0x[CenterCrop(3)])", 6, `"0x" does not say how many views, from 1x to 32x`},
		{"views(33x[CenterCrop(3)])", 6, "from 1x to 32x"},
		{"views(99999999999999999999x[CenterCrop(3)])", 6, "from 1x to 32x"},
		{"views(-1x[CenterCrop(3)])", 6, "in brackets"},
		{"views(2[CenterCrop(3)])", 6, "write 2x["},
		{"views(2y[CenterCrop(3)])", 6, "write 2x["},
		{"views(2x CenterCrop(3))", 9, "in brackets"},
		{"views(2x[CenterCrop(3))", 22, "separated by |"},
		{"views(2x[CenterCrop(3)", 22, "unexpected the end"},
		{"views(2x[CenterCrop(3)] 3x[CenterCrop(3)])", 24, "expected , or ) after a view"},
		{"views(2x[])", 9, "expected an operation"},
		{"views(2x[CenterCrop(3)|])", 23, "expected an operation"},
		{"views(16x[CenterCrop(3)], 17x[CenterCrop(4)])", 29, "more than 32 views"},
		{"views([views([CenterCrop(3)])])", 7, "views inside of a view: list all views in one"},
		{"views([CenterCrop(3)|views])", 21, "views holds all operations"},
		{"views([Resize(3)])", 7, "could not form a batch"},
		{"views([CenterCrop(3)|fp16])", 21, "write it behind views(...)"},
		{"views([CenterCrop(3)|Normalize((1,),(1,))])", 21, "write it behind views(...)"},
		{"views([raw])", 7, "write it behind views(...)"},
		{"views([CentreCrop(3)])", 7, "did you mean CenterCrop?"},
		{"views([CenterCrop(3)])|RandomHorizontalFlip()", 23, "inside of the brackets"},
		{"views([CenterCrop(3)])|RandomApply([RandomGrayscale()])", 23, "inside of the brackets"},
		{"views([CenterCrop(3)])|MixUp()", 23, "MixUp is for one picture of each sample"},
		{"views([CenterCrop(3)])|RandomChoice([CutMix()])", 23, "RandomChoice is for one picture of each sample"},
		{"views([CenterCrop(3)])|dct", 23, "dct is for one picture of each sample"},
		{"views([CenterCrop(3)])|raw", 23, "stands alone"},
		{"views([CenterCrop(3)])|fp33", 23, "did you mean fp32?"},
		{"views([CenterCrop(3)])|views([CenterCrop(3)])", 23, "views holds all operations"},
		{"views([CenterCrop(3)])|Normalize((1,),(1,))", 23, "add fp32"},
		{"views(32x[CenterCrop(4096)])|fp32", 0,
			"the views of a sample take 6442450944 bytes: the limit is 2147483647"},
		{"views(" + strings.Repeat("[RandomResizedCrop(9)],[CenterCrop(3)],", 16) + "[CenterCrop(3)])", 6 + 16*39,
			"more than 32 views"},
		{"views(" + strings.Repeat("[RandomResizedCrop(9)|RandomResizedCrop(9)],[CenterCrop(3)],", 16) + ")", 0,
			"long with all arguments, the limit is 4096"},
		{"Detection()|views([CenterCrop(3)])", 12, "has no boxes and masks"},
		{"Segmentation()|views([CenterCrop(3)])", 15, "has no boxes and masks"},
		{"CenterCrop(4)|views([CenterCrop(3)])", 14, "in place of the operations"},
	} {
		_, err := New(c.spec)
		se, ok := errors.AsType[*SpecError](err)
		if !ok || se.Pos != c.pos || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%q: want column %d and %q: %v", c.spec, c.pos+1, c.says, err)
		}
	}
}

// TestViewsAreTheirChains is the model: view k is its chain alone, with the numbers of places 256 * k and on, whatever
// the file's format and its other views; and view 0 is what the same SPEC without views makes.
func TestViewsAreTheirChains(t *testing.T) {
	const w, h = 333, 251
	sources := map[string][]byte{"420": photoJPEG(t, 2, w, h, 420), "444": photoJPEG(t, 3, w, h, 444),
		"thin": photoJPEG(t, 4, 40, 300, 422)}
	_, sources["png"] = ask(t, "save", oracle.Q{"w": w, "h": h, "format": "PNG"}, photo(t, 5, w, h))
	_, sources["progressive"] = ask(t, "save",
		oracle.Q{"w": w, "h": h, "format": "JPEG", "options": oracle.Q{"progressive": true}}, photo(t, 6, w, h))
	_, sources["cmyk"] = ask(t, "save", oracle.Q{"w": w, "h": h, "format": "JPEG", "mode": "CMYK"}, photo(t, 7, w, h))
	_, sources["grey"] = ask(t, "save", oracle.Q{"w": w, "h": h, "format": "JPEG", "mode": "L"}, photo(t, 8, w, h))
	npy := fmt.Sprintf("{'descr': '|u1', 'fortran_order': False, 'shape': (%d, %d, 3), }", h, w)
	npy += strings.Repeat(" ", 63-(10+len(npy))%64) + "\n"
	sources["npy"] = slices.Concat([]byte("\x93NUMPY\x01\x00"), []byte{byte(len(npy)), byte(len(npy) >> 8)},
		[]byte(npy), photo(t, 9, w, h))
	tables, err := jpeg.TrainTables(slices.Values([][]byte{sources["420"]}))
	if err != nil {
		t.Fatal(err)
	}
	if err := jpeg.Register(tables); err != nil {
		t.Fatal(err)
	}
	if sources["recoded"], err = tables.Recode(nil, sources["420"]); err != nil {
		t.Fatal(err)
	}
	chains := []string{
		"RandomResizedCrop(64, scale=(0.4, 1.0), interpolation='bicubic')|RandomHorizontalFlip()",
		"RandomResizedCrop((24, 31), scale=(0.05, 0.4))|RandomApply([ColorJitter(0.4, 0.4, 0.4, 0.1)], " +
			"p=0.8)|RandomGrayscale(0.2)|RandomApply([GaussianBlur(5)], p=0.5)|RandomSolarize(128, p=0.2)",
		"RandomHorizontalFlip()|RandomResizedCrop(40)", "Resize(50)|CenterCrop(44)",
		"RandomInvert(1)|CenterCrop((251, 333))", "CenterCrop((251, 333))|RandomInvert(1)",
		"CenterCrop(350)|RandomChoice([RandomVerticalFlip(), RandomRotation(20)], p=[1, 3])",
		"RandomCrop(36)|Pad(3, fill=4)",
		"RandomResizedCrop(20, scale=(0.01, 0.02))|RandomVerticalFlip()",
	}
	for words, each := range map[string][]string{
		"uint8|nhwc": chains, "fp16|Normalize((0.485,0.456,0.406),(0.229,0.224,0.225))|RandomErasing(0.8)": chains,
		"uint8|pillow(13)": {chains[0], chains[1], chains[0], chains[8]}, "bf16|v2": {chains[8], chains[8]},
	} {
		v := views(t, "views(["+strings.Join(each, "], [")+"])|"+words)
		for name, src := range sources {
			kept := bytes.Clone(src)
			for i := range 12 {
				at := Draw{Seed: 5, Epoch: 1, Sample: uint64(i)}
				got := v.made(t, src, at)
				for k, chain := range each {
					alone := compile(t, chain+"|"+words)
					alone.view = k
					if want := apply(t, alone, src, at); !bytes.Equal(got[k], want) {
						t.Errorf("%s, sample %d: view %d, %s|%s, is not its chain alone", name, i, k, chain, words)
					}
				}
				if len(each) == 2 && bytes.Equal(got[0], got[1]) {
					t.Errorf("%s, sample %d: two views are equal", name, i)
				}
			}
			if !bytes.Equal(src, kept) {
				t.Fatalf("%s: the sample's own bytes have changed", name)
			}
		}
	}
	// Bad samples are those of the chains.
	v := views(t, "views(2x[RandomCrop(300)], [CenterCrop(3)])")
	row := Row{Fields: [][]byte{make([]byte, 270000), make([]byte, 270000), make([]byte, 27)}}
	for src, says := range map[string]string{
		string(sources["420"]): "smaller than the crop", string(sources["420"][:5000]): "truncated", "GIF89a": "GIF",
		"": "an empty file"} {
		if err := v.Make(Sample{Data: []byte(src)}, Draw{}, &row); !errors.Is(err, ErrBadSample) ||
			!strings.Contains(fmt.Sprint(err), says) {
			t.Errorf("%.9q: %v", src, err)
		}
	}
	if err := v.Make(Sample{Data: sources["420"]}, Draw{Sample: 1 << 48}, &row); err == nil ||
		errors.Is(err, ErrBadSample) {
		t.Errorf("sample 2^48: %v", err)
	}
}

// TestViewsOfLargePictures: what is too large to be kept decoded is decoded for each view.
func TestViewsOfLargePictures(t *testing.T) {
	const w, h = 4000, 3000
	pix := make([]byte, w*h*3)
	for i := range pix {
		pix[i] = byte(i / 3 * 7 >> (i % 3))
	}
	src, err := jpeg.Encode(nil, pix, w, h, 50, 420)
	if err != nil {
		t.Fatal(err)
	}
	v := views(t, "views(2x[RandomResizedCrop(64, scale=(0.9, 1.0))])")
	for k, got := range v.made(t, src, Draw{Sample: 3}) {
		if !bytes.Equal(got, apply(t, v.views[k], src, Draw{Sample: 3})) {
			t.Errorf("view %d differs", k)
		}
	}
}

// TestViewsOfTorchvision replays DINO's ten views of photos in torchvision, from the drawn parameters.
func TestViewsOfTorchvision(t *testing.T) {
	photos := 200
	if testing.Short() {
		photos = 12
	}
	v := views(t, strings.Replace(dinoRecipe, "|fp16|Normalize((0.485,0.456,0.406),(0.229,0.224,0.225))", "|nhwc", 1))
	var exact, blurred, values, off int
	for i := range photos {
		size := image.Pt(300+i*13%250, 260+i*29%240)
		src := photoJPEG(t, i, size.X, size.Y, []jpeg.Subsampling{420, 444, 422}[i%3])
		ask(t, "load", oracle.Q{"key": "views"}, src)
		at := Draw{Seed: 11, Epoch: uint32(i % 3), Sample: uint64(i)}
		for k, got := range v.made(t, src, at) {
			var r Rand
			calls, blurs := functions(t, v.views[k].plan(nil, size, at, &r))
			_, want := ask(t, "functional", oracle.Q{"key": "views", "calls": calls}, nil)
			if len(want) != len(got) {
				t.Fatalf("photo %d, view %d: %d bytes, torchvision %d", i, k, len(got), len(want))
			}
			differ := 0
			for j := range got {
				if d := int(got[j]) - int(want[j]); d != 0 {
					if differ++; !blurs || d > 1 || d < -1 {
						t.Fatalf("photo %d, view %d, value %d: %d, torchvision %d: %v", i, k, j, got[j], want[j], calls)
					}
				}
			}
			if blurs {
				blurred, values, off = blurred+1, values+len(got), off+differ
			} else {
				exact++
			}
		}
	}
	t.Logf("%d photos: %d views equal, byte for byte; %d blurred views with %d of %d values off by 1",
		photos, exact, blurred, off, values)
	if off > values/20_000 {
		t.Error("too many")
	}
}

// functions are torchvision's functions that do the steps, and whether one of them blurs.
func functions(t *testing.T, steps []step) (calls [][2]any, blurs bool) {
	t.Helper()
	add := func(name string, kwargs oracle.Q) { calls = append(calls, [2]any{name, kwargs}) }
	for i := 0; i < len(steps); i++ {
		s := steps[i]
		switch {
		case s.kind == stepCrop && i == 0 && steps[1].kind == stepResize:
			add("resized_crop", oracle.Q{"top": s.box.Min.Y, "left": s.box.Min.X, "height": s.box.Dy(),
				"width": s.box.Dx(),
				"size":  []int{steps[1].size.Y, steps[1].size.X}, "interpolation": steps[1].filter.String()})
			i++
		case s.kind == stepMirror:
			add("hflip", oracle.Q{})
		case s.kind == stepColour && s.colour >= brightness && s.colour <= saturation:
			name := []string{"brightness", "contrast", "saturation"}[s.colour-brightness]
			add("adjust_"+name, oracle.Q{name + "_factor": s.amount})
		case s.kind == stepColour && s.colour == hue:
			add("adjust_hue", oracle.Q{"hue_factor": s.amount})
		case s.kind == stepColour && s.colour == grey:
			add("rgb_to_grayscale", oracle.Q{"num_output_channels": 3})
		case s.kind == stepColour && s.colour == solarize:
			add("solarize", oracle.Q{"threshold": s.amount})
		case s.kind == stepColour && s.colour == blur:
			blurs = true
			add("gaussian_blur", oracle.Q{"kernel_size": []int{s.size.X, s.size.Y},
				"sigma": []float64{s.amount, s.amount}})
		default:
			t.Fatalf("step %+v", s)
		}
	}
	return calls, blurs
}

// TestCompounds: RandomApply and RandomChoice do what they hold, as often as they say.
func TestCompounds(t *testing.T) {
	size := image.Pt(40, 30)
	var r Rand
	counts := map[string]int{}
	const n = 4000
	count := func(spec string) {
		tr := compile(t, spec)
		for i := range uint64(n) {
			var did []colour
			for _, s := range tr.plan(nil, size, Draw{Seed: 3, Sample: i}, &r)[1:] {
				did = append(did, s.colour)
			}
			counts[fmt.Sprintf("%d", did)]++
		}
	}
	near := func(what []colour, p float64) {
		t.Helper()
		got := float64(counts[fmt.Sprintf("%d", what)]) / n
		if d := got - p; d > 0.04 || d < -0.04 {
			t.Errorf("%v: %.3f of the samples, want %.3f", what, got, p)
		}
		delete(counts, fmt.Sprintf("%d", what))
	}
	count("CenterCrop(9)|RandomApply([RandomInvert(1), RandomEqualize(1)], p=0.3)")
	near([]colour{invert, equalize}, 0.3)
	near(nil, 0.7)
	count("CenterCrop(9)|RandomApply([RandomInvert(0.5), RandomEqualize(0.5)], p=0.6)")
	near([]colour{invert, equalize}, 0.15)
	near([]colour{invert}, 0.15)
	near([]colour{equalize}, 0.15)
	near(nil, 0.55)
	count("CenterCrop(9)|RandomChoice([RandomInvert(1), RandomEqualize(1), Grayscale(3)])")
	near([]colour{invert}, 1.0/3)
	near([]colour{equalize}, 1.0/3)
	near([]colour{grey}, 1.0/3)
	count("CenterCrop(9)|RandomChoice([RandomInvert(1), RandomEqualize(1), Grayscale(3)], p=[1, 0, 3])")
	near([]colour{invert}, 0.25)
	near([]colour{grey}, 0.75)
	if len(counts) > 0 {
		t.Errorf("also %v", counts)
	}
	// An operation in it draws from the compound's numbers, those behind it from their own.
	alone, inside := compile(t, "CenterCrop(9)|GaussianBlur(3)|ColorJitter(0.5)"),
		compile(t, "CenterCrop(9)|RandomApply([GaussianBlur(3)], 1)|ColorJitter(0.5)")
	at := Draw{Seed: 3, Sample: 8}
	a, b := alone.plan(nil, size, at, &r), inside.plan(nil, size, at, &r)
	if fmt.Sprint(a[2]) != fmt.Sprint(b[2]) || a[1].amount == b[1].amount {
		t.Errorf("%v and %v", a, b)
	}
}

// TestRecipes: the recipes that are measured and compared are the page's.
func TestRecipes(t *testing.T) {
	page, err := os.ReadFile("../docs/transforms.md")
	if err != nil {
		t.Fatal(err)
	}
	var recipes []string
	for line := range strings.Lines(string(page)) {
		if recipe, ok := strings.CutPrefix(line, "    views("); ok {
			recipes = append(recipes, "views("+strings.TrimSpace(recipe))
			views(t, recipes[len(recipes)-1])
		}
	}
	if len(recipes) != 2 || recipes[1] != dinoRecipe {
		t.Errorf("docs/transforms.md has %q, want SimCLR's and %s", recipes, dinoRecipe)
	}
}
