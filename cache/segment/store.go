package segment

import (
	"cmp"
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

	"github.com/shoalfs/shoal/cache/crypt"
	"github.com/shoalfs/shoal/internal/killpoint"
)

var (
	// ErrCorrupt is wrapped by errors about bytes other than those written. The caller frees them and fetches again.
	ErrCorrupt = errors.New("corrupt")
	// ErrGone is returned for a Loc whose segment was dropped. The caller fetches again.
	ErrGone = errors.New("segment: the record's segment was dropped")
	// ErrFull is returned if an append would exceed MaxBytes or the Budget. The caller drops a segment or does without.
	ErrFull = errors.New("segment: the store is full")
	// ErrWouldBlock is returned by ReadAtNow for bytes that are not in memory.
	ErrWouldBlock = errors.New("segment: the read would wait for the disk")
	// ErrNewerFormat is wrapped by Open's error about a segment of a format version that this program does not support.
	ErrNewerFormat = errors.New("written by a newer version of shoal")
	// ErrClosed is returned by a closed store.
	ErrClosed = errors.New("segment: the store is closed")
)

// payloadAlign is the alignment of payloads in a segment, in bytes (ADR 8). Headers carry the offset of the payload, so
// this can change without a new format.
const payloadAlign = 64

const (
	defaultSegmentSize = 256 << 20
	minDefaultSize     = 8 << 20
	maxDefaultSize     = 2 << 30
)

// Index keeps the record tables of segments, so that Open need not scan them. Losing the index loses no data. For one
// segment its methods are called by one goroutine at a time.
type Index interface {
	// CommitSegment durably replaces a segment's entry. table covers the records before size; it must not be retained.
	CommitSegment(id uint32, size int64, sealed bool, table []byte) error
	// LoadSegments calls yield for each segment, ascending, and returns its error, if any. The table must not change.
	LoadSegments(yield func(id uint32, size int64, sealed bool, table []byte) error) error
	// DropSegment forgets a segment; an unknown one is no error.
	DropSegment(id uint32) error
}

// Options of a store.
type Options struct {
	// SegmentSize is the size from which a segment takes no more records, in bytes. The default is 256 MiB; less if
	// MaxBytes (or the Budget) is small, so that there are 16 segments to choose from when one must be dropped, and
	// more if MaxBytes is huge, so that there are at most some 4,096 open files.
	SegmentSize int64
	// MaxBytes limits the size of all segments, with headers and padding; 0 means no limit.
	MaxBytes int64
	// Budget is a second limit, shared with other stores; nil means none. A closed store has given its bytes back.
	Budget *Budget
	// Counted returns the bytes of the Budget that the caller has taken for what lies in the folder. Open takes them
	// over, so that they are the store's without having been anybody else's; nil: there are none.
	Counted func() int64
	// Key encrypts records; nil: no encryption. Records on disk of the other kind are not read.
	Key *crypt.Key
	// Index keeps the record tables; without one, Open scans all segments.
	Index Index
	// Logger gets the findings of recovery and the errors of background fsyncs. The default is [slog.Default].
	Logger *slog.Logger
	// FS is the file system; the default is the operating system's.
	FS FS
}

func (o *Options) setDefaults() error {
	o.Budget = cmp.Or(o.Budget, NewBudget(0))
	if o.SegmentSize == 0 {
		o.SegmentSize = defaultSegmentSize
		bound := o.MaxBytes
		if limit := o.Budget.Limit(); limit > 0 && (bound <= 0 || limit < bound) {
			bound = limit
		}
		if bound > 0 {
			o.SegmentSize = min(max(bound/16, minDefaultSize), defaultSegmentSize)
			o.SegmentSize = min(max(o.SegmentSize, bound/4096), maxDefaultSize)
		}
	}
	// A Loc must be able to address a record that begins before SegmentSize.
	if o.SegmentSize < segHeaderLen || o.SegmentSize > maxSegmentSize {
		return fmt.Errorf("segment size of %d bytes, want at most %d", o.SegmentSize, int64(maxSegmentSize))
	}
	o.Logger = cmp.Or(o.Logger, slog.Default())
	o.FS = cmp.Or[FS](o.FS, osFS{})
	return nil
}

