package segment

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
)

var (
	// ErrCorrupt is wrapped by errors about bytes that are not those that were written. The caller
	// frees the record and fetches again.
	ErrCorrupt = errors.New("corrupt")
	// ErrGone is returned for a Loc whose segment was dropped. The caller fetches again.
	ErrGone = errors.New("segment: the record's segment was dropped")
	// ErrFull is returned when an append would pass MaxBytes. The caller drops a segment or does
	// without.
	ErrFull = errors.New("segment: the store is full")
	// ErrNewerFormat is wrapped by Open's error about a segment of a format version that this
	// program does not know.
	ErrNewerFormat = errors.New("written by a newer version of shoal")
	// ErrClosed is returned by a closed store.
	ErrClosed = errors.New("segment: the store is closed")
)

// payloadAlign is the alignment of payloads in a segment, in bytes. BenchmarkAlign: a read of 63 KB from
// the page cache costs 9.0 µs of CPU at 4096, 9.5 µs at 64. That is less than 1% of what a file costs
// through FUSE, and it would take 2 KiB a record on average: 3% of the cache for photographs, a third
// for files of 4 KB. Headers carry the offset of the payload, so this can change without a new format.
const payloadAlign = 64

const (
	defaultSegmentSize = 256 << 20
	minDefaultSize     = 8 << 20
	maxDefaultSize     = 2 << 30
)

// Index keeps the record tables of segments, so that Open need not scan them. A lost index loses no
// data. Its methods are called by one goroutine at a time for one segment.
type Index interface {
	// CommitSegment durably replaces what is kept of a segment. The table covers the records
	// before size. It must not be retained.
	CommitSegment(id uint32, size int64, sealed bool, table []byte) error
	// LoadSegments calls yield for each segment by ascending number and returns its error, if any.
	// The table is valid until yield returns.
	LoadSegments(yield func(id uint32, size int64, sealed bool, table []byte) error) error
	// DropSegment forgets a segment; one that is not there is no error.
	DropSegment(id uint32) error
}

// Options of a store.
type Options struct {
	// SegmentSize is the size from which no more records are added to a segment, in bytes. The
	// default is 256 MiB; less where MaxBytes is small, so that there are 16 segments to choose
	// from when one must go, and more where MaxBytes is huge, so that there are at most some 4,096
	// open files.
	SegmentSize int64
	// MaxBytes is the most that all segments may take, headers and padding counted; 0 is no limit.
	MaxBytes int64
	// Index keeps the record tables; without one, Open scans all segments.
	Index Index
	// Logger gets what recovery found and what a background fsync failed with. The default is
	// [slog.Default].
	Logger *slog.Logger
	// FS is the file system; the default is the operating system's.
	FS FS
}

func (o *Options) setDefaults() error {
	if o.SegmentSize == 0 {
		o.SegmentSize = defaultSegmentSize
		if o.MaxBytes > 0 {
			o.SegmentSize = min(max(o.MaxBytes/16, minDefaultSize), defaultSegmentSize)
			o.SegmentSize = min(max(o.SegmentSize, o.MaxBytes/4096), maxDefaultSize)
		}
	}
	// A record that begins before SegmentSize must be within reach of a Loc.
	if o.SegmentSize < segHeaderLen || o.SegmentSize > maxSegmentSize {
		return fmt.Errorf("segment size of %d bytes, want at most %d", o.SegmentSize, int64(maxSegmentSize))
	}
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	if o.FS == nil {
		o.FS = osFS{}
	}
	return nil
}

// Store is a folder of segments. It is safe for concurrent use. One process at a time may have it open;
// the owner of the cache folder sees to that.
type Store struct {
	dir   string
	o     Options
	align int64

	segs atomic.Pointer[map[uint32]*segment] // replaced, never changed; by the holder of mu

	mu     sync.Mutex
	idle   sync.Cond // an append ended
	active *segment  // takes appends; nil before the first one
	nextID uint32
	used   int64
	busy   int // appends under way
	closed bool
	stats  Stats

	reads, checks, corrupt, readErrors atomic.Int64

	sealC  chan struct{}
	sealer sync.WaitGroup
}

