package cache

import (
	"fmt"
	"time"

	"github.com/shoalfs/shoal/cache/segment"
)

// Coded files. A codec has a shorter form of some files, from which each comes back exactly, and which some readers
// take as it is. The disk keeps a file that fits one record in that form once a [Recoder] has passed.
//
//   - On disk a coded record has offset 0 and is shorter than its file, which no plain record is. A volume marks its
//     place (codedMark) and notes its length; so readers see place and form at once. A restart adopts coded records as
//     others.
//   - Nobody gets coded bytes but from SampleCoded, and peers that can decode them. For everybody else a flight
//     restores the file into memory: all who wait share it. It stays for who reads in pieces, until it was read.
//   - A flight may bring the coded form from a peer or the store (Want.Coded). That is a piece of its own in the ring,
//     beside the file if somebody has it restored, and goes to disk as it is.
//   - What was restored goes to disk in the coded record's place if the codec says so and there is room.
//   - A record that cannot be restored is forgotten and fetched again, like a corrupt one.
//   - The recoder appends the coded record, then moves the places, then frees the plain one, on the writer's goroutine.
//     So at any moment each place is of a whole record; if a crash leaves both, the later one is adopted.
//   - A segment that was recoded is dropped, and what is left of it written anew, at once: so the disk never holds more
//     than one segment twice, and a full cache is beyond its limit by that much, while the recoder is at it.

// Codec is another form of some files. Safe for concurrent use.
type Codec interface {
	// Encode appends the coded form of a file to dst; false if there is none that is shorter and gives the file back.
	Encode(dst, file []byte) ([]byte, bool)
	// Decode appends the file to dst.
	Decode(dst, coded []byte) ([]byte, error)
	// Form names what Decode needs to know for this coded form; zero if it does not know that.
	Form(coded []byte) [8]byte
	// KeepRestored reports whether a file that was restored for a reader is to be kept in its original form.
	KeepRestored() bool
}

// decode fills p with a file, and counts that unless it is a check.
func (v *Volume) decode(p, coded []byte, check bool) error {
	v.c.restoring <- struct{}{}
	defer func() { <-v.c.restoring }()
	start := time.Now()
	got, err := v.codec.Decode(p[:0], coded)
	if err == nil && len(got) != len(p) {
		err = fmt.Errorf("%d bytes were restored of %d", len(got), len(p))
	}
	if err != nil {
		return fmt.Errorf("%w coded form: %w", segment.ErrCorrupt, err)
	}
	if &got[0] != &p[0] {
		copy(p, got)
	}
	if !check {
		count(&v.ds.count.Restored, 1)
		count((*int64)(&v.ds.count.Restore), int(time.Since(start)))
	}
	return nil
}
