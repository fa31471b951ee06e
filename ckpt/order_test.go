package ckpt

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"pgregory.net/rapid"

	"github.com/shoalfs/shoal/ckpt/folder"
)

// world is several hosts, the bucket that they share, and what etcd has of it. All that a host hears or writes may be
// late, lost, or in another order.
type world struct {
	hosts  []*simHost
	bucket map[string]folder.Print
	closed map[folder.Print]int64 // when it was closed
	now    int64

	rev        int64
	has        map[string]entryOf    // etcd, by key
	mustAnswer map[string][]*simHost // by ask: who was registered when it was made
	forgotten  map[string]bool       // "ASK HOST": that host was, later

	copies bool
	shelf  map[string]map[string]folder.News // by the name of the copies
	stead  map[string]*simHost               // who publishes a host's copies
}

// entryOf is what etcd has of a key.
type entryOf struct {
	post
	modified int64
}

// compare does what etcd does.
func compare(c *pb.Compare, kv entryOf) bool {
	switch u := c.TargetUnion.(type) {
	case *pb.Compare_Value:
		return kv.value == string(u.Value)
	case *pb.Compare_CreateRevision:
		return kv.made == u.CreateRevision
	case *pb.Compare_ModRevision:
		return kv.modified < u.ModRevision
	}
	panic(c)
}

// under returns what etcd has whose keys begin so, by the rest.
func (w *world) under(root string) map[string]post {
	found := map[string]post{}
	for key, kv := range w.has {
		if name, is := strings.CutPrefix(key, root); is {
			found[name] = kv.post
		}
	}
	return found
}

type simHost struct {
	id        string
	paths     []string
	here      map[string]folder.News
	torn      map[string]int64 // since when
	published map[string]folder.Print
	unsealed  map[string]int64
	dead      bool // for good
	joined    bool // its process has seen its registration, and was not told to end

	up     int // counts its processes
	q      *Queue
	o      *order // nil: it does not run
	dirty  []string
	batch  []folder.News // on the way from the folder,
	asOf   int           // and the number of looks then
	looks  int
	board  *board
	out    []sent
	flight *Change

	neighbour Neighbour // as its journal says
	copied    map[string]copyOf
	of        *simHost                // this one stands for it
	promised  map[string]folder.Print // when it died for good
}

// GoString keeps what rapid prints short.
func (h *simHost) GoString() string { return fmt.Sprintf("%s (for %s)", h.id, h.neighbour.Copy) }

// sent is a deed on its way, of the up-th process.
type sent struct {
	deed
	up int
}

func newWorld(n int, copies bool) *world {
	w := &world{copies: copies, shelf: map[string]map[string]folder.News{}, stead: map[string]*simHost{},
		bucket: map[string]folder.Print{}, closed: map[folder.Print]int64{}, has: map[string]entryOf{},
		mustAnswer: map[string][]*simHost{}, forgotten: map[string]bool{}}
	for i := range n {
		h := &simHost{id: fmt.Sprint("H", i), here: map[string]folder.News{}, torn: map[string]int64{},
			published: map[string]folder.Print{}, unsealed: map[string]int64{}, copied: map[string]copyOf{}}
		for _, p := range []string{"a", "d/a", "d/last", "last"} {
			h.paths = append(h.paths, fmt.Sprint(p, i))
		}
		w.hosts = append(w.hosts, h)
		w.start(h)
	}
	for range 4 { // etcd knows all, and each has a neighbour
		for _, h := range w.hosts {
			if w.copies {
				w.meets(h)
				w.copy(h, true, true)
			}
		}
	}
	return w
}

// meets has a host meet the others at once.
func (w *world) meets(h *simHost) {
	w.read(h)
	h.meet()
	for len(h.out) > 0 {
		w.apply(h, 0, true)
	}
}

func (w *world) start(h *simHost) {
	h.up++
	h.q = NewQueue(isLast, false)
	h.o = newOrder(Config{}, h.q, h.id)
	if h.o.root = "/"; h.of != nil {
		h.o.stands = h.neighbour.Copy
	} else if w.copies {
		h.o.copies = &copies{}
		h.o.host.Neighbour = h.neighbour
		h.o.self = string(encode(h.o.host))
		for p, has := range h.copied {
			h.q.Copy(p, has)
		}
		w.lives(h)
	}
	for p, print := range h.published {
		h.q.publish(h.q.file(p), Published{Print: print})
	}
	maps.Copy(h.q.unsealed, h.unsealed)
	h.dirty, h.batch = nil, nil
	_ = h.look()
}

