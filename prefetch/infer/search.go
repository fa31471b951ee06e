package infer

import (
	"math"
	"slices"

	"github.com/shoalfs/shoal/prefetch/infer/seedsearch"
	"github.com/shoalfs/shoal/prefetch/order"
)

// Depth says how far a search goes.
type Depth uint8

const (
	// Usual tries the seeds that people choose, and their successors. It takes a fraction of a second.
	Usual Depth = iota
	// Small tries seeds below 2^20, and more successors of the usual seeds. It takes some seconds.
	Small
	// Whole tries all seeds. It takes a minute or two.
	Whole
)

var depthNames = [...]string{"usual seeds", "small seeds", "all seeds"}

func (d Depth) String() string { return depthNames[d] }

// Task is the input of a search. It is plain data, so that another process can run it.
type Task struct {
	Depth  Depth
	Subset Subset
	Opens  []Open   // samples are numbered from the subset's first
	Known  []Source // of shuffles found earlier: they, and their successors, are tried first
}

// Search looks for the shuffle behind a Detector's opens.
type Search struct {
	Task
	steps []func(stopped func() bool, found func(Finding))

	trace *trace
	epoch int
}

// NewSearch returns a search for a task.
func NewSearch(t Task) *Search { return &Search{Task: t} }

// Steps returns the number of steps. The first call computes them.
func (s *Search) Steps() int {
	if s.steps != nil {
		return len(s.steps)
	}
	switch s.Depth {
	case Usual:
		s.addKnown(newLook(s.Opens, s.Subset, wantedKnown))
		s.addUsual(newLook(s.Opens, s.Subset, wanted))
	case Small:
		s.addSmall(newLook(s.Opens, s.Subset, wanted))
	case Whole:
		s.addWhole(newLook(s.Opens, s.Subset, wanted))
	}
	return len(s.steps)
}

// Run runs a step, and calls found for its findings. Steps may run in parallel, in any order, and the first finding
// is enough. A step takes some ms, but a thousand times that if nearly all samples were opened and every seed must be
// weighed; it calls stopped every few ms, and then ends early.
func (s *Search) Run(step int, stopped func() bool, found func(Finding)) {
	s.steps[step](stopped, found)
}

// usualSeeds are tried first: people's favorites, besides 0 to 1000.
var usualSeeds = func() (seeds []uint32) {
	seeds = []uint32{42, 1234, 1337, 3407, 2147483647, 12345, 123456, 123456789, 31337, 65535, 65536, 4294967295,
		10007, 20000, 8888, 6666, 7777, 9999, 5555, 4444, 3333, 2222, 1111, 54321, 114514, 3141, 31415, 314159, 2718,
		271828, 1729, 8675309, 19260817}
	for year := uint32(2010); year <= 2030; year++ {
		seeds = append(seeds, year)
	}
	return seeds
}()

const (
	smallSeeds = 1001    // 0 to 1000 are tried in every way
	someSmall  = 32      // of which these, and the usual ones, with ranks of any world
	someEpochs = 100     // after which of a usual seed a run may have been resumed
	someWords  = 32      // of a default generator: what seeds the samplers of the first epochs
	allSmall   = 1 << 20 // tried as they are
)

// look is the input of a search step: the opens of one subset.
type look struct {
	subset Subset
	opens  []Open
	index  map[uint32]int32 // of each sample in opens
	member setBits          // samples in opens
	next   []int32          // the same process's next open; -1 if there is none
	blind  bool             // processes cannot be distinguished
	wanted float64
}

// maxLook is how many opens are used. More do not make a seed more certain.
const maxLook = 4096

func newLook(opens []Open, subset Subset, wanted float64) *look {
	opens = slices.Clone(opens[:min(len(opens), maxLook)])
	l := &look{subset: subset, opens: opens, index: make(map[uint32]int32, len(opens)), member: newSet(subset.Len),
		next: make([]int32, len(opens)), wanted: wanted}
	latest := map[uint32]int32{}
	for i, o := range opens {
		l.index[o.Sample] = int32(i)
		l.member.add(int(o.Sample))
		l.next[i] = -1
		if before, ok := latest[o.Process]; ok {
			l.next[before] = int32(i)
		}
		latest[o.Process] = int32(i)
		l.blind = l.blind || o.Process == 0
	}
	return l
}

