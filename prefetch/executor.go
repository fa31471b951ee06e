package prefetch

import (
	"iter"
	"slices"

	"github.com/shoalfs/shoal/prefetch/order"
)

// Executor decides, for all orders that are read through one cache, what is fetched next, for whom what was read
// stays, and what is given up. It is a value without a clock, a lock, a goroutine or I/O: its methods are events, Next
// tells what to do about them, one action at a time, and Done takes how that went. Package run runs it against real
// requests, package sim against modelled ones.
//
// It asks and does not mirror: what is resident, how much memory there is, what a walk holds, and where a reader
// stands are questions (Source, Reader) whose answers hold for the moment.
//
// # The rules
//
// What is fetched next. Each order has a Walk, which passes over its positions from the reader's frontier on, one by
// one. A position that was read is skipped; one whose extents are all kept, staged or on their way is claimed, so that
// they stay; at the first extent that is none of these the walk stands until that is fetched. Nearest first is the order
// that minimises the longest wait where every file is read once (Jackson's rule: earliest due date). Behind the epoch's
// last position comes the head of the next epoch, so that the line is not idle while this one's last batches are read.
// Files that lie together in a shard come by one request (Coalesce), and then a walk rests when it is far enough ahead,
// since a walk that asks whenever there is memory for one file fetches file by file (NewHorizon).
//
// Who is next. Places at a store go by start-time fair queueing (Fair) among the walks that stand at something to fetch.
// Memory goes to whoever holds the least for its weight: a walk that finds another starved one which holds less
// yields to it, unless its own reader needs the file next.
//
// What stays. What a reader is done with is handed to the walk that is still to read it, of several to the one that
// holds the least; where there is none it is spent, and may be recycled. A walk is still to read what it has claimed,
// and in addition the next files up to its share of the memory, which others' readers are done with first. When memory
// runs short these go; but where others read the same files in orders of their own they take a quarter of the share (retain). So trainers that read one dataset in one order fetch it once together, as long as the
// distance between them fits what the ones behind may hold; and those with seeds of their own use what they find.
//
// What is given back. A walk that finds no memory takes back what another will read last: at once if that one holds four
// times as much for its weight, which lets a walk that begins go ahead at all; if it holds a quarter more, once for every
// four files that its own reader opens, which shows that it needs it. What its reader needs next is always
// worth what anybody needs last, but for other parts of the same file, which would be taken for each other in turn.
//
// What is lost, since a reader who waits took its memory, is planned again from there, when memory comes free.
//
// A reader that moves (to another epoch, another pass, another place) gets a new walk over what is staged: it claims
// what it can use, and when it has come to a stop the rest is given up. A plan that waits for its reader to begin it has
// its head staged before more of the one in progress is, since nobody knows when that will end; where there is no memory
// for it the farther half of what is staged of that one goes, once.
//
// # States of a walk
//
//	walking   passes positions                  → waiting, resting, starved, yielding, ended
//	waiting   for a place at the store          → walking, when there is one and its turn has come
//	resting   far enough ahead                  → walking, when the reader comes near
//	starved   found no memory                   → retrying, when memory comes free, or it may take some back
//	retrying  walks, and others yield to it     → starved, or waiting, resting, ended
//	yielding  leaves memory to a starved walk   → walking, when that one has what it needs
//	ended     all is fetched that is known      → walking, when there is more
//
// Every event takes O(1) time in the dataset, and O(walks). Next says Again when it has done as much as passes mostPassed
// positions, and goes on where it was.
// It is not safe for concurrent use.
type Executor struct {
	walks   []*Walk
	open    map[item]int // files that readers have open, and how often
	settle  []item       // of which it is to be decided who has them next
	sweeps  []any        // data of which all is to be looked at
	doubted []item       // which go if nobody wants them
	takers  []*Walk      // that may take memory back
	turn    int
	worked  int // since Next last said Again or Idle, in positions
}

// item is a file of some data.
type item struct {
	data any
	file int
}

// Source is what a walk asks about the files of its data.
type Source interface {
	Sizes
	// Claim reports whether an extent is kept, staged or on its way; what is staged or on its way then stays for this
	// walk until it is spent.
	Claim(file, extent int) bool
	// Room returns how many bytes could be fetched ahead now.
	Room() int64
	// Load returns the bytes that are held for this walk, for each unit of its weight.
	Load() float64
	// Share returns how many files the walk's part of the memory holds, when all walks want theirs.
	Share() int
	// Bulk reports whether neighbours in a shard should come along whenever they are needed, because the cache has
	// room for all that is missing.
	Bulk() bool
}

