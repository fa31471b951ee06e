package cache

import (
	"container/list"
	"sync"
)

// ring is the staging area for passing extents: those that were fetched for a known order and found
// no place in the kept set, and those that a reader without an order has just had. It holds memory
// only; its bytes are the ledger's.
//
// An entry is either awaited (fetched ahead, nobody has read it yet) or spent (read; useless to the
// order that brought it, kept only while nobody needs the bytes). Reclaiming takes spent entries,
// oldest first, and then, for a reader who waits, the awaited entries furthest ahead.
type ring struct {
	mu      sync.Mutex
	entries map[extentKey]*entry
	spent   list.List // of *entry, oldest first
	awaited list.List // of *entry, in order of arrival
	bytes   int64
}

type extentKey struct {
	v      *Volume
	extent uint32
}

type entry struct {
	key   extentKey
	buf   *Buffer // the ring's reference
	spent bool
	el    *list.Element
}

func newRing() *ring { return &ring{entries: map[extentKey]*entry{}} }

// put adds the extent; the ring takes a reference of its own. An entry that is there already stays.
func (r *ring) put(k extentKey, b *Buffer, spent bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, ok := r.entries[k]; ok {
		return
	}
	b.Retain()
	e := &entry{key: k, buf: b, spent: spent}
	if spent {
		e.el = r.spent.PushBack(e)
	} else {
		e.el = r.awaited.PushBack(e)
	}
	r.entries[k] = e
	r.bytes += b.size
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

func (r *ring) has(k extentKey) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	_, ok := r.entries[k]
	return ok
}

// spend marks the extent as read. It reports whether it was there.
func (r *ring) spend(k extentKey) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	e, ok := r.entries[k]
	if ok && !e.spent {
		r.awaited.Remove(e.el)
		e.spent = true
		e.el = r.spent.PushBack(e)
	}
	return ok
}

// reclaim drops entries until need bytes were given up or none is left that may go. Awaited entries
// go only if hard is set.
func (r *ring) reclaim(need int64, hard bool) {
	var drop []*Buffer
	r.mu.Lock()
	for need > 0 {
		el := r.spent.Front()
		from := &r.spent
		if el == nil && hard {
			el, from = r.awaited.Back(), &r.awaited
		}
		if el == nil {
			break
		}
		e := el.Value.(*entry)
		from.Remove(el)
		delete(r.entries, e.key)
		r.bytes -= e.buf.size
		need -= e.buf.size
		drop = append(drop, e.buf)
	}
	r.mu.Unlock()
	for _, b := range drop { // outside the lock: the last release calls back into the ledger
		b.Release()
	}
}

// drop removes every entry of v.
func (r *ring) drop(v *Volume) {
	var bufs []*Buffer
	r.mu.Lock()
	for k, e := range r.entries {
		if k.v != v {
			continue
		}
		if e.spent {
			r.spent.Remove(e.el)
		} else {
			r.awaited.Remove(e.el)
		}
		delete(r.entries, k)
		r.bytes -= e.buf.size
		bufs = append(bufs, e.buf)
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
