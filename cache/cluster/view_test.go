package cluster

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// world is a model of etcd and of nodes that follow the rules, in steps of half a second. What decides is the real
// settling; each change of a view is held against all that the node has heard, by words of the rules.
type world struct {
	fatal func(format string, args ...any)
	now   time.Time
	up    bool
	data  map[string]*registered
	nodes []*modelled
}

type registered struct {
	Node
	ends time.Time
}

// modelled is a daemon. Each has its own beat, and comes back after an interruption in its own time.
type modelled struct {
	Node
	views       settling
	alive       bool
	frozen, cut bool
	late        int // steps until it is connected again
	past        []heard
	changes     int
}

// heard is what a node was told: nothing, or who the members are.
type heard struct {
	at      time.Time
	members string
}

func members(nodes []Node) string {
	s := []byte(" ")
	for _, n := range nodes {
		s = strconv.AppendBool(strconv.AppendUint(append(append(s, n.ID...), '*'), uint64(n.Weight), 10), n.Draining)
	}
	return string(s)
}

func newWorld(fatal func(string, ...any), n int) *world {
	w := &world{fatal: fatal, now: time.Unix(0, 0), up: true, data: map[string]*registered{}}
	for i := range n {
		w.nodes = append(w.nodes, &modelled{Node: Node{ID: fmt.Sprintf("%016x", i), Weight: uint32(i + 1)}})
	}
	return w
}

func (w *world) start(n *modelled) {
	n.alive, n.frozen, n.Draining, n.late, n.past = true, false, false, 0, nil
	n.views = settling{pace: usual}
}

// step lets half a second pass. late says how long somebody needs to connect again.
func (w *world) step(late func() int) {
	w.now = w.now.Add(usual.beat / 2)
	if w.up {
		maps.DeleteFunc(w.data, func(_ string, r *registered) bool { return w.now.After(r.ends) })
	}
	for i, n := range w.nodes {
		if !n.alive || n.frozen || (int(w.now.UnixMilli())/500+i)%2 == 0 {
			continue
		}
		if !w.up || n.cut {
			n.views.lost()
			n.past = append(n.past, heard{at: w.now})
			n.late = late()
		} else if n.late > 0 {
			n.late--
		} else {
			w.beat(n)
		}
	}
}

func (w *world) beat(n *modelled) {
	r := w.data[n.ID]
	if r == nil {
		w.data[n.ID] = &registered{n.Node, w.now.Add(usual.lease)}
		n.views.lost()
		n.past = append(n.past, heard{at: w.now})
		return
	}
	r.ends, n.Draining = w.now.Add(usual.lease), r.Draining
	var list []Node
	for _, id := range slices.Sorted(maps.Keys(w.data)) {
		list = append(list, w.data[id].Node)
	}
	n.past = append(n.past, heard{w.now, members(list)})
	n.past = n.past[max(0, len(n.past)-20):]
	before, first := n.views.view, !n.views.taken
	if changed := n.views.list(View{Nodes: list}, w.now); changed != w.mustChange(n, before, list, first) {
		w.fatal("node %s at %v: changed %v\nfrom %s\nto   %s\nheard %v", n.ID, w.now, changed, members(before.Nodes),
			members(list), n.past)
	} else if changed {
		n.changes++
	}
	if n.views.taken && !slices.ContainsFunc(n.views.view.Nodes, func(o Node) bool { return o.ID == n.ID }) {
		w.fatal("a view of node %s without it: %s", n.ID, members(n.views.view.Nodes))
	}
}

// mustChange is rules 6 and 7.
func (w *world) mustChange(n *modelled, before View, list []Node, first bool) bool {
	to := members(list)
	if !first && members(before.Nodes) == to {
		return false
	}
	same, answered := w.now, w.now
	for _, h := range slices.Backward(n.past) {
		if h.members != to {
			break
		}
		same = h.at
	}
	for _, h := range slices.Backward(n.past) {
		if h.members == "" {
			break
		}
		answered = h.at
	}
	fewer := slices.ContainsFunc(before.Nodes, func(o Node) bool {
		return !slices.ContainsFunc(list, func(l Node) bool { return l.ID == o.ID })
	})
	return w.now.Sub(same) >= usual.quiet && (!fewer || w.now.Sub(answered) >= usual.gather)
}

