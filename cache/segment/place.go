package segment

import "sync"

// Place is where the payload of a record lies: bytes that any process may read, and that never change there.
type Place struct {
	Segment uint32
	Salt    uint64 // in the segment's header: unlike its number, it is never used again
	Off     int64
}

// placeBuffers are of one extent, to check records.
var placeBuffers = sync.Pool{New: func() any { return new([ExtentSize]byte) }}

// Place returns where the payload at loc lies, which is length bytes long. It refuses what readers could not check:
// encrypted records, and blocks whose checksums were not compared yet. With check it compares those, if they are in
// memory.
func (s *Store) Place(loc Loc, length int, check bool) (p Place, ok bool) {
	g, t, i := s.find(loc)
	if g == nil || g.key != nil || length == 0 {
		return Place{}, false
	}
	if !t.isChecked(i, 0, blocks(length)-1) {
		if !check {
			return Place{}, false
		}
		b := placeBuffers.Get().(*[ExtentSize]byte)
		defer placeBuffers.Put(b)
		if s.ReadAtNow(loc, length, b[:length], 0) != nil {
			return Place{}, false // a reader will deal with it
		}
	}
	return Place{g.id, g.salt, loc.off() + int64(loc.gap())}, true
}
