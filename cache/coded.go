package cache

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/shoalfs/shoal/cache/segment"
)

// Coded files. A codec has a shorter form of some files, from which each comes back exactly, and which some readers take
// as it is. The disk keeps a file that fits one record in that form once a [Recoder] has passed.
//
//   - On disk a coded record has offset 0 and is shorter than its file, which no plain record is. A volume marks its place
//     (codedMark) and notes its length; so readers see place and form at once. A restart adopts coded records as others.
//   - Nobody gets coded bytes but from SampleCoded, and peers that can decode them. For everybody else a flight restores the
//     file into memory, where it stays as one that was fetched: all who wait share it, and who reads in pieces restores once.
//   - A flight takes the coded form from a peer or the store (Want.Coded), unless one of its waiters wants the file. It lies
//     in the ring in the place and the memory of the file, goes to disk as it is, and makes room for the file once that is
//     restored from it.
//   - A record that cannot be restored is forgotten and fetched again, like a corrupt one.
//   - The recoder appends the coded record, then moves the places, then frees the plain one, on the writer's goroutine. So
//     at any moment each place is of a whole record; if a crash leaves both, the coded one is adopted.
//   - A segment that was recoded is dropped, and what is left of it written anew, at once: so the disk never holds more than
//     one segment twice, and a full cache is beyond its limit by that much, while the recoder is at it.

// Codec is another form of some files. Safe for concurrent use.
type Codec interface {
	// Encode appends the coded form of a file to dst; false if there is none that is shorter and gives the file back.
	Encode(dst, file []byte) ([]byte, bool)
	// Decode appends the file to dst.
	Decode(dst, coded []byte) ([]byte, error)
	// Form names what Decode needs to know for this coded form; zero if it does not know that.
	Form(coded []byte) [8]byte
}

// codedMark is set in a Volume's places of coded records.
const codedMark = 1 << 63

// codedFiles is what a volume knows of its coded records.
type codedFiles struct {
	lengths              atomic.Pointer[[]uint32] // by extent; nil before the first
	files, before, after atomic.Int64             // kept so, their bytes, and the bytes of the records
}

func (c *codedFiles) reset() {
	c.files.Store(0)
	c.before.Store(0)
	c.after.Store(0)
}

func (c *codedFiles) count(sign int64, before int64, after int) {
	c.files.Add(sign)
	c.before.Add(sign * before)
	c.after.Add(sign * int64(after))
}

// at returns the place of an extent, and whether the record is coded.
func (v *Volume) at(e uint32) (loc segment.Loc, coded bool) {
	at := v.loc(e)
	return segment.Loc(at &^ codedMark), at&codedMark != 0
}

// record is at with the length of the payload.
func (v *Volume) record(e uint32, file, x int) (loc segment.Loc, length int, coded bool) {
	if loc, coded = v.at(e); coded {
		return loc, int(atomic.LoadUint32(&(*v.coded.lengths.Load())[e])), true
	}
	return loc, int(v.ExtentBytes(file, x)), false
}

// put writes the place of an extent: placeMu is held, or the volume not in use yet. The length goes first: whoever sees the
// mark sees the length.
func (v *Volume) put(e uint32, file int, loc segment.Loc, coded int) {
	if _, n, was := v.record(e, file, 0); was {
		v.coded.count(-1, v.m.Size(file), n)
	}
	if coded > 0 {
		if v.coded.lengths.Load() == nil {
			l := make([]uint32, len(v.locs))
			v.coded.lengths.Store(&l)
		}
		atomic.StoreUint32(&(*v.coded.lengths.Load())[e], uint32(coded))
		v.coded.count(1, v.m.Size(file), coded)
		loc |= codedMark
	}
	atomic.StoreUint64(&v.locs[e], uint64(loc))
}

// codedLength returns length if a record of that length is a coded one of the file, else 0.
func (v *Volume) codedLength(file, x, length int) int {
	if v.codec == nil || v.Extents(file) != 1 || x != 0 || int64(length) >= v.m.Size(file) {
		return 0
	}
	return length
}

// restores returns the length of the coded form from which a reader's flight would restore the extent; 0 if it would not.
func (v *Volume) restores(e uint32) int {
	if v.codec == nil {
		return 0
	}
	if n := v.c.ring.coded(v.key(e)); n > 0 {
		return n
	}
	if v.loc(e)&codedMark == 0 || v.ds.readable() == nil {
		return 0
	}
	return int(atomic.LoadUint32(&(*v.coded.lengths.Load())[e]))
}

// restoring returns the memory for a flight of n bytes that are restored from so many; 0: fetched.
func restoring(n, coded int) int64 {
	if coded == 0 {
		return footprint(n)
	}
	return footprint(n) + footprint(coded)
}

