package engine

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/shoalfs/shoal/cache/cachedir"
	"github.com/shoalfs/shoal/prefetch/order"
)

// BenchmarkColdEpoch reads epochs of small files through the engine from a source that answers at once, with
// no disk below --cache-dir: what is left is the executor's own work for a sample (plan, fetch, land,
// claim, open, read, close), and a read of a file in place of the GET.
//
//	go test ./prefetch/engine -run - -bench ColdEpoch -benchtime 20x
func BenchmarkColdEpoch(b *testing.B) {
	const files, size, readers = 8192, 16 << 10, 8 // twice what memory holds
	dir := b.TempDir()
	for i := range files {
		p := filepath.Join(dir, fmt.Sprintf("c%02d", i%16), fmt.Sprintf("f%05d.jpg", i))
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			b.Fatal(err)
		}
		if err := os.WriteFile(p, make([]byte, size), 0o644); err != nil {
			b.Fatal(err)
		}
	}
	e := open(b, HostConfig{Options: cachedir.Options{Path: b.TempDir(), Size: 0, Memory: 160 << 20}},
		Config{Source: "file://" + dir, Order: spec(b, "uniform:seed=1")})
	defer closeEngine(b, e)
	v := e.cur.Load()
	order := func(epoch int) order.Order {
		o, err := e.order().Order(v.samples.Len(), epoch)
		if err != nil {
			b.Fatal(err)
		}
		return filesOf(o, v.samples)
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	b.ResetTimer()
	for epoch := range b.N {
		o := order(epoch)
		var next atomic.Int64
		var wg sync.WaitGroup
		for range readers {
			wg.Go(func() {
				p := make([]byte, size+1)
				for {
					pos := int(next.Add(1)) - 1
					if pos >= o.Len() {
						return
					}
					file := o.At(pos)
					e.Opened(v.manifest, file, 0)
					if n, err := e.ReadAt(context.Background(), v.manifest, file, p, 0); n != size || err != nil {
						b.Errorf("position %d: %d bytes, %v", pos, n, err)
						return
					}
					e.Released(v.manifest, file)
				}
			})
		}
		wg.Wait()
	}
	b.StopTimer()
	runtime.ReadMemStats(&after)
	samples := float64(b.N * files)
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/samples, "ns/sample")
	b.ReportMetric(float64(after.Mallocs-before.Mallocs)/samples, "allocs/sample")
	b.ReportMetric(float64(after.TotalAlloc-before.TotalAlloc)/samples, "B/sample")
	s := e.Stats()
	b.ReportMetric(float64(s.Misses+s.Joined)/float64(s.Reads), "waits/read")
}
