package objstore_test

import (
	"context"
	"errors"
	"iter"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/cache/objstore/stores"
	"github.com/shoalfs/shoal/lab/rig/memstore"
)

func newDir(t testing.TB) (*objstore.Dir, string) {
	t.Helper()
	root := t.TempDir()
	d, err := objstore.NewDir(root)
	if err != nil {
		t.Fatal(err)
	}
	return d, root
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func keysOf(objects []objstore.Object) []string {
	var keys []string
	for _, o := range objects {
		keys = append(keys, o.Key)
	}
	return keys
}

// listAll returns what a listing yields before it ends, or fails.
func listAll(seq iter.Seq2[objstore.Object, error]) (list []objstore.Object, err error) {
	for o, err := range seq {
		if err != nil {
			return list, err
		}
		list = append(list, o)
	}
	return list, nil
}

// TestDirKinds: links to files and folders are followed, outside of the folder if that is asked for; loops and
// everything else are left out, and counted. A folder that holds nothing else is listed as an empty one.
func TestDirKinds(t *testing.T) {
	_, root := newDir(t)
	s, _, err := stores.Open(t.Context(), root, stores.Options{Store: objstore.StoreOptions{LinksOutside: true}})
	must(t, err)
	d := s.(*objstore.Dir)
	outside := t.TempDir()
	must(t, os.WriteFile(outside+"/f", []byte("outside"), 0o644))
	must(t, os.MkdirAll(root+"/d/sub", 0o755))
	must(t, os.WriteFile(root+"/d/file", []byte("x"), 0o644))
	must(t, os.WriteFile(root+"/d/.shoal-put-123", []byte("unfinished"), 0o644))
	must(t, os.Symlink(outside+"/f", root+"/d/link"))
	must(t, os.Symlink(outside, root+"/folder-link"))
	must(t, os.Symlink("nowhere", root+"/dangling"))
	must(t, os.Symlink(root, root+"/d/sub/loop"))
	must(t, os.Symlink("self", root+"/self"))
	must(t, syscall.Mkfifo(root+"/pipe", 0o644))
	must(t, os.Symlink("pipe", root+"/linked-pipe"))

	want := []string{"d/file", "d/link", "d/sub/", "folder-link/f"}
	if got := keysOf(memstore.Collect(t, d.List(t.Context(), "", ""))); !slices.Equal(got, want) {
		t.Errorf("List: %q, want %q", got, want)
	}
	if l := d.TakeLeftOut(); l.Dangling != 2 || l.Special != 2 ||
		!slices.Equal(l.Examples, []string{"dangling", "linked-pipe", "pipe", "self"}) {
		t.Errorf("left out: %+v", l)
	}
	got := keysOf(memstore.Collect(t, objstore.ListParallel(t.Context(), d, "", 4, nil)))
	slices.Sort(got)
	if !slices.Equal(got, want) {
		t.Errorf("ListParallel: %q, want %q", got, want)
	}
	if l := d.TakeLeftOut(); l.Dangling != 2 || l.Special != 2 {
		t.Errorf("left out of a parallel listing: %+v", l)
	}
	// Nobody asked for what lies outside.
	strict, err := objstore.NewDir(root)
	must(t, err)
	for _, prefix := range []string{"", "d/"} {
		if _, err := listAll(strict.List(t.Context(), prefix, "")); objstore.KindOf(err) != objstore.KindInvalid ||
			!strings.Contains(err.Error(), outside) || !strings.Contains(err.Error(), "--store links-outside") {
			t.Errorf("links that lead out: %v", err)
		}
	}
	must(t, os.Remove(root+"/d/link"))
	if got, err := listAll(strict.List(t.Context(), "d/", "")); err != nil ||
		!slices.Equal(keysOf(got), []string{"d/file", "d/sub/"}) {
		t.Errorf("without them: %v, %v", got, err)
	}
	must(t, os.Symlink(outside+"/f", root+"/d/link"))
	for _, prefix := range []string{"d/sub/loop/", "d/sub/loop/d/", "self/"} {
		if got := memstore.Collect(t, d.List(t.Context(), prefix, "")); len(got) != 0 {
			t.Errorf("List(%q): %v: a link loop was followed", prefix, got)
		}
	}
	o, err := d.Stat(t.Context(), "d/link")
	must(t, err)
	p := make([]byte, 7)
	if err := d.ReadAt(t.Context(), o, p, 0); err != nil || string(p) != "outside" {
		t.Errorf("read through a link: %q, %v", p, err)
	}
	for _, key := range []string{"pipe", "dangling", "d", ".", "self", "d/file/x"} {
		if _, err := d.Stat(t.Context(), key); objstore.KindOf(err) != objstore.KindNotFound {
			t.Errorf("Stat(%q): %v", key, err)
		}
		if err := d.ReadAt(t.Context(), objstore.Object{Key: key, Size: 1, ETag: "e"}, make([]byte, 1),
			0); objstore.KindOf(err) != objstore.KindNotFound {
			t.Errorf("ReadAt(%q): %v", key, err)
		}
	}
}

// TestDirChanges: what a version is made of.
func TestDirChanges(t *testing.T) {
	d, root := newDir(t)
	path := root + "/f"
	change := map[string]func(){
		"rewritten": func() {
			must(t, os.WriteFile(path, []byte("9876543210"), 0o644))
			must(t, os.Chtimes(path, time.Time{}, time.Now().Add(time.Second)))
		},
		"touched": func() { must(t, os.Chtimes(path, time.Time{}, time.Unix(1, 0))) },
		"truncated, time put back": func() {
			fi, err := os.Stat(path)
			must(t, err)
			must(t, os.Truncate(path, 5))
			must(t, os.Chtimes(path, time.Time{}, fi.ModTime()))
		},
		"replaced, time put back": func() {
			fi, err := os.Stat(path)
			must(t, err)
			must(t, os.WriteFile(path+".new", []byte("9876543210"), 0o644))
			must(t, os.Chtimes(path+".new", time.Time{}, fi.ModTime()))
			must(t, os.Rename(path+".new", path))
		},
	}
	for name, f := range change {
		must(t, os.WriteFile(path, []byte("0123456789"), 0o644))
		o, err := d.Stat(t.Context(), "f")
		must(t, err)
		f()
		if err := d.ReadAt(t.Context(), o, make([]byte, 10), 0); objstore.KindOf(err) != objstore.KindChanged {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// hookContext calls hook when its error is asked for the nth time: between two steps of a long read.
type hookContext struct {
	context.Context
	n    int
	hook func()
}

func (c *hookContext) Err() error {
	if c.n--; c.n == 0 {
		c.hook()
	}
	return c.Context.Err()
}

// TestDirTornRead: a file that is written to while it is read is seen, though it was the right
// version when the read began.
func TestDirTornRead(t *testing.T) {
	d, root := newDir(t)
	path := root + "/f"
	const size = 20 << 20
	for name, change := range map[string]func(){
		"written": func() {
			f, err := os.OpenFile(path, os.O_WRONLY, 0)
			must(t, err)
			_, err = f.WriteAt([]byte("changed"), 0)
			must(t, errors.Join(err, f.Close()))
			must(t, os.Chtimes(path, time.Time{}, time.Now().Add(time.Second))) // whatever the clock's tick
		},
		"truncated": func() { must(t, os.Truncate(path, 1<<20)) },
	} {
		must(t, os.WriteFile(path, make([]byte, size), 0o644))
		o, err := d.Stat(t.Context(), "f")
		must(t, err)
		ctx := &hookContext{t.Context(), 3, change}
		if err := d.ReadAt(ctx, o, make([]byte, size), 0); objstore.KindOf(err) != objstore.KindChanged {
			t.Errorf("%s during the read: %v", name, err)
		}
		if ctx.n > 0 {
			t.Errorf("%s: the read took fewer steps than the test thinks", name)
		}
	}
}

func TestDirErrors(t *testing.T) {
	missing, err := objstore.NewDir(filepath.Join(t.TempDir(), "none"))
	must(t, err)
	if err := missing.Check(t.Context()); objstore.KindOf(err) != objstore.KindNotFound ||
		!strings.Contains(err.Error(), "check the path") {
		t.Errorf("Check of a missing folder: %v", err)
	}
	for _, err := range missing.List(t.Context(), "", "") {
		if objstore.KindOf(err) != objstore.KindNotFound {
			t.Errorf("List of a missing folder: %v", err)
		}
	}
	d, _ := newDir(t)
	must(t, d.Check(t.Context()))
}

// drawTree puts a random tree, without keys that are at once file and folder, into both stores.
func drawTree(rt *rapid.T, put func(key string)) {
	keys := rapid.SliceOfNDistinct(rapid.StringMatching(`([ab]-?/){0,5}[ab.-]{1,3}`), 0, 40, rapid.ID).Draw(rt, "keys")
	taken := map[string]bool{}
	for _, k := range keys {
		// "." and ".." are no file names; a file cannot be a folder too.
		ok := !taken[k+"/"] && !slices.Contains([]string{".", ".."}, k[strings.LastIndexByte(k, '/')+1:])
		for i := range k {
			if k[i] == '/' && taken[k[:i]] {
				ok = false
			}
		}
		if !ok {
			continue
		}
		taken[k] = true
		for i := range k {
			if k[i] == '/' {
				taken[k[:i+1]] = true
			}
		}
		put(k)
	}
}

// TestDirModel: listings of a folder equal those of the model, which has a marker for each empty folder, for any
// tree, prefix and start.
func TestDirModel(t *testing.T) {
	base := t.TempDir()
	rapid.Check(t, func(rt *rapid.T) {
		root, err := os.MkdirTemp(base, "")
		must(t, err)
		defer os.RemoveAll(root)
		d, err := objstore.NewDir(root)
		must(t, err)
		m := memstore.New()
		drawTree(rt, func(k string) {
			must(t, os.MkdirAll(filepath.Dir(root+"/"+k), 0o755))
			must(t, os.WriteFile(root+"/"+k, nil, 0o644))
			m.PutBytes(k, nil)
		})
		for _, k := range rapid.SliceOfN(rapid.StringMatching(`([ab]-?/){1,4}`), 0, 5).Draw(rt, "folders") {
			_ = os.MkdirAll(root+"/"+k, 0o755) // a file may be in the way
		}
		must(t, filepath.WalkDir(root, func(path string, _ os.DirEntry, _ error) error {
			if entries, err := os.ReadDir(path); err == nil && len(entries) == 0 && path != root {
				m.PutBytes(path[len(root)+1:]+"/", nil)
			}
			return nil
		}))
		prefix := rapid.StringMatching(`([ab]-?/){0,2}[ab]?-?`).Draw(rt, "prefix")
		after := rapid.StringMatching(`([ab]-?/){0,3}[ab.-]{0,2}`).Draw(rt, "after")
		if got, want := keysOf(memstore.Collect(rt, d.List(t.Context(), prefix, ""))),
			keysOf(memstore.Collect(rt, m.List(t.Context(), prefix, ""))); !slices.Equal(got, want) {
			rt.Fatalf("List(%q)\n got %q\nwant %q", prefix, got, want)
		}
		if got, want := keysOf(memstore.Collect(rt, d.List(t.Context(), prefix, after))),
			keysOf(memstore.Collect(rt, m.List(t.Context(), prefix, after))); !slices.Equal(got, want) {
			rt.Fatalf("List(%q, %q)\n got %q\nwant %q", prefix, after, got, want)
		}
		level := prefix[:strings.LastIndexByte(prefix, '/')+1]
		got, want := keysOf(memstore.Collect(rt, d.ListLevel(t.Context(), level))),
			keysOf(memstore.Collect(rt, m.ListLevel(t.Context(), level)))
		slices.Sort(got)
		slices.Sort(want)
		if !slices.Equal(got, want) {
			rt.Fatalf("ListLevel(%q)\n got %q\nwant %q", level, got, want)
		}
		got, want = keysOf(memstore.Collect(rt, objstore.ListParallel(t.Context(), d, level, 2, nil))),
			keysOf(memstore.Collect(rt, m.List(t.Context(), level, "")))
		slices.Sort(got)
		if !slices.Equal(got, want) {
			rt.Fatalf("ListParallel(%q)\n got %q\nwant %q", level, got, want)
		}
	})
}
