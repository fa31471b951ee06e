package cache

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"
	"sort"
	"sync"
	"sync/atomic"
	"time"

	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/cache/segment"
	"github.com/shoalfs/shoal/internal/trace"
)

// Locator says where files lie that are packed into larger objects.
type Locator interface {
	// Locate returns the object that holds the file, and the offset of the file's first byte in it.
	Locate(file int) (o objstore.Object, off int64)
}

// VolumeOptions says what a volume reads.
type VolumeOptions struct {
	Manifest *catalog.Manifest
	// Dataset names the source, not its version: records of an older version stay valid while their ETag is right.
	Dataset [16]byte
	Name    string // of the dataset, in the log
	Store   objstore.Reader
	// Locate says where the files lie; nil: each in the object that the manifest names.
	Locate Locator
	// Admit reports whether an extent of a file belongs to the kept set; nil: the first to arrive. Others are kept only
	// once nothing of the set is missing any more, and only in free space. It is called from several goroutines.
	Admit func(file, extent int) bool
	Peers Peers // nil: none
	// Codec is of files that may be kept in another form; nil: none are, and such records are not read.
	Codec Codec
}

// Volume is one version of one dataset, read through the cache. It costs 8 bytes and a bit of memory per extent, and 4 bytes
// more once a file is kept coded. Safe for concurrent use.
type Volume struct {
	c      *Cache
	ds     *dataset
	m      *catalog.Manifest
	store  objstore.Reader
	locate Locator

	first  []uint32        // number of each file's first extent; nil when no file has more than one
	locs   []uint64        // by extent: where the kept record is, 0 = not kept; see at; atomic once the disk is attached
	inRing []atomic.Uint32 // a bit an extent: it is in the ring
	kept   atomic.Int64    // extents kept
	codec  Codec
	coded  codedFiles

	placeMu   sync.Mutex // held where locs, kept and admission.missing change together
	admission atomic.Pointer[admission]
	peers     atomic.Pointer[Peers]

	mu      sync.Mutex
	flights map[uint32]*flight
	failed  map[uint32]failure
	sparse  map[uint32]uint64     // granules fetched of extents that are not here whole; see granules.go
	pieces  map[extentKey]*flight // of granules
	retired bool
}

// failure is the error that readers of an extent got, and until when it is repeated without another fetch. After a
// failed read the kernel asks again, page by page, and each time would cost all the retries and the time that the
// store had.
type failure struct {
	err   error
	until time.Time
}

const (
	failureTime  = time.Second
	mostFailures = 1024 // remembered; a store that is gone fails everything
)

// admission chooses the kept set.
type admission struct {
	admit   func(file, extent int) bool
	yields  bool         // what is kept outside the set goes when the set needs its room
	counted uint32       // extents before this one are in the counts; under placeMu
	missing atomic.Int64 // extents of the set that are not kept
	outside atomic.Int64 // bytes kept outside the set
}

// flight is one fetch and its waiters.
type flight struct {
	done       chan struct{} // closed when buf or err is set; nil while nobody waits
	buf        *Buffer       // the flight's own reference while it is in the map
	err        error
	waiters    int               // readers who get a reference when it lands
	spent      bool              // nobody wants it after its waiters have it
	read       int64             // bytes that the waiters are to read
	urgency    *objstore.Urgency // of a prefetch: raised when a reader joins
	group      bool              // it shares the request with others
	asks       bool              // it may ask a peer, so no peer waits for it
	funded     atomic.Bool       // it has its memory
	class      Class             // of that
	size       int64             // what it takes of memory
	coded      int               // length of the coded form from which the extent is restored; 0: it is fetched
	takesCoded bool              // it may land in its coded form: nobody waits who would restore that
	account    *Account          // that size is on; nil if it is spent
	by         trace.Span        // of the reader that started it; written before it flies
}

// assign puts the flight on account a, unspent. The volume's lock is held.
func (fl *flight) assign(a *Account) {
	fl.account.add(-fl.size)
	a.add(fl.size)
	fl.account, fl.spent = a, false
}

