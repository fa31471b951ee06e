package prefetch

// Pace is where a reader stands and how fast it goes on. It is measured by whoever has a clock.
type Pace struct {
	Head int     // highest position read + 1
	Rate float64 // positions a second; 0: not known
}

// Due returns in how many seconds from now the reader is expected to ask for a position; 0 where that may
// be at any moment, since others behind it have been read. ok is false where the pace is not known.
func (p Pace) Due(pos int) (seconds float64, ok bool) {
	if pos < p.Head {
		return 0, true
	}
	if p.Rate <= 0 {
		return 0, false
	}
	return float64(pos-p.Head) / p.Rate, true
}
