package run

import (
	"context"
	"fmt"
	"time"

	humanize "github.com/dustin/go-humanize"

	"github.com/shoalfs/shoal/internal/pause"
	"github.com/shoalfs/shoal/prefetch"
	"github.com/shoalfs/shoal/prefetch/order"
)

// Events counts a stream's opens by event; see prefetch.Event.
type Events struct {
	Consumed   int `json:"consumed"`
	Repeats    int `json:"repeats"`
	Ahead      int `json:"ahead"` // too far ahead to count
	Jumps      int `json:"jumps"`
	NextEpochs int `json:"next_epochs"`
	Restarts   int `json:"restarts"`
	PrevEpochs int `json:"previous_epochs"`
	Found      int `json:"found"` // in an epoch that was not expected
}

// Reanchored is the latest change of the reader's place, and the reason.
type Reanchored struct {
	Time     time.Time `json:"time"`
	Event    string    `json:"event"` // jump, next epoch, restart, previous epoch, found
	Epoch    int       `json:"epoch"`
	From     int       `json:"from"`     // the reader's old position
	Position int       `json:"position"` // its new position
	Unread   int       `json:"unread"`   // positions left out
	Text     string    `json:"text"`
}

// reanchored records a move of the tracker. The runner's lock is held.
func (s *Stream) reanchored(event prefetch.Event) {
	m := s.tracker.LastMove()
	s.anchor = &Reanchored{
		Time: time.Now().UTC(), Event: event.String(), Epoch: s.tracker.Epoch(), From: m.From, Position: m.To,
		Unread: m.Unread, Text: moveText(m, s.tracker.Epoch()),
	}
}

// moveText describes a move to the epoch, for .shoal/order and the stats.
func moveText(m prefetch.Move, epoch int) string {
	count := func(n int) string { return humanize.Comma(int64(n)) }
	early := ""
	if m.Unread > 0 {
		early = fmt.Sprintf("; the reader left %s samples of the pass before unread", count(m.Unread))
	}
	switch m.Event {
	case prefetch.Jump:
		if m.Unread > 0 {
			return fmt.Sprintf("jumped to position %s: the reader skipped %s samples", count(m.To), count(m.Unread))
		}
		return fmt.Sprintf("went back to position %s from %s: the reader repeats what it had read",
			count(m.To), count(m.From))
	case prefetch.NextEpoch:
		return fmt.Sprintf("went on to epoch %d%s", epoch, early)
	case prefetch.Restart:
		return fmt.Sprintf("began epoch %d again%s", epoch, early)
	case prefetch.PrevEpoch:
		return fmt.Sprintf("went back to epoch %d%s", epoch, early)
	}
	return fmt.Sprintf("found the reader in epoch %d, position %s, by what it opens", epoch, count(m.To))
}

// events counts the tracker's events. The runner's lock is held.
func (s *Stream) events() Events {
	n := s.tracker.Count
	return Events{
		Consumed: n(prefetch.Consumed), Repeats: n(prefetch.Repeat), Ahead: n(prefetch.Ahead), Jumps: n(prefetch.Jump),
		NextEpochs: n(prefetch.NextEpoch), Restarts: n(prefetch.Restart), PrevEpochs: n(prefetch.PrevEpoch),
		Found: n(prefetch.Found),
	}
}

// Bounds of the search for the epoch of a reader that is not where it was expected: each epoch costs a permutation
// and its index, some 50 ns per position.
const (
	searchEpochs    = 400
	searchPositions = 200_000_000
)

// isLost reports whether the reader's epoch must be searched. Only for mounts: a feed names its own, and all epochs
// of a plan are one. The runner's lock is held.
func (s *Stream) isLost() bool {
	return s.Search && !s.searched && s.tracker.Lost()
}

// searchEpoch searches for the reader in other epochs if it was not seen in the expected one: a run that resumes in
// epoch 7 on a fresh mount. The stream's goroutine calls it once; it computes orders outside the lock that every open
// takes.
func (s *Stream) searchEpoch(ctx context.Context) {
	s.runner.mu.Lock()
	lost, expected := s.isLost(), s.tracker.Epoch()
	s.runner.mu.Unlock()
	if !lost {
		return
	}
	for i := range min(searchEpochs, searchPositions/max(s.first.Len(), 1)) {
		if ctx.Err() != nil {
			return
		}
		epoch := i
		if expected > 0 && i <= 2*expected { // nearest first: a start epoch that was given is a good guess
			if epoch = expected + (i+1)/2; i%2 == 0 {
				epoch = expected - i/2
			}
		}
		o := s.Epochs(epoch)
		if o == nil {
			continue
		}
		located := order.Index(o)
		s.runner.mu.Lock()
		found := !s.tracker.Lost() // in the expected epoch
		if !found && s.tracker.Adopt(located, epoch) {
			found = true
			s.moveTo(prefetch.Found)
		}
		s.runner.mu.Unlock()
		if found {
			return
		}
	}
	s.runner.mu.Lock()
	s.searched = true
	s.runner.mu.Unlock()
}

