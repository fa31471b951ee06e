package ckpt

import (
	"iter"
	"maps"
	"path"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/shoalfs/shoal/ckpt/folder"
)

// model is what a careful person would write down: what was closed in which order, and what is in the bucket.
type model struct {
	q      *Queue
	remove bool
	ino    uint64

	here    map[string]folder.State
	print   map[string]folder.Print
	bucket  map[string]folder.Print
	order   []string       // closings not answered yet, oldest first, each path once, at its latest closing
	owed    map[string]int // since which closing the bucket owes a path
	at      map[string]int // the closing that is in order
	n       int
	pending map[string]int64 // last names closed, not visible, and the Ctime of what was visible before
	written map[string]int64 // the same, as the journal has them
	doomed  map[string]bool  // rule 5: what is to be removed
	perhaps map[string]bool  // in the bucket
	// last names that files may pass: their publication failed, or they follow one that was closed again
	passed map[string]bool
	flight *Change
}

func isLast(p string) bool { return strings.HasPrefix(path.Base(p), "last") }

func newModel(remove bool) *model {
	q := NewQueue(isLast, remove)
	q.HearAll(nil, time.Time{})
	return &model{
		q: q, written: map[string]int64{}, remove: remove, here: map[string]folder.State{},
		print: map[string]folder.Print{}, bucket: map[string]folder.Print{},
		owed: map[string]int{}, at: map[string]int{}, pending: map[string]int64{}, doomed: map[string]bool{},
		perhaps: map[string]bool{}, passed: map[string]bool{},
	}
}

func (m *model) hear(news ...folder.News) { m.q.Hear(news, time.Time{}) }

func (m *model) void(p string) {
	delete(m.at, p)
	m.order = slices.DeleteFunc(m.order, func(o string) bool { return o == p })
}

func (m *model) close(p string, print folder.Print) {
	m.note(p, print)
	m.hear(folder.News{Path: p, State: folder.Whole, Print: print})
}

func (m *model) note(p string, print folder.Print) {
	again := m.here[p] == folder.Whole && m.print[p].SameContent(print) && m.at[p] != 0
	m.here[p], m.print[p] = folder.Whole, print
	delete(m.doomed, p)
	switch {
	case m.bucket[p].SameContent(print) && (m.flight == nil || m.flight.Path != p):
		m.void(p)
		delete(m.owed, p)
		if !again {
			delete(m.pending, p)
			delete(m.written, p)
		}
	case !again:
		for _, l := range m.order {
			if m.owed[p] != 0 && isLast(p) && isLast(l) && above(path.Dir(l), path.Dir(p)) {
				m.passed[l] = true
			}
		}
		m.void(p)
		delete(m.passed, p)
		m.n++
		m.order = append(m.order, p)
		m.at[p] = m.n
		if m.owed[p] == 0 {
			m.owed[p] = m.n
		}
		if isLast(p) {
			m.pending[p] = max(m.pending[p], m.bucket[p].Ctime)
			m.written[p] = m.pending[p]
		}
	}
}

func (m *model) state(p string, s folder.State) {
	m.here[p] = s
	m.void(p)
	delete(m.doomed, p)
	if s != folder.Writing {
		delete(m.owed, p)
	}
	if s == folder.Gone {
		delete(m.here, p)
	}
}

