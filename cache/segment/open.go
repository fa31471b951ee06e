package segment

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"

	"github.com/shoalfs/shoal/internal/killpoint"
)

// Open opens the folder dir, which is made if need be, and recovers what it holds. visit, unless it is
// nil, is called for each record, in the order in which they were appended; it must not call the
// store. A damaged segment is no error, but is counted in [Stats] and logged; a failing disk, and a segment of a
// newer format (ErrNewerFormat), are.
func Open(dir string, o Options, visit func(Record, Loc)) (*Store, error) {
	if err := o.setDefaults(); err != nil {
		return nil, fmt.Errorf("segment: %w", err)
	}
	s := &Store{dir: dir, o: o, align: payloadAlign, nextID: 1, maxBytes: o.MaxBytes, sealC: make(chan struct{}, 1)}
	s.idle.L = &s.mu
	s.segs.Store(&map[uint32]*segment{})
	if visit == nil {
		visit = func(Record, Loc) {}
	}
	if err := s.recoverAll(visit); err != nil {
		_ = s.closeFiles()
		s.giveAll()
		return nil, fmt.Errorf("segment: open %s: %w", dir, err)
	}
	if r := s.stats.Recovery; r != (Recovery{}) {
		level := slog.LevelInfo
		if r != (Recovery{Scanned: r.Scanned}) {
			level = slog.LevelWarn
		}
		o.Logger.Log(context.Background(), level, "cache segments recovered", "dir", dir, "scanned_records", r.Scanned, "holes", r.Holes,
			"torn_bytes", r.TornBytes, "lost_records", r.Lost, "bad_tables", r.BadTables, "bad_segments", r.BadSegments,
			"mended_headers", r.Mended, "encrypted_records", r.Encrypted)
	}
	s.sealer.Add(1)
	go s.seal()
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, g := range s.sorted() {
		s.wakeSealer(g)
	}
	return s, nil
}

// recoverAll recovers the segments by ascending number: those of the index, and between them those
// that it does not name.
func (s *Store) recoverAll(visit func(Record, Loc)) error {
	if err := s.o.FS.MkdirAll(s.dir, 0o777); err != nil {
		return err
	}
	names, err := s.o.FS.ReadDir(s.dir)
	if err != nil {
		return err
	}
	var ids []uint32 // sorted, as the names are
	for _, name := range names {
		if id, ok := segmentID(name); ok {
			ids = append(ids, id)
		}
	}
	stale, err := walk(ids, s.o.Index, func(id uint32, c *cover) error { return s.recover(id, c, visit) }, func(err error) error {
		s.stats.Recovery.BadTables++
		s.o.Logger.Error("index of the cache segments cannot be read; scanning them", "dir", s.dir, "err", err)
		return nil
	})
	if err != nil {
		return err
	}
	for _, id := range stale {
		if err := s.o.Index.DropSegment(id); err != nil {
			return err
		}
		s.nextID = max(s.nextID, id+1)
	}
	// The last segment goes on; the others are sealed.
	segs := s.sorted()
	for i, g := range segs {
		switch {
		case g.sealed:
		case i == len(segs)-1 && g.end < s.o.SegmentSize:
			s.active = g
		default:
			g.retired = true
		}
	}
	return nil
}

// walk visits the segments of the folder, whose numbers are ids, by ascending number, with what the index
// keeps of each: nil for those that it does not name, and for all that are left where it cannot be read,
// which broken is told. It returns the numbers that are in the index, but not in the folder. The index may
// be nil; errors are those of visit and broken.
func walk(ids []uint32, index Index, visit func(id uint32, c *cover) error, broken func(error) error) (stale []uint32, err error) {
	uncovered := func(before uint32) error {
		for len(ids) > 0 && ids[0] < before {
			if err := visit(ids[0], nil); err != nil {
				return err
			}
			ids = ids[1:]
		}
		return nil
	}
	if index != nil {
		var last uint32
		var failed error // a failure of visit, as against one of the index
		err := index.LoadSegments(func(id uint32, size int64, sealed bool, table []byte) error {
			if id <= last {
				return fmt.Errorf("segment %d after segment %d", id, last)
			}
			last = id
			if failed = uncovered(id); failed != nil {
				return failed
			}
			if len(ids) == 0 || ids[0] != id {
				stale = append(stale, id)
				return nil
			}
			ids = ids[1:]
			failed = visit(id, &cover{size, sealed, table})
			return failed
		})
		if failed != nil {
			return nil, failed
		}
		if err != nil {
			if err := broken(err); err != nil {
				return nil, err
			}
		}
	}
	return stale, uncovered(maxSeg + 1)
}

// cover is what the index keeps of a segment.
type cover struct {
	size   int64
	sealed bool
	table  []byte
}

