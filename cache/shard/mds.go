package shard

import (
	"cmp"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/shoalfs/shoal/cache/objstore"
)

// MosaicML's MDS is a folder of shards with an index.json, which has columns and number of samples of each. A shard is
//
//	u32 N, (N+1) x u32 offset of a sample, and the end; its configuration, which is not read
//	N samples, each: u32 length of each column that has no fixed one; the columns
//
// Each column of a sample is a file, FOLDER/SHARD-000000000000.COLUMN.EXT, where dots in SHARD are "_": so the columns
// of a sample are parts of it (docs/samples.md), and EXT says what is in them. If at most one column has no fixed
// length, the shard's offsets say where the columns are, and no sample is read to find them.
const (
	mdsIndexName = "index.json"
	mdsSuffix    = ".mds"
	maxMDSIndex  = 1 << 28 // some 250,000 shards
	maxMDSName   = 100
)

// mdsEncodings are the extensions of MDS's encodings, but of arrays. One that is a type has the length of a number.
var mdsEncodings = map[string]string{
	"bytes": "", "str": ".txt", "json": ".json", "jpeg": ".jpg", "png": ".png", "int": ".int64", "str_int": ".txt",
	"str_float": ".txt", "str_decimal": ".txt",
	"uint8": ".uint8", "uint16": ".uint16", "uint32": ".uint32", "uint64": ".uint64", "int8": ".int8",
	"int16": ".int16", "int32": ".int32", "int64": ".int64",
	"float16": ".float16", "float32": ".float32", "float64": ".float64",
	// as they are
	"pil": "", "pkl": "", "jpeg_array": "", "jpegarray": "", "list[pil]": "", "list[jpeg]": "", "list[png]": "",
}

// mdsShard is a shard in an index.
type mdsShard struct {
	Version     int             `json:"version"`
	Format      string          `json:"format"`
	Names       []string        `json:"column_names"`
	Encodings   []string        `json:"column_encodings"`
	Sizes       []int64         `json:"column_sizes"` // null and 0: none
	Compression string          `json:"compression"`
	Zip         json.RawMessage `json:"zip_data"`
	Samples     int64           `json:"samples"`
	Raw         struct {
		Basename string `json:"basename"`
		Bytes    int64  `json:"bytes"`
	} `json:"raw_data"`
}

// mdsColumns are the columns of a shard.
type mdsColumns struct {
	names []string // as files are called, after the sample's number
	sizes []int64  // -1: it has no fixed length
	fixed int64    // the sum of those
	free  int      // how many have none
}

// openMDS adds the shards of an index, each once. Those that another one has named, as of a folder that was merged into
// one above, are left to it: there has no key of them.
func (s *Rows) openMDS(ctx context.Context, ix objstore.Object, there map[string]objstore.Object) error {
	data, err := readWhole(ctx, s.r, ix, maxMDSIndex)
	if err != nil {
		return err
	}
	var list struct {
		Version int        `json:"version"`
		Shards  []mdsShard `json:"shards"`
	}
	if err = json.Unmarshal(data, &list); err == nil && (list.Version != 2 || len(list.Shards) == 0) {
		err = corrupt("version %d with %d shards, but only version 2 is read", list.Version, len(list.Shards))
	}
	for i := 0; i < len(list.Shards) && err == nil; i++ {
		if err = s.addMDS(ix.Key, &list.Shards[i], there); err != nil {
			err = fmt.Errorf("shard %d: %w", i, err)
		}
	}
	if err != nil {
		return fmt.Errorf("%s: %w", ix.Key, err)
	}
	return nil
}

// addMDS adds a shard of the index called ix.
func (s *Rows) addMDS(ix string, sh *mdsShard, there map[string]objstore.Object) error {
	dir := path.Dir(ix)
	key := path.Join(dir, sh.Raw.Basename)
	switch {
	case sh.Version != 2 || sh.Format != "mds":
		return fmt.Errorf("format %.20q, version %d: only mds, version 2, is read", sh.Format, sh.Version)
	case sh.Compression != "" || len(sh.Zip) > 0 && string(sh.Zip) != "null":
		return fmt.Errorf(
			"it is compressed (%.20q), so single samples cannot be read from it: write it with compression=None",
			sh.Compression)
	case sh.Raw.Basename == "" || sh.Raw.Bytes < 0 || sh.Samples < 0:
		return errors.New("raw_data or samples is missing, or below 0")
	case !strings.HasPrefix(key, strings.TrimPrefix(dir+"/", "./")) || path.IsAbs(sh.Raw.Basename):
		return fmt.Errorf("%q is outside its folder", sh.Raw.Basename)
	}
	c, err := sh.columns()
	if err != nil {
		return err
	}
	o, ok := there[key]
	if ok && o.Key == "" {
		return nil
	}
	if !ok {
		o, err = objstore.Object{Key: key, Size: sh.Raw.Bytes}, fmt.Errorf("%s names %s, which is not there", ix, key)
	} else if o.Size != sh.Raw.Bytes {
		err = fmt.Errorf("%s says that %s has %d bytes, but it has %d", ix, key, sh.Raw.Bytes, o.Size)
	}
	there[key] = objstore.Object{}
	stem, twin := s.stem(key, mdsSuffix)
	n := sh.Samples
	return s.add(o, func(ctx context.Context, o objstore.Object, emit func(Member) bool) (string, error) {
		return "the columns " + strings.Join(c.names, ", "), s.samples(ctx, o, stem, c, n, emit)
	}, cmp.Or(err, twin))
}

