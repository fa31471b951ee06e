package jpeg

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
)

// odd are small and large pictures of many kinds.
func odd(t testing.TB) map[string][]byte {
	files := map[string][]byte{}
	r := rand.New(rand.NewPCG(3, 4))
	for _, size := range [][2]int{{1, 1}, {8, 8}, {17, 9}, {16, 33}, {64, 64}, {97, 131}, {500, 375}, {1023, 33}, {7, 900}} {
		w, h := size[0], size[1]
		pix := photo(t, w%7, max(w, 16), max(h, 16))
		for _, sub := range []Subsampling{Sub444, Sub422, Sub420, Sub440, Sub411} {
			for k := range 12 {
				e := Encoding{Quality: []int{1, 30, 75, 90, 97, 100}[r.IntN(6)], Subsampling: sub, Progressive: k%3 == 1, Optimize: k%2 == 1, RestartRows: []int{0, 0, 1, 3}[r.IntN(4)]}
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
		if rec = rec[len("before"):]; len(rec) < len(f) && !bytes.Equal(rec, small) || len(rec) >= len(f) && !errors.Is(err, ErrKeep) {
			t.Errorf("%s: %d bytes became %d, Recode gives %d, %v", name, len(f), len(rec), len(small), err)
		}
		if err != nil {
			kept++
		}
		if !IsRecoded(rec) || IsRecoded(f) || RecodedSize(rec) != int64(len(f)) || RecodedTables(rec) != tab.ID() {
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

// TestRecodedLoopsAgree compares the vector loops with the plain ones, on all bands at once and on some.
func TestRecodedLoopsAgree(t *testing.T) {
	defer setSIMD(vnni)
	files := odd(t)
	tab := train(t, slices.Collect(maps.Values(files))...)
	r := rand.New(rand.NewPCG(1, 2))
	for name, f := range files {
		rec, err := tab.recode(nil, f)
		if err != nil {
			t.Fatal(name, err)
		}
		for k := range 4 {
			src, from, to := rec, 0, math.MaxInt
			if k == 1 {
				from, to = 1, 3
			}
			if k > 1 { // damage that leaves the directory alone: anything may come of it, but the same everywhere
				src = bytes.Clone(rec)
				for range k {
					src[recodedHeader+r.IntN(len(src)-recodedHeader)] ^= byte(1 + r.IntN(255))
				}
			}
			setSIMD(portable)
			want, wantLast, wantErr := tab.bands(src, from, to)
			for simd := range haveSIMD {
				setSIMD(simd + 1)
				got, last, err := tab.bands(src, from, to)
				if (err == nil) != (wantErr == nil) || !slices.Equal(got, want) || !bytes.Equal(last, wantLast) {
					t.Fatalf("%s: case %d: loops %d differ from the plain ones: %v, %v", name, k, simd+1, err, wantErr)
				}
			}
		}
	}
}
