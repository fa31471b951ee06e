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
	"strings"
	"testing"

	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/cache/segment"
)

var _ segment.Index = (*catalog.Catalog)(nil)

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
	if _, err := c.Manifest("s3://b/p"); !errors.Is(err, catalog.ErrNoManifest) {
		t.Fatal(err)
	}
	m1, m2 := build(t, "p/", "a/1.jpg", "b/2.jpg"), build(t, "p/", "a/1.jpg")
	same := build(t, "copy/of/", "a/1.jpg", "b/2.jpg")
	if m1.Version() != same.Version() || m1.Version() == m2.Version() {
		t.Fatal("versions", m1.Version(), same.Version(), m2.Version())
	}
	for source, m := range map[string]*catalog.Manifest{"s3://b/p": m1, "s3://b/copy": same, "s3://c": m2} {
		if err := c.SetManifest(source, m); err != nil {
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
		m, err := c.Manifest(source)
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
	if err := c.SetManifest("s3://c", m1); err != nil {
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
	if _, err := c.Manifest("s3://c"); err != nil {
		t.Error(err)
	}
}

func TestCatalogLostManifestFile(t *testing.T) {
	dir := t.TempDir()
	c := open(t, dir)
	defer c.Close()
	m := build(t, "", "a/1.jpg")
	if err := c.SetManifest("s", m); err != nil {
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
		if _, err := c.Manifest("s"); !errors.Is(err, catalog.ErrNoManifest) {
			t.Errorf("%s: %v", name, err)
		}
		if err := c.SetManifest("s", m); err != nil {
			t.Fatal(err)
		}
		got, err := c.Manifest("s")
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
	ids := []uint32{1, 2, 3, 255, 256, 1 << 24}
	rapid.Check(t, func(rt *rapid.T) {
		for _, id := range ids {
			if err := c.DropSegment(id); err != nil {
				rt.Fatal(err)
			}
		}
		model := make(map[uint32]entry)
		for range rapid.IntRange(1, 6).Draw(rt, "steps") {
			id := rapid.SampledFrom(ids).Draw(rt, "id")
			switch rapid.SampledFrom([]string{"commit", "commit", "commit", "commit", "commit", "drop", "drop", "reopen"}).Draw(rt, "step") {
			case "commit":
				e := entry{int64(rapid.Uint32().Draw(rt, "size")), rapid.Bool().Draw(rt, "sealed"), nil}
				n := rapid.SampledFrom([]int{0, 1, 1000, 256 << 10, 256<<10 + 1, 1 << 20}).Draw(rt, "table")
				e.table = make([]byte, n)
				src := rand.NewChaCha8([32]byte{byte(n), byte(e.size)})
				_, _ = src.Read(e.table)
				if err := c.CommitSegment(id, e.size, e.sealed, e.table); err != nil {
					rt.Fatal(err)
				}
				model[id] = e
			case "drop":
				if err := c.DropSegment(id); err != nil {
					rt.Fatal(err)
				}
				delete(model, id)
			case "reopen":
				if err := c.Close(); err != nil {
					rt.Fatal(err)
				}
				c = openUnsynced(t, dir)
			}
		}
		var got []uint32
		err := c.LoadSegments(func(id uint32, size int64, sealed bool, table []byte) error {
			got = append(got, id)
			if e, ok := model[id]; !ok || e.size != size || e.sealed != sealed || !bytes.Equal(e.table, table) {
				rt.Fatalf("segment %d: size %d, sealed %v, table of %d bytes; want %d, %v, %d", id, size, sealed, len(table), e.size, e.sealed, len(e.table))
			}
			return nil
		})
		if err != nil || len(got) != len(model) || !slices.IsSorted(got) {
			rt.Fatal(got, err)
		}
		stop := errors.New("stop")
		if len(got) > 0 {
			if err := c.LoadSegments(func(uint32, int64, bool, []byte) error { return stop }); !errors.Is(err, stop) {
				rt.Fatal("the error of yield was", err)
			}
		}
	})
}

// TestCatalogCorrupt damages each of badger's files in several ways. Whatever badger makes of it, at
// the latest the second start works, and what is then there is true.
func TestCatalogCorrupt(t *testing.T) {
	made := t.TempDir()
	c := open(t, made)
	if err := c.SetManifest("s", build(t, "", "a/1.jpg")); err != nil {
		t.Fatal(err)
	}
	table := bytes.Repeat([]byte("table"), 60_000)
	for id := range uint32(2) { // Close makes a table file of them
		if err := c.CommitSegment(id+1, 64, true, table); err != nil {
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
		if _, err := c.Manifest("s"); err != nil && !errors.Is(err, catalog.ErrNoManifest) {
			t.Errorf("%s: %v", name, err)
		}
		err := c.LoadSegments(func(id uint32, _ int64, _ bool, got []byte) error {
			if len(got) != 0 && !bytes.Equal(got, table) {
				t.Errorf("%s: segment %d has a wrong table", name, id)
			}
			return nil
		})
		if err := errors.Join(err, c.SetManifest("s", build(t, "", "a/1.jpg")), c.Close()); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestCatalogNewerFormat(t *testing.T) {
	dir := t.TempDir()
	c := open(t, dir)
	if err := catalog.SetFormatForTest(c, 2); err != nil {
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
	for content, want := range map[string]error{"shoal cache 1\n": nil, "shoal cache 2\n": catalog.ErrNewerFormat, "something else": catalog.ErrCorrupt, "": catalog.ErrCorrupt} {
		if err := os.WriteFile(filepath.Join(dir, "FORMAT"), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		release, err := catalog.Lock(dir)
		if !errors.Is(err, want) {
			t.Errorf("FORMAT %q: %v", content, err)
		}
		if err == nil {
			if err := release(); err != nil {
				t.Fatal(err)
			}
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
	if err := c.SetManifest("s", m); err != nil {
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
	got, err := c.Manifest("s")
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