// Reader tells where the reader of an order stands: Tracker does.
type Reader interface {
	Frontier() int     // all positions below it were read, or are given up
	Head() int         // highest position read + 1
	Read(pos int) bool // whether the position was read
}

// Parts tells which files are read together. The order names one file of each unit.
type Parts interface {
	// Unit returns a file of the order and those that are read with it. The result is valid until the next call.
	Unit(file int) []int
	// With yields the files of the order whose units a file may belong to.
	With(file int) iter.Seq[int]
}

// Gate holds the places of one store. The zero value has none in use.
type Gate struct {
	fair   Fair
	flying int
	full   bool
}

// Route is an epoch of a walk: its order, and who reads it; nil where nobody does yet.
type Route struct {
	Order  order.Locator
	Reader Reader
}

// WalkOptions say what a walk is over.
type WalkOptions struct {
	Data        any // walks with equal Data read the same files
	Source      Source
	Gate        *Gate
	Connections func() int // requests that may be in flight to the store, readers' ones too
	Weight      float64
	Layout      Places  // where files lie together; nil: each is an object of its own
	Horizon     Horizon // of requests for several files
	Parts       Parts   // nil: each file is read by itself
}

// Walk is one order that is being carried out, epoch after epoch. Its fields are the Executor's.
type Walk struct {
	WalkOptions
	flow Flow

	cur, next phase
	state     State
	until     int   // resting: the reader's position from which on it is worth planning again
	short     int64 // starved: bytes that were not to be had,
	file      int   // for this file,
	urgent    bool  // which its reader needs next
	opens     int   // by the reader, since bytes were last taken back
	frontier  int   // where the reader stood at its last open
	retain    int   // so many files from the reader's on stay when others have read them
	adjusted  int   // where the reader stood when that was last changed for want of memory
	beside    int   // opens until those that others made beside the reader are forgotten
	moved     bool  // what is staged and not wanted goes when the walk stops
	fetched   bool  // something since the walk last stopped
	head      int   // positions of a plan that waits which are staged first; 0 when none waits
	halved    bool  // what is staged of the plan in progress has made room for them
	stepped   int   // the turn in which it last walked
}

// phase is an epoch and how far it was walked.
type phase struct {
	Route
	pos     int // to be looked at next
	claimed int // positions up to here may have been claimed
}

// State is what a walk is doing; see Executor.
type State uint8

// The states.
const (
	Walking State = iota
	Waiting
	Resting
	Starved
	Retrying
	Yielding
	Ended
	gone // not among the executor's any more; requests may still be on their way
)

var stateNames = [...]string{"walking", "waiting", "resting", "starved", "retrying", "yielding", "ended", "gone"}

func (s State) String() string { return stateNames[s] }

// Verb says what an action is.
type Verb uint8

// The actions.
const (
	Idle     Verb = iota // nothing, before the next event
	Again                // call Next once more, but let go of the lock before
	Fetch                // start a request; answer with Done
	Hand                 // what is staged of File is on the Walk's account from now on
	Spend                // what is staged of File may be recycled
	Sweep                // call Unwanted with each file of Data of which something waits in memory
	TakeBack             // free Bytes for File of the Walk, from those that hold Over times as much, what they need last; nothing of File
)

// Action is something to be done.
type Action struct {
	Do     Verb
	Walk   *Walk
	Data   any
	File   int   // Fetch: the one that is needed. Hand, Spend, TakeBack
	Extent int   // Fetch: of File
	Files  []int // Fetch: if not nil, several files of one extent each by one request, by where they lie
	Pos    int   // Fetch: where the order has it; from the order's length on in the next one
	Bytes  int64
	Over   float64
}

// Outcome is what became of a Fetch.
type Outcome uint8

// The outcomes.
const (
	Started Outcome = iota // Landed will be told
	Present                // it is resident or on its way already
	Refused                // there was no memory
)

const (
	// mostPassed bounds the positions that are passed before Next says Again: a fraction of a millisecond. An action,
	// and a look at a file that a sweep brought, take as long as so many.
	mostPassed = 4096
	actionCost = 64
	doubtCost  = 8
	// minHead is how much of a plan that waits is staged at least before more of the one in progress. By
	// so many opens its reader is recognised.
	minHead = 16
	// takeBackEvery is after how many opens a walk may take back bytes from one that holds a little more.
	takeBackEvery = 4
	much, more    = 4.0, 1.25
)

