package shard

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"unsafe"

	"github.com/apache/arrow-go/v18/arrow/memory"
	"github.com/apache/arrow-go/v18/parquet"
	"github.com/apache/arrow-go/v18/parquet/compress"
	"github.com/apache/arrow-go/v18/parquet/file"
	"github.com/apache/arrow-go/v18/parquet/metadata"
	"github.com/apache/arrow-go/v18/parquet/schema"
	"github.com/apache/thrift/lib/go/thrift"
	"github.com/klauspost/compress/snappy"
	"github.com/klauspost/compress/zstd"

	"github.com/shoalfs/shoal/cache/objstore"
)

// Arrow's module decodes chunks. It trusts what files say of themselves, in lengths and counts, so these are checked
// before it makes room for them.
const (
	maxChunk     = 1 << 30 // bytes, stored or decoded
	maxFooter    = 64 << 20
	footerGuess  = 64 << 10 // read at once: most footers are shorter
	parquetBatch = 1024     // values that are decoded at once
	maxValues    = 1 << 27  // of a page
)

// parquetFile is an open file. Safe for concurrent use.
type parquetFile struct {
	o       objstore.Object // as it is stored
	meta    *metadata.FileMetaData
	columns []parquetColumn // all of them
}

type parquetColumn struct {
	name  string // "": it has no files
	ext   string // "?": that of what a value contains
	width int    // bytes of a number; 0: values of any length
	err   error  // why it cannot be shown
	// full is the definition level of a value, empty that of an empty list.
	full, empty int16
	lists       bool
}

// parquetBytes is a file for the library. A part of it is in memory.
type parquetBytes struct {
	ctx  context.Context
	r    objstore.Reader
	o    objstore.Object
	off  int64
	have []byte
	err  error // of the store, which the library may not pass on
}

func (b *parquetBytes) Seek(int64, int) (int64, error) { return 0, errors.ErrUnsupported } // never called

func (b *parquetBytes) ReadAt(p []byte, off int64) (int, error) {
	if at := off - b.off; at >= 0 && at <= int64(len(b.have)) && int64(len(p)) <= int64(len(b.have))-at {
		return copy(p, b.have[at:]), nil
	}
	if off < 0 || off > b.o.Size {
		return 0, corrupt("it names byte %d of %d", off, b.o.Size)
	}
	n := int(min(int64(len(p)), b.o.Size-off))
	if n > 0 && b.err == nil {
		b.err = b.r.ReadAt(b.ctx, b.o, p[:n], off)
	}
	if b.err == nil && n < len(p) {
		return n, io.EOF
	}
	return n, b.err
}

// library calls what may panic at damaged files.
func (b *parquetBytes) library(f func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = corrupt("%v", p)
		}
		if b.err != nil {
			err = b.err
		}
	}()
	return f()
}

// openParquet reads the footer of a file as it is stored.
func openParquet(ctx context.Context, r objstore.Reader, o objstore.Object) (*parquetFile, error) {
	b := &parquetBytes{ctx: ctx, r: r, o: o, off: max(o.Size-footerGuess, 0)}
	b.have = make([]byte, o.Size-b.off)
	f := &parquetFile{o: o}
	return f, b.library(func() error {
		if b.err = r.ReadAt(ctx, o, b.have, b.off); b.err != nil {
			return b.err
		}
		n := len(b.have)
		if n < 12 {
			return corrupt("it is too small")
		}
		size := int64(binary.LittleEndian.Uint32(b.have[n-8:]))
		switch magic := string(b.have[n-4:]); {
		case magic == "PARE":
			return errors.New("it is encrypted, which is not supported")
		case size > maxFooter:
			return corrupt("its footer has %d bytes, more than %d", size, maxFooter)
		case size+8 > o.Size:
			return corrupt("it is smaller than its footer")
		case magic != "PAR1":
			return corrupt("there are no magic bytes at its end")
		}
		footer := make([]byte, size)
		_, err := b.ReadAt(footer, o.Size-8-size)
		if err == nil {
			err = checkFooter(footer)
		}
		if err == nil {
			f.meta, err = metadata.NewFileMetaData(footer, nil)
		}
		if err != nil {
			return fmt.Errorf("its footer: %w", err)
		}
		f.meta.SetSourceFileSize(o.Size)
		for i := range f.meta.Schema.NumColumns() {
			f.columns = append(f.columns, newParquetColumn(f.meta.Schema.Column(i)))
		}
		if n := int64(len(f.meta.RowGroups)) * int64(len(f.columns)); n >= 1<<(62-chunkShift) {
			return corrupt("%d chunks", n)
		}
		return nil
	})
}

