package objstore

// pace finds the best number of requests in flight by measuring goodput: it goes up only while goodput goes up, and
// down while that costs nothing. It is pure: [Limiter] feeds it rounds.
//
// A store and the path to it have a knee. Below it each further request adds its own rate (latency is the limit).
// Above it requests only queue, for bandwidth, the server's workers or our own processor, and by Little's law goodput
// stays constant while latency grows with the number. So the number is doubled while that pays, as in TCP's slow
// start, and the end of growth is taken for the knee, as in BBR's start-up (N. Cardwell et al., "BBR:
// Congestion-Based Congestion Control", ACM Queue 14(5), 2016). Congestion that the store reports, 503 SlowDown,
// halves the number at once; after a while it grows by small steps (V. Jacobson, "Congestion Avoidance and Control",
// SIGCOMM 1988). Unlike in Netflix's concurrency-limits, latency alone is not used: it depends on the sizes of the
// objects, which come in any order.
type pace struct {
	floor, ceiling int
	places         int // now

	mode  paceMode
	home  int     // the number that is known to be good
	base  float64 // its goodput
	first bool    // the end of growth was not found yet

	settle   bool // the next round still has requests of the old number
	sum      float64
	rounds   int // measured, of which sum is the sum
	wait     int // rounds to the next try
	patience int
	lower    int // rounds in a row that were far below base, or above it
	higher   int
	gentle   bool // the store reported SlowDown: grow by a quarter
	halved   bool // in this round already
}

type paceMode uint8

const (
	paceMeasure paceMode = iota // home's goodput
	paceUp                      // whether more brings more
	paceDown                    // whether fewer bring as much
	paceHold
)

const (
	// paceStart is half of the best number on the reference rig (2 cores, 30 ms: 512, 8% above 256). So a cold start
	// waits for one doubling only, and a store with few workers does not get everything at once.
	paceStart = 256
	// paceFloor leaves a place for Demand and enough others that a round is more than one request.
	paceFloor = 8
	// minGain is the least gain of a doubling: less than the 8% from 256 to 512 on the rig, and more than rounds
	// should differ by chance. It was derived by reasoning, not by measurement.
	minGain = 1.03
	// maxLoss bounds the cost of a halving, measured from the best, not from step to step.
	maxLoss = 0.98
	// carefulRounds are measured before each decision after the first climb: a wrong one lasts as long as its
	// patience. The climb decides by one round each, since staying low is expensive; if it stops too early the next
	// try corrects it.
	carefulRounds = 3
	// Rounds between tries: first 16 (a second or two on the rig), then twice as many after each try without gain. A
	// try costs 4 rounds of its loss.
	minPatience, maxPatience = 16, 256
	// changedRounds far from the base in a row mean that the store has changed: the base is measured again, and the
	// search restarts from there.
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
	return &pace{floor: min(paceFloor, ceiling), ceiling: ceiling, places: start, home: start, first: true,
		patience: minPatience}
}

// round takes the goodput, in bytes a second, of a round with the places in use, and returns the number of places for
// the next one.
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

// watch takes a round while holding.
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

// up goes to the next higher number, if there is one.
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

// throttled takes a SlowDown, and returns the number of places. Those of one round count once: they answer requests
// that were in flight together.
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