// left applies rule 5 after files have gone.
func (m *model) left() {
	for l, since := range m.pending {
		dir := path.Dir(l)
		if dir == "." || slices.ContainsFunc(slices.Collect(maps.Keys(m.here)), func(p string) bool {
			return under(p, dir)
		}) {
			continue
		}
		delete(m.pending, l)
		sealed, newer := map[string]bool{}, map[string]bool{}
		for p, print := range m.bucket {
			_, waits := m.pending[p]
			if isLast(p) && under(path.Dir(p), dir) && !waits && !m.perhaps[p] {
				sealed[path.Dir(p)] = true
			}
			if print.Ctime > since {
				addFolders(newer, p)
			}
		}
		for p := range m.perhaps {
			addFolders(newer, p)
		}
		if m.flight != nil {
			addFolders(newer, m.flight.Path)
		}
		for p := range m.bucket {
			if in := path.Dir(p); under(in, dir) && !newer[in] {
				sealed[in] = true
			}
		}
		for _, there := range []iter.Seq[string]{maps.Keys(m.bucket), maps.Keys(m.perhaps)} {
			for p := range there {
				m.doomed[p] = m.doomed[p] || under(p, dir) && topOf(p, sealed) == ""
			}
		}
		if m.flight != nil && m.flight.Put && under(m.flight.Path, dir) && topOf(m.flight.Path, sealed) == "" {
			m.doomed[m.flight.Path], m.perhaps[m.flight.Path] = true, true // also if it says that it was not made
		}
	}
}

func (m *model) next(t *rapid.T) {
	if m.flight != nil {
		return
	}
	c, ok := m.q.Next()
	plain := slices.IndexFunc(m.order, func(p string) bool { return !isLast(p) })
	isPlain := ok && c.Put && !isLast(c.Path)
	switch {
	case plain < 0:
	case !ok, isPlain && c.Path != m.order[plain], isLast(c.Path) && c.Put && m.at[c.Path] > m.at[m.order[plain]]:
		t.Fatalf("the next is %+v, %v; %s was closed first", c, ok, m.order[plain])
	case isPlain:
		for _, l := range m.order[:plain] {
			if !m.passed[l] && m.ready(l) {
				t.Fatalf("the next is %+v, and %s was closed before", c, l)
			}
		}
	}
	if !ok {
		return
	}
	m.flight = &c
	switch {
	case !c.Put && m.here[c.Path] != 0:
		t.Fatalf("%s is here, and removed", c.Path)
	case !c.Put && !m.remove && !m.doomed[c.Path]:
		t.Fatalf("%s is removed, and nobody asked for that", c.Path)
	case c.Put && (m.here[c.Path] != folder.Whole || m.print[c.Path] != c.Print):
		t.Fatalf("%s is published, and not whole", c.Path)
	case c.Put && c.From != "" && !m.perhaps[c.From] && (m.bucket[c.From] != c.FromThere.Print ||
		!c.FromThere.Print.SameContent(c.Print)):
		t.Fatalf("%s is copied from %s, which differs", c.Path, c.From)
	}
	if isLast(c.Path) && c.Put {
		for p, n := range m.owed {
			if p != c.Path && n < m.at[c.Path] && (!isLast(p) || above(path.Dir(c.Path), path.Dir(p))) && !m.tornIn(p) {
				t.Fatalf("%s is published before %s", c.Path, p)
			}
		}
		if m.tornIn(c.Path) {
			t.Fatalf("%s is published beside a torn file", c.Path)
		}
		if p := m.never(c.Path); p != "" && !m.perhaps[p] {
			t.Fatalf("%s is published before %s, which was never there", c.Path, p)
		}
	}
}

// ready reports whether a last name waits for nothing.
func (m *model) ready(l string) bool {
	for p, n := range m.owed {
		if p != l && n < m.at[l] {
			return false
		}
	}
	return !m.tornIn(l) && m.never(l) == ""
}

// never returns a file beside a last name that is whole, and perhaps never was in the bucket.
func (m *model) never(l string) string {
	for p := range m.at {
		if _, there := m.bucket[p]; !isLast(p) && (!there || m.perhaps[p]) && beside(&file{path: p}, &file{path: l}) {
			return p
		}
	}
	return ""
}

// tornIn reports whether p is a last name with a torn file in its folder.
func (m *model) tornIn(p string) bool {
	for g, s := range m.here {
		if s == folder.Torn && isLast(p) && m.here[p] == folder.Whole &&
			(path.Dir(g) == path.Dir(p) || under(g, path.Dir(p))) {
			return true
		}
	}
	return false
}

