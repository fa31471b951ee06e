package cluster

import (
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"testing"

	"go.etcd.io/etcd/api/v3/mvccpb"
	"pgregory.net/rapid"
)

type kvs map[string]*mvccpb.KeyValue

// store is a model of etcd: nodes/ as of each revision that is not compacted, last, and who makes the batches.
type store struct {
	rev, compacted int64
	nodes          kvs
	was            map[int64]kvs
	last, lead     string
}

func (s *store) clone() *store {
	c := *s
	c.nodes, c.was = maps.Clone(s.nodes), maps.Clone(s.was)
	return &c
}

func (s *store) write() int64 {
	s.was[s.rev] = maps.Clone(s.nodes)
	s.rev++
	return s.rev
}

func (k kvs) sorted() (out []*mvccpb.KeyValue) {
	for _, id := range slices.Sorted(maps.Keys(k)) {
		out = append(out, k[id])
	}
	return out
}

// follower is a process that follows by watches, which may lag, and of which any may have fallen silent.
type follower struct {
	roll
	told, seen []func(*roll) // what is on its way, from written/ and from nodes/
	deaf       [2]bool
}

type etcdModel struct {
	*rapid.T
	store
	saved     *store
	ended     map[string]bool // leases, which their owners may not know
	followers []*follower
	tokens    int
}

func (m *etcdModel) token() string { m.tokens++; return fmt.Sprint("t", m.tokens) }

func (m *etcdModel) set(id string, n *Node) {
	rev := m.write()
	event := &mvccpb.KeyValue{Key: []byte("/shoal/v1/x/nodes/" + id), ModRevision: rev}
	if n == nil {
		delete(m.nodes, id)
	} else {
		event.Value, _ = json.Marshal(n)
		m.nodes[id] = event
	}
	for _, f := range m.followers {
		if f.lead == f.me && !f.deaf[1] {
			f.seen = append(f.seen, func(r *roll) { r.hear(event) })
		}
	}
}

// say is an event of written/.
func (m *etcdModel) say(event func(*roll)) {
	for _, f := range m.followers {
		if !f.deaf[0] {
			f.told = append(f.told, event)
		}
	}
}

func (m *etcdModel) setLead(to string) {
	m.write()
	m.lead = to
	m.say(func(r *roll) { r.lead = to })
}

// act is what a process does for all: it becomes the lead, or makes a batch.
func (m *etcdModel) act(f *follower) {
	same := m.lead == f.lead && m.last == f.last
	switch {
	case !f.busy():
	case f.news == nil && same && (f.lead != "" || !m.ended[f.me]):
		if f.lead == "" {
			m.setLead(f.me)
		}
		f.begin(m.rev, m.nodes.sorted())
		f.deaf[1] = false
	case f.news != nil:
		b := f.batch(m.token())
		if f.news = nil; same {
			m.last = b.Last
			packed, at := []byte(b.pack()), m.write()
			m.say(func(r *roll) { r.take(packed, at) })
			f.take(packed, at)
			f.news = map[string]Node{}
		}
	}
}

func (m *etcdModel) read(f *follower) {
	told := toldBy(m.last)
	was, exact := m.was[told]
	if exact = exact && told >= m.compacted; !exact {
		was = m.nodes
	}
	f.read(was.sorted(), !exact, m.rev, m.last, m.lead)
	f.told, f.seen, f.deaf = nil, nil, [2]bool{}
}

func (m *etcdModel) ask(f *follower) {
	if m.ended[f.me] {
		f.me, f.torn = m.token(), true
	} else if f.stands(m.rev) {
		return
	}
	if f.answer(f.rev, m.rev, m.last, m.lead); f.torn {
		m.read(f)
	}
}

func (f *follower) hear(told, seen int) {
	for ; told > 0 && len(f.told) > 0; told-- {
		f.told[0](&f.roll)
		f.asked = 0
		f.told = f.told[1:]
	}
	for ; seen > 0 && len(f.seen) > 0; seen-- {
		f.seen[0](&f.roll)
		f.asked = 0
		f.seen = f.seen[1:]
	}
}

// settle lets all hear and do what there is to do.
func (m *etcdModel) settle() {
	for range 4 {
		for _, f := range m.followers {
			f.hear(1000, 1000)
			m.act(f)
		}
	}
}

func (m *etcdModel) check() {
	m.Helper()
	want := roll{}
	want.read(m.nodes.sorted(), false, m.rev, m.last, m.lead)
	for i, f := range m.followers {
		if !reflect.DeepEqual(append([]Node{}, f.nodes...), append([]Node{}, want.nodes...)) {
			m.Fatalf("follower %d has\n%+v\nand etcd\n%+v", i, f.roll, want)
		}
	}
}

