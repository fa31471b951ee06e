package infer

import "slices"

// maxSubsets bounds the subsets that are distinguished, including the whole.
const maxSubsets = 16

// Change says what an open, or a finding, has changed.
type Change uint8

const (
	None     Change = iota
	Locked          // there is an order now, or a new one
	Widened         // the order has more ranks than were known
	Followed        // the reader has gone on to another epoch of the source: see Detector.Epoch
	Unlocked        // the reader no longer follows the order, and its order is unknown
)

// Detector turns opens into findings. It is not safe for concurrent use.
//
// A lock is checked by the same model that found it. An open speaks against it if an unrelated open would be at least
// as probable; then it starts, or continues, a doubt. A doubt is first compared with the possible successors of the
// lock's source: an epoch from the page cache takes no longer than starting a search. Doubt ends the lock after
// maxDoubt such opens in a row: a reader of the order makes one in 20 at most, and 24 in a row with odds of 2^-100.
// Scans, file after file of the listing, come from other programs.
type Detector struct {
	traces []*trace // of the whole, and of each folder
	wholes int      // consecutive searches of all seeds without a finding

	lock   *lock
	doubt  *trace     // opens against the lock
	run    int        // of opens against the lock in a row
	calm   int        // of opens for the lock in a row
	scans  int        // opens of scans, without one that fits the lock
	away   int        // opens outside the lock's subset, without one that fits the lock
	reread int        // repeated opens among the doubt's
	latest [16]uint32 // samples opened last + 1, as a ring
	opens  int
	known  []Known // earlier findings, the latest first
}

// Known is a source found earlier, and the folder whose samples it shuffles.
type Known struct {
	Folder string `json:"folder,omitempty"`
	Source Source `json:"source"`
}

const maxKnown = 64

// Remember sets the findings of an earlier run, the latest first.
func (d *Detector) Remember(known []Known) { d.known = slices.Clone(known[:min(len(known), maxKnown)]) }

// Known returns the findings to pass to Remember in a later run. They change with a Lock only.
func (d *Detector) Known() []Known { return slices.Clone(d.known) }

func (d *Detector) learn(k Known) {
	d.known = slices.DeleteFunc(d.known, func(o Known) bool { return o == k })
	d.known = slices.Insert(d.known, 0, k)[:min(len(d.known)+1, maxKnown)]
}

func (d *Detector) sources(folder string) (list []Source) {
	for _, k := range d.known {
		if k.Folder == folder {
			list = append(list, k.Source)
		}
	}
	return list
}

// lock is a finding being followed.
type lock struct {
	finding Finding
	epoch   int      // of the finding's source, that is being read
	place   []uint32 // position of each sample in the permutation, whatever the rank
	model   *model
	outside int // opens of ranks that are not among the finding's
}

// tries says when the next search of a trace is due.
type tries struct {
	usual, small, whole int // number of opens
}

const (
	firstTry = 12
	smallTry = 64
	wholeTry = 96
	// firstDoubt is the number of opens against a lock that are first examined.
	firstDoubt = 8
	// maxWholes is how many searches of all seeds may fail before they are given up: the trainer does not shuffle as
	// torch does.
	maxWholes = 4
	// maxDoubt is how many opens in a row that do not fit end a lock.
	maxDoubt = 24
	// patience is how many times as many are allowed if that costs little.
	patience = 8
	// calmed is the number of fitting opens after which a doubt was noise.
	calmed = 32
	// maxAway is how many opens of other files end a lock, unless an epoch has more: a validation pass has fewer.
	maxAway = 10_000
)

// NewDetector returns a detector for a mount with the given subsets, the first of them the whole. Of more than 16 it
// uses the largest.
func NewDetector(subsets []Subset) *Detector {
	d := &Detector{}
	if len(subsets) > maxSubsets {
		folders := slices.Clone(subsets[1:])
		slices.SortStableFunc(folders, func(a, b Subset) int { return b.Len - a.Len })
		subsets = append(subsets[:1:1], folders[:maxSubsets-1]...)
	}
	for _, s := range subsets {
		if s.Len > 1 && s.Len <= maxSubset {
			d.traces = append(d.traces, newTrace(s))
		}
	}
	return d
}