// tell wakes the waiters. The volume's lock is held.
func (fl *flight) tell() {
	if fl.done != nil {
		close(fl.done)
	}
}

// NewVolume adds a version of a dataset to the cache.
func (c *Cache) NewVolume(o VolumeOptions) *Volume {
	m := o.Manifest
	v := &Volume{c: c, ds: c.dataset(o.Dataset, o.Name), m: m, store: o.Store, locate: o.Locate, codec: o.Codec, flights: map[uint32]*flight{}}
	extents, many := 0, false
	for f := range m.Len() {
		n := extentsOf(m.Size(f))
		extents += n
		many = many || n > 1
	}
	if many {
		v.first = make([]uint32, m.Len()+1)
		var at uint32
		for f := range m.Len() {
			v.first[f] = at
			at += uint32(extentsOf(m.Size(f)))
		}
		v.first[m.Len()] = at
	} else {
		extents = m.Len()
	}
	v.locs = make([]uint64, extents)
	v.inRing = make([]atomic.Uint32, (extents+31)/32)
	v.SetAdmit(o.Admit)
	v.SetPeers(o.Peers)
	v.ds.mu.Lock()
	v.ds.volumes = append(v.ds.volumes, v)
	v.ds.mu.Unlock()
	return v
}

// SetAdmit replaces VolumeOptions.Admit. It calls admit for every extent. What is kept outside the new set stays.
func (v *Volume) SetAdmit(admit func(file, extent int) bool) {
	if admit == nil {
		v.admission.Store(nil)
		return
	}
	v.choose(&admission{admit: admit})
}

// SetOwned is SetAdmit for a node of a cluster, whose set may become another one at any time: what is kept outside the
// set goes when an extent of the set finds no room, and what is in memory of the new set is written.
func (v *Volume) SetOwned(admit func(file, extent int) bool) {
	v.choose(&admission{admit: admit, yields: true})
	if d := v.ds.disk.Load(); d != nil {
		d.chosen.Store(true)
		d.writer.poke()
	}
}

// choose puts an admission in force, and counts what it makes of the extents. It does so in steps, so that nobody waits
// for long who places an extent or forgets one.
func (v *Volume) choose(a *admission) {
	a.missing.Store(1) // nothing beside the set is kept before all is counted
	v.placeMu.Lock()
	v.admission.Store(a)
	v.placeMu.Unlock()
	for f := 0; f < v.m.Len(); {
		v.placeMu.Lock()
		for end := min(f+1024, v.m.Len()); f < end; f++ {
			for x := range v.Extents(f) {
				if a.admit(f, x) {
					a.missing.Add(1)
				}
				if v.loc(v.extent(f, x)) != 0 {
					a.count(v, f, x, 1)
				}
			}
		}
		a.counted = v.extent(f, 0)
		v.placeMu.Unlock()
	}
	a.missing.Add(-1)
}

// count notes that an extent was kept, which is 1 more, or -1.
func (a *admission) count(v *Volume, file, x int, kept int64) {
	if a.admit(file, x) {
		a.missing.Add(-kept)
	} else {
		a.outside.Add(kept * v.ExtentBytes(file, x))
	}
}

// wanted reports whether an extent of the file may be kept, and whether only as an extra, beside the whole set.
func (v *Volume) wanted(file, x int) (ok, extra bool) {
	a := v.admission.Load()
	if a == nil || a.admit(file, x) {
		return true, false
	}
	return a.missing.Load() == 0, true
}

// place makes loc the place of an extent that has none. It reports whether it had none. coded is the length of the record
// if it is coded, else 0.
func (v *Volume) place(e uint32, file int, loc segment.Loc, coded int) bool {
	return v.move(e, file, 0, loc, coded)
}

// unplace forgets the place of an extent, if it is still loc.
func (v *Volume) unplace(e uint32, file int, loc segment.Loc) bool {
	return loc != 0 && v.move(e, file, loc, 0, 0)
}