// checkFooter returns an error if a list has more elements than the footer has bytes, a group in the schema more fields
// than follow, or the schema over 100 levels: the library makes room for what is said, and goes down by recursion.
func checkFooter(footer []byte) error {
	ctx := context.Background()
	p := thrift.NewTCompactProtocolConf(&thrift.TMemoryBuffer{Buffer: bytes.NewBuffer(footer)},
		&thrift.TConfiguration{MaxMessageSize: int32(len(footer))})
	field := func(id int16, want thrift.TType) (ok bool, err error) { // goes to a field of a struct, or to its end
		for {
			_, typ, at, err := p.ReadFieldBegin(ctx)
			if err != nil || typ == thrift.STOP || at == id && typ == want {
				return err == nil && typ != thrift.STOP, err
			}
			if err := p.Skip(ctx, typ); err != nil {
				return false, err
			}
		}
	}
	_, _ = p.ReadStructBegin(ctx)
	if ok, err := field(2, thrift.LIST); !ok { // FileMetaData.schema
		return cmp.Or(err, corrupt("it has no schema"))
	}
	_, left, err := p.ReadListBegin(ctx)
	open, pending := []int32{1}, 1 // fields to come: by level, and their sum
	for ; left > 0 && pending > 0 && err == nil; left-- {
		_, _ = p.ReadStructBegin(ctx)
		var n int32
		var ok bool
		for ok, err = field(5, thrift.I32); ok; ok, err = field(5, thrift.I32) { // SchemaElement.num_children
			n, _ = p.ReadI32(ctx)
		}
		_ = p.ReadStructEnd(ctx)
		if pending += int(n) - 1; n < 0 || pending >= left || len(open) > 100 {
			return corrupt("its schema names %d fields, %d can follow, at level %d", pending, left-1, len(open))
		}
		for open = append(open, n); len(open) > 0 && open[len(open)-1] == 0; {
			if open = open[:len(open)-1]; len(open) > 0 {
				open[len(open)-1]--
			}
		}
	}
	if err != nil {
		return err
	}
	more, err := field(2, thrift.LIST)
	if left > 0 || more {
		return corrupt("its schema ends before its elements, or it has two")
	}
	return err
}

// newParquetColumn says how a column is shown.
func newParquetColumn(s *schema.Column) parquetColumn {
	node, at := s.SchemaNode(), s.ColumnPath()
	c := parquetColumn{full: s.MaxDefinitionLevel(), lists: s.MaxRepetitionLevel() > 0}
	c.ext, c.width = parquetType(s)
	if c.lists {
		group := node.Parent()
		itself := node.RepetitionType() == parquet.Repetitions.Repeated
		if s.MaxRepetitionLevel() > 1 || c.width <= 0 ||
			!itself && group.RepetitionType() != parquet.Repetitions.Repeated {
			return parquetColumn{}
		}
		if fields, ok := group.(*schema.GroupNode); ok && !itself && fields.NumFields() == 1 && len(at) > 2 {
			at = at[:len(at)-2] // .list.element
		}
		c.empty = c.full - 1
		if node.RepetitionType() == parquet.Repetitions.Optional {
			c.empty--
		}
	} else if c.width < 0 {
		return parquetColumn{}
	}
	if c.name = strings.Join(at, "."); c.name == "" || len(c.name) > maxMDSName ||
		strings.ContainsAny(c.name, "/\x00") {
		c.err = fmt.Errorf("column %.40q cannot be read: its name is empty, or has a slash or over %d bytes", c.name,
			maxMDSName)
	}
	return c
}

