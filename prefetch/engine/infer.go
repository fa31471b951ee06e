package engine

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/shoalfs/shoal/cache"
	"github.com/shoalfs/shoal/internal/pause"
	"github.com/shoalfs/shoal/prefetch/infer"
	"github.com/shoalfs/shoal/prefetch/order"
	"github.com/shoalfs/shoal/prefetch/run"
)

// inference watches the opens of the mount's readers, finds out their order, and prefetches by it while they follow it.
//
// One goroutine owns the detector. Searches run in other processes, so that readers are served first (search.go).
// Findings are stored in the catalog, for the next start of the mount. close ends everything and waits for it.
type inference struct {
	engine *Engine
	view   *view
	wake   chan struct{}
	cancel context.CancelFunc
	done   chan struct{}

	mu    sync.Mutex    // only the goroutine changes said and ahead
	opens []run.Opening // not handled yet
	half  []run.Opening // large files of which half was read, likewise
	part  map[int]int64 // bytes read of each other large file since it was opened
	said  inferred
	ahead []*follower // for sequential readers

	// The goroutine's own.
	stream    *run.Stream   // of the finding; nil while there is none
	looking   []run.Opening // opens being handled: those still to come
	looked    []run.Opening // the latest
	detector  *infer.Detector
	sequences *infer.Sequences
	running   map[infer.Depth]*searching
	found     chan result
	left      time.Duration // CPU time left for searches without a finding
}

// inferred is the reported state of the inference.
type inferred struct {
	finding infer.Finding
	locked  bool
	depth   infer.Depth // of the search that found it, or that is running
	active  bool        // a search is under way
	gaveUp  string      // why there will be none; empty while there may be one
	reads   int         // opens of samples from the first on until it was found, or until now
	since   time.Time   // of the first of them
	took    time.Duration
}

type searching struct {
	search *infer.Search
	cancel context.CancelFunc
}

type result struct {
	*searching
	finding infer.Finding // without Reads: none
	used    time.Duration
	err     error
}

// Bounds.
const (
	maxLooked  = 1 << 16 // opens that are kept to find a reader's position in an inferred order
	maxWaiting = 1 << 18 // queued opens: some seconds of them
	maxParts   = 1 << 12 // large files of which somebody reads
	// CPU time of searches without a finding. All seeds take some two minutes with AVX-512, and half an hour without.
	maxFruitless = 40 * time.Minute
)

// infer begins to watch readers of the version in force.
func (r *orders) infer(v *view) {
	subsets := []infer.Subset{{Len: v.samples.Len()}}
	for _, t := range v.samples.Trees() {
		subsets = append(subsets, infer.Subset{Folder: t.Folder, First: t.First, Len: t.Len})
	}
	ctx, cancel := context.WithCancel(context.Background())
	i := &inference{
		part:   map[int]int64{},
		engine: r.engine, view: v, wake: make(chan struct{}, 1), cancel: cancel, done: make(chan struct{}),
		detector: infer.NewDetector(subsets), sequences: sequencesOf(v), running: map[infer.Depth]*searching{},
		found: make(chan result), left: maxFruitless,
	}
	i.remember()
	if old := r.inference.Swap(i); old != nil {
		old.close()
	}
	go i.run(ctx)
}

// stopInferring ends it, if running. The caller must close the stream that it has started.
func (r *orders) stopInferring() {
	if i := r.inference.Swap(nil); i != nil {
		i.close()
	}
}

func (i *inference) close() {
	i.cancel()
	<-i.done
}

// large reports whether a file is one of which somebody may want only ranges.
func (i *inference) large(file int) bool { return i.view.manifest.Size(file) > cache.ExtentSize }

// opened queues an open. It is called for every one, so the goroutine does the rest.
func (i *inference) opened(process uint32, file int) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.large(file) {
		if len(i.part) == maxParts {
			clear(i.part)
		}
		i.part[file] = 0
	}
	i.queue(&i.opens, process, file)
}

// read hears that n bytes of a large file were read.
func (i *inference) read(process uint32, file int, n int64) {
	i.mu.Lock()
	defer i.mu.Unlock()
	all, reading := i.part[file]
	switch all += n; {
	case !reading:
	case all < i.view.manifest.Size(file)/2:
		i.part[file] = all
	default:
		delete(i.part, file)
		i.queue(&i.half, process, file)
	}
}

// queue adds to a queue and wakes the goroutine. mu is held.
func (i *inference) queue(q *[]run.Opening, process uint32, file int) {
	if len(*q) < maxWaiting {
		*q = append(*q, run.Opening{Process: process, File: file})
	}
	pause.Poke(i.wake)
}

func (i *inference) run(ctx context.Context) {
	defer close(i.done)
	tick := time.NewTicker(idleRun / 4)
	defer tick.Stop()
	for {
		i.look()
		i.search(ctx)
		select {
		case <-ctx.Done():
			for _, r := range i.running {
				r.cancel()
			}
			for len(i.running) > 0 {
				i.end((<-i.found).searching)
			}
			return
		case <-i.wake:
		case <-tick.C:
		case r := <-i.found:
			i.end(r.searching)
			i.spent(r)
			if r.finding.Reads > 0 {
				i.changed(i.detector.Lock(r.search, r.finding), r.search.Depth)
			}
		}
	}
}

