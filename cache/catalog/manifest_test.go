package catalog

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"flag"
	"fmt"
	"iter"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/cache/segment"
	"github.com/shoalfs/shoal/lab/rig/memstore"
)

var update = flag.Bool("update", false, "write the golden files")

func object(key string) objstore.Object {
	return objstore.Object{Key: key, Size: int64(len(key)), ETag: "tag of " + key}
}

func mustBuild(t interface {
	Helper()
	Fatal(args ...any)
}, o BuildOptions, keys ...string) *Manifest {
	t.Helper()
	var objs []objstore.Object
	for _, k := range keys {
		objs = append(objs, object(k))
	}
	m, err := Build(memstore.Listing(objs...), o)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func paths(m *Manifest) []string {
	p := make([]string, m.Len())
	for f := range p {
		p[f] = m.Path(f)
	}
	return p
}

func TestSampleOrder(t *testing.T) {
	m := mustBuild(t, BuildOptions{},
		"root.txt", "a/b/x.jpg", "a/z.jpg", "c/s/y/1", "c/s-x/1", "c/s/2", "a-b/1", "a/b-c/1", "ab/1", "A/1", "é/1",
		"z/1", "c/s/Z", "c/10", "c/9", "\U0001F600/1", "\uffff/1")
	want := []string{
		"root.txt", "A/1", "a/z.jpg", "a/b/x.jpg", "a/b-c/1", "a-b/1", "ab/1", "c/10", "c/9", "c/s/2", "c/s/Z",
		"c/s-x/1", "c/s/y/1", "z/1", "é/1", "\uffff/1", "\U0001F600/1",
	}
	if got := paths(m); !slices.Equal(got, want) {
		t.Errorf("got  %q\nwant %q", got, want)
	}
}

// TestSampleOrderIsImageFolders compares with torchvision itself on real folders.
func TestSampleOrderIsImageFolders(t *testing.T) {
	root := t.TempDir()
	keys := []string{
		"stray.jpg", ".DS_Store",
		"a/z.jpg", "a/b/x.jpg", "a/b/deep/er/1.PNG", "a/.DS_Store", "a/notes.txt", "a/b-c/1.jpeg", "a/B/1.webp",
		"a-b/1.jpg", "a.b/1.jpg", "ab/1.tif", "A/1.TIFF", "c/s/y/1.jpg", "c/s-x/1.jpg", "c/s.x/1.jpg", "c/s/2.jpg",
		"c/10.jpg", "c/9.jpg", "c/9.JPG", "c/009.jpg",
		"é/ü.jpg", "e\u0301/1.jpg", "日本/語.jpg", "日本/語/1.jpg", "\U0001F600/1.jpg", "\uffee/1.jpg", "with space/a b.jpg",
		"-/1.jpg", "_/1.jpg", "0/.jpg", "0/x.jpg.txt", "0/x.txt.jpg",
		"0/a.gif", "0/kelvin.\u212Apg", "0/long.tıf", "0/K.PGM", "0/b.bmp", "0/p.ppm",
	}
	folders := []string{"Empty/", "a/none/", "b/x/y/", "zz/"} // without files: classes too
	for _, k := range append(folders, keys...) {
		dir, name := path.Split(k)
		if err := os.MkdirAll(filepath.Join(root, dir), 0o777); err != nil {
			t.Fatal(err)
		}
		if name == "" {
			continue
		}
		if err := os.WriteFile(filepath.Join(root, k), nil, 0o666); err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.Command("/usr/bin/python3", "-c", `
import sys, os, warnings
warnings.simplefilter("ignore")
from torchvision.datasets.folder import IMG_EXTENSIONS, find_classes, make_dataset
root = sys.argv[1]
classes, number = find_classes(root)
for empty in "Empty", "b", "zz": # what allow_empty does, which old ones lack
    del number[empty]
print(*classes, sep="\n")
print()
for path, label in make_dataset(root, number, IMG_EXTENSIONS):
    print(label, os.path.relpath(path, root), sep="\t")
`, root)
	cmd.Env = append(os.Environ(), "PYTHONIOENCODING=utf-8", "LC_ALL=C.UTF-8")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v: %s", err, stderr.Bytes())
	}
	var objs []objstore.Object
	for _, k := range keys {
		objs = append(objs, object(k))
	}
	for _, k := range folders {
		objs = append(objs, objstore.Object{Key: k, ETag: "e"})
	}
	m, err := Build(memstore.Listing(objs...), BuildOptions{})
	if err != nil {
		t.Fatal(err)
	}
	match, err := Match("images")
	if err != nil {
		t.Fatal(err)
	}
	s := m.Samples(match)
	var b strings.Builder
	for _, c := range s.Classes() {
		fmt.Fprintln(&b, c)
	}
	fmt.Fprintln(&b)
	for i := range s.Len() {
		fmt.Fprintf(&b, "%d\t%s\n", s.Label(i), m.Path(s.File(i)))
	}
	if b.String() != string(out) {
		t.Errorf("got:\n%s\ntorchvision has:\n%s", b.String(), out)
	}
	if s.Len() < 25 {
		t.Errorf("only %d samples", s.Len())
	}
}

// modelFile is the model's file; the model is a sorted list.
type modelFile struct{ class, dir, name, path string }

// TestManifestModel compares all of a manifest with a list of paths.
func TestManifestModel(t *testing.T) {
	component := rapid.SampledFrom([]string{"a", "b", "a-", "a.", "A", "é", "z", "0", "10", "9"})
	rapid.Check(t, func(t *rapid.T) {
		list := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) string {
			return strings.Join(rapid.SliceOfN(component, 1, 4).Draw(t, "path"), "/")
		}), 1, 40).Draw(t, "paths")
		prefix := rapid.SampledFrom([]string{"", "p/", "a/b/"}).Draw(t, "prefix")
		markers := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) string {
			return strings.Join(rapid.SliceOfN(component, 1, 4).Draw(t, "path"), "/")
		}), 0, 10).Draw(t, "markers")

		isDir := map[string]bool{"": true}
		for _, p := range list {
			for i := range len(p) {
				if p[i] == '/' {
					isDir[p[:i]] = true
				}
			}
		}
		var want []modelFile
		shadowed := 0
		seen := make(map[string]bool)
		var objs []objstore.Object
		for _, p := range list {
			o := object(prefix + p)
			o.ModTime = time.Unix(int64(len(p)), 7).UTC()
			objs = append(objs, o)
			if seen[p] {
				continue
			}
			seen[p] = true
			if isDir[p] {
				shadowed++
				continue
			}
			f := modelFile{path: p, name: p}
			if i := strings.LastIndexByte(p, '/'); i >= 0 {
				f.dir, f.name = p[:i], p[i+1:]
				f.class, _, _ = strings.Cut(p, "/")
			}
			want = append(want, f)
		}
		// A marker makes its folder and those above it, unless one of them has the name of a file.
		holding := len(isDir)
		for _, p := range markers {
			objs = append(objs, objstore.Object{Key: prefix + p + "/", ETag: "e"})
			var above []string
			for i := range p + "/" {
				if (p + "/")[i] == '/' {
					above = append(above, p[:i])
				}
			}
			if slices.ContainsFunc(above, func(d string) bool { return seen[d] && !isDir[d] }) {
				continue
			}
			for _, d := range above {
				isDir[d] = true
			}
		}
		slices.SortFunc(want, func(x, y modelFile) int {
			return cmp.Or(cmp.Compare(x.class, y.class), cmp.Compare(x.dir, y.dir), cmp.Compare(x.name, y.name))
		})
		m, err := Build(memstore.Listing(objs...), BuildOptions{Prefix: prefix})
		if err != nil {
			t.Fatal(err)
		}
		if err := m.Verify(); err != nil {
			t.Fatal(err)
		}

		// Without markers it is the same dataset.
		bare, err := Build(memstore.Listing(slices.DeleteFunc(slices.Clone(objs), func(o objstore.Object) bool {
			return o.Size == 0
		})...), BuildOptions{Prefix: prefix})
		if err != nil {
			t.Fatal(err)
		}
		if bare.Version() != m.Version() || bare.FileName() != m.Version() ||
			(m.FileName() == m.Version()) != (len(isDir) == holding) || m.Skipped().Markers != len(markers) {
			t.Fatalf("version %s, file %s, %+v; without markers %s, file %s",
				m.Version(), m.FileName(), m.Skipped(), bare.Version(), bare.FileName())
		}

		// The order of the listing makes no difference; double keys and examples aside.
		shuffled := rapid.Permutation(objs).Draw(t, "order")
		m2, err := Build(memstore.Listing(shuffled...), BuildOptions{Prefix: prefix})
		if err != nil {
			t.Fatal(err)
		}
		if m2.FileName() != m.FileName() || !slices.Equal(paths(m2), paths(m)) {
			t.Fatal("the order of the listing matters")
		}

		h := sha256.New()
		var bytesSum int64
		if m.Len() != len(want) {
			t.Fatalf("%d files, want %d", m.Len(), len(want))
		}
		for f, w := range want {
			o := m.Object(f)
			if o != (objstore.Object{Key: prefix + w.path, Size: int64(len(prefix + w.path)),
				ETag: "tag of " + prefix + w.path, ModTime: time.Unix(int64(len(w.path)), 7).UTC()}) {
				t.Fatalf("file %d: %+v", f, o)
			}
			if m.Path(f) != w.path || m.Name(f) != w.name || m.DirPath(m.DirOf(f)) != w.dir ||
				string(m.AppendPath([]byte("x"), f)) != "x"+w.path {
				t.Fatalf("file %d is %q in %q, want %+v", f, m.Path(f), m.DirPath(m.DirOf(f)), w)
			}
			if sum := sha256.Sum256([]byte(w.path)); m.PathHash(f) != [16]byte(sum[:16]) {
				t.Fatalf("file %d: hash %x", f, m.PathHash(f))
			}
			if m.ID(f) != segment.IDOf(m.PathHash(f), o.Size, o.ETag) {
				t.Fatalf("file %d: ID %x", f, m.ID(f))
			}
			if n, ok := m.Find(w.path); !ok || n != (Node{Index: f}) {
				t.Fatalf("%q found as %v, %v", w.path, n, ok)
			}
			for _, bad := range []string{"/" + w.path, w.path + "/", w.path + "/x", w.path + "\x00"} {
				if n, ok := m.Find(bad); ok {
					t.Fatalf("%q found as %v", bad, n)
				}
			}
			bytesSum += o.Size
			var b []byte
			b = binary.LittleEndian.AppendUint32(b, uint32(len(w.path)))
			b = append(b, w.path...)
			b = binary.LittleEndian.AppendUint64(b, uint64(o.Size))
			b = binary.LittleEndian.AppendUint32(b, uint32(len(o.ETag)))
			h.Write(append(b, o.ETag...))
		}
		if m.Version() != hex.EncodeToString(h.Sum(nil)) || m.Bytes() != bytesSum || m.Skipped().Shadowed != shadowed {
			t.Fatalf("version %s, %d bytes, %+v", m.Version(), m.Bytes(), m.Skipped())
		}

		if m.Dirs() != len(isDir) {
			t.Fatalf("%d directories, want %d", m.Dirs(), len(isDir))
		}
		files, dirs := 0, 1
		for d := range m.Dirs() {
			dir, p := m.Dir(d), m.DirPath(d)
			if !isDir[p] {
				t.Fatalf("directory %d is %q", d, p)
			}
			if n, ok := m.Find(p); !ok || n != (Node{IsDir: true, Index: d}) {
				t.Fatalf("%q found as %v, %v", p, n, ok)
			}
			if dir.FirstDir != dirs {
				t.Fatalf("subdirectories of %d begin at %d, want %d", d, dir.FirstDir, dirs)
			}
			dirs = dir.EndDir
			files += dir.EndFile - dir.FirstFile
			for f := dir.FirstFile; f < dir.EndFile; f++ {
				if m.DirOf(f) != d {
					t.Fatalf("file %d is in directory %d and in the range of %d", f, m.DirOf(f), d)
				}
			}
			prev := ""
			for c := dir.FirstDir; c < dir.EndDir; c++ {
				child := m.Dir(c)
				if child.Parent != d || child.Name <= prev {
					t.Fatalf("directory %d: %+v after %q", c, child, prev)
				}
				prev = child.Name
				if n, ok := m.Lookup(d, child.Name); !ok || n != (Node{IsDir: true, Index: c}) {
					t.Fatalf("%q in %d found as %v, %v", child.Name, d, n, ok)
				}
			}
		}
		if files != m.Len() || dirs != m.Dirs() {
			t.Fatalf("directories hold %d files and %d directories", files, dirs)
		}

		match := &Filter{match: func(p []byte) bool { return len(p)%3 != 0 }, path: rapid.Bool().Draw(t, "by path")}
		all := rapid.Bool().Draw(t, "all")
		if all {
			match.match = func([]byte) bool { return true }
		}
		s := m.Samples(match)
		n := 0
		var classes []string
		if slices.ContainsFunc(want, func(w modelFile) bool { return w.class != "" }) {
			for d := range isDir {
				if d != "" && !strings.Contains(d, "/") {
					classes = append(classes, d)
				}
			}
			slices.Sort(classes)
		}
		if !slices.Equal(s.Classes(), classes) {
			t.Fatalf("classes %q, want %q", s.Classes(), classes)
		}
		for f, w := range want {
			i, ok := s.Sample(f)
			numbered := w.class != "" || len(classes) == 0 // no folder holds a file
			if ok != (numbered && match.Match(w.path)) ||
				ok && (i != n || s.File(i) != f || s.Label(i) != slices.Index(classes, w.class)) {
				t.Fatalf("file %d (%q): sample %d, %v; want %d", f, w.path, i, ok, n)
			}
			if ok {
				n++
			}
		}
		if s.Len() != n || all && s.list != nil {
			t.Fatalf("%d samples, want %d; listed: %v", s.Len(), n, s.list != nil)
		}
	})
}

