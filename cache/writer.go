package cache

import (
	"context"
	"sync"
	"sync/atomic"
)

// writer moves extents from memory to disk in the background. It is one goroutine, because buffered writes to one
// file take its inode's lock exclusively: hundreds of fetches that each append their own extent would wait for each
// other, each on its own thread. Everything else that writes to the store or waits in it is a task in its queue.
//
// The queue is bounded by the ledger: every extent in it is in the ring.
type writer struct {
	d     *disk
	slots slots

	mu     sync.Mutex
	queue  []func()
	wake   sync.Cond
	closed bool
	done   chan struct{}
	depth  atomic.Int64 // extents that are still to be written
}

func newWriter(d *disk) *writer {
	w := &writer{d: d, done: make(chan struct{})}
	w.wake.L = &w.mu
	go w.run()
	return w
}

// add queues an extent that is in the ring, dirty.
func (w *writer) add(k extentKey) {
	w.depth.Add(1)
	w.start(func() {
		w.write(k)
		w.depth.Add(-1)
	})
}

// start queues a task.
func (w *writer) start(task func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.queue = append(w.queue, task); len(w.queue) == 1 {
		w.wake.Signal()
	}
}

// do queues a task and waits for its end. If it fails, as ctx has ended or the disk is closed, the task may still run.
func (w *writer) do(ctx context.Context, task func()) error {
	done := make(chan struct{})
	w.start(func() { task(); close(done) })
	select {
	case <-done:
		return nil
	case <-w.d.ds.ctx.Done():
		return ErrClosed
	case <-ctx.Done():
		return ctx.Err()
	}
}

// close does what is queued and ends the goroutine.
func (w *writer) close() {
	w.mu.Lock()
	w.closed = true
	w.wake.Signal()
	w.mu.Unlock()
	<-w.done
}

func (w *writer) run() {
	defer close(w.done)
	var batch []func()
	for {
		w.mu.Lock()
		for len(w.queue) == 0 && !w.closed {
			w.wake.Wait()
		}
		batch, w.queue = w.queue, batch[:0]
		w.mu.Unlock()
		if len(batch) == 0 {
			return
		}
		for _, task := range batch {
			w.d.begin()
			task()
			w.d.end()
		}
		clear(batch)
	}
}

// write puts an extent on disk, unless a reader has needed its memory more, or its volume has retired.
func (w *writer) write(k extentKey) {
	c := w.d.c
	buf := c.ring.getDirty(k)
	if buf == nil {
		return
	}
	kept := k.v.loc(k.extent()) != 0 // it may have been restored from there
	k.v.mu.Lock()
	retired := k.v.retired // what its readers have fetched since
	k.v.mu.Unlock()
	if !kept && !retired && k.isGranule() {
		kept = w.d.keepGranule(k, buf)
	} else if !kept && !retired {
		kept = w.d.keep(k, buf)
	}
	c.ring.written(k, kept)
	buf.Release()
	c.relieve()
}

// Flush waits until all fetched extents of the volume's dataset are on disk or were declined.
func (v *Volume) Flush(ctx context.Context) error {
	if d := v.ds.disk.Load(); d != nil {
		return d.writer.do(ctx, func() {})
	}
	return nil
}
