package cache

import (
	"bytes"
	"context"
	"crypto/md5" //nolint:gosec // see sum
	"encoding/hex"
	"fmt"
	"slices"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/cache/segment"
)

// Want is a piece of one extent of a file, to be read into P.
type Want struct {
	File int
	Off  int64
	P    []byte
	// Coded is not nil if P is of a whole file that may come in its coded form. Then its length, which is less than P's, is
	// stored there.
	Coded *int
}

// Source is a place that bytes come from. A flight asks its sources in turn: the coded copy of a file, other nodes, the store.
type Source interface {
	// Fill fills some of the wants, which lie in one object in this order, and returns the others in the same order for the
	// next source. The last source fills all, or fails. It may keep or change the slice, but it writes to no P after it has
	// returned.
	Fill(ctx context.Context, wants []Want) (rest []Want, err error)
}

// Peers are the caches of other nodes.
type Peers interface {
	// Asks reports whether Read would ask another node for an extent. It is called under a lock: it must not wait, nor
	// call the volume.
	Asks(file, extent int) bool
	// Read is Fill, and never fails. held: only what that node has already.
	Read(ctx context.Context, wants []Want, held bool) (rest []Want)
	// Distrust says that a node gave other bytes of an extent than the store.
	Distrust(file, extent int)
}

// reach is what a volume can ask, for flights that may have another node fetch, and for those that may not.
type reach struct {
	peers         Peers // nil: none
	asking, store []Source
}

// SetPeers replaces VolumeOptions.Peers.
func (v *Volume) SetPeers(p Peers) {
	r := &reach{peers: p, store: []Source{store{v}}}
	r.asking = r.store
	if p != nil {
		r.asking, r.store = []Source{nodes{v, p, false}, store{v}}, []Source{nodes{v, p, true}, store{v}}
	}
	v.reach.Store(r)
}

