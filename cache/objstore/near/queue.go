package near

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/shoalfs/shoal/cache/objstore"
)

const (
	closing   = 5 * time.Second // that a daemon's end waits for copies to be put
	mostParts = 4096            // units whose parts are counted; 16 GiB
)

type job struct {
	o       objstore.Object
	key     string
	off     int64
	size    int64
	data    []byte         // nil: to be read from the origin
	origin  objstore.Layer // then
	replace bool           // what is there is damaged
}

// queue has the copies to be put.
type queue struct {
	t    *Tier
	ctx  context.Context
	stop context.CancelFunc
	all  sync.WaitGroup // workers

	mu      sync.Mutex
	waiting []*job
	jobs    map[string]*job  // by key; waiting or being put
	parts   map[string]int64 // bytes read of units in parts
	memory  int64            // of the jobs; at most half of it all
	workers int
	closed  bool

	noCondition bool // the store refuses If-None-Match
}

// copy fills a part from a copy that is still to be put.
func (u *queue) copy(q *part) bool {
	u.mu.Lock()
	j := u.jobs[q.key]
	u.mu.Unlock()
	if j == nil || j.data == nil {
		return false
	}
	for _, sp := range q.spans {
		copy(sp.P, j.data[sp.Off-q.off:])
	}
	return true
}

// offer takes a part that was read from the origin.
func (u *queue) offer(origin objstore.Layer, q *part) {
	j := &job{o: q.o, key: q.key, off: q.off, size: q.size, replace: q.got == mismatched}
	if !u.admit(q) {
		return
	}
	if q.whole() {
		j.data = append(make([]byte, 0, q.size), q.spans[0].P...)
	} else {
		j.origin = origin
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.jobs[j.key] != nil || u.closed { // meanwhile
		u.memory -= j.size
		return
	}
	u.jobs[j.key] = j
	u.waiting = append(u.waiting, j)
	if u.workers < putPlaces {
		u.workers++
		u.all.Go(u.work)
	}
}

// admit takes the memory of a job for the part, if there is to be one.
func (u *queue) admit(q *part) bool {
	ready := u.t.putting.Ready()
	u.mu.Lock()
	defer u.mu.Unlock()
	switch {
	case u.jobs[q.key] != nil, !q.whole() && !u.halfRead(q):
		return false
	case u.closed || !ready || u.memory+q.size > u.t.cfg.Memory/2:
		u.t.count(&u.t.stats.Dropped, 1)
		return false
	}
	u.memory += q.size
	return true
}

// halfRead counts a part, and reports whether half of its unit was read. u.mu is held.
func (u *queue) halfRead(q *part) bool {
	if len(u.parts) >= mostParts {
		clear(u.parts)
	}
	for _, sp := range q.spans {
		u.parts[q.key] += int64(len(sp.P))
	}
	if u.parts[q.key] < q.size/2 {
		return false
	}
	delete(u.parts, q.key)
	return true
}

// work puts copies until none is left.
func (u *queue) work() {
	u.mu.Lock()
	defer u.mu.Unlock()
	for len(u.waiting) > 0 {
		j := u.waiting[0]
		u.waiting = u.waiting[1:]
		u.mu.Unlock()
		u.put(j)
		u.mu.Lock()
		delete(u.jobs, j.key)
		u.memory -= j.size
	}
	u.workers--
}

func (u *queue) put(j *job) {
	t := u.t
	probe, ok := t.putting.Enter()
	drop := func() {
		t.count(&t.stats.Dropped, 1)
		if ok {
			t.putting.Withdraw(probe)
		}
	}
	if !ok || u.ctx.Err() != nil {
		drop()
		return
	}
	data := j.data
	if data == nil {
		t.count(&t.stats.Fills, 1)
		data = make([]byte, j.size)
		ctx := objstore.WithUrgency(u.ctx, objstore.NewUrgency(time.Time{})) // nobody waits
		if err := j.origin.ReadAt(ctx, j.o, data, j.off); err != nil {
			drop()
			return
		}
	}
	err := u.send(j, data)
	switch {
	case err == nil:
		t.count(&t.stats.Puts, 1)
		t.count(&t.stats.PutBytes, j.size)
	case objstore.KindOf(err) == objstore.KindExists:
		t.count(&t.stats.Exist, 1)
		err = nil
	case u.ctx.Err() != nil:
		drop()
		return
	default:
		t.count(&t.stats.Errors, 1)
		t.count(&t.stats.Dropped, 1)
	}
	t.putting.Leave(probe, err)
}

// send sends a copy: with a condition, so that of several nodes one stores it, if the engine knows conditions and
// nothing is to be replaced.
func (u *queue) send(j *job, data []byte) error {
	ctx, cancel := context.WithTimeout(u.ctx, putDeadline)
	defer cancel()
	u.t.count(&u.t.stats.InFlight, 1)
	defer u.t.count(&u.t.stats.InFlight, -1)
	text := noteOf(j.o, j.key, data).String()
	u.mu.Lock()
	onlyNew := !j.replace && !u.noCondition
	u.mu.Unlock()
	err := u.t.cfg.Store.PutNoted(ctx, j.key, data, text, onlyNew)
	if e, ok := errors.AsType[*objstore.Error](err); ok && e.AtOnce { // the engine refused the checksum, say
		err = u.t.cfg.Store.PutNoted(ctx, j.key, data, text, onlyNew)
	}
	if onlyNew && objstore.KindOf(err) == objstore.KindInvalid {
		if err = u.t.cfg.Store.PutNoted(ctx, j.key, data, text, false); err == nil {
			u.mu.Lock()
			u.noCondition = true
			u.mu.Unlock()
		}
	}
	return err
}

// close ends the workers, once they are done or after a while.
func (u *queue) close() {
	u.mu.Lock()
	u.closed = true
	u.mu.Unlock()
	late := time.AfterFunc(closing, u.stop)
	u.all.Wait()
	late.Stop()
	u.stop()
}
