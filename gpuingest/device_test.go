package gpuingest

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/shoalfs/shoal/gpuingest/jpeg"
)

// What the host makes of a transform with the word device, finished by a device, is what it makes of the transform
// alone, byte for byte, in every type and layout, mirrored or not; rows without a sample are zeros.
func TestDevicePartEqualsTransform(t *testing.T) {
	photos := [][]byte{photoJPEG(t, 0, 500, 375, jpeg.Sub420), photoJPEG(t, 1, 333, 217, jpeg.Sub444),
		photoJPEG(t, 2, 81, 130, jpeg.Sub422)}
	chains := []string{
		"RandomResizedCrop(56)|RandomHorizontalFlip()",
		"RandomHorizontalFlip()|RandomResizedCrop((33, 47))|RandomHorizontalFlip(0.3)|RandomHorizontalFlip(1.0)",
		"Resize(64)|CenterCrop(57)",
		"RandomHorizontalFlip()|CenterCrop(96)",
	}
	tails := []string{"uint8", "fp16", "bf16", "fp32", "fp16|Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))",
		"fp32|Normalize((0.5,), (0.25,))"}
	for _, chain := range chains {
		for _, tail := range tails {
			for _, layout := range []string{"nchw", "nhwc"} {
				dtype, norm, _ := strings.Cut(tail, "|")
				spec := chain + "|" + dtype + "|" + layout
				if norm != "" {
					spec += "|" + norm
				}
				t.Run(spec, func(t *testing.T) { checkDevicePart(t, spec, photos) })
			}
		}
	}
}

// Whatever a transform does to pixels, all that it does to uint8 is the host's part, and the values' type the device's.
func TestDevicePartOfEveryOperation(t *testing.T) {
	photos := [][]byte{photoJPEG(t, 0, 100, 75, jpeg.Sub420)}
	arguments := map[string]string{"RandomResizedCrop": "48", "Resize": "48", "CenterCrop": "40", "RandomCrop": "32",
		"Pad": "3", "RandomRotation": "30", "Grayscale": "3",
		"GaussianBlur": "5", "ColorJitter": "0.4, 0.4, 0.4, 0.1", "RandomPosterize": "3", "RandomSolarize": "128",
		"RandomAdjustSharpness": "2"}
	for name := range operations {
		spec := "Resize((64, 72))|RandomHorizontalFlip()|" + name + "(" + arguments[name] +
			")|CenterCrop(30)|RandomHorizontalFlip()|fp32|nchw|Normalize((0.5,), (0.25,))"
		t.Run(name, func(t *testing.T) { checkDevicePart(t, spec, photos) })
	}
}

func checkDevicePart(t *testing.T, spec string, photos [][]byte) {
	whole := compile(t, spec)
	in, err := New(spec + " | device")
	if err != nil {
		t.Fatal(err)
	}
	part := in.(*HostPart)
	if part.Hash() != whole.Hash() || part.String() != whole.String()+"|device" {
		t.Errorf("hash %s, canonical %s: states of both kinds must be of one transform", part.Hash(), part)
	}
	if again, err := New(part.String()); err != nil || again.String() != part.String() {
		t.Errorf("the canonical form compiles to %v, %v", again, err)
	}
	const rows, empty = 7, 4
	f := part.Fields()
	j := &Job{Rows: rows, Finish: part.Finish(), Source: 64, Params: 64 + (rows*f[0].Bytes+63)/64*64, Target: 32}
	slot := bytes.Repeat([]byte{0xaa}, j.Params+rows*f[1].Bytes)
	want := bytes.Repeat([]byte{0xbb}, 32+rows*whole.OutBytes())
	for i := range rows {
		row := &Row{Fields: [][]byte{slot[j.Source+i*f[0].Bytes:][:f[0].Bytes],
			slot[j.Params+i*f[1].Bytes:][:f[1].Bytes]}, Label: -1}
		out := want[32+i*whole.OutBytes():][:whole.OutBytes()]
		if i == empty { // the feed clears what has no sample
			clear(row.Fields[0])
			clear(row.Fields[1])
			clear(out)
			continue
		}
		at := Draw{Seed: 7, Epoch: 3, Sample: uint64(i), Occurrence: uint32(i % 2)}
		if err := part.Make(Sample{Data: photos[i%len(photos)]}, at, row); err != nil {
			t.Fatal(err)
		}
		if err := whole.Apply(photos[i%len(photos)], at, out); err != nil {
			t.Fatal(err)
		}
	}
	got := make([]byte, len(want))
	if err := j.Do(slot, got); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got[32:], want[32:]) {
		t.Error("host part and device do not make what the transform makes")
	}
}