// segment is one file.
type segment struct {
	id   uint32
	f    File
	salt uint64
	tab  atomic.Pointer[slots]

	commit sync.Mutex // held while the segment is committed or dropped; taken before Store.mu

	// The rest is guarded by Store.mu.
	end       int64 // where the next record begins
	live      int64 // bytes of live records, with headers and padding
	liveRecs  int
	pending   int           // appends under way
	entries   []recordState // parallel to the slots; nil once sealed
	dead      []uint64      // bits by record number, as far as the last dead one
	retired   bool          // takes no more appends
	sealed    bool          // committed as a whole
	dropped   bool
	dirSynced bool
	committed int64 // what the index's table covers
}

type recordState struct {
	entry
	state uint8
}

const (
	done    uint8 = iota
	writing       // its bytes may not be there yet
	void          // its append failed
)

func (g *segment) isDead(i int) bool { return i/64 < len(g.dead) && g.dead[i/64]&(1<<(i%64)) != 0 }

func (g *segment) setDead(i int) {
	for len(g.dead) <= i/64 {
		g.dead = append(g.dead, 0)
	}
	g.dead[i/64] |= 1 << (i % 64)
}

func (g *segment) clearDead(i int) {
	if i/64 < len(g.dead) {
		g.dead[i/64] &^= 1 << (i % 64)
	}
}

func (s *Store) path(id uint32) string { return filepath.Join(s.dir, fmt.Sprintf("%08d.seg", id)) }

// segment returns the segment with this number, or nil.
func (s *Store) segment(id uint32) *segment { return (*s.segs.Load())[id] }

// setSegment puts a segment into the map, or removes it if g is nil. The caller holds mu.
func (s *Store) setSegment(id uint32, g *segment) {
	m := maps.Clone(*s.segs.Load())
	if g == nil {
		delete(m, id)
	} else {
		m[id] = g
	}
	s.segs.Store(&m)
}

// sorted returns the segments by ascending number.
func (s *Store) sorted() []*segment {
	m := *s.segs.Load()
	segs := make([]*segment, 0, len(m))
	for _, id := range slices.Sorted(maps.Keys(m)) {
		segs = append(segs, m[id])
	}
	return segs
}

// newSegment makes the next segment. The caller holds mu.
func (s *Store) newSegment() (*segment, error) {
	if s.nextID > maxSeg {
		return nil, fmt.Errorf("segment: all %d segment numbers are used up (empty the cache folder)", maxSeg)
	}
	var salt [8]byte
	if _, err := rand.Read(salt[:]); err != nil {
		return nil, fmt.Errorf("segment: %w", err)
	}
	g := &segment{id: s.nextID, salt: binary.LittleEndian.Uint64(salt[:]), end: segHeaderLen, committed: segHeaderLen}
	g.tab.Store(newSlots(0, 0))
	var err error
	if g.f, err = s.o.FS.OpenFile(s.path(g.id), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o644); err != nil {
		return nil, fmt.Errorf("segment: %w", err)
	}
	if _, err := g.f.WriteAt(appendSegmentHeader(nil, g.id, g.salt), 0); err != nil {
		_ = g.f.Close()
		_ = s.o.FS.Remove(s.path(g.id))
		return nil, fmt.Errorf("segment: %w", err)
	}
	s.nextID++
	s.used += segHeaderLen
	s.setSegment(g.id, g)
	return g, nil
}

// Append writes a record. It returns ErrFull when that would pass MaxBytes, before anything is
// written; any other error is the file system's, and then nothing is kept of the record. The payload
// is the caller's again when Append returns.
func (s *Store) Append(rec Record, payload []byte) (Loc, error) {
	if len(payload) != rec.Length {
		return 0, fmt.Errorf("segment: payload of %d bytes for a record of %d", len(payload), rec.Length)
	}
	if err := rec.check(); err != nil {
		return 0, fmt.Errorf("segment: %w", err)
	}
	g, i, e, err := s.reserve(rec)
	if err != nil {
		return 0, err
	}
	return s.finish(g, i, &e, s.write(g, &e, payload))
}