// Store is a folder of segments. Safe for concurrent use, in one process: the cache folder's owner ensures that.
type Store struct {
	dir   string
	o     Options
	align int64

	segs atomic.Pointer[map[uint32]*segment] // replaced, never changed; by the holder of mu

	// mu is never held while waiting for the disk, so that a hanging disk blocks only calls that need it.
	mu        sync.Mutex
	idle      sync.Cond // an append ended
	appending bool      // an append is under way: one at a time
	to        *segment  // that it writes to; nil while that is being made
	active    *segment  // takes appends; nil before the first one
	nextID    uint32
	maxBytes  int64
	used      int64 // with the bytes of the append that is under way
	counted   int64 // of Options.Counted, not yet used
	returned  bool  // used is not in the budget any more
	unsealed  error // of sealing since the last Sync
	closed    bool

	recovery Recovery

	noNow atomic.Bool // the file system cannot tell what is in memory

	checks, scrubbed atomic.Int64 // reads that checked, and records that a scrub found right: for tests

	sealC  chan struct{}
	sealer sync.WaitGroup
}

// segment is one file.
type segment struct {
	id   uint32
	f    File
	salt uint64
	key  *sealer // nil: in clear
	tab  atomic.Pointer[slots]

	commit sync.Mutex // held while the segment is committed or dropped; taken before Store.mu

	// The rest is guarded by Store.mu.
	end       int64 // where the next record begins
	live      int64 // bytes of live records, with headers and padding
	liveRecs  int
	encrypted int      // records that this store cannot read
	entries   []entry  // parallel to the slots; nil once sealed; of Length 0 if the record was made void
	dead      []uint64 // bits by record number, as far as the last dead one
	retired   bool     // takes no more appends
	sealed    bool     // committed as a whole
	dropped   bool
	dirSynced bool
	committed int64 // what the index's table covers
}

func (g *segment) isDead(i int) bool { return i/64 < len(g.dead) && g.dead[i/64]&(1<<(i%64)) != 0 }

func (s *Store) path(id uint32) string { return filepath.Join(s.dir, fmt.Sprintf("%08d.seg", id)) }

// segment returns the segment with this number, or nil.
func (s *Store) segment(id uint32) *segment { return (*s.segs.Load())[id] }

// find returns the segment of a record, its slots, and the record's number among them; no segment if it is not there.
func (s *Store) find(loc Loc) (g *segment, t *slots, i int) {
	if g = s.segment(loc.Segment()); g != nil {
		t = g.tab.Load()
		if i = t.find(loc.off()); i < 0 {
			g = nil
		}
	}
	return g, t, i
}

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
	return slices.SortedFunc(maps.Values(*s.segs.Load()), func(a, b *segment) int { return cmp.Compare(a.id, b.id) })
}

// take takes n bytes if both limits allow them, or beyond is set, and reports whether it did. The caller holds mu.
func (s *Store) take(n int64, beyond bool) bool {
	if beyond {
		s.o.Budget.Take(n)
	} else if s.maxBytes > 0 && n > s.maxBytes-s.used || !s.o.Budget.TryTake(n) {
		return false
	}
	s.used += n
	return true
}

// give gives n bytes back. The caller holds mu.
func (s *Store) give(n int64) {
	s.used -= n
	if !s.returned {
		s.o.Budget.Give(n)
	}
}

// giveAll returns all bytes of the store to the budget.
func (s *Store) giveAll() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.returned {
		s.o.Budget.Give(s.used)
	}
	s.returned = true
}

// SetMaxBytes changes Options.MaxBytes; 0 means no limit. Existing records stay: above n, appends get ErrFull until
// enough was dropped. The segment size stays, too.
func (s *Store) SetMaxBytes(n int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.maxBytes = n
}

// Take takes n bytes of both limits for a file beside the segments, and reports whether they allow them.
func (s *Store) Take(n int64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return !s.closed && s.take(n, false)
}

// Give gives bytes of Take back.
func (s *Store) Give(n int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.give(n)
}

// SegmentSize returns Options.SegmentSize.
func (s *Store) SegmentSize() int64 { return s.o.SegmentSize }

