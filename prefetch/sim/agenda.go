package sim

import (
	"cmp"
	"slices"
)

type kind uint8

const (
	firstByte   kind = iota // of a request's answer
	stepEnd                 // of all accelerators
	workerReady             // with the sample that it has read
)

type event struct {
	at      float64
	kind    kind
	request *request // firstByte's
	worker  int      // workerReady's
}

// agenda is the queue of future events, the soonest first. Simultaneous ones happen in the order of planning. Most are
// planned for later than nearly all others, so few move.
type agenda []event

func (a *agenda) add(e event) {
	i, _ := slices.BinarySearchFunc(*a, e, func(a, b event) int { return cmp.Or(cmp.Compare(a.at, b.at), -1) })
	*a = slices.Insert(*a, i, e)
}
