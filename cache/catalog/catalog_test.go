package catalog_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/cache/crypt"
	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/cache/segment"
	"github.com/shoalfs/shoal/lab/rig/memstore"
)

func TestMain(m *testing.M) {
	if dir := os.Getenv("SHOAL_TEST_KILL"); dir != "" {
		if err := killScript(dir); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

func build(t testing.TB, prefix string, paths ...string) *catalog.Manifest {
	t.Helper()
	var objs []objstore.Object
	for i, p := range paths {
		o := objstore.Object{Key: prefix + p, Size: int64(i + 1), ETag: fmt.Sprint("e", i)}
		if strings.HasSuffix(p, "/") { // a folder
			o.Size = 0
		}
		objs = append(objs, o)
	}
	m, err := catalog.Build(memstore.Listing(objs...), catalog.BuildOptions{Prefix: prefix})
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func quiet() *slog.Logger { return slog.New(slog.NewTextHandler(io.Discard, nil)) }

func open(t testing.TB, dir string) *catalog.Catalog {
	t.Helper()
	c, err := catalog.Open(dir, catalog.Options{Logger: quiet()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func TestCatalogKeepsManifests(t *testing.T) {
	dir := t.TempDir()
	c := open(t, dir)
	if _, _, err := c.Manifest("s3://b/p"); !errors.Is(err, catalog.ErrNoManifest) {
		t.Fatal(err)
	}
	m1, m2 := build(t, "p/", "a/1.jpg", "b/2.jpg"), build(t, "p/", "a/1.jpg")
	same := build(t, "copy/of/", "a/1.jpg", "b/2.jpg")
	if m1.Version() != same.Version() || m1.Version() == m2.Version() {
		t.Fatal("versions", m1.Version(), same.Version(), m2.Version())
	}
	for source, m := range map[string]*catalog.Manifest{"s3://b/p": m1, "s3://b/copy": same, "s3://c": m2} {
		if err := c.SetManifest(source, m, nil, 0); err != nil {
			t.Fatal(err)
		}
	}
	c = open(t, dir)
	if c.Rebuilt() != "" {
		t.Fatal("rebuilt", c.Rebuilt())
	}
	// One file holds one version; the prefix is the source's own.
	for source, key := range map[string]string{"s3://b/p": "p/a/1.jpg", "s3://b/copy": "copy/of/a/1.jpg"} {
		m, _, err := c.Manifest(source)
		if err != nil {
			t.Fatal(err)
		}
		if m.Version() != m1.Version() || m.Object(0).Key != key {
			t.Errorf("%s: version %s, first key %s", source, m.Version(), m.Object(0).Key)
		}
		if err := m.Close(); err != nil {
			t.Fatal(err)
		}
	}
	sources, err := c.Sources()
	if err != nil || len(sources) != 3 || sources[0].Name != "s3://b/copy" {
		t.Fatal(sources)
	}

	// A source moves on: its old file goes, but not while another source or the caller keeps it.
	if err := c.SetManifest("s3://c", m1, nil, 0); err != nil {
		t.Fatal(err)
	}
	if n, err := c.GC(m2.Version()); n != 0 || err != nil {
		t.Fatal(n, err)
	}
	loaded, err := catalog.Load(filepath.Join(dir, "manifests", m2.Version()))
	if err != nil {
		t.Fatal(err)
	}
	stale := filepath.Join(dir, "manifests", ".tmp-1")
	other := filepath.Join(dir, "manifests", "notes.txt")
	for _, p := range []string{stale, other} {
		if err := os.WriteFile(p, nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if n, err := c.GC(); n != 2 || err != nil {
		t.Fatal(n, err)
	}
	if loaded.Path(0) != "a/1.jpg" {
		t.Error("a loaded manifest changed")
	}
	if err := loaded.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(other); err != nil {
		t.Error("GC removed a file that is not its own")
	}
	if _, _, err := c.Manifest("s3://c"); err != nil {
		t.Error(err)
	}
}

// Sources that hold one version, and differ in empty folders only, do not show each other's.
func TestCatalogKeepsEmptyFolders(t *testing.T) {
	dir := t.TempDir()
	c := open(t, dir)
	want := map[string][]string{"s3://none": {"a"}, "s3://one": {"a", "valid"}, "s3://two": {"a", "test", "valid"}}
	for source, folders := range want {
		paths := []string{"a/1.jpg"}
		for _, f := range folders[1:] {
			paths = append(paths, f+"/")
		}
		if err := c.SetManifest(source, build(t, "", paths...), nil, 0); err != nil {
			t.Fatal(err)
		}
	}
	c = open(t, dir)
	if n, err := c.GC(); n != 0 || err != nil {
		t.Fatal(n, err)
	}
	sources, err := c.Sources()
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range sources {
		m, _, err := c.Manifest(s.Name)
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for d := 1; d < m.Dirs(); d++ {
			got = append(got, m.DirPath(d))
		}
		if !slices.Equal(got, want[s.Name]) || s.Manifest != m.FileName() ||
			m.Version() != build(t, "", "a/1.jpg").Version() {
			t.Errorf("%+v: folders %q", s, got)
		}
		if err := m.Close(); err != nil {
			t.Fatal(err)
		}
	}
	// Without them the file is the version's.
	if err := errors.Join(c.SetManifest("s3://one", build(t, "", "a/1.jpg"), nil, 0),
		c.SetManifest("s3://two", build(t, "", "a/1.jpg"), nil, 0)); err != nil {
		t.Fatal(err)
	}
	if n, err := c.GC(); n != 2 || err != nil {
		t.Fatal(n, err)
	}
}

func TestCatalogLostManifestFile(t *testing.T) {
	dir := t.TempDir()
	c := open(t, dir)
	m := build(t, "", "a/1.jpg")
	if err := c.SetManifest("s", m, nil, 0); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "manifests", m.Version())
	for name, damage := range map[string]func() error{
		"flipped": func() error {
			b, err := os.ReadFile(path)
			b[len(b)/2] ^= 1
			return errors.Join(err, os.Remove(path), os.WriteFile(path, b, 0o600))
		},
		"cut":     func() error { return os.Truncate(path, 60) },
		"removed": func() error { return os.Remove(path) },
	} {
		if err := damage(); err != nil {
			t.Fatal(err)
		}
		if _, _, err := c.Manifest("s"); !errors.Is(err, catalog.ErrNoManifest) {
			t.Errorf("%s: %v", name, err)
		}
		if err := c.SetManifest("s", m, nil, 0); err != nil {
			t.Fatal(err)
		}
		got, _, err := c.Manifest("s")
		if err != nil {
			t.Fatalf("%s, then listed again: %v", name, err)
		}
		if err := got.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// TestCatalogSegments compares the index with a map, over reopenings.
func TestCatalogSegments(t *testing.T) {
	t.Parallel()
	type entry struct {
		size   int64
		sealed bool
		table  []byte
	}
	dir := t.TempDir()
	c := open(t, dir)
	ids := []uint32{1, 2, 3, 255, 99_999_999, 100_000_000}
	type key struct {
		ds [16]byte
		id uint32
	}
	sets := [][16]byte{{1}, {0xff, 2}}
	rapid.Check(t, func(rt *rapid.T) {
		for _, id := range ids {
			for _, ds := range sets {
				if err := c.Index(ds).DropSegment(id); err != nil {
					rt.Fatal(err)
				}
			}
		}
		model := make(map[key]entry)
		for range rapid.IntRange(1, 6).Draw(rt, "steps") {
			id, ds := rapid.SampledFrom(ids).Draw(rt, "id"), rapid.SampledFrom(sets).Draw(rt, "dataset")
			switch rapid.SampledFrom([]string{"commit", "commit", "commit", "commit", "commit", "drop", "drop",
				"forget", "reopen"}).Draw(rt, "step") {
			case "commit":
				e := entry{int64(rapid.Uint32().Draw(rt, "size")), rapid.Bool().Draw(rt, "sealed"), nil}
				n := rapid.SampledFrom([]int{0, 1, 1000, 256 << 10, 256<<10 + 1, 1 << 20}).Draw(rt, "table")
				e.table = make([]byte, n)
				src := rand.NewChaCha8([32]byte{byte(n), byte(e.size)})
				_, _ = src.Read(e.table)
				if err := c.Index(ds).CommitSegment(id, e.size, e.sealed, e.table); err != nil {
					rt.Fatal(err)
				}
				model[key{ds, id}] = e
			case "drop":
				if err := c.Index(ds).DropSegment(id); err != nil {
					rt.Fatal(err)
				}
				delete(model, key{ds, id})
			case "forget":
				if err := c.Forget(ds); err != nil {
					rt.Fatal(err)
				}
				for _, id := range ids {
					delete(model, key{ds, id})
				}
			case "reopen":
				c = open(t, dir)
			}
		}
		n := 0
		for _, ds := range sets {
			var got []uint32
			err := c.Index(ds).LoadSegments(func(id uint32, size int64, sealed bool, table []byte) error {
				got = append(got, id)
				if e, ok := model[key{ds, id}]; !ok || e.size != size || e.sealed != sealed ||
					!bytes.Equal(e.table, table) {
					rt.Fatalf("segment %d: size %d, sealed %v, table of %d bytes; want %d, %v, %d",
						id, size, sealed, len(table), e.size, e.sealed, len(e.table))
				}
				return nil
			})
			if err != nil || !slices.IsSorted(got) {
				rt.Fatal(got, err)
			}
			n += len(got)
			stop := errors.New("stop")
			if len(got) > 0 {
				if err := c.Index(ds).LoadSegments(func(uint32, int64, bool, []byte) error {
					return stop
				}); !errors.Is(err, stop) {
					rt.Fatal("the error of yield was", err)
				}
			}
		}
		if n != len(model) {
			rt.Fatalf("%d segments, want %d", n, len(model))
		}
	})
}

// TestTableDamaged damages every byte of a record table's file: the segment is then scanned.
func TestTableDamaged(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	c := open(t, dir)
	ix, other := c.Index([16]byte{7}), c.Index([16]byte{8})
	if err := errors.Join(ix.CommitSegment(3, 64, true, []byte("a table")),
		ix.CommitSegment(4, 65, false, nil)); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "tables", "07"+strings.Repeat("0", 30), "00000003.table")
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	third := func(ix segment.Index, id uint32) (size int64, table string) {
		size = -1
		err := ix.LoadSegments(func(n uint32, s int64, _ bool, b []byte) error {
			if n == id {
				size, table = s, string(b)
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		return size, table
	}
	if size, table := third(ix, 3); size != 64 || table != "a table" {
		t.Fatal(size, table)
	}
	for i := range whole {
		for _, b := range [][]byte{whole[:i], append(append(bytes.Clone(whole[:i]), whole[i]^1), whole[i+1:]...)} {
			if err := os.WriteFile(path, b, 0o600); err != nil {
				t.Fatal(err)
			}
			if size, table := third(ix, 3); size != 0 || table != "" {
				t.Fatalf("damaged at %d: size %d, table %q", i, size, table)
			}
		}
	}
	// Another segment's or dataset's file is damage, too; files that are none of ours are left alone.
	if err := other.CommitSegment(9, 1, true, nil); err != nil {
		t.Fatal(err)
	}
	elsewhere := filepath.Join(dir, "tables", "08"+strings.Repeat("0", 30))
	for _, name := range []string{"00000005.table", "5.table", "x.table", "00000003", ".tmp-1"} {
		if err := os.WriteFile(filepath.Join(elsewhere, name), whole, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if size, table := third(other, 5); size != 0 || table != "" {
		t.Fatal(size, table)
	}
	left, err := filepath.Glob(filepath.Join(elsewhere, "*"))
	if err != nil || len(left) != 5 { // 9, 5 and three strange ones
		t.Fatal(left, err)
	}
	if _, err := os.Stat(filepath.Join(elsewhere, ".tmp-1")); !errors.Is(err, os.ErrNotExist) {
		t.Error("a temporary file of a crash stays")
	}
}

// TestCatalogCorrupt damages bytes of the facts, the first ones and some of all, and cuts them there: they are begun
// anew, and all that lies beside them stays.
func TestCatalogCorrupt(t *testing.T) {
	t.Parallel()
	key, err := crypt.Create(t.TempDir(), crypt.Secret{})
	if err != nil {
		t.Fatal(err)
	}
	for name, key := range map[string]*crypt.Key{"clear": nil, "sealed": key} {
		dir := t.TempDir()
		o := catalog.Options{Logger: quiet(), Key: key}
		c, err := catalog.Open(dir, o)
		if err != nil {
			t.Fatal(err)
		}
		id := catalog.DatasetID("s")
		if err := errors.Join(c.SetManifest("s", build(t, "", "a/1.jpg"), nil, 0), c.SetQuota(id, 7),
			c.Index(id).CommitSegment(1, 64, true, nil), c.Close()); err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(dir, "facts")
		whole, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for i := 0; i < len(whole); i += 1 + i/8 {
			for _, b := range [][]byte{whole[:i], append(append(bytes.Clone(whole[:i]), whole[i]^1), whole[i+1:]...)} {
				if err := errors.Join(os.WriteFile(path, b, 0o600),
					os.WriteFile(path+".copy", b[:len(b)/2], 0o600)); err != nil {
					t.Fatal(err)
				}
				c, err := catalog.Open(dir, o)
				if err != nil {
					t.Fatalf("%s, damaged at %d: %v", name, i, err)
				}
				if c.Rebuilt() != path+".corrupt" {
					t.Fatalf("%s, damaged at %d: rebuilt %q", name, i, c.Rebuilt())
				}
				if _, _, err := c.Manifest("s"); !errors.Is(err, catalog.ErrNoManifest) {
					t.Fatalf("%s, damaged at %d: %v", name, i, err)
				}
				list, err := c.Datasets()
				if err := errors.Join(err, c.Close()); err != nil || len(list) != 1 ||
					list[0] != (catalog.Dataset{ID: id}) {
					t.Fatalf("%s, damaged at %d: %+v, %v", name, i, list, err)
				}
			}
		}
	}
}

// TestOneOfTwoIsEnough: facts and tables of recoded files outlive the loss of, and damage to, either of their files,
// which is then made again.
func TestOneOfTwoIsEnough(t *testing.T) {
	t.Parallel()
	key, err := crypt.Create(t.TempDir(), crypt.Secret{})
	if err != nil {
		t.Fatal(err)
	}
	for name, key := range map[string]*crypt.Key{"clear": nil, "sealed": key} {
		dir := t.TempDir()
		o := catalog.Options{Logger: quiet(), Key: key}
		id, coding := catalog.DatasetID("s"), [][]byte{[]byte("first"), []byte("second")}
		c, err := catalog.Open(dir, o)
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(c.Touch(id, "s"), c.SetQuota(id, 7), c.SetCoding(id, coding[:1]), c.SetCoding(id, coding),
			c.Close()); err != nil {
			t.Fatal(err)
		}
		for _, file := range []string{"facts", fmt.Sprintf("codings/%x", id)} {
			for _, hit := range []string{filepath.Join(dir, file), filepath.Join(dir, file+".copy")} {
				whole, err := os.ReadFile(hit)
				if err != nil {
					t.Fatal(err)
				}
				half := whole[:len(whole)/2]
				for what, do := range map[string]func() error{
					"no":      func() error { return os.Remove(hit) },
					"half of": func() error { return os.WriteFile(hit, half, 0o600) },
					"flipped": func() error {
						return os.WriteFile(hit, append(bytes.Clone(half), ^whole[len(half)]), 0o600)
					},
				} {
					if err := do(); err != nil {
						t.Fatal(err)
					}
					for round := range 2 {
						c, err := catalog.Open(dir, o)
						if err != nil {
							t.Fatal(err)
						}
						got := c.Coding(id)
						list, err := c.Datasets()
						if err := errors.Join(err, c.Close()); err != nil ||
							!slices.EqualFunc(got, coding, bytes.Equal) || len(list) != 1 || list[0].Quota != 7 {
							t.Errorf("%s, %s %s: %q, %+v, %v", name, what, hit, got, list, err)
						}
						// A copy that is missing is written without a word.
						if n := len(c.Mended()); c.Rebuilt() != "" ||
							(n > 0) != (round == 0 && (what != "no" || !strings.HasSuffix(hit, ".copy"))) {
							t.Errorf("%s, %s %s, start %d: %q", name, what, hit, round, c.Mended())
						}
					}
				}
			}
		}
	}
}

// TestNamesOfFolders: a cache folder's name is no pattern, which would not be valid, or match another folder.
func TestNamesOfFolders(t *testing.T) {
	t.Parallel()
	base := t.TempDir()
	foreign := filepath.Join(base, "run1", ".tmp-5")
	if err := errors.Join(os.Mkdir(filepath.Dir(foreign), 0o700), os.WriteFile(foreign, nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"run[1]", "run[", `run\`, "run*"} {
		dir := filepath.Join(base, name)
		own := filepath.Join(dir, ".tmp-5")
		if err := errors.Join(os.Mkdir(dir, 0o700), os.WriteFile(own, nil, 0o600)); err != nil {
			t.Fatal(err)
		}
		_, release, err := catalog.Lock(dir, nil, false)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if err := release(); err != nil {
			t.Error(err)
		}
		if _, err := os.Stat(own); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: what a crash left is still there: %v", name, err)
		}
		if _, err := os.Stat(foreign); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestFullDisk: on a full disk what is asked of the catalog fails with the remedy, and what it knew stays.
func TestFullDisk(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=1m"); err != nil {
		t.Fatalf("mount a tmpfs: %v", err)
	}
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	c, id := open(t, dir), catalog.DatasetID("s")
	if err := errors.Join(c.SetManifest("s", build(t, "", "a/1.jpg"), nil, 0), c.SetQuota(id, 7)); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "ballast"), make([]byte, 2<<20), 0o600); !errors.Is(err, syscall.ENOSPC) {
		t.Fatal(err)
	}
	for what, err := range map[string]error{
		"quota": c.SetQuota(id, 8), "table": c.Index(id).CommitSegment(1, 64, true, make([]byte, 64<<10)),
		"manifest": c.SetManifest("t", build(t, "", "a/1.jpg", "a/2.jpg"), nil, 0),
	} {
		if !errors.Is(err, syscall.ENOSPC) || what == "quota" && !strings.Contains(err.Error(), "--cache-dir") {
			t.Errorf("%s: %v", what, err)
		}
	}
	for _, c := range []*catalog.Catalog{c, open(t, dir)} {
		m, _, err := c.Manifest("s")
		if err != nil {
			t.Fatal(err)
		}
		list, err := c.Datasets()
		if err := errors.Join(err, m.Close()); err != nil || len(list) != 1 || list[0].Quota != 7 {
			t.Errorf("%+v, %v", list, err)
		}
	}
}

func TestLock(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "new")
	os.Args = append(os.Args, "--cluster=etcd://u:se/cr@et@h:1/n")
	_, release, err := catalog.Lock(dir, nil, false)
	if os.Args = os.Args[:len(os.Args)-1]; err != nil {
		t.Fatal(err)
	}
	_, _, err = catalog.Lock(dir, nil, false)
	if err == nil || !strings.Contains(err.Error(), "etcd://u@h:1/n") ||
		!strings.Contains(err.Error(), fmt.Sprintf("pid %d: %s", os.Getpid(), os.Args[0])) ||
		!strings.Contains(err.Error(), dir) {
		t.Fatalf("second lock: %v", err)
	}
	if err := release(); err != nil {
		t.Fatal(err)
	}
	if _, release, err = catalog.Lock(dir, nil, false); err != nil {
		t.Fatal(err)
	}
	if err := release(); err != nil {
		t.Fatal(err)
	}
	for content, want := range map[string]error{"shoal cache 4\n": nil, "shoal cache 6\n": catalog.ErrNewerFormat,
		"something else": catalog.ErrCorrupt, "": catalog.ErrCorrupt} {
		if err := os.WriteFile(filepath.Join(dir, "FORMAT"), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		_, release, err := catalog.Lock(dir, nil, false)
		if !errors.Is(err, want) {
			t.Errorf("FORMAT %q: %v", content, err)
		}
		if err == nil {
			if b, e := os.ReadFile(filepath.Join(dir, "FORMAT")); e != nil || string(b) != "shoal cache 4\n" {
				t.Errorf("FORMAT %q became %q, %v", content, b, e)
			}
			if err := release(); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// A folder of an older format is refused, and nothing in it is touched.
func TestOlderFormat(t *testing.T) {
	for v := 1; v < 4; v++ {
		dir := t.TempDir()
		path := filepath.Join(dir, "FORMAT")
		content := fmt.Sprintf("shoal cache %d\n", v)
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		_, _, err := catalog.Lock(dir, nil, false)
		if err == nil || !strings.Contains(err.Error(), "older version") ||
			!strings.Contains(err.Error(), "--cache-dir") {
			t.Errorf("%d: %v", v, err)
		}
		if b, err := os.ReadFile(path); err != nil || string(b) != content {
			t.Errorf("%q became %q, %v", content, b, err)
		}
		// Whoever asks for it gets an empty one, without what is not the cache's.
		for _, name := range []string{"segments/x/00000001.seg", "catalog/MANIFEST", "notes.txt"} {
			if err := errors.Join(os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o700),
				os.WriteFile(filepath.Join(dir, name), []byte("x"), 0o600)); err != nil {
				t.Fatal(err)
			}
		}
		_, release, err := catalog.Lock(dir, nil, true)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := catalog.ReadFormat(dir); got != 4 || err != nil || catalog.Used(dir) {
			t.Errorf("after a reset: format %d, %v", got, err)
		}
		if _, err := os.Stat(filepath.Join(dir, "notes.txt")); err != nil {
			t.Error(err)
		}
		if err := release(); err != nil {
			t.Fatal(err)
		}
	}
	// The formats since the first release are never reset, and a newer one is not, either.
	for _, v := range []int{4, 9} {
		dir := t.TempDir()
		if err := errors.Join(os.WriteFile(filepath.Join(dir, "FORMAT"), fmt.Appendf(nil, "shoal cache %d\n", v),
			0o600), os.Mkdir(filepath.Join(dir, "segments"), 0o700)); err != nil {
			t.Fatal(err)
		}
		_, release, err := catalog.Lock(dir, nil, true)
		if (err == nil) != (v == 4) || !catalog.Used(dir) {
			t.Errorf("format %d: %v, used %v", v, err, catalog.Used(dir))
		}
		if err == nil {
			_ = release()
		}
	}
}

// forked duplicates this process's descriptor of a file, as a child has it from its fork until its exec.
func forked(t *testing.T, path string) {
	t.Helper()
	path, err := filepath.EvalSymlinks(path)
	if err != nil {
		t.Fatal(err)
	}
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range fds {
		if of, err := os.Readlink("/proc/self/fd/" + e.Name()); err != nil || of != path {
			continue
		}
		n, err := strconv.Atoi(e.Name())
		if err != nil {
			t.Fatal(err)
		}
		dup, err := unix.FcntlInt(uintptr(n), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = unix.Close(dup) })
		return
	}
	t.Fatalf("%s is not open", path)
}

// TestUnlockedBesideAFork: what is released can be taken again at once, also while a child is forked.
func TestUnlockedBesideAFork(t *testing.T) {
	dir := t.TempDir()
	for range 2 {
		_, release, err := catalog.Lock(dir, nil, false)
		if err != nil {
			t.Fatal(err)
		}
		forked(t, filepath.Join(dir, "lock"))
		if err := release(); err != nil {
			t.Fatal(err)
		}
	}
}

// TestDatasets compares the facts with a map, over reopenings.
func TestDatasets(t *testing.T) {
	t.Parallel()
	dir, err := os.MkdirTemp("/dev/shm", "catalog") // each step is two fsyncs
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	c := open(t, dir)
	m := build(t, "", "a/1.jpg", "b/2.jpg")
	names := []string{"s3://a", "s3://b", "s3://c"}
	rapid.Check(t, func(rt *rapid.T) {
		for _, n := range names {
			if err := c.Forget(catalog.DatasetID(n)); err != nil {
				rt.Fatal(err)
			}
		}
		model := make(map[[16]byte]catalog.Dataset)
		change := func(id [16]byte, f func(d *catalog.Dataset)) {
			d := model[id]
			d.ID = id
			f(&d)
			model[id] = d
		}
		for range rapid.IntRange(1, 8).Draw(rt, "steps") {
			name := rapid.SampledFrom(names).Draw(rt, "name")
			id := catalog.DatasetID(name)
			var err error
			switch rapid.SampledFrom([]string{"quota", "pin", "touch", "forget", "list", "table", "reopen"}).Draw(
				rt, "step") {
			case "quota":
				n := rapid.Int64Range(0, 1<<50).Draw(rt, "n")
				err = c.SetQuota(id, n)
				change(id, func(d *catalog.Dataset) { d.Quota = n })
			case "pin":
				pinned := rapid.Bool().Draw(rt, "pinned")
				err = c.SetPinned(id, pinned)
				change(id, func(d *catalog.Dataset) { d.Pinned = pinned })
			case "touch":
				err = c.Touch(id, name)
				change(id, func(d *catalog.Dataset) { d.Source, d.LastUsed = name, time.Now() })
			case "forget":
				err = c.Forget(id)
				delete(model, id)
			case "list":
				err = c.SetManifest(name, m, nil, 0)
				change(id, func(d *catalog.Dataset) { d.Source, d.Version = name, m.Version() })
			case "table":
				err = c.Index(id).CommitSegment(1, 64, true, nil)
				change(id, func(*catalog.Dataset) {})
			case "reopen":
				err = c.Close()
				c = open(t, dir)
			}
			if err != nil {
				rt.Fatal(err)
			}
		}
		list, err := c.Datasets()
		if err != nil || len(list) != len(model) {
			rt.Fatalf("%+v, %v; want %+v", list, err, model)
		}
		for i, d := range list {
			w, ok := model[d.ID]
			if !ok || d.Quota != w.Quota || d.Pinned != w.Pinned || d.LastUsed.IsZero() != w.LastUsed.IsZero() ||
				d.LastUsed.Sub(w.LastUsed).Abs() > time.Minute {
				rt.Fatalf("%+v, want %+v", d, w)
			}
			if d.Source != w.Source {
				rt.Fatalf("source %q, want %q", d.Source, w.Source)
			}
			if w.Version != "" && (d.Version != w.Version || d.Files != 2 || d.Bytes != m.Bytes()) {
				rt.Fatalf("%+v, want %+v", d, w)
			}
			if i > 0 && list[i-1].LastUsed.Before(d.LastUsed) {
				rt.Fatalf("%+v is not by last use", list)
			}
		}
		sources, err := c.Sources()
		if err != nil {
			rt.Fatal(err)
		}
		n := 0
		for _, w := range model {
			if w.Version != "" {
				n++
			}
		}
		if len(sources) != n {
			rt.Fatalf("sources %+v; want %d", sources, n)
		}
	})
	if err := c.SetQuota([16]byte{1}, -1); err == nil {
		t.Error("a negative quota was taken")
	}
}

// Two datasets can be of one source; it goes with the last.
func TestForgetSharedSource(t *testing.T) {
	c := open(t, t.TempDir())
	a, b := [16]byte{1}, [16]byte{2}
	if err := errors.Join(c.SetManifest("s", build(t, "", "a/1.jpg"), nil, 0), c.Touch(a, "s"), c.Touch(b, "s"),
		c.Forget(a)); err != nil {
		t.Fatal(err)
	}
	if m, _, err := c.Manifest("s"); err != nil {
		t.Error(err)
	} else if err := m.Close(); err != nil {
		t.Error(err)
	}
	if err := c.Forget(b); err != nil {
		t.Fatal(err)
	}
	if _, _, err := c.Manifest("s"); !errors.Is(err, catalog.ErrNoManifest) {
		t.Error(err)
	}
	if n, err := c.GC(); n != 1 || err != nil {
		t.Error(n, err)
	}
}

// A collection takes nothing from whoever writes meanwhile.
func TestGCBesideCoding(t *testing.T) {
	c := open(t, t.TempDir())
	done := make(chan struct{})
	var gc sync.WaitGroup
	gc.Go(func() {
		for {
			select {
			case <-done:
				return
			default:
			}
			if _, err := c.GC(); err != nil {
				t.Error(err)
				return
			}
		}
	})
	for i := range 20 {
		if err := c.SetCoding([16]byte{1}, [][]byte{{byte(i)}}); err != nil {
			t.Error(err)
			break
		}
	}
	close(done)
	gc.Wait()
}

// Shards of WebDataset mostly hold files without folders. They are numbered, without labels; beside a
// folder they are not.
func TestFilesWithoutFoldersAreSamples(t *testing.T) {
	images, err := catalog.Match("images")
	if err != nil {
		t.Fatal(err)
	}
	flat := build(t, "", "000.cls", "000.jpg", "001.cls", "001.jpg", "empty/")
	s := flat.Samples(images)
	if s.Len() != 2 || flat.Path(s.File(0)) != "000.jpg" || flat.Path(s.File(1)) != "001.jpg" || s.Label(0) != -1 ||
		len(s.Classes()) != 0 {
		t.Errorf("%d samples, first %q with label %d, classes %v",
			s.Len(), flat.Path(s.File(0)), s.Label(0), s.Classes())
	}
	if s := flat.Samples(nil); s.Len() != 4 {
		t.Errorf("%d samples of all files", s.Len())
	}
	if s := build(t, "", "000.jpg", "a/001.jpg").Samples(images); s.Len() != 1 || s.Label(0) != 0 {
		t.Errorf("%d samples beside a folder", s.Len())
	}
}

// A folder of class folders is a dataset of its own, if that numbers its files in the same order.
func TestTrees(t *testing.T) {
	images, err := catalog.Match("images")
	if err != nil {
		t.Fatal(err)
	}
	m := build(t, "", "class/loose.jpg", "deep/a/b/1.jpg", "deep/a-b/2.jpg", "empty/a/x.txt",
		"train/a/1.jpg", "train/a/2.jpg", "train/a/note.txt", "train/b/1.jpg", "train/stray.jpg", "val/a/1.jpg",
		"train/0/", "train/a/none/at/all/", "train/c/", "none/a/", "val/b/c/")
	for _, c := range []struct {
		match *catalog.Filter
		want  string
	}{
		{images, "[{train 4 3} {val 7 1}]"},
		{nil, "[{empty 3 1} {train 5 4} {val 9 1}]"},
	} {
		s := m.Samples(c.match)
		if got := fmt.Sprint(s.Trees()); got != c.want {
			t.Errorf("%s, want %s", got, c.want)
		}
		for _, tree := range s.Trees() {
			for i := range tree.Len {
				path := m.Path(s.File(tree.First + i))
				if !strings.HasPrefix(path, tree.Folder+"/") || strings.Count(path, "/") != 2 {
					t.Errorf("%s in %+v", path, tree)
				}
			}
		}
	}
	if trees := build(t, "", "a.jpg", "b.jpg").Samples(images).Trees(); trees != nil {
		t.Errorf("%v", trees)
	}
}

// What is listed after a cluster's version counts as newer, with no moment between in which it does not; what is listed
// again, or was never a cluster's, keeps its number.
func TestNumber(t *testing.T) {
	c := open(t, t.TempDir())
	one, two := build(t, "p/", "a/1.jpg"), build(t, "p/", "a/1.jpg", "b/2.jpg")
	set := func(m *catalog.Manifest, want int64) {
		t.Helper()
		if err := c.SetManifest("s3://b/p", m, nil, 0); err != nil {
			t.Fatal(err)
		}
		if n := c.Number("s3://b/p"); n != want {
			t.Errorf("number %d, want %d", n, want)
		}
	}
	set(one, 0)
	set(two, 0)
	if err := c.SetNumber("s3://b/p", 7); err != nil {
		t.Fatal(err)
	}
	three := build(t, "p/", "a/1.jpg", "b/3.jpg")
	had := func(m *catalog.Manifest, want bool) {
		t.Helper()
		if c.Had("s3://b/p", m.Version()) != want {
			t.Errorf("had version %s: %v", m.Version(), !want)
		}
	}
	set(two, 7)
	had(one, false) // it was before the cluster
	set(one, 8)
	set(two, 9)
	had(one, true)
	had(two, true)
	had(three, false)
	for i := range 2 * 9 {
		set([]*catalog.Manifest{one, two}[i%2], int64(10+i))
	}
	set(three, 28)
	had(three, true)
	had(two, true)
	// What another node has listed may be from before what was changed here; what is listed here is not.
	if err := errors.Join(c.MarkStale("s3://b/", []string{"p/a/1.jpg"}),
		c.SetManifest("s3://b/p", one, nil, 40)); err != nil || c.Number("s3://b/p") != 40 || !c.Stale("s3://b/p") {
		t.Errorf("number %d, to be listed again: %t, %v", c.Number("s3://b/p"), c.Stale("s3://b/p"), err)
	}
	if set(two, 41); c.Stale("s3://b/p") {
		t.Error("to be listed again after it was")
	}
}

// The folder of a start that failed may become an encrypted cache; one with a listing may not.
func TestLockOfAFailedStart(t *testing.T) {
	dir := t.TempDir()
	lock := func(secret *crypt.Secret) error {
		_, release, err := catalog.Lock(dir, secret, false)
		if err == nil {
			err = release()
		}
		return err
	}
	secret, err := crypt.ParseSecret([]byte("0123456789abcdefghijklmnopqrstuv"))
	if err := errors.Join(err, lock(nil), lock(&secret)); err != nil {
		t.Fatal(err)
	}
	if err := lock(nil); !errors.Is(err, catalog.ErrKey) {
		t.Errorf("without the key: %v", err)
	}
	dir = t.TempDir()
	if err := errors.Join(lock(nil), os.Mkdir(filepath.Join(dir, "segments"), 0o700)); err != nil {
		t.Fatal(err)
	}
	if err := lock(&secret); !errors.Is(err, catalog.ErrKey) {
		t.Errorf("with what is not encrypted: %v", err)
	}
}