// move changes the place of an extent, if it is still from; 0 is none.
func (v *Volume) move(e uint32, file int, from, to segment.Loc, coded int) bool {
	v.placeMu.Lock()
	defer v.placeMu.Unlock()
	if loc, _ := v.at(e); loc != from {
		return false
	}
	v.put(e, file, to, coded)
	if from != 0 && to != 0 {
		return true
	}
	kept := int64(1)
	if to == 0 {
		kept = -1
	}
	v.kept.Add(kept)
	if a := v.admission.Load(); a != nil && e < a.counted {
		a.count(v, file, int(e-v.extent(file, 0)), kept)
	}
	return true
}

// relocate notes that the record at from was copied to to. It reports whether it is still the extent's.
func (v *Volume) relocate(e uint32, from, to segment.Loc) bool {
	v.placeMu.Lock()
	defer v.placeMu.Unlock()
	loc, coded := v.at(e)
	if loc != from {
		return false
	}
	if coded {
		to |= codedMark
	}
	atomic.StoreUint64(&v.locs[e], uint64(to))
	return true
}

// loc returns where the kept record of an extent is, a segment.Loc with codedMark if it is coded; 0 if it is not kept.
func (v *Volume) loc(e uint32) uint64 { return atomic.LoadUint64(&v.locs[e]) }

// onDisk reports whether the extent can be read from the disk.
func (v *Volume) onDisk(e uint32) bool { return v.loc(e) != 0 && v.ds.readable() != nil }

// Manifest returns the version that the volume serves.
func (v *Volume) Manifest() *catalog.Manifest { return v.m }

func extentsOf(size int64) int { return int((size + ExtentSize - 1) / ExtentSize) }

// Extents implements prefetch.Sizes over file numbers.
func (v *Volume) Extents(file int) int { return extentsOf(v.m.Size(file)) }

// ExtentBytes implements prefetch.Sizes over file numbers.
func (v *Volume) ExtentBytes(file, extent int) int64 {
	return min(v.m.Size(file)-int64(extent)*ExtentSize, ExtentSize)
}

func (v *Volume) key(extent uint32) extentKey { return extentKey{v: v, extent: extent} }

func (v *Volume) extent(file, extent int) uint32 {
	if v.first == nil {
		return uint32(file)
	}
	return v.first[file] + uint32(extent)
}

// Inherit takes over the unchanged kept records of an older version of the same dataset. The records of files that
// changed or vanished are freed.
func (v *Volume) Inherit(old *Volume) {
	d := v.ds.disk.Load()
	if d == nil || old.ds != v.ds {
		return
	}
	for of := range old.m.Len() {
		node, ok := v.m.Find(old.m.Path(of))
		same := ok && !node.IsDir && v.m.ETag(node.Index) == old.m.ETag(of) && v.m.Size(node.Index) == old.m.Size(of)
		v.ds.moving.Lock()
		for x := range old.Extents(of) {
			e := old.extent(of, x)
			loc, n, coded := old.record(e, of, x)
			if !coded {
				n = 0
			}
			switch {
			case loc == 0:
			case same:
				v.place(v.extent(node.Index, x), node.Index, loc, n)
			case old.unplace(e, of, loc):
				d.free(loc)
			}
		}
		v.ds.moving.Unlock()
	}
}

// forget drops the places of records in segments that are gone.
func (v *Volume) forget(gone map[uint32]bool) {
	for e := range v.locs {
		if loc, _ := v.at(uint32(e)); loc != 0 && gone[loc.Segment()] {
			v.unplace(uint32(e), v.fileOf(uint32(e)), loc)
		}
	}
}

// forgetLoc drops the place of a record that is bad. It looks at all extents: bad ones are few.
func (v *Volume) forgetLoc(loc segment.Loc) {
	for e := range v.locs {
		if at, _ := v.at(uint32(e)); at == loc {
			v.unplace(uint32(e), v.fileOf(uint32(e)), loc)
		}
	}
}

