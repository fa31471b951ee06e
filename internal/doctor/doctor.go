// Package doctor checks a machine and a source, and reports what makes Shoal slow there or stops it from working, with
// the remedy.
//
// A [Check] is a small function over injected probes: [Machine] is the checks' view of the machine, and [Source] the
// object store. A check leaves no lasting change, prints no secret, and is bounded in time: a check that cannot run says
// why.
//
//	Machine ── FUSE, limits, disk, cache directory, versions, GPU
//	Source  ── name, TCP, TLS, clock, credentials, listing, GETs, latency, connections that pay
//	   └─ Run ── one after the other, since they measure ── Report ── text or JSON (docs/doctor.md)
package doctor

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// Version is that of the report's schema (docs/doctor.md). A field may be added without a new version.
const Version = 1

// Status is the result of a check in one word.
type Status string

// The statuses.
const (
	OK      Status = "ok"
	Warn    Status = "warn"    // it works, and is slower or more fragile than it need be
	Fail    Status = "fail"    // it does not work
	Skipped Status = "skipped" // not checked, or not applicable: Meaning says why
)

// Result is the result of a check.
type Result struct {
	Area     string             `json:"area"`
	Check    string             `json:"check"`
	Status   Status             `json:"status"`
	Measured string             `json:"measured,omitempty"` // the fact
	Meaning  string             `json:"meaning,omitempty"`  // its consequence
	Remedy   string             `json:"remedy,omitempty"`   // a command, or what to change
	Values   map[string]float64 `json:"values,omitempty"`   // measurements as numbers; units are in their names
	Seconds  float64            `json:"seconds"`            // duration of the check
}

// Check is one check.
type Check struct {
	Area, Name string
	// Takes is its usual duration; 0 for a short one. It gets three times as long, plus 3 s, before it is abandoned.
	Takes time.Duration
	Run   func(ctx context.Context) Result
}

// Report is the results of all checks.
type Report struct {
	Version  int       `json:"version"`
	Started  time.Time `json:"started"`
	Seconds  float64   `json:"seconds"`
	Source   string    `json:"source,omitempty"`
	CacheDir string    `json:"cache_dir,omitempty"`
	OK       int       `json:"ok"`
	Warn     int       `json:"warn"`
	Fail     int       `json:"fail"`
	Skipped  int       `json:"skipped"`
	Results  []Result  `json:"results"`
}

// Run performs the checks, one after the other. begin, if not nil, is called before each, and its result after it. Run
// fails only when ctx ends.
func Run(ctx context.Context, checks []Check, begin func(c Check) (end func(Result))) (Report, error) {
	r := Report{Version: Version, Started: time.Now().UTC(), Results: []Result{}}
	for _, c := range checks {
		end := func(Result) {}
		if begin != nil {
			end = begin(c)
		}
		result := c.run(ctx)
		end(result)
		if err := ctx.Err(); err != nil {
			return r, err
		}
		r.add(result)
	}
	r.Seconds = time.Since(r.Started).Seconds()
	return r, nil
}

func (r *Report) add(result Result) {
	r.Results = append(r.Results, result)
	switch result.Status {
	case OK:
		r.OK++
	case Warn:
		r.Warn++
	case Fail:
		r.Fail++
	case Skipped:
		r.Skipped++
	}
}

// run performs the check within its time limit. A check that hangs in the kernel (a dead NFS server, for example) is
// abandoned: its goroutine ends when the kernel answers.
func (c Check) run(ctx context.Context) Result {
	began := time.Now()
	limit := 3*c.Takes + 3*time.Second
	bounded, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	done := make(chan Result, 1)
	go func() { done <- c.Run(bounded) }()
	var r Result
	select {
	case r = <-done:
	case <-bounded.Done():
		select {
		case r = <-done:
		case <-time.After(2 * time.Second): // it may report its result at the end of its time
			r = Result{Status: Fail, Measured: fmt.Sprintf("no answer in %s", limit), Meaning: "the kernel or a server hangs", Remedy: "find what hangs: dmesg | tail, and the network"}
		}
	}
	r.Area, r.Check, r.Seconds = c.Area, c.Name, time.Since(began).Seconds()
	return r
}

func ok(format string, args ...any) Result {
	return Result{Status: OK, Measured: fmt.Sprintf(format, args...)}
}

func skipped(format string, args ...any) Result {
	return Result{Status: Skipped, Meaning: fmt.Sprintf(format, args...)}
}

// because adds the meaning to a measured fact.
func (r Result) because(status Status, meaning, remedy string) Result {
	r.Status, r.Meaning, r.Remedy = status, meaning, remedy
	return r
}

// with adds a number.
func (r Result) with(name string, value float64) Result {
	if r.Values == nil {
		r.Values = map[string]float64{}
	}
	r.Values[name] = value
	return r
}

// Failed is the error of a report in which checks failed; nil if none did.
func (r Report) Failed() error {
	if r.Fail == 0 {
		return nil
	}
	var first Result
	for _, c := range r.Results {
		if c.Status == Fail {
			first = c
			break
		}
	}
	text := fmt.Sprintf("%s/%s: %s", first.Area, first.Check, first.Measured)
	if first.Remedy != "" {
		text += " (" + first.Remedy + ")"
	}
	if r.Fail > 1 {
		text = fmt.Sprintf("%d checks failed, the first: %s", r.Fail, text)
	} else {
		text = "1 check failed: " + text
	}
	return errors.New(text)
}
