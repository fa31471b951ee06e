package segment

import "hash/crc32"

func crc(b []byte) uint32 { return crc32.Checksum(b, castagnoli) }

// mustRecord returns the record of a header in clear.
func mustRecord(h *header) Record {
	r, _ := h.record(nil)
	return r
}
