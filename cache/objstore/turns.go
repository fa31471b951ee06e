package objstore

import (
	"container/list"
	"context"
	"sync"
)

// turns is the queue for a scarce resource: Demand before Prefetch, first come first served within each.
type turns struct {
	mu    sync.Mutex
	queue [2]list.List

	// Set by the owner, and called with mu held.
	take   func(p Priority) bool // takes what a request of class p needs, if it may have it
	back   func(p Priority)      // gives that back
	joined func(p Priority)      // called for each new waiter; may be nil
}

// waiter is a request in a queue. Its fields are guarded by turns.mu.
type waiter struct {
	class   Priority
	elem    *list.Element // nil after its turn, or after it gave up
	granted chan struct{} // closed with its turn
}

// wait returns when it is the turn of ctx's request, the class that it was served in, and whether it had to wait.
func (t *turns) wait(ctx context.Context) (class Priority, waited bool, err error) {
	if err := ctx.Err(); err != nil {
		return 0, false, err
	}
	class = PriorityOf(ctx)
	t.mu.Lock()
	if t.queue[Demand].Len() == 0 && (class == Demand || t.queue[Prefetch].Len() == 0) && t.take(class) {
		t.mu.Unlock()
		return class, false, nil
	}
	w := &waiter{granted: make(chan struct{})}
	t.join(w, class)
	t.mu.Unlock()
	if u := urgencyOf(ctx); u != nil && class == Prefetch {
		defer u.watch(func() { t.raise(w) })()
	}
	select {
	case <-w.granted:
		return w.class, true, nil // written before close
	case <-ctx.Done():
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if w.elem == nil { // both happened
		t.back(w.class)
	} else {
		t.queue[w.class].Remove(w.elem)
		w.elem = nil // a late Raise must not queue it again
	}
	t.dispatch()
	return 0, true, ctx.Err()
}

// join appends w to a queue. t.mu is held.
func (t *turns) join(w *waiter, class Priority) {
	w.class, w.elem = class, t.queue[class].PushBack(w)
	t.dispatch()
	if t.joined != nil {
		t.joined(class)
	}
}

// raise moves a waiting Prefetch to the end of the Demand queue.
func (t *turns) raise(w *waiter) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if w.elem == nil || w.class == Demand {
		return
	}
	t.queue[Prefetch].Remove(w.elem)
	t.join(w, Demand)
}

// dispatch serves the waiters whose turn it is. t.mu is held.
func (t *turns) dispatch() {
	for _, p := range [...]Priority{Demand, Prefetch} {
		for q := &t.queue[p]; q.Len() > 0; {
			if !t.take(p) {
				return
			}
			w := q.Remove(q.Front()).(*waiter)
			w.elem = nil
			close(w.granted)
		}
	}
}
