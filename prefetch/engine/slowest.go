package engine

import (
	"cmp"
	"slices"
	"sync"
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
// of the previous one. Safe for concurrent use.
type slowest struct {
	now func() time.Time

	mu      sync.Mutex
	until   time.Time // the end of the period
	current []SlowKey // as worst returns them
	before  []SlowKey
}

func newSlowest(now func() time.Time) *slowest {
	return &slowest{now: now, until: now().Add(slowestFor)}
}

// note records a finished GET; see objstore.Meter.OnRead.
func (s *slowest) note(key string, bytes int64, took time.Duration, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.turn()
	if len(s.current) == slowestKeys && took.Seconds() <= s.current[slowestKeys-1].Seconds {
		return
	}
	s.current = worst(append(s.current,
		SlowKey{Key: key, Seconds: took.Seconds(), Bytes: bytes, Count: 1, Failed: err != nil, Time: now.UTC()}))
}

// turn starts a new period if the last one is over. It returns the time. s.mu is held.
func (s *slowest) turn() time.Time {
	now := s.now()
	if now.Before(s.until) {
		return now
	}
	if s.before, s.current = s.current, nil; now.Sub(s.until) >= slowestFor {
		s.before = nil
	}
	s.until = now.Add(slowestFor)
	return now
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
	s.turn()
	return worst(slices.Concat(s.current, s.before))
}
