package shard

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/apache/arrow-go/v18/parquet"
	"github.com/apache/arrow-go/v18/parquet/compress"
	"github.com/apache/arrow-go/v18/parquet/file"
	"github.com/apache/arrow-go/v18/parquet/schema"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/lab/rig/memstore"
)

// inColumn returns a Parquet file of one column of strings.
func inColumn(t testing.TB, values ...string) []byte {
	t.Helper()
	text := schema.NewByteArrayNode("text", parquet.Repetitions.Required, -1)
	return parquetFileOf(t, schema.FieldList{text}, 1, func(_, _ int, w file.ColumnChunkWriter) error {
		all := make([]parquet.ByteArray, len(values))
		for i, v := range values {
			all[i] = parquet.ByteArray(v)
		}
		_, err := w.(*file.ByteArrayColumnChunkWriter).WriteBatch(all, nil, nil)
		return err
	}, parquet.WithCompression(compress.Codecs.Zstd))
}

// No two files' rows have the same names, and a dataset without a value is no missing one.
func TestParquetTwins(t *testing.T) {
	mem := memstore.New()
	for _, key := range []string{"p/a.b.parquet", "p/a_b.PARQUET"} { // the same bytes, which would become one file
		mem.PutBytes(key, inColumn(t, "x"))
	}
	if _, _, err := readRows(t, mem, "p/", OpenOptions{}); err == nil || !strings.Contains(err.Error(),
		"p/a_b.PARQUET: its samples have the names of those in p/a.b.parquet: rename") {
		t.Error(err)
	}
	if files, bad, err := readRows(t, mem, "p/", OpenOptions{SkipBad: true}); err != nil || len(bad) != 1 ||
		len(files) != 1 {
		t.Errorf("%v, %d bad, %v", err, len(bad), files)
	}
	mem.PutBytes("q/a.parquet", inColumn(t))
	if _, _, err := readRows(t, mem, "q/", OpenOptions{}); err == nil ||
		!strings.Contains(err.Error(), "no sample in q/a.parquet") {
		t.Error(err)
	}
}

// TestParquetThatLies has an error that names the file for each lie. With SkipBad that file is left out.
func TestParquetThatLies(t *testing.T) {
	at := func(from int, with ...byte) func(b []byte) []byte { // from the end if below 0
		return func(b []byte) []byte {
			if copy(b[(from+len(b))%len(b):], with) < len(with) {
				t.Fatal("too short")
			}
			return b
		}
	}
	for _, c := range []struct {
		what   string
		change func(b []byte) []byte
		want   string
	}{
		{"empty", func([]byte) []byte { return nil }, "too small"},
		{"truncated", func(b []byte) []byte { return b[:len(b)-1] }, "smaller than"},
		{"no Parquet", at(-4, []byte("ORC1")...), "magic bytes"},
		{"a footer longer than the file", at(-8, 0xff, 0xff, 0xff, 0), "smaller than"},
		{"a footer of 4 GiB", at(-8, 0xff, 0xff, 0xff, 0xff), "more than 67108864"},
		{"a footer of 0 bytes", at(-8, 0, 0, 0, 0), "footer"},
		{"encrypted", at(-1, 'E'), "encrypted"},
		{"no footer", func(b []byte) []byte {
			n := int(binary.LittleEndian.Uint32(b[len(b)-8:]))
			clear(b[len(b)-8-n : len(b)-8])
			return b
		}, "c.gzip.parquet"},
		{"other pages", func(b []byte) []byte { clear(b[4:200]); return b }, "column image.bytes of row group 0"},
		{"other columns", func([]byte) []byte { return inColumn(t, "a") }, "the columns text?"},
	} {
		t.Run(c.what, func(t *testing.T) {
			const key = "train/c.gzip.parquet"
			mem := change(t, "parquet", key, func(b []byte) []byte { return append([]byte{}, c.change(b)...) })
			_, _, err := readRows(t, mem, "parquet/", OpenOptions{})
			if err == nil || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), key) {
				t.Fatalf("%v, want %q of %s", err, c.want, key)
			}
			files, bad, err := readRows(t, mem, "parquet/", OpenOptions{SkipBad: true})
			if err != nil || len(bad) != 1 || files["train/a_snappy-000000000000.weight.float32"] == nil {
				t.Fatalf("%v, %d bad, %d files", err, len(bad), len(files))
			}
		})
	}
}

// TestParquetRows makes rows of levels, up to a bound.
func TestParquetRows(t *testing.T) {
	for _, c := range []struct {
		what   string
		column parquetColumn
		levels []int16 // definition, repetition
		left   int64
		want   string
	}{
		{"values", parquetColumn{full: 1}, []int16{1, 0, 0, 0, 1, 0}, 9, "0:ab 2:ab "},
		{"lists", parquetColumn{full: 3, empty: 1, lists: true}, []int16{0, 0, 1, 0, 3, 0, 3, 1, 3, 0}, 9,
			"1: 2:abab 3:ab "},
		{"null in a list", parquetColumn{full: 3, empty: 1, lists: true}, []int16{3, 0, 2, 1}, 9,
			"row 0 of the group has null within a list"},
		{"no begin", parquetColumn{full: 3, empty: 1, lists: true}, []int16{3, 1, 3, 0}, 9, "it begins within a list"},
		{"too much", parquetColumn{full: 0}, []int16{0, 0, 0, 0}, 3, "write smaller row groups"},
	} {
		var got strings.Builder
		e := parquetRows{parquetColumn: &c.column, row: -1, left: c.left, emit: func(row int64, value []byte) bool {
			fmt.Fprintf(&got, "%d:%s ", row, value)
			return true
		}}
		for i := 0; i < len(c.levels); i += 2 {
			e.level(c.levels[i], c.levels[i+1], []byte("ab"))
		}
		if e.end(); e.err != nil {
			got.WriteString(e.err.Error())
		}
		if !strings.Contains(got.String(), c.want) {
			t.Errorf("%s: %q, want %q", c.what, got.String(), c.want)
		}
	}
}

