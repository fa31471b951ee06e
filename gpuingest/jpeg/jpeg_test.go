package jpeg

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"image"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/shoalfs/shoal/gpuingest/internal/oracle"
)

// Decode is DecodeSized with the size that src has.
func Decode(dst, src []byte, j *Job) error {
	w, h, err := Size(src)
	if err != nil {
		return err
	}
	return DecodeSized(dst, src, image.Pt(w, h), j)
}

func ask(t testing.TB, op string, q oracle.Q, payload []byte) (oracle.Q, []byte) {
	t.Helper()
	a, b, err := oracle.Ask(op, q, payload)
	if err != nil {
		t.Fatalf("oracle %s: %v", op, err)
	}
	return a, b
}

// photo is a crop of one of Debian's wallpapers, in packed RGB.
func photo(t testing.TB, i, w, h int) []byte {
	t.Helper()
	_, pix := ask(t, "photo", oracle.Q{"i": i, "w": w, "h": h}, nil)
	return pix
}

func encode(t testing.TB, pix []byte, w, h int, e Encoding) []byte {
	t.Helper()
	b, err := EncodeWith(nil, pix, w, h, e)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// crop is the plain meaning of a crop: rows copied out of packed RGB.
func crop(pix []byte, w int, r image.Rectangle) []byte {
	var out []byte
	for y := r.Min.Y; y < r.Max.Y; y++ {
		out = append(out, pix[(y*w+r.Min.X)*3:(y*w+r.Max.X)*3]...)
	}
	return out
}

func randomBox(r *rand.Rand, w, h int) image.Rectangle {
	x0, y0 := r.IntN(w), r.IntN(h)
	x1, y1 := x0+1+r.IntN(w-x0), y0+1+r.IntN(h-y0)
	switch r.IntN(8) {
	case 0: // a pixel
		x1, y1 = x0+1, y0+1
	case 1: // at block edges, where a margin is most easily forgotten
		x0, y0 = x0&^15, y0&^15
		x1, y1 = min(w, x0+16*(1+r.IntN(4))), min(h, y0+16*(1+r.IntN(4)))
	case 2:
		y0, y1 = 0, h
	case 3:
		x0, x1 = 0, w
	}
	return image.Rect(x0, y0, x1, y1)
}

// variant is a picture together with the pixels of its full decode by Pillow.
type variant struct {
	name string
	data []byte
	pix  []byte
	w, h int
}

func variants(t testing.TB) []variant {
	t.Helper()
	var vs []variant
	sizes := []image.Point{{1, 1}, {2, 3}, {7, 5}, {17, 33}, {64, 64}, {65, 66}, {131, 97}, {333, 251}, {500, 375}}
	for i, size := range sizes {
		w, h := size.X, size.Y
		pix := photo(t, i, w, h)
		grey := make([]byte, w*h)
		cmyk := make([]byte, w*h*4)
		for p := range grey {
			grey[p] = pix[3*p+1]
			copy(cmyk[4*p:], []byte{pix[3*p], pix[3*p+1], pix[3*p+2], 255 - pix[3*p]/3})
		}
		add := func(name string, data []byte) {
			vs = append(vs, variant{name: fmt.Sprintf("%dx%d-%s", w, h, name), data: data, w: w, h: h})
		}
		for _, sub := range []Subsampling{Sub444, Sub422, Sub420, Sub440, Sub411} {
			add(fmt.Sprintf("%d", sub), encode(t, pix, w, h, Encoding{Quality: 90, Subsampling: sub}))
			add(fmt.Sprintf("%d-progressive", sub),
				encode(t, pix, w, h, Encoding{Quality: 85, Subsampling: sub, Progressive: true}))
			add(fmt.Sprintf("%d-restart", sub),
				encode(t, pix, w, h, Encoding{Quality: 75, Subsampling: sub, RestartRows: 1, Optimize: true}))
		}
		add("grey", encode(t, grey, w, h, Encoding{Quality: 90, Components: 1}))
		add("grey-progressive", encode(t, grey, w, h, Encoding{Quality: 90, Components: 1, Progressive: true}))
		add("cmyk", encode(t, cmyk, w, h, Encoding{Quality: 90, Components: 4, Subsampling: Sub444}))
		add("ycck-420", encode(t, cmyk, w, h, Encoding{Quality: 90, Components: 4, Subsampling: Sub420, YCCK: true}))
		_, pil := ask(t, "save",
			oracle.Q{"w": w, "h": h, "format": "JPEG",
				"options": oracle.Q{"quality": 80, "progressive": true, "subsampling": 2}}, pix)
		add("pillow-progressive", pil)
		_, pil = ask(t, "save", oracle.Q{"w": w, "h": h, "format": "JPEG", "mode": "CMYK",
			"options": oracle.Q{"quality": 80}}, pix)
		add("pillow-cmyk", pil)
	}
	for i := range vs {
		v := &vs[i]
		_, v.pix = ask(t, "load", oracle.Q{"key": v.name, "pixels": true}, v.data)
	}
	return vs
}

// TestRegionIsDecodeThenCrop is the promise of the region decode: no pixel tells that the rest was left out.
func TestRegionIsDecodeThenCrop(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	crops := 0
	for _, v := range variants(t) {
		got, w, h, err := DecodeRGB(v.data)
		if err != nil || w != v.w || h != v.h {
			t.Fatalf("%s: %dx%d, %v", v.name, w, h, err)
		}
		if !bytes.Equal(got, v.pix) {
			t.Fatalf("%s: full decode differs from Pillow's", v.name)
		}
		for range 60 {
			box := randomBox(r, w, h)
			dst := make([]byte, box.Dx()*box.Dy()*3)
			if err := Decode(dst, v.data, &Job{Box: box}); err != nil {
				t.Fatalf("%s %v: %v", v.name, box, err)
			}
			if !bytes.Equal(dst, crop(v.pix, w, box)) {
				t.Fatalf("%s: region %v differs from decode-then-crop", v.name, box)
			}
			crops++
		}
	}
	t.Logf("%d crops", crops)
}

// TestSmoothedProgressive checks files whose last scans are missing: libjpeg blurs block edges there, looking further
// than the region's margin.
func TestSmoothedProgressive(t *testing.T) {
	const w, h = 333, 251
	data := encode(t, photo(t, 3, w, h), w, h, Encoding{Quality: 90, Subsampling: Sub420, Progressive: true})
	scans := bytes.Split(data, []byte{0xff, 0xda})
	if len(scans) < 6 {
		t.Fatalf("%d scans, want a progressive file", len(scans)-1)
	}
	r := rand.New(rand.NewPCG(5, 6))
	for keep := 2; keep < len(scans); keep++ {
		cut := append(bytes.Join(scans[:keep], []byte{0xff, 0xda}), 0xff, 0xd9)
		_, pix := ask(t, "load", oracle.Q{"key": "smooth", "pixels": true}, cut)
		for range 40 {
			box := randomBox(r, w, h)
			dst := make([]byte, box.Dx()*box.Dy()*3)
			if err := Decode(dst, cut, &Job{Box: box}); err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(dst, crop(pix, w, box)) {
				t.Fatalf("%d scans kept: region %v differs", keep-1, box)
			}
		}
	}
}

// TestResampleIsPillow compares crop + resize + window + flip with Pillow's, byte for byte, with each set of loops.
func TestResampleIsPillow(t *testing.T) {
	defer setSIMD(vnni)
	r := rand.New(rand.NewPCG(3, 4))
	var files []variant
	for i, e := range []Encoding{
		{Quality: 90, Subsampling: Sub444}, {Quality: 85, Subsampling: Sub420},
		{Quality: 75, Subsampling: Sub422, Progressive: true},
	} {
		size := []image.Point{{500, 375}, {375, 500}, {641, 333}}[i]
		v := variant{name: fmt.Sprint("resample", i), w: size.X, h: size.Y}
		v.data = encode(t, photo(t, 10+i, v.w, v.h), v.w, v.h, e)
		ask(t, "load", oracle.Q{"key": v.name}, v.data)
		files = append(files, v)
	}
	check := func(v variant, j Job) {
		t.Helper()
		win := j.Window
		if win.Empty() {
			win = image.Rectangle{Max: j.Size}
		}
		_, want := ask(t, "resample", oracle.Q{
			"key": v.name, "box": []int{j.Box.Min.X, j.Box.Min.Y, j.Box.Max.X, j.Box.Max.Y},
			"size": []int{j.Size.X, j.Size.Y}, "window": []int{win.Min.X, win.Min.Y, win.Max.X, win.Max.Y},
			"flip": j.Flip, "turn": j.Turn, "filter": j.Filter.String(),
		}, nil)
		dst := make([]byte, win.Dx()*win.Dy()*3)
		for simd := range haveSIMD + 1 {
			if setSIMD(simd) != simd {
				t.Fatal("the loops cannot be chosen")
			}
			clear(dst)
			if err := Decode(dst, v.data, &j); err != nil {
				t.Fatalf("%s %+v: %v", v.name, j, err)
			}
			if !bytes.Equal(dst, want) {
				t.Fatalf("%s: box %v to %v window %v %s flip %v turn %v loops %v differs from Pillow",
					v.name, j.Box, j.Size, j.Window, j.Filter, j.Flip, j.Turn, simd)
			}
		}
	}
	for i := range 600 {
		v := files[i%len(files)]
		j := Job{Box: randomBox(r, v.w, v.h), Size: image.Pt(224, 224), Filter: Filter(i / 3 % 3), Flip: r.IntN(2) == 1,
			Turn: r.IntN(3) == 1}
		switch r.IntN(5) {
		case 0:
			j.Size = image.Pt(1+r.IntN(400), 1+r.IntN(400))
		case 1: // only one axis is resized
			j.Size = image.Pt(j.Box.Dx(), 1+r.IntN(300))
		case 2:
			j.Size = image.Pt(1+r.IntN(300), j.Box.Dy())
		}
		if r.IntN(3) == 0 { // a window, sometimes overhanging
			x, y := r.IntN(j.Size.X+40)-20, r.IntN(j.Size.Y+40)-20
			j.Window = image.Rect(x, y, x+1+r.IntN(j.Size.X+20), y+1+r.IntN(j.Size.Y+20))
		}
		check(v, j)
	}
	for _, v := range files {
		all := image.Rect(0, 0, v.w, v.h)
		for _, s := range []image.Point{{224, 224}, {1, 1}, {v.w, v.h}, {3 * v.w, 2 * v.h}, {v.w, 1}, {1, v.h},
			{v.w - 1, v.h + 1}} {
			for f := Bilinear; f <= Nearest; f++ {
				check(v, Job{Box: all, Size: s, Filter: f})
				check(v, Job{Box: all, Size: s, Filter: f, Flip: true})
			}
		}
	}
}

// TestDCT compares decoding at a fraction of the size with Pillow's draft, and a resize of a box between pixels.
func TestDCT(t *testing.T) {
	r := rand.New(rand.NewPCG(11, 12))
	for i, e := range []Encoding{
		{Quality: 90, Subsampling: Sub444}, {Quality: 85, Subsampling: Sub420},
		{Quality: 75, Subsampling: Sub422, Progressive: true},
		{Quality: 90, Subsampling: Sub440}, {Quality: 90, Subsampling: Sub411}, {Quality: 80, Components: 1},
	} {
		w, h := 1001-i*7, 803+i*5
		pix := photo(t, 20+i, w, h)
		if e.Components == 1 {
			pix = pix[:w*h]
		}
		data := encode(t, pix, w, h, e)
		fractions := map[int]int{}
		for k := range 40 {
			box := randomBox(r, w, h)
			if k%4 == 0 {
				box = image.Rect(0, 0, w, h)
			}
			size := image.Pt(1+r.IntN(200), 1+r.IntN(200))
			denom := 1
			for denom < 8 && box.Dx() >= 2*denom*size.X && box.Dy() >= 2*denom*size.Y {
				denom *= 2
			}
			if denom == 1 {
				continue
			}
			fractions[denom]++
			a, want := ask(t, "draft",
				oracle.Q{"denom": denom, "box": []int{box.Min.X, box.Min.Y, box.Max.X, box.Max.Y},
					"size": []int{size.X, size.Y}}, data)
			if a["w"] != float64((w+denom-1)/denom) {
				t.Fatalf("Pillow drafts %v, want 1/%d of %d", a["w"], denom, w)
			}
			dst := make([]byte, size.X*size.Y*3)
			if err := Decode(dst, data, &Job{Box: box, Size: size, DCT: true}); err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(dst, want) {
				t.Errorf("%+v: box %v to %v at 1/%d differs from Pillow's", e, box, size, denom)
			}
		}
		if len(fractions) < 3 {
			t.Errorf("%+v: fractions tried: %v", e, fractions)
		}
	}
	// What is padded to the size that the file had comes in planes as it does in pixels.
	const w, h = 64, 48
	data := encode(t, photo(t, 1, w, h), w, h, Encoding{Quality: 90, Subsampling: Sub444})
	j := Job{Size: image.Pt(w/2, h/2), Window: image.Rect(0, 0, w, h), DCT: true}
	pixels, planes := make([]byte, w*h*3), bytes.Repeat([]byte{0xa5}, w*h*3)
	err := Decode(pixels, data, &j)
	j.Planar = true
	if err = errors.Join(err, Decode(planes, data, &j)); err != nil {
		t.Fatal(err)
	}
	for i, v := range pixels {
		if planes[i%3*w*h+i/3] != v {
			t.Fatalf("value %d of the padded picture: %d in pixels, %d in planes", i, v, planes[i%3*w*h+i/3])
		}
	}
}

// TestLoopsAgree compares the vector loops with the plain ones, which the tests above compare with Pillow: any size,
// crop and window, few and many taps, extreme pixels. Run it with -asan, too.
func TestLoopsAgree(t *testing.T) {
	defer setSIMD(vnni)
	r := rand.New(rand.NewPCG(5, 6))
	side := func() int { return 1 + r.IntN([]int{4, 40, 150, 600}[r.IntN(4)]) }
	for i := range 3000 {
		w, h := side(), side()
		pix := make([]byte, w*h*3)
		for k := range pix {
			pix[k] = byte(r.Uint32())
			if i%4 == 0 { // the largest sums
				pix[k] = byte(int8(pix[k]) >> 7)
			}
		}
		j := Job{
			Box: randomBox(r, w, h), Size: image.Pt(side(), side()), Filter: Filter(i % 3),
			VerticalFirst: r.IntN(2) == 1,
			Flip:          r.IntN(2) == 1, Turn: r.IntN(4) == 0, Planar: r.IntN(2) == 1,
		}
		switch r.IntN(6) {
		case 0: // only one axis is resized
			j.Size.X = j.Box.Dx()
		case 1:
			j.Size.Y = j.Box.Dy()
		}
		j.Window = image.Rectangle{Max: j.Size}
		if r.IntN(2) == 0 { // a window, sometimes overhanging
			at := image.Pt(r.IntN(j.Size.X+40)-20, r.IntN(j.Size.Y+40)-20)
			j.Window = image.Rectangle{Min: at, Max: at.Add(image.Pt(side(), side()))}
		}
		n := j.Window.Dx() * j.Window.Dy() * 3
		want := make([]byte, n, n+64)
		planes := slices.Concat(planesOf(pix), make([]byte, PlanesSlack))
		for k := range 2 * (haveSIMD + 1) {
			src := pix
			if j.FromPlanes = k%2 == 1; j.FromPlanes {
				src = planes
			}
			setSIMD(k / 2)
			got := bytes.Repeat([]byte{0xa5}, n+64)
			if err := Resample(got[:n:n], src, image.Pt(w, h), &j); err != nil {
				t.Fatal(err)
			}
			if k == 0 {
				copy(want, got)
			}
			if !bytes.Equal(got[:n], want) || !bytes.Equal(got[n:], bytes.Repeat([]byte{0xa5}, 64)) {
				t.Fatalf("%dx%d %+v: loops %d differ from the plain ones, or write beyond the end", w, h, j, k/2)
			}
		}
	}
}

// planesOf takes packed pixels apart.
func planesOf(pix []byte) []byte {
	out := make([]byte, 0, len(pix))
	for c := range 3 {
		for i := c; i < len(pix); i += 3 {
			out = append(out, pix[i])
		}
	}
	return out
}

// TestPlanes: a part that is decoded to planes is the part of the picture, and nothing is written behind it.
func TestPlanes(t *testing.T) {
	defer setSIMD(vnni)
	const w, h = 131, 97
	data := encode(t, photo(t, 1, w, h), w, h, Encoding{Quality: 90, Subsampling: Sub420})
	tables, err := TrainTables(slices.Values([][]byte{data}))
	if err != nil {
		t.Fatal(err)
	}
	if err := Register(tables); err != nil {
		t.Fatal(err)
	}
	recoded, err := tables.Recode(nil, data)
	if err != nil {
		t.Fatal(err)
	}
	r := rand.New(rand.NewPCG(3, 4))
	for i := range 200 {
		setSIMD(i % (haveSIMD + 1))
		src := data
		if i%5 == 0 {
			src = recoded
		}
		box := randomBox(r, w, h)
		n := box.Dx() * box.Dy() * 3
		packed, got := make([]byte, n), bytes.Repeat([]byte{0xa5}, n+PlanesSlack)
		if err := errors.Join(Decode(packed, src, &Job{Box: box}),
			Decode(got[:n:n], src, &Job{Box: box, Planar: true})); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got[:n], planesOf(packed)) || !bytes.Equal(got[n:], bytes.Repeat([]byte{0xa5}, PlanesSlack)) {
			t.Fatalf("%v of a file of %d bytes: other planes, or bytes behind them", box, len(src))
		}
	}
}

