package engine

import (
	"math"
	"sync/atomic"
	"time"
)

// readers counts the threads that open files of the mount, by linear counting (K.-Y. Whang, B. T. Vander-Zanden,
// H. M. Taylor, "A Linear-Time Probabilistic Counting Algorithm", ACM TODS 15, 1990) over slots that fade: exact for
// a handful, and within a few percent for hundreds. The zero value is ready; safe for concurrent use.
type readers struct {
	slots [1024]atomic.Int64 // by hash of the thread: when it last opened a file, in Unix seconds
}

// readersFor is for how long a thread counts as a reader after it has opened a file, in seconds.
const readersFor = 10

func (r *readers) opened(thread uint32) {
	h := thread // mixed as by MurmurHash3's finaliser (A. Appleby): threads have neighbouring numbers
	h = (h ^ h>>16) * 0x85ebca6b
	h = (h ^ h>>13) * 0xc2b2ae35
	slot := &r.slots[(h^h>>16)%uint32(len(r.slots))]
	if now := time.Now().Unix(); slot.Load() != now {
		slot.Store(now)
	}
}

// count returns how many threads have opened files in the last ten seconds, about.
func (r *readers) count() int {
	since, n := time.Now().Unix()-readersFor, 0
	for i := range r.slots {
		if r.slots[i].Load() > since {
			n++
		}
	}
	// The maximum-likelihood estimate: of the slots, exp(-threads/slots) are free.
	free := float64(max(len(r.slots)-n, 1)) / float64(len(r.slots))
	return int(math.Round(-math.Log(free) * float64(len(r.slots))))
}
