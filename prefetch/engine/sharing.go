package engine

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/shoalfs/shoal/cache"
	"github.com/shoalfs/shoal/cache/cluster"
	"github.com/shoalfs/shoal/cache/owner"
	"github.com/shoalfs/shoal/cache/peer"
	"github.com/shoalfs/shoal/internal/pause"
	"github.com/shoalfs/shoal/prefetch"
)

// Sharing of a dataset among the nodes of a cluster:
//
//   - The nodes of a zone that have the dataset open own it together: each extent has one owner in each zone, by
//     package owner. A node that drains owns nothing. Nodes without a zone are one zone.
//   - A node keeps what it owns, as far as that fits, by a threshold that it tells with each answer. Whom it has not
//     answered yet asks it for whatever it owns.
//   - An extent that another node of the zone owns and keeps is read from that node, which fetches it if it does not
//     have it yet.
//   - So is one that it does not keep, while it says that it gives those, too (cache.Volume.Gives); and otherwise one
//     in cache.GiftSample, by which it finds out whether it should.
//   - What its owner in the zone does not keep is read from the owner in another zone, if that has it. Everything else
//     is read from the store.
//   - When the nodes change, ownership is computed anew. What an extent's new owner does not have it asks its former
//     owner for, and then the store. Until all have noticed, two nodes may fetch the same extent.

// members are the nodes of a zone that have a dataset open, as of one view of the cluster. Immutable.
type members struct {
	rev   int64
	nodes []cluster.Node // by ID
	self  int            // this node's index; -1 if it is not among them
	table *owner.Table   // by bucket; nil without nodes

	away   bool     // it is another zone than this node's
	former *members // whose owners may still have what has moved since; nil: the start
	// of former ones, by ID: who is still a node that has the dataset open, if only to drain; nil: all
	here map[string]bool
	far  []*members // the other zones
}

// sharing is a version of a dataset in a cluster. It implements cache.Peers.
type sharing struct {
	e    *Engine
	v    *view
	unit func(file, extent int) uint64
	now  atomic.Pointer[members]
	told sync.Map // by Instance, the *peer.Terms that a node told last
}

// How long the opening of a dataset waits: for etcd to answer, for the nodes to agree (and for the lease of another
// process with this node's ID to end).
const (
	mostAway  = 5 * time.Second
	mostQuiet = 15 * time.Second
)

func (e *Engine) datasetID() string { return hex.EncodeToString(e.dataset[:]) }

// membersOf returns the nodes that have the dataset open: those of this node's zone, and the others.
func (e *Engine) membersOf(view cluster.View) *members {
	m, id := &members{rev: view.Rev, self: -1}, e.datasetID()
	zones := map[string]*members{e.host.node.cfg.Zone: m}
	for _, n := range view.Nodes {
		if !n.Has(id) || n.Draining {
			continue
		}
		z := zones[n.Zone]
		if z == nil {
			z = &members{self: -1, away: true}
			zones[n.Zone], m.far = z, append(m.far, z)
		}
		if n.ID == e.host.node.id {
			z.self = len(z.nodes)
		}
		z.nodes = append(z.nodes, n)
	}
	return m
}

// all returns the nodes of all zones.
func (m *members) all() []cluster.Node {
	nodes := slices.Clone(m.nodes)
	for _, z := range m.far {
		nodes = append(nodes, z.nodes...)
	}
	return nodes
}

// same reports whether the same nodes own the same extents.
func (m *members) same(other *members) bool {
	return other != nil && slices.EqualFunc(m.nodes, other.nodes, func(a, b cluster.Node) bool {
		return a.ID == b.ID && a.Weight == b.Weight
	})
}

// still returns the same members, of which those are asked no more who have left a view for good.
func (m *members) still(view cluster.View, dataset string) *members {
	if m == nil {
		return nil
	}
	now := *m
	now.here = map[string]bool{}
	for _, n := range view.Nodes {
		now.here[n.ID] = n.Has(dataset)
	}
	return &now
}

