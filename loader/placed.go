package loader

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"sync/atomic"

	"github.com/shoalfs/shoal/cache/owner"
	"github.com/shoalfs/shoal/loader/feedpb"
	"github.com/shoalfs/shoal/prefetch/order"
)

// Owned is a Dataset whose samples are kept by the nodes of a cluster, each by one.
type Owned interface {
	Dataset
	// Source names the dataset in all versions, equally on all nodes.
	Source() [16]byte
	// Units returns what of the dataset has one owner, and holds the sample, or its beginning (owner.Placement.Owners).
	Units() func(sample int) uint64
}

// unitsOf returns the units of a dataset's samples.
func unitsOf(ds Dataset) (source [16]byte, unit func(sample int) uint64, err error) {
	switch ds := ds.(type) {
	case *Packed: // by the longest document
		source, unit, err = unitsOf(ds.Dataset)
		return source, func(row int) uint64 { return unit(int(ds.Documents(row)[0])) }, err
	case Owned:
		return ds.Source(), ds.Units(), nil
	}
	return source, nil, errors.New("placement: this server's dataset has no owners: open without a placement")
}

// placement deals a session's global batches out by owner.
type placement struct {
	*owner.Placement
	digest string
	owner  func(sample int) int // shared by the ranks on this server
}

// parsePlacement reads an Open's placement for a world of ranks; nil if it has none.
func parsePlacement(text string, world int) (*placement, error) {
	if text == "" {
		return nil, nil
	}
	p, err := owner.ParsePlacement(text)
	if err != nil {
		return nil, err
	}
	if p.World() != world {
		return nil, fmt.Errorf("placement of %d ranks: the session's world has %d: make the placement with the ranks "+
			"that there are now (shoal.placement)", p.World(), world)
	}
	return &placement{Placement: p, digest: p.Digest()}, nil
}

// name is the digest, "" without a placement.
func (p *placement) name() string {
	if p == nil {
		return ""
	}
	return p.digest
}

