package loader

import "sync"

// crew is the set of readers that fill rows, in the order in which batches were added.
type crew struct {
	mu     sync.Mutex
	cond   sync.Cond
	queue  []*batch
	closed bool
	wg     sync.WaitGroup
}

func newCrew(readers int) *crew {
	c := &crew{}
	c.cond.L = &c.mu
	for range readers {
		c.wg.Go(func() {
			for r := c.take(); r != nil; r = c.take() {
				r.fill()
			}
		})
	}
	return c
}

// add queues the rows of a batch. b.taken is closed when a reader has begun the last of them.
func (c *crew) add(b *batch) {
	if len(b.rows) == 0 {
		close(b.taken)
		return
	}
	c.mu.Lock()
	c.queue = append(c.queue, b)
	c.mu.Unlock()
	c.cond.Broadcast()
}

// take returns the next row, nil at the end.
func (c *crew) take() *row {
	c.mu.Lock()
	defer c.mu.Unlock()
	for len(c.queue) == 0 {
		if c.closed {
			return nil
		}
		c.cond.Wait()
	}
	b := c.queue[0]
	r := &b.rows[b.next]
	if b.next++; b.next == len(b.rows) {
		c.queue[0] = nil
		c.queue = c.queue[1:]
		close(b.taken)
	}
	return r
}

// close waits until all rows are settled.
func (c *crew) close() {
	c.mu.Lock()
	c.closed = true
	c.mu.Unlock()
	c.cond.Broadcast()
	c.wg.Wait()
}
