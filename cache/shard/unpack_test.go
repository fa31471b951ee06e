package shard

import (
	"archive/tar"
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/shoalfs/shoal/cache/objstore"
)

// packed is a set of many small files and one of several pieces.
func packed(t *testing.T) (*store, map[string][]byte, *Set) {
	t.Helper()
	s := newStore()
	files := manyFiles(60)
	files["x/large.bin"] = 2*unpackPiece + 77
	files["x/empty"] = 0
	m := fill(t, s, files)
	o := small(1)
	o.Memory = 64 << 20
	if _, err := Pack(t.Context(), m, s, s, "out/", o); err != nil {
		t.Fatal(err)
	}
	want := map[string][]byte{}
	for i := range m.Len() {
		want[m.Path(i)] = get(t, s, m.Object(i).Key)
	}
	set, err := Open(t.Context(), s, out, OpenOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for member, err := range set.Members(t.Context()) {
		if n, ok := m.Find(member.Path); err != nil || !ok || !member.ModTime.Equal(m.ModTime(n.Index)) {
			t.Fatalf("%+v, %v", member, err)
		}
	}
	return s, want, set
}

// holds compares a folder with what it must hold, and nothing else.
func holds(t *testing.T, dir string, want map[string][]byte) {
	t.Helper()
	n := 0
	err := filepath.WalkDir(dir, func(p string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			if d != nil && d.Name() == unpackFolder {
				t.Errorf("%s is left", p)
			}
			return err
		}
		n++
		rel, _ := filepath.Rel(dir, p)
		if data, err := os.ReadFile(p); err != nil || !bytes.Equal(data, want[rel]) {
			t.Errorf("%s: other bytes, %v", rel, err)
		}
		return nil
	})
	if err != nil || n != len(want) {
		t.Errorf("%d files, want %d: %v", n, len(want), err)
	}
}

// Files come back with their bytes and times, in few reads; again costs no read; what is lost comes back; what another
// wrote stays, and is an error.
func TestUnpack(t *testing.T) {
	s, want, set := packed(t)
	dir := filepath.Join(t.TempDir(), "not", "there")
	s.gets = 0
	calls := 0
	done, err := set.Unpack(t.Context(), dir, func(Unpacked) { calls++ })
	if err != nil || done.Files != len(want) || done.Kept != 0 || calls != len(want) {
		t.Fatalf("%+v of %d files, %d calls, %v", done, len(want), calls, err)
	}
	holds(t, dir, want)
	if most := 2*len(set.Shards) + 3; s.gets > most {
		t.Errorf("%d reads of %d shards", s.gets, len(set.Shards))
	}
	for m := range set.Members(t.Context()) {
		if fi, err := os.Stat(filepath.Join(dir, m.Path)); err != nil ||
			!m.ModTime.IsZero() && !fi.ModTime().Equal(m.ModTime) {
			t.Errorf("%s: %v, want time %v", m.Path, err, m.ModTime)
		}
	}
	s.gets = 0
	if done, err = set.Unpack(t.Context(), dir, nil); err != nil || done.Kept != len(want) ||
		s.gets != len(set.Shards) {
		t.Errorf("again: %+v, %d reads, %v", done, s.gets, err)
	}
	// An earlier run that was killed.
	_ = os.Mkdir(filepath.Join(dir, unpackFolder), 0o700)
	_ = os.WriteFile(filepath.Join(dir, unpackFolder, "7"), []byte("half"), 0o600)
	if err := os.Remove(filepath.Join(dir, "x/large.bin")); err != nil {
		t.Fatal(err)
	}
	if done, err = set.Unpack(t.Context(), dir, nil); err != nil || done.Kept != len(want)-1 {
		t.Errorf("one was lost: %+v, %v", done, err)
	}
	holds(t, dir, want)
	for _, other := range []string{"", "x"} {
		name := filepath.Join(dir, "x/empty")
		if other == "" {
			name = filepath.Join(dir, "x/large.bin")
			other = strings.Repeat("y", 2*unpackPiece+77)
		}
		was, _ := os.ReadFile(name)
		if err := os.WriteFile(name, []byte(other), 0o644); err != nil {
			t.Fatal(err)
		}
		if _, err := set.Unpack(t.Context(), dir, nil); err == nil ||
			!strings.Contains(err.Error(), name+" is there already") {
			t.Errorf("another file: %v", err)
		}
		if now, _ := os.ReadFile(name); string(now) != other {
			t.Error("it was overwritten")
		}
		_ = os.WriteFile(name, was, 0o644)
	}
}

