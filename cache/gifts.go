package cache

import (
	"sync"
	"sync/atomic"
)

// gifts measures what it is worth that a node fetches for others what it owns and does not keep. If they read the same,
// each such fetch saves others. If each reads its own part, it is a detour.
//
//   - What is fetched for another node was a detour if it leaves memory before it is asked for again: by a node, or by
//     a reader here.
//   - A read was saved when a reader here finds that in memory, and each time that another node finds something in
//     memory which was not fetched for it.
//   - Gifts pay while one in giftPays of the latest reads saved and detours is a read saved. At the start that counts
//     as so.
//   - Detours show late, when memory is needed, and then many at once. So the latest are as many as a quarter of what
//     others may ask for.
//   - While gifts do not pay, only a sample is fetched ([Peers].Sampled), the same for all nodes: so it shows when they
//     do, by some more reads saved than detours. What was fetched before does not count: all of that was given.
//   - While they pay, the ring keeps what not all nodes have asked for.
type gifts struct {
	most  atomic.Int64 // of how many are the latest
	phase atomic.Pointer[phase]
}

// phase is the time in which gifts pay, or do not.
type phase struct {
	of   *gifts
	pays bool

	mu           sync.Mutex
	judged, good int // all, and the reads saved; halved at twice the most
}

// GiftSample is one in how many extents the sample has.
const GiftSample = 128

const (
	giftPays = 2
	fewGifts = 32
)

func (g *gifts) begin(pays bool) {
	p := &phase{of: g, pays: pays, judged: fewGifts / 4}
	if pays {
		p.judged, p.good = fewGifts, fewGifts
	}
	g.phase.Store(p)
}

// SetGiven says how many extents others may ask this node for that it does not keep.
func (g *gifts) SetGiven(n int) { g.most.Store(int64(n / 4)) }

// Gives reports whether what this node does not keep is fetched for others all the same.
func (g *gifts) Gives() bool { return g.phase.Load().pays }

// judge counts a read saved, or a detour.
func (p *phase) judge(saved bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.of.phase.Load() != p {
		return
	}
	most := fewGifts
	if p.pays {
		most = max(most, int(p.of.most.Load()))
	}
	if p.judged >= 2*most {
		p.judged, p.good = p.judged/2, p.good/2
	}
	if p.judged++; saved {
		p.good++
	}
	if pays := giftPays*p.good >= p.judged; pays != p.pays {
		p.of.begin(pays)
	}
}

// lends reports whether other nodes ask this one for the extent, which it is not to keep.
func (p *part) lends() bool {
	peers := *p.key.v.peers.Load()
	return peers != nil && peers.Owns(p.file, p.x()) && !p.key.v.Chooses(p.file, p.x())
}

// gives reports whether an extent is fetched for another node.
func (v *Volume) gives(file, x int) bool {
	p := *v.peers.Load()
	return v.Chooses(file, x) || v.Gives() || p != nil && p.Sampled(file, x)
}
