package infer

import (
	"math"
	"slices"

	"github.com/shoalfs/shoal/prefetch/order"
)

// Sequences detects readers that go through a list of files, file by file or by steps, from any place: cp, a checksum
// run, a validation pass, DataLoader(shuffle=False) with its workers and ranks, and a repetition of the previous
// pass. It is the counterpart of [Detector] for reads that are not shuffled, also gets every open, and is not safe
// for concurrent use either.
//
// Each list has heads: the places at which a reader may continue. An open continues a head if it lies a step after
// it: one position, or a stride that a process used several times. Evidence is counted in bits, as for shuffles, and
// summed by Page's rule (E. S. Page, "Continuous Inspection Schemes", Biometrika 41, 1954): an open that continues a
// head adds how much less probable that is by chance, any other subtracts a penalty, and the sum is never below
// [leastBits]. At [wantedSequence] bits there is a run. A false one has odds of 2^-32 per open, and costs some useless
// fetches, since a follower starts with few files. A file that was opened shortly before is no evidence, rather the
// contrary: who reads a few files again and again continues some head each time.
type Sequences struct {
	lists  []*listing
	pass   *trace   // of all files; a finished pass becomes a list
	again  *listing // the previous pass; nil without one
	recent []int    // the latest files
}

// Run is a list being read in sequence.
type Run struct {
	List string        // the list's name, from NewSequences or Add
	Over order.Locator // the list
	// The positions read: from From on, of each World consecutive ones those numbered First to Last.
	From, World, First, Last int
	Head                     int   // the highest position read, plus 1
	Spread                   int   // from the lowest head to the highest
	Read                     []int // the positions read that are evidence of the run
}

// Repeated is the list of the previous pass.
const Repeated = "the pass before"

// Window returns the order of the run's files, up to the given position of its list.
func (r Run) Window(to int) order.Locator {
	return order.Stripe(order.Slice(r.Over, r.From, min(to, r.Over.Len())), r.World, r.First, r.Last).(order.Locator)
}

const (
	wantedSequence = 32
	leastBits      = -8 // below 0: misses before a run count a little
	maxHeads       = 64
	maxSteps       = 3   // strides tried at a time, including 1
	oldHead        = 128 // opens after which an unused head is dropped
	perRepeat      = 0.5 // bits that an open takes of a file opened shortly before
	shareSteps     = 0.7 // of the opens of a run that go on with a head
	enoughVotes    = 3   // for a stride
	nearHead       = 1024
	around         = 32 // positions on either side of an open in which other heads make it less of a surprise
)

// listing is one order, and how it is read.
type listing struct {
	name  string
	over  order.Locator
	opens int
	heads []place
	last  map[uint32]int // position of each process's last open
	steps []int          // the first is 1
	votes map[int]int    // for strides of a process
	bits  float64
	since []went // opens since the bits were 0
}

type place struct{ pos, at int } // at: the open that led there

type went struct{ pos, step int }

// NewSequences watches for readers of that many files in the order of their numbers.
func NewSequences(name string, files int) *Sequences {
	s := &Sequences{pass: newTrace(Subset{Len: files})}
	s.Add(name, order.Sequential(files))
	return s
}

// Add adds a list to watch. It must not contain a file twice.
func (s *Sequences) Add(name string, over order.Locator) {
	s.lists = append(s.lists, newListOf(name, over))
}

func newListOf(name string, over order.Locator) *listing {
	return &listing{name: name, over: over, last: map[uint32]int{}, steps: []int{1}, votes: map[int]int{}}
}

// Open processes an open of a file. found says that its reader goes through a list; it is repeated, for the opens
// since, as long as it does so. fits says that the open belongs to such a run, and so to no shuffle.
func (s *Sequences) Open(process uint32, file int) (run Run, found, fits bool) {
	repeat := slices.Contains(s.recent, file)
	s.recent = append(s.recent, file)
	if len(s.recent) > min(oldHead, s.pass.subset.Len/2) {
		s.recent = s.recent[1:]
	}
	hear := func(l *listing, process uint32, file int) {
		if repeat {
			l.less(perRepeat)
			fits = fits || l.bits >= wantedSequence/2 && l.over.Find(file, 0) >= 0
			return
		}
		r, ok, fit := l.open(process, file)
		if fits = fits || fit; ok {
			run, found = r, true
		}
	}
	epoch, before := s.pass.epoch, s.pass.opens
	s.pass.add(Open{process, uint32(file)})
	if s.pass.epoch != epoch { // a new pass has begun, some opens ago: they belong to both
		files := make([]uint32, len(before))
		for i, o := range before {
			files[i] = o.Sample
		}
		s.again = newListOf(Repeated, order.Index(order.List(files)))
		for _, o := range s.pass.opens {
			hear(s.again, o.Process, int(o.Sample))
		}
	} else if s.again != nil {
		hear(s.again, process, file)
	}
	for _, l := range s.lists { // these last: a named list says more
		hear(l, process, file)
	}
	return run, found, fits
}

