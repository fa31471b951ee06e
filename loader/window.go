package loader

import (
	"context"
	"math"
	"sync"

	"github.com/shoalfs/shoal/internal/pause"
)

// window limits how many batches of one session may be started and sent.
type window struct {
	ahead int64 // batches that may be built beyond what the client has granted
	most  int64 // batches in building at once, whatever was granted

	mu      sync.Mutex
	changed chan struct{} // closed by the next change
	granted int64         // credits, ever
	final   bool          // no more credits will come
	frozen  bool          // because the server drains
	started int64
	sent    int64
	sending bool // a batch that is ready, or the slots
	starved bool // the client holds all its slots

	// Time in which the client had credit and nothing was sent: because no batch was ready, or for want of slots.
	stall, slots pause.Total
}

func newWindow(ahead, most int) *window {
	return &window{ahead: int64(ahead), most: int64(most), changed: make(chan struct{})}
}

// change makes a change, counts the times of waiting, and wakes who waits.
func (w *window) change(f func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	f()
	waits := w.granted > w.sent && !w.sending
	w.stall.Set(waits && !w.starved)
	w.slots.Set(waits && w.starved)
	close(w.changed)
	w.changed = make(chan struct{})
}

// grant adds credits.
func (w *window) grant(n uint32) {
	w.change(func() {
		if !w.frozen {
			w.granted = min(w.granted+int64(n), math.MaxInt64/2)
		}
	})
}

// close says that no more credits will come.
func (w *window) close() { w.change(func() { w.final = true }) }

// freeze lets granted batches go out, and nothing more.
func (w *window) freeze() {
	w.change(func() {
		if !w.final {
			w.final, w.frozen, w.ahead = true, true, 0
		}
	})
}

// busy notes whether something is being sent.
func (w *window) busy(sending bool) { w.change(func() { w.sending = sending }) }

// done notes that a batch was sent.
func (w *window) done() { w.change(func() { w.sent, w.sending = w.sent+1, false }) }

// starve notes whether the client holds all its slots.
func (w *window) starve(starved bool) { w.change(func() { w.starved = starved }) }

// starving reports whether the client holds all its slots and wants another batch.
func (w *window) starving() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.starved && w.granted > w.sent
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

func (w *window) wait(ctx context.Context, ready func() bool) error {
	for {
		w.mu.Lock()
		ok, changed := ready(), w.changed
		w.mu.Unlock()
		if ok {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}
