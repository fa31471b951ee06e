package cache

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	humanize "github.com/dustin/go-humanize"
)

// Class says what bytes are reserved for. Demand may use the whole ledger. The others leave an eighth of it free, or to
// what can be reclaimed at once, so that work done ahead of time never locks out a waiting reader.
type Class uint8

// The classes of reservations.
const (
	ForDemand   Class = iota // a reader waits for these bytes
	ForPrefetch              // fetched ahead of the reader
	ForBatches               // finished batches of the feed, at most half of the ledger
	numClasses
)

// ErrTooLarge is returned for a reservation that could never be granted.
var ErrTooLarge = errors.New("larger than the memory budget")

// Ledger accounts for every byte of sample data in memory. Bytes are reserved before they are allocated and released
// when they are freed. So the limit always holds, and Used is zero after teardown. Safe for concurrent use.
type Ledger struct {
	reclaim func(need int64, c Class) // frees bytes for this class by calling Release; called without the lock
	idle    func() int64              // bytes that reclaim frees for a reader
	freed   func()                    // called after every release; must not block

	mu      sync.Mutex
	limit   int64
	used    [numClasses]int64
	total   int64
	peak    int64
	waiters []*waiter // in order of arrival
}

type waiter struct {
	n     int64
	class Class
	ready chan struct{} // gets one value when the bytes are reserved
}

func newLedger(limit int64) *Ledger {
	return &Ledger{limit: limit, reclaim: func(int64, Class) {}, idle: func() int64 { return 0 }, freed: func() {}}
}

// room returns how many bytes a class may reserve, first as it is, then after all that is idle was reclaimed; less
// than 0 if it has more already. The lock is held.
func (l *Ledger) room(c Class) (now, most int64) {
	now, most = l.limit-l.total, l.limit-l.total+l.idle()
	if c != ForDemand {
		most -= l.limit / 8
	}
	return min(now, most), most
}

// take reserves n bytes if they fit. The lock is held.
func (l *Ledger) take(n int64, c Class) bool {
	if now, _ := l.room(c); n > now || c == ForBatches && l.batchesFull(n) {
		return false
	}
	l.used[c] += n
	l.total += n
	l.peak = max(l.peak, l.total)
	return true
}

// batchesFull reports whether n bytes more for batches have to wait for batches. The lock is held.
func (l *Ledger) batchesFull(n int64) bool { return l.used[ForBatches]+n > l.limit/2 }

// goesFirst reports whether somebody waits whom a reservation of this class would delay. The lock is held.
func (l *Ledger) goesFirst(c Class) bool {
	return c != ForDemand && slices.ContainsFunc(l.waiters, func(w *waiter) bool {
		return w.class == c || w.class != ForBatches || !l.batchesFull(w.n)
	})
}

// TryReserve reserves n bytes if possible now, and reclaims unneeded memory for that.
func (l *Ledger) TryReserve(n int64, c Class) bool {
	for attempt := 0; ; attempt++ {
		l.mu.Lock()
		ok := !l.goesFirst(c) && l.take(n, c) // nothing overtakes a demand read
		now, most := l.room(c)
		l.mu.Unlock()
		if ok || attempt > 0 || n <= now || n > most && c != ForDemand {
			return ok
		}
		l.reclaim(n-now, c)
	}
}

// pressEvery is how often a reader that waits for memory looks again for memory to reclaim.
const pressEvery = 10 * time.Millisecond

// reserve waits until n bytes can be reserved, and calls press repeatedly meanwhile. It fails with ErrTooLarge if that
// is impossible, or with the context's error when that ends first.
func (l *Ledger) reserve(ctx context.Context, n int64, c Class, press func()) error {
	if err := l.tooLarge(n, c); err != nil {
		return err
	}
	if l.TryReserve(n, c) {
		return nil
	}
	w := &waiter{n: n, class: c, ready: make(chan struct{}, 1)}
	l.mu.Lock()
	l.waiters = append(l.waiters, w)
	l.grant() // space may have come free between the try and the lock
	l.mu.Unlock()
	again := time.NewTicker(pressEvery)
	defer again.Stop()
	for {
		select {
		case <-w.ready:
			return nil
		case <-again.C:
			l.mu.Lock()
			l.grant() // what has become idle makes room, too
			l.mu.Unlock()
			if len(w.ready) == 0 {
				press()
			}
			if err := l.tooLarge(n, c); err != nil { // the limit has fallen
				return l.leave(w, err)
			}
		case <-ctx.Done():
			return l.leave(w, ctx.Err())
		}
	}
}

