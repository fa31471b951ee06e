package engine

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/shoalfs/shoal/cache/catalog"
)

// GoodputStats tells what trainers got, whatever it took to get it to them: reads of files that are no
// samples, samples that were read and not delivered, and batches that were built and dropped are no part of it.
type GoodputStats struct {
	Delivered int64   `json:"samples_delivered"`       // opened through the mount, or valid in a batch that the feed has sent
	PerSecond float64 `json:"goodput_samples_per_sec"` // over the last minute, or since the last time that anybody asked if that is longer
}

// CountDelivered says that a feed has given a trainer so many samples.
func (e *Engine) CountDelivered(samples int) { e.goodput.delivered.Add(int64(samples)) }

// goodput counts samples and remembers how many there were when.
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

// opened counts a file that a reader of the mount has opened, if it is a sample.
func (g *goodput) opened(file int, samples *catalog.Samples) {
	if _, ok := samples.Sample(file); ok {
		g.delivered.Add(1)
	}
}

// rate returns how many samples were delivered, and how many a second. It may be asked by anybody, as often as
// they like: nothing needs to tick.
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