func (h *simHost) crash() {
	maps.Copy(h.unsealed, h.q.unsealed)
	h.q, h.o, h.board, h.flight, h.joined = nil, nil, nil, nil, false
}

func (h *simHost) look() error {
	h.looks++
	h.q.HearAll(slices.SortedFunc(maps.Values(h.here), func(a, b folder.News) int {
		return strings.Compare(a.Path, b.Path)
	}), time.Time{})
	return nil
}

// touch makes something else of a path.
func (w *world) touch(h *simHost, p string, s folder.State) {
	w.now++
	n := folder.News{Path: p, State: s}
	delete(h.torn, p)
	switch s {
	case folder.Gone:
		delete(h.here, p)
	case folder.Torn:
		h.torn[p] = w.now
	case folder.Whole:
		n.Print = folder.Print{Ino: uint64(w.now), Ctime: w.now}
		w.closed[n.Print] = w.now
	}
	if s != folder.Gone {
		h.here[p] = n
	}
	h.dirty = append(slices.DeleteFunc(h.dirty, func(d string) bool { return d == p }), p) // it comes later
}

// take has the folder look at the first paths that have changed.
func (h *simHost) take(n int) {
	h.asOf = h.looks
	for _, p := range h.dirty[:n] {
		now, ok := h.here[p]
		if !ok {
			now = folder.News{Path: p, State: folder.Gone}
		}
		h.batch = append(h.batch, now)
	}
	h.dirty = h.dirty[n:]
}

func (h *simHost) hear() {
	if h.asOf != h.looks {
		_ = h.look()
	} else {
		h.q.Hear(h.batch, time.Time{})
	}
	h.batch = nil
}

func (w *world) next(t *rapid.T, h *simHost) {
	if h.flight != nil {
		return
	}
	c, ok := h.q.Next()
	if !ok {
		return
	}
	h.flight = &c
	if !c.Put || !isLast(c.Path) {
		return
	}
	name, closed := h.o.name(c.Path), w.closed[c.Print]
	if w.mustAnswer[name] == nil {
		t.Fatalf("%s of %s is published, and nobody was asked", c.Path, h.id)
	}
	for _, g := range w.mustAnswer[name] {
		if w.forgotten[name+" "+g.id] {
			continue
		}
		for p, n := range g.here {
			if at := w.closed[n.Print]; n.State == folder.Whole && !isLast(p) && at < closed && w.bucket[p] != n.Print {
				t.Fatalf("%s of %s, closed at %d, is published before %s of %s, closed at %d",
					c.Path, h.id, closed, p, g.id, at)
			}
			if g.torn[p] > 0 && g.torn[p] < closed && beside(&file{path: p}, &file{path: c.Path}) {
				t.Fatalf("%s of %s is published beside %s, which is torn", c.Path, h.id, p)
			}
		}
	}
}

// made does the change that a host is at; it hears of that if it lives.
func (w *world) made(t *rapid.T, h *simHost, hears bool) {
	c := h.flight
	if c == nil {
		return
	}
	if !c.Put {
		delete(w.bucket, c.Path)
	} else if was := w.bucket[c.Path]; w.closed[was] > w.closed[c.Print] {
		t.Fatalf("%s: %s, closed at %d, is published over what was closed at %d",
			h.id, c.Path, w.closed[c.Print], w.closed[was])
	} else {
		w.bucket[c.Path] = c.Print
	}
	if h.flight = nil; !hears && h.of == nil {
		h.crash()
		return
	}
	h.q.Made(*c, Published{Print: c.Print})
	if delete(h.published, c.Path); c.Put {
		h.published[c.Path] = c.Print
		delete(h.unsealed, c.Path)
		if h.of != nil {
			delete(w.shelf[h.neighbour.Copy], c.Path)
			w.touch(h, c.Path, folder.Gone)
		}
	}
}

// lives has etcd know that a host lives.
func (w *world) lives(h *simHost) {
	w.rev++
	w.has["/alive/"+h.id] = entryOf{post{w.rev, "here"}, w.rev}
	for f := range h.q.copies {
		h.q.arrived(f, Published{})
	}
}

// find returns a host, nil if it does not run.
func (w *world) find(id string) *simHost {
	for _, h := range w.hosts {
		if h.id == id && h.o != nil {
			return h
		}
	}
	return nil
}