// TestStore checks layouts and tables against their plain definition.
func TestStore(t *testing.T) {
	defer setSIMD(vnni)
	const w, h = 131, 97
	data := encode(t, photo(t, 1, w, h), w, h, Encoding{Quality: 90, Subsampling: Sub420})
	base := Job{Box: image.Rect(3, 5, 120, 90), Size: image.Pt(77, 50), Window: image.Rect(-3, -2, 70, 61), Flip: true}
	ow, oh := base.Window.Dx(), base.Window.Dy()
	plain := make([]byte, ow*oh*3)
	if err := Decode(plain, data, &base); err != nil {
		t.Fatal(err)
	}
	for _, elem := range []int{1, 2, 4} {
		table := make([]byte, 3*256*elem)
		r := rand.New(rand.NewPCG(uint64(elem), 9))
		for i := range table {
			table[i] = byte(r.Uint32())
		}
		for _, tab := range [][]byte{table, nil} {
			if tab == nil && elem > 1 {
				continue
			}
			for _, planar := range []bool{false, true} {
				for simd := range haveSIMD + 1 {
					setSIMD(simd)
					j := base
					j.Planar, j.Elem, j.Table = planar, elem, tab
					got := make([]byte, ow*oh*3*elem)
					if err := Decode(got, data, &j); err != nil {
						t.Fatal(err)
					}
					want := make([]byte, 0, len(got))
					put := func(i, c int) {
						v := plain[3*i+c]
						if tab == nil {
							want = append(want, v)
						} else {
							at := (c*256 + int(v)) * elem
							want = append(want, tab[at:at+elem]...)
						}
					}
					if planar {
						for c := range 3 {
							for i := range ow * oh {
								put(i, c)
							}
						}
					} else {
						for i := range ow * oh {
							for c := range 3 {
								put(i, c)
							}
						}
					}
					if !bytes.Equal(got, want) {
						t.Errorf("elem %d table %v planar %v loops %v differs", elem, tab != nil, planar, simd)
					}
				}
			}
		}
	}
}

