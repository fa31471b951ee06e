package e2e

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// A bit that has flipped in a plain packed member, in a shard with the same size and time, is neither served nor kept; the error names the
// shard, and the other files are read.
func TestFlippedPackedMember(t *testing.T) {
	dir, paths := tree(t, 2, 20, 40<<10)
	packed, cache := t.TempDir(), t.TempDir()
	mustShoal(t, nil, "pack", "file://"+dir, "file://"+packed)
	bad := paths[7]
	content, err := os.ReadFile(filepath.Join(dir, bad))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range tars(t, packed) {
		fi, err := os.Stat(name)
		if err != nil {
			t.Fatal(err)
		}
		b, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		if i := bytes.Index(b, content); i >= 0 {
			b[i+len(content)/3] ^= 8
		}
		if err := errors.Join(os.WriteFile(name, b, 0o644), os.Chtimes(name, fi.ModTime(), fi.ModTime())); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 { // cold, and from the cache
		mnt := t.TempDir()
		mountAt(t, nil, "file://"+packed, mnt, "--cache-dir", cache)
		for _, p := range paths {
			got, err := os.ReadFile(filepath.Join(mnt, p))
			want, e := os.ReadFile(filepath.Join(dir, p))
			if e != nil {
				t.Fatal(e)
			}
			switch {
			case p == bad && !errors.Is(err, syscall.EIO):
				t.Errorf("%s: %v", p, err)
			case p != bad && (err != nil || !bytes.Equal(got, want)):
				t.Errorf("%s: %v", p, err)
			}
		}
		text := ""
		for _, e := range readStats(t, mnt).Errors {
			text += e.Text + "\n"
		}
		if !strings.Contains(text, ".tar") || !strings.Contains(text, bad) || !strings.Contains(text, "checksum") {
			t.Errorf("stat says nothing of it:\n%s", text)
		}
		umount(t, mnt)
	}
}
