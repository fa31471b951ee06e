package run

import (
	"cmp"
	"iter"
	"maps"
	"math"
	"slices"
	"sync/atomic"

	"github.com/shoalfs/shoal/cache"
	"github.com/shoalfs/shoal/prefetch"
	"github.com/shoalfs/shoal/prefetch/order"
)

// things are what the numbers of a stream's orders stand for: the files of a volume, or ranges of them.
type things interface {
	Extents(n int) int
	ExtentBytes(n, x int) int64
	Claim(a *cache.Account, n, x int) bool
	Where(n, x int) cache.Residence
	Residence(n int) cache.Residence
	Hand(a *cache.Account, n int)
	Spend(n int)
	Unspent() []int
}

// Range is N bytes of a file from Off, which lie in it.
type Range struct {
	File   int
	Off, N int64
}

// Ranges are ranges with numbers, for orders of which one stream has all. The walk treats them as files that are read
// once. They are followed by reads, of which the kernel makes what it likes: larger ones, and none for what it has.
type Ranges struct {
	volume *cache.Volume
	table  atomic.Pointer[rangeTable]
	// A page fault of a memory map has the kernel read what lies around it, and the reader waits for all of that.
	// before and after are how far such reads went beyond a range, at most, in bytes. That is fetched with it.
	before, after atomic.Int64

	// Guarded by the runner's lock.
	staged map[int]bool // numbers of which something was fetched since they were spent
	open   []int        // those that a read has reached, and may go on in; the latest last
	// the position of what was read last: the head may be further, at what the kernel has read around that
	at    int
	reads int
	far   bool         // the last read was far from what was due: one alone is the kernel's, which reads on
	known map[int]bool // those of which the kernel has got all bytes before they were due: it will not ask for them
}

// rangeTable has the ranges by number, and the numbers by file and offset. It does not change.
type rangeTable struct {
	all     []Range
	starts  map[int][]uint32
	longest map[int]int64 // by file
}

// mostAround is how much is fetched beyond either end of a range, at most.
const mostAround = 512 << 10

// leastOpen is how many ranges that a read has reached stay in memory for further reads of them, at least. With much
// memory it is a quarter of the stream's share, up to 16 times as many.
const leastOpen = 64

// mostSoon is how many positions ahead of the reader a range is read, at most, that it has not asked for: it lies
// beside what it wanted.
const mostSoon = 1 << 10

// NewRanges returns a set of ranges of files of a volume, and their numbers.
func NewRanges(v *cache.Volume, list []Range) (*Ranges, []uint32) {
	t, numbers := (&rangeTable{}).renumber(list, nil)
	r := &Ranges{volume: v, staged: map[int]bool{}, known: map[int]bool{}}
	r.table.Store(t)
	return r, numbers
}

// Renumber gives the ranges of the stream's next plan numbers. Those of plans that are still to be read keep theirs.
// Calls must not overlap.
func (s *Stream) Renumber(list []Range) []uint32 {
	r := s.Ranges
	s.runner.mu.Lock()
	live := s.tracker.Orders()
	s.runner.mu.Unlock()
	old := r.table.Load()
	t, numbers := old.renumber(list, live)
	s.runner.mu.Lock()
	defer s.runner.mu.Unlock()
	for n := range r.staged {
		if t.all[n] != old.all[n] {
			r.Spend(n)
		}
	}
	clear(r.known)
	r.table.Store(t)
	return numbers
}

// renumber returns a table of ranges, and of those of the live orders, with the ranges' numbers.
func (t *rangeTable) renumber(list []Range, live []order.Locator) (*rangeTable, []uint32) {
	next := &rangeTable{all: slices.Clone(t.all), starts: map[int][]uint32{}, longest: map[int]int64{}}
	used, numbers := make([]bool, len(t.all)), map[Range]uint32{}
	for _, o := range live {
		for pos := range o.Len() {
			n := o.At(pos)
			used[n] = true
			numbers[t.all[n]] = uint32(n)
		}
	}
	out, free := make([]uint32, len(list)), 0
	for i, one := range list {
		n, ok := numbers[one]
		if !ok {
			for free < len(used) && used[free] {
				free++
			}
			if n = uint32(free); free == len(used) {
				next.all, used = append(next.all, one), append(used, true)
			}
			next.all[n], used[n], numbers[one] = one, true, n
		}
		out[i] = n
	}
	for one, n := range numbers {
		next.starts[one.File] = append(next.starts[one.File], n)
		next.longest[one.File] = max(next.longest[one.File], one.N)
	}
	for _, s := range next.starts {
		slices.SortFunc(s, func(a, b uint32) int { return cmp.Compare(next.all[a].Off, next.all[b].Off) })
	}
	return next, out
}

