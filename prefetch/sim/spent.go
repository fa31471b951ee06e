package sim

// remains are extents in memory that were read and that nobody waits for. They stay until the memory is needed,
// oldest first, and need no fetch if a plan comes to them before that: if the store is so slow that nothing is ahead
// of the reader, they fill the memory. (cache.ring's spent entries.)
//
// They do not count as used.
type remains struct {
	bytes int64
	queue []remnant // oldest first; those whose stamp is not the extent's are stale
	stamp map[uint32]int
	next  int
}

type remnant struct {
	extent uint32
	bytes  int64
	stamp  int
}

// leave keeps an extent after it was read.
func (v *volume) leave(e uint32, bytes int64) {
	r := &v.remains
	if r.stamp == nil {
		r.stamp = map[uint32]int{}
	}
	r.next++
	r.stamp[e] = r.next
	r.queue = append(r.queue, remnant{e, bytes, r.next})
	r.bytes += bytes
	v.states[e] = staged | spent
}

// takeBack counts an extent as used again, because a plan needs it.
func (v *volume) takeBack(e uint32, bytes int64) {
	delete(v.remains.stamp, e)
	v.remains.bytes -= bytes
	v.states[e] &^= spent
	v.used += bytes
}

// sweep drops the oldest remains until memory is within the limit.
func (v *volume) sweep(limit int64) {
	r := &v.remains
	for v.used+r.bytes > limit && len(r.queue) > 0 {
		old := r.queue[0]
		r.queue = r.queue[1:]
		if r.stamp[old.extent] != old.stamp {
			continue
		}
		delete(r.stamp, old.extent)
		r.bytes -= old.bytes
		v.states[old.extent] = 0
	}
}
