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
//	28     directory: for each band, for each component
//	         2       which of four tables each lane has: 2 bits a kind, the first lowest; the top 2 bits are 0
//	         varint  size of each lane, 7 times
//	         varint  number of escapes
//	       escapes, int16, in the directory's order; within a part in the order of the kinds
//	       lanes, in the directory's order
//	       verbatim part: the original without the entropy-coded data of its scans
//
// A band is 2 rows of MCUs where an MCU is 16 rows high or higher, otherwise 4; the last may have fewer. Blocks go by
// rows; those that only fill an MCU are there, too. The kinds of lanes, each a stream of bytes coded by one table:
//
//	0  DC: the difference to the block on the left; the first of a row, to the one above; the first of a band, to 0
//	1  flag: which of the 8 bytes of the block's mask are not 0
//	2  byte 0 of the mask, where it is not 0. The mask tells which coefficients are not 0, bit i the i-th in zigzag order
//	   (bit 0 is unused)
//	3  byte 1 of the mask    4  byte 2    5  bytes 3 to 7
//	6  the coefficients that are not 0, in zigzag order
//
// DC and coefficients outside of -127..127, and what the table has no code for, are escapes: symbol 0x80 in lanes 0 and
// 6, 0 in lanes 2 to 5. Lane 1 has none. Codes are canonical Huffman codes of at most 12 bits: shorter before longer,
// then by symbol; a code's first bit is its highest, and bits fill each byte from the lowest. Differences wrap at 16 bits.
//
// Tables are "SJT" and the version, 1, then the lengths of 2 x 7 x 4 tables' codes, 4 bits a symbol, the even symbol
// lower: first component or another, kind, choice. Length 0: no code. The lengths of each table fill the code space.
//
// The scans are not stored: they follow from coefficients, scan scripts, Huffman tables and restart intervals.
const (
	recodedMagic  = "\x8eSJRec\n\x01"
	recodedHeader = 28
	tablesMagic   = "SJT\x01"
	tablesSize    = 4 + 2*kinds*choices*128

	kinds   = 7
	choices = 4
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

// RecodedSize returns the size of the original of a recoded file, 0 for other bytes.
func RecodedSize(b []byte) int64 {
	if !IsRecoded(b) {
		return 0
	}
	return int64(binary.LittleEndian.Uint32(b[16:]))
}

// RecodedTables returns the ID of the tables that a recoded file needs.
func RecodedTables(b []byte) (id [8]byte) {
	if IsRecoded(b) {
		copy(id[:], b[8:])
	}
	return id
}

// recodedCRC returns the checksum of the original.
func recodedCRC(b []byte) uint32 { return binary.LittleEndian.Uint32(b[20:]) }

// verbatim returns the original without its scans; nil if the container is damaged.
func verbatim(b []byte) []byte {
	n := int64(binary.LittleEndian.Uint32(b[24:]))
	if n > int64(len(b)-recodedHeader) {
		return nil
	}
	return b[int64(len(b))-n:]
}
