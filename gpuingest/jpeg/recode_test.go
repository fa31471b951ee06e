package jpeg

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"image"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"testing"
)

// odd are small and large pictures of many kinds.
func odd(t testing.TB) map[string][]byte {
	files := map[string][]byte{}
	r := rand.New(rand.NewPCG(3, 4))
	for _, size := range [][2]int{{1, 1}, {8, 8}, {17, 9}, {16, 33}, {64, 64}, {97, 131}, {500, 375}, {1023, 33},
		{7, 900}} {
		w, h := size[0], size[1]
		pix := photo(t, w%7, max(w, 16), max(h, 16))
		for _, sub := range []Subsampling{Sub444, Sub422, Sub420, Sub440, Sub411} {
			for k := range 12 {
				e := Encoding{Quality: []int{1, 30, 75, 90, 97, 100}[r.IntN(6)], Subsampling: sub,
					Progressive: k%3 == 1, Optimize: k%2 == 1, RestartRows: []int{0, 0, 1, 3}[r.IntN(4)]}
				if k >= 10 {
					e.Components = 1
				}
				files[fmt.Sprintf("%dx%d %+v", w, h, e)] = encode(t, pix[:w*h*cmp.Or(e.Components, 3)], w, h, e)
			}
		}
	}
	return files
}

func train(t testing.TB, files ...[]byte) *Tables {
	t.Helper()
	tab, err := TrainTables(slices.Values(files))
	if err != nil {
		t.Fatal(err)
	}
	again, err := ParseTables(tab.Bytes())
	if err != nil || again.ID() != tab.ID() || len(tab.Bytes()) > 8<<10 {
		t.Fatalf("tables of %d bytes parse as %v, %v", len(tab.Bytes()), again, err)
	}
	return again
}

// TestRecode: every file comes back, and is taken if that makes it smaller.
func TestRecode(t *testing.T) {
	files := odd(t)
	tab := train(t, slices.Collect(maps.Values(files))...)
	kept := 0
	for name, f := range files {
		rec, err := tab.recode([]byte("before"), f)
		if err != nil {
			t.Fatal(name, err)
		}
		small, err := tab.Recode(nil, f)
		if rec = rec[len("before"):]; len(rec) < len(f) && !bytes.Equal(rec, small) ||
			len(rec) >= len(f) && !errors.Is(err, ErrKeep) {
			t.Errorf("%s: %d bytes became %d, Recode gives %d, %v", name, len(f), len(rec), len(small), err)
		}
		if err != nil {
			kept++
		}
		if !IsRecoded(rec) || IsRecoded(f) || originalSize(rec) != int64(len(f)) || RecodedTables(rec) != tab.ID() {
			t.Errorf("%s: a header of %x", name, rec[:recodedHeader])
		}
		got, err := tab.Restore([]byte("before"), rec)
		if err != nil || string(got) != "before"+string(f) {
			t.Errorf("%s: does not come back: %v", name, err)
		}
		w, h, _ := Size(f)
		if rw, rh, err := Size(rec); err != nil || w != rw || h != rh {
			t.Errorf("%s: size %dx%d, %v", name, rw, rh, err)
		}
	}
	t.Logf("%d of %d kept", kept, len(files))
}

// TestRecodedLoopsAgree compares the vector loops with the plain ones, on all of a picture and on a part.
func TestRecodedLoopsAgree(t *testing.T) {
	defer setSIMD(vnni)
	files := odd(t)
	tab := train(t, slices.Collect(maps.Values(files))...)
	if err := Register(tab); err != nil {
		t.Fatal(err)
	}
	r := rand.New(rand.NewPCG(1, 2))
	for _, name := range slices.Sorted(maps.Keys(files)) { // the same damage each time: some makes one kind of another
		f := files[name]
		rec, err := tab.recode(nil, f)
		if err != nil {
			t.Fatal(name, err)
		}
		w, h, _ := Size(f)
		for k := range 4 {
			src, box, from := rec, image.Rect(0, 0, w, h), portable
			if k == 1 {
				box = image.Rect(w/3, h/4, w, h-h/3)
			}
			if k > 1 { // damage: anything may come of it, but the same everywhere
				src = bytes.Clone(rec)
				for range k {
					src[recodedHeader+r.IntN(len(src)-recodedHeader)] ^= byte(1 + r.IntN(255))
				}
				if !regexp.MustCompile("Components:1|Subsampling:4(40|11)").MatchString(name) {
					from = min(avx2, haveSIMD) // plain loops leave these kinds to libjpeg, whose sums differ
				}
			}
			var want []byte
			var wantErr error
			for simd := from; simd <= haveSIMD; simd++ {
				setSIMD(simd)
				got := make([]byte, 3*box.Dx()*box.Dy())
				err := DecodeSized(got, src, image.Pt(w, h), &Job{Box: box})
				if simd == from {
					want, wantErr = got, err
				} else if (err == nil) != (wantErr == nil) || err == nil && !bytes.Equal(got, want) {
					t.Fatalf("%s: case %d: loops %d and %d differ: %v, %v", name, k, simd, from, err, wantErr)
				}
			}
		}
	}
}

