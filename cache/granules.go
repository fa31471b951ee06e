package cache

import (
	"context"
	"math/bits"
	"time"

	"github.com/shoalfs/shoal/internal/trace"
)

// Large files. A reader who jumps about in a file of several extents would fetch 4 MiB for each few KiB that it wants.
// So of such a file a reader fetches granules, as many as it asks for:
//
//   - A read that continues where others ended fetches twice as many granules as lie before it in one run, but at most
//     mostSparse, and none beyond its extent. So who reads a piece of 2 MiB fetches little more than that.
//   - A run of mostSparse granules or more that reaches the start of an extent fetches it whole. Who reads on then gets up
//     to mostAhead extents before it asks (readAhead).
//   - A read at the start of the file fetches its first extent: most readers go on from there.
//   - An extent that the disk would keep is fetched whole once a granule is fetched for the second time, or half of the
//     extent was, without the run that the read continues. So what is read often ends up on disk, and costs at most twice
//     its extents.
//   - What an order needs next is fetched in whole extents, as ever.
//
// Granules are entries of the ring beside the extents, spent from the beginning: they stay until memory is needed. They
// are never written to disk, and no account holds them. A reader looks for the extent first, so one that is there
// whole, or on its way, is what is read. Of an extent that is not, Volume.sparse remembers which granules were fetched,
// 64 to a word, even if they have left memory.
const (
	granuleSize = ExtentSize / 64
	mostSparse  = 64 / 2 // granules
	mostAhead   = 8      // extents: 32 MiB in flight fill 1 GB/s at 30 ms; and an eighth of the memory
)

// piece is a granule that a reader waits for, or that is being fetched.
type piece struct {
	extentKey
	fl  *flight
	buf *Buffer
}

// readGranules fills p from an extent, of which it fetches granules. It returns false if the extent is to be read whole,
// which then is here, on its way, or to be fetched.
func (v *Volume) readGranules(ctx context.Context, file, x int, e uint32, p []byte, off int64) (bool, error) {
	size := v.ExtentBytes(file, x)
	if v.Extents(file) == 1 || size <= granuleSize {
		return false, nil
	}
	lo, hi := int(off/granuleSize), int((off+int64(len(p))-1)/granuleSize)+1
	v.mu.Lock()
	run, all := v.runBefore(x, e, lo), int((size+granuleSize-1)/granuleSize)
	if v.whole(e) || lo == 0 && (x == 0 || max(hi, 2*run) >= all) {
		v.mu.Unlock()
		return false, nil
	}
	if f, ok := v.failed[e]; ok && time.Now().Before(f.until) {
		v.mu.Unlock()
		return true, f.err
	}
	want, missing := v.look(e, lo, hi, min(max(hi, lo+min(2*run, mostSparse)), all))
	if len(missing) > 0 {
		before, now := v.sparse[e], uint64(0)
		for _, q := range missing {
			now |= 1 << (q.granule - 1)
		}
		if (before&now != 0 || bits.OnesCount64(before|now)-min(run, lo) > mostSparse) && v.keeps(file, x) {
			v.mu.Unlock()
			for _, q := range want {
				if q.buf != nil {
					q.buf.Release()
				}
			}
			return false, nil
		}
		if !v.ds.enter(1) {
			v.mu.Unlock()
			return true, ErrClosed
		}
		if v.sparse == nil {
			v.sparse, v.pieces = map[uint32]uint64{}, map[extentKey]*flight{}
		}
		v.sparse[e] = before | now
		for i := range missing {
			missing[i].fl = &flight{done: make(chan struct{})}
			v.pieces[missing[i].extentKey] = missing[i].fl
		}
		v.ds.count.misses.Add(1)
	}
	for i, q := range want {
		if q.buf == nil {
			want[i].fl = v.pieces[q.extentKey]
			want[i].fl.waiters++
		}
	}
	v.mu.Unlock()
	if len(missing) > 0 {
		wait := v.waits(ctx, file, x, "miss")
		v.ds.crew.do(func() { v.flyPieces(missing, file, x, wait) })
	} else {
		v.ds.count.ringHits.Add(1)
	}
	return true, v.collect(ctx, want, p, off-int64(lo)*granuleSize)
}

// keeps reports whether the disk would take extent x of the file.
func (v *Volume) keeps(file, x int) bool {
	ok, _ := v.wanted(file, x)
	return ok && v.DiskRoom() >= ExtentSize
}

