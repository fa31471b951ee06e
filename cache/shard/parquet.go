package shard

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"slices"
	"sort"
	"strings"

	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/cache/objstore"
)

// A Parquet file has its rows in groups, and the values of a column in a group as a chunk, which is compressed. A row's
// columns are files, FOLDER/FILE-000000000000.COLUMN.EXT, as those of MDS are; null has no file. Objects of [Rows] have
// the values of chunk K, one after the other, from byte K<<32 on, where K counts all columns of the first group, then
// of the next. A [Restorer] reads from such an object: it fetches the chunk by one request, and decodes all of it. So
// whoever wants one row of a chunk should want the others, too ([catalog.Layout.Chunk]).
//
// A list of a dataset decodes what an earlier one did not have: a Parquet file does not say how long its values are.
//
// Lists of numbers are read, as numbers one after the other. Other nested columns, and times of 96 bits, have no files.
const (
	parquetSuffix = ".parquet"
	// parquetTag begins the ETag of an object that is shown decoded; the size and the ETag of the file follow.
	parquetTag   = "shoal-parquet:"
	chunkShift   = 32
	parquetFiles = 64       // footers in memory
	chunksBytes  = 32 << 20 // of chunks that are decoded at once, but at least one, and at most
	mostChunks   = 8
)

func (s *Rows) addParquet(o objstore.Object) error {
	stem, err := s.stem(o.Key, parquetSuffix)
	return s.add(o, func(ctx context.Context, shown objstore.Object, emit func(Member) bool) (string, error) {
		return s.rowGroups(ctx, shown, stem, emit)
	}, err)
}

// rowGroups finds the columns of the rows of a file.
func (s *Rows) rowGroups(ctx context.Context, shown objstore.Object, stem string, emit func(Member) bool) (
	string, error) {
	o, err := untagged(parquetTag, shown)
	if err != nil {
		return "", err
	}
	f, err := openParquet(ctx, s.r, o)
	if err != nil {
		return "", err
	}
	var kinds []string
	of := map[string]int{} // the columns of files
	for i := range f.columns {
		c := &f.columns[i]
		if s.o.Columns != nil && !slices.Contains(s.o.Columns, c.name) || c.name == "" && c.err == nil {
			c.name = ""
			continue
		}
		for _, name := range c.files() {
			if other, ok := of[name]; ok && other != i {
				c.err = fmt.Errorf("two columns have files called %q", name)
			}
			of[name] = i
		}
		if c.err != nil {
			return "", c.err
		}
		kinds = append(kinds, c.name+c.ext)
	}
	for _, name := range s.o.Columns {
		if !slices.ContainsFunc(f.columns, func(c parquetColumn) bool { return c.name == name }) {
			return "", fmt.Errorf("it has no column %q with files", name)
		}
	}
	slices.Sort(kinds)
	if !s.before(shown, emit) {
		err = f.members(ctx, s.r, stem, emit)
	}
	return "the columns " + strings.Join(kinds, " "), err
}

// before emits the samples that an earlier list found in an object, and reports whether there is one of that object.
func (s *Rows) before(o objstore.Object, emit func(Member) bool) bool {
	m, l := s.o.Manifest, s.o.Layout
	if m == nil || l == nil || m.Skipped().Hostile+m.Skipped().Shadowed > 0 {
		return false
	}
	i, found := sort.Find(l.Shards(), func(i int) int { return strings.Compare(o.Key, l.Shard(i).Key) })
	if !found || l.Shard(i).ETag != o.ETag {
		return false
	}
	for r, to := l.ShardRanks(i); r < to; r++ {
		file := l.At(r)
		_, off := l.Where(file)
		if !emit(summed(m.Path(file), off, m.Size(file), func(x int) uint32 { return l.Sum(file, x) })) {
			break
		}
	}
	return true
}

// summed returns a member, of which sum tells the checksums of the extents.
func summed(path string, off, size int64, sum func(x int) uint32) Member {
	m := Member{Path: path, Off: off, Size: size, Summed: size <= catalog.ExtentSize, Sum: sum(0)}
	for x := 0; !m.Summed && x < catalog.Extents(size); x++ {
		m.sums += string(binary.LittleEndian.AppendUint32(nil, sum(x)))
	}
	return m
}