// give ends what stands for a host, if nothing is under way there.
func (w *world) give(id string) bool {
	if a := w.stead[id]; a != nil {
		if a.flight != nil {
			return false
		}
		for _, d := range a.out { // they may come late
			a.of.out = append(a.of.out, sent{d.deed, -1})
		}
		a.crash()
	}
	delete(w.stead, id)
	delete(w.has, "/adopted/"+id)
	w.rev++
	return true
}

// tend does so for a host whose copies others have.
func (w *world) tend(h *simHost) {
	reg := w.has["/hosts/"+h.id].host()
	_, lives := w.has["/alive/"+h.id]
	if w.stead[h.id] != nil {
		if lives || w.find(w.stead[h.id].neighbour.At) == nil {
			w.give(h.id)
		}
		return
	}
	if lives || w.shelf[reg.Copy] == nil || w.find(reg.At) == nil {
		return
	}
	w.rev++
	w.has["/adopted/"+h.id] = entryOf{post{w.rev, reg.At}, w.rev}
	a := &simHost{id: h.id, of: h, paths: h.paths, neighbour: reg.Neighbour, here: maps.Clone(w.shelf[reg.Copy]),
		torn: map[string]int64{}, published: map[string]folder.Print{}, unsealed: map[string]int64{}}
	w.stead[h.id] = a
	w.start(a)
}

// copy does the next copy of a host. It may get lost on the way there, or the answer may.
func (w *world) copy(h *simHost, arrives, answered bool) {
	if h.o == nil || h.o.copies == nil || h.neighbour.At == "" || h.neighbour != h.o.host.Neighbour ||
		w.find(h.neighbour.At) == nil {
		return
	}
	name := h.neighbour.Copy
	if !h.o.copies.open {
		if len(h.copied) == 0 && w.shelf[name] == nil {
			w.shelf[name] = map[string]folder.News{}
		}
		h.o.copies.open = w.shelf[name] != nil
		h.o.copies.void = !h.o.copies.open
		return
	}
	c, ok := h.q.NextCopy()
	if !ok {
		return
	}
	has := h.copied[c.Path]
	if c.Put {
		has.Sent = &c.Print
		h.q.Copy(c.Path, has)
		h.copied[c.Path] = has
	}
	if !arrives || !w.give(h.id) {
		return
	}
	if delete(w.shelf[name], c.Path); c.Put {
		w.shelf[name][c.Path] = folder.News{Path: c.Path, State: folder.Whole, Print: c.Print}
	}
	if !answered {
		return
	}
	if has = (copyOf{}); c.Put {
		has.Has = &c.Print
	}
	h.q.Copy(c.Path, has)
	if h.copied[c.Path] = has; !c.Put {
		delete(h.copied, c.Path)
	}
}

// promise notes what wait --copies 2 would say of a host, as one is about to be lost.
func (w *world) promise(h *simHost) {
	h.promised = map[string]folder.Print{}
	for _, p := range h.paths {
		if h.q.files[p] == nil {
			continue
		}
		vouched := true
		for id, reg := range w.under("/hosts/") {
			answer, answered := w.has["/answers/"+h.o.name(p)+"/"+id]
			vouched = vouched && (!isLast(p) || id == h.id ||
				answered && (answer.value == "" || answer.value == reg.host().Copy))
		}
		if lacks, _, known := h.q.Lacks(p, h.o.vouches()); known && lacks == "" && vouched &&
			w.has["/hosts/"+h.id].value == h.o.self && h.neighbour == h.o.host.Neighbour {
			h.promised[p] = h.q.files[p].print
		}
	}
}

func (w *world) read(h *simHost) {
	b := board{rev: w.rev, self: w.has["/hosts/"+h.id].value, asks: w.under("/asks/")}
	if w.copies {
		b.hosts, b.answers, b.alive, b.adopted = w.under("/hosts/"), w.under("/answers/"), w.under("/alive/"),
			w.under("/adopted/")
	} else if len(h.o.asked) > 0 {
		b.hosts, b.answers = w.under("/hosts/"), map[string]post{}
		for name, a := range w.under("/answers/" + h.id + "/") {
			b.answers[h.id+"/"+name] = a
		}
	}
	h.board = &b
	h.joined = h.joined || b.self == h.o.self && !h.o.ending
}

