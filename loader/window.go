package loader

import (
	"context"
	"math"
	"sync"
)

// window limits how many batches of one session may be started and sent.
type window struct {
	ahead int64 // batches that may be built beyond what the client has granted
	most  int64 // batches in building at once, whatever was granted

	mu      sync.Mutex
	cond    sync.Cond
	granted int64 // credits, ever
	final   bool  // no more credits will come
	frozen  bool  // because the server drains
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
	if !w.frozen {
		w.granted = min(w.granted+int64(n), math.MaxInt64/2)
	}
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

// freeze lets granted batches go out, and nothing more.
func (w *window) freeze() {
	w.mu.Lock()
	if !w.final {
		w.final, w.frozen, w.ahead = true, true, 0
	}
	w.mu.Unlock()
	w.cond.Broadcast()
}

// start waits until one more batch may be built. It fails with errStopping once the server drains and all granted
// batches have been started.
func (w *window) start(ctx context.Context) error {
	over := false
	err := w.wait(ctx, func() bool {
		if over = w.frozen && w.started >= w.granted; over {
			return true
		}
		if w.started-w.sent >= min(w.granted-w.sent+w.ahead, w.most) {
			return false
		}
		w.started++
		return true
	})
	if over {
		return errStopping
	}
	return err
}

// send waits until one more batch may be sent. It reports false if none ever may; the error is errStopping if that is
// because the server drains.
func (w *window) send(ctx context.Context) (ok bool, err error) {
	frozen := false
	err = w.wait(ctx, func() bool {
		ok, frozen = w.sent < w.granted, w.frozen
		return ok || w.final
	})
	if err == nil && !ok && frozen {
		err = errStopping
	}
	return ok, err
}

// hungry reports whether the client has credit for a batch that is not sent yet.
func (w *window) hungry() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.granted > w.sent
}

// done notes that a batch was sent.
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
