package prefetch

import (
	"maps"
	"slices"
	"testing"

	"github.com/shoalfs/shoal/prefetch/order"
	"pgregory.net/rapid"
)

// world is all that an executor asks about and acts upon, as maps: a store, memory, a disk, and readers.
type world struct {
	t        *rapid.T
	x        Executor
	gate     Gate
	sizes    files
	limit    int64
	used     int64
	extents  map[piece]*holding
	flights  []flight
	walkers  []*walker
	kept     map[piece]bool
	failed   map[piece]bool // left to the reader
	freed    bool           // memory came free, and the executor was not told yet
	open     []item
	fetched  int
	connects int
	ease     int
}

// files has extents of the given lengths, by number.
type files [][]int64

type piece struct{ file, extent int }

// holding is an extent in memory, or on its way.
type holding struct {
	by     *walker // whose account it is on; nil: spent
	flying bool
	size   int64
	since  int
}

type flight struct {
	w *walker
	piece
}

// walker is a walk and its reader.
type walker struct {
	*world
	id     int
	weight float64
	walk   *Walk
	cur    *sitting
	next   order.Locator
}

// sitting is a reader of one pass.
type sitting struct {
	order order.Locator
	read  []bool
	head  int
}

func newSitting(o order.Locator) *sitting { return &sitting{order: o, read: make([]bool, o.Len())} }

func (s *sitting) Frontier() int {
	if i := slices.Index(s.read, false); i >= 0 {
		return i
	}
	return len(s.read)
}
func (s *sitting) Head() int         { return s.head }
func (s *sitting) Read(pos int) bool { return s.read[pos] }
func (s *sitting) Unread(from, to int) (n int) {
	for pos := from; pos < to; pos++ {
		if !s.read[pos] {
			n++
		}
	}
	return n
}

func (w *walker) Extents(file int) int               { return len(w.sizes[file]) }
func (w *walker) ExtentBytes(file, extent int) int64 { return w.sizes[file][extent] }
func (w *walker) Room() (room, free int64)           { return w.limit - w.used, w.limit - w.used }
func (w *walker) Has(int) bool                       { return false }
func (w *walker) Rate() float64                      { return 6 } // three positions are needed soon
func (w *walker) Ahead() int                         { return 8 }
func (w *walker) Bulk() bool                         { return false }
func (w *walker) Share() int                         { return int(w.limit) / 8 / len(w.walkers) }
func (w *walker) Claim(file, extent int) bool {
	k := piece{file, extent}
	if w.kept[k] {
		return true
	}
	h := w.extents[k]
	if h == nil {
		return false
	}
	if h.by == nil {
		h.by = w
	}
	return true
}

func (w *walker) Load() (load float64) {
	for _, h := range w.extents {
		if h.by == w {
			load += float64(h.size)
		}
	}
	return load / w.weight
}

// wants is what no Spend may take: the walk has passed it, and its reader has not.
func (w *walker) wants(file int) bool {
	for pos := range min(w.walk.Planned(), w.cur.order.Len()) {
		if !w.cur.read[pos] && w.cur.order.At(pos) == file {
			return true
		}
	}
	return false
}

// pieces returns what is in memory or on its way, in the order in which it was asked for.
func (m *world) pieces() []piece {
	return slices.SortedFunc(maps.Keys(m.extents), func(a, b piece) int {
		return m.extents[a].since - m.extents[b].since
	})
}

// free lets go of an extent.
func (m *world) free(k piece) {
	m.used -= m.extents[k].size
	delete(m.extents, k)
	m.freed = true
}

// reserve takes memory, for which spent extents go, the oldest first.
func (m *world) reserve(n int64) bool {
	for m.used+n > m.limit {
		var oldest *piece
		for k, h := range m.extents {
			if h.by == nil && !h.flying && (oldest == nil || h.since < m.extents[*oldest].since) {
				oldest = &k
			}
		}
		if oldest == nil {
			return false
		}
		m.free(*oldest)
	}
	m.used += n
	return true
}

