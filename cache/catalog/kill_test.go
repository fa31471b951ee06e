package catalog_test

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"iter"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/internal/killpoint"
	"github.com/shoalfs/shoal/lab/rig/memstore"
)

func places(m *catalog.Manifest) iter.Seq2[catalog.Place, error] {
	return func(yield func(catalog.Place, error) bool) {
		for f := range m.Len() {
			if !yield(catalog.Place{Path: m.Path(f), Off: int64(512 * f)}, nil) {
				return
			}
		}
	}
}

func buildFor(paths ...string) (*catalog.Manifest, *catalog.Layout, error) {
	var objs []objstore.Object
	for i, p := range paths {
		objs = append(objs, objstore.Object{Key: p, Size: int64(i + 1), ETag: fmt.Sprint("e", i)})
	}
	m, err := catalog.Build(memstore.Listing(objs...), catalog.BuildOptions{})
	if err != nil {
		return nil, nil, err
	}
	l, err := catalog.BuildLayout(m, []objstore.Object{{Key: "shard.tar", Size: 1 << 20, ETag: "s"}}, places(m))
	return m, l, err
}

// killSteps are what a killed process was at. Each changes what state describes.
func killSteps(dir string) []func(c *catalog.Catalog) error {
	ds := catalog.DatasetID("s")
	set := func(withLayout bool, paths ...string) func(c *catalog.Catalog) error {
		return func(c *catalog.Catalog) error {
			m, l, err := buildFor(paths...)
			if err != nil {
				return err
			}
			if !withLayout {
				l = nil
			}
			return c.SetManifest("s", m, l, 0)
		}
	}
	return []func(c *catalog.Catalog) error{
		set(false, "a/1"),
		set(true, "a/1", "a/2"),
		func(c *catalog.Catalog) error { _, err := c.GC(); return err },
		func(c *catalog.Catalog) error { return c.Touch(ds, "s") },
		func(c *catalog.Catalog) error { return c.SetQuota(ds, 7) },
		func(c *catalog.Catalog) error { return c.SetCoding(ds, [][]byte{[]byte("tables")}) },
		func(c *catalog.Catalog) error { return c.Index(ds).CommitSegment(1, 64, false, []byte("one")) },
		func(c *catalog.Catalog) error { return c.Index(ds).CommitSegment(1, 128, true, []byte("two")) },
		set(true, "a/1", "a/2", "a/3"),
		func(c *catalog.Catalog) error { return c.Forget(ds) },
		func(c *catalog.Catalog) error { _, err := c.GC(); return err },
	}
}

// killScript says on stdout after each step that it is done.
func killScript(dir string) error {
	_, release, err := catalog.Lock(dir, nil, false)
	if err != nil {
		return err
	}
	c, err := catalog.Open(dir, catalog.Options{Logger: quiet()})
	if err != nil {
		return err
	}
	for i, step := range killSteps(dir) {
		if err := step(c); err != nil {
			return fmt.Errorf("step %d: %w", i, err)
		}
		fmt.Println("done", i)
	}
	return errors.Join(c.Close(), release())
}