// place gives the session's placement its owners: those of another session of the same samples and placement, or new
// ones.
func (s *Server) place(sp *spec) error {
	source, unit, err := unitsOf(sp.ds)
	if err != nil {
		return invalid("%w", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for open := range s.sessions {
		if o := open.spec; o.placement.name() == sp.placement.digest && o.ds.Version() == sp.ds.Version() &&
			o.hash == sp.hash {
			sp.placement.owner = o.placement.owner
			return nil
		}
	}
	sp.placement.owner = sp.placement.Owners(source, unit)
	return nil
}

// besides reports whether the session is of another rank of a job, and open.
func (s *session) besides(job string, world, rank int) bool {
	return s.spec.session == job && s.spec.world == world && s.spec.rank != rank && s.ctx.Err() == nil
}

// agree refuses a session whose placement or version is not that of the job's other ranks: samples would be read twice,
// and others not at all. The caller holds s.mu.
func (s *Server) agree(by *session) error {
	for open := range s.sessions {
		o, sp := open.spec, by.spec
		if !open.besides(sp.session, sp.world, sp.rank) {
			continue
		}
		if mine, other := by.ds.Version(), open.ds.Version(); mine != other { // it changed while both were being opened
			return refused("rank %d has dataset %.12s, and rank %d of session %s dataset %.12s: it was refreshed "+
				"meanwhile; close the feeds of all ranks, and open them again", sp.rank, mine, o.rank, o.session, other)
		}
		if o.placement.name() != sp.placement.name() {
			return refused("rank %d has placement %q, and rank %d of session %s placement %q: give all ranks the same "+
				"one; before a job goes on with another, all its ranks close their feeds", sp.rank, sp.placement.name(),
				o.rank, o.session, o.placement.name())
		}
	}
	return nil
}

// warnAway tells of a session whose placement has its rank on another node: most of what it reads is then not here.
func (s *Server) warnAway(sp *spec) {
	id, _, ok := s.o.Node()
	if !ok || sp.placement == nil || sp.placement.Home(sp.rank) == id {
		return
	}
	s.log.Warn("a feed session's placement is for another node: its samples are not kept here; make a new one "+
		"(shoal.placement), from this server's address",
		"session", sp.session, "rank", sp.rank, "node", id, "placement_node", sp.placement.Home(sp.rank))
}

// placedOrder is a rank's share of an order, position by position as its batches are. Before the cursor are the batches
// that came earlier in the epoch, the first of them as short as the cursor makes it.
type placedOrder struct {
	whole       order.Order
	by          *placement
	base, lead  int // the global position, and the length of the rank's share, of that short batch
	batch, rank int
	n           int
	dealt       []atomic.Pointer[[]uint32] // by batch: the rank's share, once it is known
}

func newPlacedOrder(whole order.Order, cursor, batch, rank int, by *placement) *placedOrder {
	world := by.World()
	base := cursor % world
	o := &placedOrder{whole: whole, by: by, base: base, batch: batch, rank: rank, lead: cursor / world % batch,
		n: (whole.Len() - base - rank + world - 1) / world}
	o.dealt = make([]atomic.Pointer[[]uint32], o.n/batch+2)
	return o
}

func (o *placedOrder) Len() int { return o.n }

func (o *placedOrder) At(pos int) int { return o.whole.At(o.global(pos)) }

// of returns the number of the batch that has a position of the share, where its share begins, and where the batch
// does.
func (o *placedOrder) of(pos int) (k, share, first int) {
	k = (pos - o.lead + o.batch) / o.batch
	share = max(0, o.lead+(k-1)*o.batch)
	return k, share, o.base + share*o.by.World()
}

// global returns the global position that the rank reads at a position of its share.
func (o *placedOrder) global(pos int) int {
	k, share, first := o.of(pos)
	return first + int(o.mine(k, first)[pos-share])
}

// mine returns the rank's share of a batch.
func (o *placedOrder) mine(k, first int) []uint32 {
	if known := o.dealt[k].Load(); known != nil {
		return *known
	}
	end := min(o.whole.Len(), o.base+(o.lead+k*o.batch)*o.by.World())
	mine := o.by.Deal(end-first, func(i int) int { return o.by.owner(o.whole.At(first + i)) }, o.rank)
	o.dealt[k].Store(&mine)
	return mine
}

// placedLocator is a placedOrder of a Locator.
type placedLocator struct {
	*placedOrder
	l order.Locator
}

func (o placedLocator) Find(sample, from int) int {
	for g := o.l.Find(sample, o.base); g >= 0; g = o.l.Find(sample, g+1) {
		// A position of about this batch: the one that reads g in the plain plan, of rank 0.
		k, share, first := o.of((g - o.base) / o.by.World())
		i, ok := slices.BinarySearch(o.mine(k, first), uint32(g-first))
		if pos := share + i; ok && pos >= from {
			return pos
		}
	}
	return -1
}

// ownersPart is how many samples' owners are in a message.
const ownersPart = 256 << 10

func (v service) Owners(r *feedpb.OwnersRequest, to feedpb.Feed_OwnersServer) error {
	ds := v.s.ds()
	p, err := owner.ParsePlacement(r.GetPlacement())
	if err != nil {
		return toStatus(invalid("%w", err))
	}
	source, unit, err := unitsOf(ds)
	if err == nil && p.Nodes() > math.MaxUint16 {
		err = fmt.Errorf("placement of %d nodes, more than %d", p.Nodes(), math.MaxUint16)
	}
	if err != nil {
		return toStatus(invalid("%w", err))
	}
	owner := p.Owners(source, unit)
	part := &feedpb.OwnersPart{Dataset: ds.Version()}
	for sample := range ds.Len() {
		of := owner(sample)
		part.Owners = append(part.Owners, byte(of), byte(of>>8))
		if len(part.Owners) == 2*ownersPart || sample == ds.Len()-1 {
			if err := to.Send(part); err != nil {
				return err
			}
			part = &feedpb.OwnersPart{}
		}
	}
	return nil
}
