package sim

import "github.com/shoalfs/shoal/prefetch"

// keepSet is the fetched part of the kept set, which CacheBytes hold.
type keepSet struct {
	admit func(sample int) bool
	owns  func(sample int) bool // by this node, which has no other
	kept  bits                  // extents that their owner has
}

func newKeepSet(s *simulation, v *volume) *keepSet {
	k := &keepSet{admit: func(int) bool { return false }, owns: s.owns(), kept: newBits(len(v.states))}
	if s.CacheBytes == 0 {
		return k
	}
	// Kept is what the order reads.
	first, capacity := s.whole(0), s.CacheBytes*int64(s.nodes())
	reads := func(sample int) bool { return first.Find(sample, 0) >= 0 }
	k.admit = reads
	if v.total > capacity {
		chosen := prefetch.NewKeep(s.Samples, func(sample int) int64 {
			if !reads(sample) {
				return 0
			}
			return v.size(sample)
		}, s.key(), capacity)
		k.admit = func(sample int) bool { return reads(sample) && chosen.Admit(sample) }
	}
	if s.Warm {
		for f := range s.Samples {
			for x := range v.sizes.Extents(f) {
				k.landed(f, v.extent(f, x))
			}
		}
	}
	return k
}

// has reports whether an extent of the sample is in the node's cache.
func (k *keepSet) has(sample int, e uint32) bool { return k.kept.has(e) && k.owns(sample) }

// landed records an extent's arrival, and reports whether it is on this node's disk from now on.
func (k *keepSet) landed(sample int, e uint32) bool {
	if !k.admit(sample) {
		return false
	}
	k.kept.set(e)
	return k.owns(sample)
}

// key returns the key of a sample in the choice of the kept set, as package engine does.
func (s *simulation) key() func(sample int) uint64 {
	switch {
	case s.Key != nil:
		return s.Key
	case s.Places != nil:
		return func(f int) uint64 {
			object, off, _ := s.Places.Extent(s.Places.Rank(f))
			return uint64(object)<<32 | uint64(off/prefetch.GroupBytes)
		}
	}
	return func(f int) uint64 { return uint64(f) }
}