// state describes all that a catalog says of the source and the dataset of killSteps.
func state(t *testing.T, c *catalog.Catalog) string {
	t.Helper()
	var b strings.Builder
	m, l, err := c.Manifest("s")
	switch {
	case errors.Is(err, catalog.ErrNoManifest):
		fmt.Fprintln(&b, "no manifest")
	case err != nil:
		t.Fatal(err)
	default:
		fmt.Fprintf(&b, "%d files", m.Len())
		if err := errors.Join(m.Verify(), m.Close()); err != nil {
			t.Fatal(err)
		}
		if l != nil {
			fmt.Fprintf(&b, ", %d laid out", l.Len())
			if err := errors.Join(l.Verify(), l.Close()); err != nil {
				t.Fatal(err)
			}
		}
		fmt.Fprintln(&b)
	}
	list, err := c.Datasets()
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range list {
		if d.ID == catalog.DatasetID("s") {
			fmt.Fprintf(&b, "source %q, quota %d, used %v\n", d.Source, d.Quota, !d.LastUsed.IsZero())
		}
	}
	if coding := c.Coding(catalog.DatasetID("s")); len(coding) > 0 {
		fmt.Fprintf(&b, "coding %q\n", coding)
	}
	err = c.Index(catalog.DatasetID("s")).LoadSegments(func(id uint32, size int64, sealed bool, table []byte) error {
		fmt.Fprintf(&b, "segment %d: %d, %v, %q\n", id, size, sealed, table)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return b.String()
}

// TestKill kills a process at every point of every commit. The catalog then opens, without a rebuild, and
// is as before the step that was under way or as after it; Forget may have got half way, and another call
// finishes it. Nothing is left over after a GC.
func TestKill(t *testing.T) {
	t.Parallel()
	exe := os.Args[0]
	if !killpoint.Enabled {
		exe = filepath.Join(t.TempDir(), "killed.test")
		if out, err := exec.Command("go", "test", "-c", "-tags", "killpoints", "-o", exe,
			".").CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	start := t.TempDir()
	if err := open(t, start).SetManifest("other", build(t, "p/", "a/1.jpg"), nil, 0); err != nil {
		t.Fatal(err)
	}
	run := func(dir string, env ...string) (done int, err error) {
		cmd := exec.Command(exe)
		cmd.Env = append(append(os.Environ(), "SHOAL_TEST_KILL="+dir), env...)
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		out, err := cmd.Output()
		if err != nil {
			err = fmt.Errorf("%w: %s", err, stderr.Bytes())
		}
		return strings.Count(string(out), "done"), err
	}
	fresh := func(t *testing.T) string {
		dir := t.TempDir()
		if err := os.CopyFS(dir, os.DirFS(start)); err != nil {
			t.Fatal(err)
		}
		return dir
	}

	// The states between the steps, without a kill.
	dir := fresh(t)
	c := open(t, dir)
	steps := killSteps(dir)
	states := []string{state(t, c)}
	for _, step := range steps {
		if err := step(c); err != nil {
			t.Fatal(err)
		}
		states = append(states, state(t, c))
	}

	log := filepath.Join(t.TempDir(), "points")
	if n, err := run(fresh(t), "SHOAL_KILLPOINTS_LOG="+log); err != nil || n != len(steps) {
		t.Fatal(n, err)
	}
	f, err := os.Open(log)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	passed := make(map[string]int)
	for sc := bufio.NewScanner(f); sc.Scan(); {
		passed[sc.Text()]++
	}
	for _, point := range []string{
		"catalog.cacheformat.renamed", "catalog.manifest.created", "catalog.manifest.written",
		"catalog.manifest.synced",
		"catalog.manifest.renamed", "catalog.manifest.durable", "catalog.layout.renamed", "catalog.source.written",
		"catalog.source.renamed",
		"catalog.table.written", "catalog.table.renamed", "catalog.dataset.renamed", "catalog.coding.renamed",
		"catalog.forget.tables", "catalog.forget.renamed",
		"catalog.gc.removed",
	} {
		if passed[point] == 0 {
			t.Errorf("%s was not passed", point)
		}
	}
	kill := func(t *testing.T, point string, n int) {
		dir := fresh(t)
		done, err := run(dir, fmt.Sprintf("SHOAL_KILLPOINT=%s:%d", point, n))
		var exit *exec.ExitError
		if !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
			t.Fatal(err)
		}
		_, release, err := catalog.Lock(dir, nil, false)
		if err != nil {
			t.Fatal(err)
		}
		c := open(t, dir)
		if c.Rebuilt() != "" {
			t.Error("rebuilt")
		}
		if strings.HasPrefix(point, "catalog.forget.") {
			if err := c.Forget(catalog.DatasetID("s")); err != nil {
				t.Fatal(err)
			}
		}
		if got := state(t, c); got != states[done] && got != states[done+1] {
			t.Errorf("in step %d:\n%swant\n%sor\n%s", done, got, states[done], states[done+1])
		}
		// What was there before is never lost.
		if m, _, err := c.Manifest("other"); err != nil {
			t.Error(err)
		} else if err := m.Close(); err != nil {
			t.Fatal(err)
		}
		// From here the script goes on to its end.
		for i, step := range steps[done:] {
			if err := step(c); err != nil {
				t.Fatalf("step %d again: %v", done+i, err)
			}
		}
		if got := state(t, c); got != states[len(steps)] {
			t.Errorf("at the end\n%swant\n%s", got, states[len(steps)])
		}
		if err := release(); err != nil {
			t.Fatal(err)
		}
		var left []string
		for _, pattern := range []string{".tmp-*", "*/.tmp-*", "tables/*/*", "layouts/*", "manifests/*", "codings/*"} {
			names, err := filepath.Glob(filepath.Join(dir, pattern))
			if err != nil {
				t.Fatal(err)
			}
			left = append(left, names...)
		}
		if len(left) != 1 { // the other manifest
			t.Errorf("%q are left", left)
		}
	}
	for _, point := range slices.Sorted(maps.Keys(passed)) {
		for n := range passed[point] {
			t.Run(fmt.Sprintf("%s:%d", point, n+1), func(t *testing.T) {
				t.Parallel() // they wait for the disk
				kill(t, point, n+1)
			})
		}
	}
	t.Logf("%d points", len(passed))
}
