// Package prefetch decides what to fetch next. It is pure: no clock, no I/O, no goroutines, so the
// same code plans a live epoch, simulates one, and predicts one.
//
// Executor holds the rules. Package run runs it against a store, package sim against a model of one.
package prefetch

// Sizes tells what a file weighs.
type Sizes interface {
	// Extents returns into how many separately fetched pieces a file is cut; at least
	// 1, except for an empty file, which needs no fetch and has 0.
	Extents(file int) int
	// ExtentBytes returns the length of one of them in bytes.
	ExtentBytes(file, extent int) int64
}