func (m *model) answer(made bool) {
	c := m.flight
	if c == nil {
		return
	}
	if m.flight = nil; !made {
		m.passed[c.Path] = true
		m.q.Failed(*c, false)
		return
	}
	m.q.Made(*c, Published{Print: c.Print, ETag: "e"})
	delete(m.perhaps, c.Path)
	if !c.Put {
		delete(m.bucket, c.Path)
		delete(m.doomed, c.Path)
		return
	}
	m.bucket[c.Path] = c.Print
	if m.here[c.Path] == folder.Whole && m.print[c.Path].SameContent(c.Print) {
		m.void(c.Path)
	}
	if delete(m.owed, c.Path); m.at[c.Path] != 0 {
		m.owed[c.Path] = m.at[c.Path]
		if since, waits := m.pending[c.Path]; waits {
			m.pending[c.Path] = max(since, c.Print.Ctime)
			m.written[c.Path] = m.pending[c.Path]
		}
	} else {
		delete(m.pending, c.Path)
		delete(m.written, c.Path)
	}
}

// lose has the answer of what is being made get lost, in which the store made it or not.
func (m *model) lose(made bool) {
	c := m.flight
	if c == nil {
		return
	}
	m.flight, m.perhaps[c.Path], m.passed[c.Path] = nil, true, true
	if _, there := m.bucket[c.Path]; made && !c.Put {
		delete(m.bucket, c.Path)
	} else if made || there {
		m.bucket[c.Path] = folder.Print{} // whatever it has, it is not known
	}
	m.q.Failed(*c, true)
}

// drain does all that can be done.
func (m *model) drain(t *rapid.T) {
	m.answer(true)
	for range 1000 {
		if m.next(t); m.flight == nil {
			return
		}
		m.answer(true)
	}
	t.Fatal("it never ends")
}

func (m *model) check(t *rapid.T) {
	blocked := false
	for _, s := range m.here {
		blocked = blocked || s != folder.Whole
	}
	if blocked {
		return
	}
	for p := range m.here {
		if !m.bucket[p].SameContent(m.print[p]) {
			t.Fatalf("%s is not in the bucket as it is here: %+v", p, m.q.Behind())
		}
	}
	for p := range m.bucket {
		if m.here[p] == 0 && (m.remove || m.doomed[p]) {
			t.Fatalf("%s is still in the bucket", p)
		}
	}
	if b := m.q.Behind(); b != (Behind{}) {
		t.Fatalf("behind: %+v", b)
	}
}

// restart begins again with what the bucket has, and looks through the folder.
func (m *model) restart(made bool) {
	m.lose(made)
	old := m.q
	m.q = NewQueue(isLast, m.remove)
	for p, f := range old.files {
		if f.there != nil {
			m.q.publish(m.q.file(p), *f.there)
		}
	}
	m.pending = maps.Clone(m.written)
	maps.Copy(m.q.unsealed, m.written)
	m.order, m.n, m.at, m.owed = nil, 0, map[string]int{}, map[string]int{}
	m.doomed = map[string]bool{} // a removal that was due is not known any more, but by the folder
	m.look()
	m.left()
}

// look tells of the whole folder.
func (m *model) look() {
	var news []folder.News
	for _, p := range slices.Sorted(maps.Keys(m.here)) {
		if m.here[p] == folder.Whole {
			m.note(p, m.print[p])
		}
		news = append(news, folder.News{Path: p, State: m.here[p], Print: m.print[p]})
	}
	m.q.HearAll(news, time.Time{})
}