// enterCluster says that this node has the dataset open, and waits until the others know it and have agreed on who else
// has. A node that does not reach etcd begins alone.
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
			e.log.Info("in the cluster", "nodes", len(m.nodes), "node", n.id,
				"waited", time.Since(began).Round(time.Millisecond))
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

// shareLoop follows the cluster's changes until ctx ends, and those that came while another version was made ready.
func (e *Engine) shareLoop(ctx context.Context) {
	moved := make(chan struct{}, 1)
	defer e.OnMoved(func([]int) { pause.Poke(moved) })()
	for {
		changed := e.host.node.cluster.Changed()
		view := e.host.node.cluster.View()
		e.cur.Load().sharing.follow(view)
		e.host.node.retain(view)
		select {
		case <-changed:
		case <-moved:
		case <-ctx.Done():
			return
		}
	}
}

// follow takes a view of the cluster. If the nodes of the zone have changed, it chooses anew what this node keeps.
func (s *sharing) follow(view cluster.View) {
	m, before := s.e.membersOf(view), s.now.Load()
	if len(m.all()) == 0 { // etcd has not been reached yet: this node is alone
		if before == nil {
			s.now.Store(m)
		}
		return
	}
	var known []*members
	if before != nil {
		known = before.far
	}
	for _, far := range m.far {
		if i := slices.IndexFunc(known, far.same); i >= 0 {
			far.table = known[i].table
		} else {
			far.table = owner.NewTable(s.owners(far.nodes))
		}
	}
	if m.same(before) {
		m.table, m.former = before.table, before.former.still(view, s.e.datasetID())
		s.now.Store(m)
		return
	}
	switch {
	case before != nil && before.table != nil:
		m.former = before.still(view, s.e.datasetID())
		m.former.former = nil
	case m.self >= 0 && s.e.cur.Load() == nil: // this node has just come
		m.former = &members{self: -1, nodes: slices.Delete(slices.Clone(m.nodes), m.self, m.self+1)}
		m.former.table = owner.NewTable(s.owners(m.former.nodes))
	}
	owners := s.owners(m.nodes)
	if m.table = owner.NewTable(owners); m.former != nil {
		m.table = m.former.table.Next(owners)
	}
	s.now.Store(m)
	owned := make(owner.Set, owner.Buckets/64)
	if m.self >= 0 {
		owned = owners.Owned(m.self)
	}
	s.v.keeping.own(owned)
	if before != nil {
		s.e.log.Info("the cluster has changed", "nodes", len(m.all()), "before", len(before.all()), "revision", m.rev)
	}
}

