// Package profile analyses a recording of a mount (package trace): what the trainer does, which known patterns that
// matches, and what would help, with the gain that prefetch/sim predicts from the measured latency, sizes and pace.
//
//	trace.Trace ─► digest: visits (an open and its reads), passes, waits, paces
//	                 ├─► patterns, one small function each ─► Finding: evidence in figures, remedies
//	                 └─► estimate: the recorded job, simulated by prefetch/sim with its order known
//
// The package is pure: no clock, no I/O, no goroutines. The recording and the options determine the result.
//
// # Limits of a recording
//
//   - Reads served by the kernel's page cache are not in it, only the opens. Small read(2)s appear as the kernel's
//     read-ahead requests.
//   - A process is a thread. A DataLoader's workers are distinct, but not which of them belong to one trainer.
package profile

import (
	"cmp"
	"encoding/json"
	"fmt"
	"time"

	"github.com/shoalfs/shoal/internal/profile/trace"
)

// Version is that of the report's schema (docs/profile.md). A field may be added without a new version.
const Version = 1

// Options are facts that a recording does not contain.
type Options struct {
	Bandwidth float64 // bytes a second of the link to the store; 0: no limit
	Batch     int     // samples in a step of the trainer; 0: 64
	Step      float64 // seconds of compute in a step; 0: as recorded
	// Searches is the number of searches for PyTorch's shuffles, which take some tenths of a second each; 0: 4, negative:
	// none.
	Searches int
}

// Report is the result of an analysis.
type Report struct {
	Version  int       `json:"version"`
	Source   string    `json:"source"`
	Started  time.Time `json:"started"`
	Seconds  float64   `json:"seconds"`
	Figures  Figures   `json:"figures"`
	Patterns []Finding `json:"patterns"` // the most important first
	Estimate *Estimate `json:"estimate,omitempty"`
	Verdict  string    `json:"verdict"`
}

// Figures are counts and rates.
type Figures struct {
	Opens          int     `json:"opens"`
	Reads          int     `json:"reads"`
	Bytes          int64   `json:"bytes"`
	Lookups        int     `json:"lookups"` // lookups of names and attributes, and pieces of listings
	Files          int     `json:"files"`   // distinct files opened
	DatasetFiles   int     `json:"dataset_files"`
	Processes      int     `json:"processes"` // that opened files
	AtOnce         float64 `json:"processes_at_once"`
	FilesPerSecond float64 `json:"files_per_second"` // opened, while anything was
	WaitShare      float64 `json:"wait_share"`       // share of the processes' time spent waiting for reads
	WaitP50        float64 `json:"read_wait_p50_seconds"`
	WaitP99        float64 `json:"read_wait_p99_seconds"`
	Areas
	Passes          int     `json:"passes"` // over the files, begun
	Lost            int64   `json:"lost"`   // events that the recording lost
	LatencySeconds  float64 `json:"get_latency_p50_seconds"`
	Order           string  `json:"order"` // followed by the mount
	OrderState      string  `json:"order_state"`
	MeanSampleBytes int64   `json:"mean_sample_bytes"`
}

// Areas counts reads by where they were served from.
type Areas struct {
	Keep   int `json:"keep"`
	Ring   int `json:"ring"`
	Joined int `json:"joined"`
	Misses int `json:"misses"`
}

// Finding is a pattern that was recognised.
type Finding struct {
	Pattern  string   `json:"pattern"`
	Title    string   `json:"title"`
	Evidence []string `json:"evidence"`
	Helps    []Help   `json:"helps"`
}

// Help is a remedy.
type Help struct {
	What    string  `json:"what"`
	Command string  `json:"command,omitempty"`
	Gain    float64 `json:"gain,omitempty"` // files/s with it divided by files/s as recorded; 0: not estimated
	By      string  `json:"by,omitempty"`   // the basis of the gain
}

// stats is the part of `.shoal/stats` that is used.
type stats struct {
	GetRequests int64   `json:"get_requests"`
	GetBytes    int64   `json:"get_bytes"`
	LatencyP50  float64 `json:"get_latency_p50_seconds"`
	Connections int     `json:"connections"`
	Lead        int     `json:"lead_samples"`
	Order       struct {
		Spec  string `json:"spec"`
		State string `json:"state"`
	} `json:"order"`
	Disk struct {
		Kept    int `json:"kept_extents"`
		Extents int `json:"extents"`
	} `json:"disk"`
}

// fewest is the least number of opens to analyse.
const fewest = 24

// Analyse analyses a recording. It fails if the recorded stats cannot be parsed.
func Analyse(t *trace.Trace, o Options) (Report, error) {
	o.Batch, o.Searches = cmp.Or(o.Batch, 64), cmp.Or(o.Searches, 4)
	d, err := digestOf(t)
	if err != nil {
		return Report{}, err
	}
	r := Report{Version: Version, Source: t.Source, Started: t.Started, Seconds: t.Length.Seconds(), Figures: d.figures(), Patterns: []Finding{}}
	a := &analysis{digest: d, options: o}
	if a.trains() {
		a.estimate, err = a.predict()
		if err != nil {
			return Report{}, err
		}
		r.Estimate = a.estimate
	}
	for _, p := range patterns {
		if f, ok := p(a); ok {
			r.Patterns = append(r.Patterns, f)
		}
	}
	r.Verdict = a.verdict()
	return r, nil
}

// analysis is the input of patterns.
type analysis struct {
	*digest
	options  Options
	estimate *Estimate // nil without a trainer
	torch    *torchOrder
	searched bool
}

// trains reports whether enough files were opened for a trainer.
func (a *analysis) trains() bool { return len(a.visits) >= fewest && a.readBytes > 0 }

// readsInside reports whether there were enough reads of files that are containers.
func (a *analysis) readsInside() bool { return a.reads >= fewest && a.inFiles() }

// statsOf parses the snapshots of the stats; missing ones are zero.
func statsOf(t *trace.Trace) (first, last stats, err error) {
	if len(t.Stats) == 0 {
		return first, last, nil
	}
	for i, s := range []*stats{&first, &last} {
		text := t.Stats[i*(len(t.Stats)-1)]
		if err := json.Unmarshal(text, s); err != nil {
			return first, last, fmt.Errorf("the recording's stats: %w", err)
		}
	}
	return first, last, nil
}
