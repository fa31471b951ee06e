package sim

import "github.com/shoalfs/shoal/prefetch"

// state is the place of an extent, other than the cache.
type state uint8

const (
	flying  state = 1 << iota // on its way
	staged                    // in memory
	written                   // and on disk, so that it takes no memory
	awaited                   // a worker waits for it
	spent                     // in memory only until that is needed
)

// volume is the places of the samples, and the ledger of memory. It models cache.Volume.
//
// Extents that the cache keeps are written to disk, and free their memory, when they land.
type volume struct {
	s      *simulation
	sizes  prefetch.Sizes
	first  []uint32 // number of each sample's first extent; nil if none has more than one
	total  int64    // bytes of all samples
	states []state
	cache  *keepSet
	flight map[uint32]*request // request by extent, of those that queue for a place: readers raise them

	used, peak int64
	remains    remains
	key        func(sample int) uint64 // by which remains are ranked
	hungry     []int32                 // workers who wait for memory
}

func (v *volume) init(s *simulation) error {
	v.s, v.sizes, v.key, v.flight = s, s.Sizes, s.key(), map[uint32]*request{}
	extents, largest := 0, int64(0)
	for f := range s.Samples {
		n := v.sizes.Extents(f)
		extents += max(n, 1) // an empty sample has a place, too
		for x := range n {
			b := v.sizes.ExtentBytes(f, x)
			largest = max(largest, b)
			v.total += b
		}
	}
	if s.Memory < extentLimit*largest {
		return &MemoryError{Have: s.Memory, Need: extentLimit * largest}
	}
	if extents > s.Samples {
		v.first = make([]uint32, s.Samples)
		for f := range s.Samples - 1 {
			v.first[f+1] = v.first[f] + uint32(max(v.sizes.Extents(f), 1))
		}
	}
	v.states = make([]state, extents)
	v.cache = newKeepSet(s, v)
	return nil
}

func (v *volume) extent(sample, x int) uint32 {
	if v.first == nil {
		return uint32(sample)
	}
	return v.first[sample] + uint32(x)
}

func (v *volume) size(sample int) (n int64) {
	for x := range v.sizes.Extents(sample) {
		n += v.sizes.ExtentBytes(sample, x)
	}
	return n
}

// claim reports whether the extent needs no request.
func (v *volume) claim(sample, x int) bool {
	e := v.extent(sample, x)
	if v.states[e] == 0 {
		return v.cache.has(sample, e)
	}
	if v.states[e]&spent != 0 {
		v.takeBack(e, v.sizes.ExtentBytes(sample, x))
	}
	return true
}

// reserve takes memory, for demand or a prefetch.
func (v *volume) reserve(n int64, demand bool) bool {
	limit := v.s.Memory
	if !demand {
		limit = v.ahead()
	}
	if v.used+n > limit {
		return false
	}
	v.used += n
	v.peak = max(v.peak, v.used)
	v.sweep()
	return true
}

// ahead is the part of the memory for prefetches.
func (v *volume) ahead() int64 { return v.s.Memory - v.s.Memory/8 }

// againShare is the part of the memory for samples already read, as in package cache.
const againShare = 16

// room returns how many bytes could be prefetched now, and how many of them nothing that was read is in.
func (v *volume) room() (room, free int64) {
	room = max(v.ahead()-v.used, 0)
	return room, max(min(room, v.s.Memory-v.used-v.remains.bytes), 0)
}

func (v *volume) release(n int64) {
	v.used -= n
	v.s.stream.x.Freed()
	if len(v.hungry) == 0 {
		return
	}
	hungry := v.hungry
	v.hungry = nil
	for _, w := range hungry {
		v.s.trainer.advance(int(w))
	}
}

// fetch starts a request for an extent, whose memory is reserved.
func (v *volume) fetch(p *reader, sample, x int, demand bool) {
	e := v.extent(sample, x)
	v.states[e] |= flying
	r := &request{epoch: p.epoch, files: []int32{int32(sample)}, extent: int32(x),
		bytes: v.sizes.ExtentBytes(sample, x), from: v.s.source(p, sample, e), demand: demand, ahead: !demand}
	v.s.store.send(r)
	v.remember(e, r)
}

// remember records the request of an extent while that may still have to be raised.
func (v *volume) remember(e uint32, r *request) {
	if !r.started {
		v.flight[e] = r
	}
}

func (v *volume) landed(sample, x int) {
	e := v.extent(sample, x)
	delete(v.flight, e)
	waited := v.states[e]&awaited != 0
	v.states[e] &^= flying | awaited
	v.states[e] |= staged
	if v.cache.landed(sample, e) {
		v.states[e] |= written
		v.release(v.sizes.ExtentBytes(sample, x))
	}
	if waited {
		v.s.trainer.wake(e)
	}
}

// spend gives up an extent that was read, unless it will be read again and may stay. It returns the bytes of memory
// that are freed with it when the reader is done with the sample.
func (v *volume) spend(sample, x int) int64 {
	e := v.extent(sample, x)
	was := v.states[e]
	if was&(staged|written) != staged {
		v.states[e] = 0
		return 0
	}
	if was&spent != 0 { // read while it was spent
		return 0
	}
	if v.s.stream.walk.Wants(sample) {
		if v.used <= v.ahead() {
			return 0
		}
		v.s.stream.x.Lost(nil, sample)
	}
	n := v.sizes.ExtentBytes(sample, x)
	v.leave(sample, e, n)
	return n
}