// TestResample checks that the path for other formats gives what the JPEG path gives.
func TestResample(t *testing.T) {
	const w, h = 333, 251
	data := encode(t, photo(t, 2, w, h), w, h, Encoding{Quality: 90, Subsampling: Sub444})
	pix, _, _, err := DecodeRGB(data)
	if err != nil {
		t.Fatal(err)
	}
	r := rand.New(rand.NewPCG(7, 8))
	for range 50 {
		j := Job{Box: randomBox(r, w, h), Size: image.Pt(1+r.IntN(300), 1+r.IntN(300)), Flip: r.IntN(2) == 0}
		a, b := make([]byte, j.Size.X*j.Size.Y*3), make([]byte, j.Size.X*j.Size.Y*3)
		if err := Decode(a, data, &j); err != nil {
			t.Fatal(err)
		}
		if err := Resample(b, pix, image.Pt(w, h), &j); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(a, b) {
			t.Fatalf("%+v differs", j)
		}
	}
}

// TestDamage compares what is refused with what Pillow refuses, and checks the kind of the error.
func TestDamage(t *testing.T) {
	const w, h = 200, 150
	pix := photo(t, 4, w, h)
	good := encode(t, pix, w, h, Encoding{Quality: 90, Subsampling: Sub420})
	prog := encode(t, pix, w, h, Encoding{Quality: 90, Subsampling: Sub420, Progressive: true})
	_, thumb := ask(t, "save", oracle.Q{"w": w, "h": h, "format": "JPEG"}, pix)
	edit := func(b []byte, f func([]byte)) []byte { b = bytes.Clone(b); f(b); return b }
	sof := func(b []byte, marker byte) int { return bytes.Index(b, []byte{0xff, marker}) }
	// The APP1 segment carries a whole JPEG: its end marker is not the picture's.
	withThumb := append([]byte{0xff, 0xd8, 0xff, 0xe1, byte((len(thumb) + 2) >> 8), byte(len(thumb) + 2)},
		append(bytes.Clone(thumb), good[2:]...)...)
	for _, c := range []struct {
		name string
		data []byte
		want error // nil: decodes
	}{
		{"whole", good, nil},
		{"progressive", prog, nil},
		{"empty", nil, ErrTruncated},
		{"start marker only", good[:2], ErrTruncated},
		{"three bytes", good[:3], ErrTruncated},
		{"header only", good[:200], ErrTruncated},
		{"half", good[:len(good)/2], ErrTruncated},
		{"half of a progressive file", prog[:len(prog)/2], ErrTruncated},
		{"last byte missing", good[:len(good)-1], ErrTruncated},
		{"end marker missing", good[:len(good)-2], ErrTruncated},
		{"half, after a whole thumbnail", withThumb[:len(withThumb)-len(good)/2], ErrTruncated},
		{"thumbnail", withThumb, nil},
		{"bytes behind the end", append(bytes.Clone(good), bytes.Repeat([]byte("tail"), 5000)...), nil},
		{"half with an end marker", append(bytes.Clone(good[:len(good)/2]), 0xff, 0xd9), nil},
		{"a flipped byte", edit(good, func(b []byte) { b[len(b)/2] ^= 0x55 }), nil},
		{"a frame header in the scan", edit(good, func(b []byte) { copy(b[len(b)/2:], "\xff\xc0") }), ErrCorrupt},
		{"a frame header near the end", edit(good, func(b []byte) { copy(b[len(b)-40:], "\xff\xc0") }), ErrCorrupt},
		{"garbage", []byte("this is not a picture, whatever its name says"), ErrCorrupt},
		{"a PNG", []byte("\x89PNG\r\n\x1a\n0000000000"), ErrCorrupt},
		{"no Huffman tables", edit(good, func(b []byte) { copy(b[sof(b, 0xc4):], "\xff\xe5") }), nil},
		{"no quantisation tables", edit(good, func(b []byte) {
			for i := sof(b, 0xdb); i >= 0; i = sof(b, 0xdb) {
				copy(b[i:], "\xff\xe5")
			}
		}), ErrCorrupt},
		{"12 bits", edit(good, func(b []byte) { b[sof(b, 0xc0)+4] = 12 }), ErrUnsupported},
		{"lossless", edit(good, func(b []byte) { b[sof(b, 0xc0)+1] = 0xc3 }), ErrUnsupported},
		{"zero height", edit(good, func(b []byte) { b[sof(b, 0xc0)+5], b[sof(b, 0xc0)+6] = 0, 0 }), ErrCorrupt},
		{"two components", edit(good, func(b []byte) { b[sof(b, 0xc0)+9] = 2 }), ErrUnsupported},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, want, pil := oracle.Ask("load", oracle.Q{"key": "damage", "pixels": true}, c.data)
			got, _, _, err := DecodeRGB(c.data)
			if !errors.Is(err, c.want) {
				t.Errorf("%v, want %v", err, c.want)
			}
			if (err == nil) != (pil == nil) {
				t.Errorf("we say %v, Pillow says %v", err, pil)
			}
			if err == nil && !bytes.Equal(got, want) {
				t.Errorf("pixels differ from Pillow's")
			}
			// A crop must not hide what the whole shows.
			tiny := make([]byte, 3)
			if errTiny := Decode(tiny, c.data, &Job{Box: image.Rect(0, 0, 1, 1)}); (errTiny == nil) != (err == nil) {
				t.Errorf("the first pixel alone gives %v, the whole %v", errTiny, err)
			}
		})
	}
}