// columns checks the columns' encodings and lengths.
func (sh *mdsShard) columns() (*mdsColumns, error) {
	if len(sh.Names) == 0 || len(sh.Names) != len(sh.Encodings) || len(sh.Names) != len(sh.Sizes) {
		return nil, fmt.Errorf("%d column_names, %d column_encodings, %d column_sizes",
			len(sh.Names), len(sh.Encodings), len(sh.Sizes))
	}
	c := &mdsColumns{}
	for i, name := range sh.Names {
		ext, size, ok := mdsFile(sh.Encodings[i])
		if !ok || name == "" || len(name) > maxMDSName || strings.ContainsAny(name, "/\x00") ||
			slices.Contains(sh.Names[:i], name) {
			return nil, fmt.Errorf("column %.40q of encoding %.40q cannot be read: it is unknown, or the name is "+
				"used twice, has a slash or over %d bytes", name, sh.Encodings[i], maxMDSName)
		}
		if sh.Sizes[i] != max(size, 0) {
			return nil, fmt.Errorf("column %q has %d bytes, but %s has %d",
				name, sh.Sizes[i], sh.Encodings[i], max(size, 0))
		}
		c.names, c.sizes = append(c.names, name+ext), append(c.sizes, size)
		if size < 0 {
			c.free++
		} else if c.fixed += size; c.fixed > 1<<32 {
			return nil, fmt.Errorf("columns up to %q have %d bytes", name, c.fixed)
		}
	}
	return c, nil
}

// mdsFile returns the extension of a column's files, and their length, -1 if it is not fixed. Arrays without a fixed
// shape begin with it, those without a fixed type with that: they end in .mds, see gpuingest.
func mdsFile(encoding string) (ext string, size int64, ok bool) {
	if ext, ok = mdsEncodings[encoding]; ok {
		return ext, cmp.Or(lengthOf[strings.TrimPrefix(ext, ".")], -1), true
	}
	array := strings.Split(encoding, ":")
	size, ok = lengthOf[array[min(1, len(array)-1)]]
	switch {
	case encoding == "ndarray":
		return mdsSuffix, -1, true
	case array[0] != "ndarray" || len(array) > 3 || !ok:
		return "", 0, false
	case len(array) == 2:
		return "." + array[1] + mdsSuffix, -1, true
	}
	for _, n := range strings.Split(array[2], ",") {
		dim, err := strconv.ParseInt(n, 10, 32)
		if err != nil || dim < 1 || size > 1<<32/dim {
			return "", 0, false
		}
		size *= dim
	}
	return "." + array[1], size, true
}

// Suffixes returns what the names of samples end with, as a list for [catalog.Match]: those of a column, or, for "", of
// rows, documents and pictures.
func Suffixes(column string) string {
	list := []string{"images", RowSuffix}
	for dtype := range lengthOf {
		list = append(list, "."+dtype)
	}
	if column != "" {
		list = []string{"." + column + mdsSuffix}
		for _, ext := range mdsEncodings {
			list = append(list, "."+column+ext)
		}
		for dtype := range lengthOf {
			list = append(list, "."+column+"."+dtype+mdsSuffix)
		}
		for _, t := range contents {
			list = append(list, "."+column+t.ext)
		}
	}
	return strings.Join(list, ",")
}

// samples finds the columns of all n samples of a shard. It holds some MiB.
func (s *Rows) samples(ctx context.Context, o objstore.Object, stem string, c *mdsColumns, n int64,
	emit func(Member) bool) error {
	if o.Size < 8 || n > (o.Size-8)/4 {
		return corrupt("its index says that it has %d samples, which do not fit into %d bytes", n, o.Size)
	}
	offsets, a := s.from(ctx, o, 0)
	defer a.close()
	if count, err := number(offsets, 4); err != nil || int64(count) != n {
		return cmp.Or(err, corrupt("its index says that it has %d samples, it says %d", n, count))
	}
	first, err := number(offsets, 4)
	begin, head := int64(first), make([]byte, 4*c.free)
	if err != nil || begin < 8+4*n {
		return cmp.Or(err, corrupt("sample 0 begins at byte %d, within the %d bytes of offsets", begin, 8+4*n))
	}
	heads := newAhead(ctx, s.r, o)
	defer heads.close()
	for i := range n {
		next, err := number(offsets, 4)
		if err != nil {
			return err
		}
		end, at := int64(next), begin+int64(len(head))
		left := end - at - c.fixed // for the columns without a fixed length
		if left < 0 || end > o.Size {
			return corrupt("sample %d has the bytes %d to %d of %d, and its columns at least %d", i, begin, end, o.Size,
				int64(len(head))+c.fixed)
		}
		if c.free > 1 {
			heads.pos = begin
			if _, err := io.ReadFull(heads, head); err != nil {
				return err
			}
			heads.members++
		}
		rest := head
		for k, size := range c.sizes {
			if size < 0 {
				if size = left; c.free > 1 {
					size, rest = int64(binary.LittleEndian.Uint32(rest)), rest[4:]
				}
				if left -= size; left < 0 {
					return corrupt("column %s of sample %d, at byte %d, has %d bytes, more than the sample", c.names[k],
						i, begin, size)
				}
			}
			if !emit(Member{Path: fmt.Sprintf("%s-%012d.%s", stem, i, c.names[k]), Off: at, Size: size}) {
				return ctx.Err()
			}
			at += size
		}
		if at != end {
			return corrupt("the columns of sample %d, at byte %d, end at %d, the sample at %d", i, begin, at, end)
		}
		begin = end
	}
	return nil
}