func TestBuildSkips(t *testing.T) {
	long := strings.Repeat("n", 255)
	var objs []objstore.Object
	for _, k := range []string{
		"p/ok/1", "p/ok/" + long, "p/..data/...", "p/ok/.shoal", "p/back\\slash", "p/new\nline",
		// hostile:
		"p//1", "p/a//b", "p/a/../b", "p/./b", "p/a/..", "p/ok/" + long + "n", "p/nul\x00", "p/bad\xff", "p/.shoal",
		"p/.shoal/plan", "p/" + strings.Repeat("d/", 2048) + "f",
		// shadowed:
		"p/f", "p/f/g", "p/f/g/h",
	} {
		objs = append(objs, object(k))
	}
	for _, k := range []string{"p/", "p/ok/", "p/empty/", "p//"} {
		objs = append(objs, objstore.Object{Key: k})
	}
	objs = append(objs, objstore.Object{Key: "p/sized/", Size: 3, ETag: "e"})
	m, err := Build(memstore.Listing(objs...), BuildOptions{Prefix: "p/"})
	if err != nil {
		t.Fatal(err)
	}
	got := m.Skipped()
	if got.Markers != 4 || got.Hostile != 12 || got.Shadowed != 2 || got.Total() != 14 || len(got.Examples) != 14 {
		t.Errorf("%+v", got)
	}
	if !slices.Contains(got.Examples, `"p/a/../b": path component ..`) ||
		!slices.Contains(got.Examples, `"p/f": a folder has the same name`) {
		t.Errorf("examples %q", got.Examples)
	}
	want := []string{"back\\slash", "new\nline", "..data/...", "f/g/h", "ok/.shoal", "ok/1", "ok/" + long}
	if p := paths(m); !slices.Equal(p, want) {
		t.Errorf("got %q", p)
	}
	// What was skipped survives the file.
	path, err := m.Save(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	loaded, err := Load(path)
	if err != nil {
		t.Fatal(err)
	}
	defer loaded.Close()
	if !reflect.DeepEqual(loaded.Skipped(), got) {
		t.Errorf("loaded %+v", loaded.Skipped())
	}
}

func TestBuildErrors(t *testing.T) {
	at := time.Unix(1700000000, 5)
	listing := errors.New("access denied")
	for name, tt := range map[string]struct {
		objs iter.Seq2[objstore.Object, error]
		o    BuildOptions
		want []string
	}{
		"empty": {memstore.Listing(), BuildOptions{Prefix: "train/"},
			[]string{`no objects under "train/"`, "check bucket and prefix"}},
		"nothing to show": {memstore.Listing(objstore.Object{Key: "a/"}, object("b//c")), BuildOptions{},
			[]string{"no objects", "1 cannot", "b//c"}},
		"no ETag": {memstore.Listing(objstore.Object{Key: "a/b", ModTime: at}), BuildOptions{},
			[]string{`"a/b"`, "no ETag"}},
		"changed": {memstore.Listing(object("a/b"), objstore.Object{Key: "a/b", Size: 3, ETag: "x"}),
			BuildOptions{}, []string{`"a/b"`, "list again"}},
		"prefix":       {memstore.Listing(object("a/b")), BuildOptions{Prefix: "a"}, []string{`"a"`, "slash"}},
		"other prefix": {memstore.Listing(object("a/b")), BuildOptions{Prefix: "b/"}, []string{`"a/b"`, `"b/"`}},
		"size": {memstore.Listing(objstore.Object{Key: "a", Size: -1, ETag: "e"}), BuildOptions{},
			[]string{"size of -1"}},
		"huge size": {memstore.Listing(objstore.Object{Key: "a", Size: 1 << 62, ETag: "e"}), BuildOptions{},
			[]string{"size of 4611686018427387904"}},
		"long ETag": {memstore.Listing(objstore.Object{Key: "a", Size: 1, ETag: strings.Repeat("e", 1025)}),
			BuildOptions{}, []string{"ETag of 1025"}},
		"listing": {func(yield func(objstore.Object, error) bool) {
			yield(objstore.Object{}, listing)
		}, BuildOptions{}, []string{"access denied"}},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := Build(tt.objs, tt.o)
			if err == nil {
				t.Fatal("no error")
			}
			for _, w := range tt.want {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("%v: lacks %q", err, w)
				}
			}
		})
	}

	if !mustBuild(t, BuildOptions{}, "x").ModTime(0).IsZero() {
		t.Error("an unknown time is not the zero time")
	}
}

