package sim

import "math"

// kind is the kind of an event.
type kind uint8

const (
	firstByte   kind = iota // of a request's answer
	stepEnd                 // of all accelerators
	workerReady             // with the sample that it has read
)

type event struct {
	at   float64
	seq  uint64 // simultaneous events happen in the order of planning
	id   int32
	kind kind
}

func (e event) before(o event) bool { return e.at < o.at || e.at == o.at && e.seq < o.seq }

// agenda is the queue of future events, the soonest first: a binary heap. container/heap boxes every element, which would
// halve the simulator's speed.
type agenda struct {
	items []event
	seq   uint64
}

func (a *agenda) add(at float64, k kind, id int32) {
	a.seq++
	a.push(event{at, a.seq, id, k})
}

func (a *agenda) peek() (top event, ok bool) {
	if len(a.items) == 0 {
		return top, false
	}
	return a.items[0], true
}

func (a *agenda) push(x event) {
	a.items = append(a.items, x)
	i := len(a.items) - 1
	for i > 0 {
		parent := (i - 1) / 2
		if !x.before(a.items[parent]) {
			break
		}
		a.items[i] = a.items[parent]
		i = parent
	}
	a.items[i] = x
}

// pop removes the first element, which must exist.
func (a *agenda) pop() event {
	top := a.items[0]
	last := len(a.items) - 1
	x := a.items[last]
	a.items = a.items[:last]
	if last == 0 {
		return top
	}
	i := 0
	for {
		child := 2*i + 1
		if child >= last {
			break
		}
		if child+1 < last && a.items[child+1].before(a.items[child]) {
			child++
		}
		if !a.items[child].before(x) {
			break
		}
		a.items[i] = a.items[child]
		i = child
	}
	a.items[i] = x
	return top
}

// queue is first in, first out, in a ring of a power of two.
type queue struct {
	ring     []int32
	from, to uint
}

func (q *queue) len() int { return int(q.to - q.from) }

func (q *queue) push(id int32) {
	if q.len() == len(q.ring) {
		larger := make([]int32, max(2*len(q.ring), 16))
		for i := q.from; i != q.to; i++ {
			larger[i-q.from] = q.ring[i%uint(len(q.ring))]
		}
		q.ring, q.from, q.to = larger, 0, q.to-q.from
	}
	q.ring[q.to%uint(len(q.ring))] = id
	q.to++
}

// pop removes the first element, which must exist.
func (q *queue) pop() int32 {
	id := q.ring[q.from%uint(len(q.ring))]
	q.from++
	return id
}

// random is SplitMix64.
type random struct {
	state uint64
	spare float64
	has   bool
}

func (r *random) uint64() uint64 {
	r.state += 0x9e3779b97f4a7c15
	z := r.state
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}

// uniform returns a number in (0,1).
func (r *random) uniform() float64 { return (float64(r.uint64()>>11) + 0.5) / (1 << 53) }

// normal returns a number of the standard normal distribution, by the method of Box and Muller.
func (r *random) normal() float64 {
	if r.has {
		r.has = false
		return r.spare
	}
	radius := math.Sqrt(-2 * math.Log(r.uniform()))
	sin, cos := math.Sincos(2 * math.Pi * r.uniform())
	r.spare, r.has = radius*sin, true
	return radius * cos
}
