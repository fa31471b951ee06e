package cache

import (
	"context"
	"errors"
	"fmt"
	"math/bits"
	"slices"
	"time"

	"github.com/shoalfs/shoal/cache/objstore"
)

// Peers. Other nodes have caches of the same dataset. A flight asks them first, and the store for the rest; a node
// serves what others ask it for.
//
//   - A request goes one hop. What serves a peer is memory, the disk, or a flight that asks no peer to fetch. Such a
//     flight may ask for what another node holds, which answers at once: so extents move to a new owner.
//   - Serve never waits for memory or for another node. So it ends when the store does, and nodes whose views differ
//     cannot wait for each other. Its memory counts as demand: prefetching leaves some of that, and the server bounds
//     how much of it peers get.
//   - An extent that is fetched for a peer is kept by the usual rule, and is spent in memory.
//   - A part of an extent that is not here is not fetched for a peer, unless the disk would keep it and one of its
//     granules was asked for before: the rule of granules.go, over all nodes.

// Want is a piece of one extent of a file, to be read into P.
type Want struct {
	File int
	Off  int64
	P    []byte
	// Coded is not nil if P is of a whole file that may come in its coded form, from a node or a store that keeps it so. Then its
	// length, which is less than P's, is stored there.
	Coded *int
}

// Peers are the caches of other nodes.
type Peers interface {
	// Asks reports whether Read would ask another node for an extent. It is called under a lock: it must not wait, nor
	// call the volume.
	Asks(file, extent int) bool
	// Read fills those wants that another node has, and returns the rest, in their order, for the store. held: only what
	// that node has already. It never fails. It must not write to any P after it has returned. It may keep or change the
	// slice.
	Read(ctx context.Context, wants []Want, held bool) (rest []Want)
}

// Errors of Serve.
var (
	ErrBusy    = errors.New("cache: no memory now, or the bytes are on their way from another node")
	ErrNotHeld = errors.New("cache: not held")
)

// SetPeers replaces VolumeOptions.Peers.
func (v *Volume) SetPeers(p Peers) {
	if p == nil {
		v.peers.Store(nil)
		return
	}
	v.peers.Store(&p)
}

// asks reports whether a flight of the extent asks a peer.
func (v *Volume) asks(file, x int) bool {
	p := v.peers.Load()
	return p != nil && (*p).Asks(file, x)
}

// fetch fills the wants, which lie in one object in this order: from peers, which fetch them only if asks is set, and the
// rest from the store.
func (v *Volume) fetch(ctx context.Context, asks bool, wants []Want) error {
	if p := v.peers.Load(); p != nil {
		all := slices.Clone(wants)
		wants = (*p).Read(ctx, wants, !asks)
		v.ds.count.peerBytes.Add(total(all) - total(wants))
		if len(wants) == 0 {
			return nil
		}
	}
	o, base := v.object(wants[0].File)
	r, codes := v.store.(objstore.CodedReader)
	if len(wants) == 1 && (!codes || wants[0].Coded == nil) {
		return v.store.ReadAt(ctx, o, wants[0].P, base+wants[0].Off)
	}
	spans, coded := make([]objstore.Span, len(wants)), make([]*int, len(wants))
	for i, w := range wants {
		_, base := v.object(w.File)
		spans[i], coded[i] = objstore.Span{Off: base + w.Off, P: w.P}, w.Coded
	}
	if codes {
		return r.ReadCoded(ctx, o, spans, coded)
	}
	return objstore.ReadSpans(ctx, v.store, o, spans)
}

func total(wants []Want) (n int64) {
	for _, w := range wants {
		if n += int64(len(w.P)); w.Coded != nil && *w.Coded > 0 {
			n += int64(*w.Coded - len(w.P))
		}
	}
	return n
}

// want is the want of a flight that fetches a whole extent into b.
func (v *Volume) want(fl *flight, file, x int, b *Buffer) Want {
	w := Want{File: file, Off: int64(x) * ExtentSize, P: b.data}
	v.mu.Lock()
	defer v.mu.Unlock()
	if fl.takesCoded && v.codec != nil && v.Extents(file) == 1 {
		w.Coded = &b.coded
	}
	return w
}

// Serve lends n bytes of one extent of the file to a peer, whose reader needs them at due; if that is not in the future
// it waits. They are valid and do not change until release. held: only what is in memory or on disk.
func (v *Volume) Serve(ctx context.Context, file int, off int64, n int, due time.Time, held bool) (data []byte, release func(), err error) {
	if file < 0 || file >= v.m.Len() || n <= 0 || off < 0 || off >= v.m.Size(file) {
		return nil, nil, fmt.Errorf("cache: there are no %d bytes at %d of file %d", n, off, file)
	}
	x := int(off / ExtentSize)
	in := int(off % ExtentSize)
	if int64(n) > v.ExtentBytes(file, x)-int64(in) {
		return nil, nil, fmt.Errorf("cache: %d bytes at %d of file %d are not in one extent", n, off, file)
	}
	for {
		b, at, err := v.serve(ctx, file, x, in, n, due, held)
		if err != nil {
			return nil, nil, err
		}
		if b != nil {
			return b.Bytes()[in-at:][:n], b.Release, nil
		}
		// It was kept in the meantime, or its record was lost.
	}
}

