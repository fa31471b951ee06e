package cache

import (
	"context"
	"encoding/binary"
	"errors"
	"sort"
	"sync"
	"sync/atomic"
	"time"

	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/cache/segment"
)

// Volume is one version of one dataset, read through the cache. It costs 8 bytes of memory an
// extent. Safe for concurrent use.
type Volume struct {
	c       *Cache
	m       *catalog.Manifest
	store   objstore.Reader
	dataset [16]byte

	first []uint32        // number of each file's first extent; nil when no file has more than one
	locs  []atomic.Uint64 // by extent: where the kept record is, 0 = not kept
	kept  atomic.Int64    // extents kept

	index map[uint64]int32 // while records are adopted: first 8 bytes of a path's hash -> file

	mu      sync.Mutex
	flights map[uint32]*flight
	retired bool
}

// flight is one fetch and those who wait for it.
type flight struct {
	done    chan struct{} // closed when buf or err is set
	buf     *Buffer       // the flight's own reference, until it is out of the map
	err     error
	waiters int               // readers who get a reference when it lands
	spent   bool              // nobody will want it any more once those who wait have it
	urgency *objstore.Urgency // of a prefetch: raised when a reader joins
}

// NewVolume adds a dataset to the cache. dataset names the source, not its version: records of an
// older version whose ETag is still right stay valid.
func (c *Cache) NewVolume(m *catalog.Manifest, dataset [16]byte, store objstore.Reader) *Volume {
	v := &Volume{c: c, m: m, store: store, dataset: dataset, flights: map[uint32]*flight{}}
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
	v.locs = make([]atomic.Uint64, extents)
	c.mu.Lock()
	c.volumes = append(c.volumes, v)
	c.mu.Unlock()
	return v
}

// Manifest returns the version that the volume serves.
func (v *Volume) Manifest() *catalog.Manifest { return v.m }

func extentsOf(size int64) int { return int((size + ExtentSize - 1) / ExtentSize) }

// Extents implements prefetch.Sizes over file numbers.
func (v *Volume) Extents(file int) int { return extentsOf(v.m.Size(file)) }

// ExtentBytes implements prefetch.Sizes over file numbers.
func (v *Volume) ExtentBytes(file, extent int) int64 {
	return min(v.m.Size(file)-int64(extent)*ExtentSize, ExtentSize)
}

func (v *Volume) extent(file, extent int) uint32 {
	if v.first == nil {
		return uint32(file)
	}
	return v.first[file] + uint32(extent)
}

// adopt makes a record found on disk resident, if it is still what the manifest names.
func (v *Volume) adopt(rec segment.Record, loc segment.Loc) bool {
	if v.index == nil {
		v.index = make(map[uint64]int32, v.m.Len())
		for f := range v.m.Len() {
			h := v.m.PathHash(f)
			v.index[binary.LittleEndian.Uint64(h[:])] = int32(f)
		}
	}
	f, ok := v.index[binary.LittleEndian.Uint64(rec.KeyHash[:])]
	file := int(f)
	if !ok || v.m.PathHash(file) != rec.KeyHash || v.m.ETag(file) != rec.ETag || v.m.Size(file) != rec.ObjectSize {
		return false
	}
	ext := int(rec.Offset / ExtentSize)
	if rec.Offset%ExtentSize != 0 || ext >= v.Extents(file) || int64(rec.Length) != v.ExtentBytes(file, ext) {
		return false
	}
	if !v.locs[v.extent(file, ext)].CompareAndSwap(0, uint64(loc)) {
		return false // the same extent twice
	}
	v.kept.Add(1)
	return true
}

// Inherit takes over what an older version of the same dataset has kept and what is unchanged. The
// records of files that changed or vanished are freed.
func (v *Volume) Inherit(old *Volume) {
	for of := range old.m.Len() {
		node, ok := v.m.Find(old.m.Path(of))
		same := ok && !node.IsDir && v.m.ETag(node.Index) == old.m.ETag(of) && v.m.Size(node.Index) == old.m.Size(of)
		for x := range old.Extents(of) {
			loc := old.locs[old.extent(of, x)].Load()
			switch {
			case loc == 0:
			case same:
				if v.locs[v.extent(node.Index, x)].CompareAndSwap(0, loc) {
					v.kept.Add(1)
				}
			case v.c.disk != nil:
				old.locs[old.extent(of, x)].Store(0)
				v.c.free(segment.Loc(loc))
			}
		}
	}
}

