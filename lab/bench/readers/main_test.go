package main

import (
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestPassAndVerify(t *testing.T) {
	dir, originals := t.TempDir(), t.TempDir()
	var sums strings.Builder
	var total int64
	for i := range 40 {
		data := strings.Repeat(fmt.Sprint(i), i*4000) // from nothing to more than a buffer
		total += int64(len(data))
		name := fmt.Sprintf("d%d/f%d", i%4, i)
		for _, d := range []string{dir, originals} {
			if err := os.MkdirAll(filepath.Join(d, filepath.Dir(name)), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(d, name), []byte(data), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		fmt.Fprintf(&sums, "%x  ./%s\n", sha256.Sum256([]byte(data)), name)
	}
	sumFile := filepath.Join(t.TempDir(), "sums")
	if err := os.WriteFile(sumFile, []byte(sums.String()), 0o644); err != nil {
		t.Fatal(err)
	}
	paths, err := walk(dir)
	if err != nil || len(paths) != 40 {
		t.Fatal(len(paths), err)
	}
	read := func(originals, sums string) result {
		check, err := checker(originals, sums)
		if err != nil {
			t.Fatal(err)
		}
		return (&reader{dir: dir, check: check}).pass(paths, 8)
	}
	for _, r := range []result{read("", ""), read(originals, ""), read("", sumFile)} {
		if r.Files != 40 || r.Bytes != total || r.Errors != 0 || r.FilesPerSec <= 0 {
			t.Errorf("%+v", r)
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "d1/f5"), []byte("other"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(filepath.Join(dir, "d2/f6")); err != nil {
		t.Fatal(err)
	}
	for _, r := range []result{read(originals, ""), read("", sumFile)} {
		if r.Files != 38 || r.Errors != 2 || len(r.FirstErrors) != 2 {
			t.Errorf("%+v", r)
		}
	}
}
