package findings

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"slices"
	"time"

	"github.com/shoalfs/shoal/internal/human"
	"github.com/shoalfs/shoal/internal/profile/trace"
	"github.com/shoalfs/shoal/prefetch/engine"
	"github.com/shoalfs/shoal/prefetch/infer"
	"github.com/shoalfs/shoal/prefetch/sim"
)

const ProfileVersion = 2 // of a profile's schema (docs/profile.md): a field may be added without a new one

// Profile is what a recording of a mount says about the trainer.
type Profile struct {
	Version  int       `json:"version"`
	Source   string    `json:"source"`
	Started  time.Time `json:"started"`
	Seconds  float64   `json:"seconds"`
	Figures  Figures   `json:"figures"`
	Findings []Finding `json:"findings"` // the most important first
	Estimate *Estimate `json:"estimate,omitempty"`
	Verdict  string    `json:"verdict"`
}

// Figures are counts and rates.
type Figures struct {
	Opens          int     `json:"opens"`
	Reads          int     `json:"reads"`
	Bytes          int64   `json:"bytes"`
	Lookups        int     `json:"lookups"` // of names and attributes, and pieces of listings
	Files          int     `json:"files"`   // distinct files opened
	DatasetFiles   int     `json:"dataset_files"`
	AtOnce         float64 `json:"processes_at_once"`
	FilesPerSecond float64 `json:"files_per_second"` // opened, while anything was
	WaitShare      float64 `json:"wait_share"`       // share of the processes' time spent waiting for reads
	WaitP50        float64 `json:"read_wait_p50_seconds"`
	WaitP99        float64 `json:"read_wait_p99_seconds"`
	Passes         int     `json:"passes"` // over the files, begun
	Lost           int64   `json:"lost"`   // events that the recording lost
	LatencySeconds float64 `json:"get_latency_p50_seconds"`
	Order          string  `json:"order"` // followed by the mount
	OrderState     string  `json:"order_state"`
	served
}

type served struct {
	Keep   int `json:"keep"`
	Ring   int `json:"ring"`
	Joined int `json:"joined"`
	Misses int `json:"misses"`
}

// Estimate is the rate of the job if its order were known, and the model that it comes from.
type Estimate struct {
	Now         float64 `json:"files_per_second"`      // as seen
	Cold        float64 `json:"cold_files_per_second"` // an epoch that fetches everything
	Warm        float64 `json:"warm_files_per_second"` // one after it, with the cache as it is
	Bound       string  `json:"cold_bound"`            // what bounds the cold epoch
	Workers     int     `json:"workers"`
	Read        float64 `json:"read_seconds"` // of a worker for a sample: all but waiting for its bytes
	Connections int     `json:"connections"`
	CacheShare  float64 `json:"cache_share"` // of the dataset that the cache may hold
}

// ProfileOptions are facts that a recording does not contain.
type ProfileOptions struct {
	Bandwidth float64 // bytes a second of the link to the store; 0: no limit
	Searches  int     // for PyTorch's shuffles, which take some tenths of a second each
}

const fewest = 24 // opens that are analysed

// Analyse analyses a recording. It fails if the recorded stats cannot be parsed.
//
// Reads served by the kernel's page cache are not in a recording, only the opens. A process is a thread: a DataLoader's
// workers are distinct, but not which of them belong to one trainer.
func Analyse(t *trace.Trace, o ProfileOptions) (p Profile, err error) {
	tr := &trainer{trace: t, options: o}
	if n := len(t.Stats); n > 0 {
		if err := json.Unmarshal(t.Stats[n-1], &tr.stats); err != nil {
			return p, fmt.Errorf("the recording's stats: %w", err)
		}
	}
	tr.digest()
	tr.classify()
	p = Profile{Version: ProfileVersion, Source: t.Source, Started: t.Started, Seconds: t.Length.Seconds()}
	if tr.trains() {
		if err := tr.predict(); err != nil {
			return p, err
		}
		p.Estimate = &tr.estimate
	}
	p.Figures, p.Findings, p.Verdict = tr.Figures, append([]Finding{}, judge(trainerRules, tr)...), tr.verdict()
	return p, nil
}

type trainer struct {
	Figures
	trace    *trace.Trace
	stats    engine.Stats // the last
	options  ProfileOptions
	visits   []*visit      // by their start
	lens     []int         // of reads, sorted
	sizes    []int64       // of the files opened
	span     time.Duration // of all processes
	opened   int           // visits, but for those that come again
	near     float64       // share of these that repeat a file of the last ones, as many as a quarter of the files
	steps    int           // from a process's file to its next
	forward  float64       // share of the steps that are forward in the listing
	passes   [][]int       // numbers of files, in the order of their visits
	inside   containers
	kind     string         // the code of the rule for how it reads; "" if it reads too little for any
	unread   int            // visits of files with bytes, without a read
	alike    float64        // share of the pairs of files far apart that two passes have in the same order
	torch    *infer.Finding // the shuffle that the opens follow; nil: none
	estimate Estimate
}

