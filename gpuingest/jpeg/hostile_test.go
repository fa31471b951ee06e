package jpeg

import (
	"bytes"
	"encoding/binary"
	"errors"
	"image"
	"testing"

	"github.com/shoalfs/shoal/gpuingest/internal/oracle"
)

// flat is a grey JPEG of any size whose blocks are all 128: 6 bits each in the standard tables (a difference of 0, then
// the end of the block), so four of them repeat in three bytes.
func flat(t testing.TB, w, h int) []byte {
	t.Helper()
	blocks := (w + 7) / 8 * ((h + 7) / 8)
	if blocks%4 != 0 {
		t.Fatal("four blocks go into three bytes")
	}
	small := encode(t, bytes.Repeat([]byte{128}, 64), 8, 8, Encoding{Quality: 90, Components: 1})
	frame := bytes.Index(small, []byte{0xff, 0xc0})
	binary.BigEndian.PutUint16(small[frame+5:], uint16(h))
	binary.BigEndian.PutUint16(small[frame+7:], uint16(w))
	scan := bytes.Index(small, []byte{0xff, 0xda})
	scan += 2 + int(binary.BigEndian.Uint16(small[scan+2:]))
	out := append(bytes.Clone(small[:scan]), bytes.Repeat([]byte{0x28, 0xa2, 0x8a}, blocks/4)...)
	return append(out, 0xff, 0xd9)
}

// TestHuge: 20,000 x 20,000 pixels in 4.7 MB are refused as Pillow refuses them; of 13,056 x 13,056, which it takes, a
// crop comes without the whole ever being held.
func TestHuge(t *testing.T) {
	const refusedSide, side = 20000, 13056
	data := flat(t, refusedSide, refusedSide)
	var refused *oracle.Refused
	if _, _, err := oracle.Ask("load", oracle.Q{"key": "huge"}, data); !errors.As(err, &refused) {
		t.Errorf("Pillow says %v", err)
	}
	box := image.Rect(side/2, 1500, side/2+300, 1700)
	dst := make([]byte, 100*100*3)
	if err := Decode(dst, data, &Job{Box: box, Size: image.Pt(100, 100)}); !errors.Is(err, ErrTooLarge) {
		t.Errorf("too large: %v", err)
	}
	if err := Decode(dst, flat(t, side, side), &Job{Box: box, Size: image.Pt(100, 100)}); err != nil {
		t.Errorf("allowed: %v", err)
	}
	if !bytes.Equal(dst, bytes.Repeat([]byte{128}, len(dst))) {
		t.Error("the crop is not grey")
	}
	for s, o := range memory.idle {
		if o.bytes > 4<<20 {
			t.Errorf("object %d holds %d bytes after a crop of 300 x 200", s, o.bytes)
		}
	}
	// What the header promises is not believed either: the data end long before.
	small := flat(t, 64, 64)
	frame := bytes.Index(small, []byte{0xff, 0xc0})
	binary.BigEndian.PutUint16(small[frame+5:], 13000)
	binary.BigEndian.PutUint16(small[frame+7:], 13000)
	if _, _, err := oracle.Ask("load", oracle.Q{"key": "huge"}, small); err != nil {
		t.Logf("Pillow says %v", err)
	}
	if err := Decode(dst, small, &Job{Box: box.Sub(image.Pt(4000, 0)), Size: image.Pt(100, 100)}); err != nil &&
		!errors.Is(err, ErrTruncated) && !errors.Is(err, ErrCorrupt) {
		t.Errorf("13,000 x 13,000 promised, 64 x 64 there: %v", err)
	}
}

// TestMetadataIsIgnored: orientation, colour profiles, comments and unknown segments change nothing, as in Pillow.
func TestMetadataIsIgnored(t *testing.T) {
	const w, h = 97, 61
	plain := encode(t, photo(t, 6, w, h), w, h, Encoding{Quality: 88, Subsampling: Sub420})
	want, _, _, err := DecodeRGB(plain)
	if err != nil {
		t.Fatal(err)
	}
	// turned by 90 degrees
	exif := []byte(
		"Exif\x00\x00II*\x00\x08\x00\x00\x00\x01\x00\x12\x01\x03\x00\x01\x00\x00\x00\x06\x00\x00\x00\x00\x00\x00\x00")
	segment := func(marker byte, body []byte) []byte {
		return append(binary.BigEndian.AppendUint16([]byte{0xff, marker}, uint16(len(body)+2)), body...)
	}
	for name, s := range map[string][]byte{
		"EXIF orientation": segment(0xe1, exif),
		"broken EXIF":      segment(0xe1, exif[:9]),
		"ICC profile":      segment(0xe2, append([]byte("ICC_PROFILE\x00\x01\x01"), bytes.Repeat([]byte{7}, 400)...)),
		"ICC, part 2 of 1": segment(0xe2, []byte("ICC_PROFILE\x00\x02\x01")),
		"comment":          segment(0xfe, []byte("a comment")),
		"unknown segment":  segment(0xe9, bytes.Repeat([]byte{0xff, 0xd9}, 30)),
	} {
		data := append(append(bytes.Clone(plain[:2]), s...), plain[2:]...)
		_, pil := ask(t, "load", oracle.Q{"key": "meta", "pixels": true}, data)
		got, gw, gh, err := DecodeRGB(data)
		if err != nil || gw != w || gh != h || !bytes.Equal(got, want) || !bytes.Equal(got, pil) {
			t.Errorf("%s: %dx%d, %v; equal to the plain file's: %v, to Pillow's: %v",
				name, gw, gh, err, bytes.Equal(got, want), bytes.Equal(got, pil))
		}
	}
}

// TestTruncatedEverywhere cuts files at many places: every cut is refused, whatever the crop.
func TestTruncatedEverywhere(t *testing.T) {
	const w, h = 120, 90
	pix := photo(t, 8, w, h)
	for _, e := range []Encoding{{Quality: 90, Subsampling: Sub420},
		{Quality: 70, Subsampling: Sub444, Progressive: true}, {Quality: 80, Subsampling: Sub422, RestartRows: 1}} {
		data := encode(t, pix, w, h, e)
		for n := 0; n < len(data); n += 1 + len(data)/150 {
			for _, j := range []Job{{Box: image.Rect(0, 0, 1, 1)},
				{Box: image.Rect(60, 50, 61, 51), Filter: Bicubic, DCT: true}} {
				if err := Decode(make([]byte, 3), data[:n], &j); err == nil || n > 3 && !errors.Is(err, ErrTruncated) {
					t.Fatalf("%+v cut at %d of %d: %v", e, n, len(data), err)
				}
			}
		}
	}
}
