package cache

import (
	"sync"
	"sync/atomic"
)

// gifts measures what it is worth that a node fetches for others what it does not keep. If they read the same, each such fetch saves
// others. If each reads its own part, it is a detour.
//
//   - What is looked at is the latest extents, each once, that others asked for and this node does not keep: at most mostGifts, and
//     at most a quarter of all that others may ask it for so. What is asked for again in the next epoch is not looked at any more.
//   - A gift is one of them that was fetched because another node asked. It was good if it is asked for again while it is looked at
//     and in memory or on its way: by a node, a reader here, or an order.
//   - They are judged in the order in which they were asked for: when they were good, have left memory, or are looked at no more.
//   - Gifts pay if one in giftPays of the last hundred or so was good. At the start that counts as so.
//   - While they do not pay, only a sample is fetched ([Peers].Sampled), the same for all nodes: so it shows when they do. Each of
//     the sample then counts as GiftSample that are looked at, or it would be waited for much longer than all would be.
type gifts struct {
	waits   atomic.Int64 // how many are not judged
	stopped atomic.Bool  // they do not pay

	mu           sync.Mutex
	most         int // to be looked at
	looked       []gift
	first, next  int            // the numbers of looked[0], and of the first that is not judged
	at           map[uint32]int // the latest number of an extent
	judged, good int            // halved now and then, so that what was long ago counts little
}

// gift is an extent that another node asked for.
type gift struct {
	e     uint32
	state uint8
}

const (
	asked  = iota // it is to be fetched now
	found         // it was here
	open          // a gift that nobody has asked for again
	wanted        // one that was good
)

// GiftSample is one in how many extents the sample has.
const GiftSample = 128

const (
	mostGifts = 4 * GiftSample
	giftPays  = 4
	fewGifts  = 64
)

func newGifts() gifts {
	return gifts{most: mostGifts, at: map[uint32]int{}, judged: fewGifts, good: fewGifts}
}

// SetGiven says how many extents others may ask this node for that it does not keep.
func (v *Volume) SetGiven(n int) {
	v.gifts.mu.Lock()
	defer v.gifts.mu.Unlock()
	v.gifts.most = max(1, min(n/4, mostGifts))
}

// mostNow is how many are looked at now.
func (g *gifts) mostNow() int {
	if g.stopped.Load() {
		return (g.most + GiftSample - 1) / GiftSample
	}
	return g.most
}

// of is the latest that is looked at of an extent; nil: none.
func (g *gifts) of(e uint32) *gift {
	if n, ok := g.at[e]; ok {
		return &g.looked[n-g.first]
	}
	return nil
}

// ask notes that another node asks for an extent. here tells whether one is in memory or on its way.
func (g *gifts) ask(e uint32, here func(e uint32) bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	state := uint8(asked)
	if here(e) {
		state = found
	}
	switch now := g.of(e); {
	case now != nil && (now.state == asked || now.state == open && state == found):
		now.state = wanted
	case now == nil || state == asked:
		g.at[e], g.looked = g.first+len(g.looked), append(g.looked, gift{e, state})
	}
	g.judge(here)
}

// again notes that an extent which is here is asked for by this node.
func (g *gifts) again(e uint32) {
	if g.waits.Load() > 0 {
		g.turn(e, open, wanted)
	}
}

// turn brings an extent from one state to another: to open when it is fetched for another node.
func (g *gifts) turn(e uint32, from, to uint8) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if now := g.of(e); now != nil && now.state == from {
		now.state = to
	}
}

// judge counts those that are to be judged, and forgets what is no longer looked at. g.mu is held.
func (g *gifts) judge(here func(e uint32) bool) {
	end := g.first + len(g.looked)
	for ; g.next < end; g.next++ {
		now := g.looked[g.next-g.first]
		waits := now.state == asked || now.state == open && g.at[now.e] == g.next && here(now.e)
		if waits && end-g.next <= g.mostNow() {
			break
		}
		if now.state >= open {
			if g.judged >= 2*fewGifts {
				g.judged, g.good = g.judged/2, g.good/2
			}
			if g.judged++; now.state == wanted {
				g.good++
			}
			g.stopped.Store(giftPays*g.good < g.judged)
		}
	}
	for ; len(g.looked) > g.mostNow(); g.first++ {
		if e := g.looked[0].e; g.at[e] == g.first {
			delete(g.at, e)
		}
		g.looked = g.looked[1:]
	}
	g.waits.Store(int64(end - g.next))
}

// Asked notes that another node asks for bytes of a file at off.
func (v *Volume) Asked(file int, off int64) {
	x := int(off / ExtentSize)
	if file < 0 || file >= v.m.Len() || off < 0 || off >= v.m.Size(file) || v.Chooses(file, x) {
		return
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	v.gifts.ask(v.extent(file, x), func(e uint32) bool { return v.key(e).here() })
}

// Gives reports whether what this node does not keep is fetched for others all the same.
func (v *Volume) Gives() bool { return !v.gifts.stopped.Load() }

// gives reports whether an extent is fetched for another node.
func (v *Volume) gives(file, x int) bool {
	p := *v.peers.Load()
	return v.Chooses(file, x) || v.Gives() || p != nil && p.Sampled(file, x)
}
