package cache

import (
	"slices"
	"sync/atomic"
	"time"
)

// Account counts the memory that one prefetcher holds: extents in flight, and extents in the ring that wait to be
// read. Extents on disk do not count, since their memory may be reclaimed.
//
// Extents that several streams claimed are on the account with the least load among theirs. So streams that follow each
// other through one order share the cost of what all will read, and the last alone pays for what only it still needs.
type Account struct {
	weight float64
	held   atomic.Int64

	// Guarded by the ring's lock.
	staged entries // what waits to be read, in the order in which it came
	closed bool
}

// NewAccount opens an account. Its weight, more than 0, is its share when memory is short: all get as much per unit.
func (c *Cache) NewAccount(weight float64) *Account {
	a := &Account{weight: weight}
	a.staged.also = &a.held
	c.ring.mu.Lock()
	defer c.ring.mu.Unlock()
	c.ring.accounts = append(c.ring.accounts, a)
	return a
}

// CloseAccount takes the account out of the cache. What is left on it is recycled unless another one claims it.
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

// Load returns the bytes on the account per unit of its weight.
func (a *Account) Load() float64 { return float64(a.Held()) / a.weight }

func (a *Account) add(n int64) {
	if a != nil {
		a.held.Add(n)
	}
}

// takes reports whether size bytes on account b should move to a: if b is nil, or a's load with them is below b's.
func (a *Account) takes(b *Account, size int64) bool {
	return a != b && a != nil && (b == nil || float64(a.Held()+size)/a.weight < b.Load())
}

// Owners decides which account holds an extent. It is called without locks held.
type Owners interface {
	// Needed returns how many samples the owner of account from reads before this file; negative: it must not lose it.
	Needed(from *Account, v *Volume, file int) int
	// Heir returns the account that should hold a file; nil if nobody wants it.
	Heir(v *Volume, file int) *Account
}

// lastFew is how many of the latest extents are searched for the one that is needed last. Arrival alone does not
// tell: an extent that was lost and fetched again arrives after others that are needed later.
const lastFew = 64

// TakeBack frees need bytes for account a from the most loaded account, if that one's load is at least over times a's
// load with these bytes. It takes what that account reads last. An extent moves to its heir's account if that has
// less load; otherwise it must be fetched again, so over should not be near 1, or extents would be taken back and
// forth. With over 0 it takes from the most loaded account in any case, even a itself. It reports whether it freed
// anything. It calls OnLost's functions; the caller must hold no lock that they take.
func (c *Cache) TakeBack(a *Account, need int64, over float64, o Owners) (freed bool) {
	for need > 0 {
		from, keys := c.ring.last(a, need, over)
		best, at := extentKey{}, -1
		for _, k := range keys {
			if n := o.Needed(from, k.v, k.v.fileOf(k.extent())); n > at {
				best, at = k, n
			}
		}
		if at < 0 {
			return freed
		}
		file := best.v.fileOf(best.extent())
		if to := o.Heir(best.v, file); to.takes(from, footprint(best.v.bytes(file, best.piece))) {
			c.ring.claim(best, to, true)
			continue
		}
		taken := c.ring.take(best, from)
		if taken == 0 {
			return freed // another goroutine was faster
		}
		need, freed = need-taken, true
		c.tellLost([]extentKey{best})
	}
	return freed
}

// last returns the most loaded account and its staged extents, latest first, if need bytes for a justify taking some.
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

// mostLoaded returns the most loaded account with an extent that may be taken; nil if there is none. r.mu is held.
func (r *ring) mostLoaded() (most *Account) {
	for _, a := range r.accounts {
		if a.staged.back != nil && (most == nil || a.Load() > most.Load()) {
			most = a
		}
	}
	return most
}
