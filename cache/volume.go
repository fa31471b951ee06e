package cache

import (
	"slices"
	"sync"
	"sync/atomic"

	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/cache/segment"
)

// Locator says where files lie that are packed into larger objects.
type Locator interface {
	// Locate returns the object that holds the file, and the offset of the file's first byte in it.
	Locate(file int) (o objstore.Object, off int64)
	// Sum returns the CRC32C of an extent of the file, 0 if it is not known.
	Sum(file, extent int) uint32
}

// VolumeOptions says what a volume reads.
type VolumeOptions struct {
	Manifest *catalog.Manifest
	// Dataset names the source, not its version: records of an older version stay valid while their ETag is right.
	Dataset [16]byte
	Name    string // of the dataset, in the log
	Store   objstore.Reader
	// Locate says where the files lie; nil: each in the object that the manifest names.
	Locate Locator
	// Admit reports whether an extent of a file belongs to the kept set; nil: the first to arrive. Others are kept only
	// once nothing of the set is missing any more, and only in free space. It is called from several goroutines.
	Admit func(file, extent int) bool
	// Rank says what stays in memory of what was read, if orders are known: the extents of low ranks; nil: what was
	// read last. It is called with locks held.
	Rank  func(file, extent int) uint8
	Peers Peers // nil: none
	// Codec is of files that may be kept in another form; nil: none are, and such records are not read.
	Codec Codec
}

// Volume is one version of one dataset, read through the cache. Safe for concurrent use.
type Volume struct {
	places
	c      *Cache
	ds     *dataset
	store  store
	peers  atomic.Pointer[Peers]
	rankOf func(file, extent int) uint8
	gifts
	inRing []atomic.Uint32 // a bit an extent: it is in the ring

	mu      sync.Mutex
	flights map[piece]*part    // what is on its way
	failed  map[uint32]failure // the last of extents
	parts   map[uint32]partial // of extents that are not here whole; see partial.go
	retired bool
	verify  int // how often a Verify has begun
}

// NewVolume adds a version of a dataset to the cache.
func (c *Cache) NewVolume(o VolumeOptions) *Volume {
	v := &Volume{c: c, ds: c.dataset(o.Dataset, o.Name),
		flights: map[piece]*part{}, failed: map[uint32]failure{}, parts: map[uint32]partial{}}
	v.gifts.begin(true)
	v.store.v, v.store.objects, v.store.locate, v.rankOf = v, o.Store, o.Locate, o.Rank
	v.places = places{m: o.Manifest, codec: o.Codec}
	v.number()
	v.inRing = make([]atomic.Uint32, (len(v.locs)+31)/32)
	v.SetAdmit(o.Admit)
	v.SetPeers(o.Peers)
	v.ds.mu.Lock()
	v.ds.volumes = append(v.ds.volumes, v)
	v.ds.mu.Unlock()
	return v
}

// SetAdmit replaces VolumeOptions.Admit. It calls admit for every extent. What is kept outside the new set stays.
func (v *Volume) SetAdmit(admit func(file, extent int) bool) {
	if admit == nil {
		v.admission.Store(nil)
		return
	}
	v.choose(&admission{admit: admit})
}

// SetOwned is SetAdmit for a node of a cluster, whose set may become another one at any time: what is kept outside the
// set goes when an extent of the set finds no room, and what is in memory of the new set is written.
func (v *Volume) SetOwned(admit func(file, extent int) bool) {
	v.choose(&admission{admit: admit, yields: true})
	if d := v.ds.disk.Load(); d != nil {
		d.chosen.Store(true)
		d.writer.start(d.enforce)
	}
}

// key names an extent of a file as a whole.
func (v *Volume) key(file, x int) extentKey { return extentKey{v, piece(v.extent(file, x)) << 8} }