// TestGolden: the format does not change unnoticed. Files of version 1 must stay readable.
func TestGolden(t *testing.T) {
	read := func(name string) []byte {
		b, err := os.ReadFile(filepath.Join("testdata", name))
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	src, want := read("recode.jpg"), read("recode.sjr")
	tab, err := ParseTables(read("recode.tables"))
	if err != nil {
		t.Fatal(err)
	}
	if rec, err := tab.Recode(nil, src); err != nil || !bytes.Equal(rec, want) {
		t.Errorf("recoded as %d bytes, not the %d of before: %v", len(rec), len(want), err)
	}
	if got, err := tab.Restore(nil, want); err != nil || !bytes.Equal(got, src) {
		t.Errorf("does not come back: %v", err)
	}
}

// TestKept: what cannot be recoded stays as it is.
func TestKept(t *testing.T) {
	const w, h = 64, 48
	pix := photo(t, 2, w, 2*h)
	good := encode(t, pix[:w*h*3], w, h, Encoding{Quality: 90, Subsampling: Sub420})
	prog := encode(t, pix[:w*h*3], w, h, Encoding{Quality: 90, Subsampling: Sub420, Progressive: true})
	tab := train(t, good, prog)
	edit := func(b []byte, f func([]byte)) []byte { b = bytes.Clone(b); f(b); return b }
	sof := bytes.Index(good, []byte{0xff, 0xc0})
	lastScan := bytes.LastIndex(prog, []byte{0xff, 0xda})
	for name, f := range map[string][]byte{
		"nothing": nil,
		"text":    []byte("this is not a picture, whatever its name says"),
		"CMYK":    encode(t, pix[:w*h*4], w, h, Encoding{Quality: 90, Components: 4, Subsampling: Sub444}),
		"YCCK": encode(t, pix[:w*h*4], w, h,
			Encoding{Quality: 90, Components: 4, YCCK: true, Subsampling: Sub420}),
		"12 bits":           edit(good, func(b []byte) { b[sof+4] = 12 }),
		"arithmetic coding": edit(good, func(b []byte) { b[sof+1] = 0xc9 }),
		"truncated":         good[:len(good)/2],
		"truncated, ended":  append(bytes.Clone(good[:len(good)/2]), 0xff, 0xd9),
		"no end":            good[:len(good)-2],
		"last scan missing": append(bytes.Clone(prog[:lastScan]), 0xff, 0xd9),
		"a scan twice": append(append(bytes.Clone(prog[:len(prog)-2]), prog[lastScan:len(prog)-2]...),
			0xff, 0xd9),
		"garbage in a scan":  append(append(bytes.Clone(good[:len(good)-2]), "garbage"...), 0xff, 0xd9),
		"recoded already":    func() []byte { b, _ := tab.recode(nil, good); return b }(),
		"bytes of no marker": append(append(bytes.Clone(good[:2]), 0), good[2:]...),
	} {
		if rec, err := tab.recode(nil, f); !errors.Is(err, ErrKeep) || len(rec) > 0 {
			t.Errorf("%s: %d bytes became %d, %v", name, len(f), len(rec), err)
		}
	}
	for name, f := range map[string][]byte{
		"bytes behind the end": append(bytes.Clone(good), bytes.Repeat([]byte("tail"), 500)...),
		"a second picture":     append(bytes.Clone(good), prog...),
		"metadata": append(append(bytes.Clone(good[:2]), 0xff, 0xe1, 0, 6, 'E', 'x', 'i', 'f'),
			good[2:]...),
		"padded markers": append(append(bytes.Clone(good[:2]), 0xff, 0xff), good[2:]...),
	} {
		rec, err := tab.recode(nil, f)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if got, err := tab.Restore(nil, rec); err != nil || !bytes.Equal(got, f) {
			t.Errorf("%s does not come back: %v", name, err)
		}
	}
}

// TestRestoreErrors: other tables, cut and changed containers.
func TestRestoreErrors(t *testing.T) {
	const w, h = 200, 150
	a := encode(t, photo(t, 3, w, h), w, h, Encoding{Quality: 90, Subsampling: Sub420})
	b := encode(t, photo(t, 5, w, h), w, h, Encoding{Quality: 20, Subsampling: Sub444})
	tab, other := train(t, a), train(t, b)
	rec, err := tab.Recode(nil, a)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := other.Restore(nil, rec); !errors.Is(err, ErrNoTables) {
		t.Errorf("with other tables: %v", err)
	}
	for n := range len(rec) {
		if got, err := tab.Restore([]byte("kept"), rec[:n]); !errors.Is(err, ErrCorrupt) || string(got) != "kept" {
			t.Fatalf("cut at %d of %d: %v", n, len(rec), err)
		}
	}
	for i := recodedHeader; i < len(rec); i += 7 {
		bad := bytes.Clone(rec)
		bad[i] ^= 0x40
		// a lane's last bits are not used
		if got, err := tab.Restore(nil, bad); !errors.Is(err, ErrCorrupt) && !bytes.Equal(got, a) {
			t.Fatalf("byte %d of %d changed: %v", i, len(rec), err)
		}
	}
	// What lies outside of the scans does not begin as a picture: its markers are not where two bytes further they seem
	// to be.
	var tables []byte
	for rest := a; ; {
		i := bytes.Index(rest, []byte{0xff, 0xc4})
		if i < 0 {
			break
		}
		n := 2 + int(binary.BigEndian.Uint16(rest[i+2:]))
		tables, rest = append(tables, rest[i:i+n]...), rest[i+n:]
	}
	verbatim := append([]byte{0xff, 0xe0, 1, 0, 2, 0xff, 0xdb, 0, 0}, make([]byte, 249)...)
	verbatim = append(append(verbatim, 0xff, 0xdb, 0, 0x43, 0), bytes.Repeat([]byte{1}, 64)...)
	verbatim = append(append(verbatim, 0xff, 0xc0, 0, 11, 8, 0, 8, 0, 8, 1, 1, 0x11, 0), tables...)
	verbatim = append(verbatim, 0xff, 0xda, 0, 8, 1, 1, 0, 0, 0x3f, 0)
	hostile := bytes.Clone(rec[:recodedHeader])
	binary.LittleEndian.PutUint32(hostile[16:], 1)
	binary.LittleEndian.PutUint32(hostile[24:], uint32(len(verbatim)))
	clear(hostile[28:32])
	if _, err := tab.Restore(nil, append(hostile, verbatim...)); !errors.Is(err, ErrCorrupt) {
		t.Errorf("a head that does not begin as a picture: %v", err)
	}
	// Nor does it have a scan twice.
	scan := a[bytes.Index(a, []byte{0xff, 0xda}) : len(a)-2]
	head := scan[:2+binary.BigEndian.Uint16(scan[2:])]
	twice := slices.Insert(bytes.Clone(a), len(a)-2, scan...)
	again := slices.Insert(bytes.Clone(rec), len(rec)-2, head...)
	binary.LittleEndian.PutUint32(again[16:], uint32(len(twice)))
	binary.LittleEndian.PutUint32(again[20:], crc32.Checksum(twice, castagnoli))
	binary.LittleEndian.PutUint32(again[24:], binary.LittleEndian.Uint32(again[24:])+uint32(len(head)))
	if got, err := tab.Restore(nil, again); !errors.Is(err, ErrCorrupt) {
		t.Errorf("a scan twice: %v, as expected without a check: %v", err, bytes.Equal(got, twice))
	}
	for range 2 {
		if err := Register(tab); err != nil {
			t.Error(err)
		}
	}
	if registered(tab.ID()) != tab || registered(other.ID()) != nil {
		t.Error("the registry does not hold what was registered")
	}
}

// originalSize returns the size of the original that a recoded file promises.
func originalSize(rec []byte) int64 { return int64(binary.LittleEndian.Uint32(rec[16:])) }
