package engine

import (
	"slices"
	"sync"
	"sync/atomic"

	"github.com/shoalfs/shoal/cache"
)

// streams is every stream that prefetches, and every file that readers have open: memory that one
// stream has claimed must not be taken away because another's reader is done with it, nor before the
// reader has had it.
type streams struct {
	mu  sync.Mutex
	all atomic.Pointer[[]*Stream] // replaced, never changed

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
	all := append(slices.Clone(l.list()), s)
	l.all.Store(&all)
}

func (l *streams) remove(s *Stream) {
	l.mu.Lock()
	defer l.mu.Unlock()
	all := slices.DeleteFunc(slices.Clone(l.list()), func(t *Stream) bool { return t == s })
	l.all.Store(&all)
}

func (l *streams) list() []*Stream {
	if all := l.all.Load(); all != nil {
		return *all
	}
	return nil
}

// mustYield reports whether another stream that finds no memory is less far ahead of its reader than
// s: then s leaves what comes free to it, so that several readers share memory evenly however early
// one of them began.
func (l *streams) mustYield(s *Stream, ahead int) bool {
	for _, t := range l.list() {
		if t != s && t.starved.Load() && t.ahead.Load() < int64(ahead) {
			return true
		}
	}
	return false
}

func (l *streams) wants(v *cache.Volume, file int) bool {
	if l.isOpen(v, file) {
		return true
	}
	for _, s := range l.list() {
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
