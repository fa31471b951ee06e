package catalog

import (
	"fmt"
	"path"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

func TestCut(t *testing.T) {
	for _, tt := range []struct{ name, stem, ext string }{
		{"000001.jpg", "000001", "jpg"},
		{"000001.mask.png", "000001", "mask.png"},
		{"000001", "000001", ""},
		{".hidden.json", ".hidden", "json"},
		{"..a.b.c", "..a", "b.c"},
		{".hidden", ".hidden", ""},
		{"a.", "a", ""},
	} {
		if stem, ext, dotted := Cut(tt.name); stem != tt.stem || ext != tt.ext || dotted != (stem != tt.name) {
			t.Errorf("%s: stem %q, extension %q, %v", tt.name, stem, ext, dotted)
		}
	}
}

// Parts, owners and kinds equal what the definition says, computed from the paths.
func TestPartsModel(t *testing.T) {
	exts := []string{"", ".jpg", ".cls", ".json", ".mask.png", ".png", ".clsx", ".x.cls", "-1.jpg", "..cls"}
	rapid.Check(t, func(t *rapid.T) {
		keys := rapid.SliceOfNDistinct(rapid.Custom(func(t *rapid.T) string {
			dir := rapid.SampledFrom([]string{"", "a/", "a/b/", "c/"}).Draw(t, "dir")
			stem := rapid.SampledFrom([]string{"1", "2", "10", ".1", "é"}).Draw(t, "stem")
			return dir + stem + rapid.SampledFrom(exts).Draw(t, "ext")
		}), 1, 40, rapid.ID).Draw(t, "keys")
		m := mustBuild(t, BuildOptions{}, keys...)
		glob := rapid.SampledFrom([]string{"*", "images", ".jpg", ".cls,.jpg", "1*"}).Draw(t, "glob")
		match, err := Match(glob)
		if err != nil {
			t.Fatal(err)
		}
		s := m.Samples(match)
		files := paths(m)
		where := func(p string) (dir, stem, ext string) {
			dir, base := path.Split(p)
			rest := strings.TrimLeft(base, ".")
			head, ext, _ := strings.Cut(rest, ".")
			return dir, base[:len(base)-len(rest)] + head, ext
		}
		for _, ext := range []string{"jpg", "cls", "json", "mask.png", "png", "x.cls", ".cls", "nothing"} {
			want := Kind{}
			for i := range s.Len() {
				dir, stem, _ := where(files[s.File(i)])
				at := slices.Index(files, dir+stem+"."+ext)
				got, ok := s.Part(i, ext)
				if ok != (at >= 0) || ok && got != at {
					t.Fatalf("part %q of %q: %d, %v; want %d", ext, files[s.File(i)], got, ok, at)
				}
				if _, _, e := where(dir + stem + "." + ext); at >= 0 && e == ext {
					want.Found = true
				}
			}
			if got := s.Kind(ext); got.Found != want.Found || got != s.Kind(ext) {
				t.Fatalf("kind %q of %q, samples %s: %+v, want %+v", ext, files, glob, got, want)
			}
		}
		for f, p := range files {
			dir, stem, _ := where(p)
			var want []int
			for g, q := range files {
				if d, st, _ := where(q); d == dir && st == stem {
					if _, is := s.Sample(g); is {
						want = append(want, g)
					}
				}
			}
			got := slices.Sorted(s.Beside(f))
			if !slices.Equal(got, want) {
				t.Fatalf("beside %q of %q, samples %s: %v, want %v", p, files, glob, got, want)
			}
		}
	})
}

// Masks that are pictures are samples too, unless --samples says otherwise.
func TestPartsNumbered(t *testing.T) {
	m := mustBuild(t, BuildOptions{}, "1.jpg", "1.json", "1.mask.png", "2.jpg", "2.mask.png")
	for glob, numbered := range map[string]bool{"images": true, ".jpg": false} {
		match, err := Match(glob)
		if err != nil {
			t.Fatal(err)
		}
		s := m.Samples(match)
		if got := s.Kind("mask.png"); got != (Kind{true, numbered}) {
			t.Errorf("%s: %+v", glob, got)
		}
	}
}

// A name with dots that thousands share is no sample of thousands of files.
func TestBesideIsBounded(t *testing.T) {
	var keys []string
	for i := range 5000 {
		keys = append(keys, fmt.Sprintf("img.%06d.jpg", i))
	}
	s := mustBuild(t, BuildOptions{}, keys...).Samples(nil)
	n := 0
	for range s.Beside(4000) {
		n++
	}
	if n != maxBeside {
		t.Errorf("%d files", n)
	}
}

// What is asked at a session's start, and for every sample.
func BenchmarkParts(b *testing.B) {
	const n = 1_000_000
	keys := make([]string, 0, 2*n)
	for i := range n {
		keys = append(keys, fmt.Sprintf("%09d.jpg", i), fmt.Sprintf("%09d.json", i))
	}
	m := mustBuild(b, BuildOptions{}, keys...)
	match, err := Match(".jpg")
	if err != nil {
		b.Fatal(err)
	}
	s := m.Samples(match)
	b.Run("absent", func(b *testing.B) {
		for b.Loop() {
			s.findKind("cls")
		}
	})
	b.Run("part", func(b *testing.B) {
		i := 0
		for b.Loop() {
			if i += 7919; i >= n {
				i -= n
			}
			if _, ok := s.Part(i, "json"); !ok {
				b.Fatal("no part")
			}
		}
	})
}
