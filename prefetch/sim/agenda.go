package sim

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

// agenda is the queue of future events, the soonest first: a binary heap. container/heap boxes every element, which
// would halve the simulator's speed.
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