// reserve takes the space for a record in the segment in use, or in a new one where it does not fit.
func (s *Store) reserve(rec Record) (g *segment, i int, e entry, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, 0, entry{}, ErrClosed
	}
	place := func(off int64) {
		gap := alignUp(off+int64(rec.headerLen()), s.align) - off
		e = entry{rec: rec, off: off, gap: int(gap)}
	}
	g = s.active
	var grow int64
	if g != nil {
		place(g.end)
		grow = e.end() - g.end
	}
	if fresh := g == nil || e.end() > s.o.SegmentSize && g.end > segHeaderLen; fresh {
		place(segHeaderLen)
		grow = e.end()
		g = nil
	}
	if s.o.MaxBytes > 0 && s.used+grow > s.o.MaxBytes {
		return nil, 0, entry{}, ErrFull
	}
	if g == nil {
		if g, err = s.newSegment(); err != nil {
			s.stats.AppendErrors++
			return nil, 0, entry{}, err
		}
		s.retire(s.active)
		s.active = g
	}
	t := g.tab.Load()
	i = int(t.n.Load())
	g.tab.Store(t.add(e.off, e.end()-e.off))
	g.entries = append(g.entries, recordState{entry: e, state: writing})
	g.clearDead(i)
	s.used += e.end() - e.off
	g.end = e.end()
	g.pending++
	s.busy++
	return g, i, e, nil
}

// retire lets a segment take no more appends; it is sealed once those under way have ended. The caller
// holds mu.
func (s *Store) retire(g *segment) {
	if g == nil {
		return
	}
	g.retired = true
	if s.active == g {
		s.active = nil
	}
	s.wakeSealer(g)
}

func (s *Store) wakeSealer(g *segment) {
	if g.retired && g.pending == 0 {
		select {
		case s.sealC <- struct{}{}:
		default: // it is awake
		}
	}
}

var headerPool = sync.Pool{New: func() any { return new([maxHeaderLen]byte) }}

// write writes payload and header, in this order: where there is a header there is a payload.
func (s *Store) write(g *segment, e *entry, payload []byte) error {
	buf := headerPool.Get().(*[maxHeaderLen]byte)
	defer headerPool.Put(buf)
	h := appendHeader(buf[:0], &e.rec, payload, g.salt, e.off, e.gap)
	if _, err := g.f.WriteAt(payload, e.off+int64(e.gap)); err != nil {
		return err
	}
	_, err := g.f.WriteAt(h, e.off)
	return err
}

// finish ends an append that write ended with err.
func (s *Store) finish(g *segment, i int, e *entry, err error) (Loc, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	size := e.end() - e.off
	g.pending--
	s.busy--
	if err == nil {
		g.entries[i].state = done
		g.live += size
		g.liveRecs++
		s.stats.Appends++
	} else {
		s.stats.AppendErrors++
		g.entries[i].state = void
		g.setDead(i)
		if g.end == e.end() {
			// Nobody has reserved space behind it: give it back. Otherwise the hole stays, as
			// garbage; a scan finds no header there and goes on behind it.
			t := g.tab.Load()
			t = t.resized(len(t.recs), 64*len(t.checked)) // readers may look at the old one
			t.n.Store(int64(i))
			g.tab.Store(t)
			g.entries = g.entries[:i]
			g.end = e.off
			s.used -= size
			// The blocks of a partial write. If this fails, too, the next append overwrites them.
			_ = g.f.Truncate(e.off)
		}
	}
	s.wakeSealer(g)
	s.idle.Broadcast()
	if err != nil {
		return 0, fmt.Errorf("segment: append %d bytes: %w", e.rec.Length, err)
	}
	return makeLoc(g.id, e.off, e.gap), nil
}

var blockPool = sync.Pool{New: func() any { return new([]byte) }}

