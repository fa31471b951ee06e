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
	Segments     int
	Records      int   // live ones
	UsedBytes    int64 // all of the files
	LiveBytes    int64 // live records, with headers and padding, and those that cannot be read
	Encrypted    int   // records that this store cannot read, but keeps: encrypted without a key, unencrypted with one
	Appends      int64
	AppendErrors int64
	Reads        int64
	Checks       int64 // reads that had a checksum to check
	Corrupt      int64 // reads that found damage, those of a scrub counted
	ReadErrors   int64 // reads that the file system failed
	WouldBlock   int64 // ReadAtNow that would have waited
	Scrubbed     int64 // records that a scrub found right
	SyncErrors   int64
	Dropped      int64 // segments
	Recovery     Recovery
}

// Stats returns the current numbers.
func (s *Store) Stats() Stats {
	s.mu.Lock()
	defer s.mu.Unlock()
	st := Stats{
		UsedBytes: s.used, Appends: s.counts.appends, AppendErrors: s.counts.appendErrors, SyncErrors: s.counts.syncErrors, Dropped: s.counts.dropped,
		Reads: s.reads.Load(), Checks: s.checks.Load(), Corrupt: s.corrupt.Load(), ReadErrors: s.readErrors.Load(),
		WouldBlock: s.wouldBlock.Load(), Scrubbed: s.scrubbed.Load(), Recovery: s.recovery,
	}
	for _, g := range *s.segs.Load() {
		st.Segments++
		st.Records += g.liveRecs
		st.LiveBytes += g.live
		st.Encrypted += g.encrypted
	}
	return st
}