// newSegment makes the file of the next segment.
func (s *Store) newSegment(id uint32) (*segment, error) {
	if id > maxSeg {
		return nil, fmt.Errorf("segment: all %d segment numbers are used up (empty the cache folder)", maxSeg)
	}
	var salt [8]byte
	crypt.Random(salt[:])
	g := &segment{id: id, salt: binary.LittleEndian.Uint64(salt[:]), end: segHeaderLen, committed: segHeaderLen}
	g.key = newSealer(s.o.Key, g.salt)
	g.tab.Store(newSlots(0, 0))
	var err error
	if g.f, err = s.o.FS.OpenFile(s.path(g.id), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o644); err != nil {
		return nil, fmt.Errorf("segment: %w", err)
	}
	killpoint.Pass("segment.create.file")
	if err := writeAt(g.f, appendSegmentHeader(nil, g.id, g.salt), 0); err != nil {
		_ = g.f.Close()
		_ = s.o.FS.Remove(s.path(g.id))
		return nil, fmt.Errorf("segment: %w", err)
	}
	killpoint.Pass("segment.create.header")
	return g, nil
}

// writeAt writes all of p.
func writeAt(f File, p []byte, off int64) error {
	n, err := f.WriteAt(p, off)
	if err == nil && n < len(p) {
		err = io.ErrShortWrite
	}
	return err
}

// Append writes a record. It returns ErrFull, before anything is written, if that would exceed MaxBytes or the Budget.
// Any other error is the file system's; then nothing of the record is kept. The payload is the caller's again.
func (s *Store) Append(rec Record, payload []byte) (Loc, error) { return s.append(rec, payload, false) }

// AppendBeyond is Append that may exceed MaxBytes and the Budget, for a caller who drops a segment for it soon.
func (s *Store) AppendBeyond(rec Record, payload []byte) (Loc, error) {
	return s.append(rec, payload, true)
}

func (s *Store) append(rec Record, payload []byte, beyond bool) (Loc, error) {
	if len(payload) != rec.Length {
		return 0, fmt.Errorf("segment: payload of %d bytes for a record of %d", len(payload), rec.Length)
	}
	if err := rec.check(); err != nil {
		return 0, fmt.Errorf("segment: %w", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for s.appending && !s.closed {
		s.idle.Wait()
	}
	if s.closed {
		return 0, ErrClosed
	}
	s.appending = true
	g, e, err := s.reserve(rec, beyond)
	if err == nil {
		s.to = g
		s.mu.Unlock()
		err = s.write(g, &e, &rec, payload)
		s.mu.Lock()
		if err != nil {
			s.give(e.end() - e.off)
			err = fmt.Errorf("segment: append %d bytes: %w", e.Length, err)
		}
	}
	s.appending, s.to = false, nil
	s.idle.Broadcast()
	if g == nil {
		return 0, err
	}
	defer s.wakeSealer(g)
	if err != nil {
		return 0, err
	}
	size := e.end() - e.off
	g.tab.Store(g.tab.Load().add(e.off, size))
	g.entries = append(g.entries, e)
	g.end = e.end()
	g.live += size
	g.liveRecs++
	return makeLoc(g.id, e.off, e.gap), nil
}

// reserve takes the bytes for a record at the end of the segment in use, or of a new one if it does not fit. The caller
// holds mu, and is the only one who appends.
func (s *Store) reserve(rec Record, beyond bool) (g *segment, e entry, err error) {
	place := func(off int64) {
		gap := alignUp(off+int64(headLen(len(rec.ETag), rec.Length, s.o.Key != nil)), s.align) - off
		e = entry{Extent: rec.extent(), off: off, gap: int(gap)}
	}
	grow := int64(0)
	if g = s.active; g != nil {
		place(g.end)
		grow = e.end() - g.end
	}
	if g == nil || e.end() > s.o.SegmentSize && g.end > segHeaderLen {
		place(segHeaderLen)
		g, grow = nil, e.end()
	}
	if !s.take(grow, beyond) {
		return nil, entry{}, ErrFull
	}
	if g != nil {
		return g, e, nil
	}
	id := s.nextID
	s.nextID++ // whatever comes of it: its file may be left
	s.mu.Unlock()
	g, err = s.newSegment(id)
	s.mu.Lock()
	if err != nil {
		s.give(grow)
		return nil, entry{}, err
	}
	s.setSegment(g.id, g)
	s.retire(s.active)
	s.active = g
	return g, e, nil
}

// Retire makes a segment take no more appends.
func (s *Store) Retire(id uint32) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if g := s.segment(id); g != nil && g == s.active {
		s.retire(g)
	}
}

// retire makes a segment take no more appends; it is sealed once the one under way has ended. The caller holds mu.
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
	if g.retired && s.to != g && !s.closed { // Close commits it itself
		select {
		case s.sealC <- struct{}{}:
		default: // it is awake
		}
	}
}

var headerPool = sync.Pool{New: func() any { return new([maxHeadLen]byte) }}

