package objstore

import (
	"sync"
	"time"
)

const (
	firstPause = time.Second
	mostPause  = time.Minute
)

// Circuit decides whether requests are sent to something that readers can do without. It is closed, as a switch is,
// while they succeed. After an error none is sent for a second. Then one tries, and each further error doubles the
// pause, up to a minute.
type Circuit struct {
	now     func() time.Time
	changed func(cause error)

	mu      sync.Mutex
	pause   time.Duration // 0: closed
	until   time.Time     // of the pause
	probing bool          // one request tries
}

// NewCircuit returns a circuit that is closed. changed is called, under its lock, with what opened it, and with nil
// when it closes.
func NewCircuit(now func() time.Time, changed func(cause error)) *Circuit {
	return &Circuit{now: now, changed: changed}
}

// Enter reports whether a request may be sent, and whether it is the one that tries. Then Leave or Withdraw is called.
func (c *Circuit) Enter() (probe, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	ok = c.ready()
	probe = ok && c.pause > 0
	c.probing = c.probing || probe
	return probe, ok
}

// Withdraw ends a request that says nothing about the other side.
func (c *Circuit) Withdraw(probe bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.probing = c.probing && !probe
}

// Leave ends a request. Those that began before the circuit opened change nothing any more.
func (c *Circuit) Leave(probe bool, err error) {
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

// Ready reports whether Enter would let a request through.
func (c *Circuit) Ready() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.ready()
}

func (c *Circuit) ready() bool { return c.pause == 0 || !c.probing && !c.now().Before(c.until) }

// IsOpen reports whether the last request that counts failed.
func (c *Circuit) IsOpen() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.pause > 0
}