// sources returns what a flight of the extent asks: for a peer, no node that would have to fetch.
func (v *Volume) sources(p purpose, file, x int) []Source {
	r := v.reach.Load()
	if p != serving && r.peers != nil && r.peers.Asks(file, x) {
		return r.asking
	}
	return r.store
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

// Fill implements Source.
func (n nodes) Fill(ctx context.Context, wants []Want) (rest []Want, err error) {
	all := slices.Clone(wants)
	rest = n.p.Read(ctx, wants, n.held)
	n.v.ds.count.peerBytes.Add(total(all) - total(rest))
	left := 0
	for _, w := range all {
		if left < len(rest) && &rest[left].P[0] == &w.P[0] {
			left++
		} else if err := n.check(ctx, w); err != nil {
			return nil, err
		}
	}
	return rest, nil
}

// check compares what a node gave with what the store said. The ETag of a whole object is the MD5 of its bytes, as a rule; if it is not,
// or the bytes are others, the store is asked. Of what has no such ETag one piece in auditEvery is compared with the store's.
func (n nodes) check(ctx context.Context, w Want) error {
	v := n.v
	file, good := v.plain(w)
	etag := v.m.ETag(w.File)
	sums := v.Extents(w.File) == 1 && !v.otherTags.Load() && len(etag) == 2*md5.Size
	switch {
	case good && sums && hex.EncodeToString(sum(file)) == etag:
		return nil
	case good && !sums && v.audits.Add(1)%auditEvery != 0:
		return nil
	}
	theirs := make([]byte, len(w.P))
	_, err := (store{v}).Fill(ctx, []Want{{File: w.File, Off: w.Off, P: theirs}})
	switch {
	case err != nil && good && !sums: // the store is away, and nothing speaks against the node
	case err != nil:
		return err
	case good && bytes.Equal(file, theirs):
		v.otherTags.CompareAndSwap(false, sums) // as of a bucket encrypted with keys of its own
	default:
		if copy(w.P, theirs); w.Coded != nil {
			*w.Coded = 0
		}
		n.p.Distrust(w.File, int(w.Off/ExtentSize))
	}
	return nil
}

// auditEvery is one in how many pieces that only the store can vouch for are compared with it.
const auditEvery = 64

// plain returns the file of a want that a node has filled; false if it cannot be restored.
func (v *Volume) plain(w Want) ([]byte, bool) {
	if w.Coded == nil || *w.Coded == 0 {
		return w.P, true
	}
	file, err := v.codec.Decode(getBytes(len(w.P))[:0], w.P[:*w.Coded])
	return file, err == nil
}

func sum(p []byte) []byte {
	s := md5.Sum(p) //nolint:gosec // the ETags of S3 are; an attacker who can make collisions can write to the bucket
	return s[:]
}

func total(wants []Want) (n int64) {
	for _, w := range wants {
		if n += int64(len(w.P)); w.Coded != nil && *w.Coded > 0 {
			n += int64(*w.Coded - len(w.P))
		}
	}
	return n
}

// store is the object store.
type store struct{ v *Volume }

// Fill implements Source.
func (s store) Fill(ctx context.Context, wants []Want) (rest []Want, err error) {
	o, base := s.v.object(wants[0].File)
	r, codes := s.v.store.(objstore.CodedReader)
	if len(wants) == 1 && (!codes || wants[0].Coded == nil) {
		return nil, s.v.store.ReadAt(ctx, o, wants[0].P, base+wants[0].Off)
	}
	spans, coded := make([]objstore.Span, len(wants)), make([]*int, len(wants))
	for i, w := range wants {
		_, base := s.v.object(w.File)
		spans[i], coded[i] = objstore.Span{Off: base + w.Off, P: w.P}, w.Coded
	}
	if codes {
		return nil, r.ReadCoded(ctx, o, spans, coded)
	}
	return nil, objstore.ReadSpans(ctx, s.v.store, o, spans)
}

// object returns where the file's bytes lie.
func (v *Volume) object(file int) (o objstore.Object, off int64) {
	if v.locate != nil {
		return v.locate.Locate(file)
	}
	return v.m.Object(file), 0
}

// named adds the file's name to a store's error, which names the object, if the file is packed.
func (v *Volume) named(file int, err error) error {
	if v.locate == nil || err == nil {
		return err
	}
	return fmt.Errorf("%s: %w", v.m.Path(file), err)
}

// restorer is the coded copy of a file that is here: in memory, or else on disk.
type restorer struct {
	key      extentKey
	file     int
	staged   *Buffer // with a reference
	loc      segment.Loc
	n        int // bytes at loc
	restored bool
}

// need returns the memory for coded bytes that are read from the disk.
func (r *restorer) need() int64 {
	if r == nil || r.staged != nil {
		return 0
	}
	return footprint(r.n)
}

// Fill implements Source. A copy from which the file does not come back is forgotten.
func (r *restorer) Fill(ctx context.Context, wants []Want) (rest []Want, err error) {
	if r.staged != nil {
		r.restored = r.fromMemory(wants[0].P)
	} else {
		r.restored, err = r.fromDisk(ctx, wants[0].P)
	}
	if r.restored {
		return nil, nil
	}
	return wants, err
}

func (r *restorer) fromMemory(p []byte) bool {
	v, e := r.key.v, r.key.extent()
	err := v.decode(p, r.staged.data)
	if err == nil {
		return true
	}
	v.ds.count.corrupt.Add(1)
	v.c.ring.discard(r.key)
	if loc, _, coded := v.record(e, r.file, 0); coded && v.unplace(e, r.file, loc) { // written from there
		v.ds.disk.Load().free(loc)
	}
	v.c.log.Warn("a file from another node cannot be restored; it is fetched again", "path", v.m.Path(r.file), "cause", err)
	return false
}

func (r *restorer) fromDisk(ctx context.Context, p []byte) (ok bool, err error) {
	v := r.key.v
	b := newBuffer(v.c.ledger, r.n, ForDemand)
	defer b.Release()
	d := v.ds.readable()
	if d == nil {
		return false, nil
	}
	return v.readRecord(ctx, d, r.file, r.key.extent(), r.loc, func() error {
		if err := d.read(ctx, r.loc, r.n, b.data, 0); err != nil {
			return err
		}
		return v.decode(p, b.data)
	})
}

// close gives up what the restorer holds.
func (r *restorer) close() {
	if r != nil && r.staged != nil {
		r.staged.Release()
	}
}
