package segment

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math"
	"slices"

	"github.com/shoalfs/shoal/cache/crypt"
	"github.com/shoalfs/shoal/internal/killpoint"
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
	maxHeadLen    = maxHeaderLen + maxSealLen // with the seal of an encrypted record
	unit          = 64                        // records begin at its multiples

	// flagEncrypted is set in a record whose payload is encrypted.
	flagEncrypted = 1
	// voidMagic replaces the magic, as long, of a voided record: a failed append, or damage that Check repaired.
	voidMagic = "SHVD"

	// Widths of the parts of a Loc. A gap is the distance from a record to its payload.
	offBits = 26
	gapBits = 8
	maxSeg  = 1<<(63-offBits-gapBits) - 1 // the top bit is the owner's
	maxGap  = (1<<gapBits - 1) * unit
	// maxSegmentSize is the largest offset in a Loc.
	maxSegmentSize = 1 << offBits * unit
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Record describes a payload: Length bytes at Offset of KeyHash's object in Dataset, of version ETag and ObjectSize.
type Record struct {
	Dataset, KeyHash [16]byte
	ETag             string
	ObjectSize       int64
	Offset           int64
	Length           int

	// File is the owner's number for the object now: a hint, in the record table only, that saves a search.
	File uint32
}

// Extent describes a record to visit of [Open]: Length bytes at Offset of the version ID of an object of Dataset.
// File is that of the record, or NoFile if a scan found it.
type Extent struct {
	Dataset [16]byte
	ID      VersionID
	Offset  int64
	Length  int
	File    uint32
}

// NoFile is no number of a file.
const NoFile = math.MaxUint32

// VersionID identifies one version of one object in record tables and manifests: the first 12 bytes of the SHA-256 of
// the key hash, the size (u64 LE), and the ETag. Among a hundred million versions two are equal with a probability of
// 1 to 10^12.
type VersionID [12]byte

// IDOf returns the VersionID of an object.
func IDOf(keyHash [16]byte, size int64, etag string) VersionID {
	var buf [128]byte
	b := binary.LittleEndian.AppendUint64(append(buf[:0], keyHash[:]...), uint64(size))
	sum := sha256.Sum256(append(b, etag...))
	return VersionID(sum[:])
}

// Uint64 returns the first 8 bytes, LE, a random number.
func (id *VersionID) Uint64() uint64 { return binary.LittleEndian.Uint64(id[:]) }

