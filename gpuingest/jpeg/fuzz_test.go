package jpeg

import (
	"bytes"
	"image"
	"testing"
)

// seeds are small files that reach most of the decoder, made without the oracle so that fuzzing needs no Python.
func seeds(f *testing.F) [][]byte {
	f.Helper()
	const w, h = 40, 35
	var out [][]byte
	for _, e := range []Encoding{
		{Quality: 50, Subsampling: Sub444},
		{Quality: 50, Subsampling: Sub420, RestartRows: 1},
		{Quality: 50, Subsampling: Sub422, Progressive: true},
		{Quality: 50, Components: 1},
		{Quality: 50, Components: 4, YCCK: true, Subsampling: Sub420},
	} {
		pix := make([]byte, w*h*max(e.Components, 1)*3)
		if e.Components == 0 {
			e.Components = 3
		}
		pix = pix[:w*h*e.Components]
		for i := range pix {
			pix[i] = byte(i * i >> 5)
		}
		b, err := EncodeWith(nil, pix, w, h, e)
		if err != nil {
			f.Fatal(err)
		}
		out = append(out, b)
	}
	return out
}

// FuzzSize checks the header parser: no panic, and a size only where Decode's own reading of the header agrees.
func FuzzSize(f *testing.F) {
	for _, s := range seeds(f) {
		f.Add(s)
		f.Add(s[:len(s)/2])
	}
	f.Add([]byte("\xff\xd8\xff\xff\xff\x01\x00\xff\xc0\x00\x0b\x08\x00\x01\x00\x01\x01\x01\x11\x00"))
	f.Fuzz(func(t *testing.T, b []byte) {
		w, h, err := Size(b)
		if err != nil {
			if w != 0 || h != 0 {
				t.Errorf("%dx%d beside the error %v", w, h, err)
			}
			return
		}
		if w < 1 || h < 1 || w > 65535 || h > 65535 {
			t.Errorf("size %dx%d", w, h)
		}
	})
}

// FuzzDecode looks for crashes of the C side; run it with -asan too. Where the whole decodes, a region of it must
// decode to the same pixels.
func FuzzDecode(f *testing.F) {
	for i, s := range seeds(f) {
		f.Add(s, uint8(3*i), uint8(5*i), uint8(9), uint8(17), uint8(13), i%2 == 0)
	}
	f.Fuzz(func(t *testing.T, b []byte, x, y, w, h, out uint8, flip bool) {
		pw, ph, err := Size(b)
		if err != nil || pw*ph > 1<<16 {
			return
		}
		pix, _, _, errAll := DecodeRGB(b)
		box := image.Rect(int(x), int(y), int(x)+int(w), int(y)+int(h)).Intersect(image.Rect(0, 0, pw, ph))
		if box.Empty() {
			return
		}
		part := make([]byte, box.Dx()*box.Dy()*3)
		err = Decode(part, b, &Job{Box: box})
		if (err == nil) != (errAll == nil) {
			t.Errorf("the whole gives %v, the region %v", errAll, err)
		}
		if err == nil && errAll == nil && !bytes.Equal(part, crop(pix, pw, box)) {
			t.Errorf("region %v of %dx%d differs", box, pw, ph)
		}
		side := int(out) + 1
		small := make([]byte, side*side*3)
		_ = Decode(small, b, &Job{Box: box, Size: image.Pt(side, side), Flip: flip, Planar: true})
	})
}

// FuzzDecodeRecoded looks for crashes of the way from recoded files to pixels; run it with -asan too.
func FuzzDecodeRecoded(f *testing.F) {
	files := seeds(f)
	for i, rec := range recodeAll(f, files) {
		if rec != nil {
			f.Add(rec, uint8(3*i), uint8(5*i), uint8(9), uint8(17), uint8(13), uint8(i))
		}
	}
	f.Fuzz(func(t *testing.T, b []byte, x, y, w, h, out, how uint8) {
		if !IsRecoded(b) {
			return
		}
		pw, ph, err := Size(b)
		if err != nil || pw*ph > 1<<16 {
			return
		}
		defer setSIMD(vnni)
		setSIMD(int(how) % 3)
		box := image.Rect(int(x), int(y), int(x)+int(w), int(y)+int(h)).Intersect(image.Rect(0, 0, pw, ph))
		if box.Empty() {
			return
		}
		side := int(out) + 1
		_ = Decode(make([]byte, side*side*3), b,
			&Job{Box: box, Size: image.Pt(side, side), DCT: how&4 != 0, Planar: true})
		part := make([]byte, box.Dx()*box.Dy()*3)
		if Decode(part, b, &Job{Box: box}) != nil {
			return
		}
		if pix, _, _, err := DecodeRGB(b); err == nil && !bytes.Equal(part, crop(pix, pw, box)) {
			t.Errorf("region %v of %dx%d differs", box, pw, ph)
		}
	})
}
