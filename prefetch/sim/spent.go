package sim

import "github.com/shoalfs/shoal/prefetch"

// remains are extents in memory that were read and that nobody waits for, as cache.ring has them: the latest few,
// and of the others those of the lowest ranks. They stay until the memory is needed, and need no fetch if a plan
// comes to them before that.
//
// They do not count as used.
type remains struct {
	bytes, few int64          // in all, and in recent
	recent     []remnant      // oldest first; those whose stamp is not the extent's are stale
	rest       [256][]remnant // by rank, oldest first
	top        int            // ranks above it are empty
	stamp      map[uint32]int
	next       int
}

type remnant struct {
	extent uint32
	rank   uint8
	bytes  int64
	stamp  int
}

// leave keeps an extent after it was read.
func (v *volume) leave(sample int, e uint32, bytes int64) {
	r := &v.remains
	if r.stamp == nil {
		r.stamp = map[uint32]int{}
	}
	r.next++
	r.stamp[e] = r.next
	r.recent = append(r.recent, remnant{e, prefetch.Rank(v.key(sample)), bytes, r.next})
	r.bytes += bytes
	r.few += bytes
	v.states[e] = staged | spent
}

// takeBack counts an extent as used again, because a plan needs it.
func (v *volume) takeBack(e uint32, bytes int64) {
	delete(v.remains.stamp, e)
	v.remains.bytes -= bytes
	v.states[e] &^= spent
	v.used += bytes
}

// sweep drops remains until memory is within its limit.
func (v *volume) sweep() {
	r := &v.remains
	for v.used+r.bytes > v.s.Memory {
		for r.few > v.s.Memory/againShare {
			m := r.recent[0]
			r.recent = r.recent[1:]
			r.few -= m.bytes
			r.rest[m.rank] = append(r.rest[m.rank], m)
			r.top = max(r.top, int(m.rank))
		}
		for r.top > 0 && len(r.rest[r.top]) == 0 {
			r.top--
		}
		from := &r.rest[r.top]
		if len(*from) == 0 {
			if from = &r.recent; len(*from) == 0 {
				return
			}
			r.few -= (*from)[0].bytes
		}
		m := (*from)[0]
		*from = (*from)[1:]
		if r.stamp[m.extent] != m.stamp {
			continue
		}
		delete(r.stamp, m.extent)
		r.bytes -= m.bytes
		v.states[m.extent] = 0
	}
}
