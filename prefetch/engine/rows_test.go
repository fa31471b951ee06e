package engine

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/apache/arrow-go/v18/parquet"
	"github.com/apache/arrow-go/v18/parquet/file"
	"github.com/apache/arrow-go/v18/parquet/schema"

	"github.com/shoalfs/shoal/cache/cachedir"
)

// parquetOf writes a Parquet file of groups of so many rows, with a column text, which value gives, and another.
func parquetOf(t testing.TB, path string, groups, rows int, value func(row int) string) {
	t.Helper()
	var fields schema.FieldList
	for _, name := range []string{"other", "text"} {
		fields = append(fields, schema.NewByteArrayNode(name, parquet.Repetitions.Required, -1))
	}
	root, err := schema.NewGroupNode("schema", parquet.Repetitions.Required, fields, -1)
	if err != nil {
		t.Fatal(err)
	}
	out, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	w := file.NewParquetWriter(out, root)
	for g := range groups {
		group, err := w.AppendRowGroupChecked()
		if err != nil {
			t.Fatal(err)
		}
		for range fields {
			values := make([]parquet.ByteArray, rows)
			for i := range values {
				values[i] = parquet.ByteArray(value(g*rows + i))
			}
			column, err := group.NextColumn()
			if err == nil {
				_, err = column.(*file.ByteArrayColumnChunkWriter).WriteBatch(values, nil, nil)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		if err := group.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil { // and out
		t.Fatal(err)
	}
}

// However an order goes through the rows of Parquet files, each chunk is fetched once to list it, and once for all of
// its rows; other columns are not.
func TestChunksAreFetchedOnce(t *testing.T) {
	const files, groups, rows = 4, 4, 600
	dir := t.TempDir()
	value := func(f, row int) string { return strings.Repeat(fmt.Sprintf("%d/%d ", f, row), 1+row%70) }
	for f := range files {
		parquetOf(t, filepath.Join(dir, fmt.Sprintf("part.%d.parquet", f)), groups, rows,
			func(row int) string { return value(f, row) })
	}
	e := open(t, HostConfig{Options: cachedir.Options{Path: t.TempDir(), Size: 256 << 20, Memory: 256 << 20}},
		Config{Source: "file://" + dir, Samples: "rows:text,", Order: spec(t, "uniform:seed=1")})
	defer closeEngine(t, e)
	waitFor(t, "the whole epoch is staged", func() bool { return e.Stats().Lead == files*groups*rows })
	if s := e.Stats(); s.GetRequests-s.Hedges.Sent != 2*(files+files*groups) { // footers and chunks
		t.Errorf("%d GETs, of which %d hedges, want %d twice", s.GetRequests, s.Hedges.Sent, files+files*groups)
	}
	by, _ := e.Dataset().Groups()
	if by.Len() != files*groups || by.Size(0) != rows || by.At(1, 0) != rows {
		t.Errorf("windowed has %d groups, the first of %d rows", by.Len(), by.Size(0))
	}
	m := e.Manifest()
	for f := range files {
		for row := range groups * rows {
			name := fmt.Sprintf("part_%d-%012d.text", f, row)
			node, ok := m.Find(name)
			if !ok {
				t.Fatalf("no %s", name)
			}
			p := make([]byte, 1<<10)
			n, err := e.ReadAt(t.Context(), m, node.Index, p, 0)
			if err != nil || string(p[:n]) != value(f, row) {
				t.Fatalf("%s: %q, %v", name, p[:n], err)
			}
		}
	}
}

// A refresh decodes the Parquet files that are new or have changed, and has the list that a first one would make.
func TestRefreshDecodesWhatChanged(t *testing.T) {
	const groups, rows = 3, 20
	dir := t.TempDir()
	write := func(name string, values string) {
		parquetOf(t, filepath.Join(dir, name), groups, rows, func(row int) string {
			return strings.Repeat(fmt.Sprint(values, row), 1+row/59*6000)
		})
	}
	write("a.parquet", "a")
	write("b.parquet", strings.Repeat("b", 900)) // the last one is longer than an extent
	write("d.parquet", "d")
	cfg := Config{Source: "file://" + dir, Samples: "rows:text,", Order: spec(t, "none")}
	options := func() HostConfig {
		return HostConfig{Options: cachedir.Options{Path: t.TempDir(), Size: 256 << 20, Memory: 1 << 30}}
	}
	e := open(t, options(), cfg)
	defer closeEngine(t, e)
	for _, c := range []struct {
		what   string
		change func()
		files  int
		chunks int
	}{
		{"nothing", func() {}, 3, 0},
		{"one is new", func() { write("c.parquet", "c") }, 4, groups - 1}, // the small ones come together
		{"one has changed", func() { write("a.parquet", "other") }, 4, groups - 1},
		{"one is gone", func() { _ = os.Remove(filepath.Join(dir, "b.parquet")) }, 3, 0},
	} {
		c.change()
		before := e.Stats()
		if changed, err := e.Refresh(t.Context()); err != nil || changed != (c.what != "nothing") {
			t.Fatalf("%s: changed %t, %v", c.what, changed, err)
		}
		after := e.Stats()
		n := after.GetRequests - before.GetRequests - (after.Hedges.Sent - before.Hedges.Sent)
		if int(n) != c.files+c.chunks {
			t.Errorf("%s: %d GETs, want one for each of %d files and %d for chunks", c.what, n, c.files, c.chunks)
		}
		first := open(t, options(), cfg)
		if a, b := e.cur.Load(), first.cur.Load(); a.name() != b.name() {
			t.Errorf("%s: the list is %s, a first one %s", c.what, a.name(), b.name())
		}
		closeEngine(t, first)
	}
}

// What lies in objects is selected by rows, and one column by its name, with or without what its files end in.
func TestSamplesInObjects(t *testing.T) {
	if err := CheckSamples("rows:"); err == nil || !strings.Contains(err.Error(), "is not valid") {
		t.Errorf("rows without a column's name: %v", err)
	}
	host := HostConfig{Options: cachedir.Options{Path: t.TempDir(), Size: 64 << 20, Memory: 256 << 20}}
	for pattern, want := range map[string]int{"rows": 16, "rows:image": 8, "rows:image.png": 8, "rows:tokens": 8,
		"rows:label": 8, "rows:caption": 8, "rows:cap": 0} {
		e := open(t, host, Config{Source: "../../cache/shard/testdata/sources/mds", Samples: pattern,
			Order: spec(t, "none")})
		d := e.Dataset()
		if d.Len() != want {
			t.Errorf("%s: %d samples, want %d", pattern, d.Len(), want)
		}
		if err := d.NoSamples(); want == 0 &&
			(err == nil || !strings.Contains(err.Error(), "rows:caption.txt, rows:image.png")) {
			t.Errorf("%s: %v", pattern, err)
		}
		closeEngine(t, e)
	}
}