// owners places the dataset's units among nodes.
func (s *sharing) owners(nodes []cluster.Node) *owner.Owners {
	weights := make([]owner.Node, len(nodes))
	for i, n := range nodes {
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
	if m == nil || len(m.all()) < 2 {
		return ""
	}
	return m.all()[s.owners(m.all()).Of(0)].ID
}

func (s *sharing) Owns(file, extent int) bool {
	m := s.now.Load()
	return m != nil && m.table != nil && m.table.Of(owner.Bucket(s.unit(file, extent))) == m.self
}

func (s *sharing) Sampled(file, extent int) bool {
	return owner.Bucket(s.unit(file, extent))%cache.GiftSample == 0
}

func (s *sharing) Nodes() int { return len(s.now.Load().nodes) }

// keeper returns which of these members is to be asked for an extent; -1: none, or this node. keeps: it has said that
// it keeps it. held: it is asked for what it has only.
func (s *sharing) keeper(m *members, file, extent int, held bool) (i int, keeps bool) {
	if m == nil || m.table == nil || m.away && s.v.volume.Chooses(file, extent) {
		return -1, false
	}
	bucket := owner.Bucket(s.unit(file, extent))
	if i = m.table.Of(bucket); i < 0 || i == m.self || m.here != nil && !m.here[m.nodes[i].ID] {
		return -1, false
	}
	told, known := s.told.Load(m.nodes[i].Instance)
	t, _ := told.(*peer.Terms)
	keeps = known && prefetch.Admits(t.Below, bucketKey(bucket))
	if !known || keeps || bucket%cache.GiftSample == 0 || t.Gives && !held {
		return i, keeps
	}
	return -1, false
}

// kept reports whether another node keeps an extent.
func (s *sharing) kept(file, extent int) bool {
	if s == nil {
		return false
	}
	_, keeps := s.keeper(s.now.Load(), file, extent, false)
	return keeps
}

// elsewhere reports whether other nodes keep what this one does not have of a file.
func (s *sharing) elsewhere(file int) bool {
	if s == nil {
		return false
	}
	for x := range s.v.volume.Extents(file) {
		if !s.kept(file, x) && !s.v.volume.KeptExtent(file, x) {
			return false
		}
	}
	return true
}

func (s *sharing) Asks(file, extent int) bool {
	m := s.now.Load()
	i, _ := s.keeper(m, file, extent, false)
	if i < 0 {
		return false
	}
	_, lies := s.e.host.node.liars.Load(m.nodes[i].Instance)
	return !lies && s.e.host.node.client.Ready(m.nodes[i].ID)
}

// Read implements cache.Peers. What nobody is to fetch is asked of its former owner, and, unless this node is to keep
// it, of its owners in other zones.
func (s *sharing) Read(ctx context.Context, wants []cache.Want, held bool, check check) (rest []cache.Want) {
	m := s.now.Load()
	if m == nil || !held {
		return s.read(ctx, m, wants, false, check)
	}
	for _, z := range append([]*members{m.former}, m.far...) {
		wants = s.read(ctx, z, wants, true, check)
	}
	return wants
}

// read asks one of these members after another: neighbours in a shard have the same owner.
func (s *sharing) read(ctx context.Context, m *members, wants []cache.Want, held bool, check check) (
	rest []cache.Want) {
	if m == nil {
		return wants
	}
	of := func(w cache.Want) int {
		i, _ := s.keeper(m, w.File, int(w.Off/cache.ExtentSize), held)
		return i
	}
	for len(wants) > 0 {
		i, same := of(wants[0]), 1
		for same < len(wants) && of(wants[same]) == i {
			same++
		}
		if i >= 0 {
			rest = append(rest, s.ask(ctx, m.nodes[i], wants[:same], held, check)...)
		} else {
			rest = append(rest, wants[:same]...)
		}
		wants = wants[same:]
	}
	return rest
}

// distrust has a node that gave other bytes than the store asked nothing any more, until one of the two starts again,
// and what this node has compared with the store.
func (s *sharing) distrust(n cluster.Node, file int) {
	if _, before := s.e.host.node.liars.LoadOrStore(n.Instance, true); before {
		return
	}
	s.e.log.Error("a node of the cluster gave other bytes than the store; it is no longer asked, and what is cached "+
		"here is compared with the store",
		"node", n.ID, "address", n.Address, "path", s.v.manifest.Path(file), "remedy",
		"stop that node, and run `shoal fsck` and `shoal cache verify` there")
	for _, e := range s.e.host.engines() {
		pause.Poke(e.lied)
	}
}

type check = func(context.Context, cache.Want) error

var errNotGiven = errors.New("not given")

// ask reads pieces from a node, and returns those that it did not give.
func (s *sharing) ask(ctx context.Context, n cluster.Node, wants []cache.Want, held bool, check check) (
	rest []cache.Want) {
	// one that owned it, or owns it in an old version, may be elsewhere by now, or gone
	nodes := s.e.host.node.cluster.View().Nodes
	at := slices.IndexFunc(nodes, func(now cluster.Node) bool { return now.ID == n.ID })
	if at < 0 {
		return wants
	}
	n = nodes[at]
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
		s.told.Store(n.Instance, terms)
	}
	for i, p := range pieces {
		err := errNotGiven
		if _, lies := s.e.host.node.liars.Load(n.Instance); p.Filled && !lies {
			if p.Coded > 0 {
				*wants[i].Coded = p.Coded
			}
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
