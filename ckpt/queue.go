package ckpt

import (
	"maps"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/shoalfs/shoal/ckpt/folder"
)

// Queue knows the files here and in the bucket, and in which order the bucket is to follow. It is pure: its owner tells
// it what happened, and asks what may be done. It is not safe for concurrent use.
type Queue struct {
	remove bool
	isLast func(path string) bool
	// shared: last names wait for Clear, too. asks has those of others, by name; turn is 0 if a torn file is beside.
	shared bool
	asks   map[string]*file
	copies map[*file]bool // of which a neighbour has something, or may

	files map[string]*file
	lasts map[*file]bool            // those with last names
	names map[inode]map[string]bool // the paths of what the bucket has, for rule 6
	// unsealed has the last names that were closed and are not visible yet, also if they have gone since, and the Ctime
	// of an earlier generation that is; 0 if there is none.
	unsealed map[string]int64
	broken   map[*file]bool // the torn files
	busy     *file          // whose change is being made

	turn    uint64
	waiting line // the changes
	owed    line // what was closed and is not in the bucket
}

type inode struct{ dev, ino uint64 }

type file struct {
	path  string
	state state
	last  bool
	there *Published
	// turn is of the change that waits, or 0: a publication if the file is whole, else a removal. owed is the turn at
	// which the file was first closed, since it was last published; 0 if the bucket has all that was closed.
	turn, owed uint64
	print      folder.Print // if it is whole
	since      time.Time    // of owed
	seen       bool         // by HearAll
	withdrawn  bool         // rule 5
	failed     bool         // its change was tried, and not made
	refused    uint64       // when the store did not make it: a turn, or 0
	uncopied   uint64       // the turn for which a copy in the bucket failed
	asked      bool         // another host's
	cleared    uint64       // the turn for which Clear was told
	held       string       // why it was not told yet
	vouched    bool         // as Vouch has told
	copy       copyOf
}

// copyOf is what a neighbour has of a file. Sent is on the way there, or may be there in place of Has.
type copyOf struct {
	Has  *folder.Print `json:"has,omitempty"`
	Sent *folder.Print `json:"sent,omitempty"`
}

// covered reports whether the neighbour has the file as it is here.
func (f *file) covered() bool { return f.state == whole && f.copy.Has != nil && !f.stale() }

// stale reports whether the neighbour has another generation, or may, which it must not publish after the next change.
func (f *file) stale() bool {
	other := func(p *folder.Print) bool { return p != nil && (f.state != whole || *p != f.print) }
	return other(f.copy.Has) || other(f.copy.Sent)
}

// leaving reports whether the file has gone here, and is to be removed there.
func (f *file) leaving() bool { return f.state == absent && f.turn != 0 }

type state uint8

const (
	absent state = iota
	open         // being written
	torn
	whole
)

// line is a queue by turns. A ticket whose turn is not the file's any more is void.
type line struct {
	tickets []ticket
	turn    func(*file) uint64
}

type ticket struct {
	turn uint64
	f    *file
}

func (l *line) add(f *file) {
	t := ticket{l.turn(f), f}
	if len(l.tickets) == cap(l.tickets) { // void ones behind a head that waits would grow without end
		l.tickets = slices.DeleteFunc(l.tickets, func(t ticket) bool { return l.turn(t.f) != t.turn })
	}
	at := len(l.tickets) // nearly always
	for at > 0 && l.tickets[at-1].turn > t.turn {
		at--
	}
	l.tickets = slices.Insert(l.tickets, at, t)
}

// all yields the files in turn.
func (l *line) all(yield func(*file) bool) {
	for len(l.tickets) > 0 && l.turn(l.tickets[0].f) != l.tickets[0].turn {
		l.tickets = l.tickets[1:]
	}
	for _, t := range l.tickets {
		if l.turn(t.f) == t.turn && !yield(t.f) {
			return
		}
	}
}

// Published is an object that this daemon made. The zero value: perhaps it did.
type Published struct {
	Print folder.Print `json:"print"`
	ETag  string       `json:"etag"`
}