// Bounds of a request for several files of a shard. More than 4 MiB gain nothing, since a request's cost
// is spread over some 60 photographs by then; files that nobody asked for cost their bytes, of which
// 16 KiB pass in the time of a header or two.
const (
	GroupBytes = 4 << 20
	groupGap   = 16 << 10
	groupFiles = 256
)

// Begin adds a walk over cur, from position start.
func (x *Executor) Begin(o WalkOptions, cur Route, start int) *Walk {
	w := &Walk{WalkOptions: o, flow: Flow{Weight: o.Weight}, cur: phase{Route: cur, pos: start}, frontier: cur.Reader.Frontier()}
	x.walks = append(x.walks, w)
	w.retain = o.Source.Share() // of what others' readers are done with before w has planned
	return w
}

// End removes a walk. What was staged for it alone is to be swept.
func (x *Executor) End(w *Walk) {
	x.walks = slices.DeleteFunc(x.walks, func(v *Walk) bool { return v == w })
	x.takers = slices.DeleteFunc(x.takers, func(v *Walk) bool { return v == w })
	w.state = gone
	x.release(w)
}

// Moved says that the reader has begun another pass, or goes on elsewhere. next may have no order.
func (x *Executor) Moved(w *Walk, cur, next Route) {
	w.cur = phase{Route: cur, pos: cur.Reader.Frontier()}
	w.next = phase{Route: next}
	w.frontier, w.moved, w.head, w.state = w.cur.pos, true, 0, Walking
}

// Known says what the epoch after the current one is.
func (x *Executor) Known(w *Walk, next Route) {
	w.next, w.head = phase{Route: next}, 0
	if w.state == Ended {
		w.state = Walking
	}
}

// Extended says that the current order goes on: cur begins with all of it.
func (x *Executor) Extended(w *Walk, cur Route) {
	w.cur.Route, w.next, w.head, w.state = cur, phase{}, 0, Walking
}

// Waits says that a plan waits for the reader to begin it, in place of any that waited.
func (x *Executor) Waits(w *Walk, plan Route) {
	w.next = phase{Route: plan}
	w.head, w.halved = min(max((w.cur.pos-w.cur.Reader.Frontier())/2, minHead), plan.Order.Len()), false
	w.moved, w.state = true, Walking
}

// Beside says that somebody reads the walk's data in an order of its own.
func (x *Executor) Beside(w *Walk) { w.beside = sureFor }

// Opened says that the walk's reader has opened a file, after its Reader has taken note of it.
func (x *Executor) Opened(w *Walk) {
	w.opens++
	w.beside = max(w.beside-1, 0)
	before := w.frontier
	w.frontier = w.cur.Reader.Frontier()
	switch {
	case w.frontier < before && w.frontier < w.cur.pos: // what had been given up is read after all
		w.cur.claimed, w.cur.pos = max(w.cur.claimed, w.cur.pos), w.frontier
		w.wake()
	case w.state == Resting && w.Horizon.Front(w.frontier, w.cur.Reader.Head()) >= w.until:
		w.state = Walking
	case w.frontier < w.cur.pos && w.opens < takeBackEvery:
	case w.state == Starved: // it may take memory back now
		w.state = Retrying
	case w.state == Yielding:
		w.state = Walking
	}
}

// wake has the walk look at its positions again, unless it is short of memory.
func (w *Walk) wake() {
	if w.state != Starved && w.state != Retrying {
		w.state = Walking
	}
}

// Open says that somebody reads a file, who will call Close.
func (x *Executor) Open(data any, file int) {
	if x.open == nil {
		x.open = map[item]int{}
	}
	x.open[item{data, file}]++
}

// Close says that a reader is done with a file.
func (x *Executor) Close(data any, file int) {
	k := item{data, file}
	if n := x.open[k]; n > 1 {
		x.open[k] = n - 1
		return
	}
	delete(x.open, k)
	x.settle = append(x.settle, k)
}

// Landed says that a file has arrived or failed; last if that was all of its request. A failed one is left to the
// reader, whose own read tries again and reports the error.
func (x *Executor) Landed(w *Walk, file int, last bool) {
	if last {
		w.Gate.flying--
	}
	if !w.Wants(file) { // given up, or read, while it was on its way
		x.settle = append(x.settle, item{w.Data, file})
	}
}

