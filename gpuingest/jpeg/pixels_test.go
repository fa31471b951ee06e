package jpeg

import (
	"bytes"
	"cmp"
	"errors"
	"image"
	"math/rand/v2"
	"strings"
	"testing"
)

// flatRecoded returns the recoded form of a file by tables that fit none in particular; nil where a file is kept.
func flatRecoded(t *testing.T) func(file []byte) []byte {
	t.Helper()
	tab, err := flatTables()
	if err != nil || Register(tab) != nil || !works() {
		t.Fatal("the ways from coefficients do not work here", err)
	}
	return func(file []byte) []byte {
		rec, err := tab.recode(nil, file)
		if err != nil && !errors.Is(err, ErrKeep) {
			t.Fatal(err)
		}
		return rec
	}
}

// TestPixelsFromCoefficients compares the pixels made from coefficients with those made from the file: all
// subsamplings, progressive, odd sizes and grey, at full and at reduced size, random boxes. CMYK is not recoded.
func TestPixelsFromCoefficients(t *testing.T) {
	defer setSIMD(vnni)
	recoded := flatRecoded(t)
	r := rand.New(rand.NewPCG(21, 22))
	n := 0
	for _, v := range variants(t) {
		rec := recoded(v.data)
		if rec == nil {
			continue
		}
		for i := range 60 {
			j := Job{Box: randomBox(r, v.w, v.h), Flip: i%2 == 1, DCT: i%3 == 0}
			if i == 0 {
				j.Box = image.Rect(0, 0, v.w, v.h)
			}
			j.Size = j.Box.Size()
			if i%3 == 0 {
				j.Size = image.Pt(1+r.IntN(j.Size.X), 1+r.IntN(j.Size.Y))
			}
			want, got := make([]byte, j.Size.X*j.Size.Y*3), make([]byte, j.Size.X*j.Size.Y*3)
			if err := Decode(want, v.data, &j); err != nil {
				t.Fatal(v.name, err)
			}
			for simd := range haveSIMD + 1 {
				setSIMD(simd)
				clear(got)
				if err := Decode(got, rec, &j); err != nil {
					t.Fatal(v.name, err)
				}
				if !bytes.Equal(want, got) {
					t.Fatalf("%s: %+v differs with loops %d", v.name, j, simd)
				}
				n++
			}
		}
	}
	t.Log(n, "boxes")
}

// TestPixelsBeyondRange does the same with coefficients that no encoder makes: times their quantisers they overflow
// what libjpeg-turbo's vector code computes in. A block may be full, sparse, or have nothing but a DC.
func TestPixelsBeyondRange(t *testing.T) {
	defer setSIMD(vnni)
	const w, h = 200, 96
	recoded := flatRecoded(t)
	r := rand.New(rand.NewPCG(27, 28))
	for i := range 120 {
		pix := make([]byte, w*h*3)
		for p := range w * h {
			x, y, v := p%w, p/w, r.Uint32()
			switch x * 5 / w {
			case 0: // steps between blocks
				v = uint32(x/16*7+y/16*5) % 4 * 0x555555
			case 1: // low frequencies
				v = uint32(x*y/64*3) % 256 * 0x10101
			case 2: // one direction
				v = uint32(x&1) * 0xffffff
			case 3:
				v = uint32(int32(v<<31)>>31) & 0xffffff
			}
			pix[3*p], pix[3*p+1], pix[3*p+2] = byte(v), byte(v>>8), byte(v>>16)
		}
		data := encode(t, pix, w, h, Encoding{Quality: 100, Subsampling: []Subsampling{Sub420, Sub422, Sub444}[i%3]})
		for at := range data[:len(data)-69] {
			if bytes.HasPrefix(data[at:], []byte{0xff, 0xdb, 0, 67}) {
				for k := range 64 {
					data[at+5+k] = byte(1 + r.IntN([]int{8, 64, 255}[i/3%3]))
				}
			}
		}
		want := make([]byte, len(pix))
		if err := Decode(want, data, &Job{}); err != nil {
			t.Fatal(err)
		}
		rec := recoded(data)
		for simd := range haveSIMD + 1 {
			setSIMD(simd)
			got := make([]byte, len(pix))
			if err := Decode(got, rec, &Job{}); err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(want, got) {
				t.Errorf("picture %d differs with loops %d", i, simd)
			}
		}
	}
}

// recodeAll trains tables from the files, registers them and returns the recoded forms; nil where a file is kept.
func recodeAll(t testing.TB, files [][]byte) [][]byte {
	t.Helper()
	tab := train(t, files...)
	if err := Register(tab); err != nil {
		t.Fatal(err)
	}
	out := make([][]byte, len(files))
	for i, f := range files {
		if rec, err := tab.recode(nil, f); err == nil {
			out[i] = rec
		}
	}
	return out
}

