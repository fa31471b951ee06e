package cache

import (
	"sync"
	"time"
)

// ring holds extents in memory, within the ledger: extents that wait to be written to disk, and extents that were
// fetched for a known order but do not fit in the kept set.
//
// An entry is spent once the order that fetched it has read it. An entry on no account was fetched by a reader; it is
// spent when all its bytes were read. For other entries, and for files that are not read to the end, Spend is called.
// An entry is dirty while the disk may still take it, and kept once the disk has it. When memory is needed, these may
// go:
//
//	spent, not dirty   oldest first: nobody needs it, unless it is opened again
//	kept, not spent    furthest ahead first: the disk has it; it stays only to save a read
//	the rest           only for a reader who waits, and only what nobody reads just now: first what
//	                   is on no account and waits for the disk, the latest first; then, of the
//	                   account of the largest load, what is furthest ahead
//
// An entry that is kept and spent goes at once.
type ring struct {
	cleanLimit int64 // most bytes of entries that are on disk too

	mu       sync.Mutex
	entries  map[extentKey]*entry
	accounts []*Account // each with a list of what is staged for it
	spent    entries    // oldest first
	clean    entries    // kept, not spent
	held     entries    // the rest, if on no account
	bytes    int64
}

// extentKey names an extent, or one granule of it.
type extentKey struct {
	v       *Volume
	extent  uint32
	granule uint8 // its number + 1; 0: the whole extent
}

type entry struct {
	key                extentKey
	buf                *Buffer // the ring's reference
	account            *Account
	spent, dirty, kept bool
	left               int64     // bytes that were not read yet; what is read twice counts twice
	touched            time.Time // when some were read last, if not all were
	in                 *entries  // the list that it is in
	next, prev         *entry    // in it
}

// entries is a list of entries, in the order in which they came, or are needed.
type entries struct {
	front, back *entry
	bytes       int64
	account     *Account // that the entries' bytes are on; nil: on none
}

func (l *entries) push(e *entry) {
	e.in, e.prev, e.next = l, l.back, nil
	if l.back == nil {
		l.front = e
	} else {
		l.back.next = e
	}
	l.back = e
	l.bytes += e.buf.size
	l.account.add(e.buf.size)
}

// pushFront is push for an entry that is needed before all others of the list.
func (l *entries) pushFront(e *entry) {
	e.in, e.prev, e.next = l, nil, l.front
	if l.front == nil {
		l.back = e
	} else {
		l.front.prev = e
	}
	l.front = e
	l.bytes += e.buf.size
	l.account.add(e.buf.size)
}

// latestFree returns the last entry that is not being read and that only the ring refers to. Dropping any other entry
// frees nothing, and loses it if it waits for the disk.
func (l *entries) latestFree(now time.Time) *entry {
	e := l.back
	for e != nil && (e.buf.refs.Load() > 1 || e.beingRead(now)) {
		e = e.prev
	}
	return e
}

// betweenPieces is how long a reader may take between two pieces of an extent: longer than an active reader takes,
// and short compared with repeating a request.
const betweenPieces = 100 * time.Millisecond

// beingRead reports whether the extent is being read piece by piece, as the kernel does. Dropping it before the last
// piece would mean fetching all of it again: readers that together exceed the memory would do little else.
func (e *entry) beingRead(now time.Time) bool {
	return e.left > 0 && !e.touched.IsZero() && now.Sub(e.touched) < betweenPieces
}

// unlist takes the entry out of its list, if it is in one.
func (e *entry) unlist() {
	l := e.in
	if l == nil {
		return
	}
	if e.prev == nil {
		l.front = e.next
	} else {
		e.prev.next = e.next
	}
	if e.next == nil {
		l.back = e.prev
	} else {
		e.next.prev = e.prev
	}
	l.bytes -= e.buf.size
	l.account.add(-e.buf.size)
	e.in, e.next, e.prev = nil, nil, nil
}

func newRing(cleanLimit int64) *ring {
	return &ring{entries: map[extentKey]*entry{}, cleanLimit: cleanLimit}
}