// Lost says that something which was staged of a file had to go before it was read.
func (x *Executor) Lost(data any, file int) {
	for _, w := range x.walks {
		if w.Data != data {
			continue
		}
		for f := range w.with(file) {
			again := w.cur.rewind(f, w.cur.Reader.Frontier())
			again = w.next.rewind(f, 0) || again
			if again && (w.state == Ended || w.state == Resting) {
				w.state, w.short, w.urgent = Starved, 0, false
			}
		}
	}
}

// Freed says that memory came free.
func (x *Executor) Freed() {
	for _, w := range x.walks {
		switch w.state {
		case Starved:
			w.state = Retrying
		case Yielding:
			w.state = Walking
		}
	}
}

// Hungry reports whether Freed would change anything.
func (x *Executor) Hungry() bool {
	return slices.ContainsFunc(x.walks, func(w *Walk) bool { return w.state == Starved || w.state == Yielding })
}

// Ready reports whether Next has something to do.
func (x *Executor) Ready() bool {
	return len(x.settle)+len(x.takers) > 0 || x.Sweeping() || slices.ContainsFunc(x.walks, func(w *Walk) bool {
		return w.state == Walking || w.state == Retrying || w.state == Waiting && w.free()
	})
}

// Settle returns the next Hand or Spend that is due. Next returns them, too.
func (x *Executor) Settle() (a Action, ok bool) {
	for n := len(x.settle); n > 0; n = len(x.settle) {
		k := x.settle[n-1]
		x.settle = x.settle[:n-1]
		if x.open[k] > 0 {
			continue
		}
		if w := x.Wanting(k.data, k.file); w != nil {
			return Action{Do: Hand, Walk: w, Data: k.data, File: k.file}, true
		}
		return Action{Do: Spend, Data: k.data, File: k.file}, true
	}
	return Action{}, false
}

// Unwanted has Next give up a file of which something is staged, unless it is open or a walk wants it then.
func (x *Executor) Unwanted(data any, file int) { x.doubted = append(x.doubted, item{data, file}) }

// Sweeping reports whether something is still to be looked at that nobody may want.
func (x *Executor) Sweeping() bool { return len(x.sweeps)+len(x.doubted) > 0 }

// Wanting returns the walk that what is staged of the file is to count for: of those that are still to read it, the
// one that holds the least memory for its weight. It is nil if there is none.
func (x *Executor) Wanting(data any, file int) (next *Walk) {
	for _, w := range x.walks {
		if w.Data == data && w.Wants(file) && (next == nil || w.Source.Load() < next.Source.Load()) {
			next = w
		}
	}
	return next
}

// Next returns what is to be done now.
func (x *Executor) Next() Action {
	for x.worked < mostPassed {
		a, more := x.next()
		if a.Do != Idle {
			x.worked += actionCost
			return a
		}
		if !more {
			x.worked = 0
			return a
		}
	}
	x.worked = 0
	return Action{Do: Again}
}

// next does the next thing. more says that there may be others, if it is no action.
func (x *Executor) next() (a Action, more bool) {
	if a, ok := x.Settle(); ok {
		return a, true
	}
	if n := len(x.sweeps); n > 0 {
		data := x.sweeps[n-1]
		x.sweeps = x.sweeps[:n-1]
		x.doubted = slices.DeleteFunc(x.doubted, func(k item) bool { return k.data == data }) // it brings them again
		return Action{Do: Sweep, Data: data}, true
	}
	if n := len(x.doubted); n > 0 {
		k := x.doubted[n-1]
		x.doubted = x.doubted[:n-1]
		x.worked += doubtCost
		if x.open[k] == 0 && x.Wanting(k.data, k.file) == nil {
			a = Action{Do: Spend, Data: k.data, File: k.file}
		}
		return a, true
	}
	if n := len(x.takers); n > 0 {
		w := x.takers[n-1]
		x.takers = x.takers[:n-1]
		return w.takeBack(), true
	}
	w := x.pick()
	if w == nil {
		return Action{}, false
	}
	return x.step(w), true
}

// pick returns the walk that goes on: one that waits for a place before others that pass positions, which may take
// long, and of these each in turn.
func (x *Executor) pick() (best *Walk) {
	for _, w := range x.walks {
		if w.state == Waiting && w.free() && (best == nil || w.Gate.fair.Tag(&w.flow) < best.Gate.fair.Tag(&best.flow)) {
			best = w
		}
	}
	if best != nil {
		return best
	}
	for _, w := range x.walks {
		if (w.state == Walking || w.state == Retrying) && (best == nil || w.stepped < best.stepped) {
			best = w
		}
	}
	return best
}

