package cache

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"sync/atomic"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/cache/segment"
)

// Want is a piece of one extent of a file, to be read into P.
type Want struct {
	File int
	Off  int64
	P    []byte
	// Coded is not nil if P is of a whole file that may come coded: then that form's length, less than P's, goes there.
	Coded *int
}

// Source is a place that bytes come from. A flight asks other nodes, then the store; or a file's coded copy alone.
type Source interface {
	// Fill fills some of the wants, which lie in one object in this order, and returns the others in the same order for
	// the next source. The last source fills all, or fails. It may keep or change the slice, but it writes to no P
	// after it has returned.
	Fill(ctx context.Context, wants []Want) (rest []Want, err error)
}

// Peers are the caches of other nodes.
type Peers interface {
	// Asks reports whether Read would ask another node for an extent. It is called under a lock: it must not wait, nor
	// call the volume.
	Asks(file, extent int) bool
	// Owns reports whether other nodes ask this one for an extent.
	Owns(file, extent int) bool
	// Sampled reports whether the extent is of the sample that is asked of owners that do not keep it, and given.
	Sampled(file, extent int) bool
	// Nodes is how many nodes of its zone read the dataset, this one included.
	Nodes() int
	// Read is Fill, and never fails. held: only what that node has already. What a node gave is checked, and is among
	// the rest unless check returns nil. If it is ErrOtherBytes, the node is not to be asked any more.
	Read(ctx context.Context, wants []Want, held bool, check func(context.Context, Want) error) (rest []Want)
}

// ErrOtherBytes says that a node gave other bytes than the store has.
var ErrOtherBytes = errors.New("other bytes than the store has")

// SetPeers replaces VolumeOptions.Peers.
func (v *Volume) SetPeers(p Peers) { v.peers.Store(&p) }

// sources returns what a flight of the extent asks: for a peer, no node that would have to fetch.
func (p purpose) sources(v *Volume, file, x int) []Source {
	peers := *v.peers.Load()
	if peers == nil {
		return []Source{&v.store}
	}
	return []Source{nodes{v, peers, p == serving || !peers.Asks(file, x)}, &v.store}
}

// asks reports whether the flight may make another node fetch. No peer waits for such a flight: requests go one hop.
func (fl *flight) asks() bool {
	n, ok := fl.sources[0].(nodes)
	return ok && !n.held
}

// nodes is the caches of other nodes.
type nodes struct {
	v    *Volume
	p    Peers
	held bool
}

func (n nodes) Fill(ctx context.Context, wants []Want) (rest []Want, err error) {
	return n.p.Read(ctx, wants, n.held, n.check), nil
}

// check compares what a node gave with what the store said. Of one piece in auditEvery without an MD5, or fewer lest a
// zone's audits add up to more of the dataset, it compares a granule, both chosen by chance: a node may count. Where
// the store often confirms bytes with another MD5, as in a bucket that is encrypted with keys of its own, ETags say
// nothing, and such pieces are audited like the others.
func (n nodes) check(ctx context.Context, w Want) error {
	summed, s := false, &n.v.store
	_, err := s.vouch(ctx, w, func(sum bool, size int) (from, to int) {
		if summed = sum; sum && s.otherTags.Load() <= auditEvery+s.sums.Load()/16 {
			return 0, size
		}
		of := max(size, min(size, granuleSize)*(n.p.Nodes()-1))
		if rand.N(auditEvery*of) >= size { //nolint:gosec // no node sees it
			return 0, 0
		}
		from = rand.N((size+granuleSize-1)/granuleSize) * granuleSize //nolint:gosec // no node sees it
		return from, min(from+granuleSize, size)
	})
	got := len(w.P)
	if w.Coded != nil && *w.Coded > 0 {
		got = *w.Coded
	}
	if err != nil && (summed || errors.Is(err, ErrOtherBytes) || errors.Is(err, segment.ErrCorrupt)) {
		if w.Coded != nil {
			*w.Coded = 0
		}
		return err
	} // else the store is away, and nothing speaks against the node
	count(&n.v.ds.count.PeerBytes, got)
	return nil
}

const auditEvery = 64 // one in how many pieces that only the store can vouch for is audited

// store is the object store, for the files of one version.
type store struct {
	v       *Volume
	objects objstore.Reader
	locate  Locator

	// files from peers whose ETag was their MD5, and was not although the store has these bytes
	sums, otherTags atomic.Int64
}

