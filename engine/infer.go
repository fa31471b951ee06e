package engine

import (
	"context"
	"fmt"
	"io"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/prefetch/infer"
	"github.com/shoalfs/shoal/prefetch/order"
)

// inference watches what readers of the mount open, works out in which order they do, and prefetches
// by it for as long as they keep to it.
//
// One goroutine owns the detector. What it asks for is searched on threads of the lowest priority, so
// that readers are served first, unless it takes moments only. close ends and waits for all of them.
type inference struct {
	engine *Engine
	view   *view
	wake   chan struct{}
	cancel context.CancelFunc
	done   chan struct{}

	mu     sync.Mutex
	opens  []infer.Open // not looked at yet
	stream *Stream      // that carries the finding out; nil while there is none
	said   inferred

	// The goroutine's own.
	detector *infer.Detector
	running  map[infer.Depth]*searching
	found    chan result
}

// inferred is what can be told.
type inferred struct {
	finding infer.Finding
	locked  bool
	depth   infer.Depth // of the search that found it, or that is under way
	active  bool        // a search is under way
	reads   int         // opens of samples from the first on until it was found, or until now
	since   time.Time   // of the first of them
	took    time.Duration
}

// searching is a search under way.
type searching struct {
	search *infer.Search
	cancel context.CancelFunc
}

// result is what a search came to.
type result struct {
	*searching
	finding infer.Finding
	ok      bool
}

// maxWaiting bounds the opens that have not been looked at: some seconds of them.
const maxWaiting = 1 << 18

// startInference begins to watch readers of the version in force.
func (e *Engine) startInference(v *view) {
	subsets := []infer.Subset{{Len: v.samples.Len()}}
	for _, t := range v.samples.Trees() {
		subsets = append(subsets, infer.Subset{Folder: t.Folder, First: t.First, Len: t.Len})
	}
	ctx, cancel := context.WithCancel(context.Background())
	i := &inference{
		engine: e, view: v, wake: make(chan struct{}, 1), cancel: cancel, done: make(chan struct{}),
		detector: infer.NewDetector(subsets), running: map[infer.Depth]*searching{}, found: make(chan result),
	}
	if old := e.inference.Swap(i); old != nil {
		old.close()
	}
	go i.run(ctx)
}

// stopInference ends it, if it is on. A stream that it has started stays, for the caller to close.
func (e *Engine) stopInference() {
	if i := e.inference.Swap(nil); i != nil {
		i.close()
	}
}

func (i *inference) close() {
	i.cancel()
	<-i.done
}

// opened takes note of an open. It is called for every one, so it leaves the rest to the goroutine.
func (i *inference) opened(process uint32, file int) {
	sample, ok := i.view.samples.Sample(file)
	if !ok {
		return
	}
	i.mu.Lock()
	if len(i.opens) < maxWaiting {
		i.opens = append(i.opens, infer.Open{Process: process, Sample: uint32(sample)})
	}
	i.mu.Unlock()
	select {
	case i.wake <- struct{}{}:
	default:
	}
}

func (i *inference) run(ctx context.Context) {
	defer close(i.done)
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
		case r := <-i.found:
			i.end(r.searching)
			if r.ok {
				i.changed(i.detector.Lock(r.search, r.finding), r.search.Depth)
			}
		}
	}
}

// look tells the detector what was opened.
func (i *inference) look() {
	i.mu.Lock()
	opens := i.opens
	i.opens = nil
	if len(opens) > 0 && i.said.reads == 0 {
		i.said.since = time.Now()
	}
	if !i.said.locked {
		i.said.reads += len(opens)
	}
	i.mu.Unlock()
	for _, o := range opens {
		i.changed(i.detector.Open(o), 0)
	}
}

// search starts what the detector asks for, and ends what came too late. A search of all seeds goes on
// beside the others.
func (i *inference) search(ctx context.Context) {
	for _, r := range i.running {
		if i.detector.Stale(r.search) {
			r.cancel()
		}
	}
	_, whole := i.running[infer.Whole]
	if n := len(i.running); n > 1 || n == 1 && !whole {
		return
	}
	s := i.detector.Next(whole)
	if s == nil {
		return
	}
	ctx, cancel := context.WithCancel(ctx)
	r := &searching{s, cancel}
	i.running[s.Depth] = r
	i.mu.Lock()
	if !i.said.locked {
		i.said.depth, i.said.active = s.Depth, true
	}
	i.mu.Unlock()
	go func() {
		f, ok := runSearch(ctx, s)
		i.found <- result{r, f, ok}
	}()
}

func (i *inference) end(r *searching) {
	r.cancel()
	delete(i.running, r.search.Depth)
	i.mu.Lock()
	if i.said.active = len(i.running) > 0; i.said.active && !i.said.locked {
		i.said.depth = infer.Whole
	}
	i.mu.Unlock()
}