// look passes the opens to the detector.
func (i *inference) look() {
	i.mu.Lock()
	half := i.half
	i.looking, i.opens, i.half = i.opens, nil, nil
	if len(i.looking) > 0 && i.said.reads == 0 {
		i.said.since = time.Now()
	}
	if !i.said.locked {
		i.said.reads += len(i.looking)
	}
	i.mu.Unlock()
	for len(i.looking) > 0 {
		o := i.looking[0]
		i.looking = i.looking[1:]
		if len(i.looked) == maxLooked {
			i.looked = i.looked[:copy(i.looked, i.looked[maxLooked/2:])]
		}
		i.looked = append(i.looked, o)
		var followed bool
		if i.large(o.File) {
			followed = slices.ContainsFunc(i.ahead, func(a *follower) bool { return a.holds(o.File) })
		} else {
			followed = i.inSequence(o)
		}
		// A known shuffle gets every open; without one, only opens outside sequences count.
		sample, numbered := i.view.samples.Sample(o.File)
		if _, _, locked := i.detector.Finding(); numbered && (locked || !followed) {
			i.changed(i.detector.Open(infer.Open{Process: o.Process, Sample: uint32(sample)}), 0)
		}
	}
	for _, o := range half {
		i.inSequence(o)
	}
	i.readOn(time.Now())
}

// search starts the searches that the detector requests, and ends those that are too late.
func (i *inference) search(ctx context.Context) {
	for _, r := range i.running {
		if i.detector.Stale(r.search) {
			r.cancel()
		}
	}
	if i.left <= 0 || len(i.engine.host.cfg.Searcher) == 0 {
		return
	}
	s := i.detector.Next(func(d infer.Depth) bool { return i.running[d] != nil })
	if s == nil {
		return
	}
	ctx, cancel := context.WithCancel(ctx)
	r := &searching{s, cancel}
	i.running[s.Depth] = r
	if !i.said.locked {
		i.say(func(said *inferred) { said.depth, said.active = s.Depth, true })
	}
	request := searchRequest{s.Task, int(i.left.Seconds()) + 1}
	go func() {
		finding, used, err := i.engine.host.searchElsewhere(ctx, request)
		if ctx.Err() != nil {
			err = nil // the result is no longer needed
		}
		i.found <- result{r, finding, used, err}
	}()
}

func (i *inference) spent(r result) {
	why := ""
	switch {
	case r.finding.Reads > 0:
		i.left = maxFruitless
		return
	case r.err != nil && r.used < i.left:
		i.left, why = 0, "the search process failed: "+r.err.Error()
	default:
		if i.left -= r.used; i.left <= 0 {
			why = fmt.Sprintf("no torch shuffle was found in %v of CPU time", maxFruitless)
		}
	}
	if why != "" {
		i.engine.log.Warn("the search for the reader's order has ended", "cause", why)
		i.say(func(said *inferred) { said.gaveUp = why })
	}
}

func (i *inference) remember() {
	var known []infer.Known
	b, err := i.engine.catalog.Shuffles(i.engine.dataset)
	if err == nil && len(b) > 0 {
		err = json.Unmarshal(b, &known)
	}
	if err != nil {
		i.engine.log.Warn("cannot read earlier inferred orders from the catalog", "cause", err)
	}
	i.detector.Remember(known)
}

func (i *inference) keep() {
	b, err := json.Marshal(i.detector.Known())
	if err == nil {
		err = i.engine.catalog.SetShuffles(i.engine.dataset, b)
	}
	if err != nil {
		i.engine.log.Warn("cannot save the inferred order in the catalog", "cause", err)
	}
}

func (i *inference) end(r *searching) {
	r.cancel()
	delete(i.running, r.search.Depth)
	i.say(func(said *inferred) {
		said.active = len(i.running) > 0
		for depth := range i.running {
			if !said.locked {
				said.depth = depth
			}
		}
	})
}

func (i *inference) say(change func(*inferred)) {
	i.mu.Lock()
	defer i.mu.Unlock()
	change(&i.said)
}

func (i *inference) changed(c infer.Change, depth infer.Depth) {
	f, epoch, locked := i.detector.Finding()
	log := i.engine.log
	switch c {
	case infer.None:
		return
	case infer.Unlocked:
		i.drop()
		i.say(func(said *inferred) { said.locked, said.reads = false, 0 })
		log.Info("readers no longer follow the inferred order")
		return
	}
	if !locked {
		return
	}
	// Mostly the stream has noticed by itself that the reader is in another epoch.
	if c != infer.Followed || i.stream == nil || i.stream.Position().Epoch != epoch {
		i.install(f, epoch)
	}
	i.say(func(said *inferred) {
		said.finding = f
		if c == infer.Locked && !said.locked { // not for epochs that followed without a search
			said.locked, said.depth, said.took = true, depth, time.Since(said.since)
		}
	})
	if c == infer.Locked {
		i.keep()
		log.Info("order inferred", "order", f.Spec(), "from", f.Source.String(), "folder", f.Subset.Folder,
			"reads", i.said.reads,
			"evidence_reads", f.Reads, "evidence_bits", int(f.Bits), "seconds", i.said.took.Seconds(),
			"search", depth.String())
	}
}

