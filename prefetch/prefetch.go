// Package prefetch decides what to fetch next. It is pure: no clock, no I/O, no goroutines, so the
// same code plans a live epoch, simulates one, and predicts one.
//
// The executor that carries the requests out is package engine.
package prefetch

// Request asks for one extent of one sample's file.
type Request struct {
	Pos    int   // position in the order: the smaller, the sooner it is needed
	Sample int   // sample number, as the order gives it
	Extent int   // number of the extent within the file
	Bytes  int64 // length of the extent
}

// Sizes tells the planner what a sample weighs.
type Sizes interface {
	// Extents returns into how many separately fetched pieces a sample's file is cut; at least
	// 1, except for an empty file, which needs no fetch and has 0.
	Extents(sample int) int
	// ExtentBytes returns the length of one of them in bytes.
	ExtentBytes(sample, extent int) int64
}

// Planner turns an order into requests, nearest deadline first.
type Planner interface {
	// Plan walks the order from pos, skips what is resident (cached, staged or in flight), and
	// returns requests until either their sum would exceed budget bytes, max requests were
	// found, or the order ends. It returns the position to go on from. It never mutates state
	// outside the planner, and equal arguments give equal results.
	Plan(pos int, budget int64, max int, resident func(sample, extent int) bool) (reqs []Request, next int)
}