// ReadAt fills p with the bytes from off on of the payload at loc, which is length bytes long. A block
// is checked against its checksum when it is first read after Open. It fails with an error that wraps
// ErrCorrupt, with ErrGone, or with the file system's error; p then holds nothing of use.
func (s *Store) ReadAt(loc Loc, length int, p []byte, off int64) error {
	if off < 0 || off+int64(len(p)) > int64(length) {
		return fmt.Errorf("segment: read [%d, %d) of a payload of %d bytes", off, off+int64(len(p)), length)
	}
	if len(p) == 0 {
		return nil
	}
	g := s.segment(loc.Segment())
	if g == nil {
		return ErrGone
	}
	t := g.tab.Load()
	i := t.find(loc.off())
	if i < 0 {
		return ErrGone
	}
	s.reads.Add(1)
	first, last := int(off/BlockSize), int((off+int64(len(p))-1)/BlockSize)
	if t.isChecked(i, first, last) {
		_, err := g.f.ReadAt(p, loc.off()+int64(loc.gap())+off)
		return s.readError(loc, err)
	}
	if err := s.readChecked(g, loc, length, p, off, first, last); err != nil {
		return s.readError(loc, err)
	}
	// By the number, not by t: the slots may have moved meanwhile, but never the numbers.
	g.tab.Load().setChecked(i, first, last)
	return nil
}

// readChecked reads whole blocks, from first to last, and checks them.
func (s *Store) readChecked(g *segment, loc Loc, length int, p []byte, off int64, first, last int) error {
	s.checks.Add(1)
	hbuf := headerPool.Get().(*[maxHeaderLen]byte)
	defer headerPool.Put(hbuf)
	n, err := g.f.ReadAt(hbuf[:min(loc.gap(), maxHeaderLen)], loc.off())
	if err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	h, err := parseHeader(hbuf[:n], g.salt, loc.off(), maxSegmentSize+2*ExtentSize)
	if err != nil || h.rec.Length != length || h.gap != loc.gap() {
		return fmt.Errorf("%w header", ErrCorrupt)
	}
	from := int64(first) * BlockSize
	to := min(int64(last+1)*BlockSize, int64(length))
	blocks := p
	if from != off || to != off+int64(len(p)) {
		buf := blockPool.Get().(*[]byte)
		defer blockPool.Put(buf)
		if int64(cap(*buf)) < to-from {
			*buf = make([]byte, to-from)
		}
		blocks = (*buf)[:to-from]
	}
	if _, err := g.f.ReadAt(blocks, loc.off()+int64(loc.gap())+from); err != nil {
		return err
	}
	if !h.checkBlocks(blocks, first) {
		return fmt.Errorf("%w payload", ErrCorrupt)
	}
	if from != off || to != off+int64(len(p)) {
		copy(p, blocks[off-from:])
	}
	return nil
}

// readError says what a failed read means.
func (s *Store) readError(loc Loc, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, fs.ErrClosed):
		return ErrGone
	case errors.Is(err, io.EOF):
		err = fmt.Errorf("%w: the file was cut", ErrCorrupt)
	}
	if errors.Is(err, ErrCorrupt) {
		s.corrupt.Add(1)
	} else {
		s.readErrors.Add(1)
	}
	return fmt.Errorf("segment: read %v: %w", loc, err)
}

// Free says that the record at loc is dead: replaced, of a stale version, or corrupt. Its space counts
// as garbage until its segment is dropped. Freeing it again does nothing.
func (s *Store) Free(loc Loc) {
	s.mu.Lock()
	defer s.mu.Unlock()
	g := s.segment(loc.Segment())
	if g == nil {
		return
	}
	t := g.tab.Load()
	i := t.find(loc.off())
	if i < 0 || g.isDead(i) || g.entries != nil && g.entries[i].state == writing {
		return
	}
	g.setDead(i)
	g.live -= int64(t.recs[i].units) * unit
	g.liveRecs--
}

