package engine

import (
	"iter"
	"strings"
	"testing"

	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/cache/objstore"
)

func manifest(t testing.TB, keys ...string) *catalog.Manifest {
	t.Helper()
	var listing iter.Seq2[objstore.Object, error] = func(yield func(objstore.Object, error) bool) {
		for _, k := range keys {
			if !yield(objstore.Object{Key: k, Size: 1, ETag: "e"}, nil) {
				return
			}
		}
	}
	m, err := catalog.Build(listing, catalog.BuildOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func TestParsePlan(t *testing.T) {
	m := manifest(t, "a/1.jpg", "a/2.jpg", "b/3.jpg", "root.txt")
	for _, c := range []struct {
		text string
		want []string // paths
		err  string
	}{
		{"a/2.jpg\nb/3.jpg\n", []string{"a/2.jpg", "b/3.jpg"}, ""},
		{"a/2.jpg", []string{"a/2.jpg"}, ""},
		{"./a/1.jpg\n\n./a/1.jpg\n", []string{"a/1.jpg", "a/1.jpg"}, ""},
		{"root.txt\n", []string{"root.txt"}, ""}, // a plan names files, numbered or not
		{"", nil, "names no file"},
		{"a/1.jpg\na\n", nil, `line 2: "a" is a folder`},
		{"a/1.jpg\r\n\r\nb/3.jpg\r\n", []string{"a/1.jpg", "b/3.jpg"}, ""},
		{"/mnt/train/a/1.jpg\r\n/mnt/train/./b/3.jpg\n././/a/2.jpg\n", []string{"a/1.jpg", "b/3.jpg", "a/2.jpg"}, ""},
		{"/a/1.jpg\n", nil, "line 1"},
		{"/mnt/training/a/1.jpg\n", nil, "line 1"},
		{strings.Repeat("x\n", 30), nil, "and 10 more"},
	} {
		o, err := parsePlan(m, []byte(c.text), []string{"/data", "/mnt/train"})
		if c.err != "" {
			if err == nil || !strings.Contains(err.Error(), c.err) {
				t.Errorf("%q: %v, want %q", c.text, err, c.err)
			}
			continue
		}
		if err != nil || o.Len() != len(c.want) {
			t.Errorf("%q: %v", c.text, err)
			continue
		}
		for i, path := range c.want {
			if got := m.Path(o.At(i)); got != path {
				t.Errorf("%q at %d: %s, want %s", c.text, i, got, path)
			}
		}
	}
}

// Whatever is written, a plan is taken only if every line of it names a file.
func FuzzParsePlan(f *testing.F) {
	m := manifest(f, "a/1.jpg", "a/2.jpg", "b/3.jpg")
	f.Add([]byte("a/1.jpg\nb/3.jpg\n"))
	f.Add([]byte("./a/2.jpg\n\n../x\n"))
	f.Add([]byte("a//1.jpg\x00\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		o, err := parsePlan(m, data, nil)
		if err != nil {
			return
		}
		n := 0
		for _, line := range strings.Split(string(data), "\n") {
			if line = strings.TrimSuffix(line, "\r"); line == "" {
				continue
			}
			for strings.HasPrefix(line, "./") {
				line = strings.TrimLeft(line[2:], "/")
			}
			node, ok := m.Find(line)
			if !ok || node.IsDir || o.At(n) != node.Index {
				t.Fatalf("line %q was taken", line)
			}
			n++
		}
		if n != o.Len() {
			t.Fatalf("%d positions for %d lines", o.Len(), n)
		}
	})
}
