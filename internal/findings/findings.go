// Package findings judges. Its rules are small functions from facts to a [Finding], which names a thing, the cause and
// the remedy. Who asks gathers the facts, and shows what was found:
//
//	Site ◄── package doctor measures ── shoal doctor
//	trainer ◄── package trace records ── shoal profile
//	Snapshot ◄── a daemon counts ── shoal stat, the dashboard
//
// The package is pure: no clock, no I/O, no goroutines.
package findings

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/internal/human"
)

// Level is how good a finding is.
type Level string

// The levels.
const (
	OK      Level = "ok"
	Idle    Level = "idle"    // nothing happens
	Warn    Level = "warn"    // it works, and is slower or more fragile than it need be
	Fail    Level = "fail"    // it does not work
	Skipped Level = "skipped" // not judged: Thing says why
)

// Finding is what a rule says.
type Finding struct {
	Code   string             `json:"code"` // does not change once published
	Level  Level              `json:"level"`
	Thing  string             `json:"thing"`            // with the figures
	Cause  string             `json:"cause,omitempty"`  // what it means
	Remedy string             `json:"remedy,omitempty"` // commands, or what to change: one a line
	Values map[string]float64 `json:"values,omitempty"` // units are in their names
}

// Rule judges facts. Of leaves the code out; a finding without a thing is none.
type Rule[F any] struct {
	Code string
	Of   func(F) Finding
}

func judge[F any](rules []Rule[F], facts F) (found []Finding) {
	for _, r := range rules {
		if f := r.Of(facts); f.Thing != "" {
			f.Code = r.Code
			found = append(found, f)
		}
	}
	return found
}

func when(applies bool, level Level, thing, cause, remedy string) Finding {
	if !applies {
		return Finding{}
	}
	return Finding{Level: level, Thing: thing, Cause: cause, Remedy: remedy}
}

func ok(thing string, args ...any) Finding {
	return Finding{Level: OK, Thing: fmt.Sprintf(thing, args...)}
}

// but adds what is to be said about the thing, and how good it is.
func (f Finding) but(level Level, cause, remedy string) Finding {
	f.Level, f.Cause, f.Remedy = level, cause, remedy
	return f
}

// Skip is the error of facts that could not be gathered, or that do not matter here.
type Skip string

func (s Skip) Error() string { return string(s) }

// OfError is the finding about facts that could not be gathered.
func OfError(err error) Finding {
	var skip Skip
	var e *objstore.Error
	switch {
	case errors.As(err, &skip):
		return Finding{Level: Skipped, Thing: string(skip)}
	case errors.As(err, &e):
		thing := e.Op + " " + e.Key
		if e.Err != nil {
			thing += ": " + oneLine(e.Err.Error())
		}
		return ok("%s", thing).but(Fail, e.Kind.String(), e.Remedy)
	case errors.Is(err, context.DeadlineExceeded):
		return ok("no answer in time").but(Fail, "the kernel, the network or a server hangs",
			"find out which: dmesg | tail, and the network")
	}
	what, remedy := split(oneLine(err.Error()))
	return ok("%s", what).but(Fail, "it cannot be used", cmp.Or(remedy, "dmesg | tail"))
}

func oneLine(text string) string { return strings.Join(strings.Fields(text), " ") }

// Text is findings for people.
func Text(list []Finding) string {
	const width = 120
	indent := strings.Repeat(" ", 27)
	var b strings.Builder
	block := func(first, rest, text string) {
		for _, line := range human.Fold(text, width-len(rest)) {
			b.WriteString(first + line + "\n")
			first = rest
		}
	}
	for _, f := range list {
		block(fmt.Sprintf("%-7s %-18s ", f.Level, f.Code), indent, f.Thing)
		block(indent, indent, f.Cause)
		for line := range strings.Lines(f.Remedy) {
			block(indent+"-> ", indent+"   ", line)
		}
	}
	return b.String()
}

// Failed is the error of a report in which something failed; nil if nothing did.
func Failed(list []Finding) error {
	failed := slices.DeleteFunc(slices.Clone(list), func(f Finding) bool { return f.Level != Fail })
	if len(failed) == 0 {
		return nil
	}
	f := failed[0]
	return fmt.Errorf("%s failed, the first: %s: %s (%s)", human.Count(len(failed), "check"), f.Code, f.Thing,
		oneLine(cmp.Or(f.Remedy, f.Cause)))
}