type visit struct {
	file       int32
	process    uint32
	start, end time.Duration // end: of the last read
	wait       time.Duration // in which at least one read was pending
	reads      int
	jumps      int   // reads that do not continue near the end of the previous one
	next       int64 // offset after the last read
	again      bool  // the same process had this file open just before
}

func (t *trainer) digest() {
	events := slices.Clone(t.trace.Events)
	slices.SortStableFunc(events, func(a, b trace.Event) int { return cmp.Compare(a.At, b.At) })
	type place struct {
		process uint32
		file    int32
	}
	open, anybody, latest := map[place]*visit{}, map[int32]*visit{}, map[uint32]*visit{} // the latest visit
	begin := func(e trace.Event) *visit {
		before := latest[e.Process]
		again := before != nil && e.Process != 0 && before.file == e.File
		v := &visit{file: e.File, process: e.Process, start: e.At, end: e.At, again: again}
		t.visits = append(t.visits, v)
		open[place{e.Process, e.File}], anybody[e.File], latest[e.Process] = v, v, v
		return v
	}
	var waits []time.Duration
	var by [trace.Miss + 1]int
	for _, e := range events {
		switch e.Kind {
		case trace.Open:
			begin(e)
		case trace.Read:
			v := cmp.Or(open[place{e.Process, e.File}], anybody[e.File])
			if v == nil {
				v = begin(e) // opened before the recording began
			}
			v.read(e)
			by[min(e.Area, trace.Miss)]++
			t.Bytes += int64(e.Len)
			waits, t.lens = append(waits, e.Wait), append(t.lens, int(e.Len))
		case trace.List, trace.Lookup:
			t.Lookups++
		}
	}
	slices.Sort(waits)
	slices.Sort(t.lens)
	t.Opens, t.Reads, t.DatasetFiles, t.Lost = len(t.visits), len(waits), t.trace.Header.Files, t.trace.Lost
	t.served = served{by[trace.Keep], by[trace.Ring], by[trace.Joined], by[trace.Miss]}
	t.WaitP50, t.WaitP99 = quantile(waits, 0.5).Seconds(), quantile(waits, 0.99).Seconds()
	t.LatencySeconds = t.stats.LatencyP50
	t.Order, t.OrderState = cmp.Or(t.stats.Order.Spec, t.trace.Order), t.stats.Order.State
	t.group()
}

func (v *visit) read(e trace.Event) {
	end := e.At + e.Wait
	if v.reads == 0 {
		v.wait = e.Wait
	} else if from := max(e.At, v.end); end > from {
		v.wait += end - from
	}
	// The kernel reads ahead with several requests at once, which arrive in any order.
	if off := e.Off - v.next; v.reads > 0 && max(off, -off) > 2*int64(e.Len) {
		v.jumps++
	}
	v.reads++
	v.next = e.Off + int64(e.Len)
	v.end = max(v.end, end)
}

// group sums up by process, and cuts the visits into passes.
func (t *trainer) group() {
	type process struct {
		from, to, wait time.Duration
		last           *visit
	}
	processes, seen := map[uint32]*process{}, map[int32]bool{}
	var to, wait time.Duration
	var all []*visit
	up := 0
	for _, v := range t.visits {
		p := processes[v.process]
		if p == nil {
			p = &process{from: v.start}
			processes[v.process] = p
		}
		p.wait += v.wait
		p.to, to = max(p.to, v.end), max(to, v.end)
		if !seen[v.file] {
			seen[v.file] = true
			t.sizes = append(t.sizes, t.file(v).Size)
		}
		if v.again {
			continue
		}
		if all = append(all, v); p.last != nil {
			if t.steps++; t.number(v) > t.number(p.last) {
				up++
			}
		}
		p.last = v
	}
	for _, p := range processes {
		t.span += p.to - p.from
		wait += min(p.wait, p.to-p.from)
	}
	t.Files, t.opened = len(t.sizes), len(all)
	took := to
	if len(all) > 0 {
		took -= all[0].start
	}
	t.WaitShare, t.AtOnce = share(wait, t.span), share(t.span, took)
	t.FilesPerSecond, t.forward = share(float64(len(all)), took.Seconds()), share(up, t.steps)
	t.cut(all)
}

// number is a visited file's place in the listing's order: its sample number, if it has one.
func (t *trainer) number(v *visit) int {
	if sample := t.file(v).Sample; sample >= 0 {
		return sample
	}
	return int(v.file)
}

func (t *trainer) file(v *visit) trace.File { return t.trace.Files[int(v.file)] }

// many is the share of visits that repeat a file of the last visits, as many as a quarter of the files, from which
// there are several readers, or one that draws with replacement: a single reader at the end of an epoch causes 3%.
const many = 0.05