// kernelHas is Options.Has.
func (r *Ranges) kernelHas(n int) bool { return r.known[n] }

// around is range n with what the kernel reads around it.
func (r *Ranges) around(n int) (file int, off, end int64) {
	one := r.table.Load().all[n]
	return one.File, max(one.Off-r.before.Load(), 0),
		min(one.Off+one.N+r.after.Load(), r.volume.Manifest().Size(one.File))
}

// piece is what range n has in its extent x, counted from its first one.
func (r *Ranges) piece(n, x int) cache.Range {
	file, off, end := r.around(n)
	extent := int(off/cache.ExtentSize) + x
	begin := int64(extent) * cache.ExtentSize
	off, end = max(off, begin), min(end, begin+cache.ExtentSize)
	return cache.Range{File: file, Extent: extent, Off: int(off - begin), N: int(end - off)}
}

// Extents implements things.
func (r *Ranges) Extents(n int) int {
	_, off, end := r.around(n)
	return int((end-1)/cache.ExtentSize-off/cache.ExtentSize) + 1
}

// ExtentBytes implements things.
func (r *Ranges) ExtentBytes(n, x int) int64 { return r.piece(n, x).Bytes(r.volume) }

// Claim implements things.
func (r *Ranges) Claim(a *cache.Account, n, x int) bool {
	r.staged[n] = true
	return r.volume.ClaimRange(a, r.piece(n, x))
}

// Where implements things.
func (r *Ranges) Where(n, x int) cache.Residence { return r.volume.WhereRange(r.piece(n, x)) }

// Residence implements things.
func (r *Ranges) Residence(n int) cache.Residence {
	at := cache.OnDisk
	for x := range r.Extents(n) {
		at = min(at, r.Where(n, x))
	}
	return at
}

// Hand implements things: they are one stream's.
func (r *Ranges) Hand(*cache.Account, int) {}

// Spend implements things. What another range that was fetched has, too, stays.
func (r *Ranges) Spend(n int) {
	delete(r.staged, n)
	for x := range r.Extents(n) {
		r.spend(n, x)
	}
}

func (r *Ranges) spend(n, x int) {
	p := r.piece(n, x)
	r.volume.SpendRange(p, func(off, end int64) bool {
		for m := range r.staging(p.File, off, end) {
			if m != n {
				return true
			}
		}
		return false
	})
}

// staging yields the ranges of which something was fetched, and that need bytes of a file from off to end.
func (r *Ranges) staging(file int, off, end int64) iter.Seq[int] {
	return func(yield func(int) bool) {
		for n := range r.table.Load().touching(file, off-r.after.Load(), end+r.before.Load()) {
			if r.staged[n] && !yield(n) {
				return
			}
		}
	}
}

// Unspent implements things.
func (r *Ranges) Unspent() []int { return slices.Collect(maps.Keys(r.staged)) }

// touching yields the ranges with bytes of a file from off to end.
func (t *rangeTable) touching(file int, off, end int64) iter.Seq[int] {
	return func(yield func(int) bool) {
		starts := t.starts[file]
		from, _ := slices.BinarySearchFunc(starts, off-t.longest[file]+1, func(n uint32, off int64) int {
			return cmp.Compare(t.all[n].Off, off)
		})
		for _, n := range starts[from:] {
			one := t.all[n]
			if one.Off >= end || one.Off+one.N > off && !yield(int(n)) {
				return
			}
		}
	}
}

// Read says that a process (0: unknown) has read n bytes of a file from off. Streams of ranges follow that.
func (r *Runner) Read(v *cache.Volume, file int, off, n int64, process uint32, streams func() []*Stream) {
	if r.ranged.Load() == 0 || n <= 0 {
		return
	}
	follow := slices.Clone(streams())
	r.event(func(*prefetch.Executor) {
		follow = slices.DeleteFunc(follow, func(s *Stream) bool {
			return s.Ranges == nil || s.Volume != v || !slices.Contains(r.streams, s)
		})
		try(follow, process, func(s *Stream) []int {
			return slices.DeleteFunc(slices.Collect(s.Ranges.table.Load().touching(file, off, off+n)),
				func(n int) bool { return slices.Contains(s.Ranges.open, n) })
		})
		for _, s := range follow {
			s.readTo(file, off, off+n)
		}
	})
}