// parquetType returns the extension of a column's files, and the length of its values; -1: it is not read.
func parquetType(s *schema.Column) (ext string, width int) {
	switch s.PhysicalType() {
	case parquet.Types.Boolean:
		return ".uint8", 1
	case parquet.Types.Int32, parquet.Types.Int64:
		name, bits := "int", 32
		if s.PhysicalType() == parquet.Types.Int64 {
			bits = 64
		}
		if t, ok := s.LogicalType().(schema.IntLogicalType); ok {
			if bits = min(bits, int(t.BitWidth())); !t.IsSigned() {
				name = "uint"
			}
		}
		return fmt.Sprintf(".%s%d", name, bits), bits / 8
	case parquet.Types.Float:
		return ".float32", 4
	case parquet.Types.Double:
		return ".float64", 8
	case parquet.Types.FixedLenByteArray:
		if _, ok := s.LogicalType().(schema.Float16LogicalType); ok {
			return ".float16", 2
		}
		return "", 0
	case parquet.Types.ByteArray:
		switch s.LogicalType().(type) {
		case schema.StringLogicalType, schema.EnumLogicalType:
			return ".txt", 0
		case schema.JSONLogicalType:
			return ".json", 0
		}
		return "?", 0
	}
	return "", -1
}

// contents are the extensions of pictures by how they begin, where ? is any byte.
var contents = []struct{ begin, ext string }{{"\xff\xd8\xff", ".jpg"}, {"\x89PNG\r\n", ".png"},
	{"BM????\x00\x00\x00\x00", ".bmp"}, {"II*\x00", ".tif"}, {"MM\x00*", ".tif"}, {"RIFF????WEBP", ".webp"}}

// begins reports whether a value begins as one of contents.
func begins(value []byte, begin string) bool {
	for i := range min(len(value), len(begin)) {
		if begin[i] != '?' && value[i] != begin[i] {
			return false
		}
	}
	return len(value) >= len(begin)
}

// file returns the name of the files of a column with such a value, after the row's number.
func (c *parquetColumn) file(value []byte) string {
	if c.ext != "?" {
		return c.name + c.ext
	}
	for _, t := range contents {
		if begins(value, t.begin) {
			return c.name + t.ext
		}
	}
	return c.name
}

// files returns what file may return.
func (c *parquetColumn) files() []string {
	if c.ext != "?" {
		return []string{c.name + c.ext}
	}
	all := []string{c.name}
	for _, t := range contents {
		all = append(all, c.name+t.ext)
	}
	return all
}

// boundedCodec decodes pages into the memory that their headers ask for. The library's own allocates what pages say.
type boundedCodec struct {
	compress.Codec
	decode func(dst, src []byte) ([]byte, error)
}

func (c boundedCodec) DecodeWithError(dst, src []byte) ([]byte, error) { return c.decode(dst, src) }

func init() {
	for id, decode := range map[compress.Compression]func(dst, src []byte) ([]byte, error){
		compress.Codecs.Zstd: func(dst, src []byte) ([]byte, error) {
			return zstdDecoder().DecodeAll(src, dst[:0:len(dst)])
		},
		compress.Codecs.Snappy: func(dst, src []byte) ([]byte, error) {
			if n, err := snappy.DecodedLen(src); err != nil || n > len(dst) {
				return nil, corrupt("a page of %d bytes, where its header says %d", n, len(dst))
			}
			return snappy.Decode(dst, src)
		},
		compress.Codecs.Gzip: nil, compress.Codecs.Brotli: nil,
	} {
		if codec, err := compress.GetCodec(id); err == nil {
			if decode == nil {
				decode = func(dst, src []byte) ([]byte, error) {
					if dst == nil { // 0 bytes; to these two: as many as there are
						dst = []byte{}
					}
					return compress.Decode(codec, dst, src)
				}
			}
			compress.RegisterCodec(id, boundedCodec{codec, decode})
		}
	}
}

var zstdDecoder = sync.OnceValue(func() *zstd.Decoder {
	d, _ := zstd.NewReader(nil, zstd.WithDecodeAllCapLimit(true)) // such options are no error
	return d
})

