package cache

import (
	"context"
	"math"
	"slices"
	"time"
)

// Lend returns n bytes of the file from off if they are in memory in one piece. They do not change until release,
// which must be called once.
func (v *Volume) Lend(file int, off int64, n int) (data []byte, release func(), ok bool) {
	x := int(off / ExtentSize)
	in := off - int64(x)*ExtentSize
	if in+int64(n) > v.ExtentBytes(file, x) {
		return nil, nil, false
	}
	b := v.c.get(v.key(v.extent(file, x)), n)
	if b == nil {
		return nil, nil, false
	}
	v.ds.count.ringHits.Add(1)
	v.ds.count.readBytes.Add(int64(n))
	if in == 0 && x > 0 {
		v.readAhead(file, x)
	}
	return b.Bytes()[in : in+int64(n)], b.Release, true
}

// ReadNow fills p from off, inside the file, if the disk has it as it came and need not be waited for. A record that cannot be
// read, or must be restored, is left to ReadAt.
func (v *Volume) ReadNow(file int, p []byte, off int64) bool {
	x := int(off / ExtentSize)
	in := off - int64(x)*ExtentSize
	d := v.ds.readable()
	if d == nil || in+int64(len(p)) > v.ExtentBytes(file, x) {
		return false
	}
	loc, n, coded := v.record(v.extent(file, x), file, x)
	if loc == 0 || coded || d.store.ReadAtNow(loc, n, p, in) != nil {
		return false
	}
	v.ds.count.keepHits.Add(1)
	v.ds.count.keptBytes.Add(int64(len(p)))
	v.ds.count.readBytes.Add(int64(len(p)))
	if in == 0 && x > 0 {
		v.readAhead(file, x)
	}
	return true
}

// maxFetch bounds how much of a just opened file is read from the disk: the READ that follows asks for no more.
const maxFetch = 512 << 10

// WillRead says that the file was opened and is about to be read from its start. It loads what the disk has of that
// into memory meanwhile.
func (v *Volume) WillRead(file int) {
	if v.Extents(file) == 0 {
		return
	}
	e := v.extent(file, 0)
	loc, n, _ := v.record(e, file, 0)
	d := v.ds.readable()
	if loc == 0 || d == nil || v.key(e).maybe() {
		return
	}
	d.store.Fetch(loc, min(n, maxFetch))
}

// KeptWhole reports whether the whole file is on disk.
func (v *Volume) KeptWhole(file int) bool {
	for x := range v.Extents(file) {
		if !v.onDisk(v.extent(file, x)) {
			return false
		}
	}
	return true
}

// DiskRoom returns how many bytes more of the volume's dataset fit on disk, with what goes for them; 0 without a disk.
func (v *Volume) DiskRoom() int64 {
	d := v.ds.readable()
	if d == nil {
		return 0
	}
	room, yields := int64(math.MaxInt64), int64(0)
	if a := v.admission.Load(); a != nil && a.yields {
		yields = a.outside.Load()
	}
	if limit := d.limit.Load(); limit > 0 {
		room = limit - d.used.Load() + yields
	}
	if b := v.c.budget; b != nil {
		room = min(room, b.Limit()-b.Used()+yields)
	}
	return max(room, 0)
}

// Flush waits until all fetched extents of the volume's dataset are on disk or were declined.
func (v *Volume) Flush(ctx context.Context) error {
	d := v.ds.disk.Load()
	if d == nil {
		return nil
	}
	if err := v.ds.settle(ctx); err != nil {
		return err
	}
	select {
	case <-d.writer.mark():
		return nil
	case <-d.writer.done: // the dataset was closed
		return ErrClosed
	case <-ctx.Done():
		return ctx.Err()
	}
}

// PrefetchRoom returns how many bytes could be prefetched now.
func (c *Cache) PrefetchRoom() int64 {
	return max(c.ledger.room(ForPrefetch)+c.ring.idle(c.ledger.Limit()/againShare), 0)
}

// settle waits until extents that readers have received are in the ring and in the writer's queue: a reader has its
// bytes a moment earlier.
func (ds *dataset) settle(ctx context.Context) error {
	type landing struct {
		v  *Volume
		e  uint32
		fl *flight
	}
	var rest []landing
	for _, v := range ds.list() {
		v.mu.Lock()
		for e, fl := range v.flights {
			if fl.buf != nil {
				rest = append(rest, landing{v, e, fl})
			}
		}
		v.mu.Unlock()
	}
	for {
		rest = slices.DeleteFunc(rest, func(l landing) bool {
			l.v.mu.Lock()
			defer l.v.mu.Unlock()
			return l.v.flights[l.e] != l.fl
		})
		if len(rest) == 0 {
			return nil
		}
		select {
		case <-time.After(time.Millisecond):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