func (r *Record) extent() Extent {
	return Extent{Dataset: r.Dataset, ID: IDOf(r.KeyHash, r.ObjectSize, r.ETag), Offset: r.Offset, Length: r.Length,
		File: r.File}
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
func (r *Record) headerLen() int { return headerLen(len(r.ETag), r.Length) }

func headerLen(etag, length int) int { return recHeaderLen + (etag+3)&^3 + 4*blocks(length) }

// headLen returns the length of a header, with its seal if the record is encrypted.
func headLen(etag, length int, encrypted bool) int {
	n := headerLen(etag, length)
	if encrypted {
		n += sealLen(length)
	}
	return n
}

// RecordBytes returns the bytes of a record in a segment, for a payload of length bytes, with header and padding.
func RecordBytes(etag, length int, encrypted bool) int64 {
	return alignUp(int64(headLen(etag, length, encrypted)), payloadAlign) + alignUp(int64(length), unit)
}

// blocks returns how many checksums a payload has.
func blocks(length int) int { return (length + BlockSize - 1) / BlockSize }

func alignUp(n, to int64) int64 { return (n + to - 1) / to * to }

// Loc says where a record lies. It is opaque; 0 is no record. Its top bit is 0: an owner may keep a mark of its own
// there, and takes it off before it calls the store.
type Loc uint64

// Bytes returns the bytes of the record at the Loc in its segment, if its payload is length bytes long.
func (l Loc) Bytes(length int) int64 { return alignUp(int64(l.gap())+int64(length), unit) }

func makeLoc(seg uint32, off int64, gap int) Loc {
	return Loc(uint64(seg)<<(offBits+gapBits) | uint64(off/unit)<<gapBits | uint64(gap/unit))
}

// Segment returns the number of the segment that the record lies in.
func (l Loc) Segment() uint32 { return uint32(l >> (offBits + gapBits)) }

// Same reports whether both are of one record; where its payload is does not count.
func (l Loc) Same(other Loc) bool { return l>>gapBits == other>>gapBits }

// off returns the record's offset in its segment.
func (l Loc) off() int64 { return int64(l>>gapBits&(1<<offBits-1)) * unit }

// gap returns the offset of the payload in the record.
func (l Loc) gap() int { return int(l&(1<<gapBits-1)) * unit }

// String returns the location for messages.
func (l Loc) String() string { return fmt.Sprintf("segment %08d at %d", l.Segment(), l.off()) }

// appendHeader appends the header of a record at off of the segment with this salt.
func appendHeader(b []byte, r *Record, payload []byte, salt uint64, off int64, gap int) []byte {
	start := len(b)
	b = appendFields(b, r, salt, off, gap, 0)
	for block := range slices.Chunk(payload, BlockSize) {
		b = binary.LittleEndian.AppendUint32(b, crc32.Checksum(block, castagnoli))
	}
	closeHeader(b[start:])
	return b
}

// closeHeader writes a header's checksum.
func closeHeader(h []byte) { binary.LittleEndian.PutUint32(h[12:], crc32.Checksum(h, castagnoli)) }

// appendFields appends a header without its checksum and those of the payload.
func appendFields(b []byte, r *Record, salt uint64, off int64, gap int, flags uint16) []byte {
	le := binary.LittleEndian
	start := len(b)
	b = append(b, recordMagic...)
	b = le.AppendUint16(b, formatVersion)
	b = le.AppendUint16(b, flags)
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
	return b
}

// errHeader is returned for bytes that are not the header of a record at that place.
var errHeader = errors.New("not a record header")

// header is a parsed record header.
type header struct {
	rec Record // without the ETag; see record
	gap int
	off int64
	// These alias the parsed bytes.
	crcs  []byte // 4 bytes a block
	etag  []byte
	fixed []byte // the first recHeaderLen bytes
	seal  []byte // of an encrypted record; nil if there is no space for it
	// encrypted says that payload, ETag, and dataset and key hash are encrypted.
	encrypted bool
}

// end returns the distance from the record's start to the next one's.
func (h *header) end() int64 { return alignUp(int64(h.gap)+int64(h.rec.Length), unit) }

// noChecksum stands for the header's checksum while it is computed.
var noChecksum = make([]byte, 4)

// parseHeader parses the header at the start of b, which lies at off of a segment of size bytes. It
// returns errHeader for anything but a whole record that lies inside the segment. It allocates nothing.
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
	whole := b
	b = b[:n]
	crc := crc32.Checksum(b[:12], castagnoli)
	crc = crc32.Update(crc, castagnoli, noChecksum)
	crc = crc32.Update(crc, castagnoli, b[16:])
	if crc != le.Uint32(b[12:]) {
		return header{}, errHeader
	}
	// From here on only a bug or an attacker can make the checks fail.
	flags := le.Uint16(b[6:])
	if le.Uint16(b[4:]) != formatVersion || flags&^flagEncrypted != 0 {
		return header{}, errHeader
	}
	length, gap, tag := le.Uint32(b[80:]), le.Uint32(b[84:]), le.Uint32(b[88:])
	if length > ExtentSize || gap > maxGap || gap%unit != 0 || int(gap) < n || tag > MaxETag ||
		headerLen(int(tag), int(length)) != n {
		return header{}, errHeader
	}
	h := header{gap: int(gap), off: off, encrypted: flags&flagEncrypted != 0, fixed: b[:recHeaderLen],
		etag: b[recHeaderLen : recHeaderLen+tag], rec: Record{
			Dataset: [16]byte(b[32:48]), KeyHash: [16]byte(b[48:64]),
			ObjectSize: int64(le.Uint64(b[64:])), Offset: int64(le.Uint64(b[72:])), Length: int(length), File: NoFile,
		}}
	if h.rec.check() != nil || off+int64(gap)+int64(length) > size {
		return header{}, errHeader
	}
	h.crcs = b[n-4*blocks(int(length)):]
	if end := n + sealLen(int(length)); h.encrypted && end <= min(int(gap), len(whole)) {
		h.seal = whole[n:end]
	}
	return h, nil
}

// checkBlocks compares pieces with the checksums: together they are whole blocks, from first on.
func (h *header) checkBlocks(first int, pieces ...[]byte) bool {
	crc, room, i := uint32(0), BlockSize, first
	for _, p := range pieces {
		for len(p) > 0 {
			n := min(len(p), room)
			crc = crc32.Update(crc, castagnoli, p[:n])
			p = p[n:]
			if room -= n; room == 0 {
				if crc != binary.LittleEndian.Uint32(h.crcs[4*i:]) {
					return false
				}
				crc, room, i = 0, BlockSize, i+1
			}
		}
	}
	return room == BlockSize || crc == binary.LittleEndian.Uint32(h.crcs[4*i:])
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
	// Every later format keeps these 64 bytes. The checksum is checked before the version, so that a damaged version
	// is not taken for a newer format.
	if le.Uint32(b[60:]) != crc32.Checksum(b[:60], castagnoli) {
		return 0, fmt.Errorf("%w: damaged segment header", ErrCorrupt)
	}
	if v := le.Uint32(b[8:]); v > formatVersion {
		return 0, fmt.Errorf(
			"%w: format version %d, but this version reads %d (use that version of shoal, or another --cache-dir)",
			ErrNewerFormat, v, formatVersion)
	}
	if n := le.Uint32(b[12:]); n != id || le.Uint32(b[8:]) != formatVersion {
		return 0, fmt.Errorf("%w: the header is that of segment %08d", ErrCorrupt, n)
	}
	return le.Uint64(b[16:]), nil
}