// put adds the extent, of which some bytes were read already; the ring takes its own reference. An existing entry
// stays, but a file takes the place of its coded form, which the caller is to release.
func (r *ring) put(k extentKey, b *Buffer, a *Account, read int64, spent, dirty bool) (replaced *Buffer) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if e, ok := r.entries[k]; ok {
		if e.buf.coded == 0 || b.coded > 0 {
			return nil
		}
		b.Retain()
		replaced, e.buf = e.buf, b // they take as much memory
		if e.account == nil {
			e.account = a // claimed while it was restored
		}
		e.left, e.touched = int64(len(b.data))-read, time.Now()
		e.spent, e.dirty = spent && e.account == nil && !e.kept, e.dirty || dirty
		r.file(e)
		return replaced
	}
	b.Retain()
	e := &entry{key: k, buf: b, account: a, spent: spent, dirty: dirty, left: int64(len(b.data)) - read}
	if read > 0 && e.left > 0 {
		e.touched = time.Now()
	}
	r.entries[k] = e
	if k.granule == 0 {
		k.v.inRing[k.extent/32].Or(1 << (k.extent % 32))
	}
	r.bytes += b.size
	r.file(e)
	return nil
}

// file moves an entry to the list for its state, and on or off accounts. A kept or spent entry is on no account. r.mu
// is held; the entry is not both kept and spent.
func (r *ring) file(e *entry) { r.fileBy(e, (*entries).push) }

func (r *ring) fileBy(e *entry, push func(*entries, *entry)) {
	if e.spent || e.kept || e.account != nil && e.account.closed {
		e.account = nil
	}
	to := &r.held
	switch {
	case e.kept:
		to = &r.clean
	case e.spent && !e.dirty:
		to = &r.spent
	case e.account != nil:
		to = &e.account.staged
	}
	if e.in == to {
		return
	}
	e.unlist()
	push(to, e)
}

// remove takes an entry out. The caller releases its buffer outside the lock, since the last release calls back into
// the ledger.
func (r *ring) remove(e *entry) *Buffer {
	e.unlist()
	delete(r.entries, e.key)
	if e.key.granule == 0 {
		e.key.v.inRing[e.key.extent/32].And(^(uint32(1) << (e.key.extent % 32)))
	}
	r.bytes -= e.buf.size
	return e.buf
}

// maybe reports, without a lock, whether the extent is in the ring. A caller that looks at flights, ring and disk in
// this order misses nothing: an extent is in its next place before it leaves the last. Of a granule it knows nothing.
func (k extentKey) maybe() bool {
	return k.granule > 0 || k.v.inRing[k.extent/32].Load()&(1<<(k.extent%32)) != 0
}