// act does what the executor says until that is nothing.
func (m *world) act() {
	for again := 0; ; again++ {
		if again > 100_000 {
			m.t.Fatal("the executor does not come to rest")
		}
		if m.freed {
			m.freed = false
			m.x.Freed()
		}
		a := m.x.Next()
		switch a.Do {
		case Idle:
			if m.freed {
				continue
			}
			m.atRest()
			return
		case Fetch:
			m.fetch(a)
		case Hand:
			for x := range m.sizes[a.File] {
				if h := m.extents[piece{a.File, x}]; h != nil {
					h.by = a.Walk.Source.(*walker)
				}
			}
		case Spend:
			for _, w := range m.walkers {
				if w.wants(a.File) {
					m.t.Fatalf("file %d is given up, which walk %d is still to read", a.File, w.id)
				}
			}
			if slices.Contains(m.open, item{nil, a.File}) {
				m.t.Fatalf("file %d is given up while it is open", a.File)
			}
			spent := false
			for x := range m.sizes[a.File] {
				if h := m.extents[piece{a.File, x}]; h != nil {
					h.by, spent = nil, true
				}
			}
			m.freed = m.freed || spent
		case Sweep:
			for _, k := range m.pieces() {
				if m.extents[k].by != nil {
					m.x.Unwanted(nil, k.file)
				}
			}
		case TakeBack:
			m.takeBack(a)
		}
	}
}

func (m *world) fetch(a Action) {
	k := piece{a.File, a.Extent}
	if m.extents[k] != nil || m.kept[k] {
		m.t.Fatalf("%+v is asked for, and is there", k)
	}
	w := a.Walk.Source.(*walker)
	if a.Bytes != m.sizes[k.file][k.extent] {
		m.t.Fatalf("%d bytes of %+v", a.Bytes, k)
	}
	if !m.reserve(a.Bytes) {
		m.x.Done(a, Refused, 0)
		return
	}
	m.fetched++
	m.extents[k] = &holding{by: w, flying: true, size: a.Bytes, since: m.fetched}
	m.flights = append(m.flights, flight{w, k})
	m.x.Done(a, Started, a.Bytes)
}

func (m *world) takeBack(a Action) {
	to, out := a.Walk.Source.(*walker), Refused
	defer func() { m.x.Done(a, out, 0) }()
	for need := a.Bytes; need > 0; {
		var from *walker
		for _, w := range m.walkers {
			if w.staged() && (from == nil || w.Load() > from.Load()) {
				from = w
			}
		}
		if from == nil || a.Over > 0 && (from == to || from.Load() < a.Over*(to.Load()+float64(need)/to.weight)) {
			return
		}
		k, ok := from.last(a)
		if !ok {
			return
		}
		if next := m.x.Wanting(nil, k.file); next != nil {
			if w := next.Source.(*walker); w != from && w.Load()+float64(m.extents[k].size)/w.weight < from.Load() {
				m.extents[k].by = w
				continue
			}
		}
		need -= m.extents[k].size
		m.free(k)
		m.x.Lost(nil, k.file)
		out = Started
	}
}

// staged reports whether anything is staged for the walk.
func (w *walker) staged() bool {
	return slices.ContainsFunc(w.pieces(), func(k piece) bool { return w.extents[k].by == w && !w.extents[k].flying })
}

// last returns the staged piece that the walk needs last, and may lose.
func (w *walker) last(a Action) (last piece, ok bool) {
	most := -1
	for _, k := range w.pieces() {
		if h := w.extents[k]; h.by != w || h.flying {
			continue
		}
		if n := a.Loses(w.walk, k.file); n > most {
			last, most, ok = k, n, true
		}
	}
	return last, ok
}

