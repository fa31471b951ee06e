package objstore_test

import (
	"testing"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/lab/rig/memstore"
)

// BenchmarkStack is what the decorators cost over a store that costs nothing.
func BenchmarkStack(b *testing.B) {
	m := memstore.New()
	o := m.PutBytes("train/n01440764/n01440764_10026.JPEG", make([]byte, 4096))
	for _, c := range []struct {
		name string
		r    objstore.Reader
	}{
		{"mem", m},
		{"meter", objstore.NewMeter(m)},
		{"limit", objstore.Limit(m, 64)},
		{"retry", objstore.Retry(m, objstore.RetryPolicy{})},
		{"all", objstore.Retry(objstore.Limit(objstore.Hedge(objstore.NewMeter(m), nil), 64), objstore.RetryPolicy{})},
	} {
		b.Run(c.name, func(b *testing.B) {
			b.ReportAllocs()
			b.RunParallel(func(pb *testing.PB) {
				p := make([]byte, o.Size)
				for pb.Next() {
					if err := c.r.ReadAt(b.Context(), o, p, 0); err != nil {
						b.Error(err)
					}
				}
			})
		})
	}
}
