package fusefs

import (
	"slices"
	"sync"
	"sync/atomic"

	"github.com/hanwen/go-fuse/v2/fuse"

	"github.com/shoalfs/shoal/cache/catalog"
)

// nodeID identifies a node to the kernel:
//
//	bit 63        40 39  36 35                                0
//	   +------------+------+-----------------------------------+
//	   | generation | kind | number of the file or directory   |
//	   +------------+------+-----------------------------------+
//
// The root is always 1, in every generation. Control nodes have generation 0.
type nodeID uint64

type kind uint8

const (
	kindNone kind = iota
	kindDir
	kindFile
	kindControl
)

const (
	rootID          = nodeID(fuse.FUSE_ROOT_ID)
	kindShift       = 36
	generationShift = 40
	indexMask       = 1<<kindShift - 1
)

func makeID(generation uint64, k kind, index int) nodeID {
	return nodeID(generation<<generationShift | uint64(k)<<kindShift | uint64(index))
}

func (id nodeID) generation() uint64 { return uint64(id) >> generationShift }
func (id nodeID) kind() kind         { return kind(id >> kindShift & 0xf) }
func (id nodeID) index() int         { return int(id & indexMask) }

// generation is one version of the dataset as the kernel knows it.
type generation struct {
	number   uint64
	manifest *catalog.Manifest

	// refs counts the kernel's lookups and the open handles of the root folder. It is very negative once the
	// generation is retired.
	refs atomic.Int64
}

const retired = -1 << 62

// retain adds n references. It fails if the generation was retired meanwhile.
func (g *generation) retain(n int64) bool { return g.refs.Add(n) > 0 }

// generations has every version with nodes known to the kernel.
type generations struct {
	volume Volume
	newest atomic.Pointer[generation]
	older  atomic.Pointer[[]*generation] // copied on write, nearly always empty
	mu     sync.Mutex                    // serializes changes of both
	note   func(g *generation) error     // before the kernel learns of it
}

// foreign is more references than the kernel can drop: those that an earlier process gave.
const foreign = 1 << 60

// newGenerations returns the versions that the kernel knows: those of an earlier process, and the one in force.
func newGenerations(v Volume, earlier []Word) *generations {
	s := &generations{volume: v, note: func(*generation) error { return nil }}
	var older []*generation
	last := uint64(0)
	h, _ := v.(Historian)
	for _, w := range earlier {
		if w.Generation == 0 {
			continue
		}
		last = w.Generation
		if m := h.VersionNamed(w.Version); m != nil {
			g := &generation{number: last, manifest: m}
			g.refs.Store(foreign)
			older = append(older, g)
		}
	}
	newest := &generation{number: last + 1, manifest: v.Manifest()}
	if n := len(older) - 1; n >= 0 && older[n].number == last && older[n].manifest == newest.manifest {
		older, newest = older[:n], older[n]
	}
	s.newest.Store(newest)
	s.older.Store(&older)
	return s
}

// known returns the latest version of which the kernel may know names.
func (s *generations) known() *catalog.Manifest {
	if older := *s.older.Load(); len(older) > 0 {
		return older[len(older)-1].manifest
	}
	return s.newest.Load().manifest
}

// current returns the generation of the version in force, which it creates if necessary.
func (s *generations) current() *generation {
	g := s.newest.Load()
	if s.volume.Manifest() == g.manifest {
		return g
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	g = s.newest.Load()
	m := s.volume.Manifest()
	if m == g.manifest {
		return g
	}
	next := &generation{number: g.number + 1, manifest: m}
	if s.note(next) != nil {
		return g // the old version stays in force: nobody could serve the new one's nodes later
	}
	// Into older first: a reader looks at newest, then at older, and must find g in one of them.
	older := append(slices.Clone(*s.older.Load()), g)
	s.older.Store(&older)
	s.newest.Store(next)
	s.prune()
	return next
}

// find returns the generation with the given number, or nil.
func (s *generations) find(number uint64) *generation {
	if g := s.newest.Load(); g.number == number {
		return g
	}
	for _, g := range *s.older.Load() {
		if g.number == number {
			return g
		}
	}
	// It may have moved from newest to older in between, or have become newest.
	if g := s.newest.Load(); g.number == number {
		return g
	}
	return nil
}

// release removes n references.
func (s *generations) release(g *generation, n int64) {
	if g.refs.Add(-n) == 0 && g != s.newest.Load() {
		s.mu.Lock()
		s.prune()
		s.mu.Unlock()
	}
}

// prune retires older generations without references. s.mu is held.
func (s *generations) prune() {
	kept := slices.DeleteFunc(slices.Clone(*s.older.Load()), func(g *generation) bool {
		return g.refs.CompareAndSwap(0, retired)
	})
	s.older.Store(&kept)
}
