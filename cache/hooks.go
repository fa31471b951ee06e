package cache

import (
	"slices"
	"sync"
	"sync/atomic"
)

// hooks is a list of functions that is called far more often than changed.
type hooks[F any] struct {
	mu   sync.Mutex
	list atomic.Pointer[[]*F]
}

// add appends f. After remove no further call of it begins, but one may be under way.
func (h *hooks[F]) add(f F) (remove func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	list := append(slices.Clone(h.all()), &f)
	h.list.Store(&list)
	return func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		list := slices.DeleteFunc(slices.Clone(h.all()), func(g *F) bool { return g == &f })
		h.list.Store(&list)
	}
}

func (h *hooks[F]) all() []*F {
	if list := h.list.Load(); list != nil {
		return *list
	}
	return nil
}