// TestNoTablesFromThePredecessor: a file without tables must not decode with those of the file before it.
func TestNoTablesFromThePredecessor(t *testing.T) {
	const w, h = 64, 64
	good := encode(t, photo(t, 1, w, h), w, h, Encoding{Quality: 50, Subsampling: Sub444})
	bare := bytes.ReplaceAll(good, []byte{0xff, 0xdb}, []byte{0xff, 0xe5})
	for range 3 {
		if _, _, _, err := DecodeRGB(good); err != nil {
			t.Fatal(err)
		}
		if _, _, _, err := DecodeRGB(bare); !errors.Is(err, ErrCorrupt) {
			t.Fatalf("decoded without quantisation tables: %v", err)
		}
	}
}

func TestLimits(t *testing.T) {
	const w, h = 64, 48
	good := encode(t, photo(t, 1, w, h), w, h, Encoding{Quality: 50, Subsampling: Sub444})
	for size, ok := range map[image.Point]bool{{1 << 16, MaxPixels >> 16}: true,
		{1 << 16, MaxPixels>>16 + 1}: false, {1<<16 + 1, 1}: false} {
		if err := CheckSize(size); (err == nil) != ok || !ok && !errors.Is(err, ErrTooLarge) {
			t.Errorf("%v: %v", size, err)
		}
	}
	huge := bytes.Clone(good)
	at := bytes.Index(huge, []byte{0xff, 0xc0})
	binary.BigEndian.PutUint16(huge[at+5:], 65500)
	binary.BigEndian.PutUint16(huge[at+7:], 65500)
	if _, _, _, err := DecodeRGB(huge); !errors.Is(err, ErrTooLarge) {
		t.Errorf("65500 x 65500: %v", err)
	}
	// Scans without end: each would cost a pass over the picture.
	prog := encode(t, photo(t, 1, w, h), w, h, Encoding{Quality: 50, Subsampling: Sub444, Progressive: true})
	parts := bytes.Split(prog[:len(prog)-2], []byte{0xff, 0xda})
	bomb := bytes.Clone(prog[:len(prog)-2])
	for range 600 {
		bomb = append(append(bomb, 0xff, 0xda), parts[1]...)
	}
	bomb = append(bomb, 0xff, 0xd9)
	if _, _, _, err := DecodeRGB(bomb); !errors.Is(err, ErrTooLarge) {
		t.Errorf("600 scans: %v", err)
	}
}

