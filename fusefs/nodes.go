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
	all    atomic.Pointer[[]*generation]        // copied on write; the newest last, nearly always alone
	mu     sync.Mutex                           // serializes changes
	note   func(g *generation, gone bool) error // before the kernel learns of it, and when it knows none of its nodes
}

const foreign = 1 << 60 // more references than the kernel can drop: those that an earlier process gave

// newGenerations returns the versions that the kernel knows: those of an earlier process, and the one in force.
func newGenerations(v Volume, earlier []Word) *generations {
	s := &generations{volume: v, note: func(*generation, bool) error { return nil }}
	var all []*generation
	last := uint64(0)
	for _, w := range earlier {
		if w.Generation == 0 {
			continue
		}
		last = w.Generation
		if m := v.VersionNamed(w.Version); m != nil {
			g := &generation{number: last, manifest: m}
			g.refs.Store(foreign)
			all = append(all, g)
		}
	}
	if n := len(all) - 1; n < 0 || all[n].number != last || all[n].manifest != v.Manifest() {
		all = append(all, &generation{number: last + 1, manifest: v.Manifest()})
	}
	s.all.Store(&all)
	return s
}

func (s *generations) newest() *generation {
	all := *s.all.Load()
	return all[len(all)-1]
}

// known returns the latest version of which the kernel may know names.
func (s *generations) known() *catalog.Manifest {
	all := *s.all.Load()
	return all[max(len(all)-2, 0)].manifest
}

// current returns the generation of the version in force, which it creates if necessary.
func (s *generations) current() *generation {
	g := s.newest()
	if s.volume.Manifest() == g.manifest {
		return g
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	g = s.newest()
	m := s.volume.Manifest()
	if m == g.manifest {
		return g
	}
	next := &generation{number: g.number + 1, manifest: m}
	if s.note(next, false) != nil {
		return g // the old version stays in force: nobody could serve the new one's nodes later
	}
	s.prune(next)
	return next
}

func (s *generations) find(number uint64) *generation {
	for _, g := range slices.Backward(*s.all.Load()) {
		if g.number == number {
			return g
		}
	}
	return nil
}

func (s *generations) release(g *generation, n int64) {
	if g.refs.Add(-n) == 0 && g != s.newest() {
		s.mu.Lock()
		s.prune(s.newest())
		s.mu.Unlock()
	}
}

// prune retires generations without references, but for newest, which is added unless it is there. s.mu is held.
func (s *generations) prune(newest *generation) {
	kept := slices.DeleteFunc(slices.Clone(*s.all.Load()), func(g *generation) bool {
		switch {
		case g == newest:
		case g.refs.CompareAndSwap(0, retired):
			_ = s.note(g, true) // without it a later process keeps the version
		default:
			return false
		}
		return true
	})
	kept = append(kept, newest)
	s.all.Store(&kept)
}