// forget drops the places of records in a segment that is gone.
func (v *Volume) forget(id uint32) {
	for e := range v.locs {
		if loc := v.locs[e].Load(); loc != 0 && segment.Loc(loc).Segment() == id && v.locs[e].CompareAndSwap(loc, 0) {
			v.kept.Add(-1)
		}
	}
}

// Retire takes the volume out of the cache: it still answers readers that have it open, but keeps
// nothing new.
func (v *Volume) Retire() {
	v.c.mu.Lock()
	for i, w := range v.c.volumes {
		if w == v {
			v.c.volumes = append(v.c.volumes[:i:i], v.c.volumes[i+1:]...)
			break
		}
	}
	v.c.mu.Unlock()
	v.mu.Lock()
	v.retired = true
	v.mu.Unlock()
	v.c.ring.drop(v)
}

// Kept returns how many of the volume's extents are on disk, and how many it has.
func (v *Volume) Kept() (kept, extents int) { return int(v.kept.Load()), len(v.locs) }

// fileOf returns the file that an extent belongs to.
func (v *Volume) fileOf(e uint32) int {
	if v.first == nil {
		return int(e)
	}
	return sort.Search(v.m.Len(), func(f int) bool { return v.first[f+1] > e })
}

// Claim reports whether the extent is kept, staged, or on its way. What is staged then stays staged
// until it is spent, although it may have been spent before.
func (v *Volume) Claim(file, extent int) bool {
	e := v.extent(file, extent)
	if v.locs[e].Load() != 0 {
		return true
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.claim(e)
}

// claim is Claim with v.mu held. It looks in the order in which an extent moves on, so that it misses
// none on its way.
func (v *Volume) claim(e uint32) bool {
	if fl, ok := v.flights[e]; ok {
		fl.spent = false
		return true
	}
	return v.c.ring.claim(extentKey{v, e}) || v.locs[e].Load() != 0
}

// Staged reports whether the extent can be read without waiting.
func (v *Volume) Staged(file, extent int) bool {
	e := v.extent(file, extent)
	return v.locs[e].Load() != 0 || v.c.ring.has(extentKey{v, e})
}

// ReadAt fills p from the file's offset off; fewer bytes only at the end of the file. When ctx ends
// the reader leaves, while the fetch goes on.
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
		if err := v.readExtent(ctx, file, x, part, in); err != nil {
			return n, err
		}
		n += len(part)
	}
	return len(p), nil
}

func (v *Volume) readExtent(ctx context.Context, file, x int, p []byte, off int64) error {
	v.c.count.reads.Add(1)
	if b := v.c.ring.get(extentKey{v, v.extent(file, x)}); b != nil {
		v.c.count.ringHits.Add(1)
		copy(p, b.Bytes()[off:])
		b.Release()
		return nil
	}
	if v.readKept(file, x, p, off) {
		return nil
	}
	b, err := v.acquire(ctx, file, x)
	if err != nil {
		return err
	}
	if b == nil { // it was kept in the meantime
		return v.readExtent(ctx, file, x, p, off)
	}
	copy(p, b.Bytes()[off:])
	b.Release()
	return nil
}

// readKept reads from the kept set. A record that cannot be read is forgotten, and so fetched again.
func (v *Volume) readKept(file, x int, p []byte, off int64) bool {
	e := v.extent(file, x)
	loc := v.locs[e].Load()
	if loc == 0 {
		return false
	}
	err := v.c.disk.ReadAt(segment.Loc(loc), int(v.ExtentBytes(file, x)), p, off)
	if err == nil {
		v.c.count.keepHits.Add(1)
		return true
	}
	if v.locs[e].CompareAndSwap(loc, 0) {
		v.kept.Add(-1)
		v.c.free(segment.Loc(loc))
		switch {
		case errors.Is(err, segment.ErrGone): // its segment was dropped to make room
		case errors.Is(err, segment.ErrCorrupt):
			v.c.count.corrupt.Add(1)
			v.c.log.Warn("corrupt record in the cache; the object is fetched again", "path", v.m.Path(file), "cause", err)
		default:
			v.c.diskFailed("read", err)
		}
	}
	return false
}