// TestParquetColumns shows the named columns only.
func TestParquetColumns(t *testing.T) {
	files, _, err := readRows(t, stored(t, "parquet"), "parquet/", OpenOptions{Columns: []string{"weight", "ids"}})
	if err != nil || files["val/f-000000000007.weight.float32"] == nil {
		t.Fatal(err, len(files))
	}
	for name := range files {
		if !strings.HasSuffix(name, ".weight.float32") && !strings.HasSuffix(name, ".ids.int32") {
			t.Error(name)
		}
	}
}

// TestParquetRuns lists a file of many small row groups by few requests.
func TestParquetRuns(t *testing.T) {
	column := func(name string) schema.Node { return schema.NewByteArrayNode(name, parquet.Repetitions.Required, -1) }
	mem := memstore.New()
	mem.PutBytes("a.parquet", parquetFileOf(t, schema.FieldList{column("a"), column("b"), column("c")}, 300,
		func(group, column int, w file.ColumnChunkWriter) error {
			return writeOne(w, strings.Repeat(fmt.Sprint(group, column), 500))
		}, parquet.WithDictionaryDefault(false), parquet.WithStats(false)))
	for columns, most := range map[string]int64{"": 5, "b": 5} { // the others are passed over, if they are short
		r := &counted{Reader: mem}
		var o OpenOptions
		if columns != "" {
			o.Columns = []string{columns}
		}
		s, err := OpenRows(t.Context(), r, objstore.Source{}, o)
		if err != nil {
			t.Fatal(err)
		}
		n, restorer := 0, NewRestorer(mem, nil, nil, 0)
		for m, err := range s.Members(t.Context()) {
			b := make([]byte, m.Size)
			if err = cmp.Or(err, restorer.ReadAt(t.Context(), s.Objects()[m.Shard], b, m.Off)); err != nil {
				t.Fatal(err)
			}
			at := strings.IndexByte("abc", m.Path[len(m.Path)-1])
			if want := strings.Repeat(fmt.Sprint(n/(3-2*len(columns)), at), 500); string(b) != want {
				t.Fatalf("%s: %.20q, want %.20q", m.Path, b, want)
			}
			n++
		}
		if n != 900/(1+2*len(columns)) || r.n.Load() > most {
			t.Errorf("%q: %d files, %d requests", columns, n, r.n.Load())
		}
	}
}

// TestParquetChunks reads rows in any order, several at once: what each wants is fetched with its chunk.
func TestParquetChunks(t *testing.T) {
	mem := stored(t, "parquet")
	s, err := OpenRows(t.Context(), mem, objstore.Source{Prefix: "parquet/"}, OpenOptions{})
	if err != nil {
		t.Fatal(err)
	}
	all, _, err := readRows(t, mem, "parquet/", OpenOptions{})
	if err != nil {
		t.Fatal(err)
	}
	var members []Member
	for m, err := range s.Members(t.Context()) {
		if err != nil {
			t.Fatal(err)
		}
		members = append(members, m)
	}
	r := NewRestorer(mem, nil, nil, 4096)
	var wg sync.WaitGroup
	for range 4 {
		order := rand.Perm(len(members))
		wg.Go(func() {
			for _, i := range order {
				m := members[i]
				b := make([]byte, m.Size)
				if err := r.ReadAt(t.Context(), s.Objects()[m.Shard], b, m.Off); err != nil ||
					!bytes.Equal(b, all[m.Path]) {
					t.Errorf("%s: %v, %q", m.Path, err, b)
				}
			}
		})
	}
	wg.Wait()
	object := s.Objects()[0]
	for _, off := range []int64{1 << 20, 12345 << chunkShift} {
		if err := r.ReadAt(t.Context(), object, make([]byte, 1), off); objstore.KindOf(err) != objstore.KindInvalid {
			t.Errorf("beyond a chunk, or all of them: %v", err)
		}
	}
	_ = mem.Delete(t.Context(), object.Key, "")
	if err := NewRestorer(mem, nil, nil, 0).ReadAt(t.Context(), object, make([]byte, 1), 0); objstore.KindOf(err) !=
		objstore.KindNotFound {
		t.Errorf("a file that is gone: %v", err)
	}
}

func FuzzParquet(f *testing.F) {
	names, _ := filepath.Glob(written + "/parquet/*/*.parquet")
	for _, name := range names {
		b, err := os.ReadFile(name)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Add(inColumn(f, "a", "", "b"))
	f.Fuzz(func(t *testing.T, b []byte) {
		mem := memstore.New()
		mem.PutBytes("a.parquet", b)
		fuzzed(t, mem)
	})
}