// Change is a publication of a file, or a removal of an object.
type Change struct {
	Path  string
	Turn  uint64 // the change's, which is another one if the file changes
	Put   bool
	Print folder.Print // of the file to publish
	There *Published   // what the bucket has under Path, as far as we know
	// From is another path whose object has the same content, or "".
	From      string
	FromThere Published
}

// NewQueue returns an empty queue. isLast tells last names. With remove, what is removed here is removed there, too.
func NewQueue(isLast func(path string) bool, remove bool) *Queue {
	return &Queue{isLast: isLast, remove: remove, files: map[string]*file{}, lasts: map[*file]bool{},
		names: map[inode]map[string]bool{}, unsealed: map[string]int64{}, broken: map[*file]bool{},
		asks: map[string]*file{}, copies: map[*file]bool{},
		waiting: line{turn: func(f *file) uint64 { return f.turn }},
		owed:    line{turn: func(f *file) uint64 { return f.owed }}}
}

func (q *Queue) file(p string) *file {
	f := q.files[p]
	if f == nil {
		f = &file{path: p, last: q.isLast(p)}
		if q.files[p] = f; f.last {
			q.lasts[f] = true
		}
	}
	return f
}

// take gives f's change the next turn.
func (q *Queue) take(f *file) {
	q.turn++
	f.turn, f.vouched, f.failed, f.refused = q.turn, false, false, 0
	q.waiting.add(f)
}

// owe notes that the bucket lacks f from f's turn on.
func (q *Queue) owe(f *file) {
	f.owed = f.turn
	q.owed.add(f)
}

// set notes a state other than whole. What waited is void.
func (q *Queue) set(f *file, s state) {
	f.state, f.turn, f.seen, f.withdrawn = s, 0, true, false
	if delete(q.broken, f); s == torn {
		q.broken[f] = true
		for _, a := range q.asks {
			if beside(f, a) {
				a.turn = 0
			}
		}
	}
	if s != open {
		f.owed = 0
	}
}

// tidy forgets a file that is neither here nor in the bucket.
func (q *Queue) tidy(f *file) {
	if f.state == absent && f.there == nil && f != q.busy && !q.copies[f] {
		delete(q.files, f.path)
		delete(q.lasts, f)
	}
}

// publish notes what the bucket has of a file, also of an earlier process, before Hear.
func (q *Queue) publish(f *file, there Published) {
	q.unpublish(f)
	f.there = &there
	at := inode{there.Print.Dev, there.Print.Ino}
	if q.names[at] == nil {
		q.names[at] = map[string]bool{}
	}
	q.names[at][f.path] = true
}

func (q *Queue) unpublish(f *file) {
	if f.there == nil {
		return
	}
	at := inode{f.there.Print.Dev, f.there.Print.Ino}
	if delete(q.names[at], f.path); len(q.names[at]) == 0 {
		delete(q.names, at)
	}
	f.there = nil
}

// Hear takes news of the folder. What has gone counts last: the new name of a file is known before its old one goes. Of
// a path that came back, its last news count.
func (q *Queue) Hear(news []folder.News, now time.Time) {
	end := map[string]folder.State{}
	for _, n := range news {
		end[n.Path] = n.State
		switch n.State {
		case folder.Whole:
			q.closed(q.file(n.Path), n.Print, now)
		case folder.Writing:
			q.set(q.file(n.Path), open)
		case folder.Torn:
			q.set(q.file(n.Path), torn)
		}
	}
	some, skipped := false, map[string]bool{}
	for _, n := range news {
		if end[n.Path] != n.State {
			continue
		} else if n.State == folder.Skipped {
			skipped[n.Path] = true
		} else if f := q.files[n.Path]; f != nil && n.State == folder.Gone {
			q.gone(f)
			some = len(q.unsealed) > 0
		}
	}
	if len(skipped) > 0 {
		q.skip(skipped)
	}
	if some {
		q.withdraw()
	}
}

