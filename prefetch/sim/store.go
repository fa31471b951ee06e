package sim

import "math"

// request is one request to the store: for an extent, or for several adjacent samples.
type request struct {
	epoch   int // that it fetches for
	files   []int32
	extent  int32 // of each
	bytes   int64 // over the line
	left    int64 // of them, and of the answer's head
	from    source
	demand  bool // a reader waits
	ahead   bool // the stream has sent it
	started bool
}

// source says who answers a request.
type source struct {
	at line
	// via: a peer asks there, keeps it, and passes it on. It is a node like this one, which does the same for others.
	// So its work counts as this one's.
	via bool
}

type line uint8

const (
	atStore line = iota
	atNear
	atPeer
)

// wire is a line on which transfers take turns.
type wire struct {
	bandwidth float64
	transfers []*request // that wait for their turn, or have begun
	sending   *request   // the transfer whose turn it is; nil: none
	grain     int64      // what it sends
	turnEnds  float64
}

// store models the object store, and what is asked before it. A request waits for a place among Connections, of which
// the last eighth is for demand; for its turn of the serial work and of the request rate; for the first byte; and then
// for its bytes, over a line on which all transfers take turns. Near tier and peers have lines only.
type store struct {
	s        *simulation
	places   int           // in use
	aheads   int           // of them, started as prefetches
	waiting  [2][]*request // for a place; a demand's before those ahead
	cpuFree  float64       // when the serial work is free
	rateFree float64       // when the next request may go
	wires    [atPeer + 1]wire
}

// turn is how much a transfer sends in its turn. It matters if requests of one size begin together: with very short
// turns all of them end together, the line is idle until the next first bytes, and so on. A TCP connection has about
// 64 KiB in flight. A large request takes longer turns, for the simulator's speed.
const (
	turn  = 64 << 10
	turns = 16 // of a request at most
)

// head is the size of an answer's head on the line: negligible compared with 256 KiB, but a sixteenth of 8 KiB.
// versitygw's have 555 bytes, of a range 604; the documented headers of Amazon S3 add up to 400 to 460.
const head = 500

// Queues for a place.
const (
	demand = iota
	ahead
)

func (st *store) init(s *simulation) {
	near, peers := s.others()
	st.s = s
	st.wires[atStore].bandwidth = s.Bandwidth / float64(s.nodes())
	st.wires[atNear].bandwidth = near.Bandwidth / float64(s.nodes())
	st.wires[atPeer].bandwidth = peers.Bandwidth
}

// send sends a request whose memory is reserved.
func (st *store) send(r *request) {
	r.left = r.bytes + head
	st.s.result(r.epoch).count(r)
	if r.from.at != atStore {
		r.started = true
		st.start(r)
		return
	}
	q := ahead
	if r.demand {
		q = demand
	}
	st.waiting[q] = append(st.waiting[q], r)
	st.admit()
}

// raise makes a request urgent that a reader now waits for.
func (st *store) raise(r *request) {
	if !r.demand && !r.started {
		r.demand = true
		st.waiting[demand] = append(st.waiting[demand], r)
		st.admit()
	}
}

// admit gives places to waiting requests.
func (st *store) admit() {
	for q := range st.waiting {
		for len(st.waiting[q]) > 0 && st.places < st.s.Connections &&
			(q == demand || st.aheads < max(1, st.s.Connections-st.s.Connections/8)) {
			r := st.waiting[q][0]
			st.waiting[q] = st.waiting[q][1:]
			if !r.started { // it may have been raised, and so be in both queues
				r.started = true
				st.places++
				if !r.demand {
					st.aheads++
				}
				st.start(r)
			}
		}
	}
}

func (st *store) start(r *request) {
	s, from := st.s, r.from
	near, peers := s.others()
	at := s.now
	if s.CPU > 0 {
		st.cpuFree = max(st.cpuFree, at) + s.CPU
		if from.via {
			st.cpuFree += s.CPU
		}
		at = st.cpuFree
	}
	if from.via || from.at == atPeer {
		at += peers.Latency
	}
	if from.at != atPeer {
		at += near.Latency
	}
	if from.at == atStore {
		if s.RequestRate > 0 {
			at = max(at, st.rateFree)
			st.rateFree = at + float64(s.nodes())/s.RequestRate
		}
		latency := s.Latency
		if s.LatencySigma > 0 {
			latency *= math.Exp(s.LatencySigma * s.random.NormFloat64())
		}
		at += latency
	}
	s.agenda.add(event{at: at, kind: firstByte, request: r})
}

// arrived handles the first byte of an answer.
func (st *store) arrived(r *request) {
	w := &st.wires[r.from.at]
	if w.bandwidth == 0 {
		st.came(r)
		return
	}
	w.transfers = append(w.transfers, r)
	if w.sending == nil {
		st.nextTurn(w)
	}
}

func (st *store) nextTurn(w *wire) {
	if len(w.transfers) == 0 {
		w.sending = nil
		return
	}
	r := w.transfers[0]
	w.sending, w.transfers = r, w.transfers[1:]
	w.grain = min(r.left, max(turn, r.bytes/turns)+head) // no turn for the head alone
	w.turnEnds = st.s.now + float64(w.grain)/w.bandwidth
}

// soonest returns the line whose turn ends first, nil if all are idle.
func (st *store) soonest() (first *wire) {
	for i := range st.wires {
		if w := &st.wires[i]; w.sending != nil && (first == nil || w.turnEnds < first.turnEnds) {
			first = w
		}
	}
	return first
}

// turnEnded is called at turnEnds.
func (st *store) turnEnded(w *wire) {
	r := w.sending
	if r.left -= w.grain; r.left > 0 {
		w.transfers = append(w.transfers, r)
		st.nextTurn(w)
		return
	}
	st.nextTurn(w)
	st.came(r)
}

// came handles an answer that has come over one line, and may have to go over another.
func (st *store) came(r *request) {
	if r.from.at == atStore {
		st.places--
		if !r.demand {
			st.aheads--
		}
		st.s.put(r)
		st.admit()
	}
	if r.from.via {
		r.from = source{at: atPeer}
		r.left = r.bytes + head
		st.arrived(r)
		return
	}
	st.s.stream.landed(r)
	for _, f := range r.files {
		st.s.volume.landed(int(f), int(r.extent))
	}
}
