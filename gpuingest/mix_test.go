package gpuingest

import (
	"bytes"
	"fmt"
	"image"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/shoalfs/shoal/gpuingest/internal/oracle"
)

// mixer compiles a SPEC that mixes.
func mixer(t testing.TB, spec string) *mixedIngest {
	t.Helper()
	in, err := New(spec)
	if err != nil {
		t.Fatal(err)
	}
	m, ok := in.(*mixedIngest)
	if !ok {
		t.Fatalf("%s does not mix", spec)
	}
	return m
}

var mixPhotoBytes []byte

func mixPhoto(t testing.TB) []byte {
	t.Helper()
	if mixPhotoBytes == nil {
		mixPhotoBytes = photoJPEG(t, 5, 90, 80, 420)
	}
	return mixPhotoBytes
}

// batchOf makes rows of random photos' crops, with labels 10, 11, ...
func batchOf(t testing.TB, m *mixedIngest, n int) []*Row {
	t.Helper()
	src := mixPhoto(t)
	rows := make([]*Row, n)
	for i := range rows {
		rows[i] = &Row{Label: int64(10 + i)}
		for _, f := range m.Fields() {
			rows[i].Fields = append(rows[i].Fields, make([]byte, f.Bytes))
		}
		if err := m.Make(Sample{Data: src}, Draw{Seed: 1, Sample: uint64(i)}, rows[i]); err != nil {
			t.Fatal(err)
		}
	}
	return rows
}

func data(rows []*Row) (out [][]byte) {
	for _, r := range rows {
		if r != nil {
			out = append(out, bytes.Clone(r.Fields[0]))
		}
	}
	return out
}

const smallCrop = "RandomResizedCrop((30, 23))|"

// TestMixUp compares blends with torch's in float32, and of uint8 with their definition; rows without sample are left
// out, so the row behind one has the row before it as its partner.
func TestMixUp(t *testing.T) {
	for _, dtype := range []string{"uint8", "fp32", "fp16", "bf16"} {
		norm := "|Normalize((0.485,0.456,0.406),(0.229,0.224,0.225))"
		if dtype == "uint8" {
			norm = ""
		}
		m := mixer(t, smallCrop+dtype+norm+"|MixUp(alpha=0.8)")
		for _, absent := range [][]int{nil, {0}, {2, 3}, {5}, {0, 1, 2, 3, 4}} {
			rows := batchOf(t, m, 6)
			var labels []int64
			for i := range rows {
				if slices.Contains(absent, i) {
					rows[i] = nil
				} else {
					labels = append(labels, rows[i].Label)
				}
			}
			before := data(rows)
			m.Mix(Draw{Seed: 4, Sample: 17, Occurrence: uint32(len(absent))}, rows)
			after := data(rows)
			at := 0
			var lam float32
			for _, r := range rows {
				if r == nil {
					continue
				}
				lam = math.Float32frombits(native.Uint32(r.Fields[2]))
				if b := int64(native.Uint64(r.Fields[1])); r.Label != labels[at] ||
					b != labels[(at+len(labels)-1)%len(labels)] {
					t.Errorf("row of label %d (was %d) has label_b %d", r.Label, labels[at], b)
				}
				at++
			}
			if k := float64(lam) * 65536; k != math.Trunc(k) || k < 0 || k > 65536 {
				t.Errorf("lam = %v", lam)
			}
			if dtype == "uint8" {
				k := int(lam * 65536)
				for i := range after {
					b := before[(i+len(before)-1)%len(before)]
					for j, v := range after[i] {
						if want := (int(before[i][j])*k + int(b[j])*(65536-k) + 32768) >> 16; int(v) != want {
							t.Fatalf("%s: value %d of row %d is %d, want %d", m, j, i, v, want)
						}
					}
				}
				continue
			}
			_, want := ask(t, "mix", oracle.Q{"dtype": dtype, "rows": len(before), "lam": float64(lam)},
				bytes.Join(before, nil))
			if !bytes.Equal(bytes.Join(after, nil), want) {
				t.Errorf("%s without %v differs from torch's", m, absent)
			}
		}
	}
}