// members decodes chunks, several at once, and emits what is in them in the order of the chunks.
func (f *parquetFile) members(ctx context.Context, r objstore.Reader, stem string, emit func(Member) bool) error {
	var chunks []int
	var first []int64 // row of a group
	rows, largest := int64(0), int64(0)
	for chunk := range len(f.columns) * len(f.meta.RowGroups) {
		if chunk%len(f.columns) == 0 {
			first = append(first, rows)
			rows += f.meta.RowGroup(chunk / len(f.columns)).NumRows()
		}
		if f.columns[chunk%len(f.columns)].name != "" {
			chunks, largest = append(chunks, chunk), max(largest, f.length(chunk))
		}
	}
	runs := f.runs(chunks)
	var err error
	inTurn(ctx, len(runs), chunksAtOnce(largest), rowsBuffer,
		func(ctx context.Context, i int, put func(found) bool) {
			r, err := f.together(ctx, r, runs[i])
			for k := 0; k < len(runs[i]) && err == nil && ctx.Err() == nil; k++ {
				chunk := runs[i][k]
				c, at := &f.columns[chunk%len(f.columns)], int64(chunk)<<chunkShift
				err = f.decode(ctx, r, chunk, func(row int64, value []byte) bool {
					path := fmt.Sprintf("%s-%012d.%s", stem, first[chunk/len(f.columns)]+row, c.file(value))
					m := summed(path, at, int64(len(value)), func(x int) uint32 {
						from := x * catalog.ExtentSize
						return crc32.Checksum(value[from:min(from+catalog.ExtentSize, len(value))], castagnoli)
					})
					at += m.Size
					return put(found{m: m})
				})
			}
			if err != nil {
				put(found{err: err})
			}
		}, func(_ int, from <-chan found) bool {
			for v := range from {
				if err = v.err; err != nil || !emit(v.m) {
					return false
				}
			}
			return true
		})
	return errors.Join(err, ctx.Err())
}

// runs divides chunks into those that are fetched together: small ones that lie side by side, as of a file with many
// small row groups, of which each would be a request.
func (f *parquetFile) runs(chunks []int) (runs [][]int) {
	var end, most int64
	for _, chunk := range chunks {
		off, length, err := f.place(chunk) // decoding reports the error
		if len(runs) == 0 || err != nil || off < end || off > end+jumpWindow || off+length > most {
			runs, most = append(runs, nil), off+readWindow
		}
		runs[len(runs)-1] = append(runs[len(runs)-1], chunk)
		end = off + length
	}
	return runs
}

// together fetches a run, if it is of several chunks, and returns a Reader that has it.
func (f *parquetFile) together(ctx context.Context, r objstore.Reader, run []int) (objstore.Reader, error) {
	off, _, err := f.place(run[0])
	last, length, lastErr := f.place(run[len(run)-1])
	if len(run) == 1 || err != nil || lastErr != nil {
		return r, nil //nolint:nilerr // decoding tells
	}
	part := make([]byte, last+length-off)
	return fetched{r, off, part}, r.ReadAt(ctx, f.o, part, off)
}

// fetched is a Reader of an object of which it has a part.
type fetched struct {
	objstore.Reader
	off  int64
	part []byte
}

// ReadAt implements [objstore.Reader].
func (f fetched) ReadAt(ctx context.Context, o objstore.Object, p []byte, off int64) error {
	if at := off - f.off; at >= 0 && at+int64(len(p)) <= int64(len(f.part)) {
		copy(p, f.part[at:])
		return nil
	}
	return f.Reader.ReadAt(ctx, o, p, off)
}

// ChunkBytes returns how many bytes the largest chunk of a layout has; 0: there is none.
func ChunkBytes(l *catalog.Layout) (largest int64) {
	for i := range l.Shards() {
		if Run(l.Shard(i)) == 0 {
			continue
		}
		from, to := l.ShardRanks(i)
		for r := from; r < to; r++ {
			_, off, end := l.Extent(r)
			largest = max(largest, end-off>>chunkShift<<chunkShift)
		}
	}
	return largest
}

// Run returns how many bytes of an object to keep together: a chunk; 0: it has none.
func Run(o objstore.Object) int64 {
	if strings.HasPrefix(o.ETag, parquetTag) {
		return 1 << chunkShift
	}
	return 0
}

