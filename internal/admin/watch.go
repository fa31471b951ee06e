package admin

import (
	"encoding/json"
	"net/http"
	"sync"

	"github.com/shoalfs/shoal/internal/findings"
)

// judged is the number of snapshots, a second apart, over which a verdict is given: long enough that one slow batch does
// not change it, short enough to show the effect of changed settings.
const judged = 10

// watch judges snapshots as they arrive.
type watch struct {
	mu   sync.Mutex
	ring [judged]findings.Snapshot
	n    int // snapshots so far
	last findings.Verdict
}

// judge returns the verdict over the time from the oldest of the last snapshots to this one.
func (w *watch) judge(s Snapshot) findings.Verdict {
	w.mu.Lock()
	defer w.mu.Unlock()
	oldest := w.ring[w.n%judged]
	if w.n < judged {
		oldest = w.ring[0] // the zero snapshot before the first one: since the daemon's start
	}
	w.ring[w.n%judged] = s.Snapshot
	w.n++
	w.last = findings.Of(oldest, s.Snapshot)
	return w.last
}

// ServeHTTP implements http.Handler: the latest verdict as JSON.
func (w *watch) ServeHTTP(rw http.ResponseWriter, _ *http.Request) {
	w.mu.Lock()
	last := w.last
	w.mu.Unlock()
	rw.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(rw).Encode(last) // the client may be gone
}
