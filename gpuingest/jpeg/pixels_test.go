package jpeg

import (
	"bytes"
	"image"
	"math/rand/v2"
	"testing"
)

// TestPixelsFromCoefficients compares the pixels made from coefficients with those made from the file: all
// subsamplings, progressive, odd sizes, grey and CMYK, at full and at reduced size, random boxes.
func TestPixelsFromCoefficients(t *testing.T) {
	defer setSIMD(vnni)
	r := rand.New(rand.NewPCG(21, 22))
	n := 0
	for _, v := range variants(t) {
		k, err := readCoefs(v.data)
		if err != nil {
			t.Fatal(v.name, err)
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
				if err := k.decode(got, &j); err != nil {
					t.Fatal(v.name, err)
				}
				if !bytes.Equal(want, got) {
					t.Fatalf("%s: %+v differs with loops %d", v.name, j, simd)
				}
				n++
			}
		}
		k.close()
	}
	t.Log(n, "boxes")
}