// Open processes an open. Its time does not depend on the dataset: mostly less than a microsecond, and about a
// millisecond for each of some 5 to 65 shuffles when a doubt is examined.
func (d *Detector) Open(o Open) Change {
	if d.lock == nil {
		d.note(o)
		return None
	}
	before := d.run
	if c := d.check(o); c != None || d.run <= before {
		return c
	}
	return d.follow()
}

func (d *Detector) note(o Open) {
	for _, t := range d.traces {
		if t.subset.holds(o.Sample) {
			t.add(o)
		}
	}
}

// check compares an open with the order in force.
func (d *Detector) check(o Open) Change {
	k := d.lock
	s := k.finding.Subset
	if !s.holds(o.Sample) {
		if d.away++; d.away > max(maxAway, s.Len) {
			return d.unlock()
		}
		return None
	}
	pos := int(k.place[int(o.Sample)-s.First])
	m := k.model
	r, from := m.paced(o.Process, pos)
	scan := d.scan(o.Sample)
	switch {
	case r != nil && slices.Contains(r.places, pos):
		return None // opened again
	case m.read.has(pos):
		if from < 0 {
			d.reread++
			return d.against(o, scan)
		}
		r.places[from] = pos // another process has read it before
	case from < 0 && scan:
		m.read.add(pos)
		m.count++
		return d.against(o, scan)
	default:
		if len(m.readers) >= maxProcesses {
			clear(m.readers)
		}
		if m.open(o.Process, pos, s.Len-m.count) < 0 {
			return d.against(o, scan)
		}
	}
	d.away, d.scans = 0, 0
	if d.run--; from >= 0 || d.run < 0 {
		d.run = 0
	}
	if d.calm++; d.calm == calmed && len(d.doubt.opens) > 0 {
		d.doubt.begin(nil)
		d.reread = 0
	}
	if rank := pos % k.finding.World; rank < k.finding.First || rank > k.finding.Last {
		if k.outside++; k.outside >= 4 {
			k.outside = 0
			f := &k.finding
			if f.First, f.Last = min(f.First, rank), max(f.Last, rank); f.Last-f.First == f.World-1 {
				f.World, f.First, f.Last = 1, 0, 0
			}
			return Widened
		}
	}
	return None
}

// scan reports whether the open continues one of the latest by a small step in the listing.
func (d *Detector) scan(sample uint32) (is bool) {
	const gap = 4
	for _, l := range d.latest {
		is = is || l > 0 && sample+1 > l && sample+1 <= l+gap
	}
	d.latest[d.opens%len(d.latest)] = sample + 1
	d.opens++
	return is
}

// against records an open that speaks against the order in force.
func (d *Detector) against(o Open, scan bool) Change {
	d.calm = 0
	if scan {
		d.scans++
	} else {
		d.doubt.add(o)
		d.run++
	}
	limit := maxDoubt
	if k := d.lock; k.finding.Source.Kind != Drawn && k.model.count >= k.expected()*7/8 {
		limit = patience * maxDoubt // the epoch is finished, and the next one is known
	}
	if d.run < limit && d.scans < patience*limit {
		return None
	}
	return d.unlock()
}

// expected is how many samples an epoch reads.
func (k *lock) expected() int {
	f := k.finding
	return f.Subset.Len / f.World * (f.Last - f.First + 1)
}

func (d *Detector) unlock() Change {
	first, opens := d.doubt.subset.First, d.doubt.opens
	d.learn(Known{d.lock.finding.Subset.Folder, d.lock.source()}) // of the epoch that was read last
	d.lock, d.doubt = nil, nil
	for _, t := range d.traces {
		t.begin(nil)
	}
	for _, o := range opens {
		o.Sample += uint32(first)
		d.note(o)
	}
	return Unlocked
}

// Stale reports whether the search's findings can no longer be of use.
func (d *Detector) Stale(s *Search) bool {
	return s.epoch != s.trace.epoch || d.lock != nil
}

// Next returns the search that is due and not running yet, nil if there is none. The caller runs it, or drops it. A
// search of the usual seeds waits for no other, so that a few more opens are used while small ones are tried; one of
// all seeds waits for those of small ones.
func (d *Detector) Next(running func(Depth) bool) *Search {
	if d.lock != nil {
		return nil
	}
	if !running(Usual) {
		var best *trace
		for _, t := range d.traces {
			if len(t.opens) >= max(firstTry, t.tries.usual) && t.shuffled() {
				// A folder before the whole, since the whole's numbers are then less probable.
				if best == nil || t.subset.Len < best.subset.Len {
					best = t
				}
			}
		}
		if best != nil {
			return d.search(best, Usual)
		}
	}
	if running(Small) {
		return nil
	}
	for _, t := range d.traces {
		if len(t.opens) >= max(smallTry, t.tries.small) && t.shuffled() {
			return d.search(t, Small)
		}
	}
	if running(Whole) {
		return nil
	}
	for _, t := range slices.Backward(d.traces) {
		if len(t.opens) >= max(wholeTry, t.tries.whole) && t.shuffled() && d.wholes < maxWholes {
			return d.search(t, Whole)
		}
	}
	return nil
}

