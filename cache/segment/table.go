package segment

import (
	"encoding/binary"
	"errors"
	"hash/crc32"
	"math"
)

// tableVersion is the first byte of a record table. One of another version is not read: the segment is scanned.
const tableVersion = 3 // 2 is sealedTable

// entry is one record of a segment.
type entry struct {
	Extent
	off int64
	gap int
}

func (e *entry) end() int64 { return e.off + alignUp(int64(e.gap)+int64(e.Length), unit) }

// appendTable appends the table of records that an Index keeps:
//
//	u8 version, uvarint count, then for each record, by ascending offset:
//	  uvarint distance/64 from the end of the record before, uvarint gap/64, uvarint length,
//	  uvarint dataset: index among those seen in this table; a new one is followed by its 16 bytes,
//	  12 bytes id of the object's version, u32 LE its file, uvarint offset in the object
//	u32 LE CRC32C of all before
func appendTable(b []byte, entries []entry) []byte {
	le := binary.LittleEndian
	start := len(b)
	b = append(b, tableVersion)
	b = binary.AppendUvarint(b, uint64(len(entries)))
	seen := make(map[[16]byte]uint64)
	end := int64(segHeaderLen)
	for i := range entries {
		e := &entries[i]
		b = binary.AppendUvarint(b, uint64((e.off-end)/unit))
		b = binary.AppendUvarint(b, uint64(e.gap/unit))
		b = binary.AppendUvarint(b, uint64(e.Length))
		n, ok := seen[e.Dataset]
		if !ok {
			n = uint64(len(seen))
			seen[e.Dataset] = n
		}
		b = binary.AppendUvarint(b, n)
		if !ok {
			b = append(b, e.Dataset[:]...)
		}
		b = le.AppendUint32(append(b, e.ID[:]...), e.File)
		b = binary.AppendUvarint(b, uint64(e.Offset))
		end = e.end()
	}
	return le.AppendUint32(b, crc32.Checksum(b[start:], castagnoli))
}

var errTable = errors.New("damaged record table")

// leastEntry is the least that an entry of a table takes.
const leastEntry = 5 + 16

// parseTable returns a table's records before size, and how many are not. It checks everything that a read relies on.
func parseTable(b []byte, size int64) (entries []entry, lost int, err error) {
	le := binary.LittleEndian
	if len(b) < 6 || b[0] != tableVersion {
		return nil, 0, errTable
	}
	body := b[:len(b)-4]
	if crc32.Checksum(body, castagnoli) != le.Uint32(b[len(b)-4:]) {
		return nil, 0, errTable
	}
	t := tableReader{b: body[1:]}
	count := t.num()
	if count > uint64(len(t.b))/leastEntry {
		return nil, 0, errTable
	}
	entries = make([]entry, 0, count)
	var datasets [][16]byte
	end := int64(segHeaderLen)
	for range count {
		skip, gap, length, ds := t.num(), t.num(), t.num(), t.num()
		if ds == uint64(len(datasets)) {
			datasets = append(datasets, [16]byte(t.take(16)))
		}
		fixed := t.take(16)
		offset := t.num()
		if t.bad || ds >= uint64(len(datasets)) || skip >= 1<<offBits || gap >= 1<<gapBits || length == 0 ||
			length > ExtentSize || offset > math.MaxInt64-ExtentSize {
			return nil, 0, errTable
		}
		e := entry{off: end + int64(skip)*unit, gap: int(gap) * unit, Extent: Extent{
			Dataset: datasets[ds], ID: VersionID(fixed), File: le.Uint32(fixed[12:]), Offset: int64(offset),
			Length: int(length),
		}}
		if e.off >= maxSegmentSize || e.gap < headerLen(0, e.Length) {
			return nil, 0, errTable
		}
		if e.off+int64(e.gap)+int64(e.Length) > size {
			break // the file was cut; records ascend
		}
		end = e.end()
		entries = append(entries, e)
	}
	return entries, int(count) - len(entries), nil
}

// tableReader reads numbers and bytes from the start of b; bad is set when there are not enough.
type tableReader struct {
	b   []byte
	bad bool
}

func (t *tableReader) num() uint64 {
	if len(t.b) > 0 && t.b[0] < 0x80 {
		v := uint64(t.b[0])
		t.b = t.b[1:]
		return v
	}
	v, n := binary.Uvarint(t.b)
	if n <= 0 {
		t.bad, t.b = true, nil
		return 0
	}
	t.b = t.b[n:]
	return v
}

func (t *tableReader) take(n int) []byte {
	if n > len(t.b) {
		t.bad, t.b = true, nil
		return make([]byte, n)
	}
	p := t.b[:n]
	t.b = t.b[n:]
	return p
}
