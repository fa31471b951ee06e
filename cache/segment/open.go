package segment

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strconv"
	"strings"
)

// Open opens the folder dir, which is made if need be, and recovers what it holds. visit, unless it is
// nil, is called for each record, in the order in which they were appended; it must not call the
// store. A damaged segment is no error, but is counted in [Stats] and logged; a failing disk, and a segment of a
// newer format (ErrNewerFormat), are.
func Open(dir string, o Options, visit func(Record, Loc)) (*Store, error) {
	if err := o.setDefaults(); err != nil {
		return nil, fmt.Errorf("segment: %w", err)
	}
	s := &Store{dir: dir, o: o, align: payloadAlign, nextID: 1, sealC: make(chan struct{}, 1)}
	s.idle.L = &s.mu
	s.segs.Store(&map[uint32]*segment{})
	if visit == nil {
		visit = func(Record, Loc) {}
	}
	if err := s.recoverAll(visit); err != nil {
		_ = s.closeFiles()
		return nil, fmt.Errorf("segment: open %s: %w", dir, err)
	}
	if r := s.stats.Recovery; r != (Recovery{}) {
		level := slog.LevelInfo
		if r != (Recovery{Scanned: r.Scanned}) {
			level = slog.LevelWarn
		}
		o.Logger.Log(context.Background(), level, "cache segments recovered", "dir", dir, "scanned_records", r.Scanned, "holes", r.Holes,
			"torn_bytes", r.TornBytes, "lost_records", r.Lost, "bad_tables", r.BadTables, "bad_segments", r.BadSegments)
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
		num, ok := strings.CutSuffix(name, ".seg")
		id, err := strconv.ParseUint(num, 10, 32)
		if !ok || err != nil || len(num) != 8 || id == 0 || id > maxSeg {
			continue
		}
		ids = append(ids, uint32(id))
	}
	uncovered := func(before uint32) error {
		for len(ids) > 0 && ids[0] < before {
			if err := s.recover(ids[0], nil, visit); err != nil {
				return err
			}
			ids = ids[1:]
		}
		return nil
	}
	var stale []uint32 // in the index, but not in the folder
	if s.o.Index != nil {
		var last uint32
		var failed error // a failure of ours, as against one of the index
		err := s.o.Index.LoadSegments(func(id uint32, size int64, sealed bool, table []byte) error {
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
			failed = s.recover(id, &cover{size, sealed, table}, visit)
			ids = ids[1:]
			return failed
		})
		if failed != nil {
			return failed
		}
		if err != nil {
			s.stats.Recovery.BadTables++
			s.o.Logger.Error("index of the cache segments cannot be read; scanning them", "dir", s.dir, "err", err)
		}
	}
	if err := uncovered(maxSeg + 1); err != nil {
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

// cover is what the index keeps of a segment.
type cover struct {
	size   int64
	sealed bool
	table  []byte
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
		if !errors.Is(err, ErrCorrupt) {
			return fmt.Errorf("%s: %w", path, err)
		}
		// A crash while it was made, or damage: without the salt no record can be told from
		// payload bytes.
		s.stats.Recovery.BadSegments++
		s.o.Logger.Error("cache segment removed", "file", path, "bytes", size, "err", err)
		if c != nil {
			err = s.o.Index.DropSegment(id)
		} else {
			err = nil
		}
		return errors.Join(s.o.FS.Remove(path), err)
	}

	var entries []entry
	if c != nil {
		var lost int
		var bad error
		switch entries, lost, bad = parseTable(c.table, size); {
		case bad != nil || c.size < segHeaderLen || c.size%unit != 0 || c.size > maxSegmentSize+2*ExtentSize:
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
		covered := len(entries)
		end, holes, err := scan(g.f, g.salt, g.end, size, func(off int64, h *header) {
			entries = append(entries, entry{rec: h.rec, off: off, gap: h.gap})
		})
		if err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		g.end = end
		s.stats.Recovery.Scanned += len(entries) - covered
		s.stats.Recovery.Holes += holes
	}
	if size > g.end {
		s.stats.Recovery.TornBytes += size - g.end
		if err := g.f.Truncate(g.end); err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
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
	(*s.segs.Load())[id] = g // nobody else has the store yet
	return nil
}
