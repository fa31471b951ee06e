package run

import (
	"slices"
	"time"
)

// paceMeter measures a reader's speed: the median, over the last windows, of positions a second. A pause for a
// validation or a checkpoint falls into one window, and does not count; nor do bursts, since a window is longer than
// one batch.
type paceMeter struct {
	opens int
	began time.Time
	read  int // when the window began
	rates [15]float64
	n     int
	rate  float64 // positions a second; 0 until it is known
}

const (
	paceWindow  = 100 * time.Millisecond // the shortest
	paceMinRead = 16                     // positions read in it at least
)

// note is called at each open with the number of positions read in the pass.
func (m *paceMeter) note(now func() time.Time, read int) {
	if m.opens++; m.opens%paceMinRead != 1 {
		return // reading the clock costs as much as the rest of an open
	}
	t := now()
	switch took := t.Sub(m.began); {
	case m.began.IsZero() || read < m.read: // another pass
	case took < paceWindow || read-m.read < paceMinRead:
		return
	default:
		m.rates[m.n%len(m.rates)] = float64(read-m.read) / took.Seconds()
		m.n++
		rates := m.rates
		some := rates[:min(m.n, len(rates))]
		slices.Sort(some)
		m.rate = some[len(some)/2]
	}
	m.began, m.read = t, read
}