// Retire takes a version out of the cache: it still serves readers that have it open, but keeps nothing new.
func (v *Volume) Retire() {
	v.ds.mu.Lock()
	v.ds.volumes = slices.DeleteFunc(v.ds.volumes, func(w *Volume) bool { return w == v })
	v.ds.mu.Unlock()
	v.mu.Lock()
	v.retired = true
	v.mu.Unlock()
	v.c.ring.dropVolume(v)
}

// Kept returns how many of the volume's extents are on disk, and how many it has.
func (v *Volume) Kept() (kept, extents int) { return int(v.kept.Load()), len(v.locs) }

// Stats returns a snapshot of the volume's dataset. It never waits for the disk.
func (v *Volume) Stats() VolumeStats {
	s := VolumeStats{Counts: v.ds.count.snapshot()}
	s.Kept, s.Extents = v.Kept()
	s.Coded, s.CodedBefore, s.CodedAfter = int(v.coded.files.Load()), v.coded.before.Load(), v.coded.after.Load()
	if d := v.ds.disk.Load(); d != nil {
		s.DiskStats = d.stats()
	}
	return s
}

// fileOf returns the file that an extent belongs to.
func (v *Volume) fileOf(e uint32) int {
	if v.first == nil {
		return int(e)
	}
	return sort.Search(v.m.Len(), func(f int) bool { return v.first[f+1] > e })
}

