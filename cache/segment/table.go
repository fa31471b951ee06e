package segment

import (
	"encoding/binary"
	"errors"
	"hash/crc32"
)

// tableVersion is the first byte of a record table. A table of another version is not read; the
// segment is scanned instead.
const tableVersion = 1

// entry is one record of a segment.
type entry struct {
	rec Record
	off int64
	gap int
}

func (e *entry) end() int64 { return e.off + alignUp(int64(e.gap)+int64(e.rec.Length), unit) }

// appendTable appends the table of records that an Index keeps:
//
//	u8 version, uvarint count, then for each record, by ascending offset:
//	  uvarint offset/64, uvarint gap/64, uvarint length,
//	  uvarint dataset: index among those seen in this table; a new one is followed by its 16 bytes,
//	  16 bytes key hash, uvarint object size, uvarint offset in the object, uvarint length of the ETag, ETag
//	u32 LE CRC32C of all before
func appendTable(b []byte, entries []entry) []byte {
	start := len(b)
	b = append(b, tableVersion)
	b = binary.AppendUvarint(b, uint64(len(entries)))
	seen := make(map[[16]byte]uint64)
	for i := range entries {
		e := &entries[i]
		b = binary.AppendUvarint(b, uint64(e.off/unit))
		b = binary.AppendUvarint(b, uint64(e.gap/unit))
		b = binary.AppendUvarint(b, uint64(e.rec.Length))
		n, ok := seen[e.rec.Dataset]
		if !ok {
			n = uint64(len(seen))
			seen[e.rec.Dataset] = n
		}
		b = binary.AppendUvarint(b, n)
		if !ok {
			b = append(b, e.rec.Dataset[:]...)
		}
		b = append(b, e.rec.KeyHash[:]...)
		b = binary.AppendUvarint(b, uint64(e.rec.ObjectSize))
		b = binary.AppendUvarint(b, uint64(e.rec.Offset))
		b = binary.AppendUvarint(b, uint64(len(e.rec.ETag)))
		b = append(b, e.rec.ETag...)
	}
	return binary.LittleEndian.AppendUint32(b, crc32.Checksum(b[start:], castagnoli))
}

var errTable = errors.New("damaged record table")

// parseTable returns the records of a table that lie before size, and how many do not. It checks all
// that a read relies on.
func parseTable(b []byte, size int64) (entries []entry, lost int, err error) {
	if len(b) < 6 || b[0] != tableVersion {
		return nil, 0, errTable
	}
	body := b[:len(b)-4]
	if crc32.Checksum(body, castagnoli) != binary.LittleEndian.Uint32(b[len(b)-4:]) {
		return nil, 0, errTable
	}
	b = body[1:]
	bad := false
	num := func() uint64 {
		v, n := binary.Uvarint(b)
		if n <= 0 {
			bad, b = true, nil
			return 0
		}
		b = b[n:]
		return v
	}
	take := func(n uint64) []byte {
		if n > uint64(len(b)) {
			bad, b = true, nil
			return make([]byte, min(n, 16))
		}
		p := b[:n]
		b = b[n:]
		return p
	}
	count := num()
	if count > uint64(len(b))/20 { // an entry is longer
		return nil, 0, errTable
	}
	entries = make([]entry, 0, count)
	var datasets [][16]byte
	next := int64(segHeaderLen)
	for range count {
		off, gap, length, ds := num(), num(), num(), num()
		if ds == uint64(len(datasets)) {
			datasets = append(datasets, [16]byte(take(16)))
		}
		if bad || ds >= uint64(len(datasets)) || off >= 1<<offBits || gap >= 1<<gapBits || length > ExtentSize {
			return nil, 0, errTable
		}
		e := entry{off: int64(off) * unit, gap: int(gap) * unit, rec: Record{Dataset: datasets[ds], Length: int(length)}}
		e.rec.KeyHash = [16]byte(take(16))
		e.rec.ObjectSize, e.rec.Offset = int64(num()), int64(num())
		tag := num()
		if tag > MaxETag {
			return nil, 0, errTable
		}
		e.rec.ETag = string(take(tag))
		if bad || e.rec.check() != nil || e.gap < e.rec.headerLen() || e.off < next {
			return nil, 0, errTable
		}
		if e.off+int64(e.gap)+int64(e.rec.Length) > size {
			break // the file was cut; records ascend
		}
		next = e.end()
		entries = append(entries, e)
	}
	return entries, int(count) - len(entries), nil
}
