package engine

import (
	"cmp"
	"maps"
	"slices"
	"strings"

	"github.com/shoalfs/shoal/cache"
	"github.com/shoalfs/shoal/prefetch/run"
)

// CacheMap shows where the parts of a dataset are, as strips of cells.
type CacheMap struct {
	Version int         `json:"version"` // of this schema, 1
	Samples int         `json:"samples"`
	Dataset run.Strip   `json:"dataset"` // by sample number
	Orders  []run.Strip `json:"orders"`  // by position in the epoch, of the first streams
}

const (
	// MaxMapCells is the largest number of cells of a strip.
	MaxMapCells = 1000
	// mapOrders is how many streams have a strip.
	mapOrders = 8
)

// CacheMap returns a map with strips of at most so many cells, which is limited to 1 to MaxMapCells.
func (e *Engine) CacheMap(cells int) CacheMap {
	cells = min(max(cells, 1), MaxMapCells)
	v := e.cur.Load()
	m := CacheMap{Version: 1, Samples: v.samples.Len(), Orders: []run.Strip{}}
	m.Dataset = run.NewStrip("dataset", v.samples.Len(), cells, func(sample int) cache.Residence {
		return v.volume.Residence(v.samples.File(sample))
	})
	mount, sessions := e.orders.following()
	streams := append(mount, sessions...)
	for _, s := range streams[:min(len(streams), mapOrders)] {
		m.Orders = append(m.Orders, s.Strip(cells))
	}
	return m
}

// following returns the streams of the mount, and those of the feed: by name, but those that have finished their
// epoch last.
func (r *orders) following() (mount, sessions []*run.Stream) {
	r.mu.Lock()
	mount = slices.Clone(r.streams)
	sessions = slices.Collect(maps.Keys(r.sessions))
	r.mu.Unlock()
	over := map[*run.Stream]int{}
	for _, s := range sessions {
		if at := s.Position(); at.Head >= at.Len {
			over[s] = 1
		}
	}
	slices.SortFunc(sessions, func(a, b *run.Stream) int {
		return cmp.Or(over[a]-over[b], strings.Compare(a.Name, b.Name))
	})
	return mount, sessions
}
