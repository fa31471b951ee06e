package cache

// Residence is where a file's bytes are.
type Residence uint8

// The places, from far to near.
const (
	InStore  Residence = iota // to be fetched
	OnWay                     // being fetched
	InMemory                  // staged in the ring
	OnDisk                    // kept
)

// Residence returns where the file is; of several extents, the farthest place.
func (v *Volume) Residence(file int) Residence {
	where := OnDisk
	for x := 0; x < v.Extents(file) && where > InStore; x++ {
		where = min(where, v.residence(v.extent(file, x)))
	}
	return where
}

func (v *Volume) residence(e uint32) Residence {
	inRing := v.key(e).maybe
	switch {
	case v.onDisk(e):
		return OnDisk
	case inRing():
		return InMemory
	}
	// Looked up again under the lock, in the order in which an extent moves: flight, ring, disk.
	v.mu.Lock()
	defer v.mu.Unlock()
	switch _, flying := v.flights[e]; {
	case flying:
		return OnWay
	case inRing():
		return InMemory
	case v.onDisk(e):
		return OnDisk
	}
	return InStore
}
