package engine

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/shoalfs/shoal/cache"
	"github.com/shoalfs/shoal/cache/cluster"
	"github.com/shoalfs/shoal/cache/owner"
	"github.com/shoalfs/shoal/cache/peer"
	"github.com/shoalfs/shoal/prefetch"
)

// Sharing of a dataset among the nodes of a cluster:
//
//   - The nodes that have the dataset open own it together: each extent has one owner, by package owner. A node that
//     drains owns nothing.
//   - A node keeps what it owns, as far as that fits, by a threshold that it tells with each answer. Whom it has not
//     answered yet asks it for whatever it owns.
//   - An extent that another node owns and keeps is read from that node, which fetches it if it does not have it yet.
//     Everything else is read from the store.
//   - When the nodes change, ownership is computed anew. What an extent's new owner does not have it asks its former owner
//     for, and then the store. Until all have noticed, two nodes may fetch the same extent.

// members are the nodes that have a dataset open, as of one view of the cluster. Immutable.
type members struct {
	rev   int64
	nodes []cluster.Node // by ID
	told  []*told        // by each; the same for as long as the node's process lives
	self  int            // this node's index; -1 if it is not among them
	table *owner.Table   // by bucket; nil without nodes

	former *members // whose owners may still have what has moved since; nil: the start
}

// told is the terms that a node told last; nil: none yet.
type told = atomic.Pointer[peer.Terms]

// sharing is a version of a dataset in a cluster. It implements cache.Peers.
type sharing struct {
	e    *Engine
	v    *view
	unit func(file, extent int) uint64
	now  atomic.Pointer[members]

	below atomic.Uint64 // the threshold of that choice
}

// How long the opening of a dataset waits: for etcd to answer, for the nodes to agree (and for the lease of another process
// with this node's ID to end).
const (
	mostAway  = 5 * time.Second
	mostQuiet = 15 * time.Second
)

func (e *Engine) datasetID() string { return hex.EncodeToString(e.dataset[:]) }

// membersOf returns the nodes that have the dataset open.
func (e *Engine) membersOf(view cluster.View) *members {
	m, id := &members{rev: view.Rev, self: -1}, e.datasetID()
	for _, n := range view.Nodes {
		if n.Has(id) && !n.Draining {
			if n.ID == e.host.node.id {
				m.self = len(m.nodes)
			}
			m.nodes, m.told = append(m.nodes, n), append(m.told, &told{})
		}
	}
	return m
}

// same reports whether the same nodes own the same extents.
func (m *members) same(other *members) bool {
	return other != nil && slices.EqualFunc(m.nodes, other.nodes, func(a, b cluster.Node) bool { return a.ID == b.ID && a.Weight == b.Weight })
}

// others returns the members other than this node, which is one.
func (m *members) others() *members {
	return &members{self: -1, nodes: slices.Delete(slices.Clone(m.nodes), m.self, m.self+1), told: slices.Delete(slices.Clone(m.told), m.self, m.self+1)}
}

// remember takes over what the nodes of before told.
func (m *members) remember(before *members) {
	for i, n := range m.nodes {
		at := slices.IndexFunc(before.nodes, func(o cluster.Node) bool { return o.ID == n.ID && o.Instance == n.Instance })
		if at >= 0 {
			m.told[i] = before.told[at]
		}
	}
}

// enterCluster says that this node has the dataset open, and waits until the others know it and have agreed on who else has. A
// node that does not reach etcd begins alone.
func (e *Engine) enterCluster(ctx context.Context) error {
	n := e.host.node
	if n == nil {
		return nil
	}
	n.cluster.Open(e.datasetID())
	began := time.Now()
	waiting, cancel := context.WithTimeout(ctx, mostQuiet)
	defer cancel()
	soon, cancelSoon := context.WithTimeout(waiting, mostAway)
	defer cancelSoon()
	err := n.cluster.Quiet(soon)
	if err != nil && n.cluster.State().Phase != cluster.Away {
		err = n.cluster.Quiet(waiting)
	}
	switch {
	case errors.Is(err, cluster.ErrTaken) || ctx.Err() != nil:
		return fmt.Errorf("cache directory %s: %w", e.host.Path(), err)
	case err != nil:
		e.log.Warn("not in the cluster yet: this node begins alone, and shares once it is", "cause", err)
		return nil
	}
	for {
		changed := n.cluster.Changed()
		if m := e.membersOf(n.cluster.View()); m.self >= 0 {
			e.log.Info("in the cluster", "nodes", len(m.nodes), "node", n.id, "waited", time.Since(began).Round(time.Millisecond))
			return nil
		}
		select {
		case <-changed:
		case <-waiting.Done():
			if ctx.Err() == nil {
				e.log.Warn("beginning before the cluster knows this node", "waited", mostQuiet)
			}
			return ctx.Err()
		}
	}
}

