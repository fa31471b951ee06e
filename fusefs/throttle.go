package fusefs

import (
	"log/slog"
	"sync"
	"time"
)

const (
	throttleWindow = 10 * time.Second
	throttleBurst  = 5
)

// throttle logs at most throttleBurst lines of a key in throttleWindow: a store that is down fails
// thousands of reads a second.
type throttle struct {
	log *slog.Logger
	mu  sync.Mutex
	by  map[string]*throttled
}

type throttled struct {
	since             time.Time
	shown, suppressed int
}

// warn logs. A throttle has few keys, which are constants.
func (t *throttle) warn(key, text string, args ...any) {
	t.mu.Lock()
	k := t.by[key]
	if k == nil {
		k = &throttled{}
		t.by[key] = k
	}
	now := time.Now()
	if now.Sub(k.since) > throttleWindow {
		if k.suppressed > 0 {
			args = append(args, "suppressed_before", k.suppressed)
		}
		*k = throttled{since: now}
	}
	if k.shown == throttleBurst {
		k.suppressed++
		t.mu.Unlock()
		return
	}
	k.shown++
	t.mu.Unlock()
	t.log.Warn(text, args...)
}
