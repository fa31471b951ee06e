package shard

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"math"

	"github.com/shoalfs/shoal/cache/catalog"
)

const (
	indexMagic   = "SHOALIDX"
	indexVersion = 1
	indexHeader  = 128
	indexRow     = 36
	codedVersion = 1 // more, of an index with coded members
	sumsVersion  = 2 // more, of one with checksums of extents
	codedRow     = indexRow + 4

	// maxIndex bounds the size of an index read into memory: 5 million members of 100 bytes.
	maxIndex = 1 << 29

	noTime = math.MinInt64 // stands for an unknown modification time
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func corrupt(format string, args ...any) error {
	return fmt.Errorf("%w: %s", catalog.ErrCorrupt, fmt.Sprintf(format, args...))
}

// index is a parsed .sidx.
type index struct {
	dataset [32]byte
	plan    [16]byte
	shard   int
	size    int64  // of the tar
	etag    string // of the tar
	bytes   int64  // sum of the members' sizes
	coded   bool   // rows have the length of what is stored
	sums    bool   // members of several extents have the checksum of each
	rows    []byte
	strings []byte
}

// indexMember is one member of an index.
type indexMember struct {
	off, size int64
	stored    int64 // length in the tar; that of the file, if it is not coded
	mtime     int64
	crc       uint32 // of the file
	sums      string // CRC32C of each extent, if there are several
	path      string
	tarName   string // "": path
	etag      string
}

func (ix *index) len() int { return len(ix.rows) / ix.row() }

// row is the length of a row.
func (ix *index) row() int {
	if ix.coded {
		return codedRow
	}
	return indexRow
}

// sumsLen is the length of a member's checksums of extents.
func (ix *index) sumsLen(size int64) int {
	if !ix.sums || size <= catalog.ExtentSize {
		return 0
	}
	return 4 * catalog.Extents(size)
}

// append adds a member.
func (ix *index) append(m indexMember) error {
	if len(m.path) > math.MaxUint16 || len(m.tarName) > math.MaxUint16 || len(m.etag) > math.MaxUint16 {
		return fmt.Errorf("member %.300q has a path, a name or an ETag of over 65,535 bytes", m.path)
	}
	le := binary.LittleEndian
	r := le.AppendUint64(ix.rows, uint64(m.off))
	r = le.AppendUint64(r, uint64(m.size))
	r = le.AppendUint64(r, uint64(m.mtime))
	r = le.AppendUint32(r, m.crc)
	for _, n := range [...]int{len(m.path), len(m.tarName), len(m.etag), 0} {
		r = le.AppendUint16(r, uint16(n))
	}
	if ix.coded {
		short := int64(0)
		if m.stored < m.size {
			short = m.stored
		}
		r = le.AppendUint32(r, uint32(short))
	}
	ix.rows = r
	ix.strings = append(append(append(append(ix.strings, m.path...), m.tarName...), m.etag...), m.sums...)
	ix.sums = ix.sums || m.sums != ""
	ix.bytes += m.size
	return nil
}

// encode returns the file.
func (ix *index) encode() ([]byte, error) {
	le := binary.LittleEndian
	total := indexHeader + len(ix.etag) + len(ix.rows) + len(ix.strings)
	if total > maxIndex {
		return nil, fmt.Errorf("the index of shard %d has %d bytes, more than %d (use a smaller --shard-size)",
			ix.shard, total, maxIndex)
	}
	out := make([]byte, indexHeader, total)
	copy(out, indexMagic)
	out[8] = indexVersion
	if ix.coded {
		out[8] += codedVersion
	}
	if ix.sums {
		out[8] += sumsVersion
	}
	le.PutUint32(out[12:], indexHeader)
	copy(out[16:], ix.dataset[:])
	copy(out[48:], ix.plan[:])
	le.PutUint32(out[64:], uint32(ix.shard))
	le.PutUint32(out[68:], uint32(ix.len()))
	le.PutUint64(out[72:], uint64(ix.size))
	le.PutUint64(out[80:], uint64(ix.bytes))
	le.PutUint64(out[88:], uint64(len(ix.strings)))
	le.PutUint32(out[96:], uint32(len(ix.etag)))
	le.PutUint64(out[112:], uint64(total))
	out = append(append(append(out, ix.etag...), ix.rows...), ix.strings...)
	le.PutUint32(out[120:], crc32.Checksum(out[indexHeader:], castagnoli))
	le.PutUint32(out[124:], crc32.Checksum(out[:124], castagnoli))
	return out, nil
}

// parseIndex checks data, which the index refers to. Its errors wrap [catalog.ErrCorrupt] or [catalog.ErrNewerFormat].
func parseIndex(data []byte) (*index, error) {
	v, err := catalog.CheckHeader(data, indexHeader, indexMagic, indexVersion, indexVersion+codedVersion+sumsVersion,
		"an index")
	if err != nil {
		return nil, err
	}
	le, h := binary.LittleEndian, data[:indexHeader]
	coded, sums := (v-indexVersion)&codedVersion != 0, (v-indexVersion)&sumsVersion != 0
	row := uint64((&index{coded: coded}).row())
	n, strs, tag := uint64(le.Uint32(h[68:])), le.Uint64(h[88:]), uint64(le.Uint32(h[96:]))
	if le.Uint64(h[112:]) != uint64(len(data)) || strs > uint64(len(data)) ||
		indexHeader+tag+n*row+strs != uint64(len(data)) {
		return nil, corrupt("%d bytes long, but the header says otherwise", len(data))
	}
	if err := catalog.CheckContent(data, indexHeader); err != nil {
		return nil, err
	}
	ix := &index{
		dataset: [32]byte(h[16:48]), plan: [16]byte(h[48:64]), shard: int(le.Uint32(h[64:])),
		size: int64(le.Uint64(h[72:])), bytes: int64(le.Uint64(h[80:])), coded: coded, sums: sums,
	}
	rest := data[indexHeader:]
	ix.etag, rest = string(rest[:tag]), rest[tag:]
	ix.rows, ix.strings = rest[:n*row], rest[n*row:]
	return ix, ix.check()
}

// check checks what later reads rely on: offsets ascend without overlap inside the tar, and all strings are there.
func (ix *index) check() error {
	if ix.size < 0 {
		return corrupt("a tar of %d bytes", ix.size)
	}
	if ix.etag == "" {
		return corrupt("the tar has no ETag")
	}
	var end, sum int64
	used := 0
	for i := range ix.len() {
		m, texts := ix.at(i)
		sum += m.size
		if m.stored != m.size && (m.stored > m.size || m.size > catalog.ExtentSize) {
			return corrupt("member %d: %d bytes stored as %d", i, m.size, m.stored)
		}
		if m.off < end+blockSize || m.off%blockSize != 0 || m.off > ix.size || m.stored < 0 ||
			m.stored > ix.size-m.off {
			return corrupt("member %d: %d bytes at %d of a tar of %d bytes", i, m.stored, m.off, ix.size)
		}
		if texts[0] == 0 || texts[2] == 0 {
			return corrupt("member %d has no path or no ETag", i)
		}
		end = m.off + m.stored
		used += texts[0] + texts[1] + texts[2] + texts[3]
	}
	if sum != ix.bytes {
		return corrupt("sizes add up to %d, want %d", sum, ix.bytes)
	}
	if used != len(ix.strings) {
		return corrupt("strings fill %d bytes of %d", used, len(ix.strings))
	}
	return nil
}

// at returns member i without its texts, and the lengths of these: path, name in the tar, ETag, checksums.
func (ix *index) at(i int) (m indexMember, texts [4]int) {
	le, r := binary.LittleEndian, ix.rows[i*ix.row():]
	m = indexMember{off: int64(le.Uint64(r)), size: int64(le.Uint64(r[8:])), mtime: int64(le.Uint64(r[16:])),
		crc: le.Uint32(r[24:])}
	m.stored = m.size
	if ix.coded && le.Uint32(r[indexRow:]) > 0 {
		m.stored = int64(le.Uint32(r[indexRow:]))
	}
	return m, [4]int{int(le.Uint16(r[28:])), int(le.Uint16(r[30:])), int(le.Uint16(r[32:])), ix.sumsLen(m.size)}
}

// members calls yield for each member until it returns false.
func (ix *index) members(yield func(i int, m indexMember) bool) {
	rest := ix.strings
	for i := range ix.len() {
		m, texts := ix.at(i)
		for k, text := range []*string{&m.path, &m.tarName, &m.etag, &m.sums} {
			*text, rest = string(rest[:texts[k]]), rest[texts[k]:]
		}
		if !yield(i, m) {
			return
		}
	}
}

var errTooLong = errors.New("too long to be read into memory")