func (h *simHost) meet() {
	if h.board == nil {
		return
	}
	if h.o.copies != nil {
		if h.board.self == h.o.self && h.neighbour != h.o.host.Neighbour {
			h.neighbour, h.copied = h.o.host.Neighbour, map[string]copyOf{}
			h.o.forgetCopies()
		}
		h.o.choose(h.board.alive)
		if h.o.copies.to = ""; h.board.self == h.o.self {
			h.o.copies.to = h.board.alive[h.o.host.At].value
		}
	}
	do, err := h.o.meet(*h.board, h.look)
	if err != nil {
		panic(err)
	}
	for _, d := range do {
		h.out = append(h.out, sent{d, h.up})
	}
	h.board = nil
}

// apply has etcd do the i-th deed.
func (w *world) apply(h *simHost, i int, reply bool) {
	d := h.out[i]
	h.out = slices.Delete(h.out, i, i+1)
	w.rev++
	holds := true
	for _, cmp := range d.when {
		c := cmp.GetCompare()
		some := false
		for key, kv := range w.has {
			if some = some || key == string(c.Key); key == string(c.Key) ||
				len(c.RangeEnd) > 0 && strings.HasPrefix(key, string(c.Key)) {
				holds = holds && compare(c, kv)
			}
		}
		holds = holds && (some || len(c.RangeEnd) > 0 || compare(c, entryOf{}))
	}
	for _, op := range d.then {
		key := string(op.KeyBytes())
		switch {
		case !holds:
		case op.IsDelete():
			maps.DeleteFunc(w.has, func(k string, _ entryOf) bool {
				return k == key || op.RangeBytes() != nil && strings.HasPrefix(k, key)
			})
		case op.IsPut():
			kv, there := w.has[key]
			if kv.value = string(op.ValueBytes()); !there {
				kv.made = w.rev
			}
			kv.modified = w.rev
			w.has[key] = kv
			if name, is := strings.CutPrefix(key, "/asks/"); is {
				w.mustAnswer[name] = []*simHost{cmp.Or(h.of, h)}
				for _, g := range w.hosts {
					if _, registered := w.has["/hosts/"+g.id]; registered || g.joined {
						delete(w.forgotten, name+" "+g.id)
						w.mustAnswer[name] = append(w.mustAnswer[name], g)
					}
				}
			}
		}
	}
	if reply && h.o != nil && d.up == h.up {
		delete(h.q.asks, d.answers)
	}
}

// forget is a user who deletes a registration.
func (w *world) forget(h *simHost) {
	w.rev++
	delete(w.has, "/hosts/"+h.id)
	h.joined, h.promised = false, nil
	for name := range w.under("/asks/") {
		w.forgotten[name+" "+h.id] = true
	}
}

// settle lets all run, and delivers all, until nothing happens.
func (w *world) settle(t *rapid.T, what string, settled func() bool) {
	for range 200 {
		if settled() {
			return
		}
		for _, h := range w.all() {
			for len(h.out) > 0 {
				w.apply(h, 0, true)
			}
			if w.copies && h.of == nil {
				w.tend(h)
			}
			if h.o == nil {
				continue
			}
			w.copy(h, true, true)
			if h.batch != nil {
				h.hear()
			}
			h.take(len(h.dirty))
			h.hear()
			w.made(t, h, true)
			for w.next(t, h); h.flight != nil; w.next(t, h) {
				w.made(t, h, true)
				w.copy(h, true, true)
			}
			h.meet()
			w.read(h)
			h.meet()
		}
	}
	for _, h := range w.hosts {
		if h.o != nil {
			t.Logf("%s: %+v", h.id, h.q.Behind())
		}
	}
	t.Fatalf("%s: never. %v", what, w.has)
}

// all returns the hosts, and what stands for them.
func (w *world) all() []*simHost {
	all := slices.Clone(w.hosts)
	for _, h := range w.hosts {
		if a := w.stead[h.id]; a != nil {
			all = append(all, a)
		}
	}
	return all
}

// keepPromises: if one host is lost, what was said to be safe arrives, and nobody has to give it up.
func (w *world) keepPromises(t *rapid.T) {
	var lost []*simHost
	for _, h := range w.hosts {
		if h.dead {
			lost = append(lost, h)
			delete(w.has, "/alive/"+h.id)
		} else if h.o == nil {
			w.start(h)
		} else if h.o.ending = false; w.copies {
			w.lives(h)
		}
	}
	if len(lost) == 1 {
		w.settle(t, "what was promised is in the bucket", func() bool {
			for _, h := range w.hosts {
				for p, print := range h.promised {
					if w.bucket[p] != print && (h.dead || h.here[p].Print == print) {
						return false
					}
				}
			}
			return true
		})
	}
}