// install starts a stream for the finding, replacing the previous one.
func (i *inference) install(f infer.Finding, epoch int) {
	samples := i.view.samples
	opened := i.looked // the detector did not get those in sequence
	at := run.Opening{Process: f.Opened.Process, File: samples.File(int(f.Opened.Sample))}
	for k, o := range slices.Backward(opened) {
		if o == at {
			opened = opened[k:]
			break
		}
	}
	o := i.engine.orders.options("mount", i.view, func(epoch int) order.Order {
		o := f.Order(epoch)
		if o == nil {
			return nil
		}
		return filesOf(o, samples)
	})
	o.First, o.Search, o.Opened = epoch, true, opened
	s, err := i.engine.host.runner.Begin(o)
	if err != nil {
		i.engine.log.Warn("the inferred order cannot be followed", "order", f.Spec(), "cause", err)
		return
	}
	i.drop()
	i.stream = s
	i.begin(s, true)
}

// begin makes a stream follow the mount's readers, before the others or after them.
func (i *inference) begin(s *run.Stream, first bool) {
	r := &i.engine.orders
	r.mu.Lock()
	told := r.inference.Load() != i // by a plan, meanwhile
	switch {
	case told:
	case first:
		r.streams = append([]*run.Stream{s}, r.streams...)
	default:
		r.streams = append(slices.Clip(r.streams), s)
	}
	r.mu.Unlock()
	if told {
		s.Close()
		return
	}
	i.mu.Lock()
	waiting := slices.Concat(i.looking, i.opens) // they came before the stream existed
	i.mu.Unlock()
	for _, o := range waiting {
		s.Heard(o)
	}
}

func (i *inference) drop() {
	if i.stream != nil {
		i.forget(i.stream)
		i.stream = nil
	}
}

func (i *inference) forget(s *run.Stream) {
	i.engine.orders.drop(func(m *run.Stream) bool { return m == s })
}

// state fills in the order's part of the stats.
func (i *inference) state(o *OrderState) {
	i.mu.Lock()
	defer i.mu.Unlock()
	switch {
	case i.said.locked:
		o.Spec, o.State = i.said.finding.Spec(), "inferred"
	case len(i.ahead) > 0:
		o.Spec, o.State = i.ahead[0].spec(), "inferred"
	case i.said.gaveUp != "" || i.hopeless():
		o.State = "unknown"
	case i.said.active:
		o.State = "searching"
	case i.said.reads > 0:
		o.State = "watching"
	}
}

// pays reports whether the running search may end before an epoch of n samples does, after which the order of a loader
// without a seed is another.
func (s *inferred) pays(n int, now time.Time, processors int) bool {
	switch {
	case n == 0:
		return true
	case s.depth < infer.Whole: // which takes some seconds, if the processors have time for it
		return s.reads < n
	}
	sample := now.Sub(s.since) / time.Duration(max(s.reads, 1))
	return wholeSearch/time.Duration(processors) < sample*time.Duration(n-s.reads%n)
}

// wholeSearch is the CPU time of a search of all seeds: 64 to 89 s on two processors
// (lab/bench/results/infer-locks.md).
const wholeSearch = 150 * time.Second

// hopeless reports whether the running search does not pay. i.mu is held.
func (i *inference) hopeless() bool {
	return i.said.active && !i.said.pays(i.view.samples.Len(), time.Now(), runtime.GOMAXPROCS(0))
}

func (i *inference) text(w io.Writer) {
	i.mu.Lock()
	said, ahead, hopeless := i.said, slices.Clone(i.ahead), i.hopeless()
	i.mu.Unlock()
	if !said.locked {
		if len(ahead) == 0 {
			fmt.Fprintf(w, "order: none yet (--order %s)\n  %d files opened, not in sequence",
				i.engine.order(), said.reads)
			switch {
			case said.active:
				fmt.Fprintf(w, "; searching %s for a torch shuffle", said.depth)
				if hopeless {
					fmt.Fprint(w, ", which takes longer than what is left of the epoch")
				}
			case said.gaveUp != "":
				fmt.Fprintf(w, "; the search for a torch shuffle has ended: %s", said.gaveUp)
			}
			fmt.Fprintln(w)
		}
	} else {
		f := said.finding
		fmt.Fprintf(w, "order: %s (inferred: %s", f.Spec(), f.Source)
		if f.Subset.Folder != "" {
			fmt.Fprintf(w, "; of the files below %s", f.Subset.Folder)
		}
		if f.World > 1 {
			fmt.Fprintf(w, "; rank %s of %d", order.Ranks{First: f.First, Last: f.Last}, f.World)
		}
		fmt.Fprintf(w, ")\n  known after %d reads and %.2f s, by a search of %s; %d reads gave %.0f bits of evidence\n",
			said.reads, said.took.Seconds(), said.depth, f.Reads, f.Bits)
	}
	for _, a := range ahead {
		a.text(w)
	}
}
