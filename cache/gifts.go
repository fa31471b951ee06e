package cache

import (
	"sync"
	"sync/atomic"
)

// gifts measures what it is worth that a node fetches for others what it does not keep. If they read the same, each such fetch saves
// others. If each reads its own part, it is a detour.
//
//   - A gift is an extent that was fetched for another node and is not of the kept set. It was good if it is asked for again
//     while it is in memory or on its way: by a node, a reader here, or an order. That counts at once.
//   - It was not if it has left memory, or mostGifts others came after it, before anybody asked. That counts when a later one is made.
//   - Gifts pay if one in giftPays of the last few dozen was good. At the start that counts as so.
//   - While they do not pay, only a sample is fetched ([Peers].Sampled), the same for all nodes: so it shows when they do. Each of
//     the sample then counts as GiftSample that come after others, or it would be waited for much longer than all would be.
type gifts struct {
	open atomic.Int64 // how many nobody has asked for again yet

	mu           sync.Mutex
	waits        map[uint32]int // those, by extent: their numbers
	queue        []uint32       // the latest gifts, from number first on
	first        int
	judged, good int // halved now and then, so that what was long ago counts little
}

// GiftSample is one in how many extents the sample has.
const GiftSample = 128

const (
	mostGifts = 4 * GiftSample
	giftPays  = 2
	fewGifts  = 32
)

// pay reports whether what is not kept is to be fetched for others.
func (g *gifts) pay() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return giftPays*g.good >= g.judged
}

// made notes a gift. here tells whether an extent is in memory or on its way.
func (g *gifts) made(e uint32, here func(e uint32) bool) {
	most := mostGifts
	if !g.pay() {
		most /= GiftSample
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.judge(e, 0) // if it has left memory since
	g.waits[e], g.queue = g.first+len(g.queue), append(g.queue, e)
	for len(g.queue) > 0 {
		f := g.queue[0]
		if at, open := g.waits[f]; open && at == g.first {
			if len(g.queue) <= most && here(f) {
				break
			}
			g.judge(f, 0)
		}
		g.queue, g.first = g.queue[1:], g.first+1
	}
	g.open.Store(int64(len(g.waits)))
}

// Asked notes that another node asks for bytes of a file at off.
func (v *Volume) Asked(file int, off int64) {
	if v.gifts.open.Load() == 0 || file < 0 || file >= v.m.Len() || off < 0 || off >= v.m.Size(file) {
		return
	}
	e := v.extent(file, int(off/ExtentSize))
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.key(e).here() {
		v.gifts.asked(e)
	}
}

// Gives reports whether what this node does not keep is fetched for others all the same.
func (v *Volume) Gives() bool { return v.gifts.pay() }

// gives reports whether an extent is fetched for another node.
func (v *Volume) gives(file, x int) bool {
	p := v.reach.Load().peers
	return v.Chooses(file, x) || v.gifts.pay() || p != nil && p.Sampled(file, x)
}

// asked notes that an extent which is here is asked for.
func (g *gifts) asked(e uint32) {
	if g.open.Load() == 0 {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.judge(e, 1)
	g.open.Store(int64(len(g.waits)))
}

// judge counts an extent, if it is a gift that nobody has asked for. g.mu is held.
func (g *gifts) judge(e uint32, good int) {
	if _, open := g.waits[e]; !open {
		return
	}
	delete(g.waits, e)
	if g.good += good; g.judged >= 2*fewGifts {
		g.judged, g.good = g.judged/2, g.good/2
	}
	g.judged++
}