func (w *world) finish(t *rapid.T) {
	for _, h := range w.hosts {
		for _, p := range h.paths {
			if n := h.here[p]; n.State == folder.Torn || n.State == folder.Writing {
				w.touch(h, p, folder.Whole)
			}
		}
	}
	w.keepPromises(t)
	for _, h := range w.hosts {
		if h.dead {
			h.out = nil
			w.give(h.id)
			w.forget(h)
		}
	}
	w.settle(t, "all is in the bucket", func() bool {
		for _, h := range w.hosts {
			for p, n := range h.here {
				if !h.dead && w.bucket[p] != n.Print {
					return false
				}
			}
			if _, registered := w.has["/hosts/"+h.id]; registered == h.dead {
				return false
			}
		}
		for _, h := range w.hosts { // a dead one's asks are deleted by nobody
			maps.DeleteFunc(w.has, func(key string, _ entryOf) bool {
				return h.dead && strings.Contains(key, "s/"+h.id+"/")
			})
		}
		return len(w.under("/asks/"))+len(w.under("/answers/")) == 0
	})
	for _, h := range w.hosts {
		if h.o != nil {
			h.o.ending = true
		}
	}
	w.settle(t, "all have left", func() bool {
		return len(w.under("/hosts/")) == 0 && !slices.ContainsFunc(w.hosts, func(h *simHost) bool {
			return h.o != nil && !h.o.left
		})
	})
}

func TestOrderModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := newWorld(rapid.IntRange(2, 3).Draw(t, "hosts"), rapid.Bool().Draw(t, "copies"))
		some := func(t *rapid.T) *simHost { return rapid.SampledFrom(w.all()).Draw(t, "host") }
		running := func(do func(t *rapid.T, h *simHost)) func(*rapid.T) {
			return func(t *rapid.T) {
				if h := some(t); h.o != nil {
					do(t, h)
				}
			}
		}
		close := func(t *rapid.T) { // often
			if h := some(t); h.of == nil && !h.dead {
				w.touch(h, rapid.SampledFrom(h.paths).Draw(t, "path"), folder.Whole)
			}
		}
		meets := running(func(t *rapid.T, h *simHost) { // nearly always at once
			w.meets(h)
		})
		hears := running(func(t *rapid.T, h *simHost) {
			if h.batch != nil {
				h.hear()
			} else {
				h.take(rapid.IntRange(0, len(h.dirty)).Draw(t, "n"))
			}
		})
		saves := running(func(t *rapid.T, h *simHost) { // and all takes its course, up to some point
			if h.of != nil {
				return
			}
			w.touch(h, rapid.SampledFrom(h.paths).Draw(t, "path"), folder.Whole)
			h.hear()
			h.take(len(h.dirty))
			h.hear()
			for range rapid.IntRange(0, 3).Draw(t, "copies") {
				w.copy(h, true, true)
			}
			w.meets(h)
			if g := some(t); g.o != nil {
				w.meets(g)
			}
			w.meets(h)
			for range rapid.IntRange(0, 2).Draw(t, "publishes") {
				w.next(t, h)
				w.made(t, h, true)
			}
		})
		t.Repeat(map[string]func(*rapid.T){
			"saves": saves, "saves2": saves, "saves3": saves, "close": close, "close2": close, "meets": meets,
			"meets2": meets, "hears": hears, "hears2": hears,
			"change": func(t *rapid.T) {
				h := some(t)
				if h.of != nil || h.dead {
					return
				}
				w.touch(h, rapid.SampledFrom(h.paths).Draw(t, "path"),
					rapid.SampledFrom([]folder.State{folder.Writing, folder.Torn, folder.Gone}).Draw(t, "state"))
			},
			"look": running(func(t *rapid.T, h *simHost) { _ = h.look() }),
			"next": running(w.next),
			"made": running(func(t *rapid.T, h *simHost) { w.made(t, h, rapid.IntRange(0, 9).Draw(t, "lives") > 0) }),
			"failed": running(func(t *rapid.T, h *simHost) {
				if h.flight != nil {
					h.q.Failed(*h.flight, rapid.Bool().Draw(t, "perhaps"))
					h.flight = nil
				}
			}),
			"publishes": running(func(t *rapid.T, h *simHost) { w.next(t, h); w.made(t, h, true) }),
			"copy": running(func(t *rapid.T, h *simHost) {
				w.copy(h, rapid.IntRange(0, 9).Draw(t, "arrives") > 0, rapid.IntRange(0, 9).Draw(t, "answered") > 0)
			}),
			"copies": running(func(t *rapid.T, h *simHost) {
				for range 4 {
					w.copy(h, true, true)
				}
			}),
			"tend": func(t *rapid.T) {
				if h := some(t); w.copies && h.of == nil {
					w.tend(h)
				}
			},
			"silent": func(t *rapid.T) { // and then there is a stand-in, or soon
				if h := some(t); w.copies && h.of == nil {
					delete(w.has, "/alive/"+h.id)
					w.tend(h)
					if a := w.stead[h.id]; a != nil {
						for range rapid.IntRange(0, 4).Draw(t, "publishes") {
							w.meets(a)
							w.next(t, a)
							w.made(t, a, true)
						}
						if rapid.Bool().Draw(t, "under way") {
							w.next(t, a)
						}
					}
				}
			},
			"lives": running(func(t *rapid.T, h *simHost) {
				if w.copies && h.of == nil {
					w.lives(h)
				}
			}),
			"read": running(func(t *rapid.T, h *simHost) { w.read(h) }),
			"meet": running(func(t *rapid.T, h *simHost) { h.meet() }),
			"apply": func(t *rapid.T) {
				if h := some(t); len(h.out) > 0 {
					i := rapid.IntRange(0, len(h.out)-1).Draw(t, "which")
					if rapid.IntRange(0, 5).Draw(t, "twice") == 0 {
						h.out = append(h.out, h.out[i])
					}
					w.apply(h, i, rapid.Bool().Draw(t, "reply"))
				}
			},
			"lose": func(t *rapid.T) {
				if h := some(t); len(h.out) > 0 {
					h.out = h.out[1:]
				}
			},
			"crash": running(func(t *rapid.T, h *simHost) {
				if h.of == nil {
					h.crash()
				}
			}),
			"end": running(func(t *rapid.T, h *simHost) {
				if h.of != nil {
					return
				}
				h.o.ending, h.joined = true, false
				_ = h.look() // as Run does
				for range rapid.IntRange(0, 9).Draw(t, "publishes") {
					w.next(t, h)
					w.made(t, h, true)
				}
				w.read(h)
				h.meet()
			}),
			"up": func(t *rapid.T) {
				h := some(t)
				if h.o != nil && h.o.left {
					h.crash()
				}
				if h.o == nil && !h.dead {
					w.start(h)
				}
			},
			"dies": running(func(t *rapid.T, h *simHost) {
				if h.dead = h.of == nil && rapid.IntRange(0, 3).Draw(t, "for good") == 0; h.dead {
					for _, g := range w.hosts {
						if g.o != nil {
							w.promise(g)
						}
					}
					h.crash()
				}
			}),
			"forget": func(t *rapid.T) {
				if h := some(t); h.dead {
					w.forget(h)
				}
			},
		})
		w.finish(t)
	})
}

