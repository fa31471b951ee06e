package parts

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/shoalfs/shoal/lab/bench/kit"
)

func TestPassAndVerify(t *testing.T) {
	dir, originals := t.TempDir(), t.TempDir()
	for i := range 40 {
		data := strings.Repeat(fmt.Sprint(i), i*4000) // from nothing to more than a buffer
		name := fmt.Sprintf("d%d/f%d", i%4, i)
		for _, d := range []string{dir, originals} {
			if err := os.MkdirAll(filepath.Join(d, filepath.Dir(name)), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(d, name), []byte(data), 0o644); err != nil {
				t.Fatal(err)
			}
		}
	}
	paths, err := kit.Walk(dir)
	if err != nil || len(paths) != 40 {
		t.Fatal(len(paths), err)
	}
	for _, from := range []string{"", originals} {
		r := &reader{dir: dir, originals: from}
		if res, err := r.pass(paths, 8); err != nil || res.Files != 40 || res.Rate <= 0 {
			t.Errorf("%+v, %v", res, err)
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "d1/f5"), []byte("other"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(filepath.Join(dir, "d2/f6")); err != nil {
		t.Fatal(err)
	}
	res, err := (&reader{dir: dir, originals: originals}).pass(paths, 8)
	if err == nil || !strings.HasPrefix(err.Error(), "2 files") || res.Files != 38 {
		t.Errorf("%+v, %v", res, err)
	}
}
