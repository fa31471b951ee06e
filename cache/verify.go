package cache

import (
	"bytes"
	"context"
	"crypto/md5" //nolint:gosec // the ETags of S3 are
	"encoding/hex"
	"errors"
	"time"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/cache/segment"
	"github.com/shoalfs/shoal/internal/pause"
)

// Verified is the result of a Verify.
type Verified struct {
	// on disk and looked at; compared with the store's; given up, since the store has others
	Extents, Asked, Dropped int
	Unknown                 int   // could not be compared: the store has another version by now, or none
	Files                   []int // of what was given up; the kernel and readers round the mount may still have it
}

// Verify compares what the cache has of the version, in memory and on disk, with what the store has, and drops what
// differs, which is then fetched again. progress, unless nil, is called now and then.
func (v *Volume) Verify(ctx context.Context, progress func(done, total int)) (Verified, error) {
	v.mu.Lock()
	v.verify++
	v.mu.Unlock()
	v.c.ring.drop(func(k extentKey) bool { return k.v == v && k.isGranule() })
	d := v.ds.disk.Load()
	if d != nil { // granules are not compared
		if err := d.writer.do(ctx, func() { d.emptySlots(v, nil) }); err != nil {
			return Verified{}, err
		}
	}
	total, _ := v.Kept()
	r := verification{v: v, ctx: ctx}
	for file := range v.m.Len() {
		for x := range v.Extents(file) {
			k := v.key(file, x)
			if err := errors.Join(r.staged(k, file, x), r.staged(k.other(), file, x), ctx.Err(),
				r.kept(k, file, x)); err != nil {
				return r.Verified, err
			}
			if progress != nil && r.Extents%64 == 0 {
				progress(r.Extents, total)
			}
		}
	}
	// What was dropped may be in garbage in its other form, and after a restart nothing would tell that it is garbage.
	var err error
	for more := d != nil && v.codec != nil && r.Dropped > 0; err == nil && more; {
		err = d.writer.do(ctx, func() { more = d.rewriteWasteful(0) })
	}
	return r.Verified, err
}

// verification is a Verify under way.
type verification struct {
	v   *Volume
	ctx context.Context
	Verified
}

func (r *verification) staged(k extentKey, file, x int) error {
	b, _ := r.v.c.ring.get(k, 0)
	if b == nil {
		return nil
	}
	defer b.Release()
	w := Want{File: file, Off: int64(x) * ExtentSize, P: b.data}
	if n := b.coded; n > 0 {
		w.P, w.Coded = b.data[:r.v.ExtentBytes(file, x)], &n // its memory is the whole file's
	}
	return r.compare(w, func() error { r.v.c.ring.take(k, nil); return r.v.Flush(r.ctx) }) // the writer may have it
}

func (r *verification) kept(at extentKey, file, x int) error {
	k := at.record(file)
	if k.d == nil {
		return nil
	}
	w := Want{File: file, Off: int64(x) * ExtentSize, P: make([]byte, r.v.ExtentBytes(file, x))}
	if k.coded {
		w.Coded = &k.n
	}
	if ok, err := k.read(r.ctx, w.P[:k.n], 0); !ok { // damaged, and forgotten
		return err
	}
	r.Extents++
	return r.compare(w, func() error {
		for loc, _ := r.v.at(k.extent()); loc != 0; loc, _ = r.v.at(k.extent()) { // it may have been written anew
			if r.v.unplace(k.extent(), loc) {
				return k.d.void(r.ctx, loc)
			}
		}
		return nil
	})
}

func (r *verification) compare(w Want, drop func() error) error {
	asked, err := r.v.store.vouch(r.ctx, w, func(_ bool, size int) (from, to int) { return 0, size })
	if asked {
		r.Asked++
	}
	if errors.Is(err, ErrOtherBytes) || errors.Is(err, segment.ErrCorrupt) {
		r.Dropped, r.Files = r.Dropped+1, append(r.Files, w.File)
		return drop()
	}
	if k := objstore.KindOf(err); k == objstore.KindNotFound || k == objstore.KindChanged {
		r.Unknown, err = r.Unknown+1, nil
	}
	return err
}

// vouch compares bytes with what the store said: with the MD5 of an object, as the ETag of one is that was put in one
// piece, or the checksum of an extent of a packed file, and otherwise, or if that differs (sum), with those of its
// bytes there that audit chooses from so many; none: the store is not asked. The error is ErrOtherBytes, or ErrCorrupt
// of a coded form, or the store's.
func (s *store) vouch(ctx context.Context, w Want, audit func(sum bool, size int) (from, to int)) (
	asked bool, err error) {
	file := w.P
	if w.Coded != nil && *w.Coded > 0 {
		file = getBytes(len(w.P))
		defer putBytes(file)
		if err := s.v.decode(file, w.P[:*w.Coded], true); err != nil {
			return false, err
		}
	}
	known, right := s.summed(Want{File: w.File, Off: w.Off, P: file})
	if tag := s.v.m.ETag(w.File); s.locate == nil && int64(len(file)) == s.v.m.Size(w.File) && len(tag) == 2*md5.Size {
		sum := md5.Sum(file) //nolint:gosec // who can make collisions can write to the bucket
		known, right = true, hex.EncodeToString(sum[:]) == tag
	}
	if right {
		s.sums.Add(1)
		return false, nil
	}
	from, to := audit(known, len(file))
	if from == to {
		return false, nil
	}
	theirs := getBytes(to - from)
	defer putBytes(theirs)
	switch _, err = s.Fill(ctx, []Want{{File: w.File, Off: w.Off + int64(from), P: theirs}}); {
	case err != nil:
	case !bytes.Equal(file[from:to], theirs):
		err = ErrOtherBytes
	case known:
		s.otherTags.Add(1)
	}
	return true, s.named(w.File, err)
}

// Scrub reads every record of the volume's dataset, at most bytesPerSecond, and forgets damaged ones, so that they
// are fetched again. It returns how many were damaged.
func (v *Volume) Scrub(ctx context.Context, bytesPerSecond int64) (bad int, err error) {
	d := v.ds.disk.Load()
	if d == nil {
		return 0, nil
	}
	start, read := time.Now(), int64(0)
	return bad, d.store.Scrub(ctx, func(n int) {
		read += int64(n)
		due := time.Duration(float64(read) / float64(max(bytesPerSecond, 1)) * float64(time.Second))
		_ = pause.For(ctx, due-time.Since(start)) // Scrub looks at it
	}, func(rec segment.Record, loc segment.Loc) {
		bad++
		count(&v.ds.count.Corrupt, 1)
		v.ds.forget(loc.Same)
		d.free(loc)
		d.c.log.Warn("corrupt record found by a scrub; its object is fetched again", "at", loc.String(),
			"offset", rec.Offset, "bytes", rec.Length)
	})
}