// A look that fails loses nothing: the ask is heard next time.
func TestOrderLookFails(t *testing.T) {
	h := newWorld(1, false).hosts[0]
	b := board{self: h.o.self, asks: map[string]post{"X/P1-1": {made: 1, value: "last"}}}
	if _, err := h.o.meet(b, func() error { return errors.New("no") }); err == nil {
		t.Fatal("no error")
	}
	if do, err := h.o.meet(b, h.look); err != nil || len(do) != 1 || do[0].answers != "X/P1-1" {
		t.Fatalf("%v, %v", do, err)
	}
}

// What a writer takes back, and tears meanwhile, holds up an answer, and so does a farewell.
func TestOrderTakenBack(t *testing.T) {
	h := newWorld(1, false).hosts[0]
	hear := func(n folder.News) { h.q.Hear([]folder.News{n}, time.Time{}) }
	answers := func(want int, ends bool) {
		t.Helper()
		if got := h.q.Answers(false); len(got) != want || h.o.over() != ends {
			t.Fatalf("%v, %v", got, h.o.over())
		}
	}
	hear(folder.News{Path: "d/a", State: folder.Whole, Print: folder.Print{Ino: 1}})
	h.q.Ask("X/P1-1", "d/last")
	hear(folder.News{Path: "d/a", State: folder.Torn})
	answers(0, false)
	hear(folder.News{Path: "d/a", State: folder.Whole, Print: folder.Print{Ino: 2}})
	answers(0, false)
	hear(folder.News{Path: "d/a", State: folder.Writing})
	answers(0, false)
	delete(h.q.asks, "X/P1-1")
	answers(0, false)
	hear(folder.News{Path: "d/a", State: folder.Gone})
	answers(0, true)
}
