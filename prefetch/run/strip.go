package run

import "github.com/shoalfs/shoal/cache"

// Strip is a map of a sequence of samples in cells of equal length, the last of which may be shorter. A value of a
// cell is the share of its samples with a property, in percent, a byte each (base64 in JSON); Read + Kept + Ring +
// Flying <= 100, and the rest is in the store only. In cells of many samples an even selection stands for all.
type Strip struct {
	Name  string `json:"name"`
	Epoch int    `json:"epoch"`
	Len   int    `json:"len"`   // samples, or positions
	Cells int    `json:"cells"` // bytes of each of the following
	Exact bool   `json:"exact"` // every sample was checked

	Read   []byte `json:"read,omitempty"` // of an order: read in this pass, wherever the sample is
	Kept   []byte `json:"kept"`           // on disk
	Ring   []byte `json:"ring"`           // in memory only
	Flying []byte `json:"flying"`         // on its way

	// Of an order: the reader's place. Nothing is expected before Frontier, Position is the highest position read + 1,
	// and requests were sent up to Planned.
	Frontier int `json:"frontier"`
	Position int `json:"position"`
	Planned  int `json:"planned"`
}

// cellProbes is how many samples of a cell are checked: a strip costs some milliseconds for any dataset.
const cellProbes = 16

// Strip returns the map of the epoch that the stream's reader is in.
func (s *Stream) Strip(cells int) Strip {
	s.runner.mu.Lock()
	o, pass := s.tracker.Order(), s.tracker.Pass()
	m := newStrip(s.Name, o.Len(), cells)
	m.Epoch, m.Frontier, m.Position, m.Planned = s.tracker.Epoch(), s.tracker.Frontier(), s.tracker.Head(),
		s.walk.Planned()
	s.runner.mu.Unlock()
	m.fill(func(pos []int, was []bool) {
		s.runner.mu.Lock() // per cell, since every open takes it
		defer s.runner.mu.Unlock()
		for i, p := range pos {
			was[i] = s.tracker.Pass() == pass && s.tracker.Read(p)
		}
	}, func(pos int) cache.Residence { return s.of.Residence(o.At(pos)) })
	return m
}

// NewStrip checks n samples, each at the place that where returns.
func NewStrip(name string, n, cells int, where func(sample int) cache.Residence) Strip {
	m := newStrip(name, n, cells)
	m.fill(nil, where)
	return m
}

func newStrip(name string, n, cells int) Strip {
	return Strip{Name: name, Len: n, Cells: min(n, cells), Exact: n <= cells*cellProbes}
}

// fill checks the strip's samples. read, which may be nil, tells which positions were read; it is not called for
// those before Frontier, which all were.
func (m *Strip) fill(read func(pos []int, was []bool), where func(pos int) cache.Residence) {
	m.Kept, m.Ring, m.Flying = make([]byte, m.Cells), make([]byte, m.Cells), make([]byte, m.Cells)
	if read != nil {
		m.Read = make([]byte, m.Cells)
	}
	var pos [cellProbes]int
	var was [cellProbes]bool
	for c := range m.Cells {
		from, to := c*m.Len/m.Cells, (c+1)*m.Len/m.Cells
		n := min(to-from, cellProbes)
		for i := range n {
			pos[i], was[i] = from+i*(to-from)/n, false
		}
		if read != nil && to > m.Frontier {
			read(pos[:n], was[:n])
		}
		var count [cache.OnDisk + 1]int
		have := 0
		for i := range n {
			if read != nil && (was[i] || pos[i] < m.Frontier) {
				have++
				continue
			}
			count[where(pos[i])]++
		}
		percent := func(k int) byte { return byte(k * 100 / n) }
		m.Kept[c], m.Ring[c], m.Flying[c] = percent(count[cache.OnDisk]), percent(count[cache.InMemory]),
			percent(count[cache.OnWay])
		if read != nil {
			m.Read[c] = percent(have)
		}
	}
}
