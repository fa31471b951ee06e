package engine

import (
	"fmt"
	"io"
	"slices"
	"sync/atomic"
	"time"

	"github.com/shoalfs/shoal/prefetch"
	"github.com/shoalfs/shoal/prefetch/infer"
	"github.com/shoalfs/shoal/prefetch/order"
	"github.com/shoalfs/shoal/prefetch/run"
)

// A sequential reader is followed by a stream over the next files. How far it will go is unknown, so the stream's
// order is a window: it starts with few files, and when the reader comes near its end it is extended by four times as
// much as was read so far, within bounds. A wrong guess costs the first few files. A reader that starts over repeats
// the window. Who opens large files in sequence and reads little of each, their indexes or ranges, does not want the
// next ones whole: such a file counts when half of it has been read.

// sequenceName is the name of such streams in the stats.
const sequenceName = "sequence"

const (
	// maxRuns is how many sequences are followed at once.
	maxRuns = 4
	// leastAhead and mostAhead bound the bytes ahead of the reader, and leastFiles and mostFiles the files: reading
	// past the end of a sequence costs the former, and no line has more than the latter in flight.
	leastAhead, leastFiles = 32 << 20, 512
	mostAhead, mostFiles   = 256 << 20, 8192
	// idleRun is the time without an open after which a sequence is over.
	idleRun = time.Minute
)

// follower follows one sequence.
type follower struct {
	run    infer.Run
	window atomic.Pointer[order.Locator]
	stream *run.Stream
	seen   time.Time // last open of a file of the window
	spread int       // of the places at which it goes on
	least  int       // files ahead of the reader
	most   int
	reads  int64 // opens of the mount until it was detected
	head   int   // the end of what its reader has read, in positions of the list
}

// sequencesOf returns the detector for the lists in which a version's files may be read.
func sequencesOf(v *view) *infer.Sequences {
	s := infer.NewSequences("the listing", v.manifest.Len())
	if n := v.samples.Len(); n != v.manifest.Len() {
		s.Add("the samples", filesOf(order.Sequential(n), v.samples))
	}
	s.Add("the listing backwards", backwards(v.manifest.Len()))
	return s
}

// backwards is the order of so many files from the last to the first.
type backwards int

func (n backwards) Len() int { return int(n) }

func (n backwards) At(pos int) int { return int(n) - 1 - pos }

func (n backwards) Find(file, from int) int {
	if pos := int(n) - 1 - file; file >= 0 && pos >= max(from, 0) {
		return pos
	}
	return -1
}

// inSequence passes a file to the sequence detector, and starts to follow a sequence that it finds. It reports whether
// the file belongs to one.
func (i *inference) inSequence(o run.Opening) (fits bool) {
	run, found, fits := i.sequences.Open(o.Process, o.File)
	followed := false
	for _, a := range i.ahead {
		if !a.holds(o.File) {
			continue
		}
		a.seen, followed = time.Now(), fits
		if found && run.List == a.run.List {
			a.spread, a.head = max(a.spread, run.Spread), max(a.head, run.Head)
		}
	}
	if found && !followed {
		i.follow(run)
	}
	return fits
}

// holds reports whether a file is in its window.
func (a *follower) holds(file int) bool { return (*a.window.Load()).Find(file, 0) >= 0 }

// follow starts to read ahead.
func (i *inference) follow(r infer.Run) {
	m := i.view.manifest
	a := &follower{run: r, spread: r.Spread, head: r.Head, seen: time.Now(), reads: i.engine.counted.opens.Load()}
	read := make([]run.Opening, len(r.Read)) // workers leave gaps, which are still to be read
	for j, pos := range r.Read {
		read[j].File = r.Over.At(pos)
	}
	mean := max(m.Bytes()/int64(m.Len()), 1)
	a.least, a.most = int(min(leastAhead/mean+1, leastFiles)), int(min(mostAhead/mean+1, mostFiles))
	window := r.Window(r.Head + a.least*r.World)
	a.window.Store(&window)
	o := i.engine.orders.options(sequenceName, i.view, func(epoch int) order.Order {
		if epoch > 0 {
			return nil // its end is unknown
		}
		return *a.window.Load()
	})
	o.Opened, o.Choose = read, false // its end is unknown
	var err error
	if a.stream, err = i.engine.host.runner.Begin(o); err != nil {
		return
	}
	i.mu.Lock()
	all := append(slices.Clone(i.ahead), a)
	slices.SortStableFunc(all, func(x, y *follower) int { return y.seen.Compare(x.seen) })
	i.ahead = all[:min(len(all), maxRuns)]
	i.mu.Unlock()
	i.begin(a.stream, false)
	for _, old := range all[len(i.ahead):] {
		i.forget(old.stream)
	}
	i.engine.log.Info("read in sequence", "list", r.List, "from", m.Path(window.At(0)), "world", r.World,
		"reads", a.reads)
}

// readOn extends the windows whose readers come near the end, and ends idle ones.
func (i *inference) readOn(now time.Time) {
	for _, a := range i.ahead {
		if now.Sub(a.seen) <= idleRun {
			a.extend()
			continue
		}
		i.forget(a.stream)
		i.mu.Lock()
		i.ahead = slices.DeleteFunc(slices.Clone(i.ahead), func(b *follower) bool { return b == a })
		i.mu.Unlock()
	}
}

// extend makes the window longer if its reader comes near the end, in its first pass.
func (a *follower) extend() {
	r := a.run
	a.stream.Extend(func(at prefetch.Position) order.Locator {
		ahead := max(min(max(4*at.Consumed, a.least), a.most), 2*a.spread/r.World)
		width := r.Last - r.First + 1
		head := min(at.Head, (a.head-r.From+r.World-1)/r.World*width) // no further than it has read what it opened
		if at.Pass > 0 || at.Len-head > ahead/2 {
			return nil
		}
		longer := r.Window(r.From + (head+ahead+width-1)/width*r.World)
		if longer.Len() <= at.Len {
			return nil // that is all there is
		}
		a.window.Store(&longer)
		return longer
	})
}

// spec returns the order spec of the sequence, "auto" if it has none.
func (a *follower) spec() string {
	if a.run.World == 1 && (a.run.List == "the listing" || a.run.List == "the samples") {
		return "sequential"
	}
	return "auto"
}

func (a *follower) text(w io.Writer) {
	r := a.run
	window := *a.window.Load()
	fmt.Fprintf(w, "order: %s (inferred: file after file of %s, from %s on",
		a.spec(), r.List, a.stream.Volume.Manifest().Path(window.At(0)))
	if r.World > 1 {
		fmt.Fprintf(w, "; rank %s of %d", order.Ranks{First: r.First, Last: r.Last}, r.World)
	}
	fmt.Fprintf(w, ")\n  known after %d reads\n", a.reads)
}