// likely is a quick test of the beginning of a permutation: whether more of it was opened than chance explains, or
// known processes read it by equal steps.
func (l *look) likely(s *scratch, head []uint32) bool {
	var hits [headLen]int32
	n := 0
	for pos, sample := range head {
		if l.member.has(int(sample)) {
			hits[n] = l.index[sample]
			s.at[hits[n]] = int32(pos)
			n++
		}
	}
	const (
		enough = 4
		share  = 6 // one of the strides makes more than that of all steps
	)
	ok := l.many(n)
	if !ok && !l.blind && n > enough {
		var steps [headLen]uint8
		all, most := 0, uint8(0)
		for _, hit := range hits[:n] {
			if next := l.next[hit]; next >= 0 && s.at[next] > s.at[hit] {
				d := s.at[next] - s.at[hit]
				steps[d]++
				all, most = all+1, max(most, steps[d])
			}
		}
		ok = int(most) >= max(enough, all/share)
	}
	for _, hit := range hits[:n] {
		s.at[hit] = -1
	}
	return ok
}

// many reports whether so many opens among a permutation's first headLen samples are more than chance explains.
func (l *look) many(hits int) bool {
	head := float64(min(headLen, l.subset.Len))
	expected := head * float64(len(l.opens)) / float64(l.subset.Len)
	return float64(hits) > min(expected+5*math.Sqrt(expected)+4, head-1)
}

// scratch is reused memory of a step.
type scratch struct {
	stopped func() bool // the result is no longer needed

	at    []int32 // position of each open; -1 between uses
	draws [mtN - mtM]uint32
	head  [headLen]uint32
	swaps *swapped // for a head

	// For as many positions as a reader may have reached.
	far               *swapped
	farDraws, farHead []uint32
}

func (l *look) scratch(stopped func() bool) *scratch {
	s := &scratch{stopped: stopped, at: make([]int32, len(l.opens)), swaps: newSwapped(headLen)}
	for i := range s.at {
		s.at[i] = -1
	}
	return s
}

// try examines a shuffle whose draws are given.
func (l *look) try(s *scratch, draws []uint32, source Source, found func(Finding)) {
	out := s.head[:min(headLen, l.subset.Len)]
	if s.swaps.head(l.subset.Len, draws, out); l.likely(s, out) {
		l.verify(s, source, found)
	}
}

// trySeed is try for a generator that permutes directly after seeding.
func (l *look) trySeed(s *scratch, seed uint32, source Source, found func(Finding)) {
	words(seed, s.draws[:headLen])
	l.try(s, s.draws[:headLen], source, found)
}

// reach is how far ahead of its slowest part a reader may be: four times prefetch.DefaultSpan.
const reach = 1 << 16

func (l *look) verify(s *scratch, source Source, found func(Finding)) {
	if s.stopped() {
		return
	}
	n := l.subset.Len
	if s.far == nil {
		known := min(n, max(reach, 16*len(l.opens)))
		s.far, s.farDraws, s.farHead = newSwapped(known), make([]uint32, known), make([]uint32, known)
	}
	sh, _ := source.Shuffle(0)
	g := order.NewGenerator(uint64(sh.Seed))
	g.Skip(sh.Skip)
	for i := range s.farDraws {
		s.farDraws[i] = g.Random()
	}
	s.far.head(n, s.farDraws, s.farHead)
	hits, near := 0, 0
	for pos, sample := range s.farHead {
		if l.member.has(int(sample)) {
			s.at[l.index[sample]] = int32(pos)
			if hits++; pos < headLen {
				near++
			}
		}
	}
	if float64(hits)*math.Log2(float64(n)) >= l.wanted {
		f := l.weigh(s, source, l.blind)
		if !l.blind && l.many(near) { // threads that take turns are one reader
			if t := l.weigh(s, source, true); t.Reads > 0 && (f.Reads == 0 || t.Bits > f.Bits) {
				f = t
			}
		}
		if f.Reads > 0 {
			found(f)
		}
	}
	for i := range s.at {
		s.at[i] = -1
	}
}

