package cache

import (
	"sync"

	"github.com/shoalfs/shoal/cache/segment"
)

// writer moves extents from memory to disk behind the readers' backs. It is one goroutine, because
// buffered writes to one file take its inode's lock exclusively: hundreds of fetches that each append
// their own extent would wait for each other, each on a thread of its own.
//
// Its queue is bounded by the ledger: every extent in it lies in the ring.
type writer struct {
	c *Cache

	mu     sync.Mutex
	queue  []write
	wake   sync.Cond
	closed bool
	done   chan struct{}
}

type write struct {
	key    extentKey
	record segment.Record
}

func newWriter(c *Cache) *writer {
	w := &writer{c: c, done: make(chan struct{})}
	w.wake.L = &w.mu
	go w.run()
	return w
}

// add queues an extent that is in the ring, dirty.
func (w *writer) add(k extentKey, rec segment.Record) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.queue = append(w.queue, write{k, rec})
	if len(w.queue) == 1 {
		w.wake.Signal()
	}
}

// close writes what is queued and ends the goroutine.
func (w *writer) close() {
	w.mu.Lock()
	w.closed = true
	w.wake.Signal()
	w.mu.Unlock()
	<-w.done
}

func (w *writer) run() {
	defer close(w.done)
	var batch []write
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
		for _, wr := range batch {
			w.write(wr)
		}
		clear(batch)
	}
}

func (w *writer) write(wr write) {
	c, v := w.c, wr.key.v
	buf := c.ring.getDirty(wr.key)
	if buf == nil {
		return // a reader needed its memory more, or its volume has retired
	}
	loc := c.keep(wr.record, buf.Bytes())
	if loc != 0 {
		v.locs[wr.key.extent].Store(uint64(loc))
		v.kept.Add(1)
	}
	c.ring.written(wr.key, loc != 0)
	buf.Release()
	c.relieve()
}
