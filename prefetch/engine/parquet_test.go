package engine

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/shoalfs/shoal/cache/cachedir"
)

// Files of several extents in Parquet are read by small ranges at any place, with and without a damaged file beside,
// also after a refresh, and a version before goes on with its own bytes or fails.
func TestParquetRanges(t *testing.T) {
	dir := t.TempDir()
	value := func(of int) func(row int) string {
		return func(row int) string { return strings.Repeat(fmt.Sprintf("%d/%d ", of, row), 1+row*500_000) }
	}
	parquetOf(t, filepath.Join(dir, "a.parquet"), 2, 2, value(0))
	parquetOf(t, filepath.Join(dir, "b.parquet"), 1, 3, value(1))
	if err := os.WriteFile(filepath.Join(dir, "c.parquet"), []byte("PAR1 damaged PAR1"), 0o644); err != nil {
		t.Fatal(err)
	}
	host := HostConfig{Options: cachedir.Options{Path: t.TempDir(), Size: 64 << 20, Memory: 512 << 20}}
	e := open(t, host, Config{Source: "file://" + dir, Samples: "rows:text", SkipBadShards: true,
		Order: spec(t, "none")})
	defer closeEngine(t, e)
	before := e.Manifest()
	if before.Len() != 2*(4+3) {
		t.Fatalf("%d files", before.Len())
	}
	check := func(name string, want string) {
		t.Helper()
		node, ok := e.Manifest().Find(name)
		if !ok {
			t.Fatalf("no %s", name)
		}
		for range 60 {
			off := rand.IntN(len(want) + 10)
			p := make([]byte, rand.IntN(1<<[]int{3, 12, 17, 23}[rand.IntN(4)])+1)
			n, err := e.ReadAt(t.Context(), e.Manifest(), node.Index, p, int64(off))
			off = min(off, len(want))
			if err != nil || !bytes.Equal(p[:n], []byte(want[off:min(off+len(p), len(want))])) {
				t.Fatalf("%s: %d bytes at %d of %d: %d, %v", name, len(p), off, len(want), n, err)
			}
		}
	}
	all := func(of string, rows int, value func(int) string) {
		t.Helper()
		for row := range rows {
			for _, column := range []string{"text", "other"} {
				check(fmt.Sprintf("%s-%012d.%s", of, row, column), value(row))
			}
		}
	}
	all("a", 4, value(0))
	all("b", 3, value(1))
	parquetOf(t, filepath.Join(dir, "b.parquet"), 1, 3, value(7)) // as long
	parquetOf(t, filepath.Join(dir, "c.parquet"), 1, 3, value(2))
	node, _ := before.Find("b-000000000002.text")
	for range 200 {
		p := make([]byte, 1000)
		off := int64(rand.IntN(1 << 20))
		if n, err := e.ReadAt(t.Context(), before, node.Index, p, off); err == nil &&
			string(p[:n]) != value(1)(2)[off:][:n] {
			t.Fatalf("other bytes: %q", p[:n])
		}
	}
	if changed, err := e.Refresh(t.Context()); err != nil || !changed {
		t.Fatal(changed, err)
	}
	all("a", 4, value(0))
	all("b", 3, value(7))
	all("c", 3, value(2))
}
