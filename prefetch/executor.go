package prefetch

import (
	"iter"
	"slices"

	"github.com/shoalfs/shoal/prefetch/order"
)

// Executor decides, for all orders that are read through one cache, what is fetched next, which walk gets a sample
// that was read, and which memory is given up. It has no clock, lock, goroutine or I/O: its methods are events, Next
// returns one action at a time, and Done takes its outcome. Package run drives it with real requests, package sim
// with modelled ones.
//
// It keeps no copy of the state: it asks what is resident, how much memory is free, what a walk holds, and where a
// reader stands (Source, Reader). The answers are valid at that moment.
//
// # The rules
//
// docs/prefetching.md has them. Beyond that:
//
// What is fetched next. If every file is read once, nearest first minimises the longest wait (Jackson's rule: earliest
// due date). The head of the next epoch keeps the line busy while the last batches of this one are read. In shards, a
// walk that asked whenever there is memory for one file would fetch file by file, so it rests when it is far enough
// ahead (NewHorizon). A reader whose pace is not known needs nothing soon (Ease) but the next file.
//
// Who is next. A walk yields to a starved one that holds less for its weight, unless its own reader needs the file
// next.
//
// What stays. A walk has yet to read the files that it has claimed, and the next files up to its share of the memory,
// if other readers are done with them first. When memory runs short the latter go; but if others read the same files in
// their own orders, these files keep a quarter of the share (retain). Trainers with their own seeds use each other's
// files when they find them.
//
// What is given back. A new walk can start, since it takes at once from one with four times its load. Later its
// reader's opens show that it needs the memory. For the file that its reader needs next it takes once per extent until
// its reader opens another file; but no other parts of that file, and no small file that another reader needs next.
// What goes is what the walk that loses it reads last, of the extents that landed last (cache.TakeBack). Walks that
// want memory for later files leave it alone. Taking back ends while nobody reads: from one open to the next a walk
// does so about as often as files fit in its share. Otherwise walks whose needs do not fit together would fetch the
// same files in turns.
//
// When a plan waits, its head is staged before more of the current one, since nobody knows when that will end.
//
// # States of a walk
//
//	walking   passes positions                  → waiting, resting, starved, yielding, ended
//	waiting   for a place at the store          → walking, when there is one for what it stands at and its turn has come
//	resting   far enough ahead                  → walking, when the reader comes near
//	starved   found no memory                   → retrying, when memory comes free, or it may take some back
//	retrying  walks, and others yield to it     → starved, or waiting, resting, ended
//	yielding  leaves memory to a starved walk   → walking, when that one has what it needs
//	ended     all is fetched that is known      → walking, when there is more
//
// Every event takes O(1) time in the dataset, and O(walks). Next returns Again after as much work as passing
// mostPassed positions, and continues there. It is not safe for concurrent use.
type Executor struct {
	walks   []*Walk
	open    map[item]int // files that readers have open, and how often
	settle  []item       // whose next walk is to be decided
	sweeps  []any        // data whose files are all to be checked
	doubted []item       // which are given up if no walk wants them
	takers  []*Walk      // that may take memory back
	took    *Walk        // that has just taken some back
	turn    int
	worked  int // since Next last said Again or Idle, in positions
}

type item struct {
	data any
	file int
}

// Source answers a walk's questions about its files.
type Source interface {
	Sizes
	// Claim reports whether an extent is kept, staged or in flight. A staged or flying extent then stays for this walk
	// until it is spent.
	Claim(file, extent int) bool
	// Room returns how many bytes could be prefetched now, and how many of them are free: the others are what was read,
	// and will be read again in other epochs.
	Room() (room, free int64)
	// Ahead returns how many positions from the reader's on are to be staged even if that costs what was read.
	Ahead() int
	// Rate returns how many positions a second the reader reads; 0 if that is not known.
	Rate() float64
	// Has reports whether the reader probably has the file, and will not ask for it. That may turn out wrong.
	Has(file int) bool
	// Load returns the bytes held for this walk, per unit of its weight.
	Load() float64
	// Share returns how many files fit in the walk's share of the memory when all walks want theirs.
	Share() int
	// Bulk reports whether neighbours in a shard should be fetched along at any time, because the cache has space for
	// everything that is missing.
	Bulk() bool
}