// DropSegment deletes a segment with all its records, waits for appends to it first, and returns how
// many bytes that freed; 0 if there is no such segment. Before the file goes, died is called, unless it is nil, for
// each record that was not freed, so that the owner can forget its Loc; reads that come too late get
// ErrGone. A record whose header cannot be read any more is passed with Length 0.
func (s *Store) DropSegment(id uint32, died func(Record, Loc)) (freed int64, err error) {
	s.mu.Lock()
	g := s.segment(id)
	if g == nil || g.dropped || s.closed {
		s.mu.Unlock()
		return 0, nil
	}
	g.dropped = true // from here on it is not worth an fsync
	s.retire(g)
	for g.pending > 0 {
		s.idle.Wait()
	}
	s.mu.Unlock()

	g.commit.Lock()
	defer g.commit.Unlock()
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return 0, nil
	}
	s.setSegment(id, nil)
	t := g.tab.Load()
	s.mu.Unlock()

	if died != nil {
		s.visitLive(g, t, died)
	}
	err = s.o.FS.Remove(s.path(id))
	if s.o.Index != nil {
		err = errors.Join(err, s.o.Index.DropSegment(id))
	}
	err = errors.Join(err, g.f.Close())
	if err != nil {
		err = fmt.Errorf("segment: drop segment %08d: %w", id, err)
	}
	s.mu.Lock()
	s.used -= g.end
	s.stats.Dropped++
	s.mu.Unlock()
	return g.end, err
}

// visitLive calls died for the live records of a dropped segment.
func (s *Store) visitLive(g *segment, t *slots, died func(Record, Loc)) {
	buf := new([maxHeaderLen]byte)
	for i, r := range t.recs[:t.n.Load()] {
		if g.isDead(i) {
			continue
		}
		off := int64(r.off) * unit
		if g.entries != nil {
			died(g.entries[i].rec, makeLoc(g.id, off, g.entries[i].gap))
			continue
		}
		n, _ := g.f.ReadAt(buf[:], off)
		h, err := parseHeader(buf[:n], g.salt, off, maxSegmentSize+2*ExtentSize)
		if err != nil {
			died(Record{}, makeLoc(g.id, off, 0))
			continue
		}
		died(h.rec, makeLoc(g.id, off, h.gap))
	}
}

// Reclaim drops the segments that hold nothing but garbage and returns how many bytes that freed.
func (s *Store) Reclaim() (freed int64, err error) {
	for _, g := range s.sorted() {
		s.mu.Lock()
		empty := g.liveRecs == 0 && g.pending == 0 && g.end > segHeaderLen
		s.mu.Unlock()
		if empty {
			n, e := s.DropSegment(g.id, nil)
			freed += n
			err = errors.Join(err, e)
		}
	}
	return freed, err
}

// Sync makes every record durable whose Append returned before, and commits the tables to the index.
func (s *Store) Sync() error {
	s.mu.Lock()
	closed := s.closed
	s.mu.Unlock()
	if closed {
		return ErrClosed
	}
	return s.commitAll(false)
}

// commitAll commits what is finished: of all segments, or only the segments that take no more appends.
func (s *Store) commitAll(retiredOnly bool) error {
	var errs []error
	for _, g := range s.sorted() {
		if err := s.commitSegment(g, retiredOnly); err != nil {
			errs = append(errs, fmt.Errorf("segment: sync segment %08d: %w", g.id, err))
		}
	}
	return errors.Join(errs...)
}