// Fill implements Source. Extents of packed files are compared with the checksums of their shard's index. What differs
// is read once more: the fault may have been on the way.
func (s *store) Fill(ctx context.Context, wants []Want) (rest []Want, err error) {
	if err := s.read(ctx, wants); err != nil {
		return nil, err
	}
	for i, w := range wants {
		if known, right := s.summed(w); known && !right {
			if err := s.read(ctx, wants[i:i+1]); err != nil {
				return nil, err
			}
			if _, right := s.summed(w); !right {
				o, base := s.object(w.File)
				return nil, &objstore.Error{Op: "read", Key: o.Key, Kind: objstore.KindInvalid,
					Err: fmt.Errorf("what lies at %d does not have the checksum that the shard's index names",
						base+w.Off),
					Remedy: "restore the shard from a copy, or pack the source again into another place"}
			}
		}
	}
	return nil, nil
}

// summed reports whether a want's checksum is known, as of a packed file's whole plain extent, and whether it is right.
func (s *store) summed(w Want) (known, right bool) {
	x := int(w.Off / ExtentSize)
	if s.locate == nil || w.Off%ExtentSize != 0 || int64(len(w.P)) != s.v.ExtentBytes(w.File, x) ||
		w.Coded != nil && *w.Coded > 0 {
		return false, false
	}
	sum := s.locate.Sum(w.File, x)
	return sum != 0, sum != 0 && crc32.Checksum(w.P, castagnoli) == sum
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func (s *store) read(ctx context.Context, wants []Want) error {
	o, base := s.object(wants[0].File)
	r, codes := s.objects.(objstore.CodedReader)
	if len(wants) == 1 && (!codes || wants[0].Coded == nil) {
		return s.objects.ReadAt(ctx, o, wants[0].P, base+wants[0].Off)
	}
	spans, coded := make([]objstore.Span, len(wants)), make([]*int, len(wants))
	for i, w := range wants {
		_, base := s.object(w.File)
		spans[i], coded[i] = objstore.Span{Off: base + w.Off, P: w.P}, w.Coded
	}
	if codes {
		return r.ReadCoded(ctx, o, spans, coded)
	}
	return objstore.ReadSpans(ctx, s.objects, o, spans)
}

func (s *store) object(file int) (o objstore.Object, off int64) {
	if s.locate != nil {
		return s.locate.Locate(file)
	}
	return s.v.m.Object(file), 0
}

// named adds the file's name to a store's error, which names the object, if the file is packed.
func (s *store) named(file int, err error) error {
	if s.locate == nil || err == nil {
		return err
	}
	return fmt.Errorf("%s: %w", s.v.m.Path(file), err)
}

// restorer is the coded copy of a file that is here: in memory, or else on disk.
type restorer struct {
	keptRecord
	staged *buffer // with a reference
}

// need returns the memory for coded bytes that are read from the disk.
func (r *restorer) need() int64 {
	if r == nil || r.staged != nil {
		return 0
	}
	return footprint(r.n)
}

// Fill implements Source. A copy from which the file does not come back is forgotten, and ErrNotHeld has who waits look
// again: a reader fetches then, but not for each peer is that done.
func (r *restorer) Fill(ctx context.Context, wants []Want) (rest []Want, err error) {
	v, b := r.v, r.staged
	if b == nil {
		b = newBuffer(v.c.ledger, r.n, ForDemand)
		defer b.Release()
		if r.d.noReads.Load() { // by now
			return nil, ErrNotHeld
		}
		if ok, err := r.read(ctx, b.data, 0); !ok {
			return nil, cmp.Or(err, ErrNotHeld)
		}
	}
	if err = v.decode(wants[0].P, b.data, false); err == nil {
		return nil, nil
	}
	if r.staged == nil {
		r.forget(err)
		return nil, ErrNotHeld
	}
	count(&v.ds.count.Corrupt, 1)
	v.c.ring.take(r.as(coded), nil)
	if loc, n := v.at(r.extent()); n > 0 && v.unplace(r.extent(), loc) { // written from there
		v.ds.disk.Load().free(loc)
	}
	v.c.log.Warn("a file from another node cannot be restored; it is fetched again", "path", v.m.Path(r.file),
		"cause", err)
	return nil, ErrNotHeld
}

func (r *restorer) close() {
	if r != nil {
		r.staged.Release()
	}
}
