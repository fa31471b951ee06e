package prefetch

import (
	"fmt"
	"math"
	"slices"

	"github.com/shoalfs/shoal/prefetch/order"
)

// DefaultSpan is how many positions a reader may be ahead of its own slowest part unless told
// otherwise: 16 workers with batches of 256 and 4 of them prefetched, or 8 ranks with 4 workers,
// batches of 256 and PyTorch's default of 2.
const DefaultSpan = 16384

// TrackerOptions adjust a Tracker. The zero value is good for most trainers.
type TrackerOptions struct {
	// Epoch is the number of the epoch of the first order.
	Epoch int
	// Span is the reorder span in positions: ranks × workers × prefetch_factor × batch size of the
	// largest trainer that is expected, or more. A larger span keeps the frontier longer at
	// positions that the trainer skips; a smaller one takes a slow worker's samples for skipped,
	// and a fast one's for noise. 0 means DefaultSpan.
	Span int
}

// Event says what an open was.
type Event uint8

const (
	// Stray: neither the current order holds the sample nor did the open move the tracker.
	Stray Event = iota
	// Consumed: the position had not been read in this pass and now has been.
	Consumed
	// Repeat: all positions of the sample have been read in this pass already.
	Repeat
	// Ahead: the position is unread but further ahead than reordering explains. It is not counted
	// as read, since it may be noise; further opens there make it a Jump.
	Ahead
	// Jump: the reader goes on elsewhere in the same epoch, as after a resume. The opens that were
	// Ahead of it have been counted, and the frontier is where they began.
	Jump
	// NextEpoch: the reader has begun the order given by SetNext, which now is the current one. The
	// opens that showed it are counted there. Give the next one by SetNext.
	NextEpoch
	// Restart: the reader has begun the current order again, in another pass over the same epoch,
	// as a trainer does that never calls set_epoch.
	Restart
	// PrevEpoch: the reader has begun the previous order again. The order that was current is next.
	PrevEpoch
)

var eventNames = [...]string{"stray", "consumed", "repeat", "ahead", "jump", "next epoch", "restart", "previous epoch"}

func (e Event) String() string {
	if int(e) < len(eventNames) {
		return eventNames[e]
	}
	return fmt.Sprintf("event %d", uint8(e))
}

// Moved reports whether the event changed the position by more than one sample, so that what was
// planned before it is out of date.
func (e Event) Moved() bool { return e >= Jump }

// Tracker follows one reader through its orders by the samples that it opens. The position is a
// set: DataLoader workers read whole batches side by side, and several ranks may share a mount.
//
// Whether the reader has moved, to another epoch or elsewhere, is a change-point test (E. S. Page,
// "Continuous Inspection Schemes", Biometrika 41, 1954). Each alternative (the next order from its
// beginning, this one again, the previous one again, this one from another place) keeps a cursor of
// what would have been read if it were true, and sums over all opens the logarithm of how much more
// probable it makes them than the current account does. The current account gets the benefit of the
// doubt: an open that fits it badly counts as no less probable than a uniformly drawn sample. So
// under any mix of normal reading and random reads of all files the likelihood ratio is a
// supermartingale, and the odds that one of n opens starts a false move are below 1:100. A reader
// that really has moved gains up to ln(n) with every open, so that ln(100·n) is reached in two to
// four opens, or in about as many as it has workers. No single open is enough. Once the current order is
// exhausted, little is lost by moving, and ln(20·n) is asked. Alternatives must be told apart from
// each other by odds of 20, unless they are equal. Orders of a few samples, or of a few for each
// worker, do not carry enough information for any of this: there the tracker moves when seven
// eighths of a further pass have been seen.
//
// What follows from it:
//   - Opens of files outside the orders (a validation pass) change nothing.
//   - A random reader of all files (a checksum run) leaves the epoch alone. Its opens within 2.5
//     spans of the frontier count as read, the others are Ahead. If the whole order is shorter than
//     that, all of it may become read early, and prefetching has nothing to do until the next pass.
//   - A trainer that stops early is followed when it begins the next epoch.
//   - A trainer whose epochs are all the same gives a Restart each time, and Upcoming says so.
//   - Only the epochs before and after the current one are recognised. Ranks that are in different
//     epochs at the same time need a Tracker each.
//
// It keeps up to three orders with their indexes (order.Index; the previous one for a span of reads
// only) and 5 bits a position. It is deterministic, and not safe for concurrent use.
type Tracker struct {
	span  int
	epoch int
	pass  int
	cur   *cursor

	next, again, prev, jump hypothesis

	repeating bool // the reader last began an order that it had read before
	counts    [len(eventNames)]int
}

// hypothesis is an alternative to the tracker's current account. A nil cursor means that there is
// no such alternative.
type hypothesis struct {
	*cursor
	event Event
	score float64 // logarithm of the likelihood ratio, alternative to current account

	// The reader most probably moved when the score was at its lowest. since holds the positions
	// marked after that.
	lowest float64
	since  []int

	// Of the last open:
	pos int
	fit fit
}

const (
	// noise is the share of opens that an alternative expects to be unrelated to it.
	noise = 0.1
	// restartBelow is the score at which an alternative starts afresh. It is not 0, Page's choice,
	// because the first opens of many workers are far apart and fit worse than what follows.
	restartBelow = -10
)