// share makes a version part of the cluster. It is called before the version is read.
func (e *Engine) share(v *view) {
	if e.host.node == nil {
		return
	}
	v.sharing = &sharing{e: e, v: v, unit: units(v.manifest, v.layout)}
	v.volume.SetPeers(v.sharing)
	v.sharing.follow(e.host.node.cluster.View())
}

// shareLoop follows the cluster's changes until ctx ends.
func (e *Engine) shareLoop(ctx context.Context) {
	for {
		changed := e.host.node.cluster.Changed()
		view := e.host.node.cluster.View()
		e.cur.Load().sharing.follow(view)
		e.host.node.retain(view)
		select {
		case <-changed:
		case <-ctx.Done():
			return
		}
	}
}

// follow takes a view of the cluster. If the nodes of the dataset have changed, it chooses anew what this node keeps.
func (s *sharing) follow(view cluster.View) {
	m, before := s.e.membersOf(view), s.now.Load()
	if len(m.nodes) == 0 { // etcd has not been reached yet: this node is alone
		if before == nil {
			s.now.Store(m)
		}
		return
	}
	if before != nil {
		m.remember(before)
	}
	if m.same(before) {
		m.table, m.former = before.table, before.former
		s.now.Store(m)
		return
	}
	switch {
	case before != nil && before.table != nil:
		former := *before
		former.former = nil
		m.former = &former
	case m.self >= 0 && s.e.cur.Load() == nil: // this node has just come
		m.former = m.others()
		m.former.table = owner.NewBuckets(s.owners(m.former))
	}
	owners := s.owners(m)
	if m.table = owner.NewBuckets(owners); m.former != nil {
		m.table = m.former.table.Next(owners)
	}
	s.now.Store(m)
	owned := make(owner.Set, owner.Buckets/64)
	if m.self >= 0 {
		owned = owners.Owned(m.self)
	}
	s.below.Store(s.v.keeping.own(owned))
	if before != nil {
		s.e.log.Info("the cluster has changed", "nodes", len(m.nodes), "before", len(before.nodes), "revision", m.rev)
	}
}

// owners places the dataset's units among members.
func (s *sharing) owners(m *members) *owner.Owners {
	weights := make([]owner.Node, len(m.nodes))
	for i, n := range m.nodes {
		weights[i] = owner.Node{ID: n.ID, Weight: n.Weight}
	}
	return owner.New(s.e.dataset, weights)
}

// trainer returns the node that learns the tables of recoded files; "" without others.
func (s *sharing) trainer() string {
	if s == nil {
		return ""
	}
	m := s.now.Load()
	if m == nil || len(m.nodes) < 2 {
		return ""
	}
	return m.nodes[s.owners(m).Of(0)].ID
}

// keeper returns the node that keeps an extent, or kept it before the last change, if that is another one. said: it has told that it
// does, else it has told nothing.
func (s *sharing) keeper(file, extent int, former bool) (n cluster.Node, t *told, said bool) {
	if s == nil {
		return n, nil, false
	}
	m := s.now.Load()
	if m != nil && former {
		m = m.former
	}
	if m == nil || m.table == nil {
		return n, nil, false
	}
	bucket := owner.Bucket(s.unit(file, extent))
	i := m.table.Of(bucket)
	if i == m.self || i < 0 {
		return n, nil, false
	}
	terms := m.told[i].Load()
	if said = terms != nil; said && !prefetch.Admits(terms.Below, bucketKey(bucket)) {
		return n, nil, false
	}
	return m.nodes[i], m.told[i], said
}

