// Package doctor measures a machine and a source, and reports what the rules of package findings make of that.
//
// It leaves no lasting change, prints no secret, and is bounded in time: what cannot be measured says why.
//
//	machine.go, disk.go ── findings.Machine ─┐
//	source.go, rates.go ── findings.Store ───┴─ Run ── one after the other, since they measure ── Report
package doctor

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/shoalfs/shoal/internal/findings"
	"github.com/shoalfs/shoal/internal/human"
)

// Version is that of the report's schema (docs/doctor.md). A field may be added without a new version.
const Version = 2

// Options say what to check.
type Options struct {
	CacheDir  string // absolute
	CacheSize int64  // bytes of --cache-size
	Memory    int64  // bytes of --memory
	FeedOnly  bool   // nothing will be mounted
	Quick     bool   // a third of the time
	Source    *Source
}

// Check gathers the facts of a rule, and asks it.
type Check struct {
	Code string
	step
	rule func() findings.Finding
}

// step gathers facts.
type step struct {
	// takes is its usual duration; 0 for a short one. It gets three times as long, plus 3 s, before it is abandoned.
	takes  time.Duration
	gather func(ctx context.Context) error
}

func bind[F any](rules []findings.Rule[F], facts F, steps map[string]step) (all []Check) {
	for _, r := range rules {
		all = append(all, Check{r.Code, steps[r.Code], func() findings.Finding { return r.Of(facts) }})
	}
	return all
}

// Checks returns the checks to run.
func Checks(o Options) []Check {
	window := 700 * time.Millisecond
	if o.Quick {
		window /= 3
	}
	p := &patient{Options: o, window: window}
	all := bind(findings.MachineRules, &p.facts, p.steps())
	if s := o.Source; s != nil {
		s.quick, s.window, s.facts.Cache = o.Quick, window, o.CacheSize
		all = append(all, bind(findings.StoreRules, &s.facts, s.steps())...)
	}
	return all
}

// Report is what was found.
type Report struct {
	Version  int       `json:"version"`
	Shoal    string    `json:"shoal"` // its version
	Started  time.Time `json:"started"`
	Seconds  float64   `json:"seconds"`
	Source   string    `json:"source,omitempty"`
	CacheDir string    `json:"cache_dir,omitempty"`
	OK       int       `json:"ok"`
	Warn     int       `json:"warn"`
	Fail     int       `json:"fail"`
	Skipped  int       `json:"skipped"`

	Findings []findings.Finding `json:"findings"`
}

// Run performs the checks, one after the other. begin is called before those that take long, and its result after them.
// Run fails only when ctx ends.
func Run(ctx context.Context, checks []Check, begin func(code string) (end func(result string))) (Report, error) {
	r := Report{Version: Version, Started: time.Now().UTC(), Findings: []findings.Finding{}}
	count := map[findings.Level]*int{findings.OK: &r.OK, findings.Warn: &r.Warn, findings.Fail: &r.Fail,
		findings.Skipped: &r.Skipped}
	broken := map[string]string{} // in each area the first check that failed: the later ones need its facts
	for _, c := range checks {
		area, _, _ := strings.Cut(c.Code, "/")
		if first := broken[area]; first != "" && area != "fuse" {
			c.gather = func(context.Context) error { return findings.Skip("it needs " + first) }
		}
		end := func(string) {}
		if begin != nil && c.takes > 2*time.Second {
			end = begin(c.Code)
		}
		f := c.run(ctx)
		end(string(f.Level))
		if err := ctx.Err(); err != nil {
			return r, err
		}
		if r.Findings = append(r.Findings, f); f.Level == findings.Fail || f.Level == findings.Skipped {
			broken[area] = cmp.Or(broken[area], c.Code)
		}
		*count[f.Level]++
	}
	r.Seconds = time.Since(r.Started).Seconds()
	return r, nil
}

// run performs the check within its time limit. A check that hangs in the kernel (a dead NFS server, for example) is
// abandoned: its goroutine ends when the kernel answers.
func (c Check) run(ctx context.Context) findings.Finding {
	ctx, cancel := context.WithTimeout(ctx, 3*c.takes+3*time.Second)
	defer cancel()
	done := make(chan findings.Finding, 1)
	go func() {
		if err := c.gather(ctx); err != nil {
			done <- findings.OfError(err)
		} else {
			done <- c.rule()
		}
	}()
	var f findings.Finding
	select {
	case f = <-done:
	case <-ctx.Done():
		select {
		case f = <-done:
		case <-time.After(2 * time.Second): // it may report its result at the end of its time
			f = findings.OfError(context.DeadlineExceeded)
		}
	}
	f.Code = c.Code
	return f
}

// Print writes a report for people.
func (r *Report) Print(w io.Writer) error {
	if err := findings.Print(w, r.Findings); err != nil {
		return err
	}
	_, err := fmt.Fprintf(w, "\n%d ok, %s, %d failed, %d skipped; %.1f s\n", r.OK, human.Count(r.Warn, "warning"), r.Fail,
		r.Skipped, r.Seconds)
	return err
}
