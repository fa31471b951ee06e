package engine

import (
	"sync"
	"sync/atomic"
	"time"
)

// GoodputStats is what trainers received: it does not count reads of files that are not samples, samples that were
// read and not delivered, and batches that were built and dropped.
type GoodputStats struct {
	// opened through the mount, or valid in a batch that the feed has sent
	Delivered int64 `json:"samples_delivered"`
	// over the last minute, or since the last request if that is longer
	PerSecond float64 `json:"goodput_samples_per_sec"`
}

// CountDelivered says that a feed has delivered so many samples to a trainer.
func (e *Engine) CountDelivered(samples int) { e.counted.goodput.delivered.Add(int64(samples)) }

// goodput counts samples, with a history of counts.
type goodput struct {
	delivered atomic.Int64

	mu    sync.Mutex
	marks []mark // ascending, goodputStep apart at least; the second one is no older than goodputWindow
}

type mark struct {
	at time.Time
	n  int64
}

const (
	goodputWindow = time.Minute
	goodputStep   = time.Second
)

// rate returns how many samples were delivered, and how many a second. It may be called at any time and rate: it
// needs no timer.
func (g *goodput) rate(now time.Time) (n int64, perSecond float64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	n = g.delivered.Load()
	if len(g.marks) > 0 {
		first := g.marks[0]
		if took := now.Sub(first.at).Seconds(); took > 0 {
			perSecond = float64(n-first.n) / took
		}
	}
	if len(g.marks) == 0 || now.Sub(g.marks[len(g.marks)-1].at) >= goodputStep {
		g.marks = append(g.marks, mark{now, n})
	}
	for len(g.marks) > 1 && now.Sub(g.marks[1].at) >= goodputWindow {
		g.marks = g.marks[1:]
	}
	return n, perSecond
}
