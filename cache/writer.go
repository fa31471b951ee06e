package cache

import (
	"sync"
	"sync/atomic"

	"github.com/shoalfs/shoal/cache/segment"
	"github.com/shoalfs/shoal/internal/killpoint"
)

// writer moves extents from memory to disk in the background. It is one goroutine, because buffered writes to one
// file take its inode's lock exclusively: hundreds of fetches that each append their own extent would wait for each
// other, each on its own thread. Everything else that may wait for the store's lock also goes through it.
//
// Its queue is bounded by the ledger: every extent in it is in the ring.
type writer struct {
	d *disk

	mu     sync.Mutex
	queue  []waitingWrite
	frees  []segment.Loc
	tasks  []func() // to be run when everything queued before them is written
	poked  bool
	wake   sync.Cond
	closed bool
	done   chan struct{}
	depth  atomic.Int64 // of the queue, with what run has taken from it
}

// waitingWrite is an extent in the ring that the disk is to take.
type waitingWrite struct {
	key    extentKey
	file   int
	record segment.Record
}

func newWriter(d *disk) *writer {
	w := &writer{d: d, done: make(chan struct{})}
	w.wake.L = &w.mu
	go w.run()
	return w
}

// add queues an extent that is in the ring, dirty.
func (w *writer) add(wr waitingWrite) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.queue = append(w.queue, wr)
	w.depth.Add(1)
	if len(w.queue) == 1 {
		w.wake.Signal()
	}
}

// queued returns how many extents are still to be written.
func (w *writer) queued() int { return int(w.depth.Load()) }

// free queues a record to be freed.
func (w *writer) free(loc segment.Loc) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.frees = append(w.frees, loc)
	if len(w.frees) == 1 {
		w.wake.Signal()
	}
}

// poke makes the writer enforce the limits.
func (w *writer) poke() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.poked = true
	w.wake.Signal()
}

// mark returns a channel that is closed when everything queued now has been written.
func (w *writer) mark() <-chan struct{} {
	return w.do(func() {})
}

// do queues a task, and returns a channel that is closed when it was run; never, if the writer has ended.
func (w *writer) do(task func()) <-chan struct{} {
	done := make(chan struct{})
	w.mu.Lock()
	defer w.mu.Unlock()
	w.tasks = append(w.tasks, func() { task(); close(done) })
	w.wake.Signal()
	return done
}

// close writes the queue and ends the goroutine.
func (w *writer) close() {
	w.mu.Lock()
	w.closed = true
	w.wake.Signal()
	w.mu.Unlock()
	<-w.done
}

func (w *writer) run() {
	defer close(w.done)
	var batch []waitingWrite
	var frees []segment.Loc
	for {
		w.mu.Lock()
		for len(w.queue) == 0 && len(w.frees) == 0 && len(w.tasks) == 0 && !w.poked && !w.closed {
			w.wake.Wait()
		}
		batch, w.queue = w.queue, batch[:0]
		frees, w.frees = w.frees, frees[:0]
		poked, tasks := w.poked, w.tasks
		w.poked, w.tasks = false, nil
		w.mu.Unlock()
		if len(batch) == 0 && len(frees) == 0 && len(tasks) == 0 && !poked {
			return
		}
		if poked {
			w.limit()
		}
		if len(frees) > 0 {
			w.giveUp(frees)
		}
		for _, wr := range batch {
			w.write(wr)
			w.depth.Add(-1)
		}
		clear(batch)
		for _, task := range tasks {
			task()
		}
	}
}

// limit applies a changed quota.
func (w *writer) limit() {
	d := w.d
	d.watch.begin()
	defer d.watch.end()
	d.store.SetMaxBytes(d.limit.Load())
	if err := d.shrink(d.ds.list()); err != nil {
		d.failed("shrink", err, false)
	}
	d.note()
	d.requeue()
}

func (w *writer) giveUp(locs []segment.Loc) {
	w.d.watch.begin()
	defer w.d.watch.end()
	for _, loc := range locs {
		w.d.store.Free(loc)
	}
	w.d.freed, w.d.garbage = true, true
}

func (w *writer) write(wr waitingWrite) {
	c, v := w.d.c, wr.key.v
	buf := c.ring.getDirty(wr.key)
	if buf == nil {
		return // a reader needed its memory more, or its volume has retired
	}
	if v.loc(wr.key.extent()) != 0 { // restored from there
		c.ring.written(wr.key, true)
		buf.Release()
		return
	}
	var loc segment.Loc
	if ok, extra := v.wanted(wr.file, int(wr.record.Offset/ExtentSize)); ok {
		wr.record.Length = len(buf.Bytes()) // of a coded one less
		loc = w.d.keep(wr.record, buf.Bytes(), extra)
	}
	if loc != 0 {
		killpoint.Pass("cache.write.appended")
		if v.place(wr.key.extent(), wr.file, loc, buf.coded) {
			killpoint.Pass("cache.write.placed")
		} else {
			w.d.free(loc)
		}
	}
	c.ring.written(wr.key, loc != 0)
	buf.Release()
	c.relieve()
}