// Sample returns the whole file. The bytes are valid, and nobody writes to them, until release.
func (v *Volume) Sample(ctx context.Context, file int) (data []byte, release func(), err error) {
	size := v.m.Size(file)
	if size == 0 {
		return nil, func() {}, nil
	}
	if e := v.extent(file, 0); extentsOf(size) == 1 && (v.locs[e].Load() == 0 || v.c.ring.has(extentKey{v, e})) {
		v.c.count.reads.Add(1)
		b, err := v.acquire(ctx, file, 0)
		if err != nil {
			return nil, nil, err
		}
		if b != nil {
			return b.Bytes(), b.Release, nil
		}
		v.c.count.reads.Add(-1) // it was kept in the meantime
	}
	// Not as demand: while it is held its extents are fetched, and many such files together must
	// leave memory for that. And what it waits for may be held by what was fetched ahead.
	const class = ForPrefetch
	if n := footprint(int(size)); !v.c.ledger.TryReserve(n, class) {
		v.c.evict(n)
		if err := v.c.ledger.Reserve(ctx, n, class); err != nil {
			return nil, nil, err
		}
	}
	b := newBuffer(v.c.ledger, int(size), class)
	if _, err := v.ReadAt(ctx, file, b.data, 0); err != nil {
		b.Release()
		return nil, nil, err
	}
	return b.Bytes(), b.Release, nil
}

// acquire returns the extent's buffer with a reference for the caller, from the ring or a flight. It
// returns nil, nil when the extent was found kept.
func (v *Volume) acquire(ctx context.Context, file, x int) (*Buffer, error) {
	e := v.extent(file, x)
	k := extentKey{v, e}
	if b := v.c.ring.get(k); b != nil {
		v.c.count.ringHits.Add(1)
		return b, nil
	}
	v.mu.Lock()
	fl, flying := v.flights[e]
	if !flying {
		// Looked up again under the lock, in the order in which an extent moves on: flight, ring, disk.
		if b := v.c.ring.get(k); b != nil {
			v.mu.Unlock()
			v.c.count.ringHits.Add(1)
			return b, nil
		}
		if v.locs[e].Load() != 0 {
			v.mu.Unlock()
			return nil, nil
		}
		var err error
		if fl, err = v.launch(file, x, e, nil, nil); err != nil {
			v.mu.Unlock()
			return nil, err
		}
		v.c.count.misses.Add(1)
	} else {
		v.c.count.joined.Add(1)
		if fl.urgency != nil {
			fl.urgency.Raise()
		}
		if fl.buf != nil {
			fl.buf.Retain()
			v.mu.Unlock()
			return fl.buf, nil
		}
	}
	fl.waiters++
	v.mu.Unlock()

	start := time.Now()
	defer func() { v.c.count.stallNanos.Add(int64(time.Since(start))) }()
	select {
	case <-fl.done:
		return fl.buf, fl.err
	case <-ctx.Done():
	}
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
	return nil, ctx.Err()
}

// Outcome is what became of a wish to prefetch.
type Outcome uint8

// The outcomes of Prefetch.
const (
	Started  Outcome = iota // done will be called
	Present                 // resident or on its way already
	NoMemory                // no bytes to be had now; OnFreed tells when to try again
	Closed                  // the cache is closing
)

// Prefetch starts to fetch an extent that nobody waits for. It never blocks. done is called once
// after Started, from another goroutine.
func (v *Volume) Prefetch(file, x int, done func(error)) Outcome {
	if v.Claim(file, x) {
		return Present
	}
	size := footprint(int(v.ExtentBytes(file, x)))
	if !v.c.ledger.TryReserve(size, ForPrefetch) {
		return NoMemory
	}
	e := v.extent(file, x)
	v.mu.Lock()
	if v.claim(e) {
		v.mu.Unlock()
		v.c.ledger.Release(size, ForPrefetch)
		return Present
	}
	_, err := v.launch(file, x, e, new(objstore.Urgency), done)
	v.mu.Unlock()
	if err != nil {
		v.c.ledger.Release(size, ForPrefetch)
		return Closed
	}
	v.c.count.prefetched.Add(1)
	return Started
}

