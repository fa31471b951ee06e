package segment

import (
	"maps"
	"slices"
	"sync"
)

// mapIndex is an Index in memory.
type mapIndex struct {
	mu   sync.Mutex
	segs map[uint32]cover
	fail error // what commits fail with
}

func (x *mapIndex) CommitSegment(id uint32, size int64, sealed bool, table []byte) error {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.fail != nil {
		return x.fail
	}
	if x.segs == nil {
		x.segs = make(map[uint32]cover)
	}
	x.segs[id] = cover{size, sealed, slices.Clone(table)}
	return nil
}

func (x *mapIndex) LoadSegments(yield func(id uint32, size int64, sealed bool, table []byte) error) error {
	x.mu.Lock()
	segs := maps.Clone(x.segs)
	x.mu.Unlock()
	for _, id := range slices.Sorted(maps.Keys(segs)) {
		c := segs[id]
		if err := yield(id, c.size, c.sealed, c.table); err != nil {
			return err
		}
	}
	return nil
}

func (x *mapIndex) DropSegment(id uint32) error {
	x.mu.Lock()
	defer x.mu.Unlock()
	delete(x.segs, id)
	return nil
}