func (q *Queue) closed(f *file, print folder.Print, now time.Time) {
	f.seen = true
	if f.state == whole && f.print.SameContent(print) && f.turn != 0 {
		f.print = print
		return
	}
	q.set(f, open) // what was owed stays so
	f.state, f.print = whole, print
	if f.there != nil && f.there.Print.SameContent(print) && f != q.busy {
		f.owed = 0
		delete(q.unsealed, f.path)
		return
	}
	var behind []*file // last names above the folder of a last name that they had waited for
	if f.last && f.owed != 0 {
		for g := range q.waiting.all {
			if g.last && g.state == whole && g.turn > f.owed && above(path.Dir(g.path), path.Dir(f.path)) {
				behind = append(behind, g)
			}
		}
		f.owed = 0
	}
	q.take(f)
	if f.owed == 0 {
		f.since = now
		q.owe(f)
	}
	for _, g := range behind {
		q.take(g)
		q.owe(g)
	}
	if f.last {
		since := q.unsealed[f.path]
		if f.there != nil {
			since = max(since, f.there.Print.Ctime)
		}
		q.unsealed[f.path] = since
	}
}

func (q *Queue) gone(f *file) {
	q.set(f, absent)
	if q.remove && f.there != nil {
		q.take(f)
	}
	q.tidy(f)
}

// skip tells that paths cannot be carried, or looked into. What the bucket has of them, and what may be below, stays.
func (q *Queue) skip(at map[string]bool) {
	for p, f := range q.files {
		if (at[p] || topOf(p, at) != "") && (f.state != absent || !f.seen) { // else its removal waits
			q.set(f, absent)
			q.tidy(f)
		}
	}
}

// withdraw applies rule 5 to folders with a last name that was closed and did not become visible, if they have gone.
func (q *Queue) withdraw() {
	here := map[string]bool{}
	for p, f := range q.files {
		if f.state != absent {
			addFolders(here, p)
		}
	}
	for _, last := range slices.Sorted(maps.Keys(q.unsealed)) {
		dir := path.Dir(last)
		since, waits := q.unsealed[last]
		if dir == "." || here[dir] || !waits {
			continue
		}
		sealed := map[string]bool{} // folders in it that a last name of their own completes
		newer := map[string]bool{}  // folders with something that an earlier generation of last does not complete
		for p, f := range q.files {
			known := f.there != nil && f.there.Print != (folder.Print{})
			if !known || f == q.busy || f.there.Print.Ctime > since {
				addFolders(newer, p)
			}
			if _, waits := q.unsealed[p]; known && f.last && !waits && !f.leaving() && under(path.Dir(p), dir) {
				sealed[path.Dir(p)] = true
			}
		}
		below := slices.DeleteFunc(slices.Sorted(maps.Keys(q.files)), func(p string) bool {
			in := path.Dir(p)
			return !under(p, dir) || topOf(p, sealed) != "" || under(in, dir) && !newer[in]
		})
		rank := map[bool]int{true: 0, false: 1} // of what is a last name, and of others
		slices.SortStableFunc(below, func(a, b string) int { return rank[q.files[a].last] - rank[q.files[b].last] })
		for _, p := range below {
			f := q.files[p]
			f.withdrawn = true
			if f == q.busy && f.there == nil { // perhaps it comes
				q.publish(f, Published{})
			}
			if f.there != nil && f.turn == 0 {
				q.take(f)
			}
		}
		maps.DeleteFunc(q.unsealed, func(last string, _ int64) bool { return path.Dir(last) == dir })
	}
}

// addFolders adds the folders that a path is in, but for the root.
func addFolders(to map[string]bool, p string) {
	for dir := path.Dir(p); dir != "." && !to[dir]; dir = path.Dir(dir) {
		to[dir] = true
	}
}

// under reports whether a path lies below a folder other than the root.
func under(p, dir string) bool { return dir != "." && strings.HasPrefix(p, dir+"/") }

// above reports whether a folder is another one's parent, or further up.
func above(dir, of string) bool { return dir != of && (dir == "." || under(of, dir)) }

// HearAll takes news of the whole folder: what they leave out has gone.
func (q *Queue) HearAll(news []folder.News, now time.Time) {
	for _, f := range q.files {
		f.seen = f.seen && f.state == absent
	}
	q.Hear(news, now)
	for _, p := range slices.Sorted(maps.Keys(q.files)) {
		if f := q.files[p]; !f.seen {
			q.gone(f)
		}
	}
	q.withdraw()
}

