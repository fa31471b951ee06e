package shard

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/apache/arrow-go/v18/parquet"
	"github.com/apache/arrow-go/v18/parquet/compress"
	"github.com/apache/arrow-go/v18/parquet/file"
	"github.com/apache/arrow-go/v18/parquet/metadata"
	"github.com/apache/arrow-go/v18/parquet/schema"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/lab/rig/memstore"
)

// parquetFileOf writes a Parquet file of row groups, whose columns write fills.
func parquetFileOf(t testing.TB, fields schema.FieldList, groups int,
	write func(group, column int, w file.ColumnChunkWriter) error, o ...parquet.WriterProperty) []byte {
	t.Helper()
	root, err := schema.NewGroupNode("schema", parquet.Repetitions.Required, fields, -1)
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	w := file.NewParquetWriter(&out, root, file.WithWriterProps(parquet.NewWriterProperties(o...)))
	for g := range groups {
		group, err := w.AppendRowGroupChecked()
		if err != nil {
			t.Fatal(err)
		}
		for c := range schema.NewSchema(root).NumColumns() {
			column, err := group.NextColumn()
			if err == nil {
				err = write(g, c, column)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		if err := group.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

func writeOne(w file.ColumnChunkWriter, value string) error {
	_, err := w.(*file.ByteArrayColumnChunkWriter).WriteBatch([]parquet.ByteArray{[]byte(value)}, nil, nil)
	return err
}

// allocated returns how many bytes f allocates.
func allocated(f func()) int64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	f()
	runtime.ReadMemStats(&after)
	return int64(after.TotalAlloc - before.TotalAlloc)
}

func must[T any](t testing.TB) func(v T, err error) T {
	return func(v T, err error) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

// A list of times of 96 bits has no files, and the other columns have.
func TestParquetListOfInt96(t *testing.T) {
	element := must[schema.Node](t)(schema.NewPrimitiveNode("element", parquet.Repetitions.Optional,
		parquet.Types.Int96, -1, -1))
	list := must[*schema.GroupNode](t)(schema.NewGroupNode("list", parquet.Repetitions.Repeated,
		schema.FieldList{element}, -1))
	times := must[*schema.GroupNode](t)(schema.NewGroupNodeLogical("times", parquet.Repetitions.Optional,
		schema.FieldList{list}, schema.NewListLogicalType(), -1))
	b := parquetFileOf(t, schema.FieldList{schema.NewInt32Node("id", parquet.Repetitions.Required, -1), times}, 1,
		func(_, _ int, w file.ColumnChunkWriter) (err error) {
			switch w := w.(type) {
			case *file.Int32ColumnChunkWriter:
				_, err = w.WriteBatch([]int32{1, 2}, nil, nil)
			case *file.Int96ColumnChunkWriter:
				_, err = w.WriteBatch(make([]parquet.Int96, 2), []int16{3, 3}, []int16{0, 0})
			}
			return err
		})
	mem := memstore.New()
	mem.PutBytes("a.parquet", b)
	files, _, err := readRows(t, mem, "", OpenOptions{})
	if err != nil || len(files) != 2 || files["a-000000000001.id.int32"] == nil {
		t.Errorf("%d files, %v", len(files), err)
	}
}

// A page may be as large as a chunk: pyarrow's default puts the first 1,024 values into a page of a dictionary.
func TestParquetLargePages(t *testing.T) {
	value := make([]byte, 65<<20)
	copy(value, "\xff\xd8\xff")
	b := parquetFileOf(t, schema.FieldList{schema.NewByteArrayNode("picture", parquet.Repetitions.Required, -1)}, 1,
		func(_, _ int, w file.ColumnChunkWriter) error {
			_, err := w.(*file.ByteArrayColumnChunkWriter).WriteBatch([]parquet.ByteArray{value}, nil, nil)
			return err
		}, parquet.WithDictionaryDefault(false), parquet.WithStats(false))
	mem := memstore.New()
	mem.PutBytes("a.parquet", b)
	files, _, err := readRows(t, mem, "", OpenOptions{})
	if err != nil || !bytes.Equal(files["a-000000000000.picture.jpg"], value) {
		t.Errorf("%d files, %v", len(files), err)
	}
}

// thriftSchema is a file whose footer has the elements of a schema, and no rows.
func thriftSchema(elements ...[]byte) []byte {
	footer := []byte{0x15, 2, 0x19, 0xfc}
	footer = binary.AppendUvarint(footer, uint64(len(elements)))
	for _, e := range elements {
		footer = append(footer, e...)
	}
	footer = append(footer, 0x16, 0, 0x19, 0x0c, 0) // no rows in no groups
	b := append([]byte("PAR1"), footer...)
	return append(binary.LittleEndian.AppendUint32(b, uint32(len(footer))), "PAR1"...)
}

func thriftGroup(children int32) []byte {
	return append(binary.AppendVarint([]byte{0x48, 1, 'a', 0x15}, int64(children)), 0)
}

// A footer of some bytes that names a billion columns takes no memory for them, and one of many levels no stack.
func TestParquetSchemaThatLies(t *testing.T) {
	leaf := append(binary.AppendVarint([]byte{0x15}, 1), 0x38, 1, 'b', 0) // an int32
	levels := [][]byte{}
	for range 200 {
		levels = append(levels, thriftGroup(1))
	}
	two := thriftSchema(thriftGroup(1), leaf)
	again := append([]byte{9, 4, 0x1c}, thriftGroup(1<<26)...) // again field 2, a list
	two = slices.Insert(two, len(two)-8-5, again...)
	binary.LittleEndian.PutUint32(two[len(two)-8:], uint32(len(two)-12))
	for what, b := range map[string][]byte{
		"many fields": thriftSchema(thriftGroup(1 << 26)), "fewer than none": thriftSchema(thriftGroup(-1)),
		"as many as follow, often": thriftSchema(thriftGroup(2), thriftGroup(2), thriftGroup(1), leaf),
		"many levels":              thriftSchema(append(levels, leaf)...), "a second one": two,
		"many row groups": slices.Concat([]byte("PAR1"), []byte{0x15, 2, 0x19, 0x1c}, thriftGroup(0),
			[]byte{0x16, 0, 0x19, 0xfc, 0x80, 0x80, 0x80, 0x20, 0}, []byte{19, 0, 0, 0}, []byte("PAR1")),
		"one that ends early": thriftSchema(thriftGroup(1), leaf, leaf),
	} {
		mem := memstore.New()
		mem.PutBytes("a.parquet", b)
		var err error
		if n := allocated(func() { _, _, err = readRows(t, mem, "", OpenOptions{}) }); n > 64<<20 {
			t.Errorf("%s: %d MiB were allocated for a footer of some bytes", what, n>>20)
		}
		if err == nil || strings.Contains(err.Error(), "no sample") {
			t.Errorf("%s is taken: %v", what, err)
		}
	}
	mem := memstore.New()
	mem.PutBytes("a.parquet", thriftSchema(thriftGroup(2), thriftGroup(1), leaf, leaf))
	if _, _, err := readRows(t, mem, "", OpenOptions{}); err == nil || !strings.Contains(err.Error(), "no sample") {
		t.Errorf("a schema that does not lie, of no rows: %v", err)
	}
}

// relabel returns a file with its footer changed.
func relabel(t testing.TB, b []byte, change func(m *metadata.FileMetaData)) []byte {
	t.Helper()
	r := must[*file.Reader](t)(file.NewParquetReader(bytes.NewReader(b)))
	change(r.MetaData())
	footer := must[[]byte](t)(r.MetaData().Serialize(context.Background()))
	was := int(binary.LittleEndian.Uint32(b[len(b)-8:]))
	b = append(bytes.Clone(b[:len(b)-8-was]), footer...)
	return append(binary.LittleEndian.AppendUint32(b, uint32(len(footer))), "PAR1"...)
}

// A page of some bytes that says it is 1 GiB, decompressed, takes no more memory than its header says.
func TestParquetPageThatLies(t *testing.T) {
	zstd := binary.LittleEndian.AppendUint64([]byte{0x28, 0xb5, 0x2f, 0xfd, 0xc0, 0x50}, 1<<30)
	zstd = append(zstd, 1, 0, 0) // a last block without bytes
	snappy := append(binary.AppendUvarint(nil, 1<<30), make([]byte, 8)...)
	pages := map[compress.Compression][]byte{compress.Codecs.Zstd: zstd, compress.Codecs.Snappy: snappy}
	for codec, page := range pages {
		node := schema.NewFixedLenByteArrayNode("a", parquet.Repetitions.Required, int32(len(page)), -1)
		b := parquetFileOf(t, schema.FieldList{node}, 1, func(_, _ int, w file.ColumnChunkWriter) error {
			values := []parquet.FixedLenByteArray{page}
			_, err := w.(*file.FixedLenByteArrayColumnChunkWriter).WriteBatch(values, nil, nil)
			return err
		}, parquet.WithDictionaryDefault(false))
		b = relabel(t, b, func(m *metadata.FileMetaData) {
			m.RowGroups[0].Columns[0].MetaData.Codec = 1
			if codec == compress.Codecs.Zstd {
				m.RowGroups[0].Columns[0].MetaData.Codec = 6
			}
		})
		mem := memstore.New()
		mem.PutBytes("a.parquet", b)
		var err error
		if n := allocated(func() { _, _, err = readRows(t, mem, "", OpenOptions{}) }); n > 64<<20 {
			t.Errorf("%v: %d MiB were allocated for a page of some bytes", codec, n>>20)
		}
		if err == nil {
			t.Errorf("%v: no error", codec)
		}
	}
}

// A list of one row that goes on for ever ends at the bound, not when the row does.
func TestParquetListWithoutEnd(t *testing.T) {
	e := parquetRows{parquetColumn: &parquetColumn{full: 3, empty: 1, lists: true}, row: -1, left: 64,
		emit: func(int64, []byte) bool { return true }}
	for i := 0; i < 1<<16 && e.err == nil; i++ {
		e.level(3, int16(min(i, 1)), []byte("abcdefgh"))
	}
	if e.err == nil || len(e.list) > 128 {
		t.Errorf("%d bytes of a row, where 64 are left: %v", len(e.list), e.err)
	}
}

// counted counts reads.
type counted struct {
	objstore.Reader
	n atomic.Int64
}

func (c *counted) ReadAt(ctx context.Context, o objstore.Object, p []byte, off int64) error {
	c.n.Add(1)
	return c.Reader.ReadAt(ctx, o, p, off)
}

// wide returns a file of columns of text, and the members.
func wide(t testing.TB, columns, rows int) (*memstore.Mem, *Rows, []Member) {
	var fields schema.FieldList
	for i := range columns {
		fields = append(fields, schema.NewByteArrayNode(fmt.Sprintf("c%02d", i), parquet.Repetitions.Required, -1))
	}
	b := parquetFileOf(t, fields, 1, func(_, column int, w file.ColumnChunkWriter) error {
		values := make([]parquet.ByteArray, rows)
		for i := range values {
			values[i] = fmt.Appendf(nil, "%d/%d", column, i)
		}
		_, err := w.(*file.ByteArrayColumnChunkWriter).WriteBatch(values, nil, nil)
		return err
	})
	mem := memstore.New()
	mem.PutBytes("a.parquet", b)
	s := must[*Rows](t)(OpenRows(t.Context(), mem, objstore.Source{}, OpenOptions{}))
	var members []Member
	for m, err := range s.Members(t.Context()) {
		members = append(members, must[Member](t)(m, err))
	}
	return mem, s, members
}

// Who reads rows in order, all columns of each, as a copy of a mount or shoal verify does, fetches each chunk once.
func TestParquetRowByRow(t *testing.T) {
	for _, c := range []struct {
		columns int
		chunk   int64
	}{{4, 4 << 20}, {12, 1 << 20}, {2, 33 << 20}} { // of text of so many bytes, and labels
		mem, s, members := wide(t, c.columns, 100)
		store := &counted{Reader: mem}
		r := NewRestorer(store, nil, nil, c.chunk)
		for row := range 100 {
			for column := range c.columns {
				m := members[column*100+row]
				b := make([]byte, m.Size)
				if err := r.ReadAt(t.Context(), s.Objects()[0], b, m.Off); err != nil ||
					string(b) != fmt.Sprintf("%d/%d", column, row) {
					t.Fatalf("%s: %q, %v", m.Path, b, err)
				}
			}
		}
		if n := store.n.Load(); n > int64(1+c.columns) {
			t.Errorf("%d columns, the largest chunk %d MiB: %d GETs for 100 rows", c.columns, c.chunk>>20, n)
		}
	}
}

// The order of columns in a file does not matter: their files have the same names.
func TestParquetOrderOfColumns(t *testing.T) {
	mem := memstore.New()
	for i, names := range [][]string{{"a", "b"}, {"b", "a"}} {
		var fields schema.FieldList
		for _, name := range names {
			fields = append(fields, schema.NewByteArrayNode(name, parquet.Repetitions.Required, -1))
		}
		mem.PutBytes(fmt.Sprintf("%d.parquet", i), parquetFileOf(t, fields, 1,
			func(_, column int, w file.ColumnChunkWriter) error {
				return writeOne(w, names[column])
			}))
	}
	files, _, err := readRows(t, mem, "", OpenOptions{})
	if err != nil || string(files["0-000000000000.a"]) != "a" || string(files["1-000000000000.a"]) != "a" {
		t.Errorf("%d files, %v", len(files), err)
	}
}

// A file that is replaced while it is read fails, and never gives bytes of the other.
func TestParquetReplaced(t *testing.T) {
	mem, s, members := wide(t, 2, 10)
	r := NewRestorer(mem, nil, nil, 4096)
	first, second := members[3], members[13]
	b := make([]byte, first.Size)
	if err := r.ReadAt(t.Context(), s.Objects()[0], b, first.Off); err != nil || string(b) != "0/3" {
		t.Fatalf("%q, %v", b, err)
	}
	other, _, _ := wide(t, 2, 11)
	o := must[objstore.Object](t)(other.Stat(t.Context(), "a.parquet"))
	p := make([]byte, o.Size)
	if err := other.ReadAt(t.Context(), o, p, 0); err != nil {
		t.Fatal(err)
	}
	mem.PutBytes("a.parquet", p)
	if err := r.ReadAt(t.Context(), s.Objects()[0], b, second.Off); objstore.KindOf(err) != objstore.KindChanged {
		t.Errorf("%q, %v", b, err)
	}
	if err := NewRestorer(mem, nil, nil, 0).ReadAt(t.Context(), s.Objects()[0], b, first.Off); objstore.KindOf(err) !=
		objstore.KindChanged {
		t.Errorf("%q, %v", b, err)
	}
}

// gated waits in each read until the gate opens.
type gated struct {
	counted
	waits atomic.Int64
	gate  chan struct{}
}

func (g *gated) ReadAt(ctx context.Context, o objstore.Object, p []byte, off int64) error {
	g.waits.Add(1)
	<-g.gate
	return g.counted.ReadAt(ctx, o, p, off)
}

// queued returns how many goroutines wait to decode.
func queued(t testing.TB) int {
	buf := make([]byte, 1<<20)
	n := 0
	for _, g := range strings.Split(string(buf[:runtime.Stack(buf, true)]), "\n\n") {
		state, _, _ := strings.Cut(g, "\n")
		if strings.Contains(g, "parquetlies") || !strings.Contains(g, ".chunk.func") {
			continue
		} else if strings.Contains(state, "chan send") || strings.Contains(state, "select") {
			n++
		}
	}
	return n
}

// What nobody waits for any more is not fetched: those who left the queue of chunks do not hold up others.
func TestParquetReadersLeave(t *testing.T) {
	mem, s, members := wide(t, 20, 1)
	store := &gated{counted: counted{Reader: mem}, gate: make(chan struct{})}
	r := NewRestorer(store, nil, nil, 64<<20) // one at once
	ctx, cancel := context.WithCancel(t.Context())
	left := make(chan error)
	for _, m := range members[:19] {
		go func() { left <- r.ReadAt(ctx, s.Objects()[0], make([]byte, m.Size), m.Off) }()
	}
	store.gate <- struct{}{}                     // for the footer
	for queued(t) < 18 || len(r.decoding) == 0 { // the first has the only place
		runtime.Gosched()
	}
	cancel()
	for range 19 {
		if err := <-left; err == nil {
			t.Error("no error")
		}
	}
	close(store.gate)
	m := members[19]
	b := make([]byte, m.Size)
	if err := r.ReadAt(t.Context(), s.Objects()[0], b, m.Off); err != nil || string(b) != "19/0" {
		t.Fatalf("%q, %v", b, err)
	}
	for queued(t) > 0 || len(r.decoding) > 0 {
		runtime.Gosched()
	}
	if n := store.n.Load(); n > 3 { // and that which was under way
		t.Errorf("%d GETs for one chunk", n)
	}
}

// Columns whose files would have the same names, or names that files cannot have, are an error of the file, which can
// be left out, unless they are not shown.
func TestParquetNames(t *testing.T) {
	for _, names := range [][]string{{"a", "a.txt"}, {"a.txt", "a"}, {"a", "a"}, {"x/y"}, {""}} {
		fields := schema.FieldList{schema.NewByteArrayNode("text", parquet.Repetitions.Required, -1)}
		for _, name := range names {
			logical := schema.LogicalType(schema.NoLogicalType{})
			if name == "a" {
				logical = schema.StringLogicalType{}
			}
			fields = append(fields, must[*schema.PrimitiveNode](t)(schema.NewPrimitiveNodeLogical(name,
				parquet.Repetitions.Required, logical, parquet.Types.ByteArray, -1, -1)))
		}
		if names[0] == names[len(names)-1] && len(names) > 1 {
			fields[2] = fields[1]
		}
		mem := stored(t, "parquet")
		_ = mem.Delete(t.Context(), "parquet/val/f.parquet", "")
		mem.PutBytes("a.parquet", parquetFileOf(t, fields, 1, func(_, column int, w file.ColumnChunkWriter) error {
			return writeOne(w, "abc"[column:])
		}))
		s := must[*Rows](t)(OpenRows(t.Context(), mem, objstore.Source{Prefix: "a"}, OpenOptions{}))
		if lastError(t.Context(), s) == nil {
			t.Errorf("%q: no error", names)
		}
		files, _, err := readRows(t, mem, "a", OpenOptions{Columns: []string{"text"}})
		if err != nil || string(files[".parquet-000000000000.text"])+string(files["-000000000000.text"]) != "abc" {
			t.Errorf("%q: %d files, %v", names, len(files), err)
		}
	}
}

// A column that is not there is named.
func TestParquetNoSuchColumn(t *testing.T) {
	_, _, err := readRows(t, stored(t, "parquet"), "parquet/", OpenOptions{Columns: []string{"label", "tekst"}})
	if err == nil || !strings.Contains(err.Error(), "tekst") {
		t.Errorf("no error that names it: %v", err)
	}
}

// A data page without values, as pyarrow writes some between those of lists, is not the end of the column.
func TestParquetEmptyPage(t *testing.T) {
	b := parquetFileOf(t, schema.FieldList{schema.NewByteArrayNode("text", parquet.Repetitions.Required, -1)}, 1,
		func(_, _ int, w file.ColumnChunkWriter) error {
			return writeOne(w, "abc")
		}, parquet.WithDictionaryDefault(false))
	empty := []byte{0x15, 0, 0x15, 0, 0x15, 0, 0x2c, 0x15, 0, 0x15, 0, 0x15, 6, 0x15, 6, 0, 0} // a page's header
	b = relabel(t, b, func(m *metadata.FileMetaData) {
		m.RowGroups[0].Columns[0].MetaData.TotalCompressedSize += int64(len(empty))
	})
	mem := memstore.New()
	mem.PutBytes("a.parquet", slices.Insert(b, 4, empty...))
	files, _, err := readRows(t, mem, "", OpenOptions{})
	if err != nil || string(files["a-000000000000.text"]) != "abc" {
		t.Errorf("%d files, %v", len(files), err)
	}
}

// A chunk is decoded into memory of its length, so that it takes what CodedBytes says.
func TestParquetMemory(t *testing.T) {
	const n, size = 256, 64 << 10
	values := make([]parquet.ByteArray, n)
	for i := range values {
		values[i] = bytes.Repeat([]byte{byte(i)}, size)
	}
	b := parquetFileOf(t, schema.FieldList{schema.NewByteArrayNode("text", parquet.Repetitions.Required, -1)}, 1,
		func(_, _ int, w file.ColumnChunkWriter) error {
			_, err := w.(*file.ByteArrayColumnChunkWriter).WriteBatch(values, nil, nil)
			return err
		}, parquet.WithDictionaryDefault(false))
	mem := memstore.New()
	mem.PutBytes("a.parquet", b)
	s := must[*Rows](t)(OpenRows(t.Context(), mem, objstore.Source{}, OpenOptions{}))
	r := NewRestorer(mem, nil, nil, n*size)
	p := make([]byte, size)
	if got := allocated(func() {
		if err := r.ReadAt(t.Context(), s.Objects()[0], p, 3*size); err != nil || !bytes.Equal(p, values[3]) {
			t.Error(err)
		}
	}); got > 5*n*size {
		t.Errorf("%d MiB were allocated for a chunk of %d", got>>20, n*size>>20)
	}
}

// Values that are no pictures are not called so: text about a BMW, and sounds of RIFF. Whatever a value begins with,
// its row is a sample of the column.
func TestParquetContents(t *testing.T) {
	values := map[string]string{
		"BMW is a car": "", "BM": "", "RIFF\x24\x00\x00\x00WAVEfmt ": "", "RIFF": "", "II*": "", "": "",
		"RIFF\x24\x00\x00\x00WEBPVP8 ": ".webp", "BM\x36\x01\x00\x00\x00\x00\x00\x00\x36\x00": ".bmp",
		"\xff\xd8\xff\xe0": ".jpg", "\x89PNG\r\n\x1a\n": ".png", "MM\x00*\x00": ".tif", "II*\x00\x08": ".tif",
	}
	samples := strings.Split(Suffixes("raw"), ",")
	for value, ext := range values {
		mem := memstore.New()
		mem.PutBytes("a.parquet", parquetFileOf(t,
			schema.FieldList{schema.NewByteArrayNode("raw", parquet.Repetitions.Required, -1)}, 1,
			func(_, _ int, w file.ColumnChunkWriter) error {
				return writeOne(w, value)
			}))
		files, _, err := readRows(t, mem, "", OpenOptions{})
		if got, ok := files["a-000000000000.raw"+ext]; err != nil || !ok || string(got) != value {
			t.Errorf("%q: %d files, %v", value, len(files), err)
		}
		for name := range files {
			if !slices.Contains(samples, name[strings.Index(name, "."):]) {
				t.Errorf("%q: %s is no sample of rows:raw", value, name)
			}
		}
	}
}

// A page of which the header says that it is empty, decompressed, takes no memory, whatever it has.
func TestParquetPageOfNothing(t *testing.T) {
	for _, id := range []compress.Compression{compress.Codecs.Gzip, compress.Codecs.Brotli} {
		b := parquetFileOf(t, schema.FieldList{schema.NewByteArrayNode("text", parquet.Repetitions.Required, -1)}, 1,
			func(_, _ int, w file.ColumnChunkWriter) error {
				return writeOne(w, "abc")
			}, parquet.WithDictionaryDefault(false), parquet.WithCompression(id))
		body := must[compress.Codec](t)(compress.GetCodec(id)).Encode(nil, make([]byte, 32<<20))
		page := binary.AppendVarint([]byte{0x15, 0, 0x15, 0, 0x15}, int64(len(body)))
		page = slices.Concat(page, []byte{0x2c, 0x15, 2, 0x15, 0, 0x15, 6, 0x15, 6, 0, 0}, body)
		b = relabel(t, b, func(m *metadata.FileMetaData) {
			m.RowGroups[0].Columns[0].MetaData.TotalCompressedSize += int64(len(page))
		})
		mem := memstore.New()
		mem.PutBytes("a.parquet", slices.Insert(b, 4, page...))
		var err error
		if n := allocated(func() { _, _, err = readRows(t, mem, "", OpenOptions{}) }); n > 16<<20 || err == nil {
			t.Errorf("%v: %d MiB were allocated for a page of nothing, of %d bytes: %v", id, n>>20, len(body), err)
		}
	}
}

// A dictionary that is said to have millions of values in some bytes takes no memory for them.
func TestParquetDictionaryThatLies(t *testing.T) {
	b := parquetFileOf(t, schema.FieldList{schema.NewByteArrayNode("text", parquet.Repetitions.Required, -1)}, 1,
		func(_, _ int, w file.ColumnChunkWriter) error {
			return writeOne(w, "abc")
		}, parquet.WithDictionaryDefault(false))
	page := func(typ int64, body []byte, header ...byte) []byte {
		b := binary.AppendVarint([]byte{0x15}, typ)
		for range 2 {
			b = binary.AppendVarint(append(b, 0x15), int64(len(body)))
		}
		return slices.Concat(b, header, body)
	}
	dictionary := page(2, []byte{1, 0, 0, 0, 'a'},
		append(binary.AppendVarint([]byte{0x4c, 0x15}, 1<<25), 0x15, 0, 0, 0)...)
	data := page(0, []byte{31, 2, 0, 0, 0, 1}, 0x2c, 0x15, 2, 0x15, 16, 0x15, 6, 0x15, 6, 0, 0) // index 1<<24
	pages := slices.Concat(dictionary, data)
	b = relabel(t, b, func(m *metadata.FileMetaData) {
		m.RowGroups[0].Columns[0].MetaData.TotalCompressedSize += int64(len(pages))
	})
	mem := memstore.New()
	mem.PutBytes("a.parquet", slices.Insert(b, 4, pages...))
	var err error
	if n := allocated(func() { _, _, err = readRows(t, mem, "", OpenOptions{}) }); n > 64<<20 {
		t.Errorf("%d MiB were allocated for a dictionary of some bytes", n>>20)
	}
	if err == nil {
		t.Error("no error")
	}
}
