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
	// slowestFor is how long a key is remembered.
	slowestFor = 10 * time.Minute
)

// slowest remembers the keys of the slowest GETs of the last minutes: four times as many as are reported, so that some
// are left when a burst of slow ones is forgotten. Safe for concurrent use.
type slowest struct {
	now func() time.Time

	mu   sync.Mutex
	list []SlowKey // the slowest first, each key once
}

// note records a finished GET; see objstore.Meter.OnRead.
func (s *slowest) note(key string, bytes int64, took time.Duration, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.forget()
	k := SlowKey{Key: key, Seconds: took.Seconds(), Bytes: bytes, Count: 1, Failed: err != nil, Time: s.now().UTC()}
	if last := len(s.list) - 1; last+1 == 4*slowestKeys && k.Seconds <= s.list[last].Seconds {
		return
	}
	if i := slices.IndexFunc(s.list, func(c SlowKey) bool { return c.Key == key }); i >= 0 {
		n := k.Count + s.list[i].Count
		if s.list[i].Seconds >= k.Seconds {
			k = s.list[i]
		}
		k.Count, s.list = n, slices.Delete(s.list, i, i+1)
	}
	s.list = append(s.list, k)
	slices.SortFunc(s.list, func(a, b SlowKey) int {
		return cmp.Or(cmp.Compare(b.Seconds, a.Seconds), cmp.Compare(a.Key, b.Key))
	})
	s.list = s.list[:min(len(s.list), 4*slowestKeys)]
}

// forget drops what is too old. s.mu is held.
func (s *slowest) forget() {
	since := s.now().Add(-slowestFor)
	s.list = slices.DeleteFunc(s.list, func(k SlowKey) bool { return k.Time.Before(since) })
}

// snapshot returns the slowest keys, the slowest first.
func (s *slowest) snapshot() []SlowKey {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.forget()
	return append([]SlowKey{}, s.list[:min(len(s.list), slowestKeys)]...)
}