// elsewhere reports whether other nodes keep what this one does not have of a file.
func (s *sharing) elsewhere(file int) bool {
	if s == nil {
		return false
	}
	for x := range s.v.volume.Extents(file) {
		if _, _, said := s.keeper(file, x, false); !said && !s.v.volume.KeptExtent(file, x) {
			return false
		}
	}
	return true
}

// Asks implements cache.Peers.
func (s *sharing) Asks(file, extent int) bool {
	n, t, _ := s.keeper(file, extent, false)
	if _, lies := s.e.host.node.liars.Load(n.Instance); lies {
		return false
	}
	return t != nil && s.e.host.node.client.Ready(n.ID)
}

// Read implements cache.Peers. It asks one node after another: neighbours in a shard have the same owner.
func (s *sharing) Read(ctx context.Context, wants []cache.Want, held bool, check check) (rest []cache.Want) {
	if m := s.now.Load(); m == nil || held && m.former == nil {
		return wants // the usual case of what this node owns
	}
	of := func(w cache.Want) (cluster.Node, *told) {
		n, t, _ := s.keeper(w.File, int(w.Off/cache.ExtentSize), held)
		return n, t
	}
	for len(wants) > 0 {
		n, t := of(wants[0])
		same := 1
		for ; same < len(wants); same++ {
			if _, other := of(wants[same]); other != t {
				break
			}
		}
		if t != nil {
			rest = append(rest, s.ask(ctx, n, t, wants[:same], held, check)...)
		} else {
			rest = append(rest, wants[:same]...)
		}
		wants = wants[same:]
	}
	return rest
}

// distrust has a node that gave other bytes than the store asked nothing any more, until one of the two starts again, and what this node
// has compared with the store.
func (s *sharing) distrust(n cluster.Node, file int) {
	if _, before := s.e.host.node.liars.LoadOrStore(n.Instance, true); before {
		return
	}
	s.e.log.Error("a node of the cluster gave other bytes than the store; it is asked nothing any more, and what is here is compared with the store",
		"node", n.ID, "address", n.Address, "path", s.v.manifest.Path(file), "remedy", "stop that node, and run `shoal fsck` and `shoal cache verify` there")
	for _, e := range s.e.host.Engines() {
		select {
		case e.lied <- struct{}{}:
		default:
		}
	}
}

type check = func(context.Context, cache.Want) error

var errNotGiven = errors.New("not given")

// ask reads pieces from a node, and returns those that it did not give.
func (s *sharing) ask(ctx context.Context, n cluster.Node, t *told, wants []cache.Want, held bool, check check) (rest []cache.Want) {
	if _, lies := s.e.host.node.liars.Load(n.Instance); lies {
		return wants
	}
	m := s.v.manifest
	pieces := make([]peer.Piece, len(wants))
	for i, w := range wants {
		pieces[i] = peer.Piece{File: w.File, Path: m.PathHash(w.File), ETag: m.ETag(w.File), Off: w.Off, P: w.P}
	}
	r := peer.Request{Dataset: s.e.dataset, Version: m.VersionHash(), Held: held}
	asIs := slices.ContainsFunc(wants, func(w cache.Want) bool { return w.Coded == nil })
	if by := s.e.recoding.encode.Load(); by != nil && !asIs && s.e.recodes() {
		r.Form = by.form
	}
	if terms := s.e.host.node.client.Read(ctx, peer.Node{ID: n.ID, Address: n.Address}, r, pieces); terms != nil {
		t.Store(terms)
	}
	for i, p := range pieces {
		if p.Coded > 0 {
			*wants[i].Coded = p.Coded
		}
		err := errNotGiven
		if _, lies := s.e.host.node.liars.Load(n.Instance); p.Filled && !lies {
			err = check(ctx, wants[i])
		}
		if err != nil {
			rest = append(rest, wants[i])
		}
		if errors.Is(err, cache.ErrOtherBytes) {
			s.distrust(n, wants[i].File)
		}
	}
	return rest
}
