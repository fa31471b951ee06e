package cache

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/shoalfs/shoal/cache/segment"
)

const (
	// maxDiskReaders bounds a dataset's goroutines that wait for the disk, and so the threads that a hanging disk can
	// hold. 16 reads of this size in flight fill an NVMe disk (3 GB/s at 100 µs needs 300 KB in flight) and let a disk
	// with a head sort them.
	maxDiskReaders = 16
	// diskPiece is the most that is read from the disk at once. Each reader's buffer is as large; all of them, 4 MiB,
	// are not in the ledger. It is a multiple of segment.BlockSize, so that no block is checked twice.
	diskPiece = 2 * segment.BlockSize
)

// errHangs says that the disk has not answered in time.
var errHangs = errors.New("the disk does not answer")

// diskRead is one piece that another goroutine reads, into a buffer of its own: a caller that waits too long can leave, and
// the read may return at any time.
type diskRead struct {
	d      *disk
	loc    segment.Loc
	length int
	p      []byte
	off    int64
	err    error
	state  atomic.Uint32
	done   chan struct{} // gets one value when the piece was read, unless it was abandoned
	timer  *time.Timer
	run    func() // read, bound once
}

// The states of a diskRead.
const (
	waiting   uint32 = iota
	copying          // the disk has answered in time
	abandoned        // the caller's context ended
	hung             // the caller gave the disk up
)

var diskReads = sync.Pool{New: func() any {
	q := &diskRead{done: make(chan struct{}, 1), timer: time.NewTimer(time.Hour)}
	q.timer.Stop()
	q.run = q.read
	return q
}}

var diskPieces = sync.Pool{New: func() any { return new([diskPiece]byte) }}

func (q *diskRead) read() {
	d, buf := q.d, diskPieces.Get().(*[diskPiece]byte)
	defer func() { diskPieces.Put(buf); <-d.reading; d.wg.Done() }()
	part := buf[:len(q.p)]
	err := d.store.ReadAt(q.loc, q.length, part, q.off)
	if q.state.CompareAndSwap(waiting, copying) {
		if q.err = err; err == nil {
			copy(q.p, part)
		}
		q.done <- struct{}{} // and q may be in use again
	} else if q.state.Load() == hung {
		d.unhang()
	}
}

// keptRecord is where an extent is kept.
type keptRecord struct {
	v     *Volume
	d     *disk // nil: it is not kept, or the disk is in trouble
	file  int
	e     uint32
	loc   segment.Loc
	n     int // bytes at loc
	coded bool
}

func (v *Volume) keptRecord(file, x int) keptRecord {
	k := keptRecord{v: v, file: file, e: v.extent(file, x)}
	if k.loc, k.n, k.coded = v.record(k.e, file, x); k.loc != 0 {
		k.d = v.ds.readable()
	}
	return k
}

// read fills p from off of the record. One that cannot be read is forgotten, and so fetched again. Its error is the context's.
func (k keptRecord) read(ctx context.Context, p []byte, off int64) (bool, error) {
	err := k.d.read(ctx, k.loc, k.n, p, off)
	switch {
	case err == nil:
		return true, nil
	case errors.Is(err, errHangs):
		count(&k.v.ds.count.DiskGaveUp, 1)
	case ctx.Err() != nil && errors.Is(err, ctx.Err()):
		return false, err
	default:
		k.forget(err)
	}
	return false, nil
}

// forget gives up a record that cannot be read, or from which the file does not come back.
func (k keptRecord) forget(err error) {
	if !k.v.unplace(k.e, k.loc) {
		return
	}
	k.d.free(k.loc)
	switch {
	case errors.Is(err, segment.ErrGone): // its segment was dropped to make room
	case errors.Is(err, segment.ErrCorrupt):
		count(&k.v.ds.count.Corrupt, 1)
		k.v.c.log.Warn("corrupt record in the cache; the object is fetched again", "path", k.v.m.Path(k.file), "cause", err)
	default:
		k.d.failed("read", err, true)
	}
}

// read fills p from the record at loc, which is length bytes long. It fails with errHangs if the disk does not answer
// in time; then p may be reused at once.
func (d *disk) read(ctx context.Context, loc segment.Loc, length int, p []byte, off int64) error {
	err := d.store.ReadAtNow(loc, length, p, off)
	if !errors.Is(err, segment.ErrWouldBlock) {
		return err
	}
	for first := true; len(p) > 0; first = false {
		n := min(len(p), int(diskPiece-off%segment.BlockSize))
		err := segment.ErrWouldBlock
		if !first { // the kernel's read-ahead may have brought it
			err = d.store.ReadAtNow(loc, length, p[:n], off)
		}
		if errors.Is(err, segment.ErrWouldBlock) {
			err = d.handOver(ctx, loc, length, p[:n], off)
		}
		if err != nil {
			return err
		}
		p, off = p[n:], off+int64(n)
	}
	return nil
}

func (d *disk) handOver(ctx context.Context, loc segment.Loc, length int, p []byte, off int64) error {
	count(&d.ds.count.DiskWaits, 1)
	q := diskReads.Get().(*diskRead)
	q.d, q.loc, q.length, q.p, q.off, q.err = d, loc, length, p, off, nil
	q.state.Store(waiting)
	q.timer.Reset(d.c.hangAfter)
	select {
	case d.reading <- struct{}{}:
	case <-q.timer.C:
		d.drop("hang: read", fmt.Errorf("all %d disk readers wait for more than %v", maxDiskReaders, d.c.hangAfter), true)
		return errHangs
	case <-ctx.Done():
		return ctx.Err()
	}
	d.wg.Add(1)
	go q.run()
	select {
	case <-q.done:
	case <-q.timer.C:
		if d.giveUp(q) {
			return errHangs
		}
		<-q.done
	case <-ctx.Done():
		if q.state.CompareAndSwap(waiting, abandoned) {
			return ctx.Err() // q is the reader's now
		}
		<-q.done
	}
	err := q.err
	q.timer.Stop()
	q.p = nil
	diskReads.Put(q)
	return err
}

// giveUp abandons a read that takes too long. It returns false if the read has just ended.
func (d *disk) giveUp(q *diskRead) bool {
	d.stuck.Add(1) // before the reader can take it back
	if !q.state.CompareAndSwap(waiting, hung) {
		d.unhang()
		return false
	}
	d.drop("hang: read", fmt.Errorf("no answer within %v", d.c.hangAfter), true)
	return true
}
