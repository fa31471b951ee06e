package segment

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"slices"

	"github.com/shoalfs/shoal/internal/killpoint"
)

// DropSegment waits for appends to a segment and deletes it with all its records; later reads get ErrGone. It returns
// how many bytes that freed; 0 if there is no such segment.
func (s *Store) DropSegment(id uint32) (freed int64, err error) {
	s.mu.Lock()
	g := s.segment(id)
	if g == nil || g.dropped || s.closed {
		s.mu.Unlock()
		return 0, nil
	}
	s.takeOut(g) // no fsync from here on
	s.mu.Unlock()

	g.commit.Lock()
	defer g.commit.Unlock()
	s.mu.Lock()
	gone := s.closed || s.segment(id) != g // which a failed fsync has removed
	s.mu.Unlock()
	if gone {
		return 0, nil
	}
	return s.remove(g)
}

// takeOut is quiet for a segment that is to be removed.
func (s *Store) takeOut(g *segment) {
	g.dropped = true
	s.quiet(g)
}

// quiet makes a segment take no more appends, and waits for the one under way. The caller holds mu.
func (s *Store) quiet(g *segment) {
	s.retire(g)
	for s.to == g {
		s.idle.Wait()
	}
}

// remove deletes a segment that was taken out. The caller holds g.commit.
func (s *Store) remove(g *segment) (freed int64, err error) {
	s.mu.Lock()
	s.setSegment(g.id, nil)
	s.mu.Unlock()
	err = s.o.FS.Remove(s.path(g.id))
	killpoint.Pass("segment.drop.file")
	if s.o.Index != nil {
		err = errors.Join(err, s.o.Index.DropSegment(g.id))
	}
	killpoint.Pass("segment.drop.index")
	err = errors.Join(err, g.f.Close())
	if err != nil {
		err = fmt.Errorf("segment: drop segment %08d: %w", g.id, err)
	}
	s.mu.Lock()
	s.give(g.end)
	s.mu.Unlock()
	return g.end, err
}

// visitLive calls visit for live records with a good header, of a segment without more appends. g.commit is held.
func (s *Store) visitLive(g *segment, visit func(Record, Loc)) {
	t, buf := g.tab.Load(), new([maxHeadLen]byte)
	for i, r := range t.recs[:t.n.Load()] {
		s.mu.Lock()
		dead := g.isDead(i)
		s.mu.Unlock()
		if dead {
			continue
		}
		off := int64(r.off) * unit
		n, _ := g.f.ReadAt(buf[:], off)
		h, err := parseHeader(buf[:n], g.salt, off, maxSegmentSize+2*ExtentSize)
		if err != nil {
			continue
		}
		if rec, ok := h.record(g.key); ok {
			visit(rec, makeLoc(g.id, off, h.gap))
		}
	}
}

// Reclaim drops segments that hold only garbage (unreadable records are not), and returns how many bytes that freed.
func (s *Store) Reclaim() (freed int64, err error) {
	for _, g := range s.sorted() {
		s.mu.Lock()
		empty := g.liveRecs == 0 && g.encrypted == 0 && s.to != g && g.end > segHeaderLen
		s.mu.Unlock()
		if empty {
			n, e := s.DropSegment(g.id)
			freed += n
			err = errors.Join(err, e)
		}
	}
	return freed, err
}

// survivor is a live record of a segment to be dropped.
type survivor struct {
	rec  Record
	loc  Loc
	turn int // those of lower ones go before others
}

// Condense drops a segment after appending up to spare bytes of its live records again: those that first selects before
// others, and the extents of one object together. moved gets the new place of each. The copies may exceed MaxBytes and
// the Budget, since the drop frees more than they take; like other appends they are durable after the next Sync. A
// record that cannot be read or copied is lost; the drop goes on. It returns by how many bytes the store has shrunk.
func (s *Store) Condense(id uint32, spare int64, first func(Record, Loc) bool, moved func(from, to Loc)) (
	freed int64, err error) {
	s.mu.Lock()
	g := s.segment(id)
	if g == nil || g.dropped || s.closed {
		s.mu.Unlock()
		return 0, nil
	}
	s.quiet(g) // otherwise the copies would go there
	s.mu.Unlock()
	var records []survivor
	g.commit.Lock()
	s.visitLive(g, func(rec Record, loc Loc) {
		records = append(records, survivor{rec, loc, 1})
		if first(rec, loc) {
			records[len(records)-1].turn = 0
		}
	})
	g.commit.Unlock()
	slices.SortFunc(records, func(a, b survivor) int {
		return cmp.Or(a.turn-b.turn, bytes.Compare(a.rec.KeyHash[:], b.rec.KeyHash[:]),
			cmp.Compare(a.rec.Offset, b.rec.Offset))
	})
	spare -= segHeaderLen // of the segment that the copies may start
	payload, copied := []byte(nil), int64(0)
	for _, r := range records {
		size := r.loc.Bytes(r.rec.Length)
		if size > spare {
			continue
		}
		payload = slices.Grow(payload[:0], r.rec.Length)[:r.rec.Length]
		if s.ReadAt(r.loc, r.rec.Length, payload, 0) != nil {
			continue
		}
		to, appendErr := s.append(r.rec, payload, true)
		if appendErr != nil {
			break
		}
		moved(r.loc, to)
		spare -= size
		copied += size
	}
	killpoint.Pass("segment.condense.copied")
	freed, err = s.DropSegment(id)
	return freed - copied, err
}