func (l *listing) open(process uint32, file int) (run Run, found, fits bool) {
	pos := l.over.Find(file, 0)
	if pos < 0 {
		return run, false, false
	}
	l.opens++
	last, known := l.last[process]
	if len(l.last) == maxProcesses {
		clear(l.last)
	}
	l.last[process] = pos
	if known {
		l.vote(pos - last)
	}
	l.heads = slices.DeleteFunc(l.heads, func(h place) bool { return l.opens-h.at > oldHead })
	head, step := l.goesOn(pos, last, known)
	if head < 0 {
		// A worker begins another batch not far from the other workers.
		fits = l.bits >= wantedSequence/2 && slices.ContainsFunc(l.heads, func(h place) bool {
			return max(pos-h.pos, h.pos-pos) <= nearHead
		})
		l.less(-math.Log2(1 - shareSteps))
		if len(l.heads) == maxHeads {
			l.heads = slices.Delete(l.heads, 0, 1)
		}
		l.heads = append(l.heads, place{pos, l.opens})
		return run, false, fits
	}
	near := -1 // other heads: who wanders stays near some
	for _, h := range l.heads {
		if max(pos-h.pos, h.pos-pos) <= around {
			near++
		}
	}
	chance := max(float64(len(l.heads))/float64(l.over.Len()), float64(near)/(2*around)) * float64(len(l.steps))
	l.bits = max(leastBits, l.bits+math.Log2(shareSteps/min(chance, 1)))
	l.heads = append(slices.Delete(l.heads, head, head+1), place{pos, l.opens}) // the latest last
	l.since = append(l.since, went{pos, step})
	if l.bits < wantedSequence {
		return run, false, l.bits >= wantedSequence/2
	}
	run = l.run()
	l.bits, l.since = wantedSequence/2, l.since[:0]
	return run, true, true
}

func (l *listing) less(bits float64) {
	if l.bits = max(leastBits, l.bits-bits); l.bits <= 0 {
		l.since = l.since[:0]
	}
}

// goesOn returns the head that an open continues, -1 if none, and by which step. A process continues its own last
// open first, by any stride.
func (l *listing) goesOn(pos, last int, known bool) (head, step int) {
	at := func(p int) int { return slices.IndexFunc(l.heads, func(h place) bool { return h.pos == p }) }
	if known && slices.Contains(l.steps, pos-last) {
		if head = at(last); head >= 0 {
			return head, pos - last
		}
	}
	for _, step = range l.steps {
		if head = at(pos - step); head >= 0 {
			return head, step
		}
	}
	return -1, 0
}

// vote counts a stride of a process. The most frequent are tried.
func (l *listing) vote(d int) {
	if d <= 1 || d > maxWorld {
		return
	}
	if len(l.votes) > 4*maxHeads {
		clear(l.votes)
	}
	if l.votes[d]++; l.votes[d] < enoughVotes || slices.Contains(l.steps, d) {
		return
	}
	if len(l.steps) < maxSteps {
		l.steps = append(l.steps, d)
		return
	}
	rarest := slices.MinFunc(l.steps[1:], func(a, b int) int { return l.votes[a] - l.votes[b] })
	if l.votes[d] > l.votes[rarest] {
		l.steps[slices.Index(l.steps, rarest)] = d
	}
}

// run describes the positions read since the bits were 0.
func (l *listing) run() Run {
	count := map[int]int{}
	r := Run{List: l.name, Over: l.over, From: l.over.Len(), World: 1}
	for _, w := range l.since {
		count[w.step]++
		before := w.pos - w.step // the first time, where a worker began
		r.From, r.Head = min(r.From, before), max(r.Head, w.pos+1)
		if !slices.Contains(r.Read, before) {
			r.Read = append(r.Read, before)
		}
		r.Read = append(r.Read, w.pos)
	}
	for step, n := range count {
		if 2*n > len(l.since) {
			r.World = step
		}
	}
	lowest := r.Head
	for _, h := range l.heads {
		if h.pos >= r.From && h.pos < r.Head {
			lowest = min(lowest, h.pos)
		}
	}
	r.Spread = r.Head - lowest
	if r.World == 1 {
		return r
	}
	r.From -= r.From % r.World
	r.First = r.World
	for _, w := range l.since {
		if w.step == r.World {
			r.First, r.Last = min(r.First, w.pos%r.World), max(r.Last, w.pos%r.World)
		}
	}
	if r.Last-r.First == r.World-1 {
		r.World, r.First, r.Last = 1, 0, 0
	}
	return r
}
