package engine

import (
	"cmp"
	"slices"
	"strings"

	"github.com/shoalfs/shoal/cache"
	"github.com/shoalfs/shoal/prefetch/run"
)

// CacheMap shows which part of a dataset is where, as strips of cells.
type CacheMap struct {
	Version int         `json:"version"` // of this schema, 1
	Samples int         `json:"samples"`
	Dataset run.Strip   `json:"dataset"` // by sample number
	Orders  []run.Strip `json:"orders"`  // by position in the epoch, of the first streams
}

const (
	// MaxMapCells is how many cells a strip may have.
	MaxMapCells = 1000
	// mapOrders is how many streams have a strip.
	mapOrders = 8
)

// CacheMap returns a map with strips of at most so many cells (1 to MaxMapCells; others are moved there).
func (e *Engine) CacheMap(cells int) CacheMap {
	cells = min(max(cells, 1), MaxMapCells)
	v := e.cur.Load()
	m := CacheMap{Version: 1, Samples: v.samples.Len(), Orders: []run.Strip{}}
	m.Dataset = run.NewStrip("dataset", v.samples.Len(), cells, func(sample int) cache.Residence { return v.volume.Residence(v.samples.File(sample)) })
	mount, sessions := e.following()
	streams := append(mount, sessions...)
	for _, s := range streams[:min(len(streams), mapOrders)] {
		m.Orders = append(m.Orders, s.Strip(cells))
	}
	return m
}

// following returns the streams that steer the mount, and those of the feed: in the order of their names, but those
// whose epoch was read to its end last.
func (e *Engine) following() (mount, sessions []*run.Stream) {
	e.mu.Lock()
	mount = slices.Clone(e.mount)
	for s := range e.sessions {
		sessions = append(sessions, s)
	}
	e.mu.Unlock()
	over := map[*run.Stream]int{}
	for _, s := range sessions {
		if s.Over() {
			over[s] = 1
		}
	}
	slices.SortFunc(sessions, func(a, b *run.Stream) int { return cmp.Or(over[a]-over[b], strings.Compare(a.Name, b.Name)) })
	return mount, sessions
}