// valid reports whether a segment can have this size.
func (c *cover) valid() bool {
	return c.size >= segHeaderLen && c.size%unit == 0 && c.size <= maxSegmentSize+2*ExtentSize
}

// recover opens a segment, takes the records that the index covers, and scans the rest.
func (s *Store) recover(id uint32, c *cover, visit func(Record, Loc)) (err error) {
	path := s.path(id)
	s.nextID = max(s.nextID, id+1)
	g := &segment{id: id, end: segHeaderLen, committed: segHeaderLen}
	if g.f, err = s.o.FS.OpenFile(path, os.O_RDWR, 0); err != nil {
		return err
	}
	keep := false
	defer func() {
		if !keep {
			err = errors.Join(err, g.f.Close())
		}
	}()
	size, err := g.f.Size()
	if err != nil {
		return err
	}
	var head [segHeaderLen]byte
	n, err := g.f.ReadAt(head[:], 0)
	if err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	if g.salt, err = parseSegmentHeader(head[:n], id); err != nil {
		bad := err
		if !errors.Is(bad, ErrCorrupt) {
			return fmt.Errorf("%s: %w", path, bad)
		}
		var ok bool
		if g.salt, ok = salvageSalt(g.f, size); !ok {
			// A crash while it was made, or damage: without the salt no record can be told from
			// payload bytes.
			s.stats.Recovery.BadSegments++
			s.o.Logger.Error("cache segment removed", "file", path, "bytes", size, "err", bad)
			err = nil
			if c != nil {
				err = s.o.Index.DropSegment(id)
			}
			return errors.Join(s.o.FS.Remove(path), err)
		}
		s.stats.Recovery.Mended++
		s.o.Logger.Error("header of a cache segment written anew from its first record", "file", path, "err", bad)
		if err := mendHeader(g.f, id, g.salt); err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
	}

	g.key = newSealer(s.o.Key, g.salt)
	var entries []entry
	if c != nil {
		var lost int
		var bad error
		table, err := g.key.openTable(id, c.table)
		if err == nil {
			entries, lost, err = parseTable(table, size)
		}
		switch bad = err; {
		case bad != nil || !c.valid():
			s.stats.Recovery.BadTables++
			s.o.Logger.Error("record table of a cache segment cannot be read; scanning it", "file", path, "err", bad)
			entries = nil
		case lost > 0:
			s.stats.Recovery.Lost += lost
			s.o.Logger.Error("cache segment is shorter than it was", "file", path, "bytes", size, "lost_records", lost)
			if len(entries) > 0 {
				g.end = entries[len(entries)-1].end()
			}
			// New records may come to lie where the table has the lost ones.
			if err := s.o.Index.DropSegment(id); err != nil {
				return err
			}
		default:
			g.end, g.committed, g.sealed = c.size, c.size, c.sealed
		}
	}
	if !g.sealed {
		covered, damaged := len(entries), 0
		end, holes, err := scan(g.f, g.salt, g.end, size, func(off int64, h *header) {
			if !h.ours(g.key) {
				g.encrypted++
				g.live += h.end()
				return
			}
			rec, ok := h.record(g.key)
			if !ok {
				damaged++
				return
			}
			entries = append(entries, entry{rec: rec, off: off, gap: h.gap})
		})
		if err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		g.end = end
		s.stats.Recovery.Scanned += len(entries) - covered
		s.stats.Recovery.Holes += holes + damaged
		if s.stats.Recovery.Encrypted += g.encrypted; g.encrypted > 0 {
			what := "encrypted records, and there is no key for them"
			if g.key != nil {
				what = "records in clear, which nobody wrote with the cache's key"
			}
			s.o.Logger.Warn("cache segment has "+what+"; they are not read, stay, and count as used", "file", path, "records", g.encrypted)
		}
	}
	if size > g.end {
		s.stats.Recovery.TornBytes += size - g.end
		if err := g.f.Truncate(g.end); err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		killpoint.Pass("segment.open.cut")
	}

	t := newSlots(len(entries), len(entries))
	for i := range entries {
		e := &entries[i]
		t = t.add(e.off, e.end()-e.off)
		g.live += e.end() - e.off
		g.liveRecs++
		visit(e.rec, makeLoc(id, e.off, e.gap))
		if !g.sealed {
			g.entries = append(g.entries, recordState{entry: *e})
		}
	}
	if g.sealed {
		t = t.resized(len(entries), t.blocks(int64(len(entries))))
	}
	g.tab.Store(t)
	keep = true
	s.used += g.end
	if s.o.Budget != nil {
		s.o.Budget.Take(g.end)
	}
	(*s.segs.Load())[id] = g // nobody else has the store yet
	return nil
}
