package shard

import "hash/crc32"

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// crcShift moves crc n bytes on: the CRC32C of a||b is crcShift(crc(a), len(b)) ^ crc(b). So the pieces of a member
// can be summed in any order.
//
// Appending n zero bytes multiplies by x^(8n) modulo the polynomial, which takes log n squarings.
func crcShift(crc uint32, n int64) uint32 {
	x := uint32(1) << 23 // x^8; bit 31 is x^0
	p := uint32(1) << 31 // x^0
	for ; n > 0; n >>= 1 {
		if n&1 != 0 {
			p = crcMultiply(x, p)
		}
		x = crcMultiply(x, x)
	}
	return crcMultiply(p, crc)
}

// crcMultiply multiplies two polynomials modulo CRC32C's, bits reflected.
func crcMultiply(a, b uint32) uint32 {
	var p uint32
	for m := uint32(1) << 31; m != 0; m >>= 1 {
		if a&m != 0 {
			p ^= b
		}
		if b&1 != 0 {
			b = b>>1 ^ crc32.Castagnoli
		} else {
			b >>= 1
		}
	}
	return p
}