// Inherit takes over the unchanged kept records of an older version of the same dataset, which keeps nothing new from
// then on. The records of files that changed or vanished are freed.
func (v *Volume) Inherit(old *Volume) {
	d := v.ds.disk.Load()
	if d == nil || old.ds != v.ds {
		return
	}
	old.places.mu.Lock()
	old.inherited = true
	old.places.mu.Unlock()
	for of := range old.m.Len() {
		node, ok := v.m.Find(old.m.Path(of))
		same := ok && !node.IsDir && v.m.ETag(node.Index) == old.m.ETag(of) && v.m.Size(node.Index) == old.m.Size(of)
		v.ds.moving.Lock()
		for x := range old.Extents(of) {
			e := old.extent(of, x)
			loc, n := old.at(e)
			if loc != 0 && (!same || !v.move(v.extent(node.Index, x), 0, loc, n)) && old.unplace(e, loc) {
				d.free(loc) // also if v has a record of its own by now
			}
		}
		v.ds.moving.Unlock()
	}
}

// Retire takes a version out of the cache: it still serves readers that have it open, but keeps nothing new.
func (v *Volume) Retire() {
	v.ds.mu.Lock()
	v.ds.volumes = slices.DeleteFunc(v.ds.volumes, func(w *Volume) bool { return w == v })
	v.ds.mu.Unlock()
	v.mu.Lock()
	v.retired = true
	v.mu.Unlock()
	if d := v.ds.disk.Load(); d != nil {
		d.writer.start(func() { d.emptySlots(v, nil) })
	}
	v.c.ring.drop(func(k extentKey) bool { return k.v == v })
}

// Stats returns a snapshot of the volume's dataset. It never waits for the disk.
func (v *Volume) Stats() VolumeStats {
	var s VolumeStats
	v.ds.addTo(&s.Counts)
	s.Kept, s.Extents = v.Kept()
	s.Coded, s.CodedBefore, s.CodedAfter = int(v.coded.files.Load()), v.coded.before.Load(), v.coded.after.Load()
	if d := v.ds.disk.Load(); d != nil {
		s.DiskStats = d.stats()
	}
	return s
}

// Claim reports whether the extent is kept, staged, or in flight. A staged extent then stays staged until it is spent,
// even if it was spent before. Its bytes move to account a, unless they are on one with less load. a may be nil.
func (v *Volume) Claim(a *Account, file, x int) bool {
	return v.ClaimRange(a, Range{File: file, Extent: x})
}

// claim is Claim of a piece, or Hand if the account's owner reads it next. The volume's lock is held. It looks in the
// order in which a piece moves, so it misses none that is moving.
func (k extentKey) claim(a *Account, next bool) bool {
	if p := k.v.flights[k.piece]; p != nil {
		if next || p.spent || a.takes(p.account, p.size()) {
			p.assign(a)
		}
		return true
	}
	return k.v.c.ring.claim(k, a, next) || k.onDisk()
}

// Hand says that one reader is done with the file, and that the owner of account a reads its staged extents next.
func (v *Volume) Hand(a *Account, file int) {
	for x := range v.Extents(file) {
		v.mu.Lock()
		v.key(file, x).claim(a, true)
		v.mu.Unlock()
	}
}

// describe returns the header of a record of n bytes.
func (k extentKey) describe(n int) segment.Record {
	m := k.v.m
	file, x := k.v.Numbered(int(k.extent()))
	return segment.Record{
		Dataset: k.v.ds.id, File: uint32(file), KeyHash: m.PathHash(file), ETag: m.ETag(file),
		ObjectSize: m.Size(file), Offset: int64(x) * ExtentSize, Length: n,
	}
}

// Unspent returns the files with an extent in memory that waits to be read, once for each such extent.
func (v *Volume) Unspent() (files []int) {
	v.c.ring.each(func(e *entry) {
		if e.key.v == v && !e.spent {
			files = append(files, v.fileOf(e.key.extent()))
		}
	})
	return files
}

// Spend says that no order that claimed the file needs it, read or not: its staged extents may be recycled.
func (v *Volume) Spend(file int) {
	for x := range v.Extents(file) {
		v.SpendRange(Range{File: file, Extent: x}, func(int64, int64) bool { return false })
	}
}