// atRest checks that nobody has to wait without a reason.
func (m *world) atRest() {
	if m.used > m.limit {
		m.t.Fatalf("%d bytes of %d", m.used, m.limit)
	}
	for _, w := range m.walkers {
		pos, next := w.walk.cur.pos, false
		if p, _ := w.walk.phase(); p != nil {
			pos, next = p.pos, p == &w.walk.next
		}
		switch w.walk.State() {
		case Ended:
			for _, o := range []order.Locator{w.cur.order, w.next} {
				for pos := 0; o != nil && pos < o.Len(); pos++ {
					for x := range m.sizes[o.At(pos)] {
						k := piece{o.At(pos), x}
						if (o != w.cur.order || !w.cur.read[pos]) && m.extents[k] == nil && !m.kept[k] && !m.failed[k] {
							m.t.Fatalf("walk %d has ended, and %+v is not there", w.id, k)
						}
					}
				}
			}
		case Waiting:
			most, soon := max(1, m.connects-m.connects/8), w.walk.Planned()-w.cur.head < 3
			if w.walk.Planned() < w.cur.head {
				soon = w.cur.Unread(w.cur.Frontier(), w.walk.Planned()) < 3
			}
			if next {
				soon = w.cur.order.Len()+pos-w.cur.head < 3
			}
			if m.gate.flying <= most-max(1, most/16) && (soon || m.gate.flying < m.ease) {
				m.t.Fatalf("walk %d waits while %d of %d are in flight, %d if not needed soon, as it is: %v",
					w.id, m.gate.flying, most, m.ease, !soon)
			}
		case Starved:
			if w.walk.short > 0 && m.used+w.walk.short <= m.limit {
				m.t.Fatalf("walk %d at %d is starved of %d bytes with %d of %d in use",
					w.id, pos, w.walk.short, m.used, m.limit)
			}
		case Yielding:
			if !slices.ContainsFunc(m.walkers, func(v *walker) bool { return v != w && v.walk.State() == Starved }) {
				m.t.Fatalf("walk %d yields to nobody", w.id)
			}
		case Resting:
			cur, from := w.walk.cur, w.walk.cur.Reader.Frontier()
			if w.walk.Layout == nil {
				lead := cur.Reader.Unread(from, max(cur.pos, from)) + w.walk.next.pos
				if ahead := w.Ahead(); w.walk.until < 0 || lead < ahead-ahead/4 {
					m.t.Fatalf("walk %d rests at %d, %d of %d ahead, for %d opens",
						w.id, pos, lead, ahead, w.walk.until)
				}
			} else if from >= w.walk.until {
				m.t.Fatalf("walk %d rests at %d until its reader is at %d, where it is: %d",
					w.id, pos, w.walk.until, from)
			}
		default:
			m.t.Fatalf("walk %d is %v at rest", w.id, w.walk.State())
		}
	}
}

// land ends a flight, which may fail.
func (m *world) land(i int) {
	if f := m.flights[i]; rapid.IntRange(0, 9).Draw(m.t, "fails") == 0 {
		m.failed[f.piece] = true
		m.free(f.piece)
	}
	m.arrive(i)
}

// arrive ends a flight.
func (m *world) arrive(i int) {
	f := m.flights[i]
	m.flights = slices.Delete(m.flights, i, i+1)
	if h := m.extents[f.piece]; h != nil {
		h.flying = false
	}
	m.x.Landed(f.w.walk, f.file, true)
}

// read has a walk's reader read a position, whose file is fetched for it if it is not there.
func (m *world) read(w *walker, pos int) {
	file := w.cur.order.At(pos)
	m.x.Open(nil, file)
	m.open = append(m.open, item{nil, file})
	w.cur.read[pos], w.cur.head = true, max(w.cur.head, pos+1)
	m.x.Opened(w.walk)
	m.act()
	for x, size := range m.sizes[file] {
		k := piece{file, x}
		if m.extents[k] != nil || m.kept[k] || !m.reserve(size) {
			continue
		}
		m.fetched++
		m.extents[k] = &holding{size: size, since: m.fetched} // by a demand of its own
	}
	m.open = slices.Delete(m.open, slices.Index(m.open, item{nil, file}), slices.Index(m.open, item{nil, file})+1)
	m.x.Close(nil, file)
}

func (m *world) order(n int) order.Locator {
	o := order.Torch(n, rapid.Uint64Range(0, 3).Draw(m.t, "seed"), 0, 1, 0, 0, false)
	return order.Index(order.Slice(o, 0, rapid.IntRange(1, n).Draw(m.t, "length")))
}

