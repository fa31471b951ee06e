package prefetch

import (
	"fmt"
	"math"
	"slices"

	"github.com/shoalfs/shoal/prefetch/order"
)

// DefaultSpan is how many positions a reader may be ahead of its own slowest part: ranks × workers × prefetch_factor ×
// batch size of the largest expected trainer, which is 16 workers with batches of 256 and 4 of them prefetched, or 8
// ranks with 4 workers, batches of 256 and PyTorch's default of 2. A larger span keeps the frontier longer at positions
// that the trainer skips; a smaller one takes a slow worker's samples for skipped, and a fast one's for noise.
const DefaultSpan = 16384

// Event classifies an open.
type Event uint8

const (
	// Stray: the current order does not have the sample, and the open did not move the tracker.
	Stray Event = iota
	// Consumed: the position is now read for the first time in this pass.
	Consumed
	// Repeat: all positions of the sample have been read in this pass already.
	Repeat
	// Ahead: the position is unread but further ahead than reordering explains. It is not counted
	// as read, since it may be noise; further opens there make it a Jump.
	Ahead
	// Jump: the reader continues elsewhere in the same epoch, as after a resume. The opens that showed it were
	// counted, and the frontier is where they began. If that place had been read before, a further pass begins there.
	Jump
	// NextEpoch: the reader has begun the order given by SetNext, which is now the current one. The opens that showed
	// it are counted there. Set the next one with SetNext.
	NextEpoch
	// Restart: the reader has begun the current order again, in another pass over the same epoch, like a trainer that
	// never calls set_epoch.
	Restart
	// PrevEpoch: the reader has begun the previous order again. The former current order is next.
	PrevEpoch
	// Found: the reader is in an order that is not next to the former current one; see Adopt.
	Found
)

var eventNames = [...]string{"stray", "consumed", "repeat", "ahead", "jump", "next epoch", "restart",
	"previous epoch", "found"}

func (e Event) String() string { return eventNames[e] }

// Moved reports whether the event changed the position by more than one sample, so that earlier planning is out of
// date.
func (e Event) Moved() bool { return e >= Jump }

// Move is a change of the reader's place.
type Move struct {
	Event Event
	From  int // the old head
	To    int // it goes on from there
	// Unread is how many positions the reader left out: from the old frontier to the new one for a Jump ahead, all of
	// the old pass for another one. 0 if it went back.
	Unread int
}

// Tracker follows one reader through its orders by the samples that it opens. The read positions are a set:
// DataLoader workers read whole batches in parallel, and several ranks may share a mount.
//
// Whether the reader has moved, to another epoch or elsewhere, is a change-point test (E. S. Page, "Continuous
// Inspection Schemes", Biometrika 41, 1954). Each alternative (the next order from its beginning, this one again, the
// previous one again, this one from another place) keeps a cursor of what would have been read if it were true, and
// sums over all opens the logarithm of how much more probable it makes them than the current account does. The current
// account gets the benefit of the doubt: an open that fits it badly counts as no less probable than a uniformly drawn
// sample. So under any mix of normal reading and random reads of all files the likelihood ratio is a supermartingale,
// and the odds that one of n opens starts a false move are below 1:100. A reader that really has moved gains up to
// ln(n) with every open, so that ln(100·n) is reached in two to four opens, or in about as many as it has workers. One
// open is never enough. Once the current order is exhausted, a false move costs little, and ln(20·n) is enough.
// Alternatives must be told apart from each other by odds of 20, unless they are equal. Orders of a few samples, or of
// a few per worker, have too little information for this: there the tracker moves when it has seen seven eighths of a
// further pass.
// Consequences:
//   - Opens of files outside the orders (a validation pass) change nothing.
//   - A random reader of all files (a checksum run) leaves the epoch alone. Its opens within 2.5
//     spans of the frontier count as read, the others are Ahead. If the whole order is shorter than
//     that, all of it may become read early, and prefetching has nothing to do until the next pass.
//   - A trainer that stops early is followed when it begins the next epoch.
//   - One that resumes within reach of the frontier, as all of a short order is, fits the current account, which waits
//     for what it left out. So a gap is left out once 48 positions were read without it and it is four times as long as
//     all that is read beyond it (passedOver). A stalled worker leaves a gap too, of a batch, but the others stop
//     before they are far; should it be misjudged, its next open moves the frontier back.
//   - One that goes back, further than a Restart explains, is followed when 48 opens in a row had been read and seven
//     eighths of them lie within a third of the order (wentBack). Uniform noise does so with odds of 1:10^12.
//   - A trainer whose epochs are all the same gives a Restart each time, and Upcoming says so.
//   - Only the epochs before and after the current one are recognised here. For a reader that has
//     never been where it was expected (a run that resumes in epoch 7) the caller may try others: see Lost.
//   - Ranks that are in different epochs at the same time need a Tracker each: opens of both, in one
//     sequence, are a reader that moves to and fro.
//
// It keeps up to three orders with their indexes (order.Index; the previous one for a span of reads
// only) and 5 bits a position. It is deterministic, and not safe for concurrent use.
type Tracker struct {
	span  int
	epoch int
	pass  int
	cur   *cursor

	next, again, prev, jump hypothesis

	scans  bool    // the order's reader does not look like a scan
	recent [16]int // the last samples opened + 1, as a ring
	opens  int

	repeating bool // the reader's last order was one that it had read before
	counts    [len(eventNames)]int
	last      Move
	place     int // position after the last move

	trail   [traced]int // the last samples opened that the current order holds, as a ring
	trailed int         // how many since the last move
	repeats int         // of them, those in a row up to the last that had been read
	waiting int         // positions marked since low last moved
	lowWas  int
	found   bool // the reader was seen in the current order once
}

