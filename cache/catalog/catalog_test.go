package catalog_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"iter"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/cache/segment"
)

func TestMain(m *testing.M) {
	if dirs := os.Getenv("SHOAL_TEST_OPEN"); dirs != "" {
		for _, dir := range filepath.SplitList(dirs) {
			c, err := catalog.OpenUnsynced(dir, quiet())
			if err == nil {
				fmt.Println(dir, "rebuilt:", c.Rebuilt() != "")
				err = c.Close()
			}
			if err != nil {
				fmt.Fprintln(os.Stderr, err)
				os.Exit(1)
			}
		}
		os.Exit(0)
	}
	if dir := os.Getenv("SHOAL_TEST_KILL"); dir != "" {
		if err := killScript(dir); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

func seq(objs []objstore.Object) iter.Seq2[objstore.Object, error] {
	return func(yield func(objstore.Object, error) bool) {
		for _, o := range objs {
			if !yield(o, nil) {
				return
			}
		}
	}
}

func build(t testing.TB, prefix string, paths ...string) *catalog.Manifest {
	t.Helper()
	var objs []objstore.Object
	for i, p := range paths {
		objs = append(objs, objstore.Object{Key: prefix + p, Size: int64(i + 1), ETag: fmt.Sprint("e", i)})
	}
	m, err := catalog.Build(seq(objs), catalog.BuildOptions{Prefix: prefix})
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
	return c
}

func openUnsynced(t testing.TB, dir string) *catalog.Catalog {
	t.Helper()
	c, err := catalog.OpenUnsynced(dir, quiet())
	if err != nil {
		t.Fatal(err)
	}
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
		if err := c.SetManifest(source, m, nil); err != nil {
			t.Fatal(err)
		}
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}

	c = open(t, dir)
	defer c.Close()
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
	if err != nil || len(sources) != 3 || sources[0].Name != "s3://b/copy" || sources[2].Files != 1 || sources[2].Listed.IsZero() {
		t.Fatal(sources, err)
	}

	// A source moves on: its old file goes, but not while another source or the caller keeps it.
	if err := c.SetManifest("s3://c", m1, nil); err != nil {
		t.Fatal(err)
	}
	if n, err := c.GC(m2.Version()); n != 0 || err != nil {
		t.Fatal(n, err)
	}
	mapped, err := catalog.Load(filepath.Join(dir, "manifests", m2.Version()))
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
	if mapped.Path(0) != "a/1.jpg" {
		t.Error("a mapped manifest changed")
	}
	if err := mapped.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(other); err != nil {
		t.Error("GC removed a file that is not its own")
	}
	if _, _, err := c.Manifest("s3://c"); err != nil {
		t.Error(err)
	}
}

func TestCatalogLostManifestFile(t *testing.T) {
	dir := t.TempDir()
	c := open(t, dir)
	defer c.Close()
	m := build(t, "", "a/1.jpg")
	if err := c.SetManifest("s", m, nil); err != nil {
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
		if err := c.SetManifest("s", m, nil); err != nil {
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
	// One catalog for all checks: opening badger takes most of the time.
	dir := t.TempDir()
	c := openUnsynced(t, dir)
	defer func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	}()
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
			switch rapid.SampledFrom([]string{"commit", "commit", "commit", "commit", "commit", "drop", "drop", "forget", "reopen"}).Draw(rt, "step") {
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
				if err := c.Close(); err != nil {
					rt.Fatal(err)
				}
				c = openUnsynced(t, dir)
			}
		}
		n := 0
		for _, ds := range sets {
			var got []uint32
			err := c.Index(ds).LoadSegments(func(id uint32, size int64, sealed bool, table []byte) error {
				got = append(got, id)
				if e, ok := model[key{ds, id}]; !ok || e.size != size || e.sealed != sealed || !bytes.Equal(e.table, table) {
					rt.Fatalf("segment %d: size %d, sealed %v, table of %d bytes; want %d, %v, %d", id, size, sealed, len(table), e.size, e.sealed, len(e.table))
				}
				return nil
			})
			if err != nil || !slices.IsSorted(got) {
				rt.Fatal(got, err)
			}
			n += len(got)
			stop := errors.New("stop")
			if len(got) > 0 {
				if err := c.Index(ds).LoadSegments(func(uint32, int64, bool, []byte) error { return stop }); !errors.Is(err, stop) {
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
	c := openUnsynced(t, dir)
	defer c.Close()
	ix, other := c.Index([16]byte{7}), c.Index([16]byte{8})
	if err := errors.Join(ix.CommitSegment(3, 64, true, []byte("a table")), ix.CommitSegment(4, 65, false, nil)); err != nil {
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

// TestCatalogCorrupt damages each of badger's files in several ways. Whatever badger makes of it, at
// the latest the second start works, and what is then there is true.
func TestCatalogCorrupt(t *testing.T) {
	t.Parallel()
	made := t.TempDir()
	c := open(t, made)
	if err := c.SetManifest("s", build(t, "", "a/1.jpg"), nil); err != nil {
		t.Fatal(err)
	}
	table := bytes.Repeat([]byte("table"), 60_000)
	for id := range byte(2) { // Close makes a table file of them
		if err := errors.Join(c.Touch([16]byte{id}, string(table[:50_000])), c.Index([16]byte{id}).CommitSegment(1, 64, true, table)); err != nil {
			t.Fatal(err)
		}
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	files, err := os.ReadDir(filepath.Join(made, "catalog"))
	if err != nil {
		t.Fatal(err)
	}
	var tables, others []string // damaged copies
	for _, f := range files {
		for name, damage := range map[string]func([]byte) []byte{
			"empty":   func([]byte) []byte { return nil },
			"cut":     func(b []byte) []byte { return b[:len(b)/3] },
			"flipped": func(b []byte) []byte { b[len(b)/3] ^= 0x40; return b },
			"head":    func(b []byte) []byte { b[0] ^= 0x40; return b },
			"noise":   func(b []byte) []byte { src := rand.NewChaCha8([32]byte{}); _, _ = src.Read(b); return b },
		} {
			dir := filepath.Join(t.TempDir(), f.Name()+"-"+name)
			if err := os.CopyFS(dir, os.DirFS(made)); err != nil {
				t.Fatal(err)
			}
			path := filepath.Join(dir, "catalog", f.Name())
			b, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			if len(b) == 0 {
				continue
			}
			if err := os.WriteFile(path, damage(b), 0o600); err != nil {
				t.Fatal(err)
			}
			if strings.HasSuffix(path, ".sst") {
				tables = append(tables, dir)
			} else {
				others = append(others, dir)
			}
		}
	}
	// The first start is in a process of its own: badger may end it, or leave goroutines behind.
	rebuilt := 0
	start := func(dirs ...string) error {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), "SHOAL_TEST_OPEN="+strings.Join(dirs, string(filepath.ListSeparator)))
		out, err := cmd.CombinedOutput()
		rebuilt += bytes.Count(out, []byte("rebuilt: true"))
		if err != nil {
			err = fmt.Errorf("%w\n%.500s", err, out)
		}
		return err
	}
	if err := start(others...); err != nil {
		t.Error(err)
	}
	for _, dir := range tables {
		if err := start(dir); err != nil {
			t.Logf("%s: %v", filepath.Base(dir), err)
			if err := start(dir); err == nil {
				t.Errorf("%s: the second start gave the catalog up; the first might have been killed", filepath.Base(dir))
			}
			if err := start(dir); err != nil {
				t.Errorf("%s: the third start failed, too: %v", filepath.Base(dir), err)
			}
		}
	}
	if rebuilt < 6 {
		t.Errorf("only %d of %d damages were noticed", rebuilt, len(tables)+len(others))
	}
	t.Logf("of %d damages %d led to a rebuild", len(tables)+len(others), rebuilt)

	for _, dir := range append(others, tables...) {
		name := filepath.Base(dir)
		c := openUnsynced(t, dir)
		if _, _, err := c.Manifest("s"); err != nil && !errors.Is(err, catalog.ErrNoManifest) {
			t.Errorf("%s: %v", name, err)
		}
		list, err := c.Datasets()
		for _, d := range list {
			if d.Source != "" && d.Source != "s" && d.Source != string(table[:50_000]) {
				t.Errorf("%s: dataset %x has source %.50q", name, d.ID, d.Source)
			}
		}
		n := 0
		for id := range byte(2) {
			err = errors.Join(err, c.Index([16]byte{id}).LoadSegments(func(_ uint32, _ int64, _ bool, got []byte) error {
				if n++; !bytes.Equal(got, table) {
					t.Errorf("%s: a segment of dataset %d has a wrong table", name, id)
				}
				return nil
			}))
		}
		if n != 2 {
			t.Errorf("%s: %d record tables, want 2", name, n)
		}
		if err := errors.Join(err, c.SetManifest("s", build(t, "", "a/1.jpg"), nil), c.Close()); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestCatalogNewerFormat(t *testing.T) {
	dir := t.TempDir()
	c := open(t, dir)
	if err := catalog.SetFormatForTest(c, 3); err != nil {
		t.Fatal(err)
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	_, err := catalog.Open(dir, catalog.Options{Logger: quiet()})
	if !errors.Is(err, catalog.ErrNewerFormat) || !strings.Contains(err.Error(), "--cache-dir") {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(dir, "catalog.corrupt")); err == nil {
		t.Fatal("a newer catalog was moved aside")
	}
}

func TestCatalogHeldByAnother(t *testing.T) {
	dir := t.TempDir()
	c := open(t, dir)
	defer c.Close()
	if _, err := catalog.Open(dir, catalog.Options{Logger: quiet()}); err == nil {
		t.Fatal("opened twice")
	}
	if _, err := os.Stat(filepath.Join(dir, "catalog.corrupt")); err == nil {
		t.Fatal("a catalog in use was moved aside")
	}
}

func TestLock(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "new")
	release, err := catalog.Lock(dir)
	if err != nil {
		t.Fatal(err)
	}
	_, err = catalog.Lock(dir)
	if err == nil || !strings.Contains(err.Error(), fmt.Sprintf("pid %d: %s", os.Getpid(), os.Args[0])) || !strings.Contains(err.Error(), dir) {
		t.Fatalf("second lock: %v", err)
	}
	if err := release(); err != nil {
		t.Fatal(err)
	}
	if release, err = catalog.Lock(dir); err != nil {
		t.Fatal(err)
	}
	if err := release(); err != nil {
		t.Fatal(err)
	}
	for content, want := range map[string]error{"shoal cache 1\n": nil, "shoal cache 2\n": nil, "shoal cache 4\n": catalog.ErrNewerFormat, "something else": catalog.ErrCorrupt, "": catalog.ErrCorrupt} {
		if err := os.WriteFile(filepath.Join(dir, "FORMAT"), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		release, err := catalog.Lock(dir)
		if !errors.Is(err, want) {
			t.Errorf("FORMAT %q: %v", content, err)
		}
		if err == nil {
			if b, e := os.ReadFile(filepath.Join(dir, "FORMAT")); e != nil || string(b) != "shoal cache 2\n" {
				t.Errorf("FORMAT %q became %q, %v", content, b, e)
			}
			if err := release(); err != nil {
				t.Fatal(err)
			}
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
		release, err := catalog.Lock(dir)
		if err != nil {
			t.Fatal(err)
		}
		c := openUnsynced(t, dir)
		forked(t, filepath.Join(dir, "lock"))
		forked(t, filepath.Join(dir, "catalog"))
		if err := errors.Join(c.Close(), c.Close(), release()); err != nil {
			t.Fatal(err)
		}
	}
}

// BenchmarkEmptyCatalog tells what an open, empty catalog costs in memory and disk blocks.
func BenchmarkEmptyCatalog(b *testing.B) {
	for b.Loop() {
		dir := b.TempDir()
		before := rss(b)
		c := open(b, dir)
		b.ReportMetric(float64(rss(b)-before)/(1<<20), "RSS-MiB")
		out, err := exec.Command("du", "-sk", dir).Output()
		if err != nil {
			b.Fatal(err)
		}
		var kb float64
		if _, err := fmt.Sscan(string(out), &kb); err != nil {
			b.Fatal(err)
		}
		b.ReportMetric(kb/1024, "disk-MiB")
		if err := c.Close(); err != nil {
			b.Fatal(err)
		}
	}
}

func rss(b *testing.B) int64 {
	s, err := os.ReadFile("/proc/self/status")
	if err != nil {
		b.Fatal(err)
	}
	var kb int64
	for line := range strings.Lines(string(s)) {
		if rest, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			if _, err := fmt.Sscan(rest, &kb); err != nil {
				b.Fatal(err)
			}
		}
	}
	return kb << 10
}

// A start that is killed while it opens the catalog costs nothing.
func TestKilledWhileOpening(t *testing.T) {
	dir := t.TempDir()
	c := open(t, dir)
	m := build(t, "", "a/1.jpg")
	if err := c.SetManifest("s", m, nil); err != nil {
		t.Fatal(err)
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	// What such a start leaves.
	if err := os.WriteFile(filepath.Join(dir, "catalog.opening"), []byte("."), 0o600); err != nil {
		t.Fatal(err)
	}
	c = open(t, dir)
	defer c.Close()
	got, _, err := c.Manifest("s")
	if err != nil || c.Rebuilt() != "" {
		t.Fatalf("%v, rebuilt %q", err, c.Rebuilt())
	}
	defer got.Close()
	if got.Version() != m.Version() {
		t.Errorf("version %s, want %s", got.Version(), m.Version())
	}
	if _, err := os.Stat(filepath.Join(dir, "catalog.opening")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the mark is still there: %v", err)
	}
}

// A folder of format 1, closed or killed, keeps its manifests. Its record tables go.
func TestFormat1(t *testing.T) {
	t.Parallel()
	for _, end := range []string{"close", "kill"} {
		t.Run(end, func(t *testing.T) {
			dir := t.TempDir()
			if out, err := exec.Command("tar", "-xzf", filepath.Join("testdata", "cache-v1-"+end+".tar.gz"), "-C", dir).CombinedOutput(); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			release, err := catalog.Lock(dir)
			if err != nil {
				t.Fatal(err)
			}
			defer release()
			for range 2 { // migrated, and as it is from then on
				c := open(t, dir)
				for source, n := range map[string]int{"s3://b/p": 2, "s3://b/q": 2} {
					m, l, err := c.Manifest(source)
					if err != nil {
						t.Fatal(err)
					}
					if m.Len() != n || l != nil || m.Object(0).Key != "p/a/1.jpg" {
						t.Errorf("%s: %d files, layout %v", source, m.Len(), l)
					}
					if err := m.Close(); err != nil {
						t.Fatal(err)
					}
				}
				if c.Rebuilt() != "" || len(catalog.KeysForTest(t, c)) != 3 {
					t.Errorf("rebuilt %q, keys %q", c.Rebuilt(), catalog.KeysForTest(t, c))
				}
				list, err := c.Datasets()
				if err != nil || len(list) != 2 || list[0].ID != catalog.DatasetID("s3://b/p") || list[0].Files != 2 {
					t.Errorf("%+v, %v", list, err)
				}
				if err := c.Close(); err != nil {
					t.Fatal(err)
				}
			}
		})
	}
}

// TestDatasets compares the facts with a map, over reopenings.
func TestDatasets(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	c := openUnsynced(t, dir)
	defer func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	}()
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
			switch rapid.SampledFrom([]string{"quota", "pin", "touch", "forget", "list", "table", "reopen"}).Draw(rt, "step") {
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
				err = c.SetManifest(name, m, nil)
				change(id, func(d *catalog.Dataset) { d.Source, d.Version = name, m.Version() })
			case "table":
				err = c.Index(id).CommitSegment(1, 64, true, nil)
				change(id, func(*catalog.Dataset) {})
			case "reopen":
				err = c.Close()
				c = openUnsynced(t, dir)
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
			if !ok || d.Quota != w.Quota || d.Pinned != w.Pinned || d.LastUsed.IsZero() != w.LastUsed.IsZero() || d.LastUsed.Sub(w.LastUsed).Abs() > time.Minute {
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
		n := 0
		for _, w := range model {
			if w.Version != "" {
				n++
			}
		}
		if err != nil || len(sources) != n {
			rt.Fatalf("sources %+v, %v; want %d", sources, err, n)
		}
	})
	if err := c.SetQuota([16]byte{1}, -1); err == nil {
		t.Error("a negative quota was taken")
	}
}

// Two datasets can be of one source; it goes with the last.
func TestForgetSharedSource(t *testing.T) {
	c := openUnsynced(t, t.TempDir())
	defer c.Close()
	a, b := [16]byte{1}, [16]byte{2}
	if err := errors.Join(c.SetManifest("s", build(t, "", "a/1.jpg"), nil), c.Touch(a, "s"), c.Touch(b, "s"), c.Forget(a)); err != nil {
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

// Shards of WebDataset mostly hold files without folders. They are numbered, without labels; beside a
// folder they are not.
func TestFilesWithoutFoldersAreSamples(t *testing.T) {
	build := func(paths ...string) *catalog.Manifest {
		m, err := catalog.Build(func(yield func(objstore.Object, error) bool) {
			for _, p := range paths {
				if !yield(objstore.Object{Key: p, Size: 1, ETag: "e"}, nil) {
					return
				}
			}
		}, catalog.BuildOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return m
	}
	images, err := catalog.Match("images")
	if err != nil {
		t.Fatal(err)
	}
	flat := build("000.cls", "000.jpg", "001.cls", "001.jpg")
	s := flat.Samples(images)
	if s.Len() != 2 || flat.Path(s.File(0)) != "000.jpg" || flat.Path(s.File(1)) != "001.jpg" || s.Label(0) != -1 || len(s.Classes()) != 0 {
		t.Errorf("%d samples, first %q with label %d, classes %v", s.Len(), flat.Path(s.File(0)), s.Label(0), s.Classes())
	}
	if s := flat.Samples(nil); s.Len() != 4 {
		t.Errorf("%d samples of all files", s.Len())
	}
	if s := build("000.jpg", "a/001.jpg").Samples(images); s.Len() != 1 || s.Label(0) != 0 {
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
		"train/a/1.jpg", "train/a/2.jpg", "train/a/note.txt", "train/b/1.jpg", "train/stray.jpg", "val/a/1.jpg")
	for _, c := range []struct {
		match func(string) bool
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