// change is a node that joins, leaves, changes, restarts, or is none.
func (m *etcdModel) change() {
	id := rapid.SampledFrom([]string{"0000000000000001", "0000000000000002", "0000000000000003", "no node"}).
		Draw(m.T, "id")
	switch old := m.nodes[id]; {
	case old == nil: // it joins, or comes back as it was
		m.set(id, &Node{ID: id, Address: "a", Weight: 1,
			Instance: rapid.SampledFrom([]string{"a", "b"}).Draw(m.T, "instance")})
	case rapid.Bool().Draw(m.T, "leaves"):
		m.set(id, nil)
	default:
		var n Node
		_ = json.Unmarshal(old.Value, &n)
		n.Draining = n.Draining || rapid.Bool().Draw(m.T, "drains")
		n.Open = []string{m.token()}
		if rapid.IntRange(0, 4).Draw(m.T, "restarts") == 0 {
			n = Node{ID: id, Address: n.Address, Weight: uint32(rapid.IntRange(0, 2).Draw(m.T, "weight")),
				Instance: m.token()}
		}
		m.set(id, &n)
	}
}

// step lets something happen that is no trouble.
func (m *etcdModel) step() {
	f := rapid.SampledFrom(m.followers).Draw(m.T, "follower")
	switch rapid.SampledFrom([]string{"change", "change", "act", "act", "hear", "hear", "ask", "read"}).Draw(
		m.T, "step") {
	case "change":
		m.change()
	case "act":
		m.act(f)
	case "hear":
		f.hear(rapid.IntRange(0, 3).Draw(m.T, "told"), rapid.IntRange(0, 3).Draw(m.T, "seen"))
	case "ask":
		m.ask(f)
	case "read":
		m.read(f)
	}
}

func newEtcdModel(t *rapid.T) *etcdModel {
	m := &etcdModel{T: t, ended: map[string]bool{}, store: store{rev: 1, nodes: kvs{}, was: map[int64]kvs{}}}
	for range 3 {
		f := &follower{roll: roll{me: m.token()}}
		m.followers = append(m.followers, f)
		m.read(f)
	}
	for len(m.nodes) == 0 { // the first one makes the first batch, which all read
		m.change()
		m.settle()
	}
	for _, f := range m.followers {
		m.read(f)
	}
	return m
}

// As long as the watches speak, all come to have what etcd has without asking it, and nobody reads anew.
func TestFollowersInTheModel(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		m := newEtcdModel(rt)
		for range rapid.IntRange(1, 80).Draw(rt, "steps") {
			m.step()
		}
		m.settle()
		m.check()
		for _, f := range m.followers {
			if f.torn || f.last != m.last {
				rt.Fatalf("a list is torn or late: %+v", f.roll)
			}
		}
	})
}

// turn lets etcd be as it was once, or empty. All see it away, and the watches wait for a revision to come.
func (m *etcdModel) turn(to *store) {
	m.store = *to.clone()
	for _, f := range m.followers {
		f.asked, f.news = 0, nil
		f.told, f.seen, f.deaf = nil, nil, [2]bool{true, true}
	}
	if !slices.ContainsFunc(m.followers, func(f *follower) bool { return f.me == m.lead && !m.ended[m.lead] }) {
		m.setLead("")
	}
}

// Whatever falls silent or is lost, a few questions are enough.
func TestFollowersInTroubleInTheModel(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		m := newEtcdModel(rt)
		for range rapid.IntRange(1, 10).Draw(rt, "troubles") {
			for range rapid.IntRange(0, 20).Draw(rt, "steps") {
				m.step()
			}
			f := rapid.SampledFrom(m.followers).Draw(rt, "follower")
			troubles := []string{"silent", "gap", "dropped", "lease", "compacted", "empty", "save", "restore"}
			switch rapid.SampledFrom(troubles).Draw(rt, "trouble") {
			case "silent":
				f.deaf[rapid.IntRange(0, 1).Draw(rt, "watch")] = true
			case "gap":
				f.told = nil
			case "dropped": // both, with what they had to say
				f.told, f.seen, f.deaf = nil, nil, [2]bool{true, true}
			case "lease": // ends; if it was the lead's, two believe to be the lead
				if m.ended[f.me] = true; m.lead == f.me {
					m.setLead("")
				}
			case "compacted": // and what a watch still had to say with it
				m.compacted = m.rev
				f.told, f.seen, f.torn = nil, nil, true
			case "empty":
				for _, f := range m.followers {
					m.ended[f.me] = true
				}
				m.turn(&store{rev: 1, nodes: kvs{}, was: map[int64]kvs{}})
			case "save":
				m.saved = m.clone()
			case "restore":
				if m.saved != nil {
					m.turn(m.saved)
				}
			}
		}
		for range 6 {
			for _, f := range m.followers {
				f.hear(1000, 1000)
				m.ask(f)
				m.act(f)
			}
		}
		m.settle()
		m.check()
	})
}

// A list is no view while it lacks this process, or has the one before it: who owns nothing would give up all that it
// keeps.
func TestViewHasItself(t *testing.T) {
	r := roll{nodes: []Node{{ID: "a", Instance: "1"}, {ID: "b", Instance: "2"}}}
	for _, tt := range []struct {
		id, instance string
		ok           bool
	}{{"a", "1", true}, {"b", "1", false}, {"c", "3", false}, {"", "4", true}} {
		if v, ok := r.view(Node{ID: tt.id, Instance: tt.instance}); ok != tt.ok || len(v.Nodes) != 2 {
			t.Error(tt, v, ok)
		}
	}
}
