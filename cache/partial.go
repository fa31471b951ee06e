package cache

import (
	"context"
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"maps"
	"math/bits"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/shoalfs/shoal/cache/segment"
)

// partial is an extent of a large file that is not here whole.
//
// Of one that an order of ranges reads the disk takes each granule as it comes, if the extent is of the kept set: the
// order comes back to most extents later, so fetching them whole, then or now, would fetch much for the second time.
// Such an extent has a slot of a file beside the segments, from its first granule until all are there. Then it becomes
// a record like others, and the slot is emptied: a reader of it at that moment looks again.
//
//   - A slot takes the space of the whole extent from the beginning, so the record always finds room.
//   - The file has no name, so nothing of it is left when the process ends, and its granules are fetched again after
//     that. They are encrypted by a key that nobody else has, each use of a slot by nonces of its own: that is the
//     checksum, too, and a slot that was emptied or is used for another extent cannot be mistaken.
//   - When the disk has to give space back, slots go first.
type partial struct { // in Volume.parts, guarded by Volume.mu
	fetched uint64 // granules that readers fetched, a bit each, even if they have left memory
	planned bool   // by an order of ranges, among others
	at      slot   // zero: none
	kept    uint64 // granules that are in the slot
}

// slot is one use of a place in the file.
type slot struct {
	place int64
	use   uint64 // from 1
}

// granule is where in the file the granule of a kind lies.
func (s slot) granule(kind uint8) int64 { return s.place + int64(kind-1)*sealedGranule }

func (s slot) nonce(kind uint8) []byte {
	return append(binary.LittleEndian.AppendUint64(nil, s.use), kind, 0, 0, 0)
}

const (
	overheadSealed = 16 // of AES-GCM
	sealedGranule  = granuleSize + overheadSealed
	slotSize       = (ExtentSize/granuleSize*sealedGranule + 4095) &^ 4095 // whole blocks of the file system
	// mostParts bounds the entries of Volume.parts without a slot, roughly: each takes 100 bytes beside --memory.
	mostParts = 1 << 16
)

// fetched notes granules of the extent that readers fetch. The volume's lock is held.
func (k extentKey) fetched(granules uint64) {
	parts, e := k.v.parts, k.extent()
	p := parts[e]
	p.fetched |= granules
	parts[e] = p
	if len(parts) <= mostParts {
		return
	}
	tried := 0
	for other, p := range parts { // any of them: if it is forgotten a granule may be fetched again
		if tried++; tried > 4 {
			break
		}
		if other != e && p.at == (slot{}) && !p.planned {
			delete(parts, other)
		}
	}
}

func (k extentKey) hasSlot() bool { return k.v.parts[k.extent()].at != slot{} }

// takesGranules reports whether the disk would take granules of the extent.
func (k extentKey) takesGranules() bool {
	d := k.v.ds.disk.Load()
	return d != nil && !d.noWrites.Load() && !d.writer.slots.off.Load() && k.v.Chooses(k.v.Numbered(int(k.extent())))
}

// keptGranule is where a granule is on disk.
type keptGranule struct {
	k    extentKey
	d    *disk // nil: it is not there, or the disk is in trouble
	from slot
}

// granuleOnDisk looks for a granule in the slot of its extent. The volume's lock is held.
func (k extentKey) granuleOnDisk() (g keptGranule) {
	if p := k.v.parts[k.extent()]; p.kept&k.bit() != 0 {
		g = keptGranule{k, k.v.ds.readable(), p.at}
	}
	return g
}

var sealedGranules = sync.Pool{New: func() any { return new([sealedGranule]byte) }}

// read fills p from off of the granule. One that cannot be read is forgotten. Its error is the context's.
func (g keptGranule) read(ctx context.Context, p []byte, off int) (bool, error) {
	s := &g.d.writer.slots
	buf := sealedGranules.Get().(*[sealedGranule]byte)
	defer sealedGranules.Put(buf)
	sealed := buf[:g.k.v.bytes(g.k.v.fileOf(g.k.extent()), g.k.piece)+overheadSealed]
	err := segment.ReadNow(s.file, [][]byte{sealed}, g.from.granule(g.k.kind()))
	if err != nil {
		err = g.d.handOver(ctx, sealed, func(p []byte) error {
			_, err := s.file.ReadAt(p, g.from.granule(g.k.kind()))
			return err
		})
	}
	if err == nil {
		if data, open := s.aead.Open(sealed[:0], g.from.nonce(g.k.kind()), sealed, nil); open == nil {
			copy(p, data[off:])
			return true, nil
		}
		err = segment.ErrCorrupt
	}
	return g.d.unread(ctx, err, g.forget)
}