// hypothesis is an alternative to the tracker's current account. Without a cursor there is no such alternative.
type hypothesis struct {
	*cursor
	event Event
	score float64 // logarithm of the likelihood ratio, alternative to current account

	// The reader most probably moved when the score was lowest. since has the positions marked after that.
	lowest float64
	since  []int

	// Of the last open:
	pos int
	fit fit
}

const (
	// settled is how many opens show a reader's place without a model of how it reads.
	settled = 48
	// traced is how many opens are remembered, to be counted once their place is known.
	traced = 4096
	// clearOf is how many times longer a gap must be than all that is read beyond it, to be left out.
	clearOf = 4
	// noise is the share of opens that an alternative expects to be unrelated to it.
	noise = 0.1
	// scanGap is the largest step of a scan, in sample numbers, from one of the last samples opened: a scan with a few
	// threads does not go by ones.
	scanGap = 16
	// scanOdds is how much more probable a scan must make an open than the reader does, for it not to count as read.
	// It stands for a gap of some hundred positions: with small shards a reader's batches look like a scan now and
	// then, and not counting them would hold the frontier back.
	scanOdds = 64
	// restartBelow is the score at which an alternative restarts. It is not 0, Page's choice, because the first opens
	// of many workers are far apart and fit worse than later ones.
	restartBelow = -10
)

var (
	oddsMove      = math.Log(100)
	oddsExhausted = math.Log(20)
	oddsBetween   = math.Log(20)
)

// NewTracker returns a tracker for a reader that is expected to begin cur, which is the order of an epoch. The order is
// indexed (order.Index), which takes time unless it is an order.Locator already.
func NewTracker(cur order.Order, epoch, span int) *Tracker {
	t := &Tracker{span: span, epoch: epoch}
	t.begin(newCursor(order.Index(cur), t.span))
	t.scans = t.unlikeScan()
	return t
}

// unlikeScan reports whether less than half of the order's own reading looks like a scan.
func (t *Tracker) unlikeScan() bool {
	const probes = 64
	o, like := t.cur.order, 0
	each := len(t.recent) + 1
	if o.Len() < each {
		return false
	}
	probe := Tracker{}
	for i := range probes {
		from := i * (o.Len() - each) / probes
		for pos := from; pos < from+each-1; pos++ {
			probe.remember(o.At(pos))
		}
		if probe.scan(o.At(from+each-1)) > 0 {
			like++
		}
	}
	return like < probes/2
}

// scan returns the probability of an open of sample if it belongs to a scan, which continues one of the last opens by
// a small step; 0 if it does not.
func (t *Tracker) scan(sample int) float64 {
	for _, r := range t.recent {
		if gap := sample + 1 - r; r > 0 && gap > 0 && gap <= scanGap {
			return 1 / float64(len(t.recent)*scanGap)
		}
	}
	return 0
}

