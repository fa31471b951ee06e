package engine

import (
	"context"

	"github.com/shoalfs/shoal/cache"
)

// Verify compares what is kept of the version in force with the store, and drops what differs (cache.Volume.Verify).
func (e *Engine) Verify(ctx context.Context, progress func(done, total int)) (cache.Verified, error) {
	r, err := e.cur.Load().volume.Verify(ctx, progress)
	if len(r.Files) > 0 {
		e.tellMoved(r.Files)
	}
	return r, err
}

// Use returns the dataset if it is open here and stays so, with another user, who closes it.
func (h *Host) Use(id [16]byte) (e *Engine, ok bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if e = h.open[id]; e == nil || e.cur.Load() == nil || e.failed.Load() || e.users == 0 {
		return nil, false
	}
	e.users++
	return e, true
}

// verifyKept is Verify after a node gave wrong bytes.
func (e *Engine) verifyKept(ctx context.Context) {
	r, err := e.Verify(ctx, nil)
	if err != nil && ctx.Err() == nil {
		e.log.Error("what is kept could not be compared with the store; `shoal cache verify` tries again", "cause", err)
		return
	}
	e.log.Warn("what is kept was compared with the store", "extents", r.Extents, "asked_for", r.Asked, "dropped", r.Dropped, "not_in_the_store", r.Unknown)
}
