package segment

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"runtime"

	"github.com/shoalfs/shoal/internal/killpoint"
)

// Open opens the folder dir, which it makes if necessary, and recovers its segments. visit, unless nil, is called for
// each record, in the order of the appends; it must not call the store. A damaged segment is not an error, but is
// counted in [Recovery] and logged. A failing disk, and a segment of a newer format (ErrNewerFormat), are errors.
func Open(dir string, o Options, visit func(Extent, Loc)) (*Store, error) {
	if err := o.setDefaults(); err != nil {
		return nil, fmt.Errorf("segment: %w", err)
	}
	s := &Store{dir: dir, o: o, align: payloadAlign, nextID: 1, maxBytes: o.MaxBytes, sealC: make(chan struct{}, 1)}
	s.idle.L = &s.mu
	s.segs.Store(&map[uint32]*segment{})
	if visit == nil {
		visit = func(Extent, Loc) {}
	}
	if o.Counted != nil {
		s.counted = o.Counted()
	}
	err := s.recoverAll(visit)
	o.Budget.Give(s.counted)
	if err != nil {
		_ = s.closeFiles()
		s.giveAll()
		return nil, fmt.Errorf("segment: open %s: %w", dir, err)
	}
	if r := s.recovery; r != (Recovery{}) {
		level := slog.LevelInfo
		if r != (Recovery{Scanned: r.Scanned}) {
			level = slog.LevelWarn
		}
		o.Logger.Log(context.Background(), level, "cache segments recovered", "dir", dir, "scanned_records", r.Scanned,
			"holes", r.Holes, "torn_bytes", r.TornBytes, "lost_records", r.Lost, "bad_tables", r.BadTables,
			"bad_segments", r.BadSegments, "mended_headers", r.Mended, "encrypted_records", r.Encrypted)
	}
	s.sealer.Go(s.seal)
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, g := range s.sorted() {
		s.wakeSealer(g)
	}
	return s, nil
}

