package segment

import (
	"fmt"
	"sync/atomic"
)

// Budget is one limit for the bytes of several stores, of all datasets in a cache folder. Safe for concurrent use.
//
// The segments on disk count when a store is opened, even beyond the limit; then appends get ErrFull until enough was
// dropped. A closed store has returned all its bytes. So the host takes those of closed datasets itself (Take),
// gives them back when it deletes them, and hands them over when it opens them (Options.Counted).
type Budget struct {
	used, limit atomic.Int64
}

// NewBudget returns a budget of limit bytes; 0 means no limit.
func NewBudget(limit int64) *Budget {
	b := new(Budget)
	b.SetLimit(limit)
	return b
}

// TryTake takes n bytes if the limit allows it, and reports whether it did.
func (b *Budget) TryTake(n int64) bool {
	for {
		used, limit := b.used.Load(), b.limit.Load()
		// Written so that it cannot overflow.
		if limit > 0 && n > limit-used {
			return false
		}
		if b.used.CompareAndSwap(used, used+n) {
			return true
		}
	}
}

// Take takes n bytes in any case: they are on the disk already.
func (b *Budget) Take(n int64) { b.used.Add(n) }

// Give gives n bytes back. Giving back more than was taken is a bug, and panics.
func (b *Budget) Give(n int64) {
	if used := b.used.Add(-n); used < 0 {
		panic(fmt.Sprintf("segment: %d bytes more were given back to a budget than taken", -used))
	}
}

// Used returns the bytes taken, which may exceed the limit.
func (b *Budget) Used() int64 { return b.used.Load() }

// Limit returns the limit; 0 means none.
func (b *Budget) Limit() int64 { return b.limit.Load() }

// SetLimit changes the limit; 0 means none. Bytes stay taken.
func (b *Budget) SetLimit(limit int64) { b.limit.Store(max(limit, 0)) }
