package cache

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/shoalfs/shoal/cache/segment"
)

const (
	// maxDiskReaders bounds a dataset's goroutines that wait for the disk, and so the threads that a hanging one holds.
	// 16 such reads fill an NVMe disk (3 GB/s at 100 µs needs 300 KB in flight) and let a disk with a head sort them.
	maxDiskReaders = 16
	// diskPiece is the most that is read from the disk at once. Each reader's buffer is as large; all of them, 4 MiB,
	// are not in the ledger. It is a multiple of segment.BlockSize, so that no block is checked twice.
	diskPiece = 2 * segment.BlockSize
)

// errHangs is wrapped by the errors of operations that the disk has not ended in time.
var errHangs = errors.New("the disk does not answer")

var diskPieces = sync.Pool{New: func() any { return new([diskPiece]byte) }}

// keptRecord is where an extent is kept.
type keptRecord struct {
	extentKey
	d     *disk // nil: it is not kept, or the disk is in trouble
	file  int
	loc   segment.Loc
	n     int // bytes at loc
	coded bool
}

// record returns where an extent of the file is kept.
func (k extentKey) record(file int) keptRecord {
	r := keptRecord{extentKey: k, file: file}
	if r.loc, r.n = k.v.at(k.extent()); r.loc != 0 {
		r.d = k.v.ds.readable()
	}
	if r.coded = r.n > 0; !r.coded {
		r.n = k.v.bytes(file, k.piece)
	}
	return r
}

// read fills p from off of the record. What cannot be read is forgotten, and fetched again. Its error is the context's.
func (k keptRecord) read(ctx context.Context, p []byte, off int64) (bool, error) {
	if err := k.d.read(ctx, k.loc, k.n, p, off); err != nil {
		return k.d.unread(ctx, err, k.forget)
	}
	return true, nil
}

// unread is what becomes of a read that failed. It returns the context's error.
func (d *disk) unread(ctx context.Context, err error, forget func(error)) (bool, error) {
	switch {
	case errors.Is(err, errHangs):
		count(&d.ds.count.DiskGaveUp, 1)
	case ctx.Err() != nil && errors.Is(err, ctx.Err()):
		return false, err
	default:
		forget(err)
	}
	return false, nil
}

// forget gives up a record that cannot be read, or from which the file does not come back.
func (k keptRecord) forget(err error) {
	if !k.v.unplace(k.extent(), k.loc) {
		return
	}
	k.d.free(k.loc)
	switch {
	case errors.Is(err, segment.ErrGone): // its segment was dropped
	case errors.Is(err, segment.ErrCorrupt):
		count(&k.v.ds.count.Corrupt, 1)
		k.v.c.log.Warn("corrupt record in the cache; the object is fetched again", "path", k.v.m.Path(k.file),
			"cause", err)
	default:
		k.d.heed("read", err)
	}
}

// read fills p from the record at loc, of length bytes. It fails with errHangs if the disk is late; p is free then.
func (d *disk) read(ctx context.Context, loc segment.Loc, length int, p []byte, off int64) error {
	// First all of it; then each piece, since the kernel's read-ahead may have brought it.
	for n := len(p); ; n = min(len(p), int(diskPiece-off%segment.BlockSize)) {
		err := d.store.ReadAtNow(loc, length, p[:n], off)
		if errors.Is(err, segment.ErrWouldBlock) {
			at := off
			n = min(n, int(diskPiece-off%segment.BlockSize))
			err = d.handOver(ctx, p[:n], func(p []byte) error { return d.store.ReadAt(loc, length, p, at) })
		}
		if err != nil {
			return err
		}
		if p, off = p[n:], off+int64(n); len(p) == 0 {
			return nil
		}
	}
}

// handOver fills p, of diskPiece bytes at most, by a read that another goroutine waits for, into a buffer of its own:
// who waits too long can leave, and the read may return at any time. Then nobody uses the buffer again.
func (d *disk) handOver(ctx context.Context, p []byte, from func(p []byte) error) error {
	count(&d.ds.count.DiskWaits, 1)
	late := time.NewTimer(d.c.hangAfter)
	defer late.Stop()
	select {
	case d.reading <- struct{}{}:
	case <-late.C:
		err := fmt.Errorf("%w: all %d disk readers wait for more than %v", errHangs, maxDiskReaders, d.c.hangAfter)
		d.heed("read", err)
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
	buf, done := diskPieces.Get().(*[diskPiece]byte), make(chan error, 1)
	d.wg.Go(func() {
		err := from(buf[:len(p)])
		<-d.reading
		done <- err
	})
	var err error
	select {
	case err = <-done:
	case <-late.C:
		select {
		case err = <-done: // it is this goroutine that was late
		default:
			d.stuck.Add(1)
			go func() { <-done; d.stuck.Add(-1) }() //nolint:errcheck // whatever came of it
			err = fmt.Errorf("%w within %v", errHangs, d.c.hangAfter)
			d.heed("read", err)
			return err
		}
	case <-ctx.Done():
		return ctx.Err()
	}
	copy(p, buf[:])
	diskPieces.Put(buf)
	return err
}