// readTo follows a read of a file from off to end: in the ranges that it covers, if they are due; and in the one that
// is due first of those of which it has a part, or one that was read if that is far ahead. What it goes on in is no
// news. The runner's lock is held.
func (s *Stream) readTo(file int, off, end int64) {
	r, x := s.Ranges, &s.runner.x
	t := r.table.Load()
	reach := source{s.of, s}.Ahead() + s.spread
	due := max(s.tracker.Frontier(), r.at) + min(reach, mostSoon)
	type coming struct{ n, pos int }
	var reached []coming
	var covered []int
	first, again, goesOn := coming{-1, math.MaxInt}, -1, false
	for n := range t.touching(file, off, end) {
		one := t.all[n]
		if slices.Contains(r.open, n) { // it goes through a long one
			if goesOn = true; one.Off+one.N > end && off/cache.ExtentSize < end/cache.ExtentSize {
				_, from, _ := r.around(n)
				r.spend(n, int(off/cache.ExtentSize-from/cache.ExtentSize))
			}
			continue
		}
		c := coming{n, s.comes(n)}
		whole := one.Off >= off && one.Off+one.N <= end
		if whole && c.pos <= due {
			reached = append(reached, c)
			continue
		}
		if whole && c.pos < never {
			covered = append(covered, n)
		}
		if c.pos < first.pos {
			first = c
		}
		if c.pos >= s.tracker.Order().Len() {
			again = n
		}
	}
	if first.pos > due && again >= 0 { // sooner one that was read than one that is far ahead
		first = coming{again, never}
	}
	alone := len(reached) == 0 && !goesOn
	far := alone && first.pos > due && first.pos < never
	if first.n >= 0 && (first.pos <= due || alone && (!far || r.far)) {
		reached = append(reached, first)
		if r.kernelHas(first.n) {
			clear(r.known) // it has dropped them
		}
	}
	r.far = far
	slices.SortFunc(reached, func(a, b coming) int { return a.pos - b.pos })
	where := s.tracker.Position()
	if len(reached) > 0 && reached[0].pos < where.Len {
		r.at = max(r.at, reached[0].pos)
	}
	for _, c := range reached {
		x.Open(r, c.n)
		r.open = append(r.open, c.n)
		s.follow(c.n)
	}
	if now := s.tracker.Position(); now.Epoch != where.Epoch || now.Pass != where.Pass {
		r.at = s.tracker.Frontier()
		s.closeRanges(len(reached)) // or they would not count when they are read again
	}
	r.open = slices.DeleteFunc(r.open, func(n int) bool {
		one := t.all[n]
		last := one.File == file && one.Off < end && one.Off+one.N > off && one.Off+one.N <= end
		if last {
			x.Close(r, n)
		}
		return last
	})
	s.closeRanges(s.mostOpen())
	s.leaveBehind(2 * reach)
	for _, n := range covered {
		if r.known[n] = true; len(reached) == 0 || reached[0].n != n { // one far ahead is reached alone
			r.Spend(n)
		}
	}
	if len(reached) == 1 && t.all[reached[0].n].Off > off {
		one := t.all[reached[0].n]
		s.readAround(one.Off-off, end-one.Off-one.N)
	}
}

// mostOpen is how many ranges stay open: see leastOpen. The runner's lock is held.
func (s *Stream) mostOpen() int {
	wide := s.mean + s.Ranges.before.Load() + s.Ranges.after.Load() + 1
	share := float64(source{s.of, s}.Share()) * float64(s.mean) / float64(wide)
	return min(max(leastOpen, int(share/4)), 16*leastOpen)
}

// leaveBehind gives up what lies far behind the reader, who has not asked for it: the kernel has it, perhaps from
// before the plan. It looks once in a while, as it looks at all that is staged.
func (s *Stream) leaveBehind(far int) {
	r := s.Ranges
	if r.reads++; r.reads%leastOpen != 0 {
		return
	}
	for n := range r.staged {
		if s.comes(n) < r.at-far {
			r.Spend(n)
		}
	}
}

// readAround notes how far a read went beyond a range. The walk goes back for what it lacks, if that is news.
func (s *Stream) readAround(before, after int64) {
	r := s.Ranges
	if before <= r.before.Load() && after <= r.after.Load() || max(before, after) > mostAround {
		return
	}
	r.before.Store(max(before, r.before.Load()))
	r.after.Store(max(after, r.after.Load()))
	s.plan()
}

// never is later than all positions.
const never = math.MaxInt - 1

// comes returns the position at which the reader gets to a range: in this plan, or behind it in the next one; or never.
func (s *Stream) comes(n int) int {
	cur, next := s.walk.Orders()
	for pos := cur.Find(n, s.tracker.Frontier()); pos >= 0; pos = cur.Find(n, pos+1) {
		if !s.tracker.Read(pos) {
			return pos
		}
	}
	if next != nil {
		if pos := next.Find(n, 0); pos >= 0 {
			return cur.Len() + pos
		}
	}
	return never
}

// closeRanges says that all but the latest ranges that were reached have been read.
func (s *Stream) closeRanges(but int) {
	r := s.Ranges
	for len(r.open) > but {
		n := r.open[0]
		r.open = r.open[1:]
		s.runner.x.Close(r, n)
	}
}
