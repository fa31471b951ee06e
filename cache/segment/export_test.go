package segment

import "hash/crc32"

func crc(b []byte) uint32 { return crc32.Checksum(b, castagnoli) }

// mustRecord returns the record of a header in clear.
func mustRecord(h *header) Record {
	r, _ := h.record(nil)
	return r
}

// leave takes the place of a record without its bytes, as it is on a disk that lost them, behind which others are.
func (s *Store) leave(rec Record) (*segment, entry, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	g, e, err := s.reserve(rec, false)
	if err == nil {
		g.end = e.end()
	}
	return g, e, err
}
