package infer

import (
	"math"
	"slices"
)

const (
	// wanted is the evidence, in bits, that a lock requires: 32 for the seeds, 5 for the subset ([maxSubsets]) and the
	// origin of the seed, and 64 for the odds that an unrelated trace looks like it.
	wanted = 32 + 5 + 64
	// wantedNear is the same if only some 100 successors of a known shuffle are tried.
	wantedNear = 7 + 64
	// wantedKnown is the same for the epochs of shuffles found in an earlier run.
	wantedKnown = 13 + 64

	// Shares of a process's opens that continue by a known stride, by another step forwards, and anywhere.
	sharePace  = 0.75
	shareStep  = 0.20
	shareNoise = 0.05
	// shareStart is the share of processes whose first open is near the beginning at a batch's boundary, at no
	// particular scale; the others start anywhere.
	shareStart = 0.7

	// Places at which a process may continue. A worker has one; the others allow for an unrelated open. If processes
	// are unknown the places are those of all workers.
	maxPlaces    = 3
	maxPlacesAll = 64
	// Strides expected: within a batch, from batch to batch, and one more.
	maxStrides = 3
	// maxVotes bounds the memory for finding them.
	maxVotes = 1 << 12
)

// model gives the probability of the next open if its reader follows a certain order. Opens are grouped by process:
// worker w of W reads the batches w, w+W, … in sequence, so it moves through the order by the world size, and at the
// end of a batch by W-1 batches more. The model does not know these: it learns strides, and unknown steps have the
// scale-free prior 1/g.
//
// For each open it gives a probability to every unread position; the sum is at most 1. In a random permutation
// unrelated to the trace each of the u unread positions would have the probability 1/u. So the product of (u ×
// probability) over the opens of any trace has an expectation of at most 1 over all permutations, at every moment,
// and exceeds 2^b with a probability of at most 2^-b (Ville's inequality; J. Ville, "Étude critique de la notion de
// collectif", 1939). A process may also not read the order at all: both have even odds, which costs at most 1 bit.
type model struct {
	apart   bool    // each process is a reader of its own
	z       float64 // bounds the harmonic number of n from above
	read    setBits // positions
	count   int
	pace    []stride       // the most frequent ones, most frequent first
	votes   map[stride]int // how often an open was at this distance from a place
	readers map[uint32]*reader
	bits    float64 // evidence of all readers

	paces    map[int]int    // how often each stride explained an open
	residues map[int][]bool // for each of these strides, the positions modulo it
}

type stride = int

// reader is a process, or all of them if they cannot be distinguished.
type reader struct {
	places []int // latest positions, the latest first
	bits   float64
}

// newModel returns a model for an order of n samples of which the first known positions are known. together treats
// all processes as one reader, such as threads that take turns.
func newModel(n, known int, together bool) *model {
	return &model{apart: !together, z: 1 + math.Log(float64(n)), read: newSet(known), votes: map[stride]int{},
		readers: map[uint32]*reader{}, paces: map[int]int{}, residues: map[int][]bool{}}
}

// open processes an open at an unread position, -1 if that is beyond the known ones, and returns its evidence in bits.
func (m *model) open(process uint32, pos, unread int) (bits float64) {
	if !m.apart {
		process = 0
	}
	r := m.readers[process]
	if r == nil {
		r = &reader{}
		m.readers[process] = r
	}
	limit := maxPlaces
	if process == 0 {
		limit = maxPlacesAll
	}
	p, from, pace := m.density(r, pos, unread, limit)
	bits = math.Log2(p * float64(unread))
	m.bits -= r.weight()
	r.bits += bits
	m.bits += r.weight()
	if pos < 0 {
		return bits
	}
	m.read.add(pos)
	m.count++
	for _, at := range r.places {
		if d := pos - at; d > 0 {
			m.vote(d)
		}
	}
	if pace {
		// It was at this place. Otherwise it may have been anywhere.
		m.note(pos-r.places[from], pos)
		r.places = slices.Delete(r.places, from, from+1)
	}
	if len(r.places) >= limit {
		r.places = r.places[:limit-1]
	}
	r.places = slices.Insert(r.places, 0, pos)
	return bits
}

