package cache

// Place is where an extent is.
type Place uint8

// The places, in the order in which a read looks.
const (
	Remote  Place = iota // only in the object store
	Fetched              // on its way
	InRing               // in memory
	Kept                 // on disk
)

// Where tells where a read of the extent would find it now. It may move at any moment.
func (v *Volume) Where(file, extent int) Place {
	e := v.extent(file, extent)
	switch {
	case v.c.ring.has(v.key(e)):
		return InRing
	case v.onDisk(e):
		return Kept
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	switch _, flying := v.flights[e]; {
	case flying:
		return Fetched
	case v.c.ring.has(v.key(e)): // it arrived meanwhile
		return InRing
	case v.onDisk(e): // and went on
		return Kept
	}
	return Remote
}