// recoverAll recovers the segments by ascending number, whether they are in the index or not.
func (s *Store) recoverAll(visit func(Extent, Loc)) error {
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
	stale, err := s.loadAll(ids, func(l *loaded) { s.install(l, visit) })
	if err != nil {
		return err
	}
	for _, id := range stale {
		if err := s.o.Index.DropSegment(id); err != nil {
			return err
		}
		s.nextID = max(s.nextID, id+1)
	}
	// The last segment stays in use; the others are sealed.
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

// walk visits the segments with the numbers ids, in ascending order, with the index's entry for each: nil if it has
// none, and for all the rest once the index cannot be read, which is passed to broken. It returns the numbers that
// are in the index but not in the folder. The index may be nil; errors are those of visit and broken.
func walk(ids []uint32, index Index, visit func(id uint32, c *cover) error, broken func(error) error) (
	stale []uint32, err error) {
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
		var failed error // an error of visit, not of the index
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

// loaded is a segment with its findings, not yet shared.
type loaded struct {
	g         *segment // nil if it was removed
	id        uint32
	entries   []entry
	recovered Recovery
	untabled  bool // the index must drop its table
	err       error
}

// loadAll loads segments, several at once, and installs them by ascending number. It returns what the index must drop.
func (s *Store) loadAll(ids []uint32, install func(*loaded)) (forget []uint32, err error) {
	n := runtime.GOMAXPROCS(0)
	queue := make(chan chan *loaded, 2*n) // bounds the tables in memory
	places := make(chan struct{}, n)
	failed := make(chan struct{})
	var stale []uint32
	var walked error
	bad := 0
	go func() {
		defer close(queue)
		stale, walked = walk(ids, s.o.Index, func(id uint32, c *cover) error {
			select {
			case places <- struct{}{}:
			case <-failed:
				return ErrClosed
			}
			l := make(chan *loaded, 1)
			queue <- l
			go func() {
				l <- s.load(id, c)
				<-places
			}()
			return nil
		}, func(err error) error {
			bad++
			s.o.Logger.Error("index of the cache segments cannot be read; scanning them", "dir", s.dir, "err", err)
			return nil
		})
	}()
	for c := range queue {
		l := <-c
		switch {
		case err != nil || l.err != nil:
			if err == nil {
				err = l.err
				close(failed)
			}
			if l.g != nil {
				err = errors.Join(err, l.g.f.Close())
			}
			continue
		case l.untabled:
			forget = append(forget, l.id)
		}
		install(l)
	}
	s.recovery.BadTables += bad
	if err == nil {
		err = walked
	}
	return append(forget, stale...), err
}

// cover is the index's entry for a segment.
type cover struct {
	size   int64
	sealed bool
	table  []byte
}

// valid reports whether a segment can have this size.
func (c *cover) valid() bool {
	return c.size >= segHeaderLen && c.size%unit == 0 && c.size <= maxSegmentSize+2*ExtentSize
}

// load opens a segment, takes the records in the index, and scans the rest.
func (s *Store) load(id uint32, c *cover) (l *loaded) {
	path := s.path(id)
	g := &segment{id: id, end: segHeaderLen, committed: segHeaderLen}
	l = &loaded{id: id, g: g}
	if g.f, l.err = s.o.FS.OpenFile(path, os.O_RDWR, 0); l.err != nil {
		l.g = nil
		return l
	}
	size, err := g.f.Size()
	if err == nil {
		err = s.loadHeader(l, c, size)
	}
	if l.g == nil || err != nil {
		l.err = err
		return l
	}
	g.key = newSealer(s.o.Key, g.salt)
	if c != nil {
		s.loadTable(l, c, size)
	}
	if !g.sealed {
		err = s.scanRest(l, size)
	}
	if err == nil && size > g.end {
		l.recovered.TornBytes = size - g.end
		err = g.f.Truncate(g.end)
		killpoint.Pass("segment.open.cut")
	}
	if err != nil {
		l.err = fmt.Errorf("%s: %w", path, err)
		return l
	}

	t := newSlots(len(l.entries), len(l.entries))
	for i := range l.entries {
		e := &l.entries[i]
		t = t.add(e.off, e.end()-e.off)
		g.live += e.end() - e.off
		g.liveRecs++
		if !g.sealed {
			g.entries = append(g.entries, *e)
		}
	}
	if g.sealed {
		t = t.resized(len(l.entries), t.blocks(int64(len(l.entries))))
	}
	g.tab.Store(t)
	return l
}

// loadHeader reads the segment's header. A damaged one is rewritten; if that is impossible the file is removed.
func (s *Store) loadHeader(l *loaded, c *cover, size int64) error {
	g, path := l.g, s.path(l.id)
	var head [segHeaderLen]byte
	n, err := g.f.ReadAt(head[:], 0)
	if err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	g.salt, err = parseSegmentHeader(head[:n], l.id)
	if err == nil {
		return nil
	}
	if !errors.Is(err, ErrCorrupt) {
		return fmt.Errorf("%s: %w", path, err)
	}
	var ok bool
	if g.salt, ok = salvageSalt(g.f, size, l.id, c, s.o.Key); !ok {
		// A crash during its creation, or damage: without the salt records cannot be told from payload bytes.
		l.recovered.BadSegments++
		s.o.Logger.Error("cache segment removed", "file", path, "bytes", size, "err", err)
		l.g, l.untabled = nil, s.o.Index != nil
		return errors.Join(s.o.FS.Remove(path), g.f.Close())
	}
	l.recovered.Mended++
	s.o.Logger.Error("header of a cache segment rewritten from its records", "file", path, "err", err)
	if err := mendHeader(g.f, l.id, g.salt); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return nil
}

// loadTable takes the records in the index.
func (s *Store) loadTable(l *loaded, c *cover, size int64) {
	g, path, lost := l.g, s.path(l.id), 0
	table, err := g.key.openTable(l.id, c.table)
	if err == nil {
		l.entries, lost, err = parseTable(table, size)
	}
	switch {
	case err != nil || !c.valid():
		l.recovered.BadTables++
		s.o.Logger.Error("record table of a cache segment cannot be read; scanning it", "file", path, "err", err)
		l.entries = nil
	case lost > 0:
		l.recovered.Lost += lost
		s.o.Logger.Error("cache segment is shorter than it was", "file", path, "bytes", size, "lost_records", lost)
		if len(l.entries) > 0 {
			g.end = l.entries[len(l.entries)-1].end()
		}
		l.untabled = true // new records may overwrite the places of the lost ones
	default:
		g.end, g.committed, g.sealed = c.size, c.size, c.sealed
	}
}

// scanRest finds the records that no table covers.
func (s *Store) scanRest(l *loaded, size int64) error {
	g := l.g
	covered, damaged := len(l.entries), 0
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
		l.entries = append(l.entries, entry{Extent: rec.extent(), off: off, gap: h.gap})
	})
	if err != nil {
		return err
	}
	g.end = end
	l.recovered.Scanned = len(l.entries) - covered
	l.recovered.Holes = holes + damaged
	if l.recovered.Encrypted = g.encrypted; g.encrypted > 0 {
		what := "encrypted records, but there is no key for them"
		if g.key != nil {
			what = "unencrypted records, which were not written with the cache's key"
		}
		s.o.Logger.Warn("cache segment has "+what+"; they are not read, but stay and count as used",
			"file", s.path(l.id), "records", g.encrypted)
	}
	return nil
}

// install adds a loaded segment to the store.
func (s *Store) install(l *loaded, visit func(Extent, Loc)) {
	s.nextID = max(s.nextID, l.id+1)
	s.recovery.add(&l.recovered)
	g := l.g
	if g == nil {
		return
	}
	for i := range l.entries {
		e := &l.entries[i]
		visit(e.Extent, makeLoc(g.id, e.off, e.gap))
	}
	s.used += g.end
	known := min(s.counted, g.end)
	s.counted -= known
	s.o.Budget.Take(g.end - known)
	(*s.segs.Load())[g.id] = g
}

func (r *Recovery) add(o *Recovery) {
	r.Scanned += o.Scanned
	r.Holes += o.Holes
	r.TornBytes += o.TornBytes
	r.Lost += o.Lost
	r.BadTables += o.BadTables
	r.BadSegments += o.BadSegments
	r.Mended += o.Mended
	r.Encrypted += o.Encrypted
}
