package segment

import (
	"encoding/binary"
	"errors"
	"os"
	"sync"
)

// Place is where the payload of a record lies: bytes that any process may read, and that never change there.
type Place struct {
	Segment uint32
	Salt    uint64 // of the segment: unlike its number, it is never used again
	Off     int64
}

// placeBuffers are of one extent, to check records.
var placeBuffers = sync.Pool{New: func() any { return new([ExtentSize]byte) }}

// Place returns where the payload at loc lies, which is length bytes long. It refuses what readers could not check: encrypted
// records, and blocks whose checksums were not compared yet. With check it compares those, if they are in memory.
func (s *Store) Place(loc Loc, length int, check bool) (p Place, ok bool) {
	g := s.segment(loc.Segment())
	if g == nil || g.key != nil || length == 0 {
		return Place{}, false
	}
	t := g.tab.Load()
	i := t.find(loc.off())
	if i < 0 {
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

// OpenSegment opens the file of a place's segment, to be read. Its bytes stay readable when it is dropped. The error is ErrGone if
// it was dropped before.
func (s *Store) OpenSegment(p Place) (*os.File, error) {
	f, err := os.Open(s.path(p.Segment))
	if errors.Is(err, os.ErrNotExist) {
		return nil, ErrGone
	} else if err != nil {
		return nil, err
	}
	var head [segHeaderLen]byte
	if _, err = f.ReadAt(head[:], 0); err == nil && binary.LittleEndian.Uint64(head[16:]) != p.Salt {
		err = ErrGone // a store that was opened anew uses numbers again
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}