// Reader returns the position of an order's reader: Tracker implements it.
type Reader interface {
	Frontier() int     // all positions below it were read, or given up
	Head() int         // highest position read + 1
	Read(pos int) bool // whether the position was read
	// Unread returns how many positions from one up to another were not read, in time proportional to their distance.
	Unread(from, to int) int
}

// Parts tells which files are read together. The order contains one file of each unit.
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

// Route is an epoch of a walk: its order, and its reader; nil if it has none yet.
type Route struct {
	Order  order.Locator
	Reader Reader
}

// WalkOptions configure a walk.
type WalkOptions struct {
	Data        any // walks with equal Data read the same files
	Source      Source
	Gate        *Gate
	Connections func() int // limit of requests in flight to the store, including readers'
	Ease        func() int // limit while the walk stands at what its reader does not need soon
	Weight      float64
	Layout      Places  // where files lie together; nil: each is an object of its own
	Horizon     Horizon // of requests for several files
	Parts       Parts   // nil: each file is read by itself
}

// Walk is one order being fetched, epoch after epoch. Its fields belong to the Executor.
type Walk struct {
	WalkOptions
	flow Flow
	need

	cur, next phase
	state     State
	until     int  // resting: the reader's position from which planning continues; without a layout, opens until then
	frontier  int  // the reader's frontier at its last open
	retain    int  // this many files from the reader's on stay when others have read them
	adjusted  int  // the reader's frontier when that was last changed for lack of memory
	beside    int  // opens until other readers' opens are forgotten
	moved     bool // unwanted staged files go when the walk stops
	fetched   bool // something since the walk last stopped
	head      int  // positions of a waiting plan to stage first; 0 when none waits
	halved    bool // staged files of the current plan have made room for them
	stepped   int  // turn of its last step
	trusts    bool // it has passed positions of files that the reader has
}

// need is what a walk without memory lacks, and may do about it.
type need struct {
	short  int64 // bytes
	file   int   // for this file,
	urgent bool  // which its reader needs next
	opens  int   // by the reader, since bytes were last taken back from a walk that held a little more
	rushed int   // extents fetched urgently since the reader's last open
	taken  int   // times that bytes were taken back since then
}

// phase is an epoch and how far it was walked.
type phase struct {
	Route
	pos     int // the next position
	claimed int // positions up to here may have been claimed
}

// State is what a walk is doing; see Executor.
type State uint8

const (
	Walking State = iota
	Waiting
	Resting
	Starved
	Retrying
	Yielding
	Ended
	gone // no longer in the executor; requests may still be in flight
)

// Verb says what an action is.
type Verb uint8

const (
	Idle  Verb = iota // nothing, before the next event
	Again             // call Next again, after releasing the lock
	Fetch             // start a request; answer with Done
	Hand              // move the staged extents of File to the Walk's account
	Spend             // the staged extents of File may be recycled
	Sweep             // call Unwanted with each file of Data with staged extents
	// free Bytes for File of the Walk: what walks that hold Over times as much Lose; answer with Done
	TakeBack
)

// Action is something to do.
type Action struct {
	Do     Verb
	Walk   *Walk
	Data   any
	File   int   // Fetch: the needed one. Hand, Spend, TakeBack
	Extent int   // Fetch: of File
	Files  []int // Fetch: if not nil, several files of one extent each by one request, by where they lie
	Pos    int   // Fetch: its position; beyond the order's length in the next one
	Bytes  int64
	Over   float64
}

// Loses returns how many positions the reader of walk w has before a file that a TakeBack might take from it; negative
// if it must not lose that file: it is what the taker makes room for, or what w's reader needs next. Of a large one w
// may lose extents, or a reader that has stopped in it would hold all memory.
func (a Action) Loses(w *Walk, file int) int {
	n := w.Needed(file)
	if w.Data == a.Data && file == a.File || n == 0 && w.extents(file) == 1 {
		return -1
	}
	return n
}

// Outcome is the result of a Fetch or a TakeBack.
type Outcome uint8

const (
	Started Outcome = iota // Landed will be called; or memory was freed
	Present                // it is resident or in flight already
	Refused                // there was no memory
)

const (
	// mostPassed bounds the positions passed before Next returns Again: a fraction of a millisecond. actionCost and
	// doubtCost are the cost of an action, and of a file of a sweep, in positions.
	mostPassed = 4096
	actionCost = 64
	doubtCost  = 8
	// minHead is how much of a waiting plan is staged at least before more of the current one. Its reader is
	// recognised by about that many opens.
	minHead = 16
	// takeBackEvery is the number of opens after which a walk may take back bytes from one that holds a little more.
	takeBackEvery = 4
	// A walk takes back bytes at once from one with overAtOnce times its load, in time from one with overInTime times.
	overAtOnce, overInTime = 4.0, 1.25
)

