package engine

import (
	"cmp"
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
	current []SlowKey // as worst returns them
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
	if s.current = worst(append(s.current, k)); len(s.current) == slowestKeys {
		s.least.Store(int64(s.current[slowestKeys-1].Seconds * float64(time.Second)))
	}
}

// turn starts a new period if the last one is over. s.mu is held.
func (s *slowest) turn(now time.Time) {
	end := s.until.Load()
	if left := end - now.UnixNano(); left > 0 && left <= int64(2*slowestFor) { // the clock may have stepped back
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

// worst returns the slowest of some entries, the slowest first, and each key once.
func worst(list []SlowKey) []SlowKey {
	all := []SlowKey{}
	for _, k := range list {
		i := slices.IndexFunc(all, func(c SlowKey) bool { return c.Key == k.Key })
		if i < 0 {
			all = append(all, k)
			continue
		}
		n := all[i].Count + k.Count
		if k.Seconds > all[i].Seconds {
			all[i] = k
		}
		all[i].Count = n
	}
	slices.SortFunc(all, func(a, b SlowKey) int {
		return cmp.Or(-cmp.Compare(a.Seconds, b.Seconds), cmp.Compare(a.Key, b.Key))
	})
	return all[:min(len(all), slowestKeys)]
}

// snapshot returns the slowest keys, the slowest first.
func (s *slowest) snapshot() []SlowKey {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.turn(s.now())
	return worst(slices.Concat(s.current, s.before))
}
