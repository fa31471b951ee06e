package sim

import "github.com/shoalfs/shoal/prefetch"

// retention is the content of CacheBytes. Keep is by extent; the other policies hold whole samples and see the
// accesses in the order of the plan, which is the order of the epochs.
type retention interface {
	// has reports whether an extent of the sample is in the cache.
	has(sample int, extent uint32) bool
	// forgets reports whether use must be called.
	forgets() bool
	// use records an access to a sample, in the cache or not, whose next one is at the given time.
	use(sample int, next int64)
	// landed records an extent's arrival, and reports whether it is on disk from now on.
	landed(sample int, extent uint32) bool
}

func newRetention(s *simulation, v *volume, total int64) retention {
	if s.Policy == None || s.CacheBytes == 0 {
		return nothing{}
	}
	// Kept is what the order reads.
	first, capacity := s.whole(0), s.CacheBytes*int64(s.nodes())
	admit := func(sample int) bool { return first.Find(sample, 0) >= 0 }
	if total > capacity {
		reads := admit
		k := prefetch.NewKeep(s.Samples, func(sample int) int64 {
			if !reads(sample) {
				return 0
			}
			return v.size(sample)
		}, s.key(), capacity, prefetch.KeepOptions{})
		admit = func(sample int) bool { return reads(sample) && k.Admit(sample) }
	}
	if s.Policy == Keep {
		k := &keepSet{admit: admit, owns: s.owns(), kept: newBits(len(v.states))}
		if s.Warm {
			for f := range s.Samples {
				for x := range v.sizes.Extents(f) {
					k.landed(f, v.extent(f, x))
				}
			}
		}
		return k
	}
	var r retention
	if s.Policy == LRU {
		r = newLRU(s.Samples, v.size, s.CacheBytes)
	} else {
		r = newBelady(s.Samples, v.size, s.CacheBytes)
	}
	if s.Warm {
		p := access{reader: &reader{epoch: -1}}
		for f := range s.Samples {
			if admit(f) {
				r.use(f, s.nextUse(p, f))
			}
		}
	}
	return r
}

// keepRun is the run of a shard whose files are kept together or not at all, as in package engine.
const keepRun = prefetch.GroupBytes

// key returns the key of a sample in the choice of the kept set.
func (s *simulation) key() func(sample int) uint64 {
	switch {
	case s.Key != nil:
		return s.Key
	case s.Places != nil:
		return func(f int) uint64 {
			object, off, _ := s.Places.Extent(s.Places.Rank(f))
			return uint64(object)<<32 | uint64(off/keepRun)
		}
	}
	return func(f int) uint64 { return uint64(f) }
}

// never is later than every access.
const never = 1 << 62

// nextUse returns when the sample is used next after the current access of the phase's plan.
func (s *simulation) nextUse(p access, sample int) int64 {
	if s.Policy != Belady {
		return 0
	}
	if p.order != nil {
		// The access itself is the first from the plan's place on, if that is ahead of its reader.
		if pos := p.order.Find(sample, p.pos); pos >= 0 {
			if pos = p.order.Find(sample, pos+1); pos >= 0 {
				return accessNumber(p.epoch, pos)
			}
		}
	}
	if next := s.order(p.epoch + 1); next != nil {
		if pos := next.Find(sample, 0); pos >= 0 {
			return accessNumber(p.epoch+1, pos)
		}
	}
	return never
}

// accessNumber numbers all accesses in order.
func accessNumber(epoch, pos int) int64 { return int64(epoch)<<40 + int64(pos) }

type nothing struct{}

func (nothing) has(int, uint32) bool    { return false }
func (nothing) forgets() bool           { return false }
func (nothing) use(int, int64)          {}
func (nothing) landed(int, uint32) bool { return false }

// keepSet is the fetched part of the kept set.
type keepSet struct {
	admit func(sample int) bool
	owns  func(sample int) bool // by this node, which has no other
	kept  bits                  // extents that their owner has
}

func (k *keepSet) has(sample int, e uint32) bool { return k.kept.has(e) && k.owns(sample) }
func (k *keepSet) forgets() bool                 { return false }
func (k *keepSet) use(int, int64)                {}

func (k *keepSet) landed(sample int, e uint32) bool {
	if !k.admit(sample) {
		return false
	}
	k.kept.set(e)
	return k.owns(sample)
}

// lru is a list of samples, most recently used first.
type lru struct {
	size        func(sample int) int64
	free        int64
	newer, till []int32 // neighbours; the entry behind the last is the list's end
	in          []bool
}

func newLRU(n int, size func(int) int64, capacity int64) *lru {
	l := &lru{size: size, free: capacity, newer: make([]int32, n+1), till: make([]int32, n+1), in: make([]bool, n)}
	l.newer[n], l.till[n] = int32(n), int32(n)
	return l
}

func (l *lru) has(sample int, _ uint32) bool { return l.in[sample] }
func (l *lru) forgets() bool                 { return true }
func (l *lru) landed(int, uint32) bool       { return false }

func (l *lru) unlink(f int32) {
	l.till[l.newer[f]] = l.till[f]
	l.newer[l.till[f]] = l.newer[f]
}

func (l *lru) use(sample int, _ int64) {
	f, end := int32(sample), int32(len(l.in))
	if l.in[f] {
		l.unlink(f)
	} else {
		l.in[f] = true
		l.free -= l.size(sample)
	}
	// till leads to the older ones, from the end to the latest.
	l.till[f], l.newer[f] = l.till[end], end
	l.newer[l.till[end]] = f
	l.till[end] = f
	for l.free < 0 {
		oldest := l.newer[end]
		l.unlink(oldest)
		l.in[oldest] = false
		l.free += l.size(int(oldest))
	}
}

// belady is a heap of samples, the one needed last first. Stale entries, of samples used since, stay in it until they
// come up.
type belady struct {
	size func(sample int) int64
	free int64
	next []int64 // of samples in the cache, else 0
	last heap[nextUse]
}

type nextUse struct {
	at     int64
	sample int32
}

func (a nextUse) Before(b nextUse) bool { return a.at > b.at }

func newBelady(n int, size func(int) int64, capacity int64) *belady {
	return &belady{size: size, free: capacity, next: make([]int64, n)}
}

func (b *belady) has(sample int, _ uint32) bool { return b.next[sample] != 0 }
func (b *belady) forgets() bool                 { return true }
func (b *belady) landed(int, uint32) bool       { return false }

func (b *belady) use(sample int, next int64) {
	if b.next[sample] == 0 {
		b.free -= b.size(sample)
	}
	b.next[sample] = next + 1 // so that none is 0
	b.last.push(nextUse{next + 1, int32(sample)})
	for b.free < 0 {
		if v := b.last.pop(); b.next[v.sample] == v.at {
			b.next[v.sample] = 0
			b.free += b.size(int(v.sample))
		}
	}
	if len(b.last.items) > 2*len(b.next)+64 {
		b.tidy()
	}
}

// tidy drops stale entries if everything fits and none comes up.
func (b *belady) tidy() {
	var kept heap[nextUse]
	for _, v := range b.last.items {
		if b.next[v.sample] == v.at {
			kept.push(v)
		}
	}
	b.last = kept
}