// salvageSalt returns the salt of a segment whose header is damaged. The first record follows the header directly, and
// has its own checksum and offset, so it cannot be anything else. If that is damaged, too, the table says where others
// are; a sealed table can only be opened with the right salt, so any that a record seems to hold may be tried.
func salvageSalt(r io.ReaderAt, size int64, id uint32, c *cover, key *crypt.Key) (salt uint64, ok bool) {
	b := make([]byte, maxHeadLen)
	saltAt := func(off int64) (uint64, bool) {
		n, err := r.ReadAt(b, off)
		if n < recHeaderLen || err != nil && !errors.Is(err, io.EOF) {
			return 0, false
		}
		salt := binary.LittleEndian.Uint64(b[16:])
		_, err = parseHeader(b[:n], salt, off, size)
		return salt, err == nil
	}
	if salt, ok = saltAt(segHeaderLen); ok || c == nil {
		return salt, ok
	}
	if key == nil {
		entries, _, _ := parseTable(c.table, size)
		for i := 0; i < len(entries) && !ok; i++ {
			salt, ok = saltAt(entries[i].off)
		}
		return salt, ok
	}
	tried := map[uint64]bool{}
	for w, off := (window{r: r, size: size}), int64(segHeaderLen); off+recHeaderLen <= size; off += unit {
		if p, err := w.at(off, recHeaderLen, scanChunk); err != nil || string(p[:len(recordMagic)]) != recordMagic {
			continue
		}
		if salt, ok = saltAt(off); !ok || tried[salt] {
			continue
		}
		tried[salt] = true
		if _, err := newSealer(key, salt).openTable(id, c.table); err == nil {
			return salt, true
		}
	}
	return 0, false
}

// mendHeader rewrites the header of a segment.
func mendHeader(f File, id uint32, salt uint64) error {
	if err := writeAt(f, appendSegmentHeader(nil, id, salt), 0); err != nil {
		return err
	}
	killpoint.Pass("segment.mend.header")
	return f.Sync()
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

// at returns at least need bytes from off, or all up to the end of the file. On a miss it reads fetch bytes.
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
			w.buf = w.buf[:0]
			return nil, err
		}
		w.buf = w.buf[:k]
	}
	return w.buf[off-w.off:], nil
}

// scan calls found for each record that begins at from or later, from header to header. end is where the next record
// would begin; holes counts the places without a valid header that records follow. Only reading can fail.
func scan(r io.ReaderAt, salt uint64, from, size int64, found func(off int64, h *header)) (
	end int64, holes int, err error) {
	w := window{r: r, size: size}
	end = from
	for end+recHeaderLen <= size {
		b, err := w.at(end, maxHeadLen, scanHop)
		if err != nil { // a bad sector behind the header does not matter here
			b, err = w.at(end, maxHeadLen, maxHeadLen)
		}
		if err != nil { // one in the header: as if it were damaged
			b = nil
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

const (
	sector = 512
	// maxBadSectors is how many sectors resync skips in a chunk: a few bad pages of 4 KiB. Beyond, it tries no more.
	maxBadSectors = 64
)

// patched is at for a chunk that cannot be read as a whole: unreadable sectors are zero.
func (w *window) patched(off int64, n int) ([]byte, error) {
	n = int(min(int64(n), w.size-off))
	b := make([]byte, n)
	bad := 0
	for at := 0; at < n; {
		p := b[at:min(at+sector-int((off+int64(at))%sector), n)]
		if _, err := w.r.ReadAt(p, off+int64(at)); err != nil && err != io.EOF {
			if bad++; bad > maxBadSectors {
				return nil, err
			}
			clear(p)
		}
		at += len(p)
	}
	return b, nil
}

// resync finds the first valid header at from or later; pos is 0 if there is none. Unreadable sectors are skipped
// only if a header follows them: otherwise their content is unknown.
func resync(w *window, salt uint64, from, size int64) (pos int64, h header, err error) {
	var unread error
	for at := from; at+recHeaderLen <= size; at += scanChunk {
		b, err := w.at(at, scanChunk+maxHeadLen, scanChunk+maxHeadLen)
		if err != nil {
			unread = err
			if b, err = w.patched(at, scanChunk+maxHeadLen); err != nil {
				return 0, header{}, err
			}
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
	return 0, header{}, unread
}
