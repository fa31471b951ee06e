package cache

import (
	"container/list"
	"sync"
)

// ring holds extents in memory, within the ledger: those that wait to be written to disk, and the
// passing ones, which were fetched for a known order and find no place in the kept set.
//
// An entry is spent once it was read: useless to the order that brought it. It is dirty while the
// disk may still take it, and kept once the disk has it. What of it may go when memory is wanted:
//
//	spent, not dirty   oldest first: nobody needs it
//	kept, not spent    furthest ahead first: the disk has it; it stays only to save a read
//	the rest           furthest ahead first, and only for a reader who waits
//
// What is kept and spent goes at once.
type ring struct {
	cleanLimit int64 // most bytes of entries that are on disk too

	mu      sync.Mutex
	entries map[extentKey]*entry
	spent   list.List // of *entry, oldest first
	clean   list.List // kept, not spent
	held    list.List // the rest
	bytes   int64
	cleanB  int64
}

type extentKey struct {
	v      *Volume
	extent uint32
}

type entry struct {
	key                extentKey
	buf                *Buffer // the ring's reference
	spent, dirty, kept bool
	in                 *list.List
	el                 *list.Element
}

func newRing(cleanLimit int64) *ring {
	return &ring{entries: map[extentKey]*entry{}, cleanLimit: cleanLimit}
}

// put adds the extent; the ring takes a reference of its own. An entry that is there already stays.
func (r *ring) put(k extentKey, b *Buffer, spent, dirty bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, ok := r.entries[k]; ok {
		return
	}
	b.Retain()
	e := &entry{key: k, buf: b, spent: spent, dirty: dirty}
	r.entries[k] = e
	r.bytes += b.size
	r.file(e)
}

// file moves an entry to the list that its state asks for. r.mu is held; the entry is not both kept
// and spent.
func (r *ring) file(e *entry) {
	to := &r.held
	switch {
	case e.kept:
		to = &r.clean
	case e.spent && !e.dirty:
		to = &r.spent
	}
	if e.in == to {
		return
	}
	r.unlist(e)
	e.in, e.el = to, to.PushBack(e)
	if to == &r.clean {
		r.cleanB += e.buf.size
	}
}

func (r *ring) unlist(e *entry) {
	if e.in == nil {
		return
	}
	e.in.Remove(e.el)
	if e.in == &r.clean {
		r.cleanB -= e.buf.size
	}
	e.in = nil
}

// remove takes an entry out; the caller releases its buffer, outside the lock, since the last
// release calls back into the ledger.
func (r *ring) remove(e *entry) *Buffer {
	r.unlist(e)
	delete(r.entries, e.key)
	r.bytes -= e.buf.size
	return e.buf
}

// get returns the extent with a reference for the caller, or nil.
func (r *ring) get(k extentKey) *Buffer {
	r.mu.Lock()
	defer r.mu.Unlock()
	e, ok := r.entries[k]
	if !ok {
		return nil
	}
	e.buf.Retain()
	return e.buf
}

// getDirty is get for the writer: nil also when the entry is not to be written.
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

func (r *ring) has(k extentKey) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	_, ok := r.entries[k]
	return ok
}

// claim takes back that the extent is spent, because it will be read again. It reports whether the
// extent is there.
func (r *ring) claim(k extentKey) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	e, ok := r.entries[k]
	if ok && e.spent {
		e.spent = false
		r.file(e)
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

// written says that the disk has taken the extent, or declined it.
func (r *ring) written(k extentKey, kept bool) {
	var drop *Buffer
	r.mu.Lock()
	if e, ok := r.entries[k]; ok {
		e.dirty, e.kept = false, kept
		if kept && (e.spent || r.cleanB+e.buf.size > r.cleanLimit) {
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

// spend marks the extent as read. It reports whether that made memory free to take.
func (r *ring) spend(k extentKey) bool {
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

// reclaim drops entries until need bytes were given up or none is left that may go. What nothing
// else holds goes only if hard is set; what was lost so without having been read is returned.
func (r *ring) reclaim(need int64, hard bool) (lost []extentKey) {
	var drop []*Buffer
	r.mu.Lock()
	for need > 0 {
		el := r.spent.Front()
		if el == nil {
			el = r.clean.Back()
		}
		if el == nil && hard {
			el = r.held.Back()
		}
		if el == nil {
			break
		}
		e := el.Value.(*entry)
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

// drop removes every entry of v; of all volumes if v is nil.
func (r *ring) drop(v *Volume) {
	var bufs []*Buffer
	r.mu.Lock()
	for k, e := range r.entries {
		if v == nil || k.v == v {
			bufs = append(bufs, r.remove(e))
		}
	}
	r.mu.Unlock()
	for _, b := range bufs {
		b.Release()
	}
}

func (r *ring) used() (entries int, bytes int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.entries), r.bytes
}
