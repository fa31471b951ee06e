package main

import (
	"fmt"
	"math"
	"sync"
	"time"

	"github.com/shoalfs/shoal/lab/bench/kit"
)

// seen is what the stats said at one time.
type seen struct {
	at     time.Duration // since the watch began
	opens  int64
	locked bool
	spec   string
}

// watcher polls a mount's stats.
type watcher struct {
	mount *kit.Mount
	stop  chan struct{}
	done  sync.WaitGroup
	seen  []seen
	err   error
}

// pollEvery bounds how much later than it was a lock is seen: at 4 readers of a store at 30 ms, one or two
// reads later.
const pollEvery = 10 * time.Millisecond

func watch(m *kit.Mount) *watcher {
	w := &watcher{mount: m, stop: make(chan struct{})}
	w.done.Go(func() {
		begin := time.Now()
		for {
			select {
			case <-w.stop:
				return
			case <-time.After(pollEvery):
			}
			s, err := m.Stats()
			if err != nil {
				w.err = err
				return
			}
			w.seen = append(w.seen, seen{time.Since(begin), s.Opens, s.Order.State == "inferred", s.Order.Spec})
		}
	})
	return w
}

// end stops the watch.
func (w *watcher) end() ([]seen, error) {
	close(w.stop)
	w.done.Wait()
	if w.err != nil {
		return nil, fmt.Errorf("watch %s: %w", w.mount.Dir, w.err)
	}
	return w.seen, nil
}

// lock is how one epoch went.
type lock struct {
	reads   float64 // of the epoch, until its order was known for good; +Inf: never
	seconds float64 // from the epoch's first read on
	lost    int     // how often an order was given up after the epoch's first was found
	spec    string
}

// epochLock looks at the opens from..to (exclusive), which are one epoch.
func epochLock(all []seen, from, to int64) lock {
	l := lock{reads: math.Inf(1), seconds: math.Inf(1)}
	var began time.Duration
	started, known := false, false
	for _, s := range all {
		if s.opens <= from || s.opens > to {
			continue
		}
		if !started {
			started, began = true, s.at
			if known = s.locked; known {
				l.reads, l.seconds, l.spec = 0, 0, s.spec // or with the first reads, unseen
				if from == 0 {
					l.reads = float64(s.opens)
				}
			}
			continue
		}
		switch {
		case s.locked && !known:
			l.reads, l.seconds, l.spec = float64(s.opens-from), (s.at - began).Seconds(), s.spec
		case !s.locked && known:
			l.lost++
			l.reads, l.seconds = math.Inf(1), math.Inf(1)
		}
		known = s.locked
	}
	return l
}