// restore fills p with the file of a flight that restores, and gives the memory for the coded form back. It returns false
// if the file is to be fetched.
func (v *Volume) restore(fl *flight, file int, e uint32, p []byte) bool {
	if fl.coded == 0 {
		return false
	}
	if staged := v.c.getCoded(v.key(e), 0); staged != nil {
		defer staged.Release()
		v.c.ledger.Release(footprint(fl.coded), fl.class)
		err := v.decode(p, staged.data)
		if err != nil {
			v.ds.count.corrupt.Add(1)
			if loc, _, coded := v.record(e, file, 0); coded && v.unplace(e, file, loc) { // written from there
				v.ds.disk.Load().free(loc)
			}
			v.c.log.Warn("a file from another node cannot be restored; it is fetched again", "path", v.m.Path(file), "cause", err)
		}
		return err == nil
	}
	b := newBuffer(v.c.ledger, fl.coded, fl.class)
	defer b.Release()
	loc, n, coded := v.record(e, file, 0)
	d := v.ds.readable()
	if !coded || n != fl.coded || d == nil {
		return false
	}
	ok, _ := v.readRecord(v.ds.ctx, d, file, e, loc, func() error {
		if err := d.read(v.ds.ctx, loc, n, b.data, 0); err != nil {
			return err
		}
		return v.decode(p, b.data)
	})
	return ok
}

// decode fills p with a file.
func (v *Volume) decode(p, coded []byte) error {
	v.c.restoring <- struct{}{}
	defer func() { <-v.c.restoring }()
	start := time.Now()
	got, err := v.codec.Decode(p[:0], coded)
	if err == nil && len(got) != len(p) {
		err = fmt.Errorf("%d bytes were restored of %d", len(got), len(p))
	}
	if err != nil {
		return fmt.Errorf("%w coded form: %w", segment.ErrCorrupt, err)
	}
	if &got[0] != &p[0] {
		copy(p, got)
	}
	v.ds.count.restored.Add(1)
	v.ds.count.restoreNanos.Add(int64(time.Since(start)))
	return nil
}

// SampleCoded is Sample for a reader that knows the codec: it gets the coded form of a file that is here so.
func (v *Volume) SampleCoded(ctx context.Context, file int) (data []byte, release func(), err error) {
	if v.codec == nil || v.Extents(file) != 1 {
		return v.Sample(ctx, file)
	}
	e, size := v.extent(file, 0), int(v.m.Size(file))
	for {
		b, err := v.sampleCoded(ctx, file, e)
		if b == nil && err == nil {
			if v.onDisk(e) && !v.c.ring.has(v.key(e)) {
				return v.Sample(ctx, file)
			}
			b, err = v.acquire(ctx, file, 0, size, true)
		}
		if err != nil {
			return nil, nil, err
		}
		if b != nil && b.coded > 0 && v.codec.Form(b.data) == [8]byte{} { // it cannot be decoded: Sample forgets it
			b.Release()
			return v.Sample(ctx, file)
		}
		if b != nil {
			v.ds.count.readBytes.Add(int64(len(b.data)))
			return b.Bytes(), b.Release, nil
		}
		// It was kept in the meantime.
	}
}

// sampleCoded returns the coded form of a file that is in the ring or on disk, nil if it is not.
func (v *Volume) sampleCoded(ctx context.Context, file int, e uint32) (*Buffer, error) {
	if b := v.c.getCoded(v.key(e), int(v.m.Size(file))); b != nil {
		v.ds.count.ringHits.Add(1)
		return b, nil
	}
	b, err := v.readCoded(ctx, file, e, func(n int) (*Buffer, error) {
		if err := v.c.reserve(ctx, footprint(n), ForPrefetch); err != nil { // as Sample
			return nil, err
		}
		return newBuffer(v.c.ledger, n, ForPrefetch), nil
	})
	if b != nil {
		v.ds.count.keepHits.Add(1)
		v.ds.count.keptBytes.Add(int64(len(b.data)))
	}
	return b, err
}

// readCoded returns the coded record of a file, in a buffer from take; nil if it has none, or take returns none.
func (v *Volume) readCoded(ctx context.Context, file int, e uint32, take func(n int) (*Buffer, error)) (*Buffer, error) {
	loc, n, coded := v.record(e, file, 0)
	d := v.ds.readable()
	if !coded || d == nil {
		return nil, nil
	}
	b, err := take(n)
	if b == nil {
		return nil, err
	}
	b.coded = n
	ok, err := v.readRecord(ctx, d, file, e, loc, func() error { return d.read(ctx, loc, n, b.data, 0) })
	if !ok {
		b.Release()
		return nil, err
	}
	return b, nil
}
