package cache

// Residence is where bytes are.
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
		if !v.KeptExtent(file, x) {
			where = min(where, v.Where(file, x))
		}
	}
	return where
}

// Where tells where a read of the extent would find it now, in memory first. It may move at any moment.
func (v *Volume) Where(file, x int) Residence {
	k := v.key(v.extent(file, x))
	if w := k.staged(); w > InStore {
		return w
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.flights[k.piece] != nil {
		return OnWay
	}
	return k.staged()
}

// staged looks in memory and on disk, in the order in which an extent moves on.
func (k extentKey) staged() Residence {
	switch {
	case k.maybe():
		return InMemory
	case k.v.onDisk(k.extent()):
		return OnDisk
	}
	return InStore
}

// here reports whether an extent is here or on its way. The volume's lock is held.
func (k extentKey) here() bool { return k.v.flights[k.piece] != nil || k.staged() > InStore }

// Staged reports whether the extent can be read without waiting.
func (v *Volume) Staged(file, x int) bool { return v.key(v.extent(file, x)).staged() > InStore }

// KeptExtent reports whether the extent is on disk.
func (v *Volume) KeptExtent(file, x int) bool { return v.onDisk(v.extent(file, x)) }