// weigh sums the evidence of the opens at the positions s.at. Without Reads it was never enough.
func (l *look) weigh(s *scratch, source Source, together bool) (f Finding) {
	m := newModel(l.subset.Len, len(s.farHead), together)
	f = Finding{Subset: l.subset, Source: source, Together: together}
	for i, o := range l.opens {
		m.open(o.Process, int(s.at[i]), l.subset.Len-i)
		if f.Reads == 0 && m.bits >= l.wanted {
			f.Reads = i + 1
		}
	}
	f.Bits = m.bits
	f.World, f.First, f.Last = m.ranks()
	if source.Kind == Drawn && m.usualPace() > 1 {
		f.Source.Kind = Successive // several ranks have agreed on it
	}
	return f
}

// near lists the possible successors of a known source's epoch in a trainer's next one, including the same again.
func near(last Source, n int) (list []Source) {
	list = append(list, last)
	switch last.Kind {
	case Successive, Drawn:
		for i := range uint32(8) {
			list = append(list, Source{Kind: Successive, Seed: last.Seed + i + 1})
		}
		if last.Seed == 1 { // a private generator's default seed is 1
			for _, step := range []int{n - 1, 2 * (n - 1)} {
				list = append(list, Source{Private, last.Seed, step, step})
			}
		}
	case Default:
		for step := 1; step <= 64; step++ {
			next := last
			next.Word += step
			if step == 2 || step == 4 {
				next.Step = step // with and without persistent workers
			}
			list = append(list, next)
		}
	case Private:
		for _, step := range []int{n - 1, n + 1, 2 * (n - 1), 2 * n} {
			list = append(list, Source{Private, last.Seed, last.Word + step, step})
		}
	}
	return list
}

func (l *look) tryNear(mem *scratch, last Source, found func(Finding)) {
	for _, source := range near(last, l.subset.Len) {
		l.verify(mem, source, found)
	}
}

// nearest returns the successor of a source of which the opens are an epoch, if any.
func nearest(last Source, opens []Open, subset Subset) (best Finding, ok bool) {
	found := func(f Finding) {
		if !ok || f.Bits > best.Bits {
			best, ok = f, true
		}
	}
	l := newLook(opens, subset, wantedNear)
	mem := l.scratch(func() bool { return false })
	for _, source := range near(last, subset.Len) { // by their heads: 300 times as fast
		l.tryShuffle(mem, source, found)
	}
	if !ok {
		l.tryNear(mem, last, found)
	}
	return best, ok
}

// add appends a step, which gets memory of its own.
func (s *Search) add(l *look, step func(mem *scratch, found func(Finding))) {
	s.steps = append(s.steps, func(stopped func() bool, found func(Finding)) { step(l.scratch(stopped), found) })
}

// addKnown appends a step that tries the known sources' epochs, and one for each of the latest that also finds it in
// the middle of an epoch, and its successors.
func (s *Search) addKnown(l *look) {
	const latest = 4
	s.add(l, func(mem *scratch, found func(Finding)) {
		for _, source := range s.Known {
			epochs := someEpochs
			if source.Kind == Drawn {
				epochs = 1
			}
			for e := range epochs {
				l.tryShuffle(mem, source.from(e), found)
			}
		}
	})
	for _, source := range s.Known[:min(latest, len(s.Known))] {
		s.add(l, func(mem *scratch, found func(Finding)) { l.tryNear(mem, source, found) })
	}
}

// tryShuffle is try for any source.
func (l *look) tryShuffle(s *scratch, source Source, found func(Finding)) {
	sh, _ := source.Shuffle(0)
	if sh.Skip == 0 {
		l.trySeed(s, sh.Seed, source, found)
		return
	}
	g := order.NewGenerator(uint64(sh.Seed))
	g.Skip(sh.Skip)
	d := s.draws[:headLen]
	for i := range d {
		d[i] = g.Random()
	}
	l.try(s, d, source, found)
}

// loaderStep is how many words of a default generator's stream an epoch takes, if nothing else draws
// (order.ManualSeed).
const loaderStep = 4