// Whatever happens, in whatever sequence: nothing is asked for that is there, nothing is given up that is wanted,
// nobody stands still without a reason, and the memory is never exceeded.
func TestExecutorModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(1, 24).Draw(t, "files")
		m := &world{t: t, limit: rapid.Int64Range(8, 80).Draw(t, "memory"), extents: map[piece]*holding{},
			kept: map[piece]bool{}, failed: map[piece]bool{},
			connects: rapid.IntRange(1, 40).Draw(t, "connections"), ease: rapid.IntRange(1, 40).Draw(t, "ease")}
		for range n {
			m.sizes = append(m.sizes, rapid.SliceOfN(rapid.Int64Range(1, 8), 0, 3).Draw(t, "extents"))
		}
		began := 0
		one := func() *walker {
			if len(m.walkers) == 0 {
				t.Skip("no walk")
			}
			return m.walkers[rapid.IntRange(0, len(m.walkers)-1).Draw(t, "walk")]
		}
		t.Repeat(map[string]func(*rapid.T){
			"begin": func(t *rapid.T) {
				if len(m.walkers) == 4 {
					t.Skip("enough")
				}
				began++
				w := &walker{world: m, id: began, weight: rapid.Float64Range(0.5, 4).Draw(t, "weight"),
					cur: newSitting(m.order(n))}
				m.walkers = append(m.walkers, w)
				w.walk = m.x.Begin(WalkOptions{Source: w, Gate: &m.gate, Connections: func() int {
					return m.connects
				}, Ease: func() int { return m.ease }, Weight: w.weight},
					Route{w.cur.order, w.cur}, rapid.IntRange(0, w.cur.order.Len()).Draw(t, "start"))
				for pos := range w.walk.Planned() { // whoever starts there has read what is before
					w.cur.read[pos] = true
				}
			},
			"end": func(t *rapid.T) {
				w := one()
				m.x.End(w.walk)
				m.walkers = slices.DeleteFunc(m.walkers, func(v *walker) bool { return v == w })
				for _, k := range m.pieces() {
					if m.extents[k].by == w {
						m.x.Unwanted(nil, k.file)
					}
				}
			},
			"read": func(t *rapid.T) {
				w := one()
				pos := w.cur.Frontier() + rapid.IntRange(0, 3).Draw(t, "ahead")
				if pos >= w.cur.order.Len() || w.cur.read[pos] {
					t.Skip("read")
				}
				m.read(w, pos)
			},
			"move": func(t *rapid.T) {
				w := one()
				w.cur, w.next = newSitting(m.order(n)), nil
				m.x.Moved(w.walk, Route{w.cur.order, w.cur}, Route{})
			},
			"know": func(t *rapid.T) {
				w := one()
				w.next = m.order(n)
				m.x.Known(w.walk, Route{Order: w.next})
			},
			"wait": func(t *rapid.T) {
				w := one()
				w.next = m.order(n)
				m.x.Waits(w.walk, Route{Order: w.next})
			},
			"land": func(t *rapid.T) {
				if len(m.flights) == 0 {
					t.Skip("no flight")
				}
				m.land(rapid.IntRange(0, len(m.flights)-1).Draw(t, "flight"))
			},
			"pause": func(t *rapid.T) { // nobody reads: fetching ends
				m.act()
				for landed := 0; len(m.flights) > 0; landed++ {
					if landed > 1000 {
						t.Fatal("fetches without end while nobody reads")
					}
					m.arrive(0)
					m.act()
				}
			},
			"keep": func(t *rapid.T) { // the disk takes something
				for _, k := range m.pieces() {
					if !m.extents[k].flying {
						m.kept[k] = true
						m.free(k)
						return
					}
				}
				t.Skip("nothing")
			},
			"": func(t *rapid.T) {
				m.t = t
				m.act()
			},
		})
	})
}