func TestBadJobs(t *testing.T) {
	const w, h = 64, 48
	good := encode(t, photo(t, 1, w, h), w, h, Encoding{Quality: 50, Subsampling: Sub444})
	dst := make([]byte, w*h*3)
	for name, j := range map[string]Job{
		"box outside":     {Box: image.Rect(0, 0, w+1, h)},
		"negative box":    {Box: image.Rect(-1, 0, w, h)},
		"size negative":   {Size: image.Pt(-1, 5)},
		"size huge":       {Size: image.Pt(1<<20, 5)},
		"window too big":  {Window: image.Rect(0, 0, 1<<17, 1)},
		"elem 3":          {Elem: 3, Table: make([]byte, 3*256*3)},
		"elem, no table":  {Elem: 2},
		"table too short": {Elem: 2, Table: make([]byte, 3*256)},
		"dst too short":   {Size: image.Pt(w+1, h)},
	} {
		if err := Decode(dst, good, &j); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
	if err := Resample(dst, make([]byte, 5), image.Pt(w, h), &Job{}); err == nil {
		t.Error("short RGB: no error")
	}
}

// TestSize compares the header parser with Pillow on real files and on headers cut at every byte.
func TestSize(t *testing.T) {
	for _, v := range variants(t) {
		w, h, err := Size(v.data)
		if err != nil || w != v.w || h != v.h {
			t.Errorf("%s: %dx%d, %v", v.name, w, h, err)
		}
	}
	good := encode(t, photo(t, 0, 40, 30), 40, 30, Encoding{Quality: 50, Subsampling: Sub420})
	for n := range 200 {
		if _, _, err := Size(good[:n]); err != nil && !errors.Is(err, ErrTruncated) && n > 0 {
			t.Errorf("%d bytes: %v", n, err)
		}
	}
}

// TestDecodeAllocatesNothing keeps the per-sample path free of Go garbage.
func TestDecodeAllocatesNothing(t *testing.T) {
	const w, h = 200, 150
	data := encode(t, photo(t, 4, w, h), w, h, Encoding{Quality: 90, Subsampling: Sub420})
	dst := make([]byte, 64*64*3)
	j := &Job{Box: image.Rect(10, 10, 150, 120), Size: image.Pt(64, 64), Flip: true}
	if n := testing.AllocsPerRun(50, func() {
		if err := Decode(dst, data, j); err != nil {
			t.Fatal(err)
		}
	}); n > 0 {
		t.Errorf("%v allocations a call", n)
	}
}

func TestConcurrent(t *testing.T) {
	const w, h = 200, 150
	data := encode(t, photo(t, 4, w, h), w, h, Encoding{Quality: 90, Subsampling: Sub420})
	j := &Job{Box: image.Rect(10, 10, 150, 120), Size: image.Pt(64, 64)}
	want := make([]byte, 64*64*3)
	if err := Decode(want, data, j); err != nil {
		t.Fatal(err)
	}
	errs := make(chan error)
	for range 8 {
		go func() {
			dst := make([]byte, len(want))
			for range 50 {
				if err := Decode(dst, data, j); err != nil {
					errs <- err
					return
				}
				if !bytes.Equal(dst, want) {
					errs <- errors.New("a concurrent decode differs")
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

func TestEncodeErrors(t *testing.T) {
	for _, c := range []struct {
		n, w, h, q int
		sub        Subsampling
	}{{12, 2, 2, 0, 444}, {12, 2, 2, 101, 444}, {12, 2, 2, 90, 333}, {11, 2, 2, 90, 444}, {0, 0, 0, 90, 444}} {
		if _, err := Encode(nil, make([]byte, c.n), c.w, c.h, c.q, c.sub); err == nil {
			t.Errorf("%+v: no error", c)
		}
	}
	b, err := Encode([]byte("kept"), make([]byte, 12), 2, 2, 90, Sub444)
	if err != nil || !bytes.HasPrefix(b, []byte("kept\xff\xd8\xff")) {
		t.Errorf("Encode does not append: %q, %v", b[:min(len(b), 8)], err)
	}
}