// A path that goes and comes back within one batch of news is there: its last news decides.
func TestGoneAndBack(t *testing.T) {
	for _, remove := range []bool{false, true} {
		q := NewQueue(isLast, remove)
		q.HearAll(nil, time.Time{})
		first := folder.Print{Ino: 1, Size: 10, Mtime: 1}
		q.Hear([]folder.News{{Path: "a", State: folder.Whole, Print: first}}, time.Time{})
		c, _ := q.Next()
		q.Made(c, Published{Print: first, ETag: "1"})
		moved, second := first, folder.Print{Ino: 2, Size: 10, Mtime: 2}
		moved.Ctime = 5
		q.Hear([]folder.News{{Path: "a", State: folder.Gone}, {Path: "b", State: folder.Whole, Print: moved},
			{Path: "a", State: folder.Whole, Print: second}}, time.Time{})
		var made []string
		for c, ok := q.Next(); ok && len(made) < 5; c, ok = q.Next() {
			q.Made(c, Published{Print: c.Print, ETag: "2"})
			if !c.Put || c.Path == "a" && c.Print != second {
				t.Errorf("remove %v: %+v", remove, c)
			}
			made = append(made, c.Path)
		}
		if !slices.Equal(made, []string{"b", "a"}) {
			t.Errorf("remove %v: published %v, want b and a", remove, made)
		}
	}
}

// No file needs more than 10,000 parts.
func TestPartSize(t *testing.T) {
	for _, size := range []int64{1, 8 << 20, 83_886_080_000, 83_886_085_000, 5 << 40} {
		if parts := (size + partSize(size) - 1) / partSize(size); parts > 10_000 || partSize(size)%(1<<20) != 0 {
			t.Errorf("%d bytes: %d parts of %d", size, parts, partSize(size))
		}
	}
}

func TestQueueModel(t *testing.T) {
	paths := []string{"a", "b", "last", "d/a", "d/b", "d/last", "d/e/a", "d/e/last", "d/z/a", "d/z/last", "f/a",
		"f/last"}
	rapid.Check(t, func(t *rapid.T) {
		m := newModel(rapid.Bool().Draw(t, "remove"))
		anyPath := rapid.SampledFrom(paths)
		fresh := func() folder.Print { m.ino++; return folder.Print{Ino: m.ino, Ctime: int64(m.ino)} }
		t.Repeat(map[string]func(*rapid.T){
			"close": func(t *rapid.T) { m.close(anyPath.Draw(t, "path"), fresh()) },
			"again": func(t *rapid.T) {
				if p := anyPath.Draw(t, "path"); m.here[p] == folder.Whole {
					m.close(p, m.print[p])
				}
			},
			"write": func(t *rapid.T) {
				p := anyPath.Draw(t, "path")
				m.state(p, folder.Writing)
				m.hear(folder.News{Path: p, State: folder.Writing})
			},
			"tear": func(t *rapid.T) {
				p := anyPath.Draw(t, "path")
				m.state(p, folder.Torn)
				m.hear(folder.News{Path: p, State: folder.Torn})
			},
			"link": func(t *rapid.T) {
				if p := anyPath.Draw(t, "path"); m.here[p] == folder.Whole {
					print := m.print[p]
					print.Ctime = int64(fresh().Ino)
					m.close(anyPath.Draw(t, "name"), print)
				}
			},
			"rename": func(t *rapid.T) {
				from, to := anyPath.Draw(t, "from"), anyPath.Draw(t, "to")
				if m.here[from] != folder.Whole || from == to {
					return
				}
				print := m.print[from]
				m.note(to, print)
				m.state(from, folder.Gone)
				m.hear(folder.News{Path: from, State: folder.Gone},
					folder.News{Path: to, State: folder.Whole, Print: print})
				m.left()
			},
			"remove": func(t *rapid.T) {
				at := rapid.SampledFrom([]string{"a", "last", "d/a", "d/last", "d/", "d/e/", "d/z/", "f/"}).
					Draw(t, "at")
				for _, p := range paths {
					if m.here[p] != 0 && strings.HasPrefix(p, at) {
						m.state(p, folder.Gone)
						m.hear(folder.News{Path: p, State: folder.Gone})
						m.left()
					}
				}
			},
			"unheard": func(t *rapid.T) { // files go, and all is looked through before their news come
				for _, p := range paths {
					if m.here[p] != 0 && rapid.Bool().Draw(t, p) {
						m.state(p, folder.Gone)
					}
				}
				m.look()
				m.left()
			},
			"next":    m.next,
			"made":    func(*rapid.T) { m.answer(true) },
			"failed":  func(*rapid.T) { m.answer(false) },
			"drain":   func(t *rapid.T) { m.drain(t); m.check(t) },
			"lost":    func(t *rapid.T) { m.lose(rapid.Bool().Draw(t, "made")) },
			"restart": func(t *rapid.T) { m.restart(rapid.Bool().Draw(t, "made")) },
		})
		m.drain(t)
		m.check(t)
	})
}