// moveTo restarts planning after a move of the tracker. The runner's lock is held.
func (s *Stream) moveTo(event prefetch.Event) {
	s.plan()
	s.reanchored(event)
	s.through.Store(s.through.Load() || event == prefetch.NextEpoch || event == prefetch.Restart)
	pause.Poke(s.wake)
}

// plan plans from the tracker's new place. The runner's lock is held.
func (s *Stream) plan() {
	s.runner.x.Moved(s.walk, s.route(), prefetch.Route{Order: s.tracker.Upcoming()})
	pause.Poke(s.runner.wake)
}

// Followed returns how many opens were by the stream's order, including repeats.
func (s *Stream) Followed() (opens int) {
	s.runner.mu.Lock()
	defer s.runner.mu.Unlock()
	for ev := prefetch.Consumed; ev <= prefetch.Found; ev++ {
		opens += s.tracker.Count(ev)
	}
	return opens
}

// Departed reports whether the opens showed that the readers do not follow the latest plan.
func (s *Stream) Departed() bool {
	s.runner.mu.Lock()
	defer s.runner.mu.Unlock()
	return s.told != nil && s.trials.now.Of(*s.told.Load()) && s.trials.now.Departed
}

// OfPlan reports whether the stream follows a written plan.
func (s *Stream) OfPlan() bool { return s.told != nil }

// Retell gives the stream a plan written after its own. One that continues its own extends it. Any other waits for
// its reader to begin it while the current one is read, to its end or until the opens show that the reader has ended
// it early. Nobody knows which, so the new plan's head is staged at once; at least the nearer half of the current
// plan's staged files stay. It reports whether the plan waits. Calls must not overlap.
func (s *Stream) Retell(plan order.Locator) (waits bool) {
	old := *s.told.Load()
	extends := extendsPlan(old, plan)
	s.runner.mu.Lock()
	defer s.runner.mu.Unlock()
	defer pause.Poke(s.wake)
	s.told.Store(&plan)
	s.known = s.tracker.Epoch() - 1 // the order after the current one has changed
	switch t := s.tracker; {
	case extends && t.Order() == old:
		s.extendTo(plan)
		return false
	case t.Consumed() == 0 || t.Frontier() == t.Order().Len():
		began := t.Consumed() > 0
		s.replanned = s.replanned || began
		t.Begin(plan)
		if s.Ranges != nil {
			s.closeRanges(0)
		}
		s.known = t.Epoch() - 1
		s.plan()
		if began {
			s.reanchored(prefetch.NextEpoch)
		}
		return false
	}
	s.replanned = true
	s.tracker.SetNext(plan)
	s.tracker.ExpectNext()
	s.known = s.tracker.Epoch()
	s.runner.x.Waits(s.walk, prefetch.Route{Order: plan})
	pause.Poke(s.runner.wake)
	return true
}

// Extend continues with the order that more returns, which begins with all of the current one; nil if there is none
// yet. more gets the reader's position, and must be fast.
func (s *Stream) Extend(more func(at prefetch.Position) order.Locator) {
	s.runner.mu.Lock()
	defer s.runner.mu.Unlock()
	if longer := more(s.tracker.Position()); longer != nil {
		s.extendTo(longer)
	}
}

// extendTo continues with an order that begins with all of the current one. The runner's lock is held.
func (s *Stream) extendTo(longer order.Locator) {
	s.tracker.Extend(longer)
	s.runner.x.Extended(s.walk, s.route())
	pause.Poke(s.runner.wake)
}

// extendsPlan reports whether plan begins with all of old and is longer. An equal plan is for another epoch.
func extendsPlan(old, plan order.Order) bool {
	if plan.Len() <= old.Len() {
		return false
	}
	for pos := range old.Len() {
		if old.At(pos) != plan.At(pos) {
			return false
		}
	}
	return true
}

// Behind reports whether the reader has yet to begin the latest plan.
func (s *Stream) Behind() bool {
	s.runner.mu.Lock()
	defer s.runner.mu.Unlock()
	return s.told != nil && s.tracker.Order() != *s.told.Load()
}
