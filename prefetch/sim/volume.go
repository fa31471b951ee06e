package sim

import (
	"slices"

	"github.com/shoalfs/shoal/prefetch"
)

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
	states []state
	cache  *keepSet
	flight map[uint32]int32 // request by extent, of those that queue for a place: readers raise them

	used, peak int64
	staged     []piece // in memory, the latest last; some of them read since
	tidyAt     int     // length of staged from which those are removed
	remains    remains
	key        func(sample int) uint64 // by which remains are ranked
	hungry     []int32                 // workers who wait for memory
}

func (v *volume) init(s *simulation) error {
	v.s, v.sizes, v.key, v.flight = s, s.Sizes, s.key(), map[uint32]int32{}
	extents, several := 0, false
	var largest, total int64
	for f := range s.Samples {
		n := v.sizes.Extents(f)
		several = several || n > 1
		extents += n
		for x := range n {
			b := v.sizes.ExtentBytes(f, x)
			largest = max(largest, b)
			total += b
		}
	}
	if s.Memory < extentLimit*largest {
		return &MemoryError{Have: s.Memory, Need: extentLimit * largest}
	}
	if several {
		v.first = make([]uint32, s.Samples+1)
		at := uint32(0)
		for f := range s.Samples {
			v.first[f] = at
			at += uint32(v.sizes.Extents(f))
		}
		v.first[s.Samples] = at
	} else {
		extents = s.Samples // an empty sample has a place, too
	}
	v.states = make([]state, extents)
	v.cache = newKeepSet(s, v, total)
	return nil
}

func (v *volume) extent(sample, x int) uint32 {
	if v.first == nil {
		return uint32(sample)
	}
	return v.first[sample] + uint32(x)
}

// size returns a sample's bytes.
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
	id := v.s.store.send(request{epoch: p.epoch, sample: int32(sample), extent: int32(x), bytes: v.sizes.ExtentBytes(sample, x), from: v.s.source(p, sample, e), demand: demand, ahead: !demand})
	v.remember(e, id)
}

// remember records the request of an extent while that may still have to be raised.
func (v *volume) remember(e uint32, id int32) {
	if !v.s.store.requests[id].started {
		v.flight[e] = id
	}
}

// landed handles the arrival of an extent.
func (v *volume) landed(sample, x int) {
	e := v.extent(sample, x)
	delete(v.flight, e)
	waited := v.states[e]&awaited != 0
	v.states[e] &^= flying | awaited
	v.states[e] |= staged
	switch {
	case v.cache.landed(sample, e):
		v.states[e] |= written
		v.release(v.sizes.ExtentBytes(sample, x))
	case !waited:
		if len(v.staged) >= v.tidyAt {
			// All of it, since the first may belong to the next epoch's start, and so wait for all of this one.
			v.staged = slices.DeleteFunc(v.staged, func(p piece) bool { return !v.waits(p) })
			v.tidyAt = 2*len(v.staged) + lastFew
		}
		v.staged = append(v.staged, piece{int32(sample), int32(x)})
	}
	if waited {
		v.s.trainer.wake(e)
	}
}

// piece is an extent of a sample.
type piece struct{ sample, extent int32 }

// waits reports whether an extent is in memory and was not read yet.
func (v *volume) waits(p piece) bool {
	return v.states[v.extent(int(p.sample), int(p.extent))]&(staged|written|spent) == staged
}

// lastFew is as in package cache: the number of latest extents searched for the one needed last.
const lastFew = 64

// giveUp drops what is needed last, for what the reader needs next (cache.TakeBack).
func (v *volume) giveUp(a prefetch.Action) prefetch.Outcome {
	out := prefetch.Refused
	if a.Over > 0 {
		return out // there is nobody else
	}
	for need := a.Bytes; need > 0; {
		last, at := -1, -1
		for i := len(v.staged) - 1; i >= max(len(v.staged)-lastFew, 0); i-- {
			if p := v.staged[i]; v.waits(p) {
				if n := a.Loses(v.s.stream.walk, int(p.sample)); n > at {
					last, at = i, n
				}
			}
		}
		if last < 0 {
			return out
		}
		p := v.staged[last]
		v.staged = slices.Delete(v.staged, last, last+1)
		n := v.sizes.ExtentBytes(int(p.sample), int(p.extent))
		v.states[v.extent(int(p.sample), int(p.extent))] &^= staged
		need -= n
		v.s.stream.x.Lost(nil, int(p.sample))
		v.release(n)
		out = prefetch.Started
	}
	return out
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
