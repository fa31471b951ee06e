package engine

import (
	"math"
	"sync/atomic"
	"time"
)

// readers counts the threads that open files of the mount, by linear counting (K.-Y. Whang, B. T. Vander-Zanden, H.
// M. Taylor, "A Linear-Time Probabilistic Counting Algorithm", ACM TODS 15, 1990) over slots that expire: exact for a
// handful, and within a few percent for hundreds. It also sums their reading time, without pauses. The zero value is
// ready; safe for concurrent use.
type readers struct {
	// by hash of the thread: its number, and in the low half when it last opened a file, in Unix seconds
	slots   [1024]atomic.Uint64
	threads atomic.Int64 // seconds from open to open of a thread, summed over threads
	last    atomic.Int64 // time of the last read, in Unix seconds
	any     atomic.Int64 // seconds from read to read, by any thread
}

// readersFor is how long a thread counts as a reader after it opened a file, in seconds.
const readersFor = 10

func (r *readers) opened(thread uint32) {
	h := thread // mixed as by MurmurHash3's finaliser (A. Appleby): threads have neighbouring numbers
	h = (h ^ h>>16) * 0x85ebca6b
	h = (h ^ h>>13) * 0xc2b2ae35
	r.openedAt(thread, &r.slots[(h^h>>16)%uint32(len(r.slots))], time.Now().Unix())
}

func (r *readers) openedAt(thread uint32, slot *atomic.Uint64, now int64) {
	r.readAt(now)
	then, mark := slot.Load(), uint64(thread)<<32|uint64(uint32(now))
	if then == mark || !slot.CompareAndSwap(then, mark) || uint32(then>>32) != thread {
		return
	}
	if pause := now - int64(uint32(then)); pause > 0 && pause <= readersFor {
		r.threads.Add(pause)
	}
}

// read records that a thread reads an open file.
func (r *readers) read() { r.readAt(time.Now().Unix()) }

func (r *readers) readAt(now int64) {
	then := r.last.Load()
	if then >= now || !r.last.CompareAndSwap(then, now) {
		return
	}
	if now-then > readersFor {
		then = now - 1
	}
	r.any.Add(now - then)
}

// seconds returns the reading time, summed over threads. Threads that open files too rarely, or only one each, count
// as one.
func (r *readers) seconds() float64 { return float64(max(r.threads.Load(), r.any.Load())) }

// count returns roughly how many threads have opened files in the last ten seconds.
func (r *readers) count() int {
	since, n := time.Now().Unix()-readersFor, 0
	for i := range r.slots {
		if int64(uint32(r.slots[i].Load())) > since {
			n++
		}
	}
	// The maximum-likelihood estimate: a share of exp(-threads/slots) of the slots is free.
	free := float64(max(len(r.slots)-n, 1)) / float64(len(r.slots))
	return int(math.Round(-math.Log(free) * float64(len(r.slots))))
}