// weight is the evidence of a process that may not follow the order.
func (r *reader) weight() float64 {
	if r.bits > 50 {
		return r.bits - 1
	}
	return math.Log2(0.5 + 0.5*math.Exp2(r.bits))
}

// density returns the probability of the next open, and the place that it most probably continues, -1 if none; pace
// says that it does so by a known stride.
func (m *model) density(r *reader, pos, unread, limit int) (p float64, from int, pace bool) {
	uniform := 1 / float64(unread)
	if len(r.places) == 0 {
		p = (1 - shareStart) * uniform
		if pos >= 0 {
			p += shareStart / (m.z * float64(pos+1))
		}
		return p, -1, false
	}
	p, from = shareNoise*uniform, -1
	if pos < 0 {
		return p, -1, false
	}
	zPlaces, zPace := 1+math.Log(float64(limit)), 1+math.Log(maxStrides)
	best := p
	for i, at := range r.places {
		d := pos - at
		if d <= 0 {
			continue
		}
		place := 1 / (zPlaces * float64(i+1))
		q := shareStep * place / (m.z * float64(d))
		known := slices.Index(m.pace, d)
		if known >= 0 {
			q += sharePace * place / (zPace * float64(known+1))
		}
		p += q
		if q > best {
			best, from, pace = q, i, known >= 0
		}
	}
	return p, from, pace
}

// paced returns the process, nil if unknown, and the place from which it came to pos by a usual stride; -1 if none.
func (m *model) paced(process uint32, pos int) (r *reader, from int) {
	if !m.apart {
		process = 0
	}
	if r = m.readers[process]; r == nil {
		return nil, -1
	}
	return r, slices.IndexFunc(r.places, func(at int) bool { return slices.Contains(m.pace, pos-at) })
}

// vote counts a step of d positions, and keeps pace in order.
func (m *model) vote(d stride) {
	if len(m.votes) == maxVotes {
		m.votes = map[stride]int{}
		for i, d := range m.pace {
			m.votes[d] = len(m.pace) - i
		}
	}
	m.votes[d]++
	i := slices.Index(m.pace, d)
	switch {
	case i >= 0:
	case len(m.pace) < maxStrides:
		m.pace = append(m.pace, d)
		i = len(m.pace) - 1
	case m.votes[d] > m.votes[m.pace[maxStrides-1]]:
		i = maxStrides - 1
		m.pace[i] = d
	}
	for ; i > 0 && m.votes[d] > m.votes[m.pace[i-1]]; i-- {
		m.pace[i-1], m.pace[i] = d, m.pace[i-1]
	}
}

// note counts an open at pos that a usual stride explains.
func (m *model) note(d stride, pos int) {
	if d > maxWorld {
		return
	}
	m.paces[d]++
	if m.residues[d] == nil {
		m.residues[d] = make([]bool, d)
	}
	m.residues[d][pos%d] = true
}

// maxWorld is the largest world that is distinguished from a single rank's reads.
const maxWorld = 4096

// ranks returns the world size and the ranks whose opens were seen: the smallest of the usual strides,
// and the positions modulo it. A mount that serves all ranks needs no world.
func (m *model) ranks() (world, first, last int) {
	world = m.usualPace()
	if world <= 1 {
		return 1, 0, 0
	}
	first = slices.Index(m.residues[world], true)
	for rank, seen := range m.residues[world] {
		if seen {
			last = rank
		}
	}
	if last-first == world-1 {
		return 1, 0, 0
	}
	return world, first, last
}

// usualPace returns the smallest usual stride of a process: the number of ranks, mostly.
func (m *model) usualPace() (pace stride) {
	most := 0
	for _, n := range m.paces {
		most = max(most, n)
	}
	for d, n := range m.paces {
		if 2*n >= most && (pace == 0 || d < pace) {
			pace = d
		}
	}
	return pace
}
