package jpeg

import (
	"encoding/binary"
	"errors"
)

// A recoded file holds a JPEG's coefficients in a form that is smaller, and much faster to decode; the original comes
// back from it byte by byte. All integers are little-endian; a varint has 7 bits a byte, lowest first, and the top bit
// tells that another follows.
//
//	 0  8  8e "SJRec\n" and the version, 1
//	 8  8  ID of the tables
//	16  4  size of the original
//	20  4  CRC-32C of the original
//	24  4  size of the verbatim part
//	28  4  where the standard Huffman tables were left out of it (2 bytes), and how many bytes of them: 0, 216 or 432
//	32     directory: for each band, for its first component and then for the others together (a part)
//	         varint  size of a lane << 3 | which of eight tables it has, 14 times
//	         varint  number of escapes
//	       escapes, int16, by part, lane and place
//	       lanes, by part
//	       verbatim part: the original without the entropy-coded data of its scans
//
// A band is 2 rows of MCUs where an MCU is 16 rows high or higher, otherwise 4; the last may have fewer. Blocks go by
// component, then by rows; those that only fill an MCU are there, too. A block's mask tells which of its AC
// coefficients are not 0: bit i is the i-th in zigzag order. A lane is a stream of bytes:
//
//	0       DC of each block, less a prediction from the blocks on the left (l), above (a) and between (b) in the band: l, a
//	        or l+a-b, whichever lies in the middle; l alone in the first row, a in the first column, and 0 for the first
//	1       flag of each block: which of the 8 bytes of its mask are not 0. Above 15 the block is rich, otherwise plain
//	2 to 5  of plain blocks: byte 0 of the mask, where it is not 0; byte 1; byte 2; bytes 3 to 7
//	6 to 9  the same of rich blocks
//	10, 11  of plain blocks: the coefficients that byte 0 of the mask tells of; those of the other bytes
//	12, 13  the same of rich blocks
//
// Coefficients outside of -127..127, and what the table has no code for, are escapes: symbol 0x80 in lanes 0 and 10 to
// 13, 0 in lanes 2 to 9. Lane 1 has none. Codes are canonical Huffman codes of at most 12 bits: shorter before longer,
// then by symbol; a code's first bit is its highest, and bits fill each byte from the lowest. Differences wrap at 16
// bits.
//
// Tables are "SJT" and the version, 1, and compressed by flate: the lengths of 8 x 8 tables' codes, 4 bits a symbol,
// the even symbol lower. Length 0: no code. The lengths of each table fill the code space. The eight kinds are DC,
// flag, byte 0, 1, 2 and 3 of the mask, and the two of coefficients; lanes of plain and rich blocks share tables.
//
// The scans are not stored: they follow from coefficients, scan scripts, Huffman tables and restart intervals.
const (
	recodedMagic  = "\x8eSJRec\n\x01"
	recodedHeader = 32
	tablesMagic   = "SJT\x01"
	tablesSize    = kinds * choices * 128

	kinds   = 8
	choices = 8
	maxCode = 12 // bits
)

// ErrKeep means that a file is better kept as it is: not a JPEG, of a rare kind, damaged, or not smaller when recoded.
var ErrKeep = errors.New("not recoded")

// ErrNoTables means that the tables of a recoded file are not registered.
var ErrNoTables = errors.New("tables of a recoded JPEG are missing")

// IsRecoded tells by the first bytes whether b is a recoded file. No JPEG begins with them.
func IsRecoded(b []byte) bool {
	return len(b) >= recodedHeader && string(b[:len(recodedMagic)]) == recodedMagic
}

// RecodedTables returns the ID of the tables that a recoded file needs.
func RecodedTables(b []byte) (id [8]byte) {
	if IsRecoded(b) {
		copy(id[:], b[8:])
	}
	return id
}

// verbatim returns the original without its scans; nil if the container is damaged.
func verbatim(b []byte) []byte {
	n := int64(binary.LittleEndian.Uint32(b[24:]))
	if n > int64(len(b)-recodedHeader) {
		return nil
	}
	return b[int64(len(b))-n:]
}