func (t *Tracker) remember(sample int) {
	t.recent[t.opens%len(t.recent)] = sample + 1
	t.opens++
}

// begin makes c the current account, with new alternatives and no next order.
func (t *Tracker) begin(c *cursor) {
	t.cur = c
	t.again = hypothesis{event: Restart, cursor: newCursor(c.order, t.span)}
	t.next, t.prev, t.jump = hypothesis{}, hypothesis{}, hypothesis{}
	t.trailed, t.repeats, t.waiting, t.lowWas = 0, 0, 0, c.low
	if c.n > c.window() {
		t.jump = hypothesis{event: Jump, cursor: newCursor(c.order, t.span)}
	}
}

// SetNext sets the order of the next epoch, so that its head can be recognised. It is indexed as by NewTracker. nil
// means unknown.
func (t *Tracker) SetNext(next order.Order) {
	t.next = hypothesis{}
	if next != nil {
		t.next = hypothesis{event: NextEpoch, cursor: newCursor(order.Index(next), t.span)}
	}
	// The next order may equal this one (sequential): then both must have equal scores.
	t.again.reset()
}

// Open records that sample was opened. It returns the event and the sample's position in the order that is current
// after the call, -1 if it has none there. After a move (Event.Moved) other positions may have become read as well.
func (t *Tracker) Open(sample int) (Event, int) {
	before := t.left()
	event, pos := t.open(sample)
	if !event.Moved() {
		event = t.settle(sample, event, pos)
	}
	if event.Moved() {
		t.moved(event, before)
	}
	t.counts[event]++
	return event, pos
}

// left is the account before a Move, as far as that needs it.
type left struct{ n, head, low, count int }

func (t *Tracker) left() left { return left{t.cur.n, t.cur.head, t.cur.low, t.cur.count} }

func (t *Tracker) moved(event Event, before left) {
	m := Move{Event: event, From: before.head, To: t.place}
	switch {
	case event != Jump:
		m.Unread = before.n - before.count
	case m.To > before.low:
		m.Unread = t.cur.unreadIn(before.low, m.To)
	}
	t.last = m
}

// settle detects from the last opens together what no test of single ones has shown: a Jump.
func (t *Tracker) settle(sample int, event Event, pos int) Event {
	if pos < 0 {
		return event
	}
	t.trail[t.trailed%traced] = sample
	t.trailed++
	if event == Repeat {
		t.repeats++
	} else {
		t.repeats = 0
	}
	if t.cur.low != t.lowWas {
		t.lowWas, t.waiting = t.cur.low, 0
	} else if event == Consumed {
		t.waiting++
	}
	switch {
	case t.repeats >= settled && t.repeats%8 == 0:
		if lowest, spread := t.cluster(t.cur.order); spread <= t.cur.n/3 {
			t.wentBack(lowest)
			return Jump
		}
	case event == Consumed && t.waiting >= settled && t.waiting%8 == 0:
		if t.passedOver() {
			return Jump
		}
	case !t.found && t.trailed >= settled && t.trailed%8 == 0:
		_, spread := t.cluster(t.cur.order)
		t.found = spread <= t.cur.n/3
	}
	return event
}

// cluster returns the shortest range of positions in o that holds all but an eighth of the last settled samples
// opened: its length, and its first position. If fewer are in o, spread is its length + 1.
func (t *Tracker) cluster(o order.Locator) (lowest, spread int) {
	var at [settled]int
	n := 0
	for i := max(t.trailed-settled, 0); i < t.trailed; i++ {
		if pos := o.Find(t.trail[i%traced], 0); pos >= 0 {
			at[n] = pos
			n++
		}
	}
	slices.Sort(at[:n])
	lowest, spread = 0, o.Len()+1
	const most = settled - settled/8
	for i := 0; i+most <= n; i++ {
		if s := at[i+most-1] - at[i] + 1; s < spread {
			lowest, spread = at[i], s
		}
	}
	return lowest, spread
}

// passedOver gives up the gap before the latest reads, if the reader must have left it out.
func (t *Tracker) passedOver() bool {
	c := t.cur
	next := c.next(c.low, 0)
	if next >= c.n || next-c.low < clearOf*(c.head-next) {
		return false
	}
	c.reach(next)
	t.lowWas, t.waiting, t.place = c.low, 0, next
	if t.jump.cursor != nil {
		t.jump.reset()
	}
	return true
}

