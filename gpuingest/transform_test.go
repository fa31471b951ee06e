package gpuingest

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"image"
	"image/color/palette"
	"image/png"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"sort"
	"strings"
	"testing"

	"github.com/shoalfs/shoal/gpuingest/internal/oracle"
	"github.com/shoalfs/shoal/gpuingest/jpeg"
)

func ask(t testing.TB, op string, q oracle.Q, payload []byte) (oracle.Q, []byte) {
	t.Helper()
	a, b, err := oracle.Ask(op, q, payload)
	if err != nil {
		t.Fatalf("oracle %s: %v", op, err)
	}
	return a, b
}

func photo(t testing.TB, i, w, h int) []byte {
	t.Helper()
	_, pix := ask(t, "photo", oracle.Q{"i": i, "w": w, "h": h}, nil)
	return pix
}

func photoJPEG(t testing.TB, i, w, h int, sub jpeg.Subsampling) []byte {
	t.Helper()
	b, err := jpeg.Encode(nil, photo(t, i, w, h), w, h, 90, sub)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func compile(t testing.TB, spec string) *Transform {
	t.Helper()
	tr, err := Compile(spec)
	if err != nil {
		t.Fatalf("%s: %v", spec, err)
	}
	return tr
}

func apply(t testing.TB, tr *Transform, src []byte, at Draw) []byte {
	t.Helper()
	dst := make([]byte, tr.OutBytes())
	if err := tr.Apply(src, at, dst); err != nil {
		t.Fatalf("%s: %v", tr, err)
	}
	return dst
}

type ops [][2]any

func (o ops) of(name string, kwargs oracle.Q) ops {
	return append(slices.Clone(o), [2]any{name, kwargs})
}

// TestDeterministicChains compares chains without chance with torchvision's, byte for byte.
func TestDeterministicChains(t *testing.T) {
	resize := func(size any) ops { return ops{}.of("Resize", oracle.Q{"size": size}) }
	flip := oracle.Q{"p": 1.0}
	chains := []struct {
		spec string
		tv   ops
	}{
		{"Resize(256)|CenterCrop(224)", resize(256).of("CenterCrop", oracle.Q{"size": 224})},
		{"Resize(232)|CenterCrop((224,200))", resize(232).of("CenterCrop", oracle.Q{"size": []int{224, 200}})},
		{"Resize((100,151))", resize([]int{100, 151})},
		{"Resize(size=[64])|CenterCrop(63)", resize(64).of("CenterCrop", oracle.Q{"size": 63})},
		{"Resize(200, max_size=230)|CenterCrop(190)",
			ops{}.of("Resize", oracle.Q{"size": 200, "max_size": 230}).of("CenterCrop", oracle.Q{"size": 190})},
		{"CenterCrop(400)", ops{}.of("CenterCrop", oracle.Q{"size": 400})}, // padded where the picture is smaller
		{"CenterCrop((401,333))|Resize(77)",
			ops{}.of("CenterCrop", oracle.Q{"size": []int{401, 333}}).of("Resize", oracle.Q{"size": 77})},
		{"CenterCrop(500)|CenterCrop(301)",
			ops{}.of("CenterCrop", oracle.Q{"size": 500}).of("CenterCrop", oracle.Q{"size": 301})},
		{"CenterCrop(101)|Resize((50,60))",
			ops{}.of("CenterCrop", oracle.Q{"size": 101}).of("Resize", oracle.Q{"size": []int{50, 60}})},
		{"Resize(256)|Resize((90,80))", resize(256).of("Resize", oracle.Q{"size": []int{90, 80}})},
		{"RandomHorizontalFlip(p=1)|Resize(256)|CenterCrop(224)",
			ops{}.of("RandomHorizontalFlip", flip).of("Resize", oracle.Q{"size": 256}).of(
				"CenterCrop", oracle.Q{"size": 224})},
		{"Resize(255)|RandomHorizontalFlip(1.0)|CenterCrop(224)",
			resize(255).of("RandomHorizontalFlip", flip).of("CenterCrop", oracle.Q{"size": 224})},
		{"Resize(256)|CenterCrop(224)|RandomHorizontalFlip(1)|RandomHorizontalFlip(1)|RandomHorizontalFlip(1)",
			resize(256).of("CenterCrop", oracle.Q{"size": 224}).of("RandomHorizontalFlip", flip)},
		{"Resize(120, 'bicubic')|CenterCrop(100)",
			ops{}.of("Resize", oracle.Q{"size": 120, "interpolation": "bicubic"}).of("CenterCrop",
				oracle.Q{"size": 100})},
		{"Resize((70, 90), 'nearest')|RandomVerticalFlip(1)",
			ops{}.of("Resize", oracle.Q{"size": []int{70, 90}, "interpolation": "nearest"}).of(
				"RandomVerticalFlip", flip)},
		{"RandomVerticalFlip(1)|RandomHorizontalFlip(1)|CenterCrop((80, 401))",
			ops{}.of("RandomVerticalFlip", flip).of("RandomHorizontalFlip", flip).of(
				"CenterCrop", oracle.Q{"size": []int{80, 401}})},
		{"Pad((3, 5), fill=(1, 2, 3))|Resize((60, 50))|Pad(2, padding_mode='reflect')",
			ops{}.of("Pad", oracle.Q{"padding": []int{3, 5}, "fill": []int{1, 2, 3}}).
				of("Resize", oracle.Q{"size": []int{60, 50}}).of("Pad",
				oracle.Q{"padding": 2, "padding_mode": "reflect"})},
		{"Resize((61, 61))|RandomCrop(61)|RandomRotation((90, 90))|Pad(1)",
			resize([]int{61, 61}).of("RandomCrop", oracle.Q{"size": 61}).of(
				"RandomRotation", oracle.Q{"degrees": []int{90, 90}}).of("Pad", oracle.Q{"padding": 1})},
		{"RandomRotation((30, 30), 'bilinear', expand=True, fill=9)|Resize((40, 30))",
			ops{}.of("RandomRotation", oracle.Q{"degrees": []int{30, 30}, "interpolation": "bilinear", "expand": true,
				"fill": 9}).of("Resize", oracle.Q{"size": []int{40, 30}})},
		{"Resize((40, 30))|RandomInvert(1)|RandomAutocontrast(1)|RandomSolarize(128, 1)|RandomPosterize(3, 1)",
			resize([]int{40, 30}).of("RandomInvert", flip).of("RandomAutocontrast", flip).
				of("RandomSolarize", oracle.Q{"threshold": 128, "p": 1}).of("RandomPosterize",
				oracle.Q{"bits": 3, "p": 1})},
		{"RandomAdjustSharpness(2, 1)|Resize((40, " +
			"30))|RandomEqualize(1)|RandomHorizontalFlip(1)|Grayscale(3)|CenterCrop(31)",
			ops{}.of("RandomAdjustSharpness", oracle.Q{"sharpness_factor": 2, "p": 1}).of("Resize",
				oracle.Q{"size": []int{40, 30}}).
				of("RandomEqualize", flip).of("RandomHorizontalFlip", flip).of(
				"Grayscale", oracle.Q{"num_output_channels": 3}).of("CenterCrop", oracle.Q{"size": 31})},
		{"Resize((40, 30))|ColorJitter((1.5, 1.5))|RandomGrayscale(1)",
			resize([]int{40, 30}).of("ColorJitter", oracle.Q{"brightness": []float64{1.5, 1.5}}).of(
				"RandomGrayscale", flip)},
		{"Resize(256)|CenterCrop(224)|RandomHorizontalFlip(p=0)", resize(256).of("CenterCrop", oracle.Q{"size": 224})},
	}
	sizes := []image.Point{{500, 375}, {375, 500}, {333, 333}, {224, 224}, {64, 300}, {301, 65}, {1, 1}, {3, 2},
		{256, 256}, {257, 700}}
	for i, size := range sizes {
		src := photoJPEG(t, i, size.X, size.Y, []jpeg.Subsampling{444, 422, 420}[i%3])
		_, asPNG := ask(t, "save", oracle.Q{"w": size.X, "h": size.Y, "format": "PNG"}, photo(t, i, size.X, size.Y))
		for kind, b := range map[string][]byte{"jpeg": src, "png": asPNG} {
			ask(t, "load", oracle.Q{"key": "chain"}, b)
			for k, c := range chains {
				if kind == "png" && (k+i)%3 > 0 {
					continue // what follows the decode is the same code
				}
				a, want := ask(t, "torchvision", oracle.Q{"key": "chain", "ops": c.tv}, nil)
				tr := compile(t, c.spec+"|uint8|nhwc")
				if float64(tr.size.X) != a["w"] || float64(tr.size.Y) != a["h"] {
					t.Fatalf("%s: %v, torchvision %vx%v", c.spec, tr.size, a["w"], a["h"])
				}
				if got := apply(t, tr, b, Draw{}); !bytes.Equal(got, want) {
					t.Errorf("%s of %v %s differs from torchvision", c.spec, size, kind)
				}
			}
		}
	}
}

// TestRandomChain replays the box that the transform drew through Pillow: random crops are Pillow's pixels too,
// also where the picture was flipped before.
func TestRandomChain(t *testing.T) {
	const w, h = 500, 375
	src := photoJPEG(t, 3, w, h, 420)
	ask(t, "load", oracle.Q{"key": "random"}, src)
	rrc := &randomResizedCrop{fixedSize: fixedSize{224, 192}, scale: [2]float64{0.08, 1},
		ratio: [2]float64{0.75, 4.0 / 3}}
	const crop = "RandomResizedCrop((224, 192), ratio=(0.75, 1.3333333333333333))"
	for _, first := range []bool{false, true} {
		spec, cropAt, flipAt := crop+"|RandomHorizontalFlip()|nhwc", 0, 1
		if first {
			spec, cropAt, flipAt = "RandomHorizontalFlip()|"+crop+"|nhwc", 1, 0
		}
		tr := compile(t, spec)
		flips := 0
		for i := range uint64(60) {
			at := Draw{Seed: 9, Epoch: 3, Sample: i}
			r, f := at.Rand(cropAt), at.Rand(flipAt)
			box := rrc.box(image.Pt(w, h), &r)
			flip := f.Float64() < 0.5
			if flip {
				flips++
			}
			q := oracle.Q{"key": "random", "box": []int{box.Min.X, box.Min.Y, box.Max.X, box.Max.Y},
				"size": []int{192, 224}, "flip": flip}
			if first && flip {
				ask(t, "load", oracle.Q{"key": "mirrored"}, mirrored(t, src))
				q["key"], q["flip"] = "mirrored", false
			}
			_, want := ask(t, "resample", q, nil)
			if got := apply(t, tr, src, at); !bytes.Equal(got, want) {
				t.Fatalf("%s: sample %d, box %v, flip %v differs from Pillow", spec, i, box, flip)
			}
		}
		if flips < 15 || flips > 45 {
			t.Errorf("%d flips of 60", flips)
		}
	}
}

// mirrored is the decoded JPEG, mirrored, as a PNG.
func mirrored(t *testing.T, src []byte) []byte {
	t.Helper()
	pix, w, h, err := jpeg.DecodeRGB(src)
	if err != nil {
		t.Fatal(err)
	}
	m := image.NewNRGBA(image.Rect(0, 0, w, h))
	for y := range h {
		for x := range w {
			copy(m.Pix[y*m.Stride+4*x:], append(slices.Clone(pix[(y*w+w-1-x)*3:][:3]), 255))
		}
	}
	var b bytes.Buffer
	if err := png.Encode(&b, m); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// TestTables compares every value of every channel with torch's ToTensor and Normalize, bit for bit.
func TestTables(t *testing.T) {
	imagenet := oracle.Q{"mean": []float64{0.485, 0.456, 0.406}, "std": []float64{0.229, 0.224, 0.225}}
	const norm = "|Normalize((0.485,0.456,0.406),(0.229,0.224,0.225)"
	// overflows fp16, and subnormals
	odd := oracle.Q{"mean": []float64{-3.5, 1e-5, 12}, "std": []float64{1e-4, 70000, -0.3}}
	for _, dtype := range []string{"fp32", "fp16", "bf16"} {
		for name, c := range map[string]struct {
			spec string
			q    oracle.Q
		}{
			"none":     {"", oracle.Q{}},
			"imagenet": {"|Normalize((0.485,0.456,0.406),(0.229,0.224,0.225))", imagenet},
			"odd":      {"|Normalize(mean=[-3.5, 1e-5, 12], std=(1e-4, 70000., -.3))", odd},
			"one": {"|Normalize((0.5,),(0.25,))",
				oracle.Q{"mean": []float64{0.5, 0.5, 0.5}, "std": []float64{0.25, 0.25, 0.25}}},
			"in fp16": {norm + ",dtype='fp16')",
				oracle.Q{"mean": imagenet["mean"], "std": imagenet["std"], "in": "fp16"}},
			"in bf16": {norm + ",dtype='bf16')",
				oracle.Q{"mean": imagenet["mean"], "std": imagenet["std"], "in": "bf16"}},
			"v2": {"|v2", oracle.Q{"v2": true}},
			"v2, norm": {norm + ",dtype='fp16')|v2",
				oracle.Q{"mean": imagenet["mean"], "std": imagenet["std"], "in": "fp16", "v2": true}},
		} {
			c.q["dtype"] = dtype
			_, want := ask(t, "tensor", c.q, nil)
			tr := compile(t, "Resize((2,2))|"+dtype+c.spec)
			if !bytes.Equal(tr.table, want) {
				t.Errorf("%s %s: the table differs from torch's", dtype, name)
			}
		}
	}
}

// TestTypesAndLayouts checks every type and layout against uint8 nhwc and the table.
func TestTypesAndLayouts(t *testing.T) {
	src := photoJPEG(t, 2, 120, 90, 420)
	at := Draw{Seed: 5, Sample: 6}
	const chain = "RandomResizedCrop((31, 50))|RandomHorizontalFlip()"
	plain := apply(t, compile(t, chain+"|uint8|nhwc"), src, at)
	for dtype, elem := range dtypes {
		for _, layout := range layouts {
			tr := compile(t, chain+"|"+dtype+"|"+layout)
			if tr.dtype != dtype || tr.Layout() != layout || tr.OutBytes() != 31*50*3*elem {
				t.Errorf("%s %s %d", tr.dtype, tr.Layout(), tr.OutBytes())
			}
			got := apply(t, tr, src, at)
			for i := range 31 * 50 {
				for c := range 3 {
					to := i*3 + c
					if layout == "nchw" {
						to = c*31*50 + i
					}
					v := plain[i*3+c]
					want := []byte{v}
					if tr.table != nil {
						want = tr.table[(c*256+int(v))*elem:][:elem]
					}
					if !bytes.Equal(got[to*elem:][:elem], want) {
						t.Fatalf("%s %s: pixel %d, channel %d", dtype, layout, i, c)
					}
				}
			}
		}
	}
}

// TestOtherFormats compares modes of PNG and WebP with Pillow's convert("RGB").
func TestOtherFormats(t *testing.T) {
	for _, size := range []image.Point{{1, 1}, {2, 2}, {5, 4}, {37, 53}, {64, 31}} {
		w, h := size.X, size.Y
		pix := photo(t, 5, w, h)
		for _, c := range []struct {
			format, mode string
			options      oracle.Q
		}{
			{"PNG", "RGB", nil}, {"PNG", "RGBA", nil}, {"PNG", "L", nil}, {"PNG", "LA", nil}, {"PNG", "P", nil},
			{"PNG", "1", nil}, {"PNG", "I", nil}, {"PNG", "I", oracle.Q{"transparency": 70}},
			{"PNG", "P", oracle.Q{"transparency": 3}}, {"PNG", "L", oracle.Q{"transparency": 100}},
			{"PNG", "RGB", oracle.Q{"transparency": []int{1, 2, 3}}},
			{"WebP", "RGB", oracle.Q{"quality": 80}}, {"WebP", "RGB", oracle.Q{"quality": 10}},
			{"WebP", "RGBA", oracle.Q{"quality": 80}},
			{"WebP", "RGB", oracle.Q{"lossless": true}}, {"WebP", "RGBA", oracle.Q{"lossless": true}},
		} {
			q := oracle.Q{"w": w, "h": h, "format": c.format, "mode": c.mode}
			if c.options != nil {
				q["options"] = c.options
			}
			_, b := ask(t, "save", q, pix)
			_, want := ask(t, "load", oracle.Q{"key": "other", "pixels": true}, b)
			got := apply(t, compile(t, fmt.Sprintf("Resize((%d, %d))|nhwc", h, w)), b, Draw{})
			if !bytes.Equal(got, want) {
				t.Errorf("%v %s of mode %s %v differs from Pillow", size, c.format, c.mode, c.options)
			}
		}
	}
	// Debian's own WebP wallpapers are too large for a quick test but 16-bit PNG is not: made here, read by Pillow.
	for name, m := range map[string]image.Image{
		"grey16": &image.Gray16{Pix: []byte{0, 7, 1, 0, 0, 255, 255, 255}, Stride: 4, Rect: image.Rect(0, 0, 2, 2)},
		"rgba64": &image.NRGBA64{Pix: []byte{1, 2, 3, 4, 5, 6, 7, 8, 250, 128, 251, 255, 252, 1, 255, 255}, Stride: 16,
			Rect: image.Rect(0, 0, 2, 1)},
		"short palette": &image.Paletted{Pix: []byte{0, 19, 20, 200}, Stride: 2, Rect: image.Rect(0, 0, 2, 2),
			Palette: palette.Plan9[:20]},
		"rgb48": &image.NRGBA64{Pix: []byte{1, 2, 3, 4, 5, 6, 255, 255, 250, 128, 251, 255, 252, 1, 255, 255},
			Stride: 16, Rect: image.Rect(0, 0, 2, 1)},
	} {
		var b bytes.Buffer
		if err := png.Encode(&b, m); err != nil {
			t.Fatal(err)
		}
		_, want := ask(t, "load", oracle.Q{"key": "other", "pixels": true}, b.Bytes())
		got := apply(t, compile(t, fmt.Sprintf("Resize((%d, %d))|nhwc", m.Bounds().Dy(), m.Bounds().Dx())),
			b.Bytes(), Draw{})
		if !bytes.Equal(got, want) {
			t.Errorf("%s: %v, Pillow %v", name, got, want)
		}
	}
}

// ks is the two-sample Kolmogorov-Smirnov distance.
func ks(a, b []float64) float64 {
	sort.Float64s(a)
	sort.Float64s(b)
	var d float64
	for i, j := 0, 0; i < len(a) && j < len(b); {
		x := min(a[i], b[j])
		for i < len(a) && a[i] == x {
			i++
		}
		for j < len(b) && b[j] == x {
			j++
		}
		d = max(d, math.Abs(float64(i)/float64(len(a))-float64(j)/float64(len(b))))
	}
	return d
}

// TestBoxDistribution compares crop boxes with torchvision's in distribution. Seeds are fixed on both sides.
func TestBoxDistribution(t *testing.T) {
	const n = 8000
	limit := 1.95 * math.Sqrt(2.0/n) // p = 0.001
	for _, c := range []struct {
		w, h         int
		scale, ratio [2]float64
	}{
		{500, 375, [2]float64{0.08, 1}, [2]float64{0.75, 4.0 / 3}},
		{300, 900, [2]float64{0.5, 1}, [2]float64{0.75, 4.0 / 3}}, // the central crop is common
		{900, 120, [2]float64{0.9, 1}, [2]float64{0.5, 2}},        // and here all there is
		{31, 17, [2]float64{0.01, 0.3}, [2]float64{0.2, 7}},
	} {
		_, raw := ask(t, "boxes", oracle.Q{"w": c.w, "h": c.h, "scale": c.scale, "ratio": c.ratio, "count": n,
			"seed": 1}, nil)
		o := &randomResizedCrop{fixedSize: fixedSize{1, 1}, scale: c.scale, ratio: c.ratio}
		stats := map[string]func(b image.Rectangle) float64{
			"area":  func(b image.Rectangle) float64 { return float64(b.Dx() * b.Dy()) },
			"ratio": func(b image.Rectangle) float64 { return float64(b.Dx()) / float64(b.Dy()) },
			"left":  func(b image.Rectangle) float64 { return float64(b.Min.X) },
			"top":   func(b image.Rectangle) float64 { return float64(b.Min.Y) },
			"place": func(b image.Rectangle) float64 { return float64(b.Min.X) / float64(max(1, c.w-b.Dx())) },
		}
		ours, theirs := map[string][]float64{}, map[string][]float64{}
		for i := range n {
			r := Draw{Seed: 77, Sample: uint64(i)}.Rand(0)
			b := o.box(image.Pt(c.w, c.h), &r)
			if !b.In(image.Rect(0, 0, c.w, c.h)) || b.Empty() {
				t.Fatalf("box %v of %dx%d", b, c.w, c.h)
			}
			v := func(k int) int { return int(int32(native.Uint32(raw[16*i+4*k:]))) }
			tb := image.Rect(v(1), v(0), v(1)+v(3), v(0)+v(2))
			for name, f := range stats {
				ours[name], theirs[name] = append(ours[name], f(b)), append(theirs[name], f(tb))
			}
		}
		for name := range stats {
			if d := ks(ours[name], theirs[name]); d > limit {
				t.Errorf("%dx%d: %s differs from torchvision's: D = %.4f, limit %.4f", c.w, c.h, name, d, limit)
			}
		}
	}
}

func TestBadSamples(t *testing.T) {
	good := photoJPEG(t, 1, 64, 48, 420)
	_, pngFile := ask(t, "save", oracle.Q{"w": 64, "h": 48, "format": "PNG"}, photo(t, 1, 64, 48))
	var wide bytes.Buffer
	if err := png.Encode(&wide, image.NewGray(image.Rect(0, 0, 1<<16+1, 2))); err != nil {
		t.Fatal(err)
	}
	tr := compile(t, "RandomResizedCrop(16)")
	for _, c := range []struct {
		name string
		src  []byte
		is   error
		says string
	}{
		{"empty", nil, ErrBadSample, "empty file"},
		{"half a JPEG", good[:len(good)/2], jpeg.ErrTruncated, "end marker"},
		{"corrupt JPEG", []byte("\xff\xd8nothing of the kind"), jpeg.ErrCorrupt, "starts with"},
		{"half a PNG", pngFile[:len(pngFile)/2], ErrBadSample, "PNG"},
		{"PNG header", pngFile[:20], ErrBadSample, "PNG header"},
		{"WebP header", []byte("RIFF\x20\x00\x00\x00WEBPVP8 aaaaaaaaaaaa"), ErrBadSample, "WebP"},
		{"GIF", []byte("GIF89a.............."), ErrBadSample, "GIF"},
		{"text", []byte("hello"), ErrBadSample, "68 65 6c 6c 6f"},
		{"HTML", []byte("<html>404</html>"), ErrBadSample, "HTML"},
		{"wide PNG", wide.Bytes(), jpeg.ErrTooLarge, "65536 a side"},
	} {
		err := tr.Apply(c.src, Draw{}, make([]byte, tr.OutBytes()))
		if !errors.Is(err, ErrBadSample) || !errors.Is(err, c.is) || !strings.Contains(fmt.Sprint(err), c.says) {
			t.Errorf("%s: %v", c.name, err)
		}
	}
	// A header alone, of 20,000 x 20,000 pixels: refused before a byte of it is decoded.
	huge := bytes.Clone(pngFile)
	binary.BigEndian.PutUint32(huge[16:], 20000)
	binary.BigEndian.PutUint32(huge[20:], 20000)
	binary.BigEndian.PutUint32(huge[29:], crc32.ChecksumIEEE(huge[12:29]))
	if err := tr.Apply(huge, Draw{}, make([]byte, tr.OutBytes())); !errors.Is(err, jpeg.ErrTooLarge) {
		t.Errorf("PNG of 20,000 x 20,000: %v", err)
	}
	// Pixels of 65,535 x 65,535 would take 12 GB.
	lie := bytes.Clone(good)
	copy(lie[bytes.Index(lie, []byte{0xff, 0xc0})+5:], "\xff\xff\xff\xff")
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	_, _, err := Recode{Decode: true}.Apply(lie)
	runtime.ReadMemStats(&after)
	if n := after.TotalAlloc - before.TotalAlloc; !errors.Is(err, jpeg.ErrTooLarge) || n > 1<<20 {
		t.Errorf("JPEG of 65,535 x 65,535: %v, %d bytes were allocated", err, n)
	}
	for spec, says := range map[string]string{
		"RandomCrop(70)|CenterCrop(3)":                                "smaller than the crop",
		"GaussianBlur(255)|CenterCrop(3)":                             "too small for a blur",
		"Pad(16384)|Grayscale(3)|CenterCrop(3)":                       "the limit is",
		"Pad(16384, fill=1)|CenterCrop(3)":                            "the limit is",
		"Resize(16384)|RandomRotation(45, expand=True)|CenterCrop(3)": "the limit is",
	} {
		tr := compile(t, spec)
		if err := tr.Apply(good, Draw{}, make([]byte, tr.OutBytes())); !errors.Is(err, ErrBadSample) ||
			!strings.Contains(fmt.Sprint(err), says) {
			t.Errorf("%s: %v", spec, err)
		}
	}
	thin := photoJPEG(t, 1, 1, 400, 444)
	if err := compile(t, "Resize(256)|CenterCrop(224)").Apply(thin, Draw{}, make([]byte, 224*224*3)); !errors.Is(err,
		ErrBadSample) {
		t.Errorf("1x400 resized to 256x102400: %v", err)
	}
	// What the caller did wrong is no bad sample.
	if err := tr.Apply(good, Draw{}, make([]byte, 5)); err == nil || errors.Is(err, ErrBadSample) {
		t.Errorf("short destination: %v", err)
	}
	for _, d := range []Draw{{Sample: 1 << 48}, {Occurrence: 1 << 16}} {
		if err := tr.Apply(good, d, make([]byte, tr.OutBytes())); err == nil || errors.Is(err, ErrBadSample) {
			t.Errorf("%+v: %v", d, err)
		}
	}
}

func TestRaw(t *testing.T) {
	tr := compile(t, " raw ")
	if !slices.Equal(tr.Fields()[0].Shape, []int{0, 0, 0}) || tr.OutBytes() != 0 || tr.dtype != "raw" ||
		tr.Layout() != "raw" || tr.String() != "raw" {
		t.Errorf("%d %s %s %s", tr.OutBytes(), tr.dtype, tr.Layout(), tr)
	}
	dst := make([]byte, 4)
	if err := tr.Apply([]byte("data"), Draw{}, dst); err != nil || string(dst) != "data" {
		t.Errorf("%q, %v", dst, err)
	}
	if err := tr.Apply([]byte("dat"), Draw{}, dst); err == nil {
		t.Error("a shorter sample: no error")
	}
}

// TestPure: the same draw gives the same bytes from any goroutine, another draw gives others.
func TestPure(t *testing.T) {
	src := photoJPEG(t, 1, 200, 150, 420)
	tr := compile(t, "RandomHorizontalFlip()|RandomResizedCrop(64)|fp16")
	want := make([][]byte, 16)
	for i := range want {
		want[i] = apply(t, tr, src, Draw{Seed: 3, Sample: uint64(i)})
		for j := range i {
			if bytes.Equal(want[i], want[j]) {
				t.Errorf("samples %d and %d are equal", i, j)
			}
		}
	}
	errs := make(chan error)
	for g := range 8 {
		go func() {
			dst := make([]byte, tr.OutBytes())
			for k := range 32 {
				i := (k*7 + g) % len(want)
				if err := tr.Apply(src, Draw{Seed: 3, Sample: uint64(i)}, dst); err != nil {
					errs <- err
					return
				}
				if !bytes.Equal(dst, want[i]) {
					errs <- fmt.Errorf("sample %d differs", i)
					return
				}
			}
			errs <- nil
		}()
	}
	for range 8 {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
}

func TestApplyAllocatesNothing(t *testing.T) {
	src := photoJPEG(t, 1, 200, 150, 420)
	tr := compile(t, "RandomResizedCrop(64)|RandomHorizontalFlip()|fp32")
	dst := make([]byte, tr.OutBytes())
	if n := testing.AllocsPerRun(100, func() {
		if err := tr.Apply(src, Draw{Seed: 1}, dst); err != nil {
			t.Fatal(err)
		}
	}); n > 0 {
		t.Errorf("%v allocations a sample", n)
	}
}

// TestDCT logs how far decoding at a fraction of the size is from the whole, and bounds it.
func TestDCT(t *testing.T) {
	var sum, worst, n float64
	for i := range 8 {
		src := photoJPEG(t, 30+i, 1200, 900, 420)
		for _, chain := range []string{"Resize(256)|CenterCrop(224)", "RandomResizedCrop(224, (0.3, 1))"} {
			at := Draw{Seed: 2, Sample: uint64(i)}
			exact, fast := apply(t, compile(t, chain), src, at), apply(t, compile(t, chain+"|dct"), src, at)
			for j := range exact {
				d := math.Abs(float64(exact[j]) - float64(fast[j]))
				sum, worst, n = sum+d, max(worst, d), n+1
			}
		}
	}
	t.Logf("mean difference %.2f of 255, largest %.0f", sum/n, worst)
	if sum/n > 2 || sum == 0 {
		t.Errorf("mean difference %.2f", sum/n)
	}
}

func FuzzApply(f *testing.F) {
	pix := make([]byte, 24*18*3)
	r := rand.New(rand.NewPCG(1, 1))
	for i := range pix {
		pix[i] = byte(r.Uint32())
	}
	j, err := jpeg.Encode(nil, pix, 24, 18, 80, 420)
	if err != nil {
		f.Fatal(err)
	}
	var p bytes.Buffer
	if err := png.Encode(&p, &image.Gray{Pix: pix, Stride: 24, Rect: image.Rect(0, 0, 24, 18)}); err != nil {
		f.Fatal(err)
	}
	f.Add(j, uint64(1))
	f.Add(p.Bytes(), uint64(2))
	f.Add([]byte("RIFF\x24\x00\x00\x00WEBPVP8L"), uint64(3))
	var trs []*Transform
	for _, spec := range []string{
		"RandomResizedCrop(9)|RandomHorizontalFlip()|fp16", "Resize(16)|CenterCrop(20)",
		"RandomHorizontalFlip(1)|Resize(10)|RandomResizedCrop(7)",
		"RandomResizedCrop(9, interpolation='bicubic')|RandAugment(4)|RandomErasing(1)|dct|pillow(13)",
		"RandomCrop(12, 3, True, 9, 'reflect')|RandomRotation(180, 'bicubic', True, fill=7)|ColorJitter(1, 1, 1, " +
			"0.5)|CenterCrop(11)|RandomVerticalFlip()",
	} {
		trs = append(trs, compile(f, spec))
	}
	f.Fuzz(func(t *testing.T, b []byte, seed uint64) {
		if w, h, err := jpeg.Size(b); err == nil && w*h > 1<<16 {
			t.Skip("it would only take time")
		}
		if c, _, err := image.DecodeConfig(bytes.NewReader(b)); err == nil && c.Width*c.Height > 1<<16 {
			t.Skip("it would only take time")
		}
		for _, tr := range trs {
			x, y := make([]byte, tr.OutBytes()), make([]byte, tr.OutBytes())
			at := Draw{Seed: seed, Sample: seed >> 16, Epoch: uint32(seed)}
			e1, e2 := tr.Apply(b, at, x), tr.Apply(b, at, y)
			if (e1 == nil) != (e2 == nil) || e1 == nil && !bytes.Equal(x, y) {
				t.Errorf("%s is not a function of its input: %v, %v", tr, e1, e2)
			}
			if e1 != nil && !errors.Is(e1, ErrBadSample) {
				t.Errorf("%s: %v is not called a bad sample", tr, e1)
			}
		}
	})
}