// cipherPool holds encrypted payloads on their way to the disk, usually of one writer.
var cipherPool = sync.Pool{New: func() any { return new([]byte) }}

// write writes payload and header, in this order, so that every header has its payload.
func (s *Store) write(g *segment, e *entry, rec *Record, payload []byte) error {
	buf := headerPool.Get().(*[maxHeadLen]byte)
	defer headerPool.Put(buf)
	var h []byte
	if g.key == nil {
		h = appendHeader(buf[:0], rec, payload, g.salt, e.off, e.gap)
	} else {
		ct := cipherPool.Get().(*[]byte)
		defer cipherPool.Put(ct)
		if cap(*ct) < len(payload) {
			*ct = make([]byte, len(payload))
		}
		sealed := (*ct)[:len(payload)]
		h = g.key.appendSealed(buf[:0], rec, payload, sealed, g.salt, e.off, e.gap)
		payload = sealed
	}
	if err := writeAt(g.f, payload, e.off+int64(e.gap)); err != nil {
		return g.cut(e.off, err)
	}
	killpoint.Pass("segment.append.payload")
	if err := writeAt(g.f, h, e.off); err != nil {
		// The header may have been written in part, which looks like damage. If this write fails, too, fsck reports it.
		_ = writeAt(g.f, []byte(voidMagic), e.off)
		killpoint.Pass("segment.undo.void")
		return g.cut(e.off, err)
	}
	killpoint.Pass("segment.append.header")
	return nil
}

// cut frees the blocks of an append that failed with err. If that fails, too, the next one overwrites them.
func (g *segment) cut(off int64, err error) error {
	_ = g.f.Truncate(off)
	killpoint.Pass("segment.undo.cut")
	return err
}

// Free marks the record at loc as dead: replaced, of a stale version, or corrupt. Its space counts as garbage until
// its segment is dropped. Freeing it again does nothing.
func (s *Store) Free(loc Loc) {
	s.mu.Lock()
	defer s.mu.Unlock()
	g, t, i := s.find(loc)
	if g == nil || g.isDead(i) {
		return
	}
	for len(g.dead) <= i/64 {
		g.dead = append(g.dead, 0)
	}
	g.dead[i/64] |= 1 << (i % 64)
	g.live -= int64(t.recs[i].units) * unit
	g.liveRecs--
}

// Void is Free for good: the record is not there after a restart either, though its bytes are as they were written. The
// table of its segment still has it, and is dropped, so that the next Open scans.
func (s *Store) Void(loc Loc) error {
	s.Free(loc)
	g := s.segment(loc.Segment())
	if g == nil {
		return nil
	}
	g.commit.Lock()
	defer g.commit.Unlock()
	s.mu.Lock()
	i := g.tab.Load().find(loc.off())
	if s.closed || g.dropped || i < 0 || !g.isDead(i) {
		s.mu.Unlock()
		return nil
	}
	if !g.sealed {
		g.entries[i].Length = 0
	}
	g.committed = segHeaderLen
	s.mu.Unlock()
	err := writeAt(g.f, []byte(voidMagic), loc.off())
	if err == nil {
		err = s.fsync(g)
	}
	if err == nil && s.o.Index != nil {
		err = s.o.Index.DropSegment(g.id)
	}
	if err != nil {
		return fmt.Errorf("segment: void a record of segment %08d: %w", g.id, err)
	}
	return nil
}

// Sync makes every record durable whose Append returned before, and commits the tables to the index. Its error may be
// of a segment that was sealed since the last call. Segments that could not be written are gone then (see Has).
func (s *Store) Sync() error {
	s.mu.Lock()
	closed := s.closed
	s.mu.Unlock()
	if closed {
		return ErrClosed
	}
	err := s.commitAll(false)
	s.mu.Lock()
	defer s.mu.Unlock()
	err = errors.Join(s.unsealed, err)
	s.unsealed = nil
	return err
}

// Has reports whether the segment of a record is still there.
func (s *Store) Has(loc Loc) bool { return s.segment(loc.Segment()) != nil }

// commitAll commits all finished records, or only those of segments that take no more appends.
func (s *Store) commitAll(retiredOnly bool) (err error) {
	for _, g := range s.sorted() {
		if e := s.commitSegment(g, retiredOnly); e != nil {
			err = errors.Join(err, fmt.Errorf("segment: sync segment %08d: %w", g.id, e))
		}
	}
	return err
}