// wentBack begins a pass in the middle of the current order, with the last opens.
func (t *Tracker) wentBack(from int) {
	next, prev, opens := t.next, t.prev, t.lastOpens(t.repeats)
	t.begin(newCursor(t.cur.order, t.span))
	t.next, t.prev = next, prev
	for _, h := range t.rivals() {
		h.reset()
	}
	t.retrace(opens, from)
	t.pass++
}

// lastOpens returns the last n samples of the trail, or as many as there are.
func (t *Tracker) lastOpens(n int) []int {
	opens := make([]int, 0, min(n, t.trailed, traced))
	for i := t.trailed - cap(opens); i < t.trailed; i++ {
		opens = append(opens, t.trail[i%traced])
	}
	return opens
}

// retrace counts the opens of a reader that began at from, or somewhat before, in the current order.
func (t *Tracker) retrace(opens []int, from int) {
	c := t.cur
	reach := max(from-len(opens), 0)
	for _, sample := range opens {
		if pos := c.order.Find(sample, reach); pos >= 0 {
			from = min(from, pos)
		}
	}
	c.restart(from)
	for _, sample := range opens {
		if pos := c.order.Find(sample, from); pos >= 0 && pos < from+c.window() && !c.isRead(pos) {
			c.mark(pos)
		}
	}
	if from > 0 { // positions before it may still be read, and a stream begin there
		c.start = 0
		c.runs++
	}
	t.lowWas, t.place = c.low, from
}

// Lost reports whether the reader has opened enough samples to be seen in the current order or those next to it, and
// never was: then it may be in another epoch. See Adopt.
func (t *Tracker) Lost() bool {
	if t.found || t.pass > 0 || t.trailed < settled {
		return false
	}
	_, spread := t.cluster(t.cur.order)
	return spread > t.cur.n/3
}

// Adopt makes o, of that epoch, the current order if the last opens are close together in it, anywhere, and reports
// whether they are: seven eighths of 48 within a third of the order. The opens of an unrelated reader are with odds
// of 1:10^12. After that, set the next order with SetNext.
func (t *Tracker) Adopt(o order.Order, epoch int) bool {
	l := order.Index(o)
	if t.trailed < settled {
		return false
	}
	lowest, spread := t.cluster(l)
	if spread > l.Len()/3 {
		return false
	}
	before, opens := t.left(), t.lastOpens(traced)
	if lowest < clearOf*spread {
		lowest = 0 // as likely a start whose first worker is late
	}
	t.begin(newCursor(l, t.span))
	t.retrace(opens, lowest)
	t.epoch = epoch
	t.found, t.repeating = true, false
	t.pass++
	t.counts[Found]++
	t.moved(Found, before)
	return true
}

// Extend replaces the current order by a longer one that begins with it. Read positions stay read. The orders next to
// it are forgotten: set the next one with SetNext. It panics if o is shorter.
func (t *Tracker) Extend(o order.Order) {
	old, c := t.cur, newCursor(order.Index(o), t.span)
	if c.n < old.n {
		panic(fmt.Sprintf("prefetch: an order of %d positions extended to %d", old.n, c.n))
	}
	copy(c.words, old.words)
	c.start, c.count, c.head, c.runs, c.floor = old.start, old.count, old.head, old.runs, old.floor
	if old.n < c.n && old.n > 0 && old.isRead(old.n-1) {
		c.runs++ // a stream may continue there now
	}
	c.past, c.oldest, c.unaudit = old.past, old.oldest, old.unaudit
	c.low = c.unread(old.low)
	t.begin(c)
	t.repeating = false
}

// ExpectNext says that the order of SetNext certainly comes next, whatever the reader repeated before.
func (t *Tracker) ExpectNext() { t.repeating = false }

// Begin makes o the current order because the reader is known to begin it now, as when its plan was written after all
// of the previous one was read. It counts as a NextEpoch unless nothing of the old order was read. Set the next order
// with SetNext.
func (t *Tracker) Begin(o order.Order) {
	before := t.left()
	t.begin(newCursor(order.Index(o), t.span))
	t.repeating = false
	t.pass++
	if before.count > 0 {
		t.epoch++
		t.place = 0
		t.counts[NextEpoch]++
		t.moved(NextEpoch, before)
	}
}