// cut cuts the visits into passes: the n-th visit of a file belongs to the n-th.
func (t *trainer) cut(all []*visit) {
	last, turn := map[int32]int{}, map[int32]int{}
	near := 0
	for i, v := range all {
		if at, ok := last[v.file]; ok && i-at <= t.Files/4 {
			near++
		}
		last[v.file] = i
		n := turn[v.file]
		if turn[v.file]++; n == len(t.passes) {
			t.passes = append(t.passes, nil)
		}
		t.passes[n] = append(t.passes[n], t.number(v))
	}
	t.near = share(near, len(all))
	for n := len(t.passes) - 1; n > 0 && (t.near >= many || 20*len(t.passes[n]) < len(t.passes[0])); n-- {
		t.passes = t.passes[:n]
	}
	t.Passes = len(t.passes)
}

// trains reports whether enough files were opened for a trainer.
func (t *trainer) trains() bool { return t.Opens >= fewest && t.Bytes > 0 }

// ordered reports whether the mount knew the order of the reads.
func (t *trainer) ordered() bool {
	return slices.Contains([]string{"inferred", "following", "finished"}, t.OrderState)
}

const ceiling = 12_000.0 // about the rate of a mount on two cores with warm data; the model does not include it

func (t *trainer) predict() (err error) {
	e := &t.estimate
	*e = Estimate{
		Now: t.FilesPerSecond, Workers: max(int(math.Round(t.AtOnce)), 1),
		Connections: cmp.Or(t.stats.Connections, t.trace.Connections, 512),
		Read:        share((1-t.WaitShare)*t.span.Seconds(), float64(t.opened)),
		CacheShare:  min(share(t.trace.CacheBytes, t.trace.Bytes), 1),
	}
	job := sim.Job{Accelerators: 1, Batch: 64, Workers: e.Workers, Step: 1e-6, Read: e.Read, Prefetch: 2 * e.Workers}
	store := sim.Store{Bandwidth: t.options.Bandwidth, Latency: t.LatencySeconds, LatencySigma: 0.3,
		Connections: e.Connections}
	m := model{max(t.DatasetFiles, t.Files), t.sizes, job, store, t.trace.CacheBytes, t.trace.Memory}
	e.Cold, e.Warm, e.Bound, err = m.run()
	e.Cold, e.Warm = min(e.Cold, ceiling), min(e.Warm, ceiling)
	return err
}

const idleShare = 0.05 // of waiting, negligible

func (t *trainer) verdict() string {
	e := &t.estimate
	head := fmt.Sprintf("%.0f files/s; reads wait %.0f%% of the readers' time.", t.FilesPerSecond, 100*t.WaitShare)
	switch {
	case !t.trains():
		return human.Bytes(t.Bytes) + " read by " + human.Count(t.Opens, "open") + ": too few for an estimate."
	case t.WaitShare < idleShare:
		return head + " Faster storage would gain almost nothing."
	case max(e.Cold, e.Warm) <= 1.1*e.Now:
		return head + " The model expects no gain from a known order or a filled cache: " + e.Bound + " is the limit."
	}
	return head + fmt.Sprintf(" With its order known the model expects %.0f files/s while everything is fetched "+
		"(%.1f times as many; bound by %s), and %.0f/s from the cache.", e.Cold, share(e.Cold, e.Now), e.Bound, e.Warm)
}

// share is a part of a whole; 0 if there is nothing.
func share[N int | int64 | float64 | time.Duration](part, whole N) float64 {
	if whole <= 0 {
		return 0
	}
	return float64(part) / float64(whole)
}

// Print writes a profile for people.
func (p *Profile) Print(w io.Writer) error {
	f := &p.Figures
	_, err := fmt.Fprintf(w, `source     %s, %.1f s recorded, %s lost
opens      %s of %s (of %s), %.0f files/s by %.1f processes at a time; %s looked up
reads      %s, %s: %s keep, %s ring, %s joined a fetch, %s missed
waits      %s of the processes' time; a read p50 %s, p99 %s; the store's GETs p50 %s
order      %s (%s), %s

%s
%s
`, p.Source, p.Seconds, human.Count(f.Lost, "event"),
		human.Number(f.Opens), human.Count(f.Files, "file"), human.Number(f.DatasetFiles), f.FilesPerSecond, f.AtOnce,
		human.Count(f.Lookups, "name"), human.Number(f.Reads), human.Bytes(f.Bytes), percent(f.Keep, f.Reads),
		percent(f.Ring, f.Reads), percent(f.Joined, f.Reads), percent(f.Misses, f.Reads), human.Percent(f.WaitShare),
		seconds(f.WaitP50), seconds(f.WaitP99), seconds(f.LatencySeconds), f.Order, cmp.Or(f.OrderState, "not told"),
		human.Count(f.Passes, "pass"), Text(p.Findings), p.Verdict)
	return err
}
