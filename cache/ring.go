package cache

import (
	"cmp"
	"sync"
	"sync/atomic"
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
//	spent, not dirty   see below: it will be read again, though nobody knows when, or not soon
//	kept, not spent    furthest ahead first: the disk has it; it stays only to save a read
//	the rest           only for a reader who waits, and only what nobody reads just now: first what
//	                   is on no account and waits for the disk, the latest first; then, of the
//	                   account of the largest load, what is furthest ahead
//
// An entry that is kept and spent goes at once.
//
// What is spent is a cache, too. Without a known order (no accounts), what was read last stays. With one, each
// sample is read once an epoch, and what was read last is of no more use than any other; so what stays is a fixed
// random set, as on disk, which is not given up for what passes. Its members are the volume's lowest ranks
// (VolumeOptions.Rank): the set is as large as memory allows at the moment, without a threshold. Only the latest
// few, which programs open again, stay whatever their rank. And what other nodes are still to ask for stays longest,
// four times as much as those few: nodes that read the same are seldom in step.
type ring struct {
	cleanLimit int64 // most bytes of entries that are on disk too

	mu       sync.Mutex
	entries  map[extentKey]*entry
	accounts []*Account     // each with a list of what is staged for it
	spent    entries        // what was read last, oldest first
	rest     [ranks]entries // what was read before that, by rank, if there are accounts
	clean    entries        // kept, not spent
	awaited  entries        // by other nodes; otherwise like spent
	held     entries        // the rest, if on no account
	bytes    int64
	gone     *entry       // removed under the lock; their buffers are released when that ends
	idle     atomic.Int64 // bytes of spent, rest, clean and awaited
}

// ranks is how many ranks are told apart: what is cut off of a set is right to a 256th.
const ranks = 256

// extentKey names a piece of a volume.
type extentKey struct {
	v *Volume
	piece
}

// piece is an extent in one of its forms, or a granule of it: the extent's number, and below that a kind.
type piece uint64

// The kinds of pieces. Those between are granules, by their numbers and 1.
const (
	whole = 0   // the extent as it came
	coded = 255 // the coded form of a file
)

func (p piece) extent() uint32 { return uint32(p >> 8) }

func (p piece) kind() uint8 { return uint8(p) }

// off is where the piece begins in its extent.
func (p piece) off() int64 {
	if p.kind() == coded {
		return 0
	}
	return max(int64(p.kind())-1, 0) * granuleSize
}

// bit is the granule's in a word of all granules of its extent.
func (p piece) bit() uint64 { return 1 << (p.kind() - 1) }

// as is the same extent's piece of another kind.
func (k extentKey) as(kind uint8) extentKey { return extentKey{k.v, k.piece&^0xff | piece(kind)} }

// other is the extent's other form; of a granule, no piece.
func (k extentKey) other() extentKey { return extentKey{k.v, k.piece ^ coded} }

func (k extentKey) granule(g int) extentKey { return k.as(uint8(g + 1)) }

type entry struct {
	key                extentKey
	buf                *buffer // the ring's reference
	account            *Account
	spent, dirty, kept bool
	left               int64     // bytes that were not read yet; what is read twice counts twice
	touched            time.Time // when some were read last, if not all were
	in                 *entries  // the list that it is in
	next, prev         *entry    // in it, or in ring.gone
}

// entries is a list of entries, in the order in which they came, or are needed.
type entries struct {
	front, back *entry
	bytes       int64
	also        *atomic.Int64 // what counts them, too: ring.idle or Account.held; nil: nothing
}

// insert puts an entry before another one of the list; at the end if that is nil.
func (l *entries) insert(e, before *entry) {
	e.in, e.prev, e.next = l, l.back, before
	if before == nil {
		l.back = e
	} else {
		e.prev, before.prev = before.prev, e
	}
	if e.prev == nil {
		l.front = e
	} else {
		e.prev.next = e
	}
	l.count(e.buf.size)
}

func (l *entries) count(n int64) {
	l.bytes += n
	if l.also != nil {
		l.also.Add(n)
	}
}

// latestFree returns the last entry that is not being read and that only the ring refers to. Dropping any other entry
// frees nothing, and loses it if it waits for the disk.
func (l *entries) latestFree() *entry {
	e, now := l.back, time.Now()
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

// isAwaited reports whether other nodes are still to ask for the extent.
func (e *entry) isAwaited() bool {
	b := e.buf
	return b.lent != nil && b.lent.pays && b.lent == b.lent.of.phase.Load() &&
		int(b.asked.Load()) < (*e.key.v.peers.Load()).Nodes()-1
}

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
	l.count(-e.buf.size)
	e.in, e.next, e.prev = nil, nil, nil
}

func newRing(cleanLimit int64) *ring {
	r := &ring{entries: map[extentKey]*entry{}, cleanLimit: cleanLimit}
	r.spent.also, r.clean.also, r.awaited.also = &r.idle, &r.idle, &r.idle
	for i := range r.rest {
		r.rest[i].also = &r.idle
	}
	return r
}

// put adds the extent, of which some bytes were read already; the ring takes a reference. An existing entry stays.
func (r *ring) put(k extentKey, b *buffer, a *Account, read int64, spent, dirty bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, ok := r.entries[k]; ok {
		return
	}
	b.refs.Add(1)
	e := &entry{key: k, buf: b, account: a, spent: spent, dirty: dirty, left: int64(len(b.data)) - read}
	if read > 0 && e.left > 0 {
		e.touched = time.Now()
	}
	r.entries[k] = e
	if !k.isGranule() {
		k.v.inRing[k.extent()/32].Or(1 << (k.extent() % 32))
	}
	r.bytes += b.size
	r.file(e)
}

// file moves an entry to the list for its state, and on or off accounts. A kept or spent entry is on no account, and
// one that is both goes. r.mu is held.
func (r *ring) file(e *entry) {
	if e.account != nil && e.account.closed {
		e.account, e.spent = nil, e.spent || e.key.isGranule() // which only its account gives up
	}
	if e.spent || e.kept {
		e.account = nil
	}
	to := &r.held
	switch {
	case e.kept && e.spent:
		r.remove(e)
		return
	case e.kept:
		to = &r.clean
	case e.spent && !e.dirty && e.isAwaited():
		to = &r.awaited
	case e.spent && !e.dirty:
		to = &r.spent
	case e.account != nil:
		to = &e.account.staged
	}
	if e.in != to {
		e.unlist()
		to.insert(e, nil)
	}
}

// unlock ends what holds the lock, and releases what it has removed: the last release calls back into the ledger.
func (r *ring) unlock() {
	gone := r.gone
	r.gone = nil
	r.mu.Unlock()
	for ; gone != nil; gone = gone.next {
		gone.buf.Release()
	}
}

// remove takes an entry out, until unlock.
func (r *ring) remove(e *entry) {
	e.unlist()
	e.next, r.gone = r.gone, e
	delete(r.entries, e.key)
	if k := e.key; !k.isGranule() && r.entries[k.other()] == nil {
		k.v.inRing[k.extent()/32].And(^(uint32(1) << (k.extent() % 32)))
	}
	r.bytes -= e.buf.size
}

// maybe reports, without a lock, whether the extent is in the ring in some form. Of a granule it knows nothing.
func (k extentKey) maybe() bool {
	return k.isGranule() || k.v.inRing[k.extent()/32].Load()&(1<<(k.extent()%32)) != 0
}

func (k extentKey) isGranule() bool { return k.kind() != whole && k.kind() != coded }

// eachForm has do look at the entries of an extent in its forms, or of a granule, under the lock. It may remove them.
func (r *ring) eachForm(k extentKey, do func(e *entry)) {
	if !k.maybe() {
		return
	}
	r.mu.Lock()
	defer r.unlock()
	for _, k := range [...]extentKey{k, k.other()} {
		if e := r.entries[k]; e != nil {
			do(e)
		}
	}
}

// forms reports in which forms the ring has an extent.
func (r *ring) forms(k extentKey) (plain, isCoded bool) {
	r.eachForm(k, func(e *entry) {
		plain, isCoded = plain || e.key == k, isCoded || e.key != k
	})
	return plain, isCoded
}

// get returns a piece, of which the caller reads n bytes, with a reference; or nil. freed: it is spent now.
func (r *ring) get(k extentKey, n int) (b *buffer, freed bool) {
	if !k.maybe() {
		return nil, false
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	e, ok := r.entries[k]
	if !ok {
		return nil, false
	}
	e.buf.refs.Add(1)
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

// getDirty is get for the writer; nil also if the entry is not to be written.
func (r *ring) getDirty(k extentKey) *buffer {
	r.mu.Lock()
	defer r.mu.Unlock()
	e, ok := r.entries[k]
	if !ok || !e.dirty {
		return nil
	}
	e.buf.refs.Add(1)
	return e.buf
}

// claim makes the extent unspent, because the owner of account a will read it, and puts it on that account if it was
// spent or a has less load; or, if a reads it next, in any case, before what a has prefetched. It reports whether the
// extent is there, in some form.
func (r *ring) claim(k extentKey, a *Account, next bool) (ok bool) {
	r.eachForm(k, func(e *entry) {
		ok = true
		if (e.account != a || e.spent) && !e.kept && (next || e.spent || a.takes(e.account, e.buf.size)) {
			e.spent, e.account, e.left = false, a, int64(len(e.buf.data)) // its reader has all of it to read
			r.file(e)
			if to := e.in; next && to.front != e {
				e.unlist()
				to.insert(e, to.front)
			}
		}
	})
	return ok
}

// each has do look at every entry, under the lock. It may remove it.
func (r *ring) each(do func(e *entry)) {
	r.mu.Lock()
	defer r.unlock()
	for _, e := range r.entries {
		do(e)
	}
}

// written notes that the disk has accepted the extent, or declined it.
func (r *ring) written(k extentKey, kept bool) {
	r.mu.Lock()
	defer r.unlock()
	e, ok := r.entries[k]
	if !ok {
		return
	}
	e.dirty, e.kept = false, kept
	if kept && r.clean.bytes+e.buf.size > r.cleanLimit {
		r.remove(e)
	} else {
		r.file(e)
	}
}

// mark makes a dataset's extents that the disk does not have dirty, or no longer so, and returns those that it changed.
// Granules that were not written when they came are not written later.
func (r *ring) mark(ds *dataset, dirty bool) (keys []extentKey) {
	r.each(func(e *entry) {
		if e.key.v.ds == ds && e.dirty != dirty && !e.kept && (!dirty || !e.key.isGranule()) {
			e.dirty = dirty
			r.file(e)
			keys = append(keys, e.key)
		}
	})
	return keys
}

// spend marks the extent as read, in each form. It reports whether that made memory reclaimable.
func (r *ring) spend(k extentKey) (free bool) {
	r.eachForm(k, func(e *entry) {
		if !e.spent {
			e.spent = true
			r.file(e)
			free = free || e.kept || !e.dirty
		}
	})
	return free
}

// take removes a piece, if it is on account from; nil: on any, or none. It returns how many bytes that freed.
func (r *ring) take(k extentKey, from *Account) int64 {
	r.mu.Lock()
	defer r.unlock()
	e := r.entries[k]
	if e == nil || from != nil && e.in != &from.staged {
		return 0
	}
	r.remove(e)
	return e.buf.size
}

// least returns what may go first, or nil. The latest few bytes of spent entries have no rank, and go only with all.
func (r *ring) least(few int64, all bool) *entry {
	for e := r.awaited.front; e != nil && (r.awaited.bytes > 4*few || !e.isAwaited()); e = r.awaited.front {
		e.unlist()
		r.spent.insert(e, nil)
	}
	for len(r.accounts) > 0 && r.spent.bytes > few {
		e := r.spent.front
		e.unlist()
		r.rest[e.key.rank()].insert(e, nil)
	}
	if r.spent.bytes+r.clean.bytes+r.awaited.bytes < r.idle.Load() {
		for i := len(r.rest) - 1; ; i-- {
			if e := r.rest[i].front; e != nil {
				return e
			}
		}
	}
	if e := r.spent.front; e != nil && (all || r.spent.bytes > few) {
		return e
	}
	return cmp.Or(r.clean.back, r.awaited.front)
}

func (k extentKey) rank() uint8 {
	if k.v.rankOf == nil {
		return 0
	}
	return k.v.rankOf(k.v.Numbered(int(k.extent())))
}

// reclaim drops entries until need bytes are freed or none is left that may go. It leaves the latest few bytes of
// spent entries, unless all may go. Extents that are nowhere else go only if hard is set; those lost before they
// were read are returned.
func (r *ring) reclaim(need int64, few int64, all, hard bool) (lost []extentKey) {
	r.mu.Lock()
	defer r.unlock()
	for need > 0 {
		e := r.least(few, all)
		if e == nil && hard {
			if e = r.held.latestFree(); e == nil {
				if a := r.mostLoaded(); a != nil {
					e = a.staged.latestFree()
				}
			}
		}
		if e == nil {
			break
		}
		if !e.spent && !e.kept {
			lost = append(lost, e.key)
		}
		r.remove(e)
		need -= e.buf.size
	}
	return lost
}

// drop removes the entries of which gone says so; all if it is nil.
func (r *ring) drop(gone func(k extentKey) bool) {
	r.each(func(e *entry) {
		if gone == nil || gone(e.key) {
			r.remove(e)
		}
	})
}

func (r *ring) used() (entries int, bytes int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.entries), r.bytes
}