// Windows within larger rows, as pictures of one size that were stored decoded have them.
func TestFinishWindow(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	f := &Finish{DType: "uint8", Layout: "nhwc", Height: 5, Width: 7, SourceHeight: 9, SourceWidth: 12}
	src := make([]byte, f.SourceBytes())
	for i := range src {
		src[i] = byte(rng.Uint32())
	}
	for _, flip := range []uint32{0, Flip} {
		p := RowParams{X: 5, Y: 4, Flags: Filled | flip}
		dst := make([]byte, f.RowBytes())
		if err := f.Row(dst, src, p); err != nil {
			t.Fatal(err)
		}
		for y := range 5 {
			for x := range 7 {
				from := 5 + x
				if flip != 0 {
					from = 5 + 6 - x
				}
				if got, want := dst[(y*7+x)*3:][:3], src[((4+y)*12+from)*3:][:3]; !bytes.Equal(got, want) {
					t.Fatalf("flip %d: (%d, %d) is %v, want %v", flip, x, y, got, want)
				}
			}
		}
	}
}

func TestSplitNothing(t *testing.T) {
	if h, err := Split("raw"); h != nil || err != nil {
		t.Errorf("raw: %v, %v", h, err)
	}
	for _, spec := range []string{"raw", "CenterCrop(8)|fp32|nchw|RandomErasing()",
		"CenterCrop(8)|fp32|nchw|MixUp(num_classes=2)"} {
		whole, err := New(spec)
		if err != nil {
			t.Fatal(err)
		}
		if in, err := New(spec + "|device"); err != nil || in.String() != whole.String() || in.Hash() != whole.Hash() {
			t.Errorf("%s|device compiles to %v, %v", spec, in, err)
		}
	}
	for _, spec := range []string{"device", "Resize(|device", "CenterCrop(8)|device|uint8"} {
		if in, err := New(spec); err == nil {
			t.Errorf("%s compiles to %s", spec, in)
		}
	}
}

func TestJobCheck(t *testing.T) {
	f := &Finish{DType: "uint8", Layout: "nchw", Height: 4, Width: 4, SourceHeight: 6, SourceWidth: 6}
	good := Job{Rows: 2, Finish: f, Source: 0, Params: 216, Target: 0, Copies: []Copy{{From: 216, To: 96, Bytes: 16}}}
	slot := make([]byte, 232)
	RowParams{X: 2, Y: 2, Flags: Filled}.Put(slot[216:])
	if err := good.Check(slot, 112); err != nil {
		t.Fatal(err)
	}
	RowParams{X: 3, Flags: Filled}.Put(slot[224:])
	if err := good.Check(slot, 112); err == nil || !strings.Contains(err.Error(), "row 1") {
		t.Errorf("a window over the edge: %v", err)
	}
	for name, change := range map[string]func(j *Job, f *Finish){
		"source":       func(j *Job, _ *Finish) { j.Source = 200 },
		"params":       func(j *Job, _ *Finish) { j.Params = 217 },
		"target":       func(j *Job, _ *Finish) { j.Target = 32 },
		"odd target":   func(j *Job, _ *Finish) { j.Target = 1 },
		"copy":         func(j *Job, _ *Finish) { j.Copies = []Copy{{From: 0, To: 100, Bytes: 16}} },
		"negative":     func(j *Job, _ *Finish) { j.Source = -1 },
		"rows":         func(j *Job, _ *Finish) { j.Rows = -1 },
		"type":         func(_ *Job, f *Finish) { f.DType = "int8" },
		"layout":       func(_ *Job, f *Finish) { f.Layout = "chwn" },
		"large window": func(_ *Job, f *Finish) { f.Width = 7 },
		"table":        func(_ *Job, f *Finish) { f.Table = make([]byte, 5) },
		"no table":     func(_ *Job, f *Finish) { f.DType = "fp32" },
	} {
		j, g := good, *f
		j.Finish = &g
		change(&j, &g)
		if err := j.Check(make([]byte, 232), 112); err == nil {
			t.Errorf("%s: passes", name)
		}
	}
}

func BenchmarkFinishRow(b *testing.B) {
	for _, spec := range []string{"fp16|nchw", "fp32|nhwc"} {
		b.Run(spec, func(b *testing.B) {
			h, err := Split(fmt.Sprintf("CenterCrop(224)|%s", spec))
			if err != nil {
				b.Fatal(err)
			}
			f := h.Finish()
			src, dst := make([]byte, f.SourceBytes()), make([]byte, f.RowBytes())
			b.SetBytes(int64(len(dst)))
			for b.Loop() {
				if err := f.Row(dst, src, RowParams{Flags: Filled}); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