// get returns the extent, of which the caller reads n bytes, with a reference for the caller; or nil, also if the entry is
// coded and the caller wants it as it came, or the other way round. freed says that the extent is now spent.
func (r *ring) get(k extentKey, n int, coded bool) (b *Buffer, freed bool) {
	if !k.maybe() {
		return nil, false
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	e, ok := r.entries[k]
	if !ok || (e.buf.coded > 0) != coded {
		return nil, false
	}
	e.buf.Retain()
	switch e.left -= int64(n); {
	case e.left > 0:
		e.touched = time.Now()
	case e.account == nil && !e.spent && !e.kept:
		e.spent = true
		r.file(e)
		freed = !e.dirty
	}
	return e.buf, freed
}

// coded returns the length of the coded form that the ring has of a file; 0 if it has none.
func (r *ring) coded(k extentKey) int {
	if !k.maybe() {
		return 0
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if e, ok := r.entries[k]; ok {
		return e.buf.coded
	}
	return 0
}

// getDirty is get for the writer; nil also if the entry is not to be written.
func (r *ring) getDirty(k extentKey) *Buffer {
	r.mu.Lock()
	defer r.mu.Unlock()
	e, ok := r.entries[k]
	if !ok || !e.dirty {
		return nil
	}
	e.buf.Retain()
	return e.buf
}

func (r *ring) has(k extentKey) bool { return k.maybe() }

// claim makes the extent unspent, because the owner of account a will read it again. It reports whether the extent is
// there.
func (r *ring) claim(k extentKey, a *Account) bool {
	return r.assign(k, func(e *entry) bool { return e.spent || a.takes(e.account, e.buf.size) }, a, (*entries).push)
}

// hand puts the extent on account a, whose owner reads it next, before what it has prefetched.
func (r *ring) hand(k extentKey, a *Account) {
	r.assign(k, func(*entry) bool { return true }, a, (*entries).pushFront)
}

// assign puts the extent on account a, unspent, if it is there and when returns true. It reports whether it is there.
func (r *ring) assign(k extentKey, when func(e *entry) bool, a *Account, push func(*entries, *entry)) bool {
	if !k.maybe() {
		return false
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	e, ok := r.entries[k]
	if ok && (e.account != a || e.spent) && !e.kept && when(e) {
		e.spent, e.account, e.left = false, a, int64(len(e.buf.data)) // its reader has all of it to read
		r.fileBy(e, push)
	}
	return ok
}

// unspent returns the extents of v that wait to be read.
func (r *ring) unspent(v *Volume) (keys []extentKey) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for k, e := range r.entries {
		if k.v == v && !e.spent {
			keys = append(keys, k)
		}
	}
	return keys
}

// written notes that the disk has accepted the extent, or declined it.
func (r *ring) written(k extentKey, kept bool) {
	var drop *Buffer
	r.mu.Lock()
	if e, ok := r.entries[k]; ok {
		e.dirty, e.kept = false, kept
		if kept && (e.spent || r.clean.bytes+e.buf.size > r.cleanLimit) {
			drop = r.remove(e)
		} else {
			r.file(e)
		}
	}
	r.mu.Unlock()
	if drop != nil {
		drop.Release()
	}
}

// redirty queues a dataset's extents that the disk does not have, and returns them.
func (r *ring) redirty(ds *dataset) (keys []extentKey) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for k, e := range r.entries {
		if k.v.ds == ds && k.granule == 0 && !e.dirty && !e.kept {
			e.dirty = true
			r.file(e)
			keys = append(keys, k)
		}
	}
	return keys
}

// spend marks the extent as read. It reports whether that made memory reclaimable.
func (r *ring) spend(k extentKey) bool {
	if !k.maybe() {
		return false
	}
	r.mu.Lock()
	e, ok := r.entries[k]
	if !ok || e.spent {
		r.mu.Unlock()
		return false
	}
	e.spent = true
	if e.kept {
		drop := r.remove(e)
		r.mu.Unlock()
		drop.Release()
		return true
	}
	r.file(e)
	free := !e.dirty
	r.mu.Unlock()
	return free
}

// reclaim drops entries until need bytes are freed or none is left that may go. It leaves the latest spare bytes of
// spent entries. Extents that are nowhere else go only if hard is set; those lost before they were read are returned.
func (r *ring) reclaim(need int64, hard bool, spare int64) (lost []extentKey) {
	var drop []*Buffer
	var now time.Time
	if hard {
		now = time.Now()
	}
	r.mu.Lock()
	for need > 0 {
		e := r.spent.front
		if r.spent.bytes <= spare {
			e = r.clean.back
		}
		if e == nil && hard {
			if e = r.held.latestFree(now); e == nil {
				if a := r.mostLoaded(); a != nil {
					e = a.staged.latestFree(now)
				}
			}
		}
		if e == nil {
			break
		}
		if !e.spent && !e.kept {
			lost = append(lost, e.key)
		}
		b := r.remove(e)
		need -= b.size
		drop = append(drop, b)
	}
	r.mu.Unlock()
	for _, b := range drop {
		b.Release()
	}
	return lost
}

// undirty cancels the pending writes of a dataset, because its disk is in trouble.
func (r *ring) undirty(ds *dataset) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for k, e := range r.entries {
		if e.dirty && k.v.ds == ds {
			e.dirty = false
			r.file(e)
		}
	}
}

// drop removes every entry of a dataset; of all if ds is nil.
func (r *ring) drop(ds *dataset) {
	r.dropIf(func(k extentKey) bool { return ds == nil || k.v.ds == ds })
}

// dropVolume removes every entry of one version.
func (r *ring) dropVolume(v *Volume) { r.dropIf(func(k extentKey) bool { return k.v == v }) }

func (r *ring) dropIf(gone func(k extentKey) bool) {
	var bufs []*Buffer
	r.mu.Lock()
	for k, e := range r.entries {
		if gone(k) {
			bufs = append(bufs, r.remove(e))
		}
	}
	r.mu.Unlock()
	for _, b := range bufs {
		b.Release()
	}
}

// idle returns the bytes that reclaim can free at any time, without the latest spare bytes of spent entries.
func (r *ring) idle(spare int64) int64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return max(r.spent.bytes-spare, 0) + r.clean.bytes
}

func (r *ring) used() (entries int, bytes int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.entries), r.bytes
}
