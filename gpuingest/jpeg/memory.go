//go:build cgo

package jpeg

/*
#include "shoaljpeg.h"
#include "sjrecode.h"
*/
import "C"

import (
	"errors"
	"fmt"
	"math"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	humanize "github.com/dustin/go-humanize"
)

// memory counts what the C side has allocated. Each call takes the most that it may need, which follows from the
// header, before it begins, and waits for it in turn. Whoever holds some waits for nothing else, so all come to their
// end.
var memory = struct {
	sync.Mutex
	limit, used int64
	waiting     []*claim     // in order of arrival
	idle        []*object    // by the time of their last use
	made        atomic.Int64 // objects that there are, which tests look at
	over        int          // calls that allocated more than they took, which tests look at
}{limit: math.MaxInt64}

type claim struct {
	n       int64
	granted bool // else it is more than there can be
	ready   chan struct{}
}

// object is one of a pool.
type object struct {
	pool  any
	c     any // put here once, since a pointer to a C type costs an allocation in an interface
	free  func()
	bytes int64     // which are counted while it is idle
	since time.Time // of its last use
}

// maxIdle is the most that an object keeps while it is idle. All of them keep a quarter of the limit.
const maxIdle = 8 << 20

var errMemory = errors.New("jpeg: out of memory")

// SetMemory bounds the memory that all calls use together outside of Go's heap. It has no bound before.
func SetMemory(limit int64) {
	memory.Lock()
	defer memory.Unlock()
	memory.limit = limit
	grant()
}

// TrimMemory gives back what has been idle for so long.
func TrimMemory(idle time.Duration) {
	memory.Lock()
	n := 0
	for n < len(memory.idle) && time.Since(memory.idle[n].since) >= idle {
		n++
	}
	drop(n)
	memory.Unlock()
	C.sj_trim()
}

// drop frees the first n idle objects. The lock is held.
func drop(n int) {
	for _, i := range memory.idle[:n] {
		i.free()
		memory.used -= i.bytes
	}
	memory.idle = slices.Delete(memory.idle, 0, n)
}

// take counts n bytes if there is room for them, or idle objects can make it. The lock is held.
func take(n int64) bool {
	if n > memory.limit {
		return false
	}
	for memory.used > memory.limit-n {
		if len(memory.idle) == 0 {
			return false
		}
		drop(1)
	}
	memory.used += n
	return true
}

// grant serves those that wait. The lock is held.
func grant() {
	for len(memory.waiting) > 0 {
		w := memory.waiting[0]
		if w.granted = take(w.n); !w.granted && w.n <= memory.limit {
			return
		}
		memory.waiting = memory.waiting[1:]
		close(w.ready)
	}
}

// pool keeps C objects for the next call. P is a pointer to a C type.
type pool[P comparable] struct {
	make  func() P // nil: out of memory
	free  func(P)
	bytes func(P) int
}

// get returns an object that may allocate so many bytes. put must be called with all of them.
func (p *pool[P]) get(need int64, what string) (c P, o *object, err error) {
	memory.Lock()
	taken := len(memory.waiting) == 0 && take(need)
	if !taken {
		w := &claim{n: need, ready: make(chan struct{})}
		memory.waiting = append(memory.waiting, w)
		grant()
		memory.Unlock()
		<-w.ready
		memory.Lock()
		taken = w.granted
	}
	if limit := memory.limit; !taken {
		memory.Unlock()
		return c, nil, fmt.Errorf(
			"%w: to %s it takes up to %s of memory, and all pictures together have %s (raise --memory)",
			ErrTooLarge, what, humanize.IBytes(uint64(need)), humanize.IBytes(uint64(limit)))
	}
	for i := len(memory.idle) - 1; i >= 0; i-- {
		if o := memory.idle[i]; o.pool == any(p) {
			memory.idle = slices.Delete(memory.idle, i, i+1)
			memory.Unlock()
			return o.c.(P), o, nil
		}
	}
	memory.Unlock()
	made := p.make() // and not c, or each call would allocate it for the function below
	if made == *new(P) {
		give(need)
		return c, nil, errMemory
	}
	memory.made.Add(1)
	return made, &object{pool: p, c: made, free: func() { p.free(made); memory.made.Add(-1) }}, nil
}

// give returns what was taken.
func give(n int64) {
	memory.Lock()
	defer memory.Unlock()
	memory.used -= n
	grant()
}

// put keeps the object, or frees it.
func (p *pool[P]) put(c P, o *object, need int64) {
	bytes := int64(p.bytes(c))
	memory.Lock()
	if bytes > o.bytes+need && need > 0 {
		memory.over++
	}
	need += o.bytes
	kept := bytes
	for _, o := range memory.idle {
		kept += o.bytes
	}
	keep := bytes <= maxIdle && kept <= memory.limit/4 && len(memory.idle) < 2*max(4, runtime.NumCPU())
	if keep {
		o.bytes, o.since = bytes, time.Now()
		memory.idle = append(memory.idle, o)
		need -= bytes
	}
	memory.Unlock()
	if !keep {
		o.free()
	}
	give(need)
}

// shape is what a decoder's memory depends on. It is the largest that a damaged header may stand for.
type shape struct {
	width, mcuRows, blocks int64 // the width and the blocks of whole MCUs
	scans                  bool  // more than one: all coefficients are kept
}

func shapeOf(src []byte) (s shape) {
	at, err := frameAt(src)
	if err != nil || len(src) < at+8 {
		return s // nothing is decoded
	}
	n, p := int(src[at])<<8|int(src[at+1]), src[at+2:]
	count, h, v, all := int(p[5]), 1, 1, 0
	for c := 0; c < count && len(p) >= 9+3*c; c++ {
		f := p[7+3*c]
		h, v, all = max(h, int(f>>4)), max(v, int(f&15)), all+max(int(f>>4), 1)*max(int(f&15), 1)
	}
	mcus := (int64(p[3])<<8 + int64(p[4]) + int64(8*h) - 1) / int64(8*h)
	s.mcuRows = (int64(p[1])<<8 + int64(p[2]) + int64(8*v) - 1) / int64(8*v)
	s.width, s.blocks = mcus*int64(8*h), mcus*s.mcuRows*int64(all)
	s.scans = src[at-1] != 0xc0 && src[at-1] != 0xc1
	for i := at + n; !s.scans; {
		for i+1 < len(src) && (src[i] != 0xff || src[i+1] == 0xff || src[i+1] <= 1 || src[i+1]&0xf8 == 0xd0) {
			i++
		}
		if i+4 >= len(src) || src[i+1] == 0xda {
			s.scans = i+4 >= len(src) || int(src[i+4]) < count
			break
		}
		i += 2 + (int(src[i+2])<<8 | int(src[i+3]))
	}
	return s
}

// decodeNeeds bounds what libjpeg allocates for a file: rows, and all coefficients of one with several scans.
func decodeNeeds(src []byte) int64 {
	s := shapeOf(src)
	n := 320*s.width + 256<<10
	if s.scans {
		n += 128 * s.blocks
	}
	return n
}

// recodedNeeds bounds what is allocated for the bands of a recoded file.
func recodedNeeds(src []byte) int64 {
	s, head := shapeOf(verbatim(src)), int64(len(verbatim(src)))
	n := int64(C.sj_lanes_need(C.size_t(s.blocks), C.size_t(s.mcuRows+2))) + 1024*s.width + 2*head
	return n + min(n/4, 1<<20) + 256<<10
}