// Bounds of a request for several files of a shard. More than 4 MiB gain nothing, since a request's cost is then
// spread over some 60 photographs. Unwanted files cost their bytes; 16 KiB of them take as long as a header or two.
const (
	GroupBytes = 4 << 20
	groupGap   = 16 << 10
	groupFiles = 256
)

// Begin adds a walk over cur, from position start.
func (x *Executor) Begin(o WalkOptions, cur Route, start int) *Walk {
	w := &Walk{WalkOptions: o, flow: Flow{Weight: o.Weight}, cur: phase{Route: cur, pos: start},
		frontier: cur.Reader.Frontier()}
	x.walks = append(x.walks, w)
	w.retain = o.Source.Share() // of what others' readers are done with before w has planned
	return w
}

// End removes a walk. The caller must sweep files staged for it alone.
func (x *Executor) End(w *Walk) {
	x.walks = slices.DeleteFunc(x.walks, func(v *Walk) bool { return v == w })
	x.takers = slices.DeleteFunc(x.takers, func(v *Walk) bool { return v == w })
	if w.state = gone; x.took == w {
		x.took = nil
	}
	x.release(w)
	for _, v := range x.walks {
		if v.state == Resting {
			v.state = Walking // memory is theirs now
		}
	}
}

// Moved says that the reader has begun another pass, or continues elsewhere. next may have no order.
func (x *Executor) Moved(w *Walk, cur, next Route) {
	w.cur = phase{Route: cur, pos: cur.Reader.Frontier()}
	w.next = phase{Route: next}
	w.frontier, w.moved, w.head, w.state = w.cur.pos, true, 0, Walking
	w.rushed, w.taken = 0, 0
}

// Known sets the epoch after the current one.
func (x *Executor) Known(w *Walk, next Route) {
	w.next, w.head = phase{Route: next}, 0
	if w.state == Ended || w.state == Resting {
		w.state = Walking
	}
}

// Extended says that the current order is longer: cur begins with all of it.
func (x *Executor) Extended(w *Walk, cur Route) {
	w.cur.Route, w.next, w.head, w.state = cur, phase{}, 0, Walking
}

// Waits sets the plan that waits for the reader to begin it, replacing an earlier one.
func (x *Executor) Waits(w *Walk, plan Route) {
	w.next = phase{Route: plan}
	w.head, w.halved = min(max((w.cur.pos-w.cur.Reader.Frontier())/2, minHead), plan.Order.Len()), false
	w.moved, w.state = true, Walking
}

// Beside says that another reader reads the walk's data in its own order.
func (x *Executor) Beside(w *Walk) { w.beside = sureFor }

// Opened says that the walk's reader has opened a file, after its Reader has recorded it.
func (x *Executor) Opened(w *Walk) {
	w.opens++
	w.rushed, w.taken = 0, 0
	w.beside = max(w.beside-1, 0)
	before := w.frontier
	w.frontier = w.cur.Reader.Frontier()
	switch {
	case w.frontier < before && w.frontier < w.cur.pos, // positions given up are read after all
		w.trusts && w.lacks(w.cur.Reader.Head()): // the reader has not what it was believed to have
		w.trusts = false
		w.cur.claimed, w.cur.pos = max(w.cur.claimed, w.cur.pos), w.frontier
		if w.state != Starved && w.state != Retrying {
			w.state = Walking
		}
	case w.state == Resting && w.Layout == nil:
		if w.until--; w.until < 0 {
			w.state = Walking
		}
	case w.state == Resting && w.Horizon.Front(w.frontier, w.cur.Reader.Head()) >= w.until:
		w.state = Walking
	case w.frontier < w.cur.pos && w.opens < takeBackEvery:
	case w.state == Starved: // now it may take memory back
		w.state = Retrying
	case w.state == Yielding:
		w.state = Walking
	}
}

// lacks reports whether a position that the walk has passed must be fetched.
func (w *Walk) lacks(pos int) bool {
	if pos >= w.cur.pos || w.cur.Reader.Read(pos) {
		return false
	}
	_, _, lacks := w.missing(w.cur.Order.At(pos))
	return lacks
}

// Open says that a file is being read, until Close.
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

