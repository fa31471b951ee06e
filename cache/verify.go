package cache

import (
	"bytes"
	"context"
	"crypto/md5" //nolint:gosec // see sum
	"encoding/hex"
)

// Verified is the result of a Verify.
type Verified struct {
	Extents, Asked, Dropped int // kept and looked at; of them, compared with the store; and given up, since the store has others
}

// Verify compares what is kept of the version with what the store has, and drops what differs, which is then fetched again. Where the
// ETag is the MD5 of an object, as it is as a rule, the store is asked only if it differs. progress, unless nil, is called now and then.
func (v *Volume) Verify(ctx context.Context, progress func(done, total int)) (r Verified, err error) {
	total, _ := v.Kept()
	for file := range v.m.Len() {
		for x := range v.Extents(file) {
			if err := ctx.Err(); err != nil {
				return r, err
			}
			e := v.extent(file, x)
			loc, n, isCoded := v.record(e, file, x)
			d := v.ds.readable()
			if loc == 0 || d == nil {
				continue
			}
			w := Want{File: file, Off: int64(x) * ExtentSize, P: make([]byte, v.ExtentBytes(file, x))}
			if isCoded {
				w.Coded = &n
			}
			if ok, err := v.readRecord(ctx, d, file, e, loc, func() error { return d.read(ctx, loc, n, w.P[:n], 0) }); err != nil || !ok {
				if err != nil {
					return r, err
				}
				continue // damaged, and forgotten
			}
			r.Extents++
			good, asked, err := v.vouch(ctx, w)
			if err != nil {
				return r, err
			}
			if asked {
				r.Asked++
			}
			if !good && v.unplace(e, file, loc) {
				d.free(loc)
				r.Dropped++
			}
			if progress != nil && r.Extents%64 == 0 {
				progress(r.Extents, total)
			}
		}
	}
	return r, nil
}

// vouch reports whether the store has these bytes.
func (v *Volume) vouch(ctx context.Context, w Want) (good, asked bool, err error) {
	file, ok := v.plain(w)
	if etag := v.m.ETag(w.File); ok && v.Extents(w.File) == 1 && len(etag) == 2*md5.Size && hex.EncodeToString(sum(file)) == etag {
		return true, false, nil
	}
	theirs := make([]byte, len(w.P))
	_, err = (store{v}).Fill(ctx, []Want{{File: w.File, Off: w.Off, P: theirs}})
	return ok && bytes.Equal(file, theirs), true, v.named(w.File, err)
}
