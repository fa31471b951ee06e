package cache

import (
	"time"

	"github.com/shoalfs/shoal/cache/objstore"
)

// member is one file of a group that is being fetched.
type member struct {
	file int
	e    uint32
	size int64 // what is reserved for it
	fl   *flight
}

// PrefetchGroup is Prefetch of several files by one request: files of one extent each in one object, by ascending
// offset. Files that are resident or in flight are left out, and so is everything after the first file that does not
// lie behind the one before it in the same object, or of which one asks a peer and the other does not. Memory is reserved for as many files from the front as possible;
// the outcome is NoMemory only if that is none. due is when the first of them is needed.
//
// done is called once for each started file, from another goroutine. A reader that asks for one of them meanwhile
// makes the whole request urgent. If the request fails, all its files fail; a reader that waits for one tries again
// with its own request, unless the store is in trouble.
func (v *Volume) PrefetchGroup(a *Account, files []int, due time.Time, done func(file int, err error)) (started int, out Outcome) {
	started, _, out = v.startGroup(a, files, due, false, done)
	return started, out
}

// Gather is for a peer that asks for the files at due, and then gets each by Serve: it starts to fetch those that are
// missing and of one extent, by as few requests as PrefetchGroup would. It never blocks.
func (v *Volume) Gather(files []int, due time.Time) {
	for out := Started; len(files) > 0 && (out == Started || out == Present); {
		_, files, out = v.startGroup(nil, files, due, true, nil)
	}
}

// startGroup does what PrefetchGroup says, and also returns the files from which on it left all out.
func (v *Volume) startGroup(a *Account, files []int, due time.Time, forPeer bool, done func(file int, err error)) (started int, rest []int, out Outcome) {
	here := func(e uint32) bool {
		if forPeer {
			return v.whole(e)
		}
		return v.claim(a, e)
	}
	class := ForPrefetch
	if forPeer {
		class = ForDemand
	}
	var group []member
	var o objstore.Object
	var end int64
	var asks bool
	out = Present
	for i, file := range files {
		if v.Extents(file) != 1 || v.onDisk(v.extent(file, 0)) {
			continue
		}
		v.mu.Lock()
		ok := here(v.extent(file, 0))
		v.mu.Unlock()
		if ok {
			continue
		}
		at, off := v.object(file)
		peer := !forPeer && v.asks(file, 0)
		if len(group) > 0 && (at.Key != o.Key || at.ETag != o.ETag || off < end || peer != asks) {
			rest = files[i:]
			break
		}
		n := v.m.Size(file)
		size := footprint(int(n))
		if !v.c.ledger.TryReserve(size, class) {
			out, rest = NoMemory, files[i:]
			break
		}
		o, end, asks = at, off+n, peer
		group = append(group, member{file: file, e: v.extent(file, 0), size: size})
	}
	if len(group) == 0 {
		return 0, rest, out
	}

	urgency := objstore.NewUrgency(due)
	var unused int64
	v.mu.Lock()
	kept := group[:0]
	for _, m := range group {
		if here(m.e) { // also if it is in the group twice
			unused += m.size
			continue
		}
		if len(kept) == 0 && !v.ds.enter(1) {
			unused += m.size
			out = Closed
			continue
		}
		m.fl = v.launch(m.e, int(v.m.Size(m.file)), a, urgency)
		m.fl.group, m.fl.asks, m.fl.spent, m.fl.class, m.fl.takesCoded = true, asks, forPeer, class, !forPeer
		kept = append(kept, m)
	}
	v.mu.Unlock()
	if unused > 0 {
		v.c.ledger.Release(unused, class)
	}
	if len(kept) == 0 {
		return 0, rest, out
	}
	if !forPeer {
		v.ds.count.prefetched.Add(int64(len(kept)))
	}
	v.ds.crew.do(func() { v.flyGroup(kept, asks, urgency, done) })
	return len(kept), rest, Started
}

// flyGroup fetches the members by one request and lands each.
func (v *Volume) flyGroup(group []member, asks bool, urgency *objstore.Urgency, done func(file int, err error)) {
	defer v.ds.flights.Done()
	wants := make([]Want, len(group))
	bufs := make([]*Buffer, len(group))
	for i, m := range group {
		bufs[i] = newBuffer(v.c.ledger, int(v.m.Size(m.file)), m.fl.class)
		wants[i] = v.want(m.fl, m.file, 0, bufs[i])
	}
	err := v.fetch(objstore.WithUrgency(v.ds.ctx, urgency), asks, wants)
	for i, m := range group {
		buf, err := bufs[i], v.named(m.file, err)
		if err != nil {
			buf.Release()
			buf = nil
		}
		v.land(m.fl, m.file, 0, m.e, buf, err)
		if done != nil {
			done(m.file, err)
		}
	}
}