// Release tells that a folder was removed here on purpose, and stays in the bucket, but for what had gone before.
func (q *Queue) Release(dir string) {
	for p, f := range q.files {
		if under(p, dir) && !f.leaving() {
			q.set(f, absent)
			q.unpublish(f)
			q.tidy(f)
		}
	}
}

// Next returns the change to make now. There is none while another one is made: until Made or Failed.
func (q *Queue) Next() (c Change, ok bool) {
	if q.busy != nil {
		return c, false
	}
	var next *file
	for f := range q.waiting.all {
		// a failure, or a removal, holds up no file
		plain, goes := f.state == whole && !f.last, f.state == whole && !f.failed
		if plain || (next == nil || goes) && !q.withheld(f) && !f.stale() && (f.state == whole || !q.dropping()) &&
			q.waitsFor(f, false) == nil {
			if next = f; plain || goes {
				break
			}
		}
	}
	if next != nil && next.refused > 0 && !q.dropping() {
		for f := range q.waiting.all { // a removal: a store that is a folder has no a beside a/b
			if f.state != whole && f.refused < next.refused && (under(f.path, next.path) || under(next.path, f.path)) {
				next = f
			}
		}
	}
	if next == nil || next.stale() { // until it is replaced there
		return c, false
	}
	q.busy = next
	return q.change(next), true
}

// waitsFor returns what must be published, or go, before a last name or a removal; or nil. With copies: what must be at
// the neighbour or published before f is there. A last name waits for files beside it that the bucket never had, too,
// whenever they were closed: it may name them, and after a restart only ctime tells the order.
func (q *Queue) waitsFor(f *file, copies bool) *file {
	if g := q.tornBy(f); g != nil {
		return g
	}
	for g := range q.owed.all {
		named := f.last && f.state == whole && !f.asked && !g.last && g.state == whole &&
			(g.there == nil || g.there.ETag == "") && beside(g, f)
		if g != f && (g.owed < f.turn || named) && q.tornBy(g) == nil && (!f.asked || !g.last) &&
			(!copies || !g.covered()) {
			return g
		}
	}
	return nil
}

// tornBy returns a torn file that a last name waits for; nil if there is none. Others do not wait for such a last name.
func (q *Queue) tornBy(f *file) (first *file) {
	if !f.last || f.state != whole {
		return nil
	}
	for g := range q.broken {
		if beside(g, f) && (first == nil || g.path < first.path) {
			first = g
		}
	}
	return first
}

// beside reports whether a file is in the folder of a last name, or below.
func beside(f, last *file) bool {
	dir := path.Dir(last.path)
	return path.Dir(f.path) == dir || under(f.path, dir)
}

// withheld reports whether f is a last name for which the other hosts have not answered.
func (q *Queue) withheld(f *file) bool {
	return q.shared && f.last && f.state == whole && f.cleared != f.turn
}

// Uncleared yields the last names that wait for Clear, and their turns.
func (q *Queue) Uncleared(yield func(path string, turn uint64) bool) {
	for f := range q.waiting.all {
		if q.withheld(f) && !yield(f.path, f.turn) {
			return
		}
	}
}

// Clear tells that the other hosts have published what was closed before a last name had this turn; or if not, why.
func (q *Queue) Clear(p string, turn uint64, whyNot string) {
	if f := q.files[p]; f != nil && f.turn == turn {
		if f.held = whyNot; whyNot == "" {
			f.cleared = turn
		}
	}
}

// Ask tells, after HearAll, which tells of all that was closed here before, that another host has closed a last name p.
func (q *Queue) Ask(name, p string) {
	q.asks[name] = &file{path: p, last: true, state: whole, asked: true}
	q.Answers(false)
}

// Vouch tells whether the other hosts, or their neighbours, have what was closed before a last name had this turn.
func (q *Queue) Vouch(p string, turn uint64, do bool) {
	if f := q.files[p]; f != nil && f.turn == turn {
		f.vouched = do
	}
}

