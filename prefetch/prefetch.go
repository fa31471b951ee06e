// Package prefetch decides what to fetch next. It is pure: no clock, no I/O, no goroutines. So the same code plans,
// simulates and predicts an epoch.
//
// Executor has the rules. Package run drives it with a store, package sim with a model of one.
//
// More than 40 names are exported: the executor's actions, states and outcomes are types, so that the code
// which runs it and the model that plans with it cannot mix them up.
package prefetch

// Sizes returns the sizes of files.
type Sizes interface {
	// Extents returns the number of extents of a file, which are fetched separately; at least 1, but 0 for an empty
	// file, which needs no fetch.
	Extents(file int) int
	// ExtentBytes returns the length of an extent in bytes.
	ExtentBytes(file, extent int) int64
}
