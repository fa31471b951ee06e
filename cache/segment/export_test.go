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

// Stats tells how a store is doing. Counters start at Open.
type Stats struct {
	Segments  int
	Records   int   // live ones
	UsedBytes int64 // all of the files
	LiveBytes int64 // live records, with headers and padding, and those that cannot be read
	Encrypted int   // records that this store cannot read, but keeps: encrypted without a key, unencrypted with one
	Checks    int64 // reads that had a checksum to check
	Scrubbed  int64 // records that a scrub found right
	Recovery  Recovery
}

// Stats returns the current numbers.
func (s *Store) Stats() Stats {
	s.mu.Lock()
	defer s.mu.Unlock()
	st := Stats{UsedBytes: s.used, Checks: s.checks.Load(), Scrubbed: s.scrubbed.Load(), Recovery: s.recovery}
	for _, g := range *s.segs.Load() {
		st.Segments++
		st.Records += g.liveRecs
		st.LiveBytes += g.live
		st.Encrypted += g.encrypted
	}
	return st
}
