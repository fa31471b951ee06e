package cluster

import (
	"slices"
	"time"
)

// Node is a daemon in a cluster.
type Node struct {
	ID       string   `json:"id"`      // 16 hex digits
	Address  string   `json:"address"` // HOST:PORT where peers reach it
	Zone     string   `json:"zone,omitempty"`
	Version  string   `json:"version,omitempty"` // of its program
	Instance string   `json:"instance"`          // tells this process from others with its ID; Join makes it
	Weight   uint32   `json:"weight"`            // its share, at least 1
	Open     []string `json:"open,omitempty"`    // the datasets that it has open, ascending
	Draining bool     `json:"draining,omitempty"`
}

// member tells whether two nodes are the same one to those who divide the units of any dataset.
func (n Node) member(o Node) bool {
	return n.ID == o.ID && n.Weight == o.Weight && n.Zone == o.Zone && n.Draining == o.Draining &&
		slices.Equal(n.Open, o.Open)
}

// Has reports whether the node has a dataset open.
func (n Node) Has(dataset string) bool {
	_, has := slices.BinarySearch(n.Open, dataset)
	return has
}

// WeightOf is the weight of a node with a cache of so many bytes: its MiB.
func WeightOf(cache int64) uint32 { return uint32(min(max(cache>>20, 1), 1<<31)) }

// IsID reports whether id is one that a node may have.
func IsID(id string) bool { return idOf.MatchString(id) }

// Shares returns by ID what part of a dataset each of the nodes owns in its zone, if all have it open.
func Shares(nodes []Node) map[string]float64 {
	zones, shares := map[string]float64{}, map[string]float64{}
	for _, n := range nodes {
		if !n.Draining {
			zones[n.Zone] += float64(n.Weight)
		}
	}
	for _, n := range nodes {
		if !n.Draining {
			shares[n.ID] = float64(n.Weight) / zones[n.Zone]
		}
	}
	return shares
}

func (n Node) equal(o Node) bool {
	return n.member(o) && n.Address == o.Address && n.Version == o.Version && n.Instance == o.Instance
}

// View is a list of nodes at a time. It is never changed, and must not be.
type View struct {
	Rev   int64  // etcd's revision: smaller than before if etcd has lost its data
	Nodes []Node // by ID
}

// pace is how often and how long.
type pace struct {
	lease  time.Duration
	beat   time.Duration // until something is tried again
	answer time.Duration // until etcd is away
	quiet  time.Duration // for which a list's members must be the same
	gather time.Duration // until a list that lacks nodes is believed, after etcd was away
}

var usual = pace{lease: 10 * time.Second, beat: time.Second, answer: 2 * time.Second, quiet: 1500 * time.Millisecond,
	gather: 6 * time.Second}

// settling makes views out of lists: rules 6 and 7. It has no clock and no lock.
type settling struct {
	pace

	view  View
	taken bool // there is a view

	heard []Node
	since time.Time // when heard's members came to be as they are
	back  time.Time // when etcd answered again
	due   time.Time // when it may become the view; zero: it is
	here  bool      // it answers
}

// lost says that etcd is away, or that its list is without this process.
func (s *settling) lost() { s.here = false }

// list takes an answer, which may be the same as the last one, and tells whether the view has changed.
func (s *settling) list(v View, now time.Time) bool {
	if !s.here {
		s.here, s.back, s.since = true, now, now
	}
	if !slices.EqualFunc(v.Nodes, s.heard, Node.member) {
		s.since = now
	}
	s.heard = v.Nodes
	same := s.taken && slices.EqualFunc(v.Nodes, s.view.Nodes, Node.member)
	if s.due = s.since.Add(s.quiet); s.due.Before(s.back.Add(s.gather)) && s.lacks(v) {
		s.due = s.back.Add(s.gather)
	}
	if !same && now.Before(s.due) {
		return false
	}
	s.due = time.Time{}
	changed := !s.taken || !slices.EqualFunc(v.Nodes, s.view.Nodes, Node.equal)
	s.view, s.taken = v, true
	return changed
}

// lacks tells whether v is without a node of the view.
func (s *settling) lacks(v View) bool {
	return slices.ContainsFunc(s.view.Nodes, func(n Node) bool {
		_, found := find(v.Nodes, n.ID)
		return !found
	})
}
