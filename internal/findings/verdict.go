package findings

import (
	"github.com/shoalfs/shoal/loader"
	"github.com/shoalfs/shoal/prefetch/engine"
)

// Snapshot is the state that a daemon reports for one dataset, without the counters of an S3 endpoint.
type Snapshot struct {
	engine.Stats
	Feed *loader.Stats `json:"feed,omitempty"` // nil without a feed
}

// Verdict is the most important finding, and the other ones.
type Verdict struct {
	Version int `json:"version"` // of this schema, 2
	Finding
	Rates Rates     `json:"rates"`
	Notes []Finding `json:"notes"`  // other findings, worst first
	Error []Advice  `json:"errors"` // the latest warnings and errors, newest first
}

// Of judges the time between two snapshots of one daemon. If the daemon was restarted in between, or before is the zero
// Snapshot, it judges the time since the start.
func Of(before, now Snapshot) Verdict {
	w := between(before, now)
	v := Verdict{Version: 2, Rates: w.rates, Notes: []Finding{}, Error: Explain(now.Errors)}
	var found []Finding
	for _, rule := range trouble {
		if f, ok := rule(&w); ok {
			found = append(found, f)
		}
	}
	for _, list := range [][]func(*window) (Finding, bool){causes, calm} {
		for _, rule := range list {
			if f, ok := rule(&w); ok && (f.Level == Fail || f.Level == Warn || len(found) == 0) {
				found = append(found, f)
				break // the later rules would repeat it
			}
		}
		if w.waiting() && len(found) > 0 {
			break
		}
	}
	v.Finding, v.Notes = found[0], append(v.Notes, found[1:]...)
	return v
}

// The rules, each list by importance: faults, all of which are reported; the reason why a trainer waits; and otherwise
// the trainer's activity, where the last rule always applies.
var (
	trouble = []func(*window) (Finding, bool){tooShort, silent, denied, changed, failing, diskDown, diskSlow, apart, nodesAway, versionsDiffer}
	causes  = []func(*window) (Finding, bool){otherOrder, unknownOrder, memorySmall, filling, decodeBound, clientLink, storeSlow}
	calm    = []func(*window) (Finding, bool){finished, idle, trainerSlower, fed}
)
