package prefetch

import "github.com/shoalfs/shoal/prefetch/order"

// Linear is the Planner for loose files: it asks for each position's extents as they come. It
// holds no state beyond the order, and is as safe for concurrent use as the functions it is given.
type Linear struct {
	order order.Order
	sizes Sizes
	skip  func(pos int) bool
}

// NewPlanner returns a planner that walks all of o.
func NewPlanner(o order.Order, sizes Sizes) *Linear {
	return &Linear{order: o, sizes: sizes, skip: func(int) bool { return false }}
}

// Skipping returns a planner that in addition passes over the positions for which skip is true:
// with Tracker.Read, those that the reader has had already.
func (l *Linear) Skipping(skip func(pos int) bool) *Linear {
	return &Linear{order: l.order, sizes: l.sizes, skip: skip}
}

// Plan implements Planner. Requests come in order of position and, within a file, of extent. A
// position whose extents did not all fit is the one to go on from, and by then those that were
// returned count as resident. Where a sample occurs twice, each position has its own requests.
//
// An extent larger than the budget is never returned: give a budget of at least the largest
// extent, or planning stops in front of it for good. It takes O(1) time and memory for each
// position passed.
func (l *Linear) Plan(pos int, budget int64, max int, resident func(sample, extent int) bool) (reqs []Request, next int) {
	n := l.order.Len()
	for ; pos < n; pos++ {
		if l.skip(pos) {
			continue
		}
		sample := l.order.At(pos)
		for extent := range l.sizes.Extents(sample) {
			if resident(sample, extent) {
				continue
			}
			bytes := l.sizes.ExtentBytes(sample, extent)
			if len(reqs) >= max || bytes > budget {
				return reqs, pos
			}
			budget -= bytes
			reqs = append(reqs, Request{Pos: pos, Sample: sample, Extent: extent, Bytes: bytes})
		}
	}
	return reqs, pos
}

// Lead returns how many positions from pos on need no fetch, being resident or skipped, before the
// first that does; at most limit. Called with the reader's frontier, it is how far ahead of the
// reader the cache is.
func (l *Linear) Lead(pos, limit int, resident func(sample, extent int) bool) int {
	lead := 0
	for ; lead < limit && pos+lead < l.order.Len(); lead++ {
		if l.skip(pos + lead) {
			continue
		}
		sample := l.order.At(pos + lead)
		for extent := range l.sizes.Extents(sample) {
			if !resident(sample, extent) {
				return lead
			}
		}
	}
	return lead
}
