package objstore

// pace finds how many requests to keep in flight by measuring what they bring: it goes up only while
// goodput goes up, and down while that costs nothing. It is pure: [Limiter] feeds it rounds.
//
// A store and the path to it have a knee. Below it each request more adds its own rate (latency binds);
// above it requests only queue, be it for bandwidth, for the server's workers or for our own processor,
// and by Little's law goodput stays as it is while latency grows with the number. So the number is
// doubled while that pays, as TCP's slow start does, and the end of growth is taken for the knee, as
// BBR's start-up does (N. Cardwell et al., "BBR: Congestion-Based Congestion Control", ACM Queue 14(5),
// 2016). Congestion that the store itself reports, 503 SlowDown, halves the number at once and lets it
// grow by small steps after a while (V. Jacobson, "Congestion Avoidance and Control", SIGCOMM 1988).
// Latency alone is not looked at, unlike in Netflix's concurrency-limits: it grows with the sizes of the
// objects, which an order brings in any sequence.
type pace struct {
	floor, ceiling int
	places         int // now

	mode  paceMode
	home  int     // the number that is known to be good
	base  float64 // its goodput
	first bool    // no end of growth was found yet

	settle   bool // the next round still has requests of the number before
	sum      float64
	rounds   int // measured, of which sum is the sum
	wait     int // rounds to the next try
	patience int
	lower    int // rounds in a row that were far below base, or above it
	higher   int
	gentle   bool // the store has asked for less: grow by a quarter
	halved   bool // in this round already
}

type paceMode uint8

const (
	paceMeasure paceMode = iota // home's goodput
	paceUp                      // whether more brings more
	paceDown                    // whether less brings as much
	paceHold
)

const (
	// paceStart is where it begins: half of what was best on the reference rig (2 cores, 30 ms: 512,
	// 8% above 256), so that one doubling is all that a cold start waits for, while a store of few
	// workers is asked for less than all at once.
	paceStart = 256
	// paceFloor keeps a place for Demand and enough others that a round is no single request.
	paceFloor = 8
	// minGain is what a doubling must bring: less than the 8% from 256 to 512 on the rig, and more than
	// rounds should differ by chance. It was reasoned, not swept.
	minGain = 1.03
	// maxLoss is what a halving may cost. It is counted from the best, not from step to step.
	maxLoss = 0.98
	// carefulRounds are measured before it decides once the first climb is over: a wrong decision
	// then lasts as long as its patience. The climb decides by one round each, for it costs to stay
	// low, and where it stops too early the next try mends it.
	carefulRounds = 3
	// The tries in between: first after 16 rounds (a second or two on the rig), then after twice as
	// many each time that one brought nothing. A try costs 4 rounds of what it loses.
	minPatience, maxPatience = 16, 256
	// changedRounds far from the base in a row say that the store is another one now: the base is
	// measured again, and the number looked for from there.
	changedRounds           = 4
	farBelow, farAbove      = 0.6, 1.5
	baseWeight              = 0.1 // of a round that is not far, in the base
	calmRounds              = 8   // after a SlowDown, before it grows
	gentleUp, doubling, cut = 1.25, 2.0, 2
)

// newPace returns a pace between 1 and ceiling places.
func newPace(ceiling int) *pace {
	ceiling = max(1, ceiling)
	start := min(paceStart, ceiling)
	return &pace{floor: min(paceFloor, ceiling), ceiling: ceiling, places: start, home: start, first: true, patience: minPatience}
}

// round takes the goodput, in bytes a second, of a round in which the places were in use, and returns
// the number of places for the next one.
func (p *pace) round(goodput float64) int {
	p.halved = false
	if p.settle {
		p.settle = false
		return p.places
	}
	p.sum += goodput
	p.rounds++
	if p.mode != paceHold && !p.first && p.rounds < carefulRounds {
		return p.places
	}
	mean := p.sum / float64(p.rounds)
	p.sum, p.rounds = 0, 0
	switch p.mode {
	case paceMeasure:
		p.base = mean
		if !p.up() {
			p.down()
		}
	case paceUp:
		if mean >= p.base*minGain {
			p.home, p.base, p.patience = p.places, mean, minPatience
			p.tryUp()
			break
		}
		p.goTo(p.home)
		if p.first && p.home == min(paceStart, p.ceiling) {
			p.down() // it began above the knee
		} else {
			p.hold()
		}
	case paceDown:
		if mean >= p.base*maxLoss {
			p.home = p.places
			p.down()
			break
		}
		p.goTo(p.home)
		p.hold()
	case paceHold:
		p.watch(mean)
	}
	return p.places
}

// watch takes a round of holding.
func (p *pace) watch(goodput float64) {
	switch {
	case p.base == 0: // not known since a SlowDown
		p.base = goodput
	case goodput < p.base*farBelow:
		p.lower, p.higher = p.lower+1, 0
	case goodput > p.base*farAbove:
		p.lower, p.higher = 0, p.higher+1
	default:
		p.lower, p.higher = 0, 0
		p.base += baseWeight * (goodput - p.base)
	}
	switch {
	case p.lower == changedRounds:
		p.base = goodput
		p.down()
	case p.higher == changedRounds:
		p.base = goodput
		p.tryUp()
	default:
		if p.wait--; p.wait <= 0 {
			p.patience = min(2*p.patience, maxPatience)
			p.tryUp()
		}
	}
}

// tryUp goes up, or holds at the ceiling.
func (p *pace) tryUp() {
	if !p.up() {
		p.hold()
	}
}

// up goes to the next number above, if there is one.
func (p *pace) up() bool {
	factor := doubling
	if p.gentle {
		factor = gentleUp
	}
	next := min(p.ceiling, max(p.places+1, int(float64(p.places)*factor)))
	if next == p.places {
		return false
	}
	p.mode = paceUp
	p.goTo(next)
	return true
}

// down goes to half, or holds at the floor.
func (p *pace) down() {
	next := max(p.floor, p.home/cut)
	if next >= p.home {
		p.hold()
		return
	}
	p.mode = paceDown
	p.goTo(next)
}

func (p *pace) hold() {
	p.mode, p.first, p.wait, p.lower, p.higher = paceHold, false, p.patience, 0, 0
}

func (p *pace) goTo(n int) {
	p.settle = p.settle || n != p.places
	p.places = n
}

// throttled takes a SlowDown, and returns the number of places. One round's are one: they answer
// requests that were under way together.
func (p *pace) throttled() int {
	if p.halved {
		return p.places
	}
	p.halved, p.gentle, p.patience = true, true, calmRounds
	p.goTo(max(p.floor, p.places/cut))
	p.home, p.base, p.sum, p.rounds = p.places, 0, 0, 0
	p.hold()
	return p.places
}