// commitSegment fsyncs a segment and then commits the table of its records up to the first append that
// is under way.
func (s *Store) commitSegment(g *segment, retiredOnly bool) error {
	g.commit.Lock()
	defer g.commit.Unlock()
	s.mu.Lock()
	if g.sealed || g.dropped || retiredOnly && !g.retired {
		s.mu.Unlock()
		return nil
	}
	seal := g.retired && g.pending == 0
	upTo := g.end
	var entries []entry
	for i := range g.entries {
		if g.entries[i].state == writing {
			upTo = g.entries[i].off
			break
		}
		if g.entries[i].state == done {
			entries = append(entries, g.entries[i].entry)
		}
	}
	dirSynced := g.dirSynced
	idle := upTo == g.committed && !seal && g.pending == 0
	s.mu.Unlock()
	if idle {
		return nil
	}

	err := g.f.Sync()
	if err == nil && !dirSynced {
		err = s.o.FS.SyncDir(s.dir)
	}
	if err == nil && s.o.Index != nil {
		err = s.o.Index.CommitSegment(g.id, upTo, seal, appendTable(nil, entries))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err != nil {
		s.stats.SyncErrors++
		return err
	}
	g.dirSynced = true
	g.committed = upTo
	if seal {
		g.sealed = true
		g.entries = nil
		t := g.tab.Load()
		n := t.n.Load()
		g.tab.Store(t.resized(int(n), t.blocks(n)))
	}
	return nil
}

// seal commits retired segments until the store is closed.
func (s *Store) seal() {
	defer s.sealer.Done()
	for range s.sealC {
		if err := s.commitAll(true); err != nil {
			s.o.Logger.Error("cache segment not made durable; the next sync tries again", "err", err)
		}
	}
}

// Used returns what all segments take, in bytes, with headers, padding, garbage, and what appends
// under way have reserved.
func (s *Store) Used() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.used
}

// Stats tells how a store is doing. Counters start at Open.
type Stats struct {
	Segments     int
	Records      int   // live ones
	UsedBytes    int64 // all of the files
	LiveBytes    int64 // live records, with headers and padding
	Appends      int64
	AppendErrors int64
	Reads        int64
	Checks       int64 // reads that had a checksum to check
	Corrupt      int64 // reads that found damage
	ReadErrors   int64 // reads that the file system failed
	SyncErrors   int64
	Dropped      int64 // segments
	Recovery     Recovery
}

// Recovery tells what Open found.
type Recovery struct {
	Scanned     int   // records that no table covered
	Holes       int   // places without a valid header before the last record: damage, or an append that a crash cut off
	TornBytes   int64 // cut off behind the last record
	Lost        int   // records in a committed table that the file does not hold any more
	BadTables   int   // tables that could not be read; their segments were scanned
	BadSegments int   // files without a valid segment header, removed
}

// Stats returns the current numbers.
func (s *Store) Stats() Stats {
	s.mu.Lock()
	defer s.mu.Unlock()
	st := s.stats
	for _, g := range *s.segs.Load() {
		st.Segments++
		st.Records += g.liveRecs
		st.LiveBytes += g.live
	}
	st.UsedBytes = s.used
	st.Reads, st.Checks, st.Corrupt, st.ReadErrors = s.reads.Load(), s.checks.Load(), s.corrupt.Load(), s.readErrors.Load()
	return st
}

// SegmentInfo tells what is in a segment.
type SegmentInfo struct {
	ID      uint32
	Bytes   int64 // of the file
	Garbage int64 // of these, what no live record needs
	Records int   // live ones
	Active  bool  // takes appends
}

// Segments returns the segments by ascending number, which is the order of their making.
func (s *Store) Segments() []SegmentInfo {
	s.mu.Lock()
	defer s.mu.Unlock()
	segs := s.sorted()
	infos := make([]SegmentInfo, len(segs))
	for i, g := range segs {
		var reserved int64
		for j := range g.entries {
			if g.entries[j].state == writing {
				reserved += g.entries[j].end() - g.entries[j].off
			}
		}
		infos[i] = SegmentInfo{ID: g.id, Bytes: g.end, Garbage: g.end - segHeaderLen - g.live - reserved, Records: g.liveRecs, Active: g == s.active}
	}
	return infos
}

// Close waits for appends under way, makes everything durable, and closes the files. It seals nothing:
// the next Open goes on with the segment in use. Reads that come later get ErrGone.
func (s *Store) Close() error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return nil
	}
	s.closed = true
	for s.busy > 0 {
		s.idle.Wait()
	}
	s.mu.Unlock()
	close(s.sealC)
	s.sealer.Wait()
	return errors.Join(s.commitAll(false), s.closeFiles())
}

func (s *Store) closeFiles() error {
	var errs []error
	for _, g := range s.sorted() {
		g.commit.Lock()
		errs = append(errs, g.f.Close())
		g.commit.Unlock()
	}
	return errors.Join(errs...)
}