// look returns the granules from lo to hi, with a reference to those in memory. If any is neither there nor on its way, it
// also returns all such up to to. v.mu is held.
func (v *Volume) look(e uint32, lo, hi, to int) (want, missing []piece) {
	for g := lo; g < to; g++ {
		q := piece{extentKey: extentKey{v, e, uint8(g + 1)}}
		b, _ := v.c.ring.get(q.extentKey, 0, false)
		if b == nil && v.pieces[q.extentKey] == nil {
			missing = append(missing, q)
		}
		if g == hi-1 && len(missing) == 0 {
			to = hi
		}
		if g < hi {
			q.buf = b
			want = append(want, q)
		} else if b != nil {
			b.Release()
		}
	}
	return want, missing
}

// runBefore returns how many granules that were fetched lie before granule lo without a gap, in this extent and the one
// before it. v.mu is held.
func (v *Volume) runBefore(x int, e uint32, lo int) int {
	run := min(bits.LeadingZeros64(^(v.sparse[e] << (64 - lo))), lo)
	if run < lo || x == 0 {
		return run
	}
	if v.whole(e - 1) {
		return run + 64
	}
	return run + bits.LeadingZeros64(^v.sparse[e-1])
}

// whole reports whether an extent is here or on its way. v.mu is held.
func (v *Volume) whole(e uint32) bool {
	_, flying := v.flights[e]
	return flying || v.c.ring.has(v.key(e)) || v.onDisk(e)
}

// collect waits for granules and copies them to p, from off in the first.
func (v *Volume) collect(ctx context.Context, want []piece, p []byte, off int64) (err error) {
	start := time.Now()
	for _, q := range want {
		if q.fl != nil && err == nil {
			select {
			case <-q.fl.done:
				q.buf, err = q.fl.buf, q.fl.err
			case <-ctx.Done():
				err = ctx.Err()
				v.detach(q.fl)
			}
		} else if q.fl != nil {
			v.detach(q.fl)
		}
		if q.buf == nil {
			continue
		}
		if err == nil {
			p = p[copy(p, q.buf.Bytes()[off:]):]
			off = 0
		}
		q.buf.Release()
	}
	v.ds.count.stallNanos.Add(int64(time.Since(start)))
	return err
}

// flyPieces fetches granules of an extent by one request and lands them.
func (v *Volume) flyPieces(run []piece, file, x int, wait trace.Span) {
	defer v.ds.flights.Done()
	ctx := trace.With(v.ds.ctx, wait)
	bytes := func(q piece) int64 {
		return min(v.ExtentBytes(file, x)-int64(q.granule-1)*granuleSize, granuleSize)
	}
	var need int64
	for _, q := range run {
		need += footprint(int(bytes(q)))
	}
	err := v.c.reserve(ctx, need, ForDemand)
	if err == nil {
		wants := make([]Want, len(run))
		for i, q := range run {
			run[i].buf = newBuffer(v.c.ledger, int(bytes(q)), ForDemand)
			wants[i] = Want{File: file, Off: int64(x)*ExtentSize + int64(q.granule-1)*granuleSize, P: run[i].buf.data}
		}
		if err = v.fetch(ctx, v.asks(file, x), wants); err != nil {
			err = v.named(file, err)
			for i := range run {
				run[i].buf.Release()
				run[i].buf = nil
			}
		}
	}
	wait.End(err)
	v.mu.Lock()
	for _, q := range run {
		if q.fl.buf, q.fl.err = q.buf, err; err == nil {
			q.buf.refs.Add(int32(q.fl.waiters))
			if !v.retired {
				v.c.ring.put(q.extentKey, q.buf, nil, 0, true, false)
			}
		} else if q.fl.waiters > 0 {
			v.remember(q.extent, err)
		}
		delete(v.pieces, q.extentKey)
		close(q.fl.done)
	}
	v.mu.Unlock()
	for _, q := range run {
		if q.buf != nil {
			q.buf.Release()
		}
	}
	v.c.relieve()
}

// readAhead prefetches what follows an extent that a sequential reader has reached: as many extents as it has read, up to
// mostAhead.
func (v *Volume) readAhead(file, x int) {
	e := v.extent(file, x)
	most := int(min(int64(x), mostAhead, v.c.ledger.Limit()/8/ExtentSize))
	v.mu.Lock()
	n := 0
	for n < most && v.whole(e-uint32(n)-1) {
		n++
	}
	v.mu.Unlock()
	for ahead := x + 1; ahead <= x+n && ahead < v.Extents(file); ahead++ {
		v.Prefetch(nil, file, ahead, time.Time{}, nil)
	}
}
