package s3api

import (
	"sync"
	"time"

	"github.com/shoalfs/shoal/cache/catalog"
)

const (
	// linger is how long ranged GETs of an object may pause and still be one open.
	linger = 2 * time.Second
	// maxOpens is how many objects may be open between two ranged GETs.
	maxOpens = 1024
)

// opens makes opens and releases of files from GETs: see the package comment.
type opens struct {
	data Dataset

	mu   sync.Mutex
	held map[opened]*holding
}

// opened is an object that one address reads by ranges.
type opened struct {
	m      *catalog.Manifest
	file   int
	client string
}

type holding struct {
	gets  int // running
	timer *time.Timer
}

// part opens a file for a ranged GET, unless the client has it open.
func (o *opens) part(k opened, reader uint32) (done func()) {
	o.mu.Lock()
	defer o.mu.Unlock()
	h := o.held[k]
	if h == nil {
		h = &holding{}
		h.timer = time.AfterFunc(time.Hour, func() { o.release(k, h) })
		if o.held == nil {
			o.held = map[opened]*holding{}
		}
		o.held[k] = h
		o.data.Opened(k.m, k.file, reader)
	}
	h.gets++
	h.timer.Stop()
	return func() {
		o.mu.Lock()
		h.gets--
		full := len(o.held) > maxOpens
		if h.gets == 0 && !full {
			h.timer.Reset(linger)
		}
		o.mu.Unlock()
		if full {
			o.release(k, h)
		}
	}
}

// release lets go of a file that nobody reads now.
func (o *opens) release(k opened, h *holding) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if h.gets > 0 || o.held[k] != h {
		return
	}
	delete(o.held, k)
	o.data.Released(k.m, k.file)
}

// close lets go of all files. No GET may be running.
func (o *opens) close() {
	o.mu.Lock()
	defer o.mu.Unlock()
	for k, h := range o.held {
		h.timer.Stop()
		o.data.Released(k.m, k.file)
	}
	clear(o.held)
}
