// Package doctor measures a machine and a source, and reports what the rules of package findings make of that.
//
// It leaves no lasting change, prints no secret, and is bounded in time: what cannot be measured says why.
package doctor

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/cache/objstore/stores"
	"github.com/shoalfs/shoal/internal/findings"
	"github.com/shoalfs/shoal/internal/human"
)

const Version = 2 // of the report's schema (docs/doctor.md): a field may be added without a new one

// Options say what to check.
type Options struct {
	CacheDir  string         // absolute
	CacheSize int64          // bytes of --cache-size
	Memory    int64          // bytes of --memory
	FeedOnly  bool           // nothing will be mounted
	Pod       bool           // this is a container of Kubernetes
	Quick     bool           // a third of the time
	Source    string         // "": only the machine
	Store     stores.Options // of the source
	// Data returns the bytes that a daemon's memory leaves for samples beside the metadata of this many files.
	Data func(files int) int64
}

// patient is a machine under examination, with its source.
type patient struct {
	Options
	window  time.Duration // of a measurement, or a multiple of it
	facts   findings.Site
	store   objstore.Store
	where   objstore.Source
	objects []objstore.Object // some of the source's
}

type step struct {
	// takes is its usual duration; 0 for a short one. It gets three times as long, plus 3 s, before it is abandoned.
	takes  time.Duration
	gather func(ctx context.Context) error
}

// Check gathers the facts of a rule, and asks it.
type Check struct {
	Code string
	step
	rule func() findings.Finding
}

// Checks returns the checks to run.
func Checks(o Options) (all []Check) {
	p := &patient{Options: o, window: 700 * time.Millisecond}
	if o.Quick {
		p.window /= 3
	}
	nothing := func(context.Context) error { return nil }
	steps := map[string]step{
		"fuse/device": {0, p.device}, "fuse/mounts": {0, p.mounts}, "limits/machine": {0, p.limits},
		"disk/filesystem": {0, p.filesystem}, "disk/speed": {4 * p.window, p.speed},
		"source/bucket":  {4 * time.Second, p.open}, // it may request a role's credentials
		"source/listing": {4 * p.window, p.list}, "source/latency": {3 * p.window, p.latency},
		"source/bandwidth": {10 * p.window, p.bandwidth}, "source/epoch": {10 * time.Second, nothing},
	}
	for _, r := range findings.SiteRules {
		if area(r.Code) != "source" || o.Source != "" {
			all = append(all, Check{r.Code, steps[r.Code], func() findings.Finding { return r.Of(&p.facts) }})
		}
	}
	return all
}

func area(code string) string {
	area, _, _ := strings.Cut(code, "/")
	return area
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

// Run performs the checks, one after the other, since they measure. begin is called before those that take long, and
// its result after them. Run fails only when ctx ends.
func Run(ctx context.Context, checks []Check, begin func(code string) (end func(result string))) (Report, error) {
	r := Report{Version: Version, Started: time.Now().UTC(), Findings: []findings.Finding{}}
	count := map[findings.Level]*int{
		findings.OK: &r.OK, findings.Warn: &r.Warn, findings.Fail: &r.Fail, findings.Skipped: &r.Skipped,
	}
	broken := map[string]string{} // in each area the first check that failed: the later ones need its facts
	for _, c := range checks {
		area := area(c.Code)
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
func (c Check) run(parent context.Context) (f findings.Finding) {
	limit := 3*c.takes + 3*time.Second
	ctx, cancel := context.WithTimeout(parent, limit)
	defer cancel()
	done := make(chan findings.Finding, 1)
	go func() {
		if err := c.gather(ctx); err != nil {
			done <- findings.OfError(err)
		} else {
			done <- c.rule()
		}
	}()
	select {
	case f = <-done:
	case <-parent.Done():
	case <-time.After(limit + 2*time.Second): // it may report its result at the end of its time
		f = findings.OfError(context.DeadlineExceeded)
	}
	f.Code = c.Code
	return f
}

// Print writes a report for people.
func (r *Report) Print(w io.Writer) error {
	_, err := fmt.Fprintf(w, "%s\n%d ok, %s, %d failed, %d skipped; %.1f s\n",
		findings.Text(r.Findings), r.OK, human.Count(r.Warn, "warning"), r.Fail, r.Skipped, r.Seconds)
	return err
}
