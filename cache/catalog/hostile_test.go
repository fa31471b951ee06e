package catalog

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/cache/objstore/stores"
	"github.com/shoalfs/shoal/lab/rig/memstore"
)

// A folder that no listing can look into, since its name is not UTF-8, is counted as one key, wherever it is.
func TestHostileFolder(t *testing.T) {
	root := t.TempDir()
	for _, folder := range []string{"dog", "caf\xe9", "dog/\xe9"} {
		if err := os.MkdirAll(filepath.Join(root, folder), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(root, folder, "1.jpg"), []byte("x"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	s, _, err := stores.Open(t.Context(), root, stores.Options{})
	if err != nil {
		t.Fatal(err)
	}
	m, err := Build(objstore.ListParallel(t.Context(), s, "", 2, nil), BuildOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if m.Len() != 1 || m.Skipped().Hostile != 2 {
		t.Errorf("%d files, skipped %+v; want the two folders whose names are not UTF-8 counted", m.Len(), m.Skipped())
	}
}

// TestHostileKeys is the table of the package comment: what becomes of each key that a file system cannot
// show. Whatever the class, the rest of the listing is shown, and every key that was listed is either a
// file or counted.
func TestHostileKeys(t *testing.T) {
	const hostile, shadowed, marker, folder, shown, merged = "hostile", "shadowed", "marker", "folder",
		"shown", "merged"
	name255, name256 := strings.Repeat("n", 255), strings.Repeat("n", 256)
	path := func(n int) string { // of n bytes
		p := strings.Repeat("d/", n/2)
		return p[:n-1] + "f"
	}
	type row struct {
		class, key string
		size       int64
		also       string // a key beside it, if it takes two
		want       string
		why        string
	}
	rows := []row{
		{"double slash", "a//b", 1, "", hostile, "empty path component"},
		{"double slash at the top", "/b", 1, "", hostile, "empty path component"},
		{"double slash at the end", "a//", 1, "", hostile, "empty path component"},
		{"file beside folder", "a", 1, "a/b", shadowed, "a folder has the same name"},
		{"file beside folder, below", "x/a", 1, "x/a/b/c", shadowed, "a folder has the same name"},
		{"empty file beside folder", "a", 0, "a/b", shadowed, "a folder has the same name"},
		{"folder marker", "a/", 0, "", folder, ""},
		{"folder marker below", "a/b/c/", 0, "", folder, ""},
		{"folder marker beside what it holds", "a/", 0, "a/b", folder, ""},
		{"folder marker beside a file", "a/", 0, "a", marker, ""},
		{"folder marker below a file", "a/b/", 0, "a", marker, ""},
		{"folder marker with two slashes", "a//", 0, "", marker, ""},
		{"folder marker that is hostile", "a/../", 0, "", marker, ""},
		{"folder marker of the control folder", ".shoal/", 0, "", marker, ""},
		{"folder marker with content", "a/", 1, "", hostile, "empty path component"},
		{"marker of the prefix", "", 0, "", marker, ""},
		{"content at the prefix", "", 1, "", hostile, "empty path component"},
		{"dot", "a/./b", 1, "", hostile, "path component ."},
		{"dot at the end", "a/.", 1, "", hostile, "path component ."},
		{"dot dot", "a/../b", 1, "", hostile, "path component .."},
		{"dot dot at the top", "../b", 1, "", hostile, "path component .."},
		{"dot dot alone", "..", 1, "", hostile, "path component .."},
		{"long name", "a/" + name256, 1, "", hostile, "name over 255 bytes"},
		{"long folder", name256 + "/b", 1, "", hostile, "name over 255 bytes"},
		{"long name of few runes", "a/" + strings.Repeat("é", 128), 1, "", hostile, "name over 255 bytes"},
		{"long path", path(4096), 1, "", hostile, "path over 4095 bytes"},
		{"huge key", "a/" + strings.Repeat("x/", 1<<20), 1, "", hostile, "path over 4095 bytes"},
		{"NUL", "a/b\x00c", 1, "", hostile, "NUL in the name"},
		{"NUL alone", "\x00", 1, "", hostile, "NUL in the name"},
		{"invalid UTF-8", "a/\xff", 1, "", hostile, "not UTF-8"},
		{"invalid UTF-8 in a folder", "\xc3/b", 1, "", hostile, "not UTF-8"},
		{"surrogate", "a/\xed\xa0\x80", 1, "", hostile, "not UTF-8"},
		{"control folder", ".shoal/stats", 1, "", hostile, "the name .shoal is reserved"},
		{"control file", ".shoal", 1, "", hostile, "the name .shoal is reserved"},
		{"listed twice", "a/b", 1, "a/b", merged, ""},

		{"longest name", "a/" + name255, 1, "", shown, ""},
		{"longest path", path(4095), 1, "", shown, ""},
		{"dots in a name", "..a/...", 1, "", shown, ""},
		{".shoal below", "a/.shoal/b", 1, "", shown, ""},
		{"control characters", "a/\n\t\x7f\x1b[31m", 1, "", shown, ""},
		{"backslash", `a\b/c`, 1, "", shown, ""},
		{"replacement character", "a/\ufffd", 1, "", shown, ""},
		{"two forms of one letter", "a/\u00e9", 1, "a/e\u0301", shown, ""},
		{"case", "a/B", 1, "a/b", shown, ""},
		{"spaces", " / ", 1, "", shown, ""},
	}
	count := func(s Skipped) map[string]int {
		return map[string]int{hostile: s.Hostile, shadowed: s.Shadowed, marker: s.Markers, shown: 0, merged: 0}
	}
	var all []objstore.Object
	total := make(map[string]int)
	for _, r := range rows {
		t.Run(r.class, func(t *testing.T) {
			for _, prefix := range []string{"", "p/q/"} {
				if prefix == "" && r.key == "" {
					continue // an object has a key
				}
				good := objstore.Object{Key: prefix + "good/file", Size: 5, ETag: "g"}
				objs := []objstore.Object{good, {Key: prefix + r.key, Size: r.size, ETag: "e"}}
				if r.also != "" {
					objs = append(objs, objstore.Object{Key: prefix + r.also, Size: 1, ETag: "e"})
				}
				m, err := Build(memstore.Listing(objs...), BuildOptions{Prefix: prefix})
				if err != nil {
					t.Fatal(err)
				}
				got := count(m.Skipped())
				listed := len(objs)
				if r.want == merged {
					listed--
				}
				if lost := listed - m.Len() - m.Skipped().Total() - m.Skipped().Markers; lost != 0 {
					t.Errorf("%d of %d keys are neither shown nor counted", lost, listed)
				}
				for what, n := range got {
					want := 0
					if what == r.want && what != shown && what != merged || what == marker && r.want == folder {
						want = 1
					}
					if n != want {
						t.Errorf("%d keys are %s, want %d", n, what, want)
					}
				}
				if n, ok := m.Find("good/file"); !ok || n.IsDir {
					t.Error("the file beside it is gone")
				}
				n, ok := m.Find(r.key)
				switch {
				case (r.want == shown || r.want == merged) && (!ok || n.IsDir || m.Object(n.Index).Key != prefix+r.key):
					t.Error("it is not shown")
				case r.want == shadowed && (!ok || !n.IsDir):
					t.Error("the folder is not shown")
				case r.want == folder || r.want == marker && r.key != "":
					if n, ok := m.Find(strings.TrimSuffix(r.key, "/")); (ok && n.IsDir) != (r.want == folder) {
						t.Errorf("found as %v, %v", n, ok)
					}
				case (r.want == hostile) && ok && r.key != "":
					t.Error("it is shown")
				}
				if r.why == "" {
					if e := m.Skipped().Examples; len(e) != 0 {
						t.Errorf("examples %q", e)
					}
				} else if e := m.Skipped().Examples; len(e) != 1 || !strings.HasSuffix(e[0], ": "+r.why) ||
					len(e[0]) > 1500 {
					t.Errorf("examples %.1000q, want %s", e, r.why)
				}
				// The counts are kept with the manifest.
				if again, err := parse(m.data); err != nil || again.Skipped().Total() != m.Skipped().Total() {
					t.Error(err)
				}
			}
		})
	}
	// All of them in one listing.
	seen := make(map[string]bool)
	for i, r := range rows {
		if r.want == shown || r.want == merged || r.key == "a" || r.key == "x/a" || seen[r.key] {
			continue
		}
		seen[r.key] = true
		if r.key == "" {
			continue
		}
		total[r.want]++
		all = append(all, objstore.Object{Key: r.key, Size: rows[i].size, ETag: "e"})
	}
	all = append(all, object("good"))
	m, err := Build(memstore.Listing(all...), BuildOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if s := m.Skipped(); s.Hostile != total[hostile] || s.Markers != total[marker]+total[folder] || m.Len() != 1 ||
		len(s.Examples) != maxExamples {
		t.Errorf("%d files, %+v; want %v", m.Len(), s, total)
	}
}
