package engine

import (
	"slices"
	"sync"
	"sync/atomic"

	"github.com/shoalfs/shoal/cache"
)

// streams is every stream that prefetches, and every file that readers have open. It is where streams
// share.
//
// # Fetches
//
// A stream takes what it finds staged or on its way, whoever asked for it (Volume.Claim); and what one
// reader is done with stays in memory for the next stream that has it in its plan (Volume.Hand). So
// trainers that read one dataset in one order fetch each byte once together, as long as the distance
// between them fits what the ones behind may hold: of k streams of equal weight, each an equal part of
// the memory M, however far the others are. A stream that falls further behind fetches for itself from
// then on, once more what it has left; the one ahead is held back by nothing but its own share.
// That is a choice. Of two readers that the store limits, the one behind reads from memory and catches
// up by itself; the one that stays behind is slower by itself, and to wait for it would make
// both slow.
//
// Independent orders share what chance allows. A file that a stream plans is one that lies in the memory
// of the others, of M bytes, with probability M/N for a dataset of N, since that file is uniformly
// distributed over the dataset whatever the others have staged: each stream fetches (1−f)·N·(1−M/N)
// bytes an epoch in the mean, and no way of choosing what to retain does better without moving reads
// from their places in the order: whatever is retained takes the place of something that is as likely
// to be asked for next.
//
// # Memory and places
//
// Both go by weight, and only where there is not enough: what one stream leaves, another takes. Memory
// that comes free goes to the stream that holds the least for its weight (mustYield), and one that holds
// much less than another takes from it what that one needs last (Cache.TakeBack). So a slow
// reader keeps no more than its share from a fast one. Places in flight go by start-time fair queueing (see
// gate).
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

// mustYield reports whether another stream that found no memory holds less of it for its weight than s: then
// s leaves what comes free to it. That one is woken, since memory may have come free that it left to s.
func (l *streams) mustYield(s *Stream) bool {
	for _, t := range l.list() {
		if t != s && t.starved.Load() && t.account.Load() < s.account.Load() {
			t.poke()
			return true
		}
	}
	return false
}

// passOn wakes those who left memory to s.
func (l *streams) passOn(s *Stream) {
	for _, t := range l.list() {
		if t != s && t.starved.Load() {
			t.poke()
		}
	}
}

// share returns the part of the memory for prefetching that is due to s when all streams want it.
func (l *streams) share(s *Stream) float64 {
	all := 0
	for _, t := range l.list() {
		all += t.weight
	}
	return float64(s.weight) / float64(max(all, s.weight))
}

// reach returns how many files a stream's share of the memory holds. What another's reader has read of the
// next so many files is retained for s, also where s has not planned them yet.
func (l *streams) reach(s *Stream) int {
	room := l.share(s) * float64(s.engine.cache.Ledger().Limit()*7/8)
	return int(room / float64(s.mean+1))
}

// payer returns the account on which a file had best be, nil if nobody wants it.
func (l *streams) payer(v *cache.Volume, file int) *cache.Account {
	if next := l.wanting(v, file); next != nil {
		return next.account
	}
	return nil
}

// wanting returns the stream that what is staged of the file is to count for: of those that are still to
// read it, the one that holds the least memory for its weight. It is nil if there is none.
func (l *streams) wanting(v *cache.Volume, file int) (next *Stream) {
	for _, s := range l.list() {
		if s.volume == v && (next == nil || s.account.Load() < next.account.Load()) && s.wants(file) {
			next = s
		}
	}
	return next
}

// spend is told that nobody reads the file for the moment. What is staged of it stays for the stream that
// wants it next, or may be recycled if none does.
//
// A stream may come to want the file, or read it, between the question and the deed, so the question is
// asked again afterwards. Were it not, a stream would take for staged what is gone, and its reader would
// wait for the store.
func (l *streams) spend(v *cache.Volume, file int) {
	for !l.isOpen(v, file) {
		next := l.wanting(v, file)
		if next != nil {
			v.Hand(next.account, file)
			if next.wants(file) {
				return
			}
			continue // it has read it meanwhile
		}
		v.Spend(file)
		if next = l.wanting(v, file); next != nil {
			l.reclaim(v, file, next.account)
		}
		return
	}
}

// reclaim takes back that the file is spent. Where it is gone, those who want it fetch it anew.
func (l *streams) reclaim(v *cache.Volume, file int, a *cache.Account) {
	for x := range v.Extents(file) {
		if v.Claim(a, file, x) {
			continue
		}
		for _, s := range l.list() {
			s.lost(v, file)
			s.poke()
		}
		return
	}
}

// sweep gives up what is staged for nobody.
func (l *streams) sweep(v *cache.Volume) {
	for file := range v.Unspent() {
		if l.wanting(v, file) == nil {
			l.spend(v, file)
		}
	}
}