// A byte that changed in the store is found, and leaves no file. A cancelled call leaves whole files only.
func TestUnpackVerifies(t *testing.T) {
	s, want, set := packed(t)
	dir := t.TempDir()
	s.onRead = func(o objstore.Object, p []byte, off int64) {
		if strings.HasSuffix(o.Key, ".tar") && len(p) > 0 {
			p[len(p)-1] ^= 1
		}
	}
	if _, err := set.Unpack(t.Context(), dir, nil); err == nil || !strings.Contains(err.Error(), "checksum") ||
		!strings.Contains(err.Error(), "out/shard-") {
		t.Errorf("damage: %v", err)
	}
	s.onRead = nil
	ctx, cancel := context.WithCancel(t.Context())
	if _, err := set.Unpack(ctx, dir, func(p Unpacked) {
		if p.Files > 30 {
			cancel()
		}
	}); err == nil {
		t.Log("all was done before the end")
	}
	cancel()
	if _, err := set.Unpack(t.Context(), dir, nil); err != nil {
		t.Fatal(err)
	}
	holds(t, dir, want)
}

// Foreign tars have no checksums, and names that must not be followed out of the folder.
func TestUnpackForeign(t *testing.T) {
	s := newStore()
	s.PutBytes("out/a.tar", makeTar(t, item{name: "./cat/1.jpg", size: 700}, item{name: "../evil", size: 3},
		item{name: "/etc/evil", size: 3},
		item{name: "link/evil", size: 3}, item{name: "dir", flag: tar.TypeSymlink},
		item{name: strings.Repeat("caption ", 32), size: 3}))
	set, err := Open(t.Context(), s, out, OpenOptions{})
	if err != nil {
		t.Fatal(err)
	}
	up := t.TempDir()
	dir := filepath.Join(up, "in")
	outside := filepath.Join(up, "outside")
	for _, d := range []string{dir, outside} {
		if err := os.Mkdir(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink(outside, filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	if _, err := set.Unpack(t.Context(), dir, nil); err == nil || !strings.Contains(err.Error(), "escapes") {
		t.Errorf("through a link: %v", err)
	}
	if err := os.Remove(filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if done, err := set.Unpack(t.Context(), dir, nil); err == nil ||
			!strings.Contains(err.Error(), `3 members have names`) || done.Files != 2 {
			t.Errorf("%+v, %v", done, err)
		}
	}
	holds(t, dir, map[string][]byte{"cat/1.jpg": bytesOf(0, 700), "link/evil": bytesOf(3, 3)})
	if fi, err := os.Stat(filepath.Join(dir, "cat/1.jpg")); err != nil || !fi.ModTime().Equal(time.Unix(1e9, 0)) {
		t.Errorf("%v, %v", fi, err)
	}
	if err := os.WriteFile(filepath.Join(dir, "link/evil"), []byte("abc"), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := set.Unpack(t.Context(), dir, nil); err == nil || !strings.Contains(err.Error(), "is there already") {
		t.Errorf("another file: %v", err)
	}
	if left, _ := os.ReadDir(outside); len(left) > 0 {
		t.Errorf("%v outside", left)
	}
	if _, err := os.Stat(filepath.Join(up, "evil")); err == nil {
		t.Error("a file outside")
	}
}