// TestCutMix checks box, weights and labels against their definition, in both layouts and all types.
func TestCutMix(t *testing.T) {
	whole, none := 0, 0
	for dtype, elem := range dtypes {
		for _, layout := range layouts {
			m := mixer(t, smallCrop+dtype+"|"+layout+"|CutMix()")
			for trial := range 20 {
				rows := batchOf(t, m, 4)
				before := data(rows)
				at := Draw{Seed: 9, Epoch: 2, Sample: uint64(trial), Occurrence: 3}
				r := at.Rand(mixOperation)
				_, lam := m.mix.draw(&r)
				box := cutBox(image.Pt(23, 30), lam, &r)
				m.Mix(at, rows)
				for i, row := range rows {
					want := bytes.Clone(before[i])
					for y := range 30 {
						for x := range 23 {
							if !image.Pt(x, y).In(box) {
								continue
							}
							for c := range 3 {
								at := (c*30+y)*23 + x
								if layout == "nhwc" {
									at = (y*23+x)*3 + c
								}
								copy(want[at*elem:][:elem], before[(i+3)%4][at*elem:])
							}
						}
					}
					if !bytes.Equal(row.Fields[0], want) {
						t.Fatalf("%s: row %d differs, box %v", m, i, box)
					}
					if got, want := math.Float32frombits(native.Uint32(row.Fields[2])),
						float32(1-float64(box.Dx()*box.Dy())/(23*30)); got != want {
						t.Errorf("lam %v, the box %v leaves %v", got, box, want)
					}
				}
				if box.Empty() {
					none++
				}
				if box.Dx() == 23 && box.Dy() == 30 {
					whole++
				}
			}
		}
	}
	if none == 160 || whole == 160 {
		t.Errorf("%d boxes empty, %d whole", none, whole)
	}
}

// TestSoftLabels: a row's weights sum to one, on its class and its partner's.
func TestSoftLabels(t *testing.T) {
	m := mixer(t, smallCrop+"RandomChoice([MixUp(alpha=0.4, num_classes=14), CutMix(num_classes=14)])")
	rows := batchOf(t, m, 3)
	rows[2].Label = 11 // as its neighbour: all on one class
	m.Mix(Draw{Sample: 5}, rows)
	sum := float32(0)
	for c := range 14 {
		sum += math.Float32frombits(native.Uint32(rows[1].Fields[1][4*c:]))
	}
	own, other := math.Float32frombits(native.Uint32(rows[1].Fields[1][44:])),
		math.Float32frombits(native.Uint32(rows[1].Fields[1][40:]))
	if sum != 1 || own+other != 1 || math.Float32frombits(native.Uint32(rows[2].Fields[1][44:])) != 1 {
		t.Errorf("sum %v, own %v, partner's %v", sum, own, other)
	}
	for _, label := range []int64{-1, 14} {
		row := &Row{Label: label, Fields: [][]byte{make([]byte, m.OutBytes()), make([]byte, 56)}}
		if err := m.Make(Sample{Data: mixPhoto(t)}, Draw{}, row); err == nil {
			t.Errorf("label %d of 14 classes: no error", label)
		}
	}
}

// TestBeta compares lambda with torch's in distribution, and the choice of kinds with its weights. Seeds are fixed.
func TestBeta(t *testing.T) {
	const n = 8000
	for _, alpha := range []float64{0.05, 0.2, 1, 4} {
		_, raw := ask(t, "draws", oracle.Q{"name": "beta", "alpha": alpha, "count": n, "seed": 3}, nil)
		m := &mixing{kinds: []mixKind{{alpha: alpha}}}
		ours, theirs := make([]float64, n), make([]float64, n)
		for i := range n {
			r := Draw{Seed: 8, Sample: uint64(i)}.Rand(mixOperation)
			_, lam := m.draw(&r)
			// The last digits before 0 and 1 are underflow's.
			near := func(x float64) float64 { return min(max(x, 1e-12), 1-1e-12) }
			ours[i], theirs[i] = near(lam), near(math.Float64frombits(native.Uint64(raw[8*i:])))
		}
		if d := ks(ours, theirs); d > 1.95*math.Sqrt(2.0/n) {
			t.Errorf("alpha %v: D = %.4f", alpha, d)
		}
	}
	for spec, want := range map[string]float64{"": 0.5, ", p=[3, 1]": 0.25, ", p=(0, 1)": 1} {
		m := mixer(t, smallCrop+"RandomChoice([MixUp(), CutMix()]"+spec+")")
		cuts := 0
		for i := range n {
			r := Draw{Seed: 8, Sample: uint64(i)}.Rand(mixOperation)
			if k, _ := m.mix.draw(&r); k.cut {
				cuts++
			}
		}
		if p := float64(cuts) / n; math.Abs(p-want) > 0.02 {
			t.Errorf("RandomChoice%s cuts %v of all batches, want %v", spec, p, want)
		}
	}
}