func (g keptGranule) forget(err error) {
	v := g.k.v
	if !errors.Is(err, segment.ErrCorrupt) {
		g.d.heed("read", err)
		return
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	if p := v.parts[g.k.extent()]; p.at == g.from {
		p.kept &^= g.k.bit()
		v.parts[g.k.extent()] = p
		count(&v.ds.count.Corrupt, 1)
	}
}

// slots is the file of one dataset. Only the writer changes it.
type slots struct {
	off   atomic.Bool // the file system cannot punch holes
	file  segment.File
	aead  cipher.AEAD
	end   int64
	free  []int64
	uses  uint64
	whole []byte // an extent on its way into a record; not in the ledger
}

func (s *slots) open(d *disk) (err error) {
	name, key := filepath.Join(d.dir, "granules.tmp"), make([]byte, 32)
	_, _ = rand.Read(key)          // never fails,
	block, _ := aes.NewCipher(key) // nor do these, with a key of that length
	s.aead, _ = cipher.NewGCM(block)
	if s.file, err = d.fs.OpenFile(name, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600); err != nil {
		return err
	}
	return errors.Join(d.fs.Remove(name), s.file.Punch(0, slotSize))
}

// keepGranule puts a granule into its extent's slot, which it gets if it has none, and makes a record of the extent if
// that was the last one. Only the writer calls it.
func (d *disk) keepGranule(k extentKey, buf *buffer) bool {
	v, e, s := k.v, k.extent(), &d.writer.slots
	file, x := v.Numbered(int(e))
	v.mu.Lock()
	at, ok := v.parts[e].at, k.takesGranules()
	v.mu.Unlock()
	if !ok {
		return false
	}
	if at == (slot{}) {
		if at = d.takeSlot(); at == (slot{}) {
			return false
		}
		v.mu.Lock()
		p := v.parts[e]
		p.at = at // Retire comes back for it
		v.parts[e] = p
		v.mu.Unlock()
	}
	sealed := sealedGranules.Get().(*[sealedGranule]byte)
	defer sealedGranules.Put(sealed)
	if _, err := s.file.WriteAt(s.aead.Seal(sealed[:0], at.nonce(k.kind()), buf.data, nil),
		at.granule(k.kind())); err != nil {
		d.heed("write", err)
		return false
	}
	v.mu.Lock()
	p := v.parts[e]
	p.kept |= k.bit()
	v.parts[e] = p
	all := bits.OnesCount64(p.kept) == int((v.ExtentBytes(file, x)+granuleSize-1)/granuleSize)
	v.mu.Unlock()
	if all {
		d.complete(k.as(whole), at)
	}
	return true
}

// takeSlot returns a slot; zero if there is no room.
func (d *disk) takeSlot() (at slot) {
	s := &d.writer.slots
	err := d.checkSpace(slotSize)
	if err == nil && s.file == nil {
		if err = s.open(d); errors.Is(err, errors.ErrUnsupported) {
			s.off.Store(true)
			d.c.log.Warn(
				"what plans of ranges read is fetched again with its extents: the disk cannot keep parts of them",
				"dir", d.dir, "cause", err,
				"remedy", "put the cache on a file system that can punch holes: ext4, XFS, Btrfs, tmpfs")
			return at
		}
	}
	if err != nil {
		d.heed("write", err)
		return at
	}
	if !d.store.Take(slotSize) && (!d.freeUp(false, slotSize) || !d.store.Take(slotSize)) {
		count(&d.ds.count.Declined, 1)
		return at
	}
	s.uses++
	at = slot{s.end, s.uses}
	if last := len(s.free) - 1; last >= 0 {
		at.place, s.free = s.free[last], s.free[:last]
	} else {
		s.end += slotSize
	}
	return at
}

// complete makes a record of an extent all granules of which are in its slot.
func (d *disk) complete(k extentKey, at slot) {
	v, s := k.v, &d.writer.slots
	file, x := v.Numbered(int(k.extent()))
	n := int(v.ExtentBytes(file, x))
	if s.whole == nil {
		s.whole = make([]byte, ExtentSize+overheadSealed) // granules are decrypted in place
	}
	for kind := uint8(1); int(kind-1)*granuleSize < n; kind++ {
		off := int(kind-1) * granuleSize
		sealed := s.whole[off : min(off+granuleSize, n)+overheadSealed]
		_, err := s.file.ReadAt(sealed, at.granule(kind))
		if err == nil {
			_, err = s.aead.Open(sealed[:0], at.nonce(kind), sealed, nil)
		}
		if err != nil { // all is fetched again
			d.emptySlot(k, false)
			return
		}
	}
	d.progress()
	d.store.Give(slotSize) // before, so that the record has room
	if loc := d.append(k.describe(n), s.whole[:n], nil); loc != 0 {
		d.place(k, loc, 0)
	}
	d.emptySlot(k, true)
}

// emptySlot gives the slot of an extent up, if it has one, with its space unless that was given before. It returns how
// many bytes that freed. Only the writer calls it.
func (d *disk) emptySlot(k extentKey, given bool) (freed int64) {
	v := k.v
	v.mu.Lock()
	p := v.parts[k.extent()]
	delete(v.parts, k.extent())
	v.mu.Unlock()
	if p.at == (slot{}) {
		return 0
	}
	s := &d.writer.slots
	d.heed("write", s.file.Punch(p.at.place, slotSize))
	s.free = append(s.free, p.at.place)
	if !given {
		d.store.Give(slotSize)
	}
	return slotSize
}

// emptySlots gives the slots of some of a volume's extents up; of all if that is nil.
func (d *disk) emptySlots(v *Volume, of func(e uint32) bool) (freed int64) {
	v.mu.Lock()
	all := slices.Collect(maps.Keys(v.parts))
	v.mu.Unlock()
	for _, e := range all {
		if d.progress(); of == nil || of(e) {
			freed += d.emptySlot(extentKey{v, piece(e) << 8}, false)
		}
	}
	return freed
}