// runSearch carries a search out on as many threads as the process may use.
func runSearch(ctx context.Context, s *infer.Search) (best infer.Finding, ok bool) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stopped := func() bool { return ctx.Err() != nil }
	var next atomic.Int64
	var mu sync.Mutex
	var wg sync.WaitGroup
	for range min(runtime.GOMAXPROCS(0), s.Steps()) {
		wg.Go(func() {
			if s.Depth > infer.Usual {
				// The thread is never unlocked, so it ends with the goroutine, and its priority with it.
				runtime.LockOSThread()
				thread := unix.Gettid()
				_ = unix.Setpriority(unix.PRIO_PROCESS, thread, 19) // at worst it is one of equals
				// On a busy machine a step could take it seconds, for which whoever ends the search would wait.
				stop := context.AfterFunc(ctx, func() { _ = unix.Setpriority(unix.PRIO_PROCESS, thread, 0) }) // only root can
				defer stop()
			}
			for ctx.Err() == nil {
				step := int(next.Add(1)) - 1
				if step >= s.Steps() {
					return
				}
				s.Run(step, stopped, func(f infer.Finding) {
					mu.Lock()
					defer mu.Unlock()
					if !ok || f.Bits > best.Bits {
						best, ok = f, true
					}
					cancel()
				})
			}
		})
	}
	wg.Wait()
	return best, ok
}

// changed does what the detector's conclusion asks for.
func (i *inference) changed(c infer.Change, depth infer.Depth) {
	f, epoch, locked := i.detector.Finding()
	log := i.engine.log
	switch c {
	case infer.None:
		return
	case infer.Unlocked:
		i.drop()
		i.mu.Lock()
		i.said.locked, i.said.reads = false, 0
		i.mu.Unlock()
		log.Info("readers no longer follow the inferred order")
		return
	}
	if !locked {
		return
	}
	i.mu.Lock()
	s := i.stream
	i.mu.Unlock()
	// Mostly the stream has noticed by itself that the reader is in another epoch.
	if c != infer.Followed || s == nil || s.epoch() != epoch {
		i.install(f, epoch)
	}
	i.mu.Lock()
	i.said.finding = f
	if c == infer.Locked {
		i.said.locked, i.said.depth = true, depth
		i.said.took = time.Since(i.said.since)
	}
	said := i.said
	i.mu.Unlock()
	if c == infer.Locked {
		log.Info("order inferred", "order", f.Spec(), "from", f.Source.String(), "folder", f.Subset.Folder, "reads", said.reads,
			"evidence_reads", f.Reads, "evidence_bits", int(f.Bits), "seconds", said.took.Seconds(), "search", depth.String())
	}
}

// install starts a stream that carries the finding out, in place of the one before.
func (i *inference) install(f infer.Finding, epoch int) {
	samples := i.view.samples
	opened := i.detector.Opened()
	for j, sample := range opened {
		opened[j] = samples.File(sample)
	}
	s, err := i.engine.newStreamAt("mount", i.view, func(epoch int) order.Order {
		o := f.Order(epoch)
		if o == nil {
			return nil
		}
		return filesOf(o, samples)
	}, epoch, opened)
	if err != nil {
		i.engine.log.Warn("the inferred order cannot be followed", "order", f.Spec(), "cause", err)
		return
	}
	i.drop()
	e := i.engine
	e.mu.Lock()
	told := e.inference.Load() != i // by a plan, meanwhile
	if !told {
		e.mount = append(e.mount, s)
	}
	e.mu.Unlock()
	if told {
		s.Close()
		return
	}
	i.mu.Lock()
	i.stream = s
	waiting := i.opens // they may have come before the stream was told
	i.mu.Unlock()
	for _, o := range waiting {
		s.opened(samples.File(int(o.Sample)))
	}
}

// drop closes the stream, if there is one.
func (i *inference) drop() {
	i.mu.Lock()
	s := i.stream
	i.stream = nil
	i.mu.Unlock()
	if s == nil {
		return
	}
	e := i.engine
	e.mu.Lock()
	var keep []*Stream
	for _, m := range e.mount {
		if m != s {
			keep = append(keep, m)
		}
	}
	e.mount = keep
	e.mu.Unlock()
	s.Close()
}

// state fills in what the stats say of the order.
func (i *inference) state(o *OrderState) {
	i.mu.Lock()
	defer i.mu.Unlock()
	switch {
	case i.said.locked:
		o.Spec, o.State = i.said.finding.Spec(), "inferred"
	case i.said.reads > 0:
		o.State = "searching"
	}
}

// text says what was inferred and why.
func (i *inference) text(w io.Writer) {
	i.mu.Lock()
	said := i.said
	i.mu.Unlock()
	if !said.locked {
		fmt.Fprintf(w, "order: none yet (--order %s; write paths to .shoal/plan to give one)\n  inferring it: %d files opened", i.engine.order(), said.reads)
		if said.active {
			fmt.Fprintf(w, ", searching %s", said.depth)
		}
		fmt.Fprintln(w)
		return
	}
	f := said.finding
	fmt.Fprintf(w, "order: %s (inferred: %s", f.Spec(), f.Source)
	if f.Subset.Folder != "" {
		fmt.Fprintf(w, "; of the files below %s", f.Subset.Folder)
	}
	if f.World > 1 {
		fmt.Fprintf(w, "; rank %s of %d", order.Ranks{First: f.First, Last: f.Last}, f.World)
	}
	fmt.Fprintf(w, ")\n  known after %d reads and %.2f s, by a search of %s; %d reads gave %.0f bits of evidence\n", said.reads, said.took.Seconds(), said.depth, f.Reads, f.Bits)
}