// launch starts a flight; v.mu is held. A prefetch has an urgency, and its bytes are reserved already.
func (v *Volume) launch(file, x int, e uint32, urgency *objstore.Urgency, done func(error)) (*flight, error) {
	v.c.mu.Lock()
	if v.c.closed {
		v.c.mu.Unlock()
		return nil, context.Canceled
	}
	v.c.wg.Add(1)
	v.c.mu.Unlock()
	fl := &flight{done: make(chan struct{}), urgency: urgency, spent: urgency == nil}
	v.flights[e] = fl
	go func() {
		defer v.c.wg.Done()
		err := v.fly(fl, file, x, e)
		if err != nil && urgency != nil {
			v.c.count.prefetchErrors.Add(1)
		}
		if done != nil {
			done(err)
		}
	}()
	return fl, nil
}

// fly fetches the extent, hands it to those who wait, and then finds it a place.
func (v *Volume) fly(fl *flight, file, x int, e uint32) error {
	n := int(v.ExtentBytes(file, x))
	demand := fl.urgency == nil
	ctx, class := v.c.ctx, ForPrefetch
	var buf *Buffer
	var err error
	if !demand {
		ctx = objstore.WithUrgency(ctx, fl.urgency)
	} else {
		class = ForDemand
		// The reader's wait may be for bytes that prefetching holds: take them back.
		if size := footprint(n); !v.c.ledger.TryReserve(size, class) {
			v.c.evict(size)
			err = v.c.ledger.Reserve(ctx, size, class)
		}
	}
	if err == nil {
		buf = newBuffer(v.c.ledger, n, class)
		if err = v.store.ReadAt(ctx, v.m.Object(file), buf.data, int64(x)*ExtentSize); err != nil {
			buf.Release()
			buf = nil
		}
	}

	v.mu.Lock()
	if err != nil {
		delete(v.flights, e)
		fl.err = err
		close(fl.done)
		v.mu.Unlock()
		return err
	}
	fl.buf = buf
	buf.refs.Add(int32(fl.waiters))
	close(fl.done)
	v.mu.Unlock()

	write := v.c.writer != nil && v.c.diskUsable()
	v.mu.Lock()
	write = write && !v.retired
	v.c.ring.put(extentKey{v, e}, buf, fl.spent || v.retired, write)
	delete(v.flights, e)
	v.mu.Unlock()
	buf.Release()
	if write {
		v.c.writer.add(extentKey{v, e}, segment.Record{
			Dataset: v.dataset, KeyHash: v.m.PathHash(file), ETag: v.m.ETag(file),
			ObjectSize: v.m.Size(file), Offset: int64(x) * ExtentSize, Length: n,
		})
	}
	v.c.relieve()
	return nil
}

// Sweep spends what is staged of files that nobody wants: fetched ahead for an order that was given
// up, it would take memory for good.
func (v *Volume) Sweep(wanted func(file int) bool) {
	for _, k := range v.c.ring.unspent(v) {
		if file := v.fileOf(k.extent); !wanted(file) {
			v.Spend(file)
		}
	}
}

// Spend says that the file was read, or is not wanted any more, and that no order that was claimed
// for asks for it: what is staged of it may be recycled.
func (v *Volume) Spend(file int) {
	recycled := false
	for x := range v.Extents(file) {
		e := v.extent(file, x)
		v.mu.Lock()
		if fl, ok := v.flights[e]; ok {
			fl.spent = true
		}
		v.mu.Unlock()
		recycled = v.c.ring.spend(extentKey{v, e}) || recycled
	}
	if recycled {
		v.c.relieve()
		v.c.notifyFreed() // spent bytes are as good as free to a prefetch
	}
}
