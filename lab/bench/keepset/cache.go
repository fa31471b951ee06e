package keepset

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/shoalfs/shoal/prefetch/order"
)

// cached is a cache with a replacement policy, and a prefetcher that knows the order, in this process: what
// the kept set is compared with. It stands for a well-made cache of the usual kind, and is better off than the
// daemon: no mount, no disk, hits cost nothing.
//
// The prefetcher walks the trace, epoch after epoch, as far ahead of the reader as memory allows. Where it
// comes to a sample the cache holds, that access is a hit, whatever is evicted before the reader comes;
// any other is fetched, and lies in memory until it was read.
type cached struct {
	trace       []order.Locator // by epoch
	n           int             // positions of each
	size        func(sample int) int64
	get         func(ctx context.Context, sample int) ([]byte, error)
	connections int
	memory      int64 // for what is fetched and not yet read

	mu     sync.Mutex
	change sync.Cond
	policy policy
	data   map[int][]byte // of the samples in the cache, once they have come
	slots  []slot         // by position of the whole trace
	ahead  int64          // bytes fetched, or being fetched, and not yet read
	flying int
	err    error
	bytes  int64 // fetched
	gets   int64

	cancel context.CancelFunc
	done   sync.WaitGroup
}

// slot is one position of the trace.
type slot struct {
	content []byte // nil until it is there, and once it was read
	charged int64  // of memory
}

// newCached returns a cache that does nothing yet.
func newCached(trace []order.Locator, p policy, size func(int) int64, get func(context.Context, int) ([]byte, error), connections int, memory int64) *cached {
	c := &cached{
		trace: trace, n: trace[0].Len(), size: size, get: get, connections: connections, memory: memory,
		policy: p, data: map[int][]byte{}, slots: make([]slot, len(trace)*trace[0].Len()),
	}
	c.change.L = &c.mu
	return c
}

// next returns the position of the trace at which a sample is used next after pos, or one beyond its end.
func (c *cached) next(sample, pos int) int {
	e := pos/c.n + 1
	if e >= len(c.trace) {
		return len(c.slots) + sample // all equally far, but for ties
	}
	return e*c.n + c.trace[e].Find(sample, 0)
}

// warm fills the cache as if samples had been read in this order just before the trace begins.
func (c *cached) warm(ctx context.Context, samples []int) error {
	for _, s := range samples {
		c.policy.use(s, c.trace[0].Find(s, 0), func(old int) { delete(c.data, old) })
		if !c.policy.holds(s) {
			continue
		}
		b, err := c.get(ctx, s)
		if err != nil {
			return err
		}
		c.data[s] = b
	}
	return nil
}

// start begins to fetch.
func (c *cached) start(ctx context.Context) {
	ctx, c.cancel = context.WithCancel(ctx)
	stop := context.AfterFunc(ctx, func() { c.fail(context.Cause(ctx)) })
	c.done.Go(func() {
		defer stop()
		c.prefetch(ctx)
	})
}

// close ends all that start began.
func (c *cached) close() {
	c.cancel()
	c.done.Wait()
}

func (c *cached) fail(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err == nil {
		c.err = err
	}
	c.change.Broadcast()
}

// prefetch walks the trace.
func (c *cached) prefetch(ctx context.Context) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for pos := range c.slots {
		if c.err != nil {
			return
		}
		sample := c.trace[pos/c.n].At(pos % c.n)
		held := c.policy.use(sample, c.next(sample, pos), func(old int) { delete(c.data, old) })
		if b := c.data[sample]; held && b != nil {
			c.slots[pos].content = b
			c.change.Broadcast()
			continue
		}
		need := c.size(sample)
		for c.err == nil && (c.flying >= c.connections || c.ahead > 0 && c.ahead+need > c.memory) {
			c.change.Wait()
		}
		if c.err != nil {
			return
		}
		c.ahead += need
		c.flying++
		c.gets++
		c.bytes += need
		c.slots[pos].charged = need
		c.done.Go(func() { c.fetch(ctx, pos, sample) })
	}
}

func (c *cached) fetch(ctx context.Context, pos, sample int) {
	b, err := c.get(ctx, sample)
	if err != nil {
		c.fail(fmt.Errorf("sample %d: %w", sample, err))
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.flying--
	c.slots[pos].content = b
	if c.policy.holds(sample) {
		c.data[sample] = b
	}
	c.change.Broadcast()
}

var errReadTwice = errors.New("a position was read twice")

// read waits for a position of the trace and frees its memory.
func (c *cached) read(pos int) (int64, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := &c.slots[pos]
	for s.content == nil && c.err == nil {
		c.change.Wait()
	}
	if c.err != nil {
		return 0, c.err
	}
	if s.charged < 0 {
		return 0, errReadTwice
	}
	n := int64(len(s.content))
	c.ahead -= s.charged
	s.content, s.charged = []byte{}, -1
	c.change.Broadcast()
	return n, nil
}

// counts returns what was fetched so far.
func (c *cached) counts() (gets, bytes int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.gets, c.bytes
}

// epoch is one epoch of a cached trace, as accelerators read it.
type epoch struct {
	*cached
	number int
}

func (e epoch) Read(_ context.Context, pos int) (int64, error) {
	return e.read(e.number*e.n + pos)
}
