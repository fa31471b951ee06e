package segment

import (
	"crypto/cipher"
	"encoding/binary"
	"fmt"
	"sync"

	"github.com/shoalfs/shoal/cache/crypt"
)

const (
	// seedLen is the length of the random part of a record's nonces.
	seedLen = 8
	// tagLen is the length of a GCM tag.
	tagLen = 16
	// sealedTable is the first byte of a table that is encrypted.
	sealedTable = 2
)

// sealLen returns the length of the seal behind a record's header: seed, tag of the identity, tag of each block.
func sealLen(length int) int { return seedLen + tagLen*(1+blocks(length)) }

const maxSealLen = seedLen + tagLen*(1+ExtentSize/BlockSize)

// sealer encrypts the records of one segment; nil if the store has no key.
type sealer struct{ records, tables cipher.AEAD }

// newSealer derives the keys of the segment with this salt: one key encrypts at most a segment.
func newSealer(k *crypt.Key, salt uint64) *sealer {
	if k == nil {
		return nil
	}
	s := binary.LittleEndian.AppendUint64(nil, salt)
	return &sealer{k.AEAD("records of a segment", s), k.Sealer("tables of a segment", s)}
}

// nonce is the 96 bits that must never be repeated with one segment's key:
//
//	u32 BE  bit 31: it is the identity's; bits 5..30: offset of the record / 64; bits 0..4: number of the block
//	8 bytes the record's seed, random
//
// The package comment says why none is.
type nonce [4 + seedLen]byte

const identityBit = 1 << 31

func (n *nonce) set(seed []byte, off int64, low uint32) {
	binary.BigEndian.PutUint32(n[:], uint32(off/unit)<<5|low)
	copy(n[4:], seed)
}

// The bytes of an encrypted header that are the identity, encrypted in place, and those bound to it.
const (
	identityAt  = 32 // dataset and key hash
	identityLen = 32
	boundLen    = 12 + 16 + 32
)

// bound returns the bytes that the identity's tag also covers: the rest of a header without its checksum.
func bound(h []byte, buf *[boundLen]byte) []byte {
	copy(buf[copy(buf[:], h[:12]):], h[16:identityAt])
	copy(buf[28:], h[identityAt+identityLen:recHeaderLen])
	return buf[:]
}

// appendSealed appends header and seal of a record and writes its encrypted payload to ct, which is as long.
func (k *sealer) appendSealed(b []byte, r *Record, payload, ct []byte, salt uint64, off int64, gap int) []byte {
	start := len(b)
	b = appendFields(b, r, salt, off, gap, flagEncrypted)
	b = append(b, make([]byte, 4*blocks(r.Length))...) // the seal's tags stand for checksums
	h := b[start:]
	b = append(b, make([]byte, sealLen(r.Length))...)
	seal := b[start+len(h):]
	crypt.Random(seal[:seedLen])

	var n nonce
	var ad [boundLen]byte
	n.set(seal, off, identityBit)
	id := make([]byte, 0, identityLen+len(r.ETag)+tagLen)
	id = append(append(id, h[identityAt:identityAt+identityLen]...), r.ETag...)
	id = k.records.Seal(id[:0], n[:], id, bound(h, &ad))
	copy(h[identityAt:], id[:identityLen])
	copy(h[recHeaderLen:], id[identityLen:identityLen+len(r.ETag)])
	copy(seal[seedLen:], id[len(id)-tagLen:])
	closeHeader(h)

	buf := sealBuffers.Get().(*[BlockSize + tagLen]byte)
	defer sealBuffers.Put(buf)
	for i := range blocks(r.Length) {
		from, to := i*BlockSize, min((i+1)*BlockSize, r.Length)
		n.set(seal, off, uint32(i))
		sealed := k.records.Seal(buf[:0], n[:], payload[from:to], nil)
		copy(ct[from:to], sealed)
		copy(seal[seedLen+tagLen*(1+i):], sealed[to-from:])
	}
	return b
}

// sealBuffers hold a block and its tag, which GCM needs right after it.
var sealBuffers = sync.Pool{New: func() any { return new([BlockSize + tagLen]byte) }}

// ours reports whether a store with this sealer, or without one, reads the record.
func (h *header) ours(k *sealer) bool { return h.encrypted == (k != nil) }

// record returns the record with its ETag. It fails if the header was not sealed with this key.
func (h *header) record(k *sealer) (Record, bool) {
	r := h.rec
	if k == nil {
		r.ETag = string(h.etag)
		return r, true
	}
	if h.seal == nil {
		return Record{}, false
	}
	var n nonce
	var ad [boundLen]byte
	n.set(h.seal, h.off, identityBit)
	id := make([]byte, 0, identityLen+len(h.etag)+tagLen)
	id = append(append(append(id, r.Dataset[:]...), r.KeyHash[:]...), h.etag...)
	id = append(id, h.seal[seedLen:seedLen+tagLen]...)
	id, err := k.records.Open(id[:0], n[:], id, bound(h.fixed, &ad))
	if err != nil {
		return Record{}, false
	}
	r.Dataset, r.KeyHash, r.ETag = [16]byte(id[:16]), [16]byte(id[16:]), string(id[identityLen:])
	return r, true
}