// parquetValues decodes a chunk. next returns how many levels, and values, it has read, valid until the next call.
type parquetValues struct {
	next func(defs, reps []int16) (int64, int, error)
	at   func(i int) []byte
}

func numbers[T bool | int32 | int64 | float32 | float64](
	read func(int64, []T, []int16, []int16) (int64, int, error), width int) (v parquetValues) {
	all := make([]T, parquetBatch)
	v.next = func(defs, reps []int16) (int64, int, error) { return read(parquetBatch, all, defs, reps) }
	// Little-endian, as all machines are that this runs on: the low bytes of a wider number come first.
	v.at = func(i int) []byte { return unsafe.Slice((*byte)(unsafe.Pointer(&all[i])), width) }
	return v
}

func arrays[T ~[]byte](read func(int64, []T, []int16, []int16) (int64, int, error)) (v parquetValues) {
	all := make([]T, parquetBatch)
	v.next = func(defs, reps []int16) (int64, int, error) { return read(parquetBatch, all, defs, reps) }
	v.at = func(i int) []byte { return all[i] }
	return v
}

// decode calls emit for each value of a chunk by row, counted from the group's first. value is valid until it returns.
func (f *parquetFile) decode(ctx context.Context, r objstore.Reader, chunk int,
	emit func(row int64, value []byte) bool) error {
	group, at := chunk/len(f.columns), chunk%len(f.columns)
	b := &parquetBytes{ctx: ctx, r: r, o: f.o}
	err := b.library(func() error {
		off, length, err := f.place(chunk)
		if err != nil {
			return err
		}
		b.off = off
		b.have = make([]byte, length)
		if b.err = r.ReadAt(ctx, f.o, b.have, b.off); b.err != nil {
			return b.err
		}
		props := parquet.NewReaderProperties(memory.DefaultAllocator)
		props.BufferedStreamEnabled = true // or it copies the chunk
		props.MaxCompressedPageSize, props.MaxUncompressedPageSize = length, f.length(chunk)
		p, err := file.NewParquetReader(b, file.WithMetadata(f.meta), file.WithReadProps(props))
		if err != nil {
			return err
		}
		pages, err := p.RowGroup(group).GetColumnPageReader(at)
		if err != nil {
			return err
		}
		column := file.NewColumnReader( //nolint:staticcheck // RowGroup.Column takes no pages
			f.meta.Schema.Column(at), fullPages{pages}, memory.DefaultAllocator, p.BufferPool())
		return errors.Join(f.columns[at].rows(column, f.meta.RowGroup(group).NumRows(), emit), column.Close())
	})
	if err != nil {
		err = fmt.Errorf("column %s of row group %d: %w", f.columns[at].name, group, err)
	}
	return err
}

// place returns where a chunk lies in the file, and how long it is.
func (f *parquetFile) place(chunk int) (off, length int64, err error) {
	m, err := f.meta.RowGroup(chunk / len(f.columns)).ColumnChunk(chunk % len(f.columns))
	if err != nil {
		return 0, 0, err
	}
	if off = m.DataPageOffset(); m.HasDictionaryPage() && m.DictionaryPageOffset() > 0 {
		off = min(off, m.DictionaryPageOffset())
	}
	if length = m.TotalCompressedSize(); off < 0 || length < 0 || length > maxChunk || length > f.o.Size-off {
		err = corrupt("it has %d bytes at %d", length, off)
	}
	return off, length, err
}

// length returns how many bytes the footer says that a chunk's pages have, as they are encoded: the most that one may
// have. What they say is often as many.
func (f *parquetFile) length(chunk int) int64 {
	m, err := f.meta.RowGroup(chunk / len(f.columns)).ColumnChunk(chunk % len(f.columns))
	if err != nil || m.TotalUncompressedSize() <= 0 {
		return maxChunk
	}
	return min(m.TotalUncompressedSize(), maxChunk)
}

// fullPages passes over data pages without values: to a column's reader such a page is the end. It panics at pages for
// whose values the library would take more memory than they can need.
type fullPages struct{ file.PageReader }