// Orders returns the orders in which the reader may be: the current one, and those next to it.
func (t *Tracker) Orders() (all []order.Locator) {
	all = append(all, t.cur.order)
	for _, h := range t.rivals() {
		all = append(all, h.order)
	}
	return all
}

// LastMove returns the latest move; its Event is Stray before the first one.
func (t *Tracker) LastMove() Move { return t.last }

func (t *Tracker) open(sample int) (Event, int) {
	c := t.cur
	pos, fit := c.place(sample)
	known := fit != absent
	for _, h := range t.rivals() {
		h.pos, h.fit = h.place(sample)
		known = known || h.fit != absent
	}
	if !known {
		return Stray, -1
	}
	// Possible noise: uniform over all files, or a scan.
	noisy := 0.0
	if t.scans {
		noisy = t.scan(sample)
		t.remember(sample)
	}
	plausible := 0.0
	scanned := false
	if fit == near {
		plausible = c.plausible(pos)
		if scanned = noisy > scanOdds*plausible; !scanned {
			c.mark(pos)
		}
	}
	for _, h := range t.rivals() {
		switch {
		case h.event == Jump && h.count == 0:
			// Any place is as good as another to jump to: only what follows counts.
			if fit == far {
				h.restart(pos)
				h.note(pos)
			}
		default:
			h.weigh(sample, plausible, noisy, c.n, t.exhausted())
		}
	}
	if fit == near && t.exhausted() {
		// The end of this pass spoke against the alternatives. It has come.
		for _, h := range t.rivals() {
			if h.score <= 0 {
				h.reset()
			}
		}
	}
	if c.count >= t.span {
		t.prev = hypothesis{} // the move has proved right
	}
	if h := t.verdict(); h != nil {
		event, pos := h.event, h.pos
		t.move(*h)
		return event, pos
	}
	switch fit {
	case near:
		if scanned {
			return Ahead, pos
		}
		return Consumed, pos
	case far:
		return Ahead, pos
	case read:
		return Repeat, pos
	}
	return Stray, -1
}

// rivals returns the existing alternatives, the more plausible of two equal ones first.
func (t *Tracker) rivals() []*hypothesis {
	all := [...]*hypothesis{&t.next, &t.again, &t.prev, &t.jump}
	if t.repeating {
		all[0], all[1] = all[1], all[0]
	}
	there := all[:0]
	for _, h := range all {
		if h.cursor != nil {
			there = append(there, h)
		}
	}
	return there
}

// reset restarts the alternative: if true, it is true from the next open on.
func (h *hypothesis) reset() {
	h.restart(0)
	h.score, h.lowest, h.since = 0, 0, h.since[:0]
}

// note marks a position as read if the alternative is true.
func (h *hypothesis) note(pos int) {
	h.mark(pos)
	h.since = append(h.since, pos)
}

// fresher reports whether the last open fits the alternative better as its first than as a later one. If nothing
// supports the earlier opens either, that is the better guess; without it, opens from before the change would be
// taken for part of the new pass.
func (h *hypothesis) fresher() bool {
	if h.fit != near {
		return h.fit == read
	}
	return h.step(h.pos-h.start+1) >= h.density(h.pos)
}

// weigh adds the evidence of the last open for the alternative, given how plausible the current account of n
// positions makes it, and a scan. Once that account is exhausted, all opens are of the new pass, or noise: then no
// alternative restarts.
func (h *hypothesis) weigh(sample int, plausible, scan float64, n int, exhausted bool) {
	if !exhausted && h.score <= 0 && h.count > 0 && h.fresher() {
		h.reset()
		if h.event == Jump {
			return // the next place far ahead will do
		}
		h.pos, h.fit = h.place(sample)
	}
	// The share of opens unrelated to it, and their probability. An open that continues a scan most probably belongs
	// to it, whatever else is true, and so proves little.
	share, unrelated := noise, 1/float64(max(h.n, n))
	if scan > unrelated {
		share, unrelated = 1-noise, scan
	}
	fits := share * unrelated
	if h.fit == near {
		fits += (1 - share) * h.density(h.pos)
		h.note(h.pos)
	}
	h.score += math.Log(fits / max(plausible, unrelated))
	switch {
	case h.score >= restartBelow:
	case exhausted:
		h.score = restartBelow
	default:
		h.reset()
	}
	if h.score < h.lowest && !exhausted {
		h.lowest, h.since = h.score, h.since[:0]
	}
}

