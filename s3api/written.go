package s3api

import (
	"maps"
	"slices"
	"strings"
	"sync"
	"time"
)

// maxWritten is how many written keys are kept. With more, all keys count as written.
const maxWritten = 100_000

// written are the keys that were written or deleted through the endpoint: the manifest may have their old versions.
type written struct {
	mu   sync.Mutex
	keys map[string]change
	all  *change // of keys beyond maxWritten; nil: none
}

type change struct {
	running int       // requests
	ended   time.Time // the last of them
}

// begin marks keys before their request is sent. The request calls the returned function when it has ended.
func (w *written) begin(keys []string) (end func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.keys == nil {
		w.keys = map[string]change{}
	}
	if w.all == nil && len(w.keys)+len(keys) > maxWritten {
		w.all = &change{}
	}
	if w.all != nil {
		w.all.running++
	} else {
		for _, k := range keys {
			w.keys[k] = change{running: w.keys[k].running + 1}
		}
	}
	all := w.all
	return func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		now := time.Now()
		if all != nil {
			all.running, all.ended = all.running-1, now
			return
		}
		for _, k := range keys {
			w.keys[k] = change{w.keys[k].running - 1, now}
		}
	}
}

// adopt marks the keys that are written of another dataset.
func (w *written) adopt(of *written) {
	of.mu.Lock()
	defer of.mu.Unlock()
	w.begin(slices.Collect(maps.Keys(of.keys)))()
	if of.all != nil && w.all == nil {
		w.all = &change{ended: time.Now()}
	}
}

// listed drops what a listing that began at that time has seen.
func (w *written) listed(at time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	seen := func(_ string, c change) bool { return c.running == 0 && c.ended.Before(at) }
	maps.DeleteFunc(w.keys, seen)
	if w.all != nil && seen("", *w.all) {
		w.all = nil
	}
}

// has reports whether a key is written; below, whether one with a prefix is.
func (w *written) has(key string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	_, ok := w.keys[key]
	return ok || w.all != nil
}

func (w *written) below(prefix string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	for k := range w.keys {
		if strings.HasPrefix(k, prefix) {
			return true
		}
	}
	return w.all != nil
}