// free reports whether the store has a place for another prefetch. Of the connections an eighth is left to readers who
// wait. Once all are taken, a walk goes on when there are several: to be woken costs more than to plan a request.
func (w *Walk) free() bool {
	n := w.Connections()
	most := max(1, n-n/8)
	switch g := w.Gate; {
	case g.flying >= most:
		g.full = true
	case g.flying <= most-max(1, most/16):
		g.full = false
	}
	return !w.Gate.full
}

// step passes positions until there is something to fetch, or the walk stops, or it has been enough.
func (x *Executor) step(w *Walk) Action {
	x.turn++
	w.stepped = x.turn
	w.resume()
	if f := w.cur.Reader.Frontier(); f > w.cur.pos {
		w.cur.pos = f
	}
	for x.worked < mostPassed {
		p, end := w.phase()
		if p == nil {
			x.stop(w, Ended)
			return Action{}
		}
		for ; p.pos < end && x.worked < mostPassed; p.pos++ {
			x.worked++
			if p.Reader != nil && p.Reader.Read(p.pos) {
				continue
			}
			if file, extent, ok := w.missing(p.Order.At(p.pos)); ok {
				return x.fetch(w, p, file, extent)
			}
		}
	}
	return Action{}
}

// phase returns what is walked now, and where it ends for the time being: the head of a plan that waits, this epoch, or
// the next one; nil if all was.
func (w *Walk) phase() (p *phase, end int) {
	switch {
	case w.next.pos < w.head:
		return &w.next, w.head
	case w.cur.pos < w.cur.Order.Len():
		return &w.cur, w.cur.Order.Len()
	case w.next.Order != nil && w.next.pos < w.next.Order.Len():
		return &w.next, w.next.Order.Len()
	}
	return nil, 0
}

// missing returns the first extent of a file of the order, or of those read with it, that is not resident or on its way.
func (w *Walk) missing(file int) (f, extent int, ok bool) {
	if w.Parts == nil {
		for x := range w.Source.Extents(file) {
			if !w.Source.Claim(file, x) {
				return file, x, true
			}
		}
		return 0, 0, false
	}
	for _, f := range w.Parts.Unit(file) {
		for x := range w.Source.Extents(f) {
			if !w.Source.Claim(f, x) {
				return f, x, true
			}
		}
	}
	return 0, 0, false
}

// fetch has the walk, which stands at an extent, ask for it, if it may.
func (x *Executor) fetch(w *Walk, p *phase, file, extent int) Action {
	w.short, w.file = w.Source.ExtentBytes(file, extent), file
	w.urgent = p == &w.cur && p.pos <= p.Reader.Frontier()
	if !w.urgent && x.yields(w) {
		x.stop(w, Yielding)
		x.takers = append(x.takers, w)
		return Action{}
	}
	a := Action{Do: Fetch, Walk: w, Data: w.Data, File: file, Extent: extent, Pos: p.pos, Bytes: w.short}
	if p == &w.next {
		a.Pos += w.cur.Order.Len()
	}
	if w.Layout != nil && w.Source.Extents(file) == 1 {
		if !w.free() { // before anything is claimed that comes along
			x.stop(w, Waiting)
			return Action{}
		}
		files, early := w.group(p, file)
		if early {
			return Action{}
		}
		if len(files) > 1 {
			a.Files = files
		}
		return a
	}
	if !w.free() {
		x.stop(w, Waiting)
		return Action{}
	}
	return a
}

// Done says what became of a Fetch. Of several files bytes is what was asked for.
func (x *Executor) Done(a Action, out Outcome, bytes int64) {
	w := a.Walk
	switch out {
	case Started:
		w.Gate.flying++
		w.Gate.fair.Serve(&w.flow, bytes)
		w.fetched = true
		w.resume()
	case Present:
		w.resume()
	case Refused:
		x.refused(w)
	}
}

// resume has the walk go on. One that was starved is so until it stops for want of anything else than memory: others
// yield to it until then.
func (w *Walk) resume() {
	if w.state != Retrying {
		w.state = Walking
	}
}

