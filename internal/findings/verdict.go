package findings

import (
	"slices"
	"strings"

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
	found := judge(trouble, &w)
	if w.waiting() {
		found = append(found, judge(causes, &w)[0]) // the later rules would repeat it
	} else if f := judge(calm, &w)[0]; len(found) == 0 || f.Level == Warn {
		found = append(found, f)
	}
	return Verdict{
		Version: 2, Finding: found[0], Notes: append([]Finding{}, found[1:]...), Rates: w.rates, Error: Explain(now.Errors),
	}
}

// Advice is a warning or error of the log, with its remedy separated.
type Advice struct {
	engine.ErrorEvent        // its Text is without the remedy
	Remedy            string `json:"remedy,omitempty"`
}

// Explain returns the events, newest first. An event's remedy is its attribute of that name, or the text in parentheses
// at its end, as in all errors of Shoal.
func Explain(events []engine.ErrorEvent) []Advice {
	list := make([]Advice, 0, len(events))
	for _, e := range slices.Backward(events) {
		a := Advice{ErrorEvent: e}
		a.Text, a.Remedy = split(a.Text)
		list = append(list, a)
	}
	return list
}

func split(text string) (what, remedy string) {
	if what, remedy, ok := strings.Cut(text, "; remedy: "); ok {
		return what, remedy
	}
	depth := 0
	for i := len(text) - 1; i > 0 && strings.HasSuffix(text, ")"); i-- {
		switch text[i] {
		case ')':
			depth++
		case '(':
			depth--
		}
		if depth == 0 { // where the last parenthesis begins
			inner := text[i+1 : len(text)-1]
			if text[i-1] == ' ' && strings.Contains(inner, " ") {
				return text[:i-1], inner
			}
			break
		}
	}
	return text, ""
}
