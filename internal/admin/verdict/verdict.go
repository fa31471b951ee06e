// Package verdict says in words whether the GPU waits for data, and for what, from what a daemon counted between two
// moments. It is pure, and the only place that judges: the dashboard, `shoal top` and `shoal stat` show what it says.
package verdict

import (
	"github.com/shoalfs/shoal/engine"
	"github.com/shoalfs/shoal/loader"
)

// Snapshot is what a daemon tells of one dataset; admin.Snapshot converts to it.
type Snapshot struct {
	engine.Stats
	Feed *loader.Stats `json:"feed,omitempty"` // nil where no feed is served
}

// Level says how good a verdict is.
type Level string

// The levels.
const (
	Good Level = "good" // data comes in time
	Idle Level = "idle" // nobody asks for data
	Warn Level = "warn" // it could be better, or soon will be worse
	Bad  Level = "bad"  // the trainer waits, or reads fail
)

// Finding is one thing that holds, in words.
type Finding struct {
	Code   string `json:"code"` // see docs/dashboard.md; does not change once published
	Level  Level  `json:"level"`
	Title  string `json:"title"`            // a few words
	Detail string `json:"detail"`           // a sentence, with the figures behind it
	Remedy string `json:"remedy,omitempty"` // what to do about it; empty where there is nothing to do
}

// Verdict is the one finding that matters most, and what else holds.
type Verdict struct {
	Version int `json:"version"` // of this schema, 1
	Finding
	Rates Rates     `json:"rates"`
	Notes []Finding `json:"notes"`  // what else should be known, worst first
	Error []Advice  `json:"errors"` // the latest warnings and errors, newest first
}

// Of judges the time between two snapshots of one daemon. If the daemon was started in between, or before is the zero
// Snapshot, it judges the time since the start.
func Of(before, now Snapshot) Verdict {
	w := between(before, now)
	v := Verdict{Version: 1, Rates: w.rates, Notes: []Finding{}, Error: Explain(now.Errors)}
	var found []Finding
	for _, rule := range trouble {
		if f, ok := rule(&w); ok {
			found = append(found, f)
		}
	}
	for _, list := range [][]func(*window) (Finding, bool){causes, calm} {
		for _, rule := range list {
			if f, ok := rule(&w); ok && (f.Level == Bad || f.Level == Warn || len(found) == 0) {
				found = append(found, f)
				break // the others would say the same in other words
			}
		}
		if w.waiting() && len(found) > 0 {
			break
		}
	}
	v.Finding, v.Notes = found[0], append(v.Notes, found[1:]...)
	return v
}

// The rules, each in the order of what matters most: what is wrong, of which all is told; what a trainer waits for that
// waits; and what it is doing otherwise, of which the last rule always applies.
var (
	trouble = []func(*window) (Finding, bool){tooShort, silent, denied, changed, failing, diskDown, diskSlow}
	causes  = []func(*window) (Finding, bool){otherOrder, unknownOrder, memorySmall, filling, decodeBound, clientLink, storeSlow}
	calm    = []func(*window) (Finding, bool){finished, idle, trainerSlower, fed}
)
