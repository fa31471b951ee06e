package prefetch

// Pace is a reader's position and speed. The caller, which has a clock, measures it.
type Pace struct {
	Head int     // highest position read + 1
	Rate float64 // positions a second; 0: unknown
}

// Due returns in how many seconds the reader is expected to need a position; 0 if that may be at any moment, since
// later positions were read. ok is false if the pace is unknown.
func (p Pace) Due(pos int) (seconds float64, ok bool) {
	if pos < p.Head {
		return 0, true
	}
	if p.Rate <= 0 {
		return 0, false
	}
	return float64(pos-p.Head) / p.Rate, true
}