// Whatever happens, views change by the rules, and when all is well for a while all have the same view: those who are
// there.
func TestViewsInTheModel(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		w := newWorld(rt.Fatalf, 5)
		late := func() int { return rapid.IntRange(0, 4).Draw(rt, "late") }
		pick := func() *modelled { return rapid.SampledFrom(w.nodes).Draw(rt, "node") }
		for range rapid.IntRange(1, 60).Draw(rt, "steps") {
			n := pick()
			switch rapid.SampledFrom([]string{"start", "start", "leave", "kill", "freeze", "thaw", "cut", "heal",
				"down", "up", "empty", "drain"}).Draw(rt, "action") {
			case "start":
				if !n.alive {
					w.start(n)
				}
			case "leave":
				if n.alive && !n.frozen && !n.cut && w.up {
					delete(w.data, n.ID)
				}
				n.alive = false
			case "kill":
				n.alive = false
			case "freeze", "thaw":
				n.frozen = !n.frozen
			case "cut", "heal":
				n.cut = !n.cut
			case "down", "up":
				w.up = !w.up
			case "empty":
				w.data, w.up = map[string]*registered{}, true
			case "drain":
				if r := w.data[n.ID]; r != nil && w.up {
					r.Draining = true
				}
			}
			for range rapid.IntRange(0, 30).Draw(rt, "pass") {
				w.step(late)
			}
		}
		w.up = true
		for _, n := range w.nodes {
			n.frozen, n.cut = false, false
		}
		for range 50 {
			w.step(late)
		}
		var there []Node
		for _, n := range w.nodes {
			if n.alive {
				there = append(there, n.Node)
			}
		}
		for _, n := range w.nodes {
			if n.alive && members(n.views.view.Nodes) != members(there) {
				rt.Fatalf("node %s ends with %s, and there are %s", n.ID, members(n.views.view.Nodes), members(there))
			}
		}
	})
}

// As long as nobody comes or goes, no view changes, whatever etcd does.
func TestEtcdsTroubleMovesNothing(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		w := newWorld(rt.Fatalf, 6)
		late := func() int { return rapid.IntRange(0, 3).Draw(rt, "late") }
		for _, n := range w.nodes {
			w.start(n)
		}
		for range 20 {
			w.step(late)
		}
		for range rapid.IntRange(1, 20).Draw(rt, "troubles") {
			switch rapid.SampledFrom([]string{"down", "empty", "gap"}).Draw(rt, "trouble") {
			case "down": // stopped or frozen: leases end when it comes back
				w.up = false
			case "empty":
				w.data = map[string]*registered{}
			case "gap": // all are cut off, as by a switch
				for _, n := range w.nodes {
					n.cut = true
				}
			}
			// All must notice: who alone is cut off again and again is rightly gone when its lease ends.
			for range rapid.IntRange(2, 40).Draw(rt, "lasts") {
				w.step(late)
			}
			w.up = true
			for _, n := range w.nodes {
				n.cut = false
			}
			for range rapid.IntRange(0, 40).Draw(rt, "passes") {
				w.step(late)
			}
		}
		for _, n := range w.nodes {
			if n.changes != 1 {
				rt.Fatalf("node %s has had %d views", n.ID, n.changes)
			}
		}
	})
}

// What does not move ownership is taken at once, and is a change.
func TestDetailsNeedNoQuiet(t *testing.T) {
	s := settling{pace: usual}
	begin, now := time.Unix(0, 0), time.Unix(0, 0).Add(usual.quiet)
	n := Node{ID: "a", Weight: 1, Open: []string{"d"}}
	if s.list(View{Nodes: []Node{n}}, begin) || !s.list(View{Nodes: []Node{n}}, now) ||
		s.list(View{Rev: 2, Nodes: []Node{n}}, now) || s.view.Rev != 2 {
		t.Fatal("a view of one")
	}
	n.Address = "a:1"
	if !s.list(View{Nodes: []Node{n}}, now) || s.view.Nodes[0].Address != "a:1" {
		t.Error("an address is not taken")
	}
	n.Open = []string{"d", "e"}
	if s.list(View{Nodes: []Node{n}}, now) || !s.list(View{Nodes: []Node{n}}, now.Add(usual.quiet)) {
		t.Error("another dataset is taken at once, or never")
	}
	n.Zone, now = "z", now.Add(usual.quiet)
	if s.list(View{Nodes: []Node{n}}, now) || !s.list(View{Nodes: []Node{n}}, now.Add(usual.quiet)) {
		t.Error("a zone is taken at once, or never")
	}
	n.Weight, now = 2, now.Add(usual.quiet)
	if s.list(View{Nodes: []Node{n}}, now) || !s.list(View{Nodes: []Node{n}}, now.Add(usual.quiet)) {
		t.Error("a weight is taken at once, or never")
	}
}
