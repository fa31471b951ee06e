package engine

import (
	"sync"

	"github.com/shoalfs/shoal/cache"
)

// streams is every stream that prefetches, and every file that readers have open: memory that one
// stream has claimed must not be taken away because another's reader is done with it, nor before the
// reader has had it. The lock mu comes before the streams' own.
type streams struct {
	mu  sync.RWMutex
	set map[*Stream]struct{}

	openMu sync.Mutex
	open   map[volumeFile]int // how often, 1 or more
}

type volumeFile struct {
	v    *cache.Volume
	file int
}

// opened says that a reader is about to read the file. It calls done in the end.
func (l *streams) opened(v *cache.Volume, file int) {
	l.openMu.Lock()
	defer l.openMu.Unlock()
	if l.open == nil {
		l.open = map[volumeFile]int{}
	}
	l.open[volumeFile{v, file}]++
}

// done says that a reader is done with the file.
func (l *streams) done(v *cache.Volume, file int) {
	k := volumeFile{v, file}
	l.openMu.Lock()
	switch l.open[k] {
	case 0, 1:
		delete(l.open, k)
	default:
		l.open[k]--
	}
	l.openMu.Unlock()
	l.spend(v, file)
}

func (l *streams) isOpen(v *cache.Volume, file int) bool {
	l.openMu.Lock()
	defer l.openMu.Unlock()
	return l.open[volumeFile{v, file}] > 0
}

func (l *streams) add(s *Stream) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.set == nil {
		l.set = map[*Stream]struct{}{}
	}
	l.set[s] = struct{}{}
}

func (l *streams) remove(s *Stream) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.set, s)
}

func (l *streams) wants(v *cache.Volume, file int) bool {
	if l.isOpen(v, file) {
		return true
	}
	l.mu.RLock()
	defer l.mu.RUnlock()
	for s := range l.set {
		if s.volume == v && s.wants(file) {
			return true
		}
	}
	return false
}

// spend lets what is staged of the file be recycled if nobody wants it any more.
func (l *streams) spend(v *cache.Volume, file int) {
	if !l.wants(v, file) {
		v.Spend(file)
	}
}

// sweep gives up what is staged for nobody.
func (l *streams) sweep(v *cache.Volume) {
	v.Sweep(func(file int) bool { return l.wants(v, file) })
}