// refused has the walk wait for memory.
func (x *Executor) refused(w *Walk) {
	frontier := w.cur.Reader.Frontier()
	switch {
	case w.next.pos < w.head && !w.halved: // for the head of a plan that waits
		w.halved = true
		w.cur.pos = frontier + max(w.cur.pos-frontier, 0)/2
		w.cur.claimed, w.retain = w.cur.pos, 0
		x.sweep(w.Data)
	default:
		x.retain(w, frontier)
	}
	x.stop(w, Starved)
	x.takers = append(x.takers, w)
}

// retain changes how far ahead what others have read stays, for a walk without memory. What is needed first must not
// wait for what is needed later, so all of that goes; but where others read the same files in orders of their own a
// quarter of the walk's part of the memory is theirs. From three quarters ahead of the reader on more stays, since a
// file that need not be fetched again is worth more than one staged early, and below a quarter all goes.
func (x *Executor) retain(w *Walk, frontier int) {
	lead, share := w.cur.pos+w.next.pos-frontier, w.Source.Share()
	switch {
	case w.retain > lead && (w.beside == 0 || 4*lead < share):
		w.retain = 0
		x.sweep(w.Data)
	case w.beside == 0 || 8*max(frontier-w.adjusted, w.adjusted-frontier) < share: // a sweep looks at all that is staged
		return
	case 4*lead >= 3*share:
		w.retain = min(max(w.retain, lead)*9/8+1, w.cur.Order.Len())
	case w.retain > lead:
		w.retain -= w.retain / 8
		x.sweep(w.Data)
	}
	w.adjusted = frontier
}

// stop has the walk pass no more positions for the time being.
func (x *Executor) stop(w *Walk, s State) {
	w.state = s
	if s != Starved && s != Yielding {
		if share := w.Source.Share(); w.beside == 0 || w.retain < share {
			w.retain = share
		}
	}
	if w.fetched || s != Starved && s != Yielding {
		x.release(w)
	}
	w.fetched = false
	if w.moved { // and has claimed what it can use
		w.moved = false
		x.sweep(w.Data)
	}
}

// release lets those go on who left memory to w.
func (x *Executor) release(w *Walk) {
	for _, v := range x.walks {
		if v != w && v.state == Yielding {
			v.state = Walking
		}
	}
}

func (x *Executor) sweep(data any) {
	if !slices.Contains(x.sweeps, data) {
		x.sweeps = append(x.sweeps, data)
	}
}

// yields reports whether another walk that found no memory holds less of it for its weight than w. That one tries
// again: memory may have come free that it left to w.
func (x *Executor) yields(w *Walk) bool {
	if len(x.walks) == 1 {
		return false
	}
	load := w.Source.Load()
	for _, v := range x.walks {
		if v != w && (v.state == Starved || v.state == Retrying) && v.Source.Load() < load {
			v.state = Retrying
			return true
		}
	}
	return false
}

// takeBack returns from whom the walk may take memory.
func (w *Walk) takeBack() Action {
	a := Action{Do: TakeBack, Walk: w, Data: w.Data, File: w.file, Bytes: w.short, Over: much}
	switch {
	case w.urgent:
		a.Over = 0
	case w.opens >= takeBackEvery:
		w.opens, a.Over = 0, more
	}
	return a
}

// group returns the files to fetch by one request with the one that is needed next: its neighbours in the shard that
// are needed soon, or that the disk takes. early says that the walk has stopped instead: more will come along when the
// reader has gone on, or when there is more memory.
func (w *Walk) group(p *phase, file int) (files []int, early bool) {
	bulk := w.Source.Bulk()
	hurries := bulk || p == &w.next // neighbours for the disk, and the next epoch, take what memory there is
	frontier, head := 0, 0
	if p.Reader != nil {
		frontier, head = p.Reader.Frontier(), p.Reader.Head()
	}
	free := w.Source.Room()
	if p.pos >= w.Horizon.Front(frontier, head)+w.Horizon.Plan && (!hurries || free < w.Horizon.Reserve+GroupBytes) {
		w.state, w.until = Resting, p.pos-w.Horizon.Plan*3/4
		if hurries {
			w.state = Starved
		}
		return nil, true
	}
	reach := p.Order.Len() - 1
	if !bulk {
		reach = min(reach, frontier+w.Horizon.Take)
	}
	bounds := w.Horizon.Bound(Coalescing{MaxBytes: GroupBytes, MaxGap: groupGap, MaxFiles: groupFiles}, free)
	files = Coalesce(file, w.Layout, bounds, func(f int) bool {
		return w.Source.Extents(f) == 1 && (bulk || w.within(p, f, frontier, reach)) && !w.Source.Claim(f, 0)
	})
	p.claimed = max(p.claimed, reach)
	for i, r := range files {
		files[i] = w.Layout.At(r)
	}
	return files, false
}