// TestErase compares erased samples with torchvision's, every type and layout, and boxes in distribution.
func TestErase(t *testing.T) {
	src := photoJPEG(t, 2, 90, 80, 420)
	const words = "|RandomErasing(p=0.7, value="
	for dtype, elem := range dtypes {
		for _, layout := range layouts {
			value := []float64{0.5, -2, 70}
			text := "(0.5, -2, 70)"
			if dtype == "uint8" {
				value, text = []float64{3, 4, 255}, "[3, 4, 255]"
			}
			plain, erased := compile(t, smallCrop+dtype+"|"+layout),
				compile(t, smallCrop+dtype+"|"+layout+words+text+")")
			count := 0
			for i := range uint64(30) {
				at := Draw{Seed: 5, Sample: i}
				r := at.Rand(eraseOperation)
				box := erased.erase.box(image.Pt(23, 30), &r)
				got, want := apply(t, erased, src, at), planes(apply(t, plain, src, at), 23, 30, elem, layout)
				if !box.Empty() {
					count++
					_, want = ask(t, "erase",
						oracle.Q{"dtype": dtype, "w": 23, "h": 30,
							"box": []int{box.Min.X, box.Min.Y, box.Dx(), box.Dy()}, "value": value}, want)
				}
				if !bytes.Equal(planes(got, 23, 30, elem, layout), want) {
					t.Fatalf("%s: sample %d, box %v differs from torchvision's", erased, i, box)
				}
			}
			if count < 12 || count > 28 {
				t.Errorf("%d of 30 erased", count)
			}
		}
	}
	const n = 8000
	o := compile(t, smallCrop+"fp32|RandomErasing(p=1, scale=(0.02, 0.5))").erase
	_, raw := ask(t, "draws", oracle.Q{"name": "erase", "w": 23, "h": 30, "scale": o.scale, "ratio": o.ratio,
		"count": n, "seed": 2}, nil)
	for k, f := range []func(b image.Rectangle) int{
		func(b image.Rectangle) int {
			return b.Min.Y
		}, func(b image.Rectangle) int { return b.Min.X }, image.Rectangle.Dy, image.Rectangle.Dx,
	} {
		var ours, theirs []float64
		for i := range n {
			r := Draw{Seed: 6, Sample: uint64(i)}.Rand(eraseOperation)
			b := o.box(image.Pt(23, 30), &r)
			if b.Empty() { // torchvision says so by the whole picture
				b = image.Rect(0, 0, 23, 30)
			}
			ours, theirs = append(ours, float64(f(b))),
				append(theirs, math.Float64frombits(native.Uint64(raw[8*(4*i+k):])))
		}
		if d := ks(ours, theirs); d > 1.95*math.Sqrt(2.0/n) {
			t.Errorf("number %d of the box: D = %.4f", k, d)
		}
	}
}

// planes turns a sample into C x H x W.
func planes(b []byte, w, h, elem int, layout string) []byte {
	if layout == "nchw" {
		return b
	}
	out := make([]byte, 0, len(b))
	for c := range 3 {
		for i := range w * h {
			out = append(out, b[(3*i+c)*elem:][:elem]...)
		}
	}
	return out
}

// TestFloat16Mix takes halves of all sizes, subnormal and infinite ones, through a blend.
func TestFloat16Mix(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 3))
	m := mixer(t, "Resize((50, 50))|fp16|MixUp(alpha=1)")
	for range 20 {
		rows := []*Row{}
		for range 3 {
			row := &Row{Fields: [][]byte{make([]byte, m.OutBytes()), make([]byte, 8), make([]byte, 4)}}
			for i := 0; i < len(row.Fields[0]); i += 2 {
				native.PutUint16(row.Fields[0][i:], toFloat16(math.Exp(r.NormFloat64()*6)*r.NormFloat64()))
			}
			rows = append(rows, row)
		}
		before := data(rows)
		m.Mix(Draw{Sample: r.Uint64() >> 20}, rows)
		lam := math.Float32frombits(native.Uint32(rows[0].Fields[2]))
		_, want := ask(t, "mix", oracle.Q{"dtype": "fp16", "rows": 3, "lam": float64(lam)}, bytes.Join(before, nil))
		got := bytes.Join(data(rows), nil)
		for i := 0; i < len(got); i += 2 {
			g, w := native.Uint16(got[i:]), native.Uint16(want[i:])
			if nan := g&0x7fff > 0x7c00 && w&0x7fff > 0x7c00; g != w && !nan {
				t.Fatalf("element %d is %04x, torch's %04x, lam %v", i/2, g, w, lam)
			}
		}
	}
}

// TestMixIsPure: the same draw mixes alike, another batch otherwise.
func TestMixIsPure(t *testing.T) {
	m := mixer(t, smallCrop+"RandomChoice([MixUp(alpha=0.5), CutMix()])")
	seen := map[string]int{}
	for i := range 40 {
		rows := batchOf(t, m, 3)
		m.Mix(Draw{Seed: 1, Sample: uint64(i % 20)}, rows)
		seen[fmt.Sprint(data(rows))]++
	}
	if len(seen) < 15 || len(seen) > 20 {
		t.Errorf("%d different batches of 20 draws, each made twice", len(seen))
	}
	m.Mix(Draw{}, []*Row{nil, nil})
	m.Mix(Draw{}, nil)
}
