package engine

import (
	"cmp"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// SlowKey is an object with a slow GET.
type SlowKey struct {
	Key     string    `json:"key"`
	Seconds float64   `json:"seconds"` // of the slowest GET
	Bytes   int64     `json:"bytes"`   // that it asked for
	Count   int       `json:"count"`   // how often the key was among the slowest
	Failed  bool      `json:"failed"`  // it ended by an error
	Time    time.Time `json:"time"`    // when it ended
}

const (
	// slowestKeys is how many keys are reported.
	slowestKeys = 16
	// slowestFor is how long a key is reported at least; twice that at most.
	slowestFor = 5 * time.Minute
)

// slowest remembers the keys of the slowest GETs of the last minutes: at most slowestKeys of the current period and
// of the previous one. A faster GET costs one atomic read. Safe for concurrent use.
type slowest struct {
	now   func() time.Time
	least atomic.Int64 // nanoseconds that a GET must exceed to be noted, and
	until atomic.Int64 // the end of the period, in Unix nanoseconds

	mu      sync.Mutex
	current []SlowKey // unsorted, each key once
	before  []SlowKey
}

func newSlowest(now func() time.Time) *slowest {
	s := &slowest{now: now}
	s.until.Store(now().Add(slowestFor).UnixNano())
	return s
}

// note records a finished GET; see objstore.Meter.OnRead.
func (s *slowest) note(key string, bytes int64, took time.Duration, err error) {
	now := s.now()
	if int64(took) <= s.least.Load() && now.UnixNano() < s.until.Load() {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.turn(now)
	k := SlowKey{Key: key, Seconds: took.Seconds(), Bytes: bytes, Count: 1, Failed: err != nil, Time: now.UTC()}
	if i := slices.IndexFunc(s.current, func(c SlowKey) bool { return c.Key == key }); i >= 0 {
		s.current[i] = slower(s.current[i], k)
	} else if len(s.current) < slowestKeys {
		s.current = append(s.current, k)
	} else if i := s.fastest(); s.current[i].Seconds < k.Seconds {
		s.current[i] = k
	}
	if len(s.current) == slowestKeys {
		s.least.Store(int64(s.current[s.fastest()].Seconds * float64(time.Second)))
	}
}

// turn starts a new period if the last one is over. s.mu is held.
func (s *slowest) turn(now time.Time) {
	end := s.until.Load()
	if now.UnixNano() < end {
		return
	}
	s.before = s.current
	if now.UnixNano() >= end+int64(slowestFor) {
		s.before = nil
	}
	s.current = nil
	s.least.Store(0)
	s.until.Store(now.Add(slowestFor).UnixNano())
}

// fastest returns the index of the least slow of the current period. s.mu is held.
func (s *slowest) fastest() (least int) {
	t := math.Inf(1)
	for i, k := range s.current {
		if k.Seconds < t {
			least, t = i, k.Seconds
		}
	}
	return least
}

// slower merges two entries of one key.
func slower(a, b SlowKey) SlowKey {
	n := a.Count + b.Count
	if b.Seconds > a.Seconds {
		a = b
	}
	a.Count = n
	return a
}

// snapshot returns the slowest keys, the slowest first.
func (s *slowest) snapshot() []SlowKey {
	s.mu.Lock()
	s.turn(s.now())
	all := append([]SlowKey{}, s.current...)
	for _, k := range s.before {
		if i := slices.IndexFunc(all, func(c SlowKey) bool { return c.Key == k.Key }); i >= 0 {
			all[i] = slower(all[i], k)
		} else {
			all = append(all, k)
		}
	}
	s.mu.Unlock()
	slices.SortFunc(all, func(a, b SlowKey) int { return cmp.Or(-cmp.Compare(a.Seconds, b.Seconds), cmp.Compare(a.Key, b.Key)) })
	return all[:min(len(all), slowestKeys)]
}