func (t *Tracker) exhausted() bool { return t.cur.low == t.cur.n }

// verdict returns the winning alternative, if any.
func (t *Tracker) verdict() *hypothesis {
	const equal = 1e-9
	rivals := t.rivals()
	var best *hypothesis
	for _, h := range rivals {
		if h.count > 0 && (best == nil || h.score > best.score+equal) {
			best = h
		}
	}
	if best == nil {
		return nil
	}
	if t.exhausted() && best.count >= best.n-best.n/8 {
		return best // a whole pass, or nearly, whatever its likelihood
	}
	need := oddsMove
	if t.exhausted() {
		need = oddsExhausted
	}
	if best.score < need+math.Log(float64(max(best.n, t.cur.n))) {
		return nil
	}
	for _, h := range rivals {
		if d := best.score - h.score; d > equal && d < oddsBetween {
			return nil
		}
	}
	return best
}

// move makes the alternative h the current account.
func (t *Tracker) move(h hypothesis) {
	won, old, next, prev := h.cursor, t.cur, t.next, t.prev
	if h.event == Jump {
		for _, pos := range h.since {
			if !old.isRead(pos) {
				old.mark(pos)
			}
		}
		t.place = slices.Min(h.since)
		old.reach(t.place)
		t.jump.reset()
		t.lowWas, t.waiting = old.low, 0
		t.found = true
		return
	}
	if won.count > len(h.since) {
		won.restart(0)
		for _, pos := range h.since {
			won.mark(pos)
		}
	}
	switch h.event {
	case NextEpoch:
		t.begin(won)
		t.prev = hypothesis{event: PrevEpoch, cursor: newCursor(old.order, t.span)}
		t.epoch++
		t.repeating = false
	case Restart:
		t.begin(won)
		t.next, t.prev = next, prev
		for _, h := range t.rivals() {
			h.reset()
		}
		t.repeating = true
	case PrevEpoch:
		t.begin(won)
		t.next = hypothesis{event: NextEpoch, cursor: newCursor(old.order, t.span)}
		t.epoch--
		t.repeating = true
	}
	if t.place = 0; len(h.since) > 0 {
		t.place = slices.Min(h.since)
	}
	t.found = true
	t.pass++
}

// Frontier returns the smallest position still expected. All below it were read, or are skipped: the head is span
// positions further and span others were read since. It is Len at the end. It moves back if a position is read that
// was given up less than a span below it.
func (t *Tracker) Frontier() int { return t.cur.low }

// Head returns the highest position that has been read, plus 1.
func (t *Tracker) Head() int { return t.cur.head }

// Consumed returns how many positions have been read in this pass.
func (t *Tracker) Consumed() int { return t.cur.count }

// Read reports whether the position has been read in this pass; false outside the order.
func (t *Tracker) Read(pos int) bool { return pos >= 0 && pos < t.cur.n && t.cur.isRead(pos) }

// Unread implements [Reader].
func (t *Tracker) Unread(from, to int) int { return t.cur.unreadIn(from, to) }

// Epoch returns the number of the current epoch.
func (t *Tracker) Epoch() int { return t.epoch }

// Pass returns how often the reader has begun an order since the first one. It changes whenever Order, or everything
// read of it, does.
func (t *Tracker) Pass() int { return t.pass }

// Order returns the current order.
func (t *Tracker) Order() order.Locator { return t.cur.order }

// Upcoming returns the order that the reader is expected to begin after this one, nil if unknown: the one to prefetch
// after the current one. It is the one set by SetNext, or the current one again if the reader repeated an order last
// time.
func (t *Tracker) Upcoming() order.Locator {
	switch {
	case t.repeating:
		return t.cur.order
	case t.next.cursor != nil:
		return t.next.order
	}
	return nil
}

// Count returns how many opens gave the event since the tracker was made.
func (t *Tracker) Count(e Event) int { return t.counts[e] }

// Position is where a reader stands.
type Position struct {
	Epoch, Pass    int
	Frontier, Head int
	Consumed       int
	Len            int
}

// Position returns where the reader stands.
func (t *Tracker) Position() Position {
	return Position{
		Epoch: t.epoch, Pass: t.pass, Frontier: t.cur.low, Head: t.cur.head, Consumed: t.cur.count, Len: t.cur.n,
	}
}
