package cache

import (
	"slices"
	"sync/atomic"
	"time"
)

// Account counts the memory that is held for one of those who fetch ahead: what is on its way, and what
// waits in the ring to be read. What the disk has taken counts no more, since its memory may go.
//
// Bytes that several want are on one account, that of the least load among those who claimed them. So
// streams that follow each other through one order pay together for what all of them will read, and the
// one behind pays for what it alone still needs.
//
// It is used with one Cache.
type Account struct {
	weight float64
	held   atomic.Int64

	// Guarded by the ring's lock.
	staged entries // what waits to be read, in the order in which it came
	closed bool
}

// NewAccount opens an account. Its weight, more than 0, says how much of the memory it is due when there
// is not enough for all: as much for each unit of weight as every other.
func (c *Cache) NewAccount(weight float64) *Account {
	a := &Account{weight: weight}
	a.staged.account = a
	c.ring.mu.Lock()
	defer c.ring.mu.Unlock()
	c.ring.accounts = append(c.ring.accounts, a)
	return a
}

// CloseAccount takes the account out of the cache. What is still on it counts for nobody from now on; it
// is recycled where nobody claims it.
func (c *Cache) CloseAccount(a *Account) {
	r := c.ring
	r.mu.Lock()
	defer r.mu.Unlock()
	a.closed = true
	r.accounts = slices.DeleteFunc(r.accounts, func(b *Account) bool { return a == b })
	for e := a.staged.front; e != nil; e = a.staged.front {
		r.file(e)
	}
}

// Held returns the bytes on the account.
func (a *Account) Held() int64 { return a.held.Load() }

// Load returns the bytes on the account for each unit of its weight.
func (a *Account) Load() float64 { return float64(a.Held()) / a.weight }

// add changes the bytes on the account, if there is one.
func (a *Account) add(n int64) {
	if a != nil {
		a.held.Add(n)
	}
}

// takes reports whether size bytes that are on account b had better be on a: they are on none, or a's load
// stays below b's even so.
func (a *Account) takes(b *Account, size int64) bool {
	return a != b && a != nil && (b == nil || float64(a.Held()+size)/a.weight < b.Load())
}

// Owners tells whose an account's bytes are to be. It is asked without locks.
type Owners interface {
	// Needed returns how many samples the owner of account from reads before the file; less than 0 if it must
	// not lose it.
	Needed(from *Account, v *Volume, file int) int
	// Heir returns the account on which a file had best be, nil if nobody wants it.
	Heir(v *Volume, file int) *Account
}

// lastFew is of how many extents that came last the one is looked for that is needed last: what was lost and is fetched
// again comes after what is needed later.
const lastFew = 64

// TakeBack frees need bytes for account a of what another has that holds over times as much for its weight as
// a would with them, or more: what that one will read last. Where its heir has less load it is put on the heir's account,
// else it has to be fetched again, so over should not be near 1, or bytes are taken to and fro for the size of a file.
// With 0 it takes them from whoever has most, and be it a. OnLost's functions are called for what is lost: the
// caller must hold no lock that they take.
func (c *Cache) TakeBack(a *Account, need int64, over float64, o Owners) {
	for need > 0 {
		from, keys := c.ring.last(a, need, over)
		best, at := extentKey{}, -1
		for _, k := range keys {
			if n := o.Needed(from, k.v, k.v.fileOf(k.extent)); n > at {
				best, at = k, n
			}
		}
		if at < 0 {
			return
		}
		if idle := c.ring.idle(0); idle > 0 { // what nobody needs goes before
			c.ring.reclaim(need, false, 0)
			need -= idle
			continue
		}
		file := best.v.fileOf(best.extent)
		size := footprint(int(best.v.ExtentBytes(file, int(best.extent-best.v.extent(file, 0)))))
		if to := o.Heir(best.v, file); to.takes(from, size) {
			c.ring.hand(best, to)
			continue
		}
		b := c.ring.take(from, best)
		if b == nil {
			return // somebody else was faster
		}
		need -= b.size
		b.Release()
		c.tellLost([]extentKey{best})
	}
}

// last returns the account of the largest load and what came last of what is staged on it, the latest first, if need
// bytes on account a are worth some of it.
func (r *ring) last(a *Account, need int64, over float64) (from *Account, keys []extentKey) {
	r.mu.Lock()
	defer r.mu.Unlock()
	from = r.mostLoaded()
	if from == nil || over > 0 && (from == a || from.Load() < over*float64(a.Held()+need)/a.weight) {
		return nil, nil
	}
	now := time.Now()
	for e := from.staged.back; e != nil && len(keys) < lastFew; e = e.prev {
		if !e.beingRead(now) {
			keys = append(keys, e.key)
		}
	}
	return from, keys
}

// take removes the extent if it is still on that account.
func (r *ring) take(from *Account, k extentKey) *Buffer {
	r.mu.Lock()
	defer r.mu.Unlock()
	if e := r.entries[k]; e != nil && e.in == &from.staged {
		return r.remove(e)
	}
	return nil
}

// mostLoaded returns the account of the largest load of which something may be taken; nil if there is
// none. r.mu is held.
func (r *ring) mostLoaded() (most *Account) {
	for _, a := range r.accounts {
		if a.staged.back != nil && (most == nil || a.Load() > most.Load()) {
			most = a
		}
	}
	return most
}