// What cannot be looked into stays in the bucket: it is here.
func TestSkippedIsNotRemoved(t *testing.T) {
	for _, at := range []string{"s/a", "s"} {
		q := NewQueue(isLast, true)
		q.publish(q.file("s/a"), Published{Print: folder.Print{Ino: 1}, ETag: "e"})
		q.HearAll([]folder.News{{Path: at, State: folder.Skipped}}, time.Time{})
		if c, ok := q.Next(); ok {
			t.Errorf("%s cannot be looked at: %+v", at, c)
		}
	}
}

// A file that comes back after a removal whose answer was lost is published again.
func TestRemovalPerhaps(t *testing.T) {
	q := NewQueue(isLast, true)
	q.HearAll(nil, time.Time{})
	file := []folder.News{{Path: "a", State: folder.Whole, Print: folder.Print{Ino: 1}}}
	q.Hear(file, time.Time{})
	c, _ := q.Next()
	q.Made(c, Published{Print: c.Print, ETag: "e"})
	q.Hear([]folder.News{{Path: "a", State: folder.Gone}}, time.Time{})
	if c, _ = q.Next(); c.Put || c.There.ETag != "e" {
		t.Fatalf("%+v", c)
	}
	q.Failed(c, true)
	q.Hear(file, time.Time{})
	if c, ok := q.Next(); !ok || !c.Put {
		t.Errorf("%t, %+v", ok, c)
	}
}

// A removal lets all files pass, but those that the store has refused: it may be a folder, which cannot take them
// before. If it refuses the removal, too, both are tried in turn.
func TestRemovalInTheWay(t *testing.T) {
	for _, c := range [][2]string{{"a", "a/b"}, {"a/b", "a"}, {"a", "a/last"}, {"a/last", "a"}} {
		q := NewQueue(isLast, true)
		q.HearAll(nil, time.Time{})
		q.Hear([]folder.News{{Path: c[0], State: folder.Whole, Print: folder.Print{Ino: 1}}}, time.Time{})
		first, _ := q.Next()
		q.Made(first, Published{Print: first.Print, ETag: "e"})
		q.Hear([]folder.News{{Path: c[0], State: folder.Gone}, {Path: c[1], State: folder.Whole,
			Print: folder.Print{Ino: 2}}}, time.Time{})
		for _, asked := range []bool{false, true} { // a writer was in the way first
			put, _ := q.Next()
			if q.Failed(put, asked); put.Path != c[1] {
				t.Errorf("%v: %+v", c, put)
			}
		}
		for range 3 {
			for _, path := range c {
				change, ok := q.Next()
				if !ok || change.Path != path || change.Put != (path == c[1]) {
					t.Fatalf("%v: %t, %+v, not %s", c, ok, change, path)
				}
				q.Failed(change, true)
			}
		}
		away, ok := q.Next()
		if !ok || away.Put || away.Path != c[0] {
			t.Errorf("%v: %t, %+v", c, ok, away)
			continue
		}
		q.Made(away, Published{})
		if put, ok := q.Next(); !ok || put.Path != c[1] {
			t.Errorf("%v: %t, %+v", c, ok, put)
		}
	}
}