// addUsual appends the steps of a Usual search, the most probable first.
func (s *Search) addUsual(l *look) {
	n := l.subset.Len
	var all []uint32
	for seed := range uint32(smallSeeds) {
		all = append(all, seed)
	}
	all = append(all, usualSeeds...)
	for chunk := range slices.Chunk(all, 64) {
		s.add(l, func(mem *scratch, found func(Finding)) {
			for _, seed := range chunk {
				l.trySeed(mem, seed, Source{Kind: Successive, Seed: seed}, found)
				d := mem.draws[:headLen+2]
				words(seed, d)
				// A generator of the user's gives the base seed first, and after each epoch a further permutation.
				l.try(mem, d[2:], Source{Private, seed, 2, 2 * n}, found)
			}
		})
	}
	// A rank of a large world has few samples in a permutation's head.
	for _, seed := range append(all[:someSmall:someSmall], usualSeeds...) {
		s.add(l, func(mem *scratch, found func(Finding)) {
			l.verify(mem, Source{Kind: Successive, Seed: seed}, found)
		})
	}
	for chunk := range slices.Chunk(all, 8) {
		s.addWords(l, chunk, 0, someWords)
	}
	for chunk := range slices.Chunk(usualSeeds, 2) {
		s.add(l, func(mem *scratch, found func(Finding)) {
			for _, seed := range chunk {
				for epoch := range uint32(someEpochs) {
					l.trySeed(mem, seed+epoch, Source{Kind: Successive, Seed: seed + epoch}, found)
				}
			}
		})
	}
}

// addWords appends a step that tries the words from..to of the default generator's streams as seeds of a sampler:
// other draws before it are unknown.
func (s *Search) addWords(l *look, seeds []uint32, from, to int) {
	s.add(l, func(mem *scratch, found func(Finding)) {
		for _, seed := range seeds {
			g := order.NewGenerator(uint64(seed))
			g.Skip(from)
			for word := from; word < to; word++ {
				l.trySeed(mem, g.Random(), Source{Default, seed, word, loaderStep}, found)
			}
		}
	})
}

func (s *Search) addSmall(l *look) {
	const chunk = 1 << 8
	for first := uint32(0); first < allSmall; first += chunk {
		s.add(l, func(mem *scratch, found func(Finding)) {
			for seed := first; seed < first+chunk; seed++ {
				l.trySeed(mem, seed, Source{Kind: Successive, Seed: seed}, found)
			}
		})
	}
	for seed := range uint32(smallSeeds) {
		s.addWords(l, []uint32{seed}, someWords, 1024)
	}
	for _, seed := range append([]uint32{0, 1, 2, 3, 7, 10, 100, 123}, usualSeeds...) {
		for from := 1024; from < 1<<15; from += 2048 {
			s.addWords(l, []uint32{seed}, from, from+2048)
		}
	}
}

// addWhole appends the steps of a search of all seeds, for readers of the permutation's beginning: a single process,
// or a world whose rank 0 reads this mount.
func (s *Search) addWhole(l *look) {
	const chunk = 1 << 16
	filter := l.filter()
	for first := uint64(0); first < 1<<32; first += chunk {
		s.addSeeds(l, filter, uint32(first), uint32(first+chunk-1))
	}
}

// addSeeds appends a step that tries the seeds lo to hi that pass the filter.
func (s *Search) addSeeds(l *look, filter seedsearch.Filter, lo, hi uint32) {
	s.add(l, func(mem *scratch, found func(Finding)) {
		seedsearch.Search(filter, lo, hi, func(seed uint32) bool {
			l.trySeed(mem, seed, Source{Kind: Drawn, Seed: seed}, found)
			return true
		})
	})
}

// filter returns the test for all seeds: the first positions of the permutation must be among the first opens of the
// processes. It requires only enough to leave few seeds: with more positions, more of the world's ranks would have to
// be here.
func (l *look) filter() seedsearch.Filter {
	const few = 1 << 21
	n := l.subset.Len
	f := seedsearch.Filter{N: uint32(n)}
	left := float64(1 << 32)
	for pos := 0; pos < min(8, n-1) && left > few; pos++ {
		t := seedsearch.Target{Pos: pos}
		seen := map[uint32]int{}
		for _, o := range l.opens {
			// One more than a single process can have opened before it: another open may come first.
			if seen[o.Process]++; seen[o.Process] <= pos+2 || l.blind && len(t.Samples) < maxBlind {
				t.Samples = append(t.Samples, o.Sample)
			}
		}
		f.Targets = append(f.Targets, t)
		left *= min(1, float64(len(t.Samples))/float64(n))
	}
	return f
}

// maxBlind is how many opens of several workers may come before worker 0 has opened a few.
const maxBlind = 128
