// Package findings judges. Its rules are small functions from facts to a [Finding], which names a thing, the cause and
// the remedy. Who asks gathers the facts, and shows what was found:
//
//	Machine, Store ◄── package doctor measures ── shoal doctor
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
	"io"
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

// Rule judges facts. Of leaves the code out.
type Rule[F any] struct {
	Code string
	Of   func(F) Finding
}

func ok(thing string, args ...any) Finding {
	return Finding{Level: OK, Thing: fmt.Sprintf(thing, args...)}
}

// because adds the cause.
func (f Finding) because(cause string, args ...any) Finding {
	f.Cause = fmt.Sprintf(cause, args...)
	return f
}

// note adds what one may want to know.
func (f Finding) note(cause, remedy string) Finding {
	f.Cause, f.Remedy = cause, remedy
	return f
}

func (f Finding) warn(cause, remedy string) Finding {
	f.Level = Warn
	return f.note(cause, remedy)
}

func (f Finding) fail(cause, remedy string) Finding {
	f.Level = Fail
	return f.note(cause, remedy)
}

// with adds a number.
func (f Finding) with(name string, value float64) Finding {
	if f.Values == nil {
		f.Values = map[string]float64{}
	}
	f.Values[name] = value
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
		return ok("%s", oneLine(e.Err.Error())).fail(e.Kind.String(), e.Remedy)
	case errors.Is(err, context.DeadlineExceeded):
		return ok("no answer in time").fail("the kernel, the network or a server hangs",
			"find out which: dmesg | tail, and the network")
	}
	return ok("%s", oneLine(err.Error())).fail("it cannot be used", "dmesg | tail")
}

func oneLine(text string) string { return strings.Join(strings.Fields(text), " ") }

// Print writes findings for people.
func Print(w io.Writer, list []Finding) error {
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
	_, err := io.WriteString(w, b.String())
	return err
}

// Failed is the error of a report in which something failed; nil if nothing did.
func Failed(list []Finding) error {
	n, text := 0, ""
	for _, f := range list {
		if f.Level != Fail {
			continue
		}
		if n++; n == 1 {
			text = fmt.Sprintf("%s: %s (%s)", f.Code, f.Thing, oneLine(cmp.Or(f.Remedy, f.Cause)))
		}
	}
	if n == 0 {
		return nil
	}
	return fmt.Errorf("%s failed, the first: %s", human.Count(n, "check"), text)
}