var (
	oddsMove      = math.Log(100)
	oddsExhausted = math.Log(20)
	oddsBetween   = math.Log(20)
)

// NewTracker returns a tracker for a reader that is expected to begin cur. The order is indexed
// (order.Index), which takes time unless it is an order.Locator already.
func NewTracker(cur order.Order, o TrackerOptions) *Tracker {
	t := &Tracker{span: o.Span, epoch: o.Epoch}
	if t.span <= 0 {
		t.span = DefaultSpan
	}
	t.begin(newCursor(order.Index(cur), t.span))
	return t
}

// begin makes c the current account, with new alternatives and no next order.
func (t *Tracker) begin(c *cursor) {
	t.cur = c
	t.again = hypothesis{event: Restart, cursor: newCursor(c.order, t.span)}
	t.next, t.prev, t.jump = hypothesis{}, hypothesis{}, hypothesis{}
	if c.n > c.window() {
		t.jump = hypothesis{event: Jump, cursor: newCursor(c.order, t.span)}
	}
}

// SetNext gives the order of the next epoch, so that its head can be recognised. It is indexed as
// by NewTracker. nil means that it is not known.
func (t *Tracker) SetNext(next order.Order) {
	t.next = hypothesis{}
	if next != nil {
		t.next = hypothesis{event: NextEpoch, cursor: newCursor(order.Index(next), t.span)}
	}
	// The next order may equal this one (sequential): then both must have equal scores.
	t.again.reset()
}

// Open takes note that sample was opened. It returns what that means and its position in the order
// that is current after the call, -1 if it has none there. After a move (Event.Moved) other
// positions may have become read as well.
func (t *Tracker) Open(sample int) (Event, int) {
	event, pos := t.open(sample)
	t.counts[event]++
	return event, pos
}

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
	plausible := 0.0
	if fit == near {
		plausible = c.plausible(pos)
		c.mark(pos)
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
			h.weigh(sample, plausible, c.n, t.exhausted())
		}
	}
	if fit == near && t.exhausted() {
		// What spoke against the alternatives was the end of this pass. It is over.
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
		return Consumed, pos
	case far:
		return Ahead, pos
	case read:
		return Repeat, pos
	}
	return Stray, -1
}

// rivals returns the alternatives that there are, the more plausible of two equal ones first.
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

// reset starts the alternative afresh: if it is true, then from the next open on.
func (h *hypothesis) reset() {
	h.restart(0)
	h.score, h.lowest, h.since = 0, 0, h.since[:0]
}

// note marks a position as read if the alternative is true.
func (h *hypothesis) note(pos int) {
	h.mark(pos)
	h.since = append(h.since, pos)
}

// fresher reports whether the alternative fits the last open better if this was its first than if
// it was not. Where nothing speaks for what came before either, that is a better guess, and without
// it opens from before the change would be taken for part of the new pass.
func (h *hypothesis) fresher() bool {
	if h.fit != near {
		return h.fit == read
	}
	return h.step(h.pos-h.start+1) >= h.density(h.pos)
}

// weigh adds what the last open says for the alternative, given how plausible the current account
// of n positions makes it. Once that is exhausted, all opens are of the new pass, or noise: then
// no alternative starts afresh.
func (h *hypothesis) weigh(sample int, plausible float64, n int, exhausted bool) {
	if !exhausted && h.score <= 0 && h.count > 0 && h.fresher() {
		h.reset()
		if h.event == Jump {
			return // the next place that is far ahead will do
		}
		h.pos, h.fit = h.place(sample)
	}
	uniform := 1 / float64(max(h.n, n))
	fits := noise * uniform
	if h.fit == near {
		fits += (1 - noise) * h.density(h.pos)
		h.note(h.pos)
	}
	h.score += math.Log(fits / max(plausible, uniform))
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

// verdict returns the alternative that has won, if one has.
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
		old.reach(slices.Min(h.since))
		t.jump.reset()
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
	t.pass++
}

// Frontier returns the smallest position that is still expected: all below it have been read, or
// are skipped, in that the head is span positions further and span others have been read since. It
// is Len at the end. It moves back if a position is read that had been given up less than a span
// below it.
func (t *Tracker) Frontier() int { return t.cur.low }

// Head returns the highest position that has been read, plus 1.
func (t *Tracker) Head() int { return t.cur.head }

// Consumed returns how many positions have been read in this pass.
func (t *Tracker) Consumed() int { return t.cur.count }

// Skipped returns how many positions below the frontier have not been read. It takes time
// proportional to Len/64.
func (t *Tracker) Skipped() int { return t.cur.low - t.cur.readBelow(t.cur.low) }

// Read reports whether the position has been read in this pass; false outside the order.
func (t *Tracker) Read(pos int) bool { return pos >= 0 && pos < t.cur.n && t.cur.isRead(pos) }

// Epoch returns the number of the current epoch.
func (t *Tracker) Epoch() int { return t.epoch }

// Pass returns how often the reader has begun an order since the first one. It changes whenever
// Order, or all that is read of it, does.
func (t *Tracker) Pass() int { return t.pass }

// Order returns the current order.
func (t *Tracker) Order() order.Order { return t.cur.order }

// Upcoming returns the order that the reader is expected to begin after this one, nil if it is not
// known: what to prefetch when the current one has been fetched. It is the one given by SetNext,
// or the current one again if the reader has last done just that.
func (t *Tracker) Upcoming() order.Order {
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