// TestPixelsFromRecoded does the same with recoded files, for transforms of all kinds.
func TestPixelsFromRecoded(t *testing.T) {
	defer setSIMD(vnni)
	r := rand.New(rand.NewPCG(23, 24))
	var files [][]byte
	vs := variants(t)
	for _, v := range vs {
		files = append(files, v.data)
	}
	if !works() {
		t.Fatal("the ways from coefficients do not work here")
	}
	boxes, kept := 0, 0
	for i, rec := range recodeAll(t, files) {
		if rec == nil {
			kept++
			continue
		}
		v := vs[i]
		for range 60 {
			j := Job{
				Box: randomBox(r, v.w, v.h), Flip: r.IntN(2) == 1, Turn: r.IntN(4) == 0, DCT: r.IntN(2) == 1,
				Planar: r.IntN(2) == 1,
				Filter: Filter(r.IntN(3)), VerticalFirst: r.IntN(2) == 1,
			}
			j.Size = j.Box.Size()
			switch r.IntN(3) {
			case 0:
				j.Size = image.Pt(1+r.IntN(j.Size.X), 1+r.IntN(j.Size.Y))
			case 1:
				j.Size = image.Pt(1+r.IntN(224), 1+r.IntN(224))
			}
			j.Window = image.Rectangle{Max: j.Size}
			if r.IntN(3) == 0 { // sometimes overhanging
				x, y := r.IntN(j.Size.X+40)-20, r.IntN(j.Size.Y+40)-20
				j.Window = image.Rect(x, y, x+1+r.IntN(j.Size.X+20), y+1+r.IntN(j.Size.Y+20))
			}
			j.Elem = []int{1, 1, 2, 4}[r.IntN(4)]
			if j.Elem > 1 || r.IntN(2) == 0 {
				j.Table = make([]byte, 3*256*j.Elem)
				for i := range j.Table {
					j.Table[i] = byte(r.Uint32())
				}
			}
			n := j.Window.Dx() * j.Window.Dy() * 3 * j.Elem
			want, got := make([]byte, n), bytes.Repeat([]byte{0xa5}, n+64)
			if err := Decode(want, v.data, &j); err != nil {
				t.Fatal(v.name, err)
			}
			setSIMD(r.IntN(haveSIMD + 1))
			if err := Decode(got[:n:n], rec, &j); err != nil {
				t.Fatal(v.name, err)
			}
			setSIMD(vnni)
			if !bytes.Equal(want, got[:n]) || !bytes.Equal(got[n:], bytes.Repeat([]byte{0xa5}, 64)) {
				j.Table = nil
				t.Fatalf("%s: %+v differs", v.name, j)
			}
			boxes++
		}
	}
	t.Log(boxes, "boxes;", kept, "files kept")
}

// TestRecodedWithoutLastScans: libjpeg blurs the edges of blocks of such files, for which the coefficients do not do.
func TestRecodedWithoutLastScans(t *testing.T) {
	const w, h = 333, 251
	data := encode(t, photo(t, 3, w, h), w, h, Encoding{Quality: 90, Subsampling: Sub420, Progressive: true})
	scans := bytes.Split(data, []byte{0xff, 0xda})
	files := [][]byte{data}
	for keep := 2; keep < len(scans); keep++ {
		files = append(files, append(bytes.Join(scans[:keep], []byte{0xff, 0xda}), 0xff, 0xd9))
	}
	kept := 0
	for i, rec := range recodeAll(t, files) {
		if rec == nil {
			kept++
			continue
		}
		want, _, _, err := DecodeRGB(files[i])
		if err != nil {
			t.Fatal(err)
		}
		if got, _, _, err := DecodeRGB(rec); err != nil || !bytes.Equal(want, got) {
			t.Errorf("file %d of %d differs, or %v", i, len(files), err)
		}
	}
	t.Logf("%d of %d kept", kept, len(files))
}

// TestRecodedNeedsTables: a file of other tables is not taken for damaged.
func TestRecodedNeedsTables(t *testing.T) {
	const w, h = 64, 48
	data := encode(t, photo(t, 1, w, h), w, h, Encoding{Quality: 50, Subsampling: Sub444})
	rec := recodeAll(t, [][]byte{data})[0]
	rec[8] ^= 1
	if err := Decode(make([]byte, w*h*3), rec, &Job{}); !errors.Is(err, ErrNoTables) {
		t.Errorf("%v", err)
	}
}

// TestDamagedRecoded: any damage gives pixels or an error, and the tail of the destination stays.
func TestDamagedRecoded(t *testing.T) {
	defer setSIMD(vnni)
	r := rand.New(rand.NewPCG(25, 26))
	var files [][]byte
	for i, e := range []Encoding{{Quality: 80, Subsampling: Sub420}, {Quality: 80, Subsampling: Sub440},
		{Quality: 99, Subsampling: Sub444, Progressive: true}, {Quality: 60, Components: 1}} {
		files = append(files, encode(t, photo(t, i, 131, 97)[:131*97*cmp.Or(e.Components, 3)], 131, 97, e))
	}
	for i, rec := range recodeAll(t, files) {
		failed := 0
		for range 2000 {
			bad := bytes.Clone(rec)
			for range 1 + r.IntN(4) {
				bad[16+r.IntN(len(bad)-16)] ^= byte(1 << r.IntN(8))
			}
			if r.IntN(4) == 0 {
				bad = bad[:28+r.IntN(len(bad)-28)]
			}
			setSIMD(r.IntN(haveSIMD + 1))
			dst := make([]byte, 40*30*3)
			if err := DecodeSized(dst, bad, image.Pt(131, 97),
				&Job{Box: randomBox(r, 131, 97), Size: image.Pt(40, 30), DCT: r.IntN(2) == 1,
					Planar: r.IntN(2) == 1}); err != nil {
				failed++
				if IsRecoded(bad) && strings.Contains(err.Error(), "libjpeg:") {
					t.Fatalf("it is no JPEG that is damaged: %v", err)
				}
			}
		}
		t.Logf("file %d: %d of 2000 refused", i, failed)
	}
}
