package keepset

import (
	"container/heap"
	"container/list"
)

// policy decides what a cache of so many bytes holds. Accesses come in the order of the trace.
type policy interface {
	// use is an access to a sample whose next one is at the given position of the trace. It reports
	// whether the cache held the sample before. What the cache no longer holds is told by evicted,
	// which may name the sample itself: it is not admitted then.
	use(sample int, next int, evicted func(sample int)) (held bool)
	// holds reports whether the sample is in the cache.
	holds(sample int) bool
}

// lru admits everything and evicts what was used longest ago.
type lru struct {
	capacity, used int64
	size           func(int) int64
	at             map[int]*list.Element
	order          list.List // of samples, the most recent in front
}

func newLRU(capacity int64, size func(int) int64) *lru {
	return &lru{capacity: capacity, size: size, at: map[int]*list.Element{}}
}

func (l *lru) holds(sample int) bool { return l.at[sample] != nil }

func (l *lru) use(sample, _ int, evicted func(int)) bool {
	if e := l.at[sample]; e != nil {
		l.order.MoveToFront(e)
		return true
	}
	l.at[sample] = l.order.PushFront(sample)
	for l.used += l.size(sample); l.used > l.capacity; {
		old := l.order.Remove(l.order.Back()).(int)
		delete(l.at, old)
		l.used -= l.size(old)
		evicted(old)
	}
	return false
}

// belady evicts what is needed last, which may be what has just come (L. A. Belady, "A study of replacement
// algorithms for a virtual-storage computer", IBM Systems Journal 5(2), 1966). No policy has fewer misses.
type belady struct {
	capacity, used int64
	size           func(int) int64
	next           map[int]int // of the samples held, the position of the next access
	far            furthest    // of all accesses; those that next does not confirm are stale
}

func newBelady(capacity int64, size func(int) int64) *belady {
	return &belady{capacity: capacity, size: size, next: map[int]int{}}
}

func (b *belady) holds(sample int) bool { _, ok := b.next[sample]; return ok }

func (b *belady) use(sample, next int, evicted func(int)) bool {
	_, held := b.next[sample]
	b.next[sample] = next
	heap.Push(&b.far, access{next, sample})
	if held {
		return true
	}
	for b.used += b.size(sample); b.used > b.capacity; {
		a := heap.Pop(&b.far).(access)
		if at, ok := b.next[a.sample]; !ok || at != a.at {
			continue
		}
		delete(b.next, a.sample)
		b.used -= b.size(a.sample)
		evicted(a.sample)
	}
	return false
}

type access struct{ at, sample int }

// furthest is a heap of accesses, the last one on top.
type furthest []access

func (f furthest) Len() int           { return len(f) }
func (f furthest) Less(i, j int) bool { return f[i].at > f[j].at }
func (f furthest) Swap(i, j int)      { f[i], f[j] = f[j], f[i] }
func (f *furthest) Push(x any)        { *f = append(*f, x.(access)) }
func (f *furthest) Pop() any {
	last := len(*f) - 1
	x := (*f)[last]
	*f = (*f)[:last]
	return x
}