// Claim reports whether the extent is kept, staged, or in flight. A staged extent then stays staged until it is
// spent, even if it was spent before. Its bytes move to account a, unless they are on one with less load. a may be
// nil.
func (v *Volume) Claim(a *Account, file, extent int) bool {
	e := v.extent(file, extent)
	if v.onDisk(e) {
		return true
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.claim(a, e)
}

// claim is Claim with v.mu held. It looks in the order in which an extent moves, so it misses none that is moving.
func (v *Volume) claim(a *Account, e uint32) bool {
	if fl, ok := v.flights[e]; ok {
		if fl.spent || a.takes(fl.account, fl.size) {
			fl.assign(a)
		}
		return true
	}
	return v.c.ring.claim(v.key(e), a) || v.onDisk(e)
}

// Hand says that one reader is done with the file, and that the owner of account a reads its staged extents next.
func (v *Volume) Hand(a *Account, file int) {
	for x := range v.Extents(file) {
		e := v.extent(file, x)
		v.mu.Lock()
		if fl, ok := v.flights[e]; ok {
			fl.assign(a)
		}
		v.c.ring.hand(v.key(e), a)
		v.mu.Unlock()
	}
}

// Staged reports whether the extent can be read without waiting.
func (v *Volume) Staged(file, extent int) bool {
	e := v.extent(file, extent)
	return v.c.ring.has(v.key(e)) || v.onDisk(e) // in the order in which it moves on
}

// ReadAt fills p from the file's offset off, with fewer bytes only at the end of the file. When ctx ends the reader
// leaves; the fetch goes on.
func (v *Volume) ReadAt(ctx context.Context, file int, p []byte, off int64) (int, error) {
	size := v.m.Size(file)
	if off >= size {
		return 0, nil
	}
	p = p[:min(int64(len(p)), size-off)]
	for n := 0; n < len(p); {
		at := off + int64(n)
		x := int(at / ExtentSize)
		in := at - int64(x)*ExtentSize
		part := p[n:min(int64(len(p)), int64(n)+v.ExtentBytes(file, x)-in)]
		if in == 0 && x > 0 {
			v.readAhead(file, x)
		}
		if err := v.readExtent(ctx, file, x, part, in); err != nil {
			return n, err
		}
		n += len(part)
	}
	v.ds.count.readBytes.Add(int64(len(p)))
	return len(p), nil
}

func (v *Volume) readExtent(ctx context.Context, file, x int, p []byte, off int64) error {
	e := v.extent(file, x)
	for {
		if b := v.c.get(v.key(e), len(p)); b != nil {
			v.ds.count.ringHits.Add(1)
			copy(p, b.Bytes()[off:])
			b.Release()
			return nil
		}
		if ok, err := v.readKept(ctx, file, x, e, p, off); ok || err != nil {
			if ok {
				v.ds.count.keepHits.Add(1)
				v.ds.count.keptBytes.Add(int64(len(p)))
			}
			return err
		}
		if ok, err := v.readGranules(ctx, file, x, e, p, off); ok || err != nil {
			return err
		}
		b, err := v.acquire(ctx, file, x, len(p), false)
		if err != nil {
			return err
		}
		if b != nil {
			copy(p, b.Bytes()[off:])
			b.Release()
			return nil
		}
		// It was kept in the meantime.
	}
}

// readKept reads from the kept set, if the record is not coded. A record that cannot be read is forgotten, and so fetched
// again. Its error is the context's.
func (v *Volume) readKept(ctx context.Context, file, x int, e uint32, p []byte, off int64) (bool, error) {
	loc, n, coded := v.record(e, file, x)
	d := v.ds.readable()
	if loc == 0 || coded || d == nil {
		return false, nil
	}
	return v.readRecord(ctx, d, file, e, loc, func() error { return d.read(ctx, loc, n, p, off) })
}

// readRecord reads the record at loc by read, with the rules of readKept.
func (v *Volume) readRecord(ctx context.Context, d *disk, file int, e uint32, loc segment.Loc, read func() error) (bool, error) {
	err := read()
	switch {
	case err == nil:
		return true, nil
	case errors.Is(err, errHangs):
		v.ds.count.gaveUp.Add(1)
		return false, nil
	case ctx.Err() != nil && errors.Is(err, ctx.Err()):
		return false, err
	}
	if v.unplace(e, file, loc) {
		d.free(loc)
		switch {
		case errors.Is(err, segment.ErrGone): // its segment was dropped to make room
		case errors.Is(err, segment.ErrCorrupt):
			v.ds.count.corrupt.Add(1)
			v.c.log.Warn("corrupt record in the cache; the object is fetched again", "path", v.m.Path(file), "cause", err)
		default:
			d.failed("read", err, true)
		}
	}
	return false, nil
}

// Sample returns the whole file. The bytes are valid and do not change until release.
func (v *Volume) Sample(ctx context.Context, file int) (data []byte, release func(), err error) {
	size := v.m.Size(file)
	if size == 0 {
		return nil, func() {}, nil
	}
	if e := v.extent(file, 0); extentsOf(size) == 1 && (!v.onDisk(e) || v.c.ring.has(v.key(e)) || v.restores(e) > 0) {
		b, err := v.acquire(ctx, file, 0, int(size), false)
		if err != nil {
			return nil, nil, err
		}
		if b != nil {
			v.ds.count.readBytes.Add(size)
			return b.Bytes(), b.Release, nil
		}
		// It was kept in the meantime.
	}
	// Not as demand: its extents are fetched while it is held, and many such files together must leave memory for
	// that. Also, prefetched data may hold the memory that it waits for.
	const class = ForPrefetch
	if err := v.c.reserve(ctx, footprint(int(size)), class); err != nil {
		return nil, nil, err
	}
	b := newBuffer(v.c.ledger, int(size), class)
	if _, err := v.ReadAt(ctx, file, b.data, 0); err != nil {
		b.Release()
		return nil, nil, err
	}
	return b.Bytes(), b.Release, nil
}

// acquire returns the extent's buffer, of which the caller reads n bytes, with a reference for the caller, from the
// ring or a flight. It returns nil, nil if the extent can be read from the disk. The buffer may be coded if the caller
// takes that.
func (v *Volume) acquire(ctx context.Context, file, x, n int, takesCoded bool) (*Buffer, error) {
	e := v.extent(file, x)
	if b := v.fromRing(e, n, takesCoded); b != nil {
		return b, nil
	}
	v.mu.Lock()
	fl, flying := v.flights[e]
	var wait trace.Span
	if !flying {
		// Looked up again under the lock, in the order in which an extent moves: flight, ring, disk.
		if b := v.fromRing(e, n, takesCoded); b != nil {
			v.mu.Unlock()
			return b, nil
		}
		coded := v.restores(e)
		if v.onDisk(e) && (coded == 0 || takesCoded) {
			v.mu.Unlock()
			return nil, nil
		}
		if f, ok := v.failed[e]; ok && coded == 0 {
			if time.Now().Before(f.until) {
				v.mu.Unlock()
				return nil, f.err
			}
			delete(v.failed, e)
		}
		if !v.ds.enter(1) {
			v.mu.Unlock()
			return nil, ErrClosed
		}
		fl = v.launch(e, int(v.ExtentBytes(file, x)), nil, nil)
		fl.read, fl.coded, fl.takesCoded = int64(n), coded, takesCoded
		switch {
		case coded > 0 && v.onDisk(e):
			v.ds.count.keepHits.Add(1)
			v.ds.count.keptBytes.Add(int64(n))
		case coded > 0:
			v.ds.count.ringHits.Add(1)
		default:
			wait = v.waits(ctx, file, x, "miss")
			fl.by, fl.asks = wait, v.asks(file, x)
			v.ds.count.misses.Add(1)
		}
		delete(v.sparse, e)
		v.ds.crew.do(func() { v.fly(fl, file, x, e, nil) })
	} else {
		v.ds.count.joined.Add(1)
		fl.read += int64(n)
		fl.takesCoded = fl.takesCoded && takesCoded
		if fl.urgency != nil {
			fl.urgency.Raise()
		}
		if fl.buf != nil {
			fl.buf.Retain()
			v.mu.Unlock()
			return fl.buf, nil
		}
		wait = v.waits(ctx, file, x, "joined")
	}
	done := v.join(fl)
	v.mu.Unlock()
	if err := v.await(ctx, fl, done, wait); err != nil {
		return nil, err
	}
	if fl.err != nil && fl.group && mayBeAnothers(fl.err) {
		return v.acquire(ctx, file, x, n, takesCoded)
	}
	if fl.buf != nil && fl.buf.coded > 0 && !takesCoded { // to be restored
		fl.buf.Release()
		return v.acquire(ctx, file, x, n, false)
	}
	return fl.buf, fl.err
}

// fromRing is Cache.get, counted, of an extent or, if the caller takes that, its coded form.
func (v *Volume) fromRing(e uint32, n int, takesCoded bool) *Buffer {
	b := v.c.get(v.key(e), n)
	if b == nil && takesCoded {
		b = v.c.getCoded(v.key(e), n)
	}
	if b != nil {
		v.ds.count.ringHits.Add(1)
	}
	return b
}

// await waits for a flight. Its error is the context's.
func (v *Volume) await(ctx context.Context, fl *flight, done <-chan struct{}, wait trace.Span) (err error) {
	start := time.Now()
	select {
	case <-done:
		wait.End(fl.err)
	case <-ctx.Done():
		err = ctx.Err()
		wait.End(err)
		v.detach(fl)
	}
	if fl.coded == 0 { // otherwise it did not wait for the store
		v.ds.count.stallNanos.Add(int64(time.Since(start)))
	}
	return err
}

// join adds one waiter to a flight, and returns what to wait for. v.mu is held.
func (v *Volume) join(fl *flight) (done <-chan struct{}) {
	fl.waiters++
	if fl.done == nil {
		fl.done = make(chan struct{})
	}
	return fl.done
}

// detach removes one waiter from a flight.
func (v *Volume) detach(fl *flight) {
	v.mu.Lock()
	defer v.mu.Unlock()
	select {
	case <-fl.done: // landed in the same moment
		if fl.buf != nil {
			fl.buf.Release()
		}
	default:
		fl.waiters--
	}
}

// mayBeAnothers reports whether another file of the group may have caused a group's error.
func mayBeAnothers(err error) bool { return objstore.KindOf(err) != objstore.KindTransient }

// remember keeps a store's error for readers that ask again soon. v.mu is held.
func (v *Volume) remember(e uint32, err error) {
	var of *objstore.Error
	if !errors.As(err, &of) {
		return
	}
	if v.failed == nil || len(v.failed) >= mostFailures {
		v.failed = make(map[uint32]failure)
	}
	v.failed[e] = failure{err, time.Now().Add(failureTime)}
}

// waits begins the span of a reader that waits for a fetch.
func (v *Volume) waits(ctx context.Context, file, x int, area string) trace.Span {
	if !trace.On() {
		return trace.Span{}
	}
	_, span := trace.Start(ctx, "read.wait")
	span.Str("shoal.path", v.m.Path(file))
	span.Int("shoal.extent", int64(x))
	span.Str("shoal.area", area) // as in the metric shoal_reads_total
	return span
}

// Outcome is the result of a Prefetch.
type Outcome uint8

// The outcomes of Prefetch.
const (
	Started  Outcome = iota // done will be called
	Present                 // resident or on its way already
	NoMemory                // no memory now; OnFreed tells when to try again
	Closed                  // the cache is closing
)

// Prefetch starts to fetch an extent that nobody waits for yet, on account a, which may be nil. due is when a reader
// will need it, zero if unknown. It never blocks. done is called once after Started, from another goroutine.
func (v *Volume) Prefetch(a *Account, file, x int, due time.Time, done func(file int, err error)) Outcome {
	if v.Claim(a, file, x) {
		return Present
	}
	n := int(v.ExtentBytes(file, x))
	size := footprint(n)
	if !v.c.ledger.TryReserve(size, ForPrefetch) {
		return NoMemory
	}
	e := v.extent(file, x)
	v.mu.Lock()
	if v.claim(a, e) {
		v.mu.Unlock()
		v.c.ledger.Release(size, ForPrefetch)
		return Present
	}
	if !v.ds.enter(1) {
		v.mu.Unlock()
		v.c.ledger.Release(size, ForPrefetch)
		return Closed
	}
	fl := v.launch(e, n, a, objstore.NewUrgency(due))
	fl.asks, fl.takesCoded = v.asks(file, x), true
	v.mu.Unlock()
	v.ds.count.prefetched.Add(1)
	v.ds.crew.do(func() { v.fly(fl, file, x, e, done) })
	return Started
}

// launch makes a flight of n bytes; v.mu is held. A prefetch has an urgency, and its bytes are reserved already.
func (v *Volume) launch(e uint32, n int, a *Account, urgency *objstore.Urgency) *flight {
	fl := &flight{urgency: urgency, size: footprint(n), account: a, class: ForDemand}
	if urgency != nil {
		fl.class = ForPrefetch
		fl.funded.Store(true)
	}
	a.add(fl.size)
	v.flights[e] = fl
	return fl
}

// object returns where the file's bytes lie.
func (v *Volume) object(file int) (o objstore.Object, off int64) {
	if v.locate != nil {
		return v.locate.Locate(file)
	}
	return v.m.Object(file), 0
}

// named adds the file's name to a store's error, which names the object, if the file is packed.
func (v *Volume) named(file int, err error) error {
	if v.locate == nil || err == nil {
		return err
	}
	return fmt.Errorf("%s: %w", v.m.Path(file), err)
}

// fly fetches the extent of a flight, or restores it, and lands it.
func (v *Volume) fly(fl *flight, file, x int, e uint32, done func(file int, err error)) {
	defer v.ds.flights.Done()
	n := int(v.ExtentBytes(file, x))
	ctx := v.ds.ctx
	var buf *Buffer
	var err error
	if fl.urgency != nil {
		ctx = objstore.WithUrgency(ctx, fl.urgency)
	} else {
		ctx = trace.With(ctx, fl.by)
		err = v.c.reserve(ctx, restoring(n, fl.coded), fl.class)
	}
	if err == nil {
		fl.funded.Store(true)
		buf = newBuffer(v.c.ledger, n, fl.class)
		if !v.restore(fl, file, e, buf.data) {
			err = v.fetch(ctx, fl.asks, []Want{v.want(fl, file, x, buf)})
		}
		if err != nil {
			buf.Release()
			buf, err = nil, v.named(file, err)
		}
	}
	v.land(fl, file, x, e, buf, err)
	if done != nil {
		done(file, err)
	}
}

// land hands the fetched bytes to the waiters, and then finds a place for them. It takes over the reference to buf,
// which is nil if err is set.
func (v *Volume) land(fl *flight, file, x int, e uint32, buf *Buffer, err error) {
	if err != nil {
		if fl.urgency != nil {
			v.ds.count.prefetchErrors.Add(1)
		}
		v.mu.Lock()
		delete(v.flights, e)
		fl.account.add(-fl.size)
		fl.err = err
		if fl.waiters > 0 && (!fl.group || !mayBeAnothers(err)) {
			v.remember(e, err)
		}
		fl.tell()
		v.mu.Unlock()
		return
	}
	give := func() {
		fl.buf = buf
		buf.refs.Add(int32(fl.waiters))
		fl.tell()
	}
	if buf.coded > 0 {
		buf.data = buf.data[:buf.coded]
	} else { // The lock is taken twice, so that the waiters need not wait for it here.
		v.mu.Lock()
		give()
		v.mu.Unlock()
	}

	d := v.ds.disk.Load()
	write := d != nil && !d.noWrites.Load() && v.loc(e) == 0
	if write {
		write, _ = v.wanted(file, x)
	}
	v.mu.Lock()
	write = write && !v.retired
	done := fl.spent || v.retired || fl.account == nil && fl.read >= int64(len(buf.data))
	var replaced *Buffer
	if !done || fl.coded == 0 || v.loc(e) == 0 { // what was restored and read is on disk
		replaced = v.c.ring.put(v.key(e), buf, fl.account, fl.read, done, write)
	}
	if buf.coded > 0 {
		give() // now who restores it finds it in the ring
	}
	fl.account.add(-fl.size)
	if write {
		d.writer.add(v.queued(file, x, e)) // before the flight is gone: Flush looks there
	}
	delete(v.flights, e)
	v.mu.Unlock()
	buf.Release()
	if replaced != nil {
		replaced.Release()
	}
	if write {
		if d.noWrites.Load() { // set a moment ago: the sweep may have missed this entry
			v.c.ring.undirty(v.ds)
		}
	}
	v.c.relieve()
}

// queued describes an extent to the writer.
func (v *Volume) queued(file, x int, e uint32) queued {
	return queued{key: v.key(e), file: file, record: segment.Record{
		Dataset: v.ds.id, File: uint32(file), KeyHash: v.m.PathHash(file), ETag: v.m.ETag(file),
		ObjectSize: v.m.Size(file), Offset: int64(x) * ExtentSize, Length: int(v.ExtentBytes(file, x)),
	}}
}

// Unspent yields the files with an extent in memory that waits to be read, once for each such extent.
func (v *Volume) Unspent() iter.Seq[int] {
	return func(yield func(file int) bool) {
		for _, k := range v.c.ring.unspent(v) {
			if !yield(v.fileOf(k.extent)) {
				return
			}
		}
	}
}

// Spend says that the file was read, or is no longer wanted, and that no order that claimed it needs it: its staged
// extents may be recycled.
func (v *Volume) Spend(file int) {
	recycled := false
	for x := range v.Extents(file) {
		e := v.extent(file, x)
		v.mu.Lock()
		if fl, ok := v.flights[e]; ok {
			fl.assign(nil)
			fl.spent = true
		}
		v.mu.Unlock()
		recycled = v.c.ring.spend(v.key(e)) || recycled
	}
	if recycled {
		v.c.relieve()
		v.c.notifyFreed() // a prefetch may take spent bytes
	}
}