// Landed says that a file has arrived or failed; last if its request is complete. A failed one is left to the reader,
// whose own read tries again and reports the error.
func (x *Executor) Landed(w *Walk, file int, last bool) {
	if last {
		w.Gate.flying--
	}
	if !w.Wants(file) { // given up, or read, while in flight
		x.settle = append(x.settle, item{w.Data, file})
	}
	for _, v := range x.walks {
		if v.state == Starved && v.urgent { // what has landed may be taken
			v.state = Retrying
		}
	}
}

// Lost says that staged extents of a file were dropped before it was read.
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
		if w.state == Starved {
			w.state = Retrying
		}
	}
	x.release(nil)
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

// Unwanted makes Next give up a file with staged extents, unless it is open or a walk wants it by then.
func (x *Executor) Unwanted(data any, file int) { x.doubted = append(x.doubted, item{data, file}) }

// Sweeping reports whether files that may be unwanted are still to be checked.
func (x *Executor) Sweeping() bool { return len(x.sweeps)+len(x.doubted) > 0 }

// Wanting returns the walk on whose account the file's staged extents should be: of the walks that have yet to read
// it, the one that holds the least for its weight; nil if there is none.
func (x *Executor) Wanting(data any, file int) (next *Walk) {
	for _, w := range x.walks {
		if w.Data == data && w.Wants(file) && (next == nil || w.Source.Load() < next.Source.Load()) {
			next = w
		}
	}
	return next
}

// Next returns the next action.
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

// next takes one step. more says that there may be others, even if it returns no action.
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

