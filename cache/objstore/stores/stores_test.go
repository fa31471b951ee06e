package stores

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/cache/objstore/s3"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestOpen(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "list.txt")
	must(t, os.WriteFile(file, []byte("a\n"), 0o644))
	store, src, err := Open(t.Context(), dir, Options{})
	must(t, err)
	if o, err := store.Stat(t.Context(), src.Prefix+"list.txt"); err != nil || o.Size != 2 {
		t.Errorf("%+v, %v", o, err)
	}
	for text, want := range map[string]string{
		file:          "the only files that can be a source are tar shards",
		dir + "/none": "s3://BUCKET/PREFIX",
		os.DevNull:    "it is a file",
	} {
		if _, _, err := Open(t.Context(), text, Options{}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: error %v, want %q", text, err, want)
		}
	}
	// Shards: the folder is what is opened; a folder of such a name is a tree.
	must(t, os.Mkdir(filepath.Join(dir, "tree.tar"), 0o755))
	for text, want := range map[string]objstore.Source{
		dir + "/x-{0..3}.tar": {Scheme: "file", Dir: dir, Shards: "x-{0..3}.tar"},
		dir + "/none.tar":     {Scheme: "file", Dir: dir, Shards: "none.tar"},
		dir + "/tree.tar":     {Scheme: "file", Dir: dir + "/tree.tar"},
	} {
		s, src, err := Open(t.Context(), text, Options{})
		must(t, err)
		must(t, os.WriteFile(filepath.Join(want.Dir, "here"), nil, 0o600))
		if _, err := s.Stat(t.Context(), "here"); err != nil || src != want {
			t.Errorf("%q: %+v, %v", text, src, err)
		}
		must(t, os.Remove(filepath.Join(want.Dir, "here")))
	}
	t.Setenv("AWS_ACCESS_KEY_ID", "k")
	t.Setenv("AWS_SECRET_ACCESS_KEY", "s")
	var canonical []string
	for _, endpoint := range []string{"http://127.0.0.1:9000", "http://127.0.0.1:9000/", "http://127.0.0.1:9001"} {
		t.Setenv("AWS_ENDPOINT_URL", endpoint)
		s, src, err := Open(t.Context(), "s3://bucket/train", Options{})
		must(t, err)
		s.(*s3.Store).Close()
		canonical = append(canonical, src.Canonical())
	}
	if canonical[0] != canonical[1] || canonical[0] == canonical[2] {
		t.Errorf("canonical texts %q: want the first two equal, the third different", canonical)
	}
}

func TestCreate(t *testing.T) {
	dir := t.TempDir()
	s, dst, err := Create(t.Context(), dir+"/a/b", Options{})
	must(t, err)
	if _, err := s.PutNew(t.Context(), "k", nil); err != nil || dst.Dir != dir+"/a/b" {
		t.Errorf("%+v: %v", dst, err)
	}
	if _, _, err := Create(t.Context(), dir+"/a/b", Options{}); err != nil {
		t.Errorf("again: %v", err)
	}
	for text, want := range map[string]string{
		dir + "/a/b/k":         "name a folder",
		dir + "/a/b/k/below":   "name a folder",
		dir + "/x-{0..3}.tar":  "leave out x-{0..3}.tar",
		"s3://bucket/x/y.tar":  "leave out y.tar",
		"ftp://host/somewhere": "does not read ftp://",
	} {
		if _, _, err := Create(t.Context(), text, Options{}); objstore.KindOf(err) != objstore.KindInvalid ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("%q: error %v, want %q", text, err, want)
		}
	}
	if _, err := os.Stat(dir + "/none"); err == nil {
		t.Error("Open made a folder")
	}
}