// search returns a search of the trace, and sets when the next is due.
func (d *Detector) search(t *trace, depth Depth) *Search {
	n := len(t.opens)
	again, due := max(n*3/2, min(2*n, smallTry)), &t.tries.usual
	switch depth {
	case Small:
		again, due = 4*n, &t.tries.small
	case Whole:
		again, due = 16*n, &t.tries.whole
		d.wholes++
	}
	if *due = again; n > maxLook && depth != Whole {
		*due = maxTrace + 1
	}
	return &Search{trace: t, epoch: t.epoch, Task: Task{Depth: depth, Subset: t.subset,
		Opens: slices.Clone(t.opens[:min(n, maxLook)]), Known: d.sources(t.subset.Folder)}}
}

// follow looks for the start of another epoch: in consecutive opens against this one, and, if other opens come in
// between, in all against it, whenever they have grown by half.
func (d *Detector) follow() Change {
	t := d.doubt
	opens := t.opens
	switch n := len(opens); {
	case d.run >= firstDoubt && d.run <= maxDoubt && d.run%4 == 0:
		opens = opens[max(0, n-d.run):]
	case n >= max(firstDoubt, t.tries.usual) && n <= maxLook:
		t.tries.usual = n * 3 / 2
	default:
		return None
	}
	f, found := nearest(d.lock.source(), opens, t.subset)
	if !found {
		return None
	}
	return d.adopt(opens, f)
}

// source returns the source, counted from the epoch being read.
func (k *lock) source() Source { return k.finding.Source.from(k.epoch) }

// Lock puts a finding of the search in force. Opens during the search count.
func (d *Detector) Lock(s *Search, f Finding) Change {
	if d.Stale(s) {
		return None // the reader has gone on since
	}
	return d.adopt(s.trace.opens, f)
}

// adopt puts a finding from the given opens in force.
func (d *Detector) adopt(opens []Open, f Finding) Change {
	change := Locked
	epoch := 0
	if old := d.lock; old != nil {
		f.World, f.First, f.Last = old.finding.World, old.finding.First, old.finding.Last
		now, _ := f.Source.Shuffle(0)
		for e := old.epoch; e <= old.epoch+1; e++ {
			if sh, ok := old.finding.Source.Shuffle(e); ok && sh == now {
				if e == old.epoch && (d.run < firstTry/2 || 2*d.reread < len(opens)) {
					return None // it still is being read
				}
				change, epoch = Followed, e
				f.Source = old.finding.Source
				break
			}
		}
	}
	if change == Locked {
		d.learn(Known{f.Subset.Folder, f.Source})
	}
	d.wholes, d.run, d.calm, d.away, d.reread = 0, 0, 0, 0, 0
	d.lock = newLock(f, epoch)
	d.doubt = newTrace(f.Subset)
	for i, o := range opens {
		o.Sample += uint32(f.Subset.First)
		if i == 0 {
			d.lock.finding.Opened = o
		}
		d.run, d.scans = min(d.run, maxDoubt/2), 0 // opens already examined do not end it
		d.check(o)
	}
	return change
}

func newLock(f Finding, epoch int) *lock {
	all := f
	all.World, all.First, all.Last = 1, 0, 0
	o := all.Order(epoch)
	k := &lock{finding: f, epoch: epoch, place: make([]uint32, f.Subset.Len),
		model: newModel(f.Subset.Len, f.Subset.Len, f.Together)}
	for pos := range o.Len() {
		k.place[o.At(pos)-f.Subset.First] = uint32(pos)
	}
	return k
}

// Finding returns the finding in force, and the epoch of its source being read.
func (d *Detector) Finding() (f Finding, epoch int, ok bool) {
	if d.lock == nil {
		return Finding{}, 0, false
	}
	return d.lock.finding, d.lock.epoch, true
}
