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

// diskReaders reads on its own goroutines, into its own buffers: a caller that waits too long can leave, and its read
// may return at any time.
type diskReaders struct {
	d    *disk
	work chan *diskRead
	quit chan struct{}

	mu      sync.Mutex
	n       int
	stopped bool
}

// diskRead is one piece to be read.
type diskRead struct {
	loc    segment.Loc
	length int
	p      []byte
	off    int64
	err    error
	state  atomic.Uint32
	done   chan struct{} // gets one value when the piece was read, unless it was abandoned
	timer  *time.Timer
}

// The states of a diskRead.
const (
	waiting   uint32 = iota
	copying          // the disk has answered in time
	abandoned        // the caller's context ended
	hung             // the caller gave the disk up
)

var diskReadPool = sync.Pool{New: func() any {
	q := &diskRead{done: make(chan struct{}, 1), timer: time.NewTimer(time.Hour)}
	q.timer.Stop()
	return q
}}

func (r *diskReaders) init(d *disk) {
	r.d, r.work, r.quit = d, make(chan *diskRead), make(chan struct{})
}

// stop ends idle readers.
func (r *diskReaders) stop() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.stopped = true
	close(r.quit)
}

// start starts another reader, with a first piece, if there may be one.
func (r *diskReaders) start(q *diskRead) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.stopped || r.n == maxDiskReaders {
		return false
	}
	r.n++
	r.d.wg.Go(func() { r.run(q) })
	return true
}

func (r *diskReaders) run(q *diskRead) {
	buf := make([]byte, diskPiece)
	for {
		part := buf[:len(q.p)]
		err := r.d.store.ReadAt(q.loc, q.length, part, q.off)
		if q.state.CompareAndSwap(waiting, copying) {
			if q.err = err; err == nil {
				copy(q.p, part)
			}
			q.done <- struct{}{}
		} else if q.state.Load() == hung {
			r.d.unhang()
		}
		select {
		case q = <-r.work:
		case <-r.quit:
			return
		}
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
		k.v.ds.count.gaveUp.Add(1)
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
		k.v.ds.count.corrupt.Add(1)
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
			err = d.readers.read(ctx, loc, length, p[:n], off)
		}
		if err != nil {
			return err
		}
		p, off = p[n:], off+int64(n)
	}
	return nil
}

func (r *diskReaders) read(ctx context.Context, loc segment.Loc, length int, p []byte, off int64) error {
	r.d.ds.count.handed.Add(1)
	q := diskReadPool.Get().(*diskRead)
	q.loc, q.length, q.p, q.off, q.err = loc, length, p, off, nil
	q.state.Store(waiting)
	q.timer.Reset(r.d.c.hangAfter)
	select {
	case r.work <- q:
	default:
		if r.start(q) {
			break
		}
		select {
		case r.work <- q:
		case <-q.timer.C:
			r.d.drop("hang: read", fmt.Errorf("all %d disk readers wait for more than %v", maxDiskReaders, r.d.c.hangAfter), true)
			return errHangs
		case <-ctx.Done():
			q.timer.Stop()
			return ctx.Err()
		case <-r.quit:
			q.timer.Stop()
			return segment.ErrGone
		}
	}
	select {
	case <-q.done:
	case <-q.timer.C:
		if r.d.giveUp(q) {
			return errHangs
		}
		<-q.done
	case <-ctx.Done():
		if q.state.CompareAndSwap(waiting, abandoned) {
			q.timer.Stop()
			return ctx.Err() // q is the reader's now
		}
		<-q.done
	}
	q.timer.Stop()
	err := q.err
	q.p = nil
	diskReadPool.Put(q)
	return err
}

// giveUp abandons a read that takes too long. It returns false if the read has just ended.
func (d *disk) giveUp(q *diskRead) bool {
	d.mu.Lock()
	if !q.state.CompareAndSwap(waiting, hung) {
		d.mu.Unlock()
		return false
	}
	d.stuck++
	d.mu.Unlock()
	d.drop("hang: read", fmt.Errorf("no answer within %v", d.c.hangAfter), true)
	return true
}