// pick returns the walk to go on: one that has just taken memory back, before the loser uses it; else one that waits
// for a place, since others pass positions, which may take long; these take turns.
func (x *Executor) pick() (best *Walk) {
	if w := x.took; w != nil {
		if x.took = nil; w.state == Retrying {
			return w
		}
	}
	for _, w := range x.walks {
		if w.state == Waiting && w.free() &&
			(best == nil || w.Gate.fair.Tag(&w.flow) < best.Gate.fair.Tag(&best.flow)) {
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

// free reports whether the store has a place for another prefetch. An eighth of the connections is for waiting
// readers. Once all are taken, it waits for several free ones: a wake-up costs more than planning a request.
func (w *Walk) free() bool {
	n := w.Connections()
	most := max(1, n-n/8)
	switch g := w.Gate; {
	case g.flying >= most:
		g.full = true
	case g.flying <= most-max(1, most/16):
		g.full = false
	}
	return !w.Gate.full && (w.Gate.flying < w.Ease() || w.soon())
}

// soon reports whether the reader gets to where the walk stands in half the time that a walk is to be ahead.
func (w *Walk) soon() bool {
	r, pos := w.cur.Reader, w.cur.pos
	if p, _ := w.phase(); p == &w.next {
		pos = w.cur.Order.Len() + p.pos
	}
	from, before := r.Frontier(), pos-r.Head()
	if pos > from && before < 0 { // its workers are apart, or it has jumped
		before = r.Unread(from, pos)
	}
	return pos <= from || float64(before) < w.Source.Rate()*AheadFor/2
}

// step passes positions until there is something to fetch, the walk stops, or its turn is over.
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
			if x.rests(w, p) {
				return Action{}
			}
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

// rests makes the walk rest if it is so far ahead that only free memory is for it, and there is none, or other walks
// will need it. In shards it goes further, since that makes its requests fewer (group).
func (x *Executor) rests(w *Walk, p *phase) bool {
	if w.Layout != nil || p == &w.next && w.next.pos < w.head {
		return false
	}
	at, ahead, end, frontier := p.pos, w.Source.Ahead(), w.cur.Order.Len(), w.cur.Reader.Frontier()
	if p == &w.next {
		at += end
	}
	// The frontier may stand for long at an open that was not seen, so what was read beyond it does not count.
	if at < frontier+ahead || w.cur.Reader.Unread(frontier, min(at, end))+max(at-end, 0) < ahead {
		return false
	}
	if file := p.Order.At(p.pos); len(x.walks) == 1 && !w.Source.Has(file) { // which is looked at again when it is near
		_, free := w.Source.Room()
		if w.Source.Extents(file) == 0 || free >= w.Source.ExtentBytes(file, 0) {
			return false
		}
	}
	w.until = ahead / 4
	x.stop(w, Resting)
	return true
}

// phase returns the epoch to walk now, and where it ends for the time being: the head of a waiting plan, this epoch,
// or the next one; nil if all are done.
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

// missing returns the first extent of a file of the order, or of its unit, that is neither resident nor in flight.
func (w *Walk) missing(file int) (f, extent int, ok bool) {
	w.trusts = w.trusts || w.Parts == nil && w.Source.Has(file)
	for f, x := range w.pieces(file) {
		if !w.Source.Claim(f, x) {
			return f, x, true
		}
	}
	return 0, 0, false
}

// pieces yields the extents of a file of the order, and of those that are read with it.
func (w *Walk) pieces(file int) iter.Seq2[int, int] {
	return func(yield func(file, extent int) bool) {
		for _, f := range w.unit(file) {
			for x := range w.Source.Extents(f) {
				if !yield(f, x) {
					return
				}
			}
		}
	}
}

// extents returns how many extents a file of the order has, with those that are read with it.
func (w *Walk) extents(file int) (n int) {
	for _, f := range w.unit(file) {
		n += w.Source.Extents(f)
	}
	return n
}

func (w *Walk) unit(file int) []int {
	if w.Parts == nil {
		return []int{file}
	}
	return w.Parts.Unit(file)
}

// fetch requests the extent that the walk stands at, if it may.
func (x *Executor) fetch(w *Walk, p *phase, file, extent int) Action {
	w.short, w.file = w.Source.ExtentBytes(file, extent), file
	w.urgent = p == &w.cur && p.pos <= p.Reader.Frontier() && w.rushed < w.extents(file)
	if !w.urgent && x.yields(w) {
		x.stop(w, Yielding)
		x.takers = append(x.takers, w)
		return Action{}
	}
	a := Action{Do: Fetch, Walk: w, Data: w.Data, File: file, Extent: extent, Pos: p.pos, Bytes: w.short}
	if p == &w.next {
		a.Pos += w.cur.Order.Len()
	}
	if !w.free() { // before any neighbours are claimed
		x.stop(w, Waiting)
		return Action{}
	}
	if w.Layout != nil && w.Source.Extents(file) == 1 {
		files, early := w.group(p, file)
		if early {
			return Action{}
		}
		if len(files) > 1 {
			a.Files = files
		}
	}
	return a
}

// Done takes the outcome of a Fetch, and the size of its request; or of a TakeBack: Refused, if it freed nothing.
func (x *Executor) Done(a Action, out Outcome, bytes int64) {
	w := a.Walk
	if a.Do == TakeBack {
		if out == Started {
			w.taken++
			x.took = w
		}
		return
	}
	if out == Refused {
		x.refused(w)
		return
	}
	if w.resume(); out == Present {
		return
	}
	w.Gate.flying++
	w.Gate.fair.Serve(&w.flow, bytes)
	w.fetched = true
	if w.urgent {
		w.rushed++
	}
}

// resume makes the walk go on. A starved one counts as starved until it stops for another reason than memory: others
// yield to it until then.
func (w *Walk) resume() {
	if w.state != Retrying {
		w.state = Walking
	}
}

func (x *Executor) refused(w *Walk) {
	frontier := w.cur.Reader.Frontier()
	if w.next.pos < w.head && !w.halved { // for the head of a waiting plan
		w.halved = true
		w.cur.pos = frontier + max(w.cur.pos-frontier, 0)/2
		w.cur.claimed, w.retain = w.cur.pos, 0
		x.sweep(w.Data)
	} else {
		x.retain(w, frontier)
	}
	x.stop(w, Starved)
	x.takers = append(x.takers, w)
}

// retain changes how far ahead files that others have read stay, for a walk without memory. Files needed first must
// not wait for files needed later, so all of these go; but if others read the same files in their own orders, only
// as many as it takes for what is needed first. If the walk is three quarters as far ahead as it is to be, more
// stays, since a file that need not be fetched again is worth more than one staged early.
func (x *Executor) retain(w *Walk, frontier int) {
	lead, reach := w.cur.pos+w.next.pos-frontier, w.reach()
	switch {
	case w.beside == 0 && w.retain > lead:
		w.retain = 0
		x.sweep(w.Data)
	case w.beside > 0 && w.retain > lead && 4*lead < reach:
		w.retain /= 2
		x.sweep(w.Data)
	case w.beside == 0 || 8*max(frontier-w.adjusted, w.adjusted-frontier) < reach: // a sweep checks all staged files
		return
	case 4*lead >= 3*reach:
		w.retain = min(max(w.retain, lead)*9/8+1, x.near(w))
	case w.retain > lead:
		w.retain -= w.retain / 8
		x.sweep(w.Data)
	}
	w.adjusted = frontier
}

// reach is how many positions ahead of its reader a walk is to be.
func (w *Walk) reach() int {
	if w.Layout != nil {
		return w.Source.Share()
	}
	return min(w.Source.Ahead(), w.Source.Share())
}

// near is how far ahead a file is worth more to a walk than one that stays for all of the epoch: of k readers each,
// in orders of their own, reads the latter once an epoch, so it saves a fetch each k-th of an epoch.
func (x *Executor) near(w *Walk) int {
	k := 0
	for _, v := range x.walks {
		if v.Data == w.Data {
			k++
		}
	}
	return w.cur.Order.Len() / max(k, 2)
}

// stop makes the walk pass no more positions for now.
func (x *Executor) stop(w *Walk, s State) {
	w.state = s
	if s != Starved && s != Yielding {
		if w.beside == 0 {
			w.retain = w.Source.Share()
		} else {
			w.retain = max(w.retain, min(w.retain*9/8+w.reach()/8+1, x.near(w)))
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

// release resumes the walks that left memory to others, but w.
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

// yields reports whether another walk found no memory, and either its reader needs it next, or it holds less of it for
// its weight than w. That one tries again: w may have left memory to it.
func (x *Executor) yields(w *Walk) bool {
	load := w.Source.Load()
	for _, v := range x.walks {
		if v != w && (v.state == Starved || v.state == Retrying) && (v.urgent || v.Source.Load() < load) {
			v.state = Retrying
			return true
		}
	}
	return false
}

// takeBack says from which walks this one may take memory, if from any.
func (w *Walk) takeBack() Action {
	a := Action{Do: TakeBack, Walk: w, Data: w.Data, File: w.file, Bytes: w.short, Over: overAtOnce}
	switch {
	case w.taken > w.Source.Share()+w.extents(w.file):
		return Action{}
	case w.urgent:
		a.Over = 0
	case w.opens >= takeBackEvery:
		w.opens, a.Over = 0, overInTime
	}
	return a
}

// group returns the files to fetch in one request with the one needed next: its neighbours in the shard that are
// needed soon, or that go to the disk. early says that the walk has stopped instead: more will come along when the
// reader has moved on, or when there is more memory.
func (w *Walk) group(p *phase, file int) (files []int, early bool) {
	bulk := w.Source.Bulk()
	hurries := bulk || p == &w.next // neighbours for the disk, and the next epoch, use any free memory
	frontier, head := 0, 0
	if p.Reader != nil {
		frontier, head = p.Reader.Frontier(), p.Reader.Head()
	}
	free, _ := w.Source.Room()
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

// within reports whether a phase has the file at an unread position between two, inclusive.
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

// rewind plans again from the first position that needs the file. It returns false if there is none.
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

// Wants reports whether the walk has yet to read the file, and has claimed it, or wants it to stay after another
// reader. The current position counts.
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
		if w.cur.holds(f, from, max(w.cur.pos, w.cur.claimed, from+w.retain)) ||
			w.next.holds(f, 0, max(w.next.pos, w.next.claimed, into)) {
			return true
		}
	}
	return false
}

// Needed returns how many positions the reader has before the file, from its frontier on; beyond both epochs if it
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

// find returns the first unread position from one on that has the file, -1 if there is none.
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

// Planned returns the position of the current epoch up to which everything was fetched or is in flight.
func (w *Walk) Planned() int { return w.cur.pos }

// Served returns the bytes requested.
func (w *Walk) Served() int64 { return w.flow.Served }

// Lead returns how many unread positions of the next limit ones are staged, before the first that needs a fetch. What
// is gone that the walk has passed, and the reader too, was read unseen.
func (w *Walk) Lead(limit int, where func(file, extent int) (staged, comes bool)) (lead int) {
	r, o := w.cur.Reader, w.cur.Order
	from, passed := r.Frontier(), min(w.cur.pos, r.Head())
next:
	for pos := from; pos < min(from+limit, o.Len()); pos++ {
		if r.Read(pos) {
			continue
		}
		for f, x := range w.pieces(o.At(pos)) {
			switch staged, comes := where(f, x); {
			case staged:
			case comes || pos >= passed:
				return lead
			default:
				continue next
			}
		}
		lead++
	}
	return lead
}