// What the reader does not need soon has no more requests in flight than Ease; what it needs within half a second has
// all places.
func TestExecutorEases(t *testing.T) {
	var x Executor
	var g Gate
	o := order.Index(order.Sequential(1000))
	reader, source, ease := newSitting(o), &paced{}, 4
	w := x.Begin(WalkOptions{Source: source, Gate: &g, Connections: func() int {
		return 64
	}, Ease: func() int { return ease }, Weight: 1}, Route{o, reader}, 0)
	fill := func(what string, want int) {
		t.Helper()
		for a := x.Next(); a.Do != Idle; a = x.Next() {
			if a.Do == Fetch {
				x.Done(a, Started, 1000)
				w.cur.pos++ // it is on its way
			}
		}
		if g.flying != want {
			t.Errorf("%s: %d in flight, want %d", what, g.flying, want)
		}
	}
	fill("nobody reads yet", 4)
	ease = 8
	fill("the line is faster", 8)
	for pos := range 5 {
		reader.read[pos], reader.head = true, pos+1
	}
	source.rate = 40
	x.Opened(w)
	fill("5 are read, and 20 are needed soon", 25)
	for range 18 {
		x.Landed(w, 0, true)
	}
	fill("some have come, and what is next is not needed soon", 8)
	reader.read[300], reader.head = true, 301
	x.Opened(w)
	fill("what it has jumped over is not needed", 8)
}

// paced is a source whose reader has a pace.
type paced struct {
	empty
	rate float64
}

func (p *paced) Rate() float64 { return p.rate }

// While two walks both want connections, each gets its part of the bytes.
func TestExecutorSharesPlaces(t *testing.T) {
	var x Executor
	var g Gate
	const connections = 9 // of which 8 are for prefetches
	walk := func(weight float64) *Walk {
		o := order.Index(order.Sequential(100_000))
		return x.Begin(WalkOptions{Data: weight, Source: empty{}, Gate: &g, Connections: func() int {
			return connections
		}, Ease: func() int { return connections }, Weight: weight}, Route{o, newSitting(o)}, 0)
	}
	light := walk(1)
	var flying []*Walk
	fill := func() {
		for a := x.Next(); a.Do != Idle; a = x.Next() {
			if a.Do == Fetch {
				x.Done(a, Started, 1000)
				flying = append(flying, a.Walk)
				a.Walk.cur.pos++ // it is on its way
			}
		}
	}
	fill() // alone it has all of them
	if len(flying) != 8 {
		t.Fatalf("%d in flight", len(flying))
	}
	heavy := walk(3)
	before := light.Served()
	for range 4000 {
		w := flying[0]
		flying = flying[1:]
		x.Landed(w, 0, true)
		fill()
	}
	a, b := light.Served()-before, heavy.Served()
	if a == 0 || float64(b)/float64(a) < 2.9 || float64(b)/float64(a) > 3.1 {
		t.Errorf("%d and %d bytes for weights of 1 and 3", a, b)
	}
}

// empty has nothing, and memory without end.
type empty struct{}

func (empty) Rate() float64              { return 0 }
func (empty) Extents(int) int            { return 1 }
func (empty) ExtentBytes(_, _ int) int64 { return 1000 }
func (empty) Claim(_, _ int) bool        { return false }
func (empty) Room() (room, free int64)   { return 1 << 40, 1 << 40 }
func (empty) Has(int) bool               { return false }
func (empty) Ahead() int                 { return 1 << 40 }
func (empty) Load() float64              { return 0 }
func (empty) Share() int                 { return 0 }
func (empty) Bulk() bool                 { return false }

// warm has everything.
type warm struct{ empty }

func (warm) Claim(_, _ int) bool { return true }

// One Next passes a bounded stretch, however long the order: others want the lock.
func TestExecutorSaysAgain(t *testing.T) {
	const n = 1_000_000
	var x Executor
	o := order.Index(order.Uniform(n, 1, 0))
	w := x.Begin(WalkOptions{Source: warm{}, Gate: &Gate{}, Connections: func() int {
		return 8
	}, Ease: func() int { return 8 }, Weight: 1}, Route{o, newSitting(o)}, 0)
	calls := 0
	for last := 0; ; calls++ {
		a := x.Next()
		if w.Planned()-last > mostPassed {
			t.Fatalf("%d positions at once", w.Planned()-last)
		}
		if last = w.Planned(); a.Do == Idle {
			break
		}
	}
	if w.State() != Ended || calls < n/mostPassed {
		t.Errorf("%v after %d calls", w.State(), calls)
	}
}