// TestManifestGolden holds the format still: version 1 files must stay readable, and equal input must
// give equal bytes.
func TestManifestGolden(t *testing.T) {
	golden := filepath.Join("testdata", "manifest-v2.bin")
	o := object("train/b/é.jpg")
	o.ModTime = time.Unix(1_700_000_000, 123)
	m, err := Build(memstore.Listing(o, object("train/a/x/1.jpg"), object("train/a/2.jpg"), object("train/README"),
		object("train/a//x"), object("train/a/x")), BuildOptions{Prefix: "train/"})
	if err != nil {
		t.Fatal(err)
	}
	if *update {
		if err := os.WriteFile(golden, m.data, 0o666); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(m.data, want) {
		t.Error("a manifest of the same objects has other bytes than before")
	}
	loaded, err := Load(golden)
	if err != nil {
		t.Fatal(err)
	}
	defer loaded.Close()
	if got := paths(loaded); !slices.Equal(got, []string{"README", "a/2.jpg", "a/x/1.jpg", "b/é.jpg"}) ||
		loaded.Verify() != nil || !loaded.ModTime(3).Equal(o.ModTime) {
		t.Errorf("golden file: %q, %v", got, loaded.Verify())
	}
}

func TestLoadDamaged(t *testing.T) {
	dir := t.TempDir()
	m := mustBuild(t, BuildOptions{}, "a/1", "a/2", "b/c/3", "r")
	path, err := m.Save(dir)
	if err != nil {
		t.Fatal(err)
	}
	// Saving an equal one keeps the file; saving over a damaged one mends it.
	before, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := m.Save(dir); err != nil {
		t.Fatal(err)
	}
	if after, err := os.Stat(path); err != nil || !os.SameFile(before, after) {
		t.Error("an equal file was replaced")
	}
	if names, _ := filepath.Glob(filepath.Join(dir, "*")); len(names) != 1 {
		t.Errorf("files %q", names)
	}
	load := func(data []byte) error {
		p := filepath.Join(dir, "damaged")
		if err := os.WriteFile(p, data, 0o666); err != nil {
			t.Fatal(err)
		}
		m, err := Load(p)
		if err == nil {
			_ = m.Close()
		}
		return err
	}
	for _, n := range []int{0, 1, headerLen - 1, headerLen, len(m.data) - 1} {
		if err := load(m.data[:n]); !errors.Is(err, ErrCorrupt) {
			t.Fatalf("file cut to %d bytes: %v", n, err)
		}
	}
	for n := range len(m.data) {
		if _, err := parse(m.data[:n]); !errors.Is(err, ErrCorrupt) {
			t.Fatalf("cut to %d bytes: %v", n, err)
		}
		b := bytes.Clone(m.data)
		b[n] ^= 0x10
		if _, err := parse(b); !errors.Is(err, ErrCorrupt) {
			t.Fatalf("byte %d flipped: %v", n, err)
		}
	}
	if err := load(append(bytes.Clone(m.data), 0)); !errors.Is(err, ErrCorrupt) {
		t.Fatalf("one byte more: %v", err)
	}
	newer := bytes.Clone(m.data)
	newer[8] = 3
	seal(newer)
	if err := load(newer); !errors.Is(err, ErrNewerFormat) || !strings.Contains(err.Error(), "format version 3") ||
		!strings.Contains(err.Error(), "--cache-dir") {
		t.Fatalf("newer: %v", err)
	}
	if _, err := Load(filepath.Join(dir, "missing")); !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	if err := os.Truncate(path, 10); err != nil {
		t.Fatal(err)
	}
	if _, err := m.Save(dir); err != nil {
		t.Fatal(err)
	}
	mended, err := Load(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(mended.Verify(), mended.Close(), mended.Close()); err != nil {
		t.Fatal(err)
	}
}

// addTampered adds seeds that change a table's words, from an offset on.
func addTampered(f *testing.F, data []byte, from int) {
	for off := from; off < len(data); off += 12 {
		f.Add(data, uint16(off), uint64(1))
		f.Add(data, uint16(off), uint64(1<<63))
		f.Add(data, uint16(off), uint64(0xffffffff))
	}
}

// tampered returns a copy with add added to the word at an offset, under right checksums.
func tampered(data []byte, at uint16, add uint64) []byte {
	data = bytes.Clone(data)
	if int(at)+8 <= len(data) {
		b := data[at:]
		binary.LittleEndian.PutUint64(b, binary.LittleEndian.Uint64(b)+add)
	}
	if len(data) >= headerLen {
		seal(data)
	}
	return data
}

// FuzzLoad gives parse hostile bytes under right checksums. What it accepts must not make any method
// panic or run forever.
func FuzzLoad(f *testing.F) {
	f.Add(mustBuild(f, BuildOptions{}, "a/1", "a/2", "b/c/3", "r").data, uint16(0), uint64(0))
	m := mustBuild(f, BuildOptions{Prefix: "p/"}, "p/x/y/z/1", "p/x/2", "p/x/y//")
	addTampered(f, m.data, 16)
	f.Fuzz(func(t *testing.T, data []byte, at uint16, add uint64) {
		data = tampered(data, at, add)
		m, err := parse(data)
		if err != nil {
			return
		}
		for file := range m.Len() {
			if n, ok := m.Lookup(m.DirOf(file), m.Name(file)); !ok || n.Index != file {
				t.Fatalf("file %d is not where it is", file)
			}
			m.Object(file)
			m.PathHash(file)
			m.ID(file)
		}
		for d := range m.Dirs() {
			m.Dir(d)
			m.Find(m.DirPath(d))
		}
		s := m.Samples(&Filter{match: func(p []byte) bool { return len(p)%2 == 0 }})
		for i := range s.Len() {
			if l := s.Label(i); l >= 0 {
				_ = s.Classes()[l]
			}
		}
		_ = m.Verify()
	})
}

func TestMatch(t *testing.T) {
	for _, tt := range []struct {
		glob, path string
		want       bool
	}{
		{"images", "a/b.jpg", true},
		{"images", "a/b.JpEg", true},
		{"images", "a/b.webp", true},
		{"images", "a/b.gif", false},
		{"images", "a/jpg", false},
		{"images", "a/.jpg", true},
		{"images", "a/b.jpg.txt", false},
		{"*", "a/.DS_Store", true},
		{"*.txt", "a/b/c.txt", true},
		{"*.txt", "a/b.txt/c", false},
		{"[a-c]?", "x/b1", true},
		{"*/train/*.png", "a/train/1.png", true},
		{"*/train/*.png", "a/b/train/1.png", false},
		{"*.PNG", "a/1.png", false},
		{".png", "a/1.png", true},
		{".png", "a/1.mask.png", false},
		{".mask.png", "a/1.mask.png", true},
		{".jpg,.png", "1.png", true},
		{".jpg,.png", "a.png/1", false},
		{".png", "a/.png", false},
	} {
		match, err := Match(tt.glob)
		if err != nil {
			t.Fatal(err)
		}
		if got := match.Match(tt.path); got != tt.want {
			t.Errorf("%q matches %q: %v", tt.glob, tt.path, got)
		}
	}
	for _, bad := range []string{"", "[", "a[", "x\\", ".jpg,["} {
		if _, err := Match(bad); err == nil || !strings.Contains(err.Error(), "*.jpg") {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

func TestLookupsDoNotAllocate(t *testing.T) {
	m := mustBuild(t, BuildOptions{}, "a/1", "a/2", "b/c/3", "r")
	buf := make([]byte, 0, 100)
	if n := testing.AllocsPerRun(100, func() {
		m.Find("b/c/3")
		m.Lookup(0, "nothing")
		m.PathHash(2)
		buf = m.AppendPath(buf[:0], 2)
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// Match reports whether the file with this path is a sample.
func (f *Filter) Match(path string) bool {
	if !f.path {
		path = path[strings.LastIndexByte(path, '/')+1:]
	}
	return f.match([]byte(path))
}