// serve returns a buffer with the bytes, and where in the extent it begins; nil if the extent has moved.
func (v *Volume) serve(ctx context.Context, file, x, in, n int, due time.Time, held bool) (b *Buffer, at int, err error) {
	e := v.extent(file, x)
	if b := v.c.get(v.key(e), 0); b != nil {
		return b, 0, nil
	}
	if v.onDisk(e) && v.restores(e) == 0 {
		if b = v.spare(n); b == nil {
			return nil, 0, ErrBusy
		}
		if ok, err := v.readKept(ctx, file, x, e, b.data, int64(in)); !ok {
			b.Release()
			return nil, 0, err
		}
		return b, in, nil
	}
	if g := in / granuleSize; v.Extents(file) > 1 && in+n <= (g+1)*granuleSize {
		if b := v.c.get(extentKey{v, e, uint8(g + 1)}, 0); b != nil {
			return b, g * granuleSize, nil
		}
	}
	b, err = v.acquireForPeer(ctx, file, x, in, n, due, held)
	return b, 0, err
}

// ServeCoded lends the coded form of a file that is here so, to a peer that asks for the whole file and can decode what
// [Codec].Form calls form. It waits for nothing but the disk.
func (v *Volume) ServeCoded(ctx context.Context, file int, off int64, n int, form [8]byte) (data []byte, release func(), ok bool) {
	if v.codec == nil || file < 0 || file >= v.m.Len() || off != 0 || v.Extents(file) != 1 || int64(n) != v.m.Size(file) {
		return nil, nil, false
	}
	e := v.extent(file, 0)
	b := v.c.getCoded(v.key(e), 0)
	if b == nil {
		b, _ = v.readCoded(ctx, file, e, func(n int) (*Buffer, error) { return v.spare(n), nil })
	}
	if b == nil {
		return nil, nil, false
	}
	if v.codec.Form(b.Bytes()) != form {
		b.Release()
		return nil, nil, false
	}
	return b.Bytes(), b.Release, true
}

// spare returns a buffer if there is memory for it now. It may take what prefetching leaves for demand: the server bounds how
// much peers get of that.
func (v *Volume) spare(n int) *Buffer {
	if !v.c.ledger.TryReserve(footprint(n), ForDemand) {
		return nil
	}
	return newBuffer(v.c.ledger, n, ForDemand)
}

// acquireForPeer returns the extent's buffer from a flight; nil if it has one, or the disk, by now.
func (v *Volume) acquireForPeer(ctx context.Context, file, x, in, n int, due time.Time, held bool) (*Buffer, error) {
	e, size := v.extent(file, x), int(v.ExtentBytes(file, x))
	reserved, coded := int64(0), v.restores(e)
	defer func() {
		if reserved > 0 {
			v.c.ledger.Release(reserved, ForDemand)
		}
	}()
	if !v.flying(e) && (coded > 0 || !held && v.fetchesPart(file, x, e, in, n)) {
		if !v.c.ledger.TryReserve(restoring(size, coded), ForDemand) {
			return nil, ErrBusy
		}
		reserved = restoring(size, coded)
	}
	now := !due.After(time.Now())
	v.mu.Lock()
	fl, ok := v.flights[e]
	switch {
	case ok && fl.buf != nil:
		fl.buf.Retain()
		v.mu.Unlock()
		return fl.buf, nil
	case ok && held:
		v.mu.Unlock()
		return nil, ErrNotHeld
	case ok && (fl.asks || !fl.funded.Load()):
		v.mu.Unlock()
		return nil, ErrBusy
	case ok:
		fl.takesCoded = false
	case (v.c.ring.has(v.key(e)) || v.onDisk(e)) && (coded == 0 || v.restores(e) != coded): // it has changed meanwhile
		v.mu.Unlock()
		return nil, nil
	case reserved == 0:
		v.mu.Unlock()
		return nil, ErrNotHeld
	case coded == 0 && time.Now().Before(v.failed[e].until):
		defer v.mu.Unlock()
		return nil, v.failed[e].err
	case !v.ds.enter(1):
		v.mu.Unlock()
		return nil, ErrClosed
	default:
		fl = v.launch(e, size, nil, objstore.NewUrgency(due))
		fl.spent, fl.class, fl.coded, reserved = true, ForDemand, coded, 0
		delete(v.sparse, e)
		v.ds.crew.do(func() { v.fly(fl, file, x, e, nil) })
	}
	if now && fl.urgency != nil {
		fl.urgency.Raise()
	}
	done := v.join(fl)
	v.mu.Unlock()
	select {
	case <-done:
		if fl.buf != nil && fl.buf.coded > 0 { // to be restored
			fl.buf.Release()
			return nil, nil
		}
		return fl.buf, fl.err
	case <-ctx.Done():
		v.detach(fl)
		return nil, ctx.Err()
	}
}

func (v *Volume) flying(e uint32) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	_, ok := v.flights[e]
	return ok
}

// fetchesPart reports whether an extent is fetched for a peer that asks for a part of it, and notes the part.
func (v *Volume) fetchesPart(file, x int, e uint32, in, n int) bool {
	if n == int(v.ExtentBytes(file, x)) || v.Extents(file) == 1 {
		return true
	}
	keeps := v.keeps(file, x)
	v.mu.Lock()
	defer v.mu.Unlock()
	var now uint64
	for g := in / granuleSize; g <= (in+n-1)/granuleSize; g++ {
		now |= 1 << g
	}
	before := v.sparse[e]
	if keeps && (before&now != 0 || bits.OnesCount64(before|now) > mostSparse) {
		return true
	}
	if v.sparse == nil {
		v.sparse, v.pieces = map[uint32]uint64{}, map[extentKey]*flight{}
	}
	v.sparse[e] = before | now
	return false
}