// NextCopy returns what the neighbour is to get, last names after all before them, or if no Put, what it need not keep.
func (q *Queue) NextCopy() (c Change, ok bool) {
	var drop *file // last names first
	for f := range q.copies {
		if (f.state == absent || f.state == whole && f.turn == 0) &&
			(drop == nil || f.last && !drop.last || f.last == drop.last && f.path < drop.path) {
			drop = f
		}
	}
	if drop != nil {
		return Change{Path: drop.path}, true
	}
	for f := range q.waiting.all {
		if f.state == whole && !f.covered() && (!f.last || q.waitsFor(f, true) == nil) {
			return q.change(f), true
		}
	}
	return c, false
}

// dropping reports whether the neighbour may still have what is no more here: until then nothing is removed, or it
// could publish a last name whose files have been removed.
func (q *Queue) dropping() bool {
	for f := range q.copies {
		if f.state == absent {
			return true
		}
	}
	return false
}

// Copy tells what the neighbour has of a file.
func (q *Queue) Copy(p string, has copyOf) {
	f := q.file(p)
	if f.copy = has; has == (copyOf{}) {
		delete(q.copies, f)
		q.tidy(f)
	} else {
		q.copies[f] = true
	}
}

// Answers returns the asks before which nothing is owed but last names, ascending; with copies: nor is at the
// neighbour.
func (q *Queue) Answers(copies bool) (names []string) {
	for name, a := range q.asks {
		if q.tornBy(a) != nil {
			continue
		}
		if a.turn == 0 {
			q.turn++
			a.turn = q.turn
		}
		if q.waitsFor(a, copies) == nil {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// Ahead yields the files to publish in the order in which their parts may be sent.
func (q *Queue) Ahead(yield func(Change) bool) {
	for f := range q.waiting.all {
		if f.state == whole && !yield(q.change(f)) {
			return
		}
	}
}

func (q *Queue) change(f *file) Change {
	c := Change{Path: f.path, Turn: f.turn, Put: f.state == whole, Print: f.print, There: f.there}
	if !c.Put || f.uncopied == f.turn {
		return c
	}
	for p := range q.names[inode{f.print.Dev, f.print.Ino}] {
		from := q.files[p]
		if p != f.path && from.there.Print.SameContent(f.print) && (c.From == "" || p < c.From) {
			c.From, c.FromThere = p, *from.there
		}
	}
	return c
}

// Made tells that a change was made. there is what the bucket has now, if it was a publication.
func (q *Queue) Made(c Change, there Published) {
	q.busy = nil
	f := q.files[c.Path]
	if f.turn == c.Turn || f.state == absent && !c.Put || f.state == whole && c.Put && f.print.SameContent(c.Print) {
		f.turn = 0
	}
	if !c.Put {
		q.unpublish(f)
		q.tidy(f)
		return
	}
	if f.owed = 0; f.turn == 0 {
		delete(q.unsealed, f.path)
	} else if f.state == whole { // closed again meanwhile
		q.owe(f)
	}
	if since, waits := q.unsealed[f.path]; waits {
		q.unsealed[f.path] = max(since, c.Print.Ctime)
	}
	q.arrived(f, there)
}

// arrived notes what the bucket has of f, which may have gone meanwhile.
func (q *Queue) arrived(f *file, there Published) {
	q.publish(f, there)
	if f.turn == 0 && f.state == absent && (q.remove || f.withdrawn) {
		q.take(f)
	}
}

// Failed tells that a change was not made, or perhaps. It comes again, unless the folder has changed meanwhile.
func (q *Queue) Failed(c Change, perhaps bool) {
	q.busy = nil
	f := q.files[c.Path]
	if f.failed = f.turn == c.Turn; f.failed && perhaps {
		q.turn++
		f.refused = q.turn
	}
	if c.Put && perhaps {
		q.arrived(f, Published{})
	} else if perhaps && f.there != nil {
		q.publish(f, Published{ETag: f.there.ETag}) // it may have gone: what comes back is published
	}
	q.tidy(f)
}