// within reports whether a phase holds the file at an unread position between two, inclusive.
func (w *Walk) within(p *phase, file, from, to int) bool {
	for f := range w.with(file) {
		if p.holds(f, from, to) {
			return true
		}
	}
	return false
}

func (p *phase) holds(file, from, to int) bool {
	pos := p.find(file, from)
	return pos >= 0 && pos <= to
}

// rewind plans again from where the file is wanted. It reports whether that is anywhere.
func (p *phase) rewind(file, from int) bool {
	if p.Order == nil {
		return false
	}
	pos := p.Order.Find(file, from)
	if pos < 0 || pos >= p.pos {
		return false
	}
	p.pos, p.claimed = pos, max(p.claimed, p.pos)
	return true
}

// Wants reports whether the walk is still to read the file, and has claimed it, or would have another reader's stay for
// it. The position that is being looked at counts.
func (w *Walk) Wants(file int) bool {
	if w.state == gone {
		return false
	}
	from := w.cur.Reader.Frontier()
	into := 0 // the next epoch
	if w.beside > 0 {
		into = from + w.retain - w.cur.Order.Len()
	}
	for f := range w.with(file) {
		if w.cur.holds(f, from, max(w.cur.pos, w.cur.claimed, from+w.retain)) || w.next.holds(f, 0, max(w.next.pos, w.next.claimed, into)) {
			return true
		}
	}
	return false
}

// Needed returns how many positions the reader has before it the file, from its frontier on; beyond both epochs if it
// does not need it.
func (w *Walk) Needed(file int) int {
	from, n := w.cur.Reader.Frontier(), w.cur.Order.Len()
	least := n - from
	if w.next.Order != nil {
		least += w.next.Order.Len()
	}
	for f := range w.with(file) {
		if pos := w.cur.find(f, from); pos >= 0 {
			least = min(least, pos-from)
		} else if pos := w.next.find(f, 0); pos >= 0 {
			least = min(least, n-from+pos)
		}
	}
	return least
}

// find returns the first unread position from one on that holds the file, -1 if there is none.
func (p *phase) find(file, from int) int {
	if p.Order == nil {
		return -1
	}
	pos := p.Order.Find(file, from)
	for pos >= 0 && p.Reader != nil && p.Reader.Read(pos) {
		pos = p.Order.Find(file, pos+1)
	}
	return pos
}

// with yields the files of the order whose units the file may belong to.
func (w *Walk) with(file int) iter.Seq[int] {
	if w.Parts != nil {
		return w.Parts.With(file)
	}
	return func(yield func(int) bool) { yield(file) }
}

// Orders returns the current order and the one after it, nil if that is not known.
func (w *Walk) Orders() (cur, next order.Locator) { return w.cur.Order, w.next.Order }

// State returns what the walk is doing.
func (w *Walk) State() State { return w.state }

// Planned returns the position of the current epoch up to which all was fetched, or is on its way.
func (w *Walk) Planned() int { return w.cur.pos }

// Looking returns where the walk stands, and whether that is in the next epoch.
func (w *Walk) Looking() (pos int, next bool) {
	p, _ := w.phase()
	if p == nil {
		return w.cur.pos, false
	}
	return p.pos, p == &w.next
}

// Served returns the bytes that were asked for.
func (w *Walk) Served() int64 { return w.flow.Served() }

// Lead returns how many positions from the frontier on need no fetch, being staged or read, before the first that
// does; at most limit.
func (w *Walk) Lead(limit int, staged func(file, extent int) bool) int {
	from := w.cur.Reader.Frontier()
	for lead := 0; lead < limit && from+lead < w.cur.Order.Len(); lead++ {
		if w.cur.Reader.Read(from + lead) {
			continue
		}
		file := w.cur.Order.At(from + lead)
		unit := []int{file}
		if w.Parts != nil {
			unit = w.Parts.Unit(file)
		}
		for _, f := range unit {
			for x := range w.Source.Extents(f) {
				if !staged(f, x) {
					return lead
				}
			}
		}
	}
	return min(limit, max(w.cur.Order.Len()-from, 0))
}