// chunksAtOnce returns how many chunks of at most so many bytes are decoded at once.
func chunksAtOnce(chunk int64) int { return int(min(max(chunksBytes/max(chunk, 1), 1), mostChunks)) }

// chunksKept returns how many bytes of decoded chunks are kept: a reader that goes by rows comes back to the chunks of
// all columns, of which a few are large.
func chunksKept(chunk int64) int64 { return min(chunk+chunksBytes, 64*chunk) }

// parquets is the part of a [Restorer] that decodes chunks.
type parquets struct {
	decoding chan struct{}
	largest  int64 // chunk
	room     int64 // chunksKept

	files  []named[*parquetFile] // the latest; under Restorer.mu
	chunks []named[[]byte]
}

type named[T any] struct {
	name string
	v    T
}

// latest returns what has a name, or loads it. It keeps what was used last, up to most of what size says.
func latest[T any](ctx context.Context, r *Restorer, of *[]named[T], most int64, size func(T) int64, name string,
	load func(ctx context.Context) (T, error)) (v T, err error) {
	find := func() (v T, ok bool) {
		i := slices.IndexFunc(*of, func(n named[T]) bool { return n.name == name })
		if i < 0 {
			return v, false
		}
		found := (*of)[i]
		*of = append(slices.Delete(*of, i, i+1), found)
		return found.v, true
	}
	keep := func(v T) {
		left := most - size(v)
		i := len(*of)
		for ; i > 0 && left >= size((*of)[i-1].v); i-- {
			left -= size((*of)[i-1].v)
		}
		*of = append(slices.Delete(*of, 0, i), named[T]{name, v})
	}
	for {
		if v, err = cached(ctx, r, name, find, keep, load); !errors.Is(err, errLeft) || ctx.Err() != nil {
			return v, cmp.Or(ctx.Err(), err)
		}
	}
}

var errLeft = errors.New("its reader has left")

// readChunks reads from an object of Rows.
func (r *Restorer) readChunks(ctx context.Context, o objstore.Object, spans []objstore.Span) error {
	if err := objstore.CheckSpans(o, spans); err != nil {
		return err
	}
	var data []byte
	for i, s := range spans {
		chunk := int(s.Off >> chunkShift)
		if i == 0 || chunk != int(spans[i-1].Off>>chunkShift) {
			var err error
			if data, err = r.chunk(ctx, o, chunk); err != nil {
				return err
			}
		}
		at := s.Off - int64(chunk)<<chunkShift
		if at+int64(len(s.P)) > int64(len(data)) {
			return &objstore.Error{Op: "restore", Key: o.Key, Kind: objstore.KindInvalid,
				Err: fmt.Errorf("chunk %d has %d bytes, %d at %d are wanted", chunk, len(data), len(s.P), at)}
		}
		copy(s.P, data[at:])
	}
	return nil
}

// chunk returns the decoded values of a chunk.
func (r *Restorer) chunk(asked context.Context, shown objstore.Object, chunk int) ([]byte, error) {
	name := shown.ETag + " " + shown.Key
	length := func(data []byte) int64 { return int64(len(data)) }
	return latest(asked, r, &r.chunks, r.room, length, fmt.Sprint(chunk, " ", name),
		func(ctx context.Context) (data []byte, err error) {
			one := func(*parquetFile) int64 { return 1 }
			f, err := latest(ctx, r, &r.files, parquetFiles, one, name,
				func(ctx context.Context) (*parquetFile, error) {
					o, err := untagged(parquetTag, shown)
					if err != nil {
						return nil, err
					}
					return openParquet(ctx, r.Reader, o)
				})
			if err == nil && chunk >= len(f.columns)*len(f.meta.RowGroups) {
				err = corrupt("it has no chunk %d", chunk)
			}
			if err == nil {
				select {
				case r.decoding <- struct{}{}:
				case <-asked.Done():
					return nil, errLeft
				}
				defer func() { <-r.decoding }()
				data = make([]byte, 0, min(f.length(chunk), r.largest))
				err = f.decode(ctx, r.Reader, chunk, func(_ int64, value []byte) bool {
					data = append(data, value...)
					return true
				})
			}
			if err != nil && isBad(err) {
				err = &objstore.Error{Op: "restore", Key: shown.Key, Kind: objstore.KindInvalid, Err: err,
					Remedy: "restore the file from a copy, or write it again"}
			}
			return data, err
		})
}
