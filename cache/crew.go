package cache

import "sync"

// crew runs flights on goroutines that are reused. The call chain of a request to an S3 store needs 8 to 16 KiB of
// stack, and a new goroutine would copy its stack three or four times to grow to that. There are never more
// goroutines than flights were under way at once; idle ones wait until dismiss.
type crew struct {
	mu      sync.Mutex
	idle    []chan func() // the longest idle first
	gone    bool
	members sync.WaitGroup
}

// do runs flight on another goroutine. No call may follow dismiss.
func (c *crew) do(flight func()) {
	c.mu.Lock()
	n := len(c.idle)
	if n == 0 {
		c.mu.Unlock()
		c.members.Go(func() { c.fly(flight) })
		return
	}
	next := c.idle[n-1]
	c.idle = c.idle[:n-1]
	c.mu.Unlock()
	next <- flight
}

// fly runs flights, the first and those that do hands it.
func (c *crew) fly(flight func()) {
	more := make(chan func(), 1) // so that do never waits for the member
	for ok := true; ok; flight, ok = <-more {
		flight()
		c.mu.Lock()
		if !c.gone {
			c.idle = append(c.idle, more)
		} else {
			close(more)
		}
		c.mu.Unlock()
	}
}

// dismiss ends the goroutines. The flights must have ended.
func (c *crew) dismiss() {
	c.mu.Lock()
	c.gone = true
	for _, more := range c.idle {
		close(more)
	}
	c.idle = nil
	c.mu.Unlock()
	c.members.Wait()
}
