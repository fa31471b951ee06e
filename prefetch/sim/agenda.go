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

func (e event) Before(o event) bool { return e.at < o.at || e.at == o.at && e.seq < o.seq }

// agenda is the queue of future events, the soonest first.
type agenda struct {
	heap[event]
	seq uint64
}

func (a *agenda) add(at float64, k kind, id int32) {
	a.seq++
	a.push(event{at, a.seq, id, k})
}

// heap is a binary heap. container/heap boxes every element, which would halve the simulator's speed.
type heap[T interface{ Before(T) bool }] struct{ items []T }

func (h *heap[T]) peek() (top T, ok bool) {
	if len(h.items) == 0 {
		return top, false
	}
	return h.items[0], true
}

func (h *heap[T]) push(x T) {
	h.items = append(h.items, x)
	i := len(h.items) - 1
	for i > 0 {
		parent := (i - 1) / 2
		if !x.Before(h.items[parent]) {
			break
		}
		h.items[i] = h.items[parent]
		i = parent
	}
	h.items[i] = x
}

// pop removes the first element, which must exist.
func (h *heap[T]) pop() T {
	top := h.items[0]
	last := len(h.items) - 1
	x := h.items[last]
	h.items = h.items[:last]
	if last == 0 {
		return top
	}
	i := 0
	for {
		child := 2*i + 1
		if child >= last {
			break
		}
		if child+1 < last && h.items[child+1].Before(h.items[child]) {
			child++
		}
		if !h.items[child].Before(x) {
			break
		}
		h.items[i] = h.items[child]
		i = child
	}
	h.items[i] = x
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
