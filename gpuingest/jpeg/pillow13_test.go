package jpeg

import (
	"bytes"
	"crypto/sha256"
	_ "embed"
	"encoding/hex"
	"fmt"
	"image"
	"strings"
	"testing"
)

//go:embed testdata/pillow13.txt
var pillow13 string

// picture is a gradient with noise, the same as picture in testdata/pillow13.py.
func picture(w, h int) []byte {
	state := uint32(w*65536 + h)
	out := make([]byte, w*h*3)
	for i := range out {
		state = state*1664525 + 1013904223
		out[i] = byte((i/3%w*255/w + i/(3*w)*255/h + int(state>>26)) / 3)
	}
	return out
}

// TestPillow13 compares resizes by Pillow 13's rule with what Pillow 13 itself made of the same pictures
// (testdata/pillow13.py says how), with each set of loops. The order of the passes matters in many of them.
func TestPillow13(t *testing.T) {
	defer setSIMD(vnni)
	cases, ordered := 0, 0
	var pix []byte
	var size image.Point
	for line := range strings.Lines(pillow13) {
		if strings.HasPrefix(line, "#") {
			continue
		}
		var w, h int
		var box image.Rectangle
		var to image.Point
		var filter, want string
		if _, err := fmt.Sscan(line, &w, &h, &box.Min.X, &box.Min.Y, &box.Max.X, &box.Max.Y, &to.X, &to.Y, &filter,
			&want); err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		if size != image.Pt(w, h) {
			size, pix = image.Pt(w, h), picture(w, h)
		}
		j := Job{Box: box, Size: to, VerticalFirst: true}
		for j.Filter.String() != filter {
			j.Filter++
		}
		dst, usual := make([]byte, to.X*to.Y*3), make([]byte, to.X*to.Y*3)
		for simd := range haveSIMD + 1 {
			setSIMD(simd)
			if err := Resample(dst, pix, size, &j); err != nil {
				t.Fatal(err)
			}
			if sum := sha256.Sum256(dst); hex.EncodeToString(sum[:]) != want {
				t.Errorf("loops %v: %s differs from Pillow 13's", simd, strings.TrimSpace(line))
			}
		}
		j.VerticalFirst = false
		if err := Resample(usual, pix, size, &j); err != nil {
			t.Fatal(err)
		}
		cases++
		if !bytes.Equal(dst, usual) {
			ordered++
		}
	}
	if cases != 432 || ordered < 50 {
		t.Errorf("%d cases, of which the order matters in %d", cases, ordered)
	}
	t.Logf("%d cases, the order of the passes matters in %d", cases, ordered)
}

// TestPillow13Decode checks that the rule does the same to a decoded region, whatever is windowed, flipped and padded.
func TestPillow13Decode(t *testing.T) {
	const w, h = 150, 400
	data := encode(t, photo(t, 7, w, h), w, h, Encoding{Quality: 90, Subsampling: Sub420})
	pix, _, _, err := DecodeRGB(data)
	if err != nil {
		t.Fatal(err)
	}
	for _, window := range []image.Rectangle{{}, image.Rect(5, 6, 30, 40), image.Rect(-7, -3, 60, 51)} {
		j := Job{Box: image.Rect(20, 11, 133, 390), Size: image.Pt(50, 44), Window: window, Filter: Bicubic,
			VerticalFirst: true, Flip: true, Turn: true}
		out := window.Size()
		if window.Empty() {
			out = j.Size
		}
		// The plain meaning: resize the whole, then move pixels one by one.
		whole := make([]byte, j.Size.X*j.Size.Y*3)
		if err := Resample(whole, pix, image.Pt(w, h),
			&Job{Box: j.Box, Size: j.Size, Filter: Bicubic, VerticalFirst: true}); err != nil {
			t.Fatal(err)
		}
		want := make([]byte, out.X*out.Y*3)
		for y := range out.Y {
			for x := range out.X {
				if at := image.Pt(x, y).Add(window.Min); at.In(image.Rectangle{Max: j.Size}) {
					copy(want[((out.Y-1-y)*out.X+out.X-1-x)*3:][:3], whole[(at.Y*j.Size.X+at.X)*3:])
				}
			}
		}
		for _, planar := range []bool{false, true} {
			j.Planar = planar
			got := make([]byte, len(want))
			if err := Decode(got, data, &j); err != nil {
				t.Fatal(err)
			}
			if planar {
				n := out.X * out.Y
				inter := make([]byte, len(got))
				for i := range n {
					inter[3*i], inter[3*i+1], inter[3*i+2] = got[i], got[n+i], got[2*n+i]
				}
				got = inter
			}
			if !bytes.Equal(got, want) {
				t.Errorf("window %v, planar %v differs", window, planar)
			}
		}
	}
}
