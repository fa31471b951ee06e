package engine

import (
	"slices"
	"sync"

	"github.com/shoalfs/shoal/prefetch"
)

// gate shares the places that a store has for prefetches among the streams of a dataset, by weight and
// bytes. Whoever is refused a place is woken when there is one and its turn has come; whoever was woken
// either takes it or passes it on, so that no place is idle while somebody waits for one.
type gate struct {
	mu      sync.Mutex
	fair    prefetch.Fair
	flying  int
	waiting []*Stream
}

// may reports whether s may make a request while at most so many are in flight. If not, s waits from now on.
func (g *gate) may(s *Stream, most int) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.flying < most {
		next := g.next()
		if next == nil || next == s || g.fair.Tag(&s.flow) <= g.fair.Tag(&next.flow) {
			return true
		}
		next.poke()
	}
	if !slices.Contains(g.waiting, s) {
		g.waiting = append(g.waiting, s)
	}
	return false
}

// took says that s has made a request for so many bytes.
func (g *gate) took(s *Stream, bytes int64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.flying++
	g.fair.Serve(&s.flow, bytes)
}

// left says that a request has ended.
func (g *gate) left(most int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.flying--
	// A wake-up costs more than to plan a request: so one for several places.
	if g.flying <= most-max(1, most/16) {
		g.wake()
	}
}

// plan says that s plans again, and so does not wait for the time being.
func (g *gate) plan(s *Stream) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.waiting = slices.DeleteFunc(g.waiting, func(t *Stream) bool { return t == s })
}

// pass wakes who is next if there is a place. Whoever has planned passes on what it did not take.
func (g *gate) pass(most int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.flying < most {
		g.wake()
	}
}

func (g *gate) wake() {
	if next := g.next(); next != nil {
		next.poke()
	}
}

// next returns whose turn it is of those who wait; nil if nobody does.
func (g *gate) next() (first *Stream) {
	for _, s := range g.waiting {
		if first == nil || g.fair.Tag(&s.flow) < g.fair.Tag(&first.flow) {
			first = s
		}
	}
	return first
}

// served returns the bytes that were requested for s.
func (g *gate) served(s *Stream) int64 {
	g.mu.Lock()
	defer g.mu.Unlock()
	return s.flow.Served()
}