// commitSegment fsyncs a segment and then commits the table of its records, without the one that is being appended.
func (s *Store) commitSegment(g *segment, retiredOnly bool) error {
	g.commit.Lock()
	defer g.commit.Unlock()
	s.mu.Lock()
	if g.sealed || g.dropped || retiredOnly && !g.retired {
		s.mu.Unlock()
		return nil
	}
	seal, upTo, dirSynced := g.retired && s.to != g, g.end, g.dirSynced
	entries := slices.DeleteFunc(slices.Clone(g.entries), func(e entry) bool { return e.Length == 0 })
	// The table cannot hold records that cannot be read, and without them it would be wrong; so the next Open scans.
	tabled := s.o.Index != nil && g.encrypted == 0
	idle := upTo == g.committed && !seal
	s.mu.Unlock()
	if idle {
		return nil
	}

	err := s.fsync(g)
	killpoint.Pass("segment.commit.file")
	if err == nil && !dirSynced {
		err = s.o.FS.SyncDir(s.dir)
		killpoint.Pass("segment.commit.dir")
	}
	if err == nil && tabled {
		err = s.o.Index.CommitSegment(g.id, upTo, seal, g.key.sealTable(g.id, appendTable(nil, entries)))
		killpoint.Pass("segment.commit.index")
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err != nil {
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

// fsync makes a segment's file durable, or else drops it: the kernel tells once that it could not write, and then calls
// the pages clean. The caller holds g.commit.
func (s *Store) fsync(g *segment) error {
	err := g.f.Sync()
	if err == nil || errors.Is(err, fs.ErrClosed) { // Close was faster
		return err
	}
	s.mu.Lock()
	s.takeOut(g)
	s.mu.Unlock()
	_, removeErr := s.remove(g)
	return errors.Join(err, removeErr)
}

// seal commits retired segments until the store is closed.
func (s *Store) seal() {
	for range s.sealC {
		if err := s.commitAll(true); err != nil {
			s.o.Logger.Error("cache segment not made durable", "err", err)
			s.mu.Lock()
			s.unsealed = errors.Join(s.unsealed, err)
			s.mu.Unlock()
		}
	}
}

// Used returns the bytes of all segments, with headers, padding, garbage, the append under way, and those of Take.
func (s *Store) Used() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.used
}

// Recovery tells what Open found.
type Recovery struct {
	Scanned     int   // records that no table covered
	Holes       int   // places without a valid header before the last record: damage, or an append that a crash cut off
	TornBytes   int64 // cut off behind the last record
	Lost        int   // records in a committed table that the file no longer has
	BadTables   int   // tables that could not be read; their segments were scanned
	BadSegments int   // files without a valid segment header, removed
	Mended      int   // damaged segment headers, rewritten
	Encrypted   int   // records that this store cannot read, but keeps
}

// SegmentInfo tells what is in a segment.
type SegmentInfo struct {
	ID      uint32
	Bytes   int64 // of the file
	Live    int64 // of these, what live records need
	Garbage int64 // of these, what no live record needs
	Records int   // live ones
	Active  bool  // takes appends
}

// Segments returns the segments by ascending number, which is the order of their creation.
func (s *Store) Segments() []SegmentInfo {
	s.mu.Lock()
	defer s.mu.Unlock()
	segs := s.sorted()
	infos := make([]SegmentInfo, len(segs))
	for i, g := range segs {
		infos[i] = SegmentInfo{ID: g.id, Bytes: g.end, Live: g.live, Garbage: g.end - segHeaderLen - g.live,
			Records: g.liveRecs, Active: g == s.active}
	}
	return infos
}

// Close waits for an append that is under way, makes everything durable, and closes the files. It does not seal the
// segment in use: the next Open goes on with it. Later reads get ErrGone. The store's bytes are returned to its Budget
// although the files stay: from here on the host must count them.
func (s *Store) Close() error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return nil
	}
	s.closed = true
	s.idle.Broadcast()
	for s.appending {
		s.idle.Wait()
	}
	s.mu.Unlock()
	close(s.sealC)
	s.sealer.Wait()
	defer s.giveAll()
	return errors.Join(s.commitAll(false), s.closeFiles())
}

func (s *Store) closeFiles() (err error) {
	for _, g := range s.sorted() {
		g.commit.Lock()
		err = errors.Join(err, g.f.Close())
		g.commit.Unlock()
	}
	return err
}