// A sweep of many files is looked at in bounded turns, between which others have the lock.
func TestExecutorSweepsInTurns(t *testing.T) {
	const n = 10_000
	var x Executor
	looks := 0
	o := counted{order.Index(order.Sequential(n / 2)), &looks}
	w := x.Begin(WalkOptions{Source: warm{}, Gate: &Gate{}, Connections: func() int {
		return 8
	}, Ease: func() int { return 8 }, Weight: 1}, Route{o, newSitting(o)}, n/2)
	x.Open(nil, n-1)
	for file := range n {
		x.Unwanted(nil, file)
	}
	if looks > 0 {
		t.Errorf("%d files were looked at before Next", looks)
	}
	spent := map[int]bool{}
	for idle := false; !idle; {
		switch a := x.Next(); a.Do {
		case Spend:
			spent[a.File] = true
			continue
		case Idle:
			idle = true
		}
		if looks > mostPassed/doubtCost {
			t.Fatalf("%d files were looked at in one turn", looks)
		}
		looks = 0
	}
	if len(spent) != n/2-1 || spent[n/2-1] || spent[n-1] || x.Sweeping() || w.State() != Ended {
		t.Errorf("%d of %d files were given up; walk is %v", len(spent), n, w.State())
	}
}

// counted counts what is asked of an order.
type counted struct {
	order.Locator
	finds *int
}

func (c counted) Find(file, from int) int {
	*c.finds++
	return c.Locator.Find(file, from)
}

// BenchmarkExecutor measures what a position costs that is passed, and an event.
func BenchmarkExecutor(b *testing.B) {
	const n = 100_000_000
	o := order.Index(order.Uniform(n, 1, 0))
	start := func() (*Executor, *Walk, *sequence) {
		x, at := &Executor{}, &sequence{}
		return x, x.Begin(WalkOptions{Source: warm{}, Gate: &Gate{}, Connections: func() int {
			return 512
		}, Ease: func() int { return 512 }, Weight: 1}, Route{o, at}, 0), at
	}
	b.Run("pass", func(b *testing.B) {
		x, w, _ := start()
		for b.Loop() {
			if x.Next().Do == Idle {
				w.cur.pos = 0
				w.state = Walking
			}
		}
		b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/mostPassed, "ns/position")
	})
	b.Run("read", func(b *testing.B) {
		x, w, at := start()
		for b.Loop() {
			file := o.At(at.pos)
			x.Open(nil, file)
			at.pos++
			x.Opened(w)
			x.Close(nil, file)
			for _, ok := x.Settle(); ok; _, ok = x.Settle() {
			}
		}
		b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/3, "ns/event")
	})
}

// sequence is a reader without gaps.
type sequence struct{ pos int }

func (s *sequence) Frontier() int           { return s.pos }
func (s *sequence) Head() int               { return s.pos }
func (s *sequence) Read(pos int) bool       { return pos < s.pos }
func (s *sequence) Unread(from, to int) int { return to - min(max(from, s.pos), to) }

// believed has what its reader is believed to have.
type believed struct {
	empty
	has *bool
}

func (b believed) Has(int) bool        { return *b.has }
func (b believed) Claim(_, _ int) bool { return *b.has }
func (believed) Ahead() int            { return 100 }

// What the reader probably has is not passed before it is near, and fetched once it turns out that it has it not.
func TestExecutorBelievesLate(t *testing.T) {
	var x Executor
	o := order.Index(order.Sequential(1000))
	begin := func(s Source) *Walk {
		return x.Begin(WalkOptions{Source: s, Gate: &Gate{}, Connections: func() int {
			return 8
		}, Ease: func() int { return 8 }, Weight: 1}, Route{o, newSitting(o)}, 0)
	}
	has := true
	w := begin(believed{has: &has})
	for x.Next().Do == Again {
	}
	if w.State() != Resting || w.Planned() != 100 {
		t.Errorf("it is %v at %d", w.State(), w.Planned())
	}
	has = false
	w.cur.Reader.(*sitting).read[0], w.cur.Reader.(*sitting).head = true, 1
	x.Opened(w)
	if a := x.Next(); a.Do != Fetch || a.Pos != 1 {
		t.Errorf("then %+v", a)
	}
	x.End(w)
	w = begin(warm{})
	for x.Next().Do == Again {
	}
	if w.State() != Ended {
		t.Errorf("what is here stays: %v at %d", w.State(), w.Planned())
	}
}
