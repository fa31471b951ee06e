package loader

import (
	"context"
	"math"
	"sync"
)

// window is the back-pressure of one session: how many batches may be started and sent.
type window struct {
	ahead int64 // batches that may be built beyond what the client has granted
	most  int64 // batches in building at once, whatever was granted

	mu      sync.Mutex
	cond    sync.Cond
	granted int64 // credits, ever
	final   bool  // no more credits will come
	started int64
	sent    int64
}

func newWindow(ahead, most int) *window {
	w := &window{ahead: int64(ahead), most: int64(most)}
	w.cond.L = &w.mu
	return w
}

// grant adds credits.
func (w *window) grant(n uint32) {
	w.mu.Lock()
	w.granted = min(w.granted+int64(n), math.MaxInt64/2)
	w.mu.Unlock()
	w.cond.Broadcast()
}

// close says that no more credits will come.
func (w *window) close() {
	w.mu.Lock()
	w.final = true
	w.mu.Unlock()
	w.cond.Broadcast()
}

// start waits until one more batch may be built.
func (w *window) start(ctx context.Context) error {
	return w.wait(ctx, func() bool {
		if w.started-w.sent >= min(w.granted-w.sent+w.ahead, w.most) {
			return false
		}
		w.started++
		return true
	})
}

// send waits until one more batch may be sent. It reports false if none ever may.
func (w *window) send(ctx context.Context) (ok bool, err error) {
	err = w.wait(ctx, func() bool {
		ok = w.sent < w.granted
		return ok || w.final
	})
	return ok, err
}

// done tells that a batch is sent.
func (w *window) done() {
	w.mu.Lock()
	w.sent++
	w.mu.Unlock()
	w.cond.Broadcast()
}

func (w *window) wait(ctx context.Context, ready func() bool) error {
	stop := context.AfterFunc(ctx, func() {
		w.mu.Lock() // so that the broadcast does not fall between a check and its Wait
		defer w.mu.Unlock()
		w.cond.Broadcast()
	})
	defer stop()
	w.mu.Lock()
	defer w.mu.Unlock()
	for !ready() {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		w.cond.Wait()
	}
	return nil
}
