package near

import (
	"sync"
	"time"
)

const (
	firstPause = time.Second
	mostPause  = time.Minute
)

// circuit decides whether requests are sent. It is closed, as a switch is, while they succeed.
type circuit struct {
	now     func() time.Time
	changed func(cause error) // with what opened it, or nil when it closes; called under mu

	mu      sync.Mutex
	pause   time.Duration // 0: closed
	until   time.Time     // of the pause
	probing bool          // one request tries
}

// enter reports whether a request may be sent, and whether it is the one that tries. Then leave or withdraw is called.
func (c *circuit) enter() (probe, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.pause == 0:
		return false, true
	case c.probing || c.now().Before(c.until):
		return false, false
	}
	c.probing = true
	return true, true
}

// withdraw ends a request that says nothing about the store.
func (c *circuit) withdraw(probe bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.probing = c.probing && !probe
}

// leave ends a request. Those that began before the circuit opened change nothing any more.
func (c *circuit) leave(probe bool, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.probing = c.probing && !probe
	switch {
	case c.pause > 0 && !probe:
	case err != nil:
		if c.pause == 0 {
			c.changed(err)
		}
		c.pause = min(max(2*c.pause, firstPause), mostPause)
		c.until = c.now().Add(c.pause)
	case c.pause > 0:
		c.pause = 0
		c.changed(nil)
	}
}

// ready reports whether enter would let a request through.
func (c *circuit) ready() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.pause == 0 || !c.probing && !c.now().Before(c.until)
}

func (c *circuit) isOpen() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.pause > 0
}