func (p fullPages) Next() bool {
	for p.PageReader.Next() {
		switch page := p.Page().(type) {
		case *file.DictionaryPage:
			checkDictionary(page)
			return true
		case file.DataPage:
			if page.NumValues() > maxValues {
				panic(fmt.Sprintf("a page of %d values", page.NumValues()))
			} else if page.NumValues() > 0 {
				return true
			}
		}
	}
	return false
}

func (p fullPages) GetDictionaryPage() (*file.DictionaryPage, error) {
	page, err := p.PageReader.GetDictionaryPage()
	if err == nil && page != nil {
		checkDictionary(page)
	}
	return page, err
}

func checkDictionary(page *file.DictionaryPage) {
	if int(page.NumValues()) > len(page.Data()) {
		panic(fmt.Sprintf("a dictionary of %d values in %d bytes", page.NumValues(), len(page.Data())))
	}
}

// rows calls emit for each of n rows that has a value.
func (c *parquetColumn) rows(column file.ColumnChunkReader, n int64, emit func(row int64, value []byte) bool) error {
	var v parquetValues
	switch r := column.(type) {
	case *file.BooleanColumnChunkReader:
		v = numbers(r.ReadBatchInPage, c.width)
	case *file.Int32ColumnChunkReader:
		v = numbers(r.ReadBatchInPage, c.width)
	case *file.Int64ColumnChunkReader:
		v = numbers(r.ReadBatchInPage, c.width)
	case *file.Float32ColumnChunkReader:
		v = numbers(r.ReadBatchInPage, c.width)
	case *file.Float64ColumnChunkReader:
		v = numbers(r.ReadBatchInPage, c.width)
	case *file.ByteArrayColumnChunkReader:
		v = arrays(r.ReadBatchInPage)
	case *file.FixedLenByteArrayColumnChunkReader:
		v = arrays(r.ReadBatchInPage)
	}
	e := parquetRows{parquetColumn: c, row: -1, emit: emit, left: maxChunk}
	defs, reps := make([]int16, parquetBatch), make([]int16, parquetBatch)
	for column.HasNext() && !e.stopped && e.err == nil {
		levels, values, err := v.next(defs, reps)
		if err != nil {
			return err
		}
		used := 0
		for i := range levels {
			var value []byte
			if full := defs[i] == c.full; full && used == values {
				return corrupt("it has fewer values than its levels say")
			} else if full {
				value = v.at(used)
				used++
			}
			e.level(defs[i], reps[i], value)
		}
		if levels == 0 || used != values {
			return corrupt("it has %d values, where its levels say %d", values, used)
		}
	}
	e.end()
	if err := errors.Join(e.err, column.Err()); err != nil || e.stopped {
		return err
	}
	if e.row+1 != n {
		return corrupt("it has %d rows, where the footer says %d", e.row+1, n)
	}
	return nil
}

// parquetRows makes rows of levels.
type parquetRows struct {
	*parquetColumn
	emit    func(row int64, value []byte) bool
	row     int64  // the current one
	list    []byte // of lists: what it has so far
	present bool   // it is no null
	left    int64  // bytes that the chunk may have yet
	stopped bool
	err     error
}

// level takes the next level, and its value, if it has one.
func (e *parquetRows) level(def, rep int16, value []byte) {
	switch {
	case !e.lists:
		if e.row++; def == e.full {
			e.put(value)
		}
		return
	case rep == 0:
		e.end()
		e.row++
		e.list, e.present = e.list[:0], def >= e.empty
	case e.row < 0:
		e.err = corrupt("it begins within a list")
	}
	if def == e.full {
		if e.list = append(e.list, value...); int64(len(e.list)) > e.left {
			e.end() // says that it is too long
		}
	} else if def > e.empty {
		e.err = fmt.Errorf("row %d of the group has null within a list", e.row)
	}
}

// end ends a list.
func (e *parquetRows) end() {
	if e.present {
		e.put(e.list)
	}
	e.present = false
}

func (e *parquetRows) put(value []byte) {
	if e.left -= int64(len(value)); e.left < 0 {
		e.err = fmt.Errorf("it has more than %d bytes: write smaller row groups", maxChunk)
	} else if !e.stopped && e.err == nil {
		e.stopped = !e.emit(e.row, value)
	}
}
