package jpeg

import (
	"bytes"
	"errors"
	"image"
	"testing"
)

// FuzzTables: whatever parses can code and decode.
func FuzzTables(f *testing.F) {
	files := seeds(f)[:4]
	tab := train(f, files...)
	f.Add(unpackTables(tab.Bytes()), uint8(0))
	f.Fuzz(func(t *testing.T, raw []byte, pick uint8) {
		tab, err := ParseTables(packTables(raw))
		if err != nil {
			if !errors.Is(err, ErrCorrupt) {
				t.Error(err)
			}
			return
		}
		src := files[int(pick)%len(files)]
		rec, err := tab.recode(nil, src)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := tab.Restore(nil, rec); err != nil || !bytes.Equal(got, src) {
			t.Errorf("does not come back: %v", err)
		}
	})
}

// FuzzPackedTables: no bytes crash the parser.
func FuzzPackedTables(f *testing.F) {
	f.Add(train(f, seeds(f)[:4]...).Bytes())
	f.Fuzz(func(t *testing.T, b []byte) {
		if tab, err := ParseTables(b); err == nil && !bytes.Equal(tab.Bytes(), b) {
			t.Error("the bytes changed")
		}
	})
}

// FuzzRecode: any file either comes back or is kept.
func FuzzRecode(f *testing.F) {
	files := seeds(f)
	tab := train(f, files[:4]...)
	for _, s := range files {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, src []byte) {
		rec, err := tab.recode(nil, src)
		if err != nil {
			if !errors.Is(err, ErrKeep) {
				t.Error(err)
			}
			return
		}
		if got, err := tab.Restore(nil, rec); err != nil || !bytes.Equal(got, src) {
			t.Errorf("does not come back: %v", err)
		}
	})
}

// FuzzRestore: hostile containers do not crash the C side, whatever loops it has (run it with -asan, too).
func FuzzRestore(f *testing.F) {
	defer setSIMD(vnni)
	files := seeds(f)[:4]
	tab := train(f, files...)
	if err := Register(tab); err != nil {
		f.Fatal(err)
	}
	for _, s := range files {
		rec, err := tab.recode(nil, s)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(rec, uint8(0), uint8(2))
	}
	f.Fuzz(func(t *testing.T, rec []byte, from, to uint8) {
		rec = bytes.Clone(rec)
		if len(rec) >= recodedHeader {
			id := tab.ID()
			copy(rec[8:], id[:])
		}
		w, h, err := Size(rec)
		if err == nil && w*h > 1<<20 {
			return
		}
		if got, err := tab.Restore(nil, rec); err == nil && int64(len(got)) != originalSize(rec) {
			t.Errorf("%d bytes restored, %d promised", len(got), originalSize(rec))
		} else if err != nil && !errors.Is(err, ErrCorrupt) {
			t.Error(err)
		}
		part := image.Rect(0, h*int(from)/256, w, h*int(to)/256)
		for _, box := range []image.Rectangle{image.Rect(0, 0, w, h), part} {
			for simd := range haveSIMD + 1 {
				setSIMD(simd)
				_ = DecodeSized(make([]byte, 3*box.Dx()*box.Dy()), rec, image.Pt(w, h), &Job{Box: box})
			}
		}
	})
}
