package sim

import (
	"github.com/shoalfs/shoal/prefetch"
	"github.com/shoalfs/shoal/prefetch/order"
)

// stream carries the order out, as engine.Stream does: one position at a time, nearest first, as long as
// connections and memory allow; at the epoch's end it goes on with the head of the next one. Where the engine
// infers its reader's position from the files that are opened, the simulation knows it.
type stream struct {
	s         *simulation
	horizon   prefetch.Horizon
	inFlight  int
	cur, next phase
	flying    int
	starved   bool
	poked     bool
	restUntil int
	inBulk    bool // neighbours come along whenever they are needed
}

// phase is an epoch's plan and how far it was carried out.
type phase struct {
	epoch    int
	order    order.Locator // nil if not known
	planner  *prefetch.Linear
	pos      int
	reach    int      // files up to here may have come along with others
	done     []uint64 // a bit a position: it was read
	frontier int      // the first position that was not read
	head     int      // the last position that was read, plus 1
	claim    func(sample, extent int) bool
}

func (p *phase) read(pos int) bool { return p.done[pos/64]>>(pos%64)&1 != 0 }

func (p *phase) mark(pos int) {
	p.done[pos/64] |= 1 << (pos % 64)
	p.head = max(p.head, pos+1)
	for p.frontier < p.order.Len() && p.read(p.frontier) {
		p.frontier++
	}
}

// wants reports whether the plan, as far as it was carried out, holds the sample at a position that is not
// read.
func (p *phase) wants(sample int) bool {
	if p.order == nil {
		return false
	}
	for pos := p.order.Find(sample, p.frontier); pos >= 0 && pos <= max(p.pos, p.reach); pos = p.order.Find(sample, pos+1) {
		if !p.read(pos) {
			return true
		}
	}
	return false
}

// rewind plans again from where the sample is wanted.
func (p *phase) rewind(sample int) {
	if p.order == nil {
		return
	}
	if pos := p.order.Find(sample, p.frontier); pos >= 0 {
		p.pos = min(p.pos, pos)
	}
}

func (st *stream) init(s *simulation) {
	st.s, st.inFlight = s, ahead7of8(s.Connections)
	if s.Places != nil {
		var total int64
		for f := range s.Samples {
			total += s.volume.size(f)
		}
		st.inBulk = s.Bulk && s.Policy == Keep && s.CacheBytes >= total
		st.horizon = prefetch.NewHorizon(s.Memory*7/8, total/int64(s.Samples))
	}
	st.next = st.phase(0)
}

func (st *stream) phase(epoch int) phase {
	p := phase{epoch: epoch, order: st.s.order(epoch)}
	if p.order != nil {
		p.done = make([]uint64, (p.order.Len()+63)/64)
	}
	return p
}

// ready makes the functions of a phase that stays where it is.
func (st *stream) ready(p *phase) {
	if p.order == nil {
		return
	}
	p.claim = func(sample, extent int) bool { return st.s.volume.claim(p, sample, extent) }
	p.planner = prefetch.NewPlanner(p.order, st.s.Sizes).Skipping(p.read)
}

// begin moves on to an epoch. What was fetched ahead of it counts.
func (st *stream) begin(epoch int) {
	st.cur = st.next
	st.next = st.phase(epoch + 1)
	st.ready(&st.cur)
	st.ready(&st.next)
	st.restUntil = 0
	st.poked = true
}

// fillIfPoked fills if anything has happened that gives it room to. Filling frees nothing and lands nothing
// by itself, so once is enough.
func (st *stream) fillIfPoked() {
	for st.poked {
		st.poked = false
		st.fill()
	}
}

func (st *stream) fill() {
	st.cur.pos = max(st.cur.pos, st.cur.frontier)
	done, ok := st.issue(&st.cur)
	if done && st.next.planner != nil {
		_, ok = st.issue(&st.next)
	}
	st.starved = !ok
}

// issue carries the phase's plan out. It reports whether the plan's end was reached, and whether there was
// memory for all that connections allow.
func (st *stream) issue(p *phase) (done, ok bool) {
	v := &st.s.volume
	for {
		_, p.pos = p.planner.Plan(p.pos, 0, 0, p.claim)
		if p.pos == p.order.Len() {
			return true, true
		}
		sample := p.order.At(p.pos)
		group, rest := st.group(p, sample)
		if rest {
			return false, !st.hurries(p)
		}
		if len(group) > 1 {
			if st.flying >= st.inFlight {
				return false, true
			}
			if !st.fetchGroup(p, group) {
				return false, false
			}
			continue
		}
		for x := range v.sizes.Extents(sample) {
			if st.flying >= st.inFlight {
				return false, true
			}
			if p.claim(sample, x) {
				continue
			}
			if !v.reserve(v.sizes.ExtentBytes(sample, x), false) {
				return false, false
			}
			st.flying++
			v.fetch(p, sample, x, false)
		}
	}
}