// openBlock decrypts block i to dst, which is as long as the block. sealed is the block with space for the tag behind
// it; dst may be its start. It reports whether the block is authentic.
func (h *header) openBlock(k *sealer, n *nonce, i int, dst, sealed []byte) bool {
	if h.seal == nil {
		return false
	}
	n.set(h.seal, h.off, uint32(i))
	copy(sealed[len(sealed)-tagLen:], h.seal[seedLen+tagLen*(1+i):])
	_, err := k.records.Open(dst[:0:len(dst)], n[:], sealed, nil)
	return err == nil
}

// open reports whether the whole payload matches its checksums or tags, and decrypts it in place.
func (h *header) open(k *sealer, payload []byte) bool {
	if k == nil {
		return h.checkBlocks(0, payload)
	}
	buf := sealBuffers.Get().(*[BlockSize + tagLen]byte)
	defer sealBuffers.Put(buf)
	var n nonce
	for i := range blocks(len(payload)) {
		block := payload[i*BlockSize : min((i+1)*BlockSize, len(payload))]
		sealed := buf[:len(block)+tagLen]
		copy(sealed, block)
		if !h.openBlock(k, &n, i, block, sealed) {
			return false
		}
	}
	return true
}

// sealTable encrypts a record table, bound to the segment.
func (k *sealer) sealTable(id uint32, table []byte) []byte {
	if k == nil {
		return table
	}
	return k.tables.Seal([]byte{sealedTable}, nil, table, binary.LittleEndian.AppendUint32(nil, id))
}

// openTable is the reverse of sealTable. With a key, an unencrypted table is invalid.
func (k *sealer) openTable(id uint32, b []byte) ([]byte, error) {
	if k == nil {
		return b, nil
	}
	if len(b) == 0 || b[0] != sealedTable {
		return nil, errTable
	}
	table, err := k.tables.Open(nil, nil, b[1:], binary.LittleEndian.AppendUint32(nil, id))
	if err != nil {
		return nil, errTable
	}
	return table, nil
}

// sealedRun is how many blocks of an encrypted record are read at a time: the 512 KiB that FUSE asks for at most.
const sealedRun = 4

// readSealed reads whole blocks, from first to last, and decrypts the wanted bytes to p. The blocks are read into the
// read's own memory, with a gap after each, where GCM needs the tag, and decrypted from there to p. So the extra copy
// compared with an unencrypted read is done by the decryption.
func (s *Store) readSealed(g *segment, loc Loc, length int, p []byte, off int64, first, last int, now bool) error {
	st := readStates.Get().(*readState)
	defer st.release()
	head := st.head[:loc.gap()]
	var h header
	for from := first; from <= last; from += sealedRun {
		end := min(from+sealedRun, last+1)
		begin, stop := from*BlockSize, min(end*BlockSize, length)
		if need := stop - begin + (end-from)*tagLen; cap(st.rest) < need {
			st.rest = make([]byte, need)
		}
		bufs, at := st.pieces[:0], loc.off()+int64(loc.gap()+begin)
		if from == first {
			bufs = append(bufs, head)
			if first == 0 {
				at = loc.off() // the header lies right before
			} else if err := s.readPieces(g.f, bufs, loc.off(), now); err != nil {
				return err
			} else {
				bufs = bufs[:0]
			}
		}
		rest := st.rest[:cap(st.rest)]
		for i := from; i < end; i++ {
			n := min((i+1)*BlockSize, length) - i*BlockSize
			bufs, rest = append(bufs, rest[:n]), rest[n+tagLen:]
		}
		if err := s.readPieces(g.f, bufs, at, now); err != nil {
			return err
		}
		if from == first {
			var err error
			h, err = parseHeader(head[:min(len(head), maxHeadLen)], g.salt, loc.off(), maxSegmentSize+2*ExtentSize)
			if err != nil || h.rec.Length != length || h.gap != loc.gap() || !h.encrypted {
				return fmt.Errorf("%w header", ErrCorrupt)
			}
		}
		rest = st.rest[:cap(st.rest)]
		for i := from; i < end; i++ {
			lo, hi := i*BlockSize, min((i+1)*BlockSize, length)
			sealed := rest[:hi-lo+tagLen]
			rest = rest[len(sealed):]
			plain := sealed[:hi-lo]
			a, b := max(lo-int(off), 0), min(hi-int(off), len(p)) // of p
			whole := b-a == hi-lo
			if whole {
				plain = p[a:b]
			}
			if !h.openBlock(g.key, &st.nonce, i, plain, sealed) {
				return fmt.Errorf("%w payload", ErrCorrupt)
			}
			if !whole {
				copy(p[a:b], plain[a+int(off)-lo:])
			}
		}
	}
	return nil
}
