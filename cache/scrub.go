package cache

import (
	"context"
	"time"

	"github.com/shoalfs/shoal/cache/segment"
)

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
		if wait := due - time.Since(start); wait > 0 {
			select {
			case <-time.After(wait):
			case <-ctx.Done(): // Scrub looks at it
			}
		}
	}, func(rec segment.Record, loc segment.Loc) {
		bad++
		v.ds.count.corrupt.Add(1)
		for _, w := range v.ds.list() {
			w.forget(func(at segment.Loc) bool { return at == loc })
		}
		d.free(loc)
		d.c.log.Warn("corrupt record found by a scrub; its object is fetched again", "at", loc.String(), "offset", rec.Offset, "bytes", rec.Length)
	})
}