// tooLarge returns ErrTooLarge if n bytes can never be reserved.
func (l *Ledger) tooLarge(n int64, c Class) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	most := l.limit
	switch c {
	case ForPrefetch:
		most -= l.limit / 8
	case ForBatches:
		most = l.limit / 2
	}
	if n > most {
		return fmt.Errorf("%s: %w, of which %s can be used for this (raise --memory, or lower --batch)",
			humanize.IBytes(uint64(n)), ErrTooLarge, humanize.IBytes(uint64(most)))
	}
	return nil
}

// leave ends a wait with err, or with nil if it has got its memory in the same moment.
func (l *Ledger) leave(w *waiter, err error) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(w.ready) > 0 {
		return nil
	}
	l.waiters = slices.DeleteFunc(l.waiters, func(o *waiter) bool { return o == w })
	l.grant() // it may have stood before others
	return err
}

// grant serves the waiters: demand first, then in order of arrival, none overtaking one of its class. The lock is held.
func (l *Ledger) grant() {
	for _, demand := range []bool{true, false} {
		var blocked [numClasses]bool
		l.waiters = slices.DeleteFunc(l.waiters, func(w *waiter) bool {
			if (w.class == ForDemand) != demand || blocked[w.class] {
				return false
			}
			if blocked[w.class] = !l.take(w.n, w.class); !blocked[w.class] {
				w.ready <- struct{}{}
			}
			return !blocked[w.class]
		})
	}
}

// missing returns how many bytes must be released before n more can be reserved for batches; 0 if only batches can
// release them.
func (l *Ledger) missing(n int64) int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.batchesFull(n) {
		return 0
	}
	now, _ := l.room(ForBatches)
	return n - now
}

// Release gives n bytes of class c back.
func (l *Ledger) Release(n int64, c Class) {
	defer l.freed() // without the lock
	l.mu.Lock()
	defer l.mu.Unlock()
	l.used[c] -= n
	l.total -= n
	if l.used[c] < 0 {
		panic("cache: ledger released more than was reserved")
	}
	l.grant()
}

// Withhold lowers the limit by n bytes, which are needed for something other than sample data; a negative n raises it
// again. It reports whether the bytes were available, and reclaims unneeded memory for that.
func (l *Ledger) Withhold(n int64) bool {
	if n > 0 && !l.TryReserve(n, ForDemand) {
		return false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if n > 0 {
		l.used[ForDemand] -= n
		l.total -= n
	}
	l.limit -= n
	l.grant()
	return true
}

// PrefetchRoom returns how many bytes could be prefetched now, and how many are free: the others will be read again.
func (l *Ledger) PrefetchRoom() (room, free int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	now, most := l.room(ForPrefetch)
	return max(most, 0), max(now, 0)
}

// pressed returns how many bytes the waiting reservations need.
func (l *Ledger) pressed() (n int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, w := range l.waiters {
		n += w.n
	}
	return n
}

// Used returns the bytes reserved now.
func (l *Ledger) Used() int64 { return l.stats().MemoryUsed }

// Limit returns the bytes that may be reserved at once.
func (l *Ledger) Limit() int64 { return l.stats().MemoryLimit }

// MemoryStats is a snapshot of a ledger, in bytes.
type MemoryStats struct {
	MemoryUsed, MemoryPeak, MemoryLimit         int64
	MemoryDemand, MemoryPrefetch, MemoryBatches int64 // of MemoryUsed, by class
	MemoryWaiting                               int   // reservations that wait
}

func (l *Ledger) stats() MemoryStats {
	l.mu.Lock()
	defer l.mu.Unlock()
	return MemoryStats{l.total, l.peak, l.limit, l.used[ForDemand], l.used[ForPrefetch], l.used[ForBatches],
		len(l.waiters)}
}