// landed is told that a request's answer is here, before its files are.
func (st *stream) landed(r request) {
	if !r.ahead {
		return
	}
	st.flying--
	// Woken for some requests at a time, as in the engine.
	if st.flying <= st.inFlight-max(1, st.inFlight/16) {
		st.poked = true
	}
}

// freed is told that memory came free.
func (st *stream) freed() {
	if st.starved {
		st.poked = true
	}
}

// opened is told that a worker begins with a position.
func (st *stream) opened(pos int) {
	st.cur.mark(pos)
	if st.restUntil > 0 && st.front(&st.cur) >= st.restUntil {
		st.restUntil = 0
		st.poked = true
	}
}

// hurries reports whether what memory there is goes to a phase before the reader comes near.
func (st *stream) hurries(p *phase) bool { return st.inBulk || p == &st.next }

// front returns where the reader stands in a phase.
func (st *stream) front(p *phase) int { return st.horizon.Front(p.frontier, p.head) }

// wants reports whether the sample was fetched, or claimed, for a position that is still to be read.
func (st *stream) wants(sample int) bool { return st.cur.wants(sample) || st.next.wants(sample) }

// lost is told that a sample had to go before it was read again: it is planned again.
func (st *stream) lost(sample int) {
	st.cur.rewind(sample)
	st.next.rewind(sample)
	st.starved = true
}

// Bounds of a request for several files of a shard, as in package engine.
const (
	groupBytes = 4 << 20
	groupGap   = 16 << 10
	groupFiles = 256
)

// group returns the files to fetch by one request with the one that is needed next, as engine.Stream.group.
func (st *stream) group(p *phase, sample int) (files []int, rest bool) {
	s := st.s
	if s.Places == nil || s.Sizes.Extents(sample) != 1 {
		return nil, false
	}
	free := s.volume.room()
	if early := p.pos >= st.horizon.Front(p.frontier, p.head)+st.horizon.Plan; early && (!st.hurries(p) || free < st.horizon.Reserve+groupBytes) {
		st.restUntil = p.pos - st.horizon.Plan*3/4
		return nil, true
	}
	bounds := st.horizon.Bound(prefetch.Coalescing{MaxBytes: groupBytes, MaxGap: groupGap, MaxFiles: groupFiles}, free)
	reach := p.order.Len() - 1
	if !st.inBulk {
		reach = min(reach, p.frontier+st.horizon.Take)
	}
	ranks := prefetch.Coalesce(sample, s.Places, bounds, func(f int) bool {
		if s.Sizes.Extents(f) != 1 {
			return false
		}
		for pos := p.order.Find(f, p.frontier); pos >= 0 && pos <= reach; pos = p.order.Find(f, pos+1) {
			if !p.read(pos) {
				return !p.claim(f, 0)
			}
		}
		return false
	})
	p.reach = max(p.reach, reach)
	for i, r := range ranks {
		ranks[i] = s.Places.At(r)
	}
	return ranks, false
}

// fetchGroup starts one request for several files, as many from the front as there is memory for. It
// reports whether that is any.
func (st *stream) fetchGroup(p *phase, files []int) bool {
	v, places := &st.s.volume, st.s.Places
	r := request{epoch: p.epoch, ahead: true}
	var from, to int64
	for _, f := range files {
		if v.claim(p, f, 0) {
			continue
		}
		_, off, end := places.Extent(places.Rank(f))
		if !v.reserve(v.sizes.ExtentBytes(f, 0), false) {
			break
		}
		if r.files == nil {
			from = off
		}
		to = max(to, end)
		r.files = append(r.files, int32(f))
		v.use(p, f)
		v.states[v.extent(f, 0)] |= flying
	}
	if r.files == nil {
		return false
	}
	r.bytes = to - from
	st.flying++
	files32 := r.files
	id := st.s.store.send(r)
	for _, f := range files32 {
		v.remember(v.extent(int(f), 0), id)
	}
	return true
}
