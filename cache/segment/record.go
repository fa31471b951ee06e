package segment

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
)

const (
	// ExtentSize is the longest payload of a record, in bytes.
	ExtentSize = 4 << 20
	// BlockSize is how much of a payload one checksum covers, in bytes.
	BlockSize = 128 << 10
	// MaxETag is the longest ETag of a record, in bytes.
	MaxETag = 1024

	formatVersion = 1
	segmentMagic  = "SHOALSEG"
	recordMagic   = "SHRC"
	segHeaderLen  = 64
	recHeaderLen  = 96 // without ETag and checksums
	maxHeaderLen  = recHeaderLen + MaxETag + 4*(ExtentSize/BlockSize)
	unit          = 64 // records begin at its multiples

	// Widths of the parts of a Loc. A gap is the distance from a record to its payload.
	offBits = 26
	gapBits = 8
	maxSeg  = 1<<(64-offBits-gapBits) - 1
	maxGap  = (1<<gapBits - 1) * unit
	// maxSegmentSize is what an offset in a Loc can reach.
	maxSegmentSize = 1 << offBits * unit
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Record says what a payload is: Length bytes at Offset of the object that KeyHash names in Dataset,
// in the version ETag, which is ObjectSize bytes long.
type Record struct {
	Dataset, KeyHash [16]byte
	ETag             string
	ObjectSize       int64
	Offset           int64
	Length           int
}

func (r *Record) check() error {
	switch {
	case r.Length < 1 || r.Length > ExtentSize:
		return fmt.Errorf("record of %d bytes, want 1 to %d", r.Length, ExtentSize)
	case r.Offset < 0 || r.ObjectSize < 0 || r.Offset > r.ObjectSize-int64(r.Length):
		return fmt.Errorf("record of %d bytes at %d of an object of %d bytes", r.Length, r.Offset, r.ObjectSize)
	case len(r.ETag) > MaxETag:
		return fmt.Errorf("record with an ETag of %d bytes, want at most %d", len(r.ETag), MaxETag)
	}
	return nil
}

// headerLen returns the length of the record's header on disk.
func (r *Record) headerLen() int {
	return recHeaderLen + (len(r.ETag)+3)&^3 + 4*blocks(r.Length)
}

// blocks returns how many checksums a payload has.
func blocks(length int) int { return (length + BlockSize - 1) / BlockSize }

func alignUp(n, to int64) int64 { return (n + to - 1) / to * to }

// Loc says where a record lies. It is opaque; 0 is no record.
type Loc uint64

func makeLoc(seg uint32, off int64, gap int) Loc {
	return Loc(uint64(seg)<<(offBits+gapBits) | uint64(off/unit)<<gapBits | uint64(gap/unit))
}

// Segment returns the number of the segment that the record lies in.
func (l Loc) Segment() uint32 { return uint32(l >> (offBits + gapBits)) }

// off returns the record's offset in its segment.
func (l Loc) off() int64 { return int64(l>>gapBits&(1<<offBits-1)) * unit }

// gap returns the offset of the payload in the record.
func (l Loc) gap() int { return int(l&(1<<gapBits-1)) * unit }

// String returns the location for messages.
func (l Loc) String() string {
	return fmt.Sprintf("segment %08d at %d", l.Segment(), l.off())
}

// appendHeader appends the header of a record that lies at off of the segment with this salt.
func appendHeader(b []byte, r *Record, payload []byte, salt uint64, off int64, gap int) []byte {
	le := binary.LittleEndian
	start := len(b)
	b = append(b, recordMagic...)
	b = le.AppendUint16(b, formatVersion)
	b = le.AppendUint16(b, 0)
	b = le.AppendUint32(b, uint32(r.headerLen()))
	b = le.AppendUint32(b, 0)
	b = le.AppendUint64(b, salt)
	b = le.AppendUint64(b, uint64(off))
	b = append(b, r.Dataset[:]...)
	b = append(b, r.KeyHash[:]...)
	b = le.AppendUint64(b, uint64(r.ObjectSize))
	b = le.AppendUint64(b, uint64(r.Offset))
	b = le.AppendUint32(b, uint32(r.Length))
	b = le.AppendUint32(b, uint32(gap))
	b = le.AppendUint32(b, uint32(len(r.ETag)))
	b = le.AppendUint32(b, 0)
	b = append(b, r.ETag...)
	for (len(b)-start)%4 != 0 {
		b = append(b, 0)
	}
	for len(payload) > 0 {
		n := min(len(payload), BlockSize)
		b = le.AppendUint32(b, crc32.Checksum(payload[:n], castagnoli))
		payload = payload[n:]
	}
	h := b[start:]
	le.PutUint32(h[12:], crc32.Checksum(h, castagnoli))
	return b
}

// errHeader is the error of bytes that are not the header of a record at that place.
var errHeader = errors.New("not a record header")

// header is a parsed record header.
type header struct {
	rec  Record
	gap  int
	crcs []byte // 4 bytes a block; aliases the parsed bytes
}

// end returns the distance from the record's start to the next one's.
func (h *header) end() int64 { return alignUp(int64(h.gap)+int64(h.rec.Length), unit) }

// parseHeader parses the header at the start of b, which lies at off of a segment of size bytes. It
// returns errHeader for anything but a whole record that lies inside the segment.
func parseHeader(b []byte, salt uint64, off, size int64) (header, error) {
	le := binary.LittleEndian
	if len(b) < recHeaderLen || string(b[:4]) != recordMagic ||
		le.Uint64(b[16:]) != salt || le.Uint64(b[24:]) != uint64(off) {
		return header{}, errHeader
	}
	n := int(le.Uint32(b[8:]))
	if n < recHeaderLen || n > maxHeaderLen || n > len(b) {
		return header{}, errHeader
	}
	b = b[:n]
	crc := crc32.Checksum(b[:12], castagnoli)
	crc = crc32.Update(crc, castagnoli, []byte{0, 0, 0, 0})
	crc = crc32.Update(crc, castagnoli, b[16:])
	if crc != le.Uint32(b[12:]) {
		return header{}, errHeader
	}
	// From here on only a bug or an attacker can make these fail.
	if le.Uint16(b[4:]) != formatVersion || le.Uint16(b[6:]) != 0 {
		return header{}, errHeader
	}
	length, gap, tag := le.Uint32(b[80:]), le.Uint32(b[84:]), le.Uint32(b[88:])
	if length > ExtentSize || gap > maxGap || gap%unit != 0 || int(gap) < n || tag > MaxETag || recHeaderLen+int(tag) > n {
		return header{}, errHeader
	}
	h := header{gap: int(gap), rec: Record{
		Dataset: [16]byte(b[32:48]), KeyHash: [16]byte(b[48:64]),
		ETag:       string(b[recHeaderLen : recHeaderLen+int(tag)]),
		ObjectSize: int64(le.Uint64(b[64:])), Offset: int64(le.Uint64(b[72:])), Length: int(length),
	}}
	if h.rec.check() != nil || h.rec.headerLen() != n || off+int64(gap)+int64(length) > size {
		return header{}, errHeader
	}
	h.crcs = b[n-4*blocks(int(length)):]
	return h, nil
}

// checkBlocks compares p, which begins with block first and ends at a block's or the payload's end,
// with the checksums.
func (h *header) checkBlocks(p []byte, first int) bool {
	for i := first; len(p) > 0; i++ {
		n := min(len(p), BlockSize)
		if crc32.Checksum(p[:n], castagnoli) != binary.LittleEndian.Uint32(h.crcs[4*i:]) {
			return false
		}
		p = p[n:]
	}
	return true
}

// appendSegmentHeader appends the header of a segment.
func appendSegmentHeader(b []byte, id uint32, salt uint64) []byte {
	le := binary.LittleEndian
	start := len(b)
	b = append(b, segmentMagic...)
	b = le.AppendUint32(b, formatVersion)
	b = le.AppendUint32(b, id)
	b = le.AppendUint64(b, salt)
	b = append(b, make([]byte, 36)...)
	return le.AppendUint32(b, crc32.Checksum(b[start:], castagnoli))
}

// parseSegmentHeader returns the salt. Its errors wrap ErrCorrupt or ErrNewerFormat.
func parseSegmentHeader(b []byte, id uint32) (salt uint64, err error) {
	le := binary.LittleEndian
	if len(b) < segHeaderLen || string(b[:8]) != segmentMagic {
		return 0, fmt.Errorf("%w: no segment header", ErrCorrupt)
	}
	// Every later format keeps these 64 bytes as they are, so the checksum comes before the version:
	// damage to the version is not taken for a newer format.
	if le.Uint32(b[60:]) != crc32.Checksum(b[:60], castagnoli) {
		return 0, fmt.Errorf("%w: damaged segment header", ErrCorrupt)
	}
	if v := le.Uint32(b[8:]); v > formatVersion {
		return 0, fmt.Errorf("%w: format version %d, this one reads %d (use that version of shoal, or another --cache-dir)", ErrNewerFormat, v, formatVersion)
	}
	if n := le.Uint32(b[12:]); n != id || le.Uint32(b[8:]) != formatVersion {
		return 0, fmt.Errorf("%w: the header is that of segment %08d", ErrCorrupt, n)
	}
	return le.Uint64(b[16:]), nil
}

const (
	// scanHop is how much a scan reads where it expects a header: cheap for records that lie far
	// apart, and several headers at once for small ones.
	scanHop = 4 << 10
	// scanChunk is how much a search for the next header reads at a time.
	scanChunk = 1 << 20
)

// window reads a file of size bytes through a buffer.
type window struct {
	r    io.ReaderAt
	size int64
	buf  []byte
	off  int64 // of buf
}

// at returns the bytes from off on: at least need of them, or all up to the end of the file. On a miss
// it reads fetch bytes.
func (w *window) at(off int64, need, fetch int) ([]byte, error) {
	need = int(min(int64(need), w.size-off))
	if off < w.off || off+int64(need) > w.off+int64(len(w.buf)) {
		n := int(min(int64(fetch), w.size-off))
		if cap(w.buf) < n {
			w.buf = make([]byte, n)
		}
		w.buf, w.off = w.buf[:n], off
		k, err := w.r.ReadAt(w.buf, off)
		if k < n && err != io.EOF { // at EOF the file was cut meanwhile
			return nil, err
		}
		w.buf = w.buf[:k]
	}
	return w.buf[off-w.off:], nil
}

// scan calls found for each record that begins at from or behind it, from header to header. end is
// where the next record would begin, and holes counts the places where no valid header was but
// records followed. Only reading can fail.
func scan(r io.ReaderAt, salt uint64, from, size int64, found func(off int64, h *header)) (end int64, holes int, err error) {
	w := window{r: r, size: size}
	end = from
	for end+recHeaderLen <= size {
		b, err := w.at(end, maxHeaderLen, scanHop)
		if err != nil {
			return end, holes, err
		}
		pos := end
		h, bad := parseHeader(b, salt, pos, size)
		if bad != nil {
			if pos, h, err = resync(&w, salt, end+unit, size); err != nil {
				return end, holes, err
			}
			if pos == 0 {
				break
			}
			holes++
		}
		found(pos, &h)
		end = pos + h.end()
	}
	return end, holes, nil
}

// resync finds the first valid header at from or behind it; pos is 0 where there is none.
func resync(w *window, salt uint64, from, size int64) (pos int64, h header, err error) {
	for at := from; at+recHeaderLen <= size; at += scanChunk {
		b, err := w.at(at, scanChunk+maxHeaderLen, scanChunk+maxHeaderLen)
		if err != nil {
			return 0, header{}, err
		}
		for i := 0; i < scanChunk && i+recHeaderLen <= len(b); i += unit {
			if string(b[i:i+4]) != recordMagic {
				continue
			}
			if h, bad := parseHeader(b[i:], salt, at+int64(i), size); bad == nil {
				return at + int64(i), h, nil
			}
		}
	}
	return 0, header{}, nil
}
