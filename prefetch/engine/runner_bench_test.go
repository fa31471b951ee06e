package engine

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/shoalfs/shoal/cache"
	"github.com/shoalfs/shoal/cache/cachedir"
	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/prefetch/order"
)

// BenchmarkRunner reads epochs of small files from a store that has neither files nor a network: what is left is the
// processor time that is spent on a file between its order and its reader. Readers are as fast as the store, or wait
// for it, or it for them and for memory.
//
//	go test ./prefetch/engine -run - -bench Runner -benchtime 50x -count 6
func BenchmarkRunner(b *testing.B) {
	const files, size, readers = 8192, 16 << 10, 8
	dir := b.TempDir()
	for i := range files {
		p := filepath.Join(dir, fmt.Sprintf("c%02d", i%16), fmt.Sprintf("f%05d.jpg", i))
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			b.Fatal(err)
		}
		if err := os.WriteFile(p, nil, 0o644); err != nil {
			b.Fatal(err)
		}
		if err := os.Truncate(p, size); err != nil {
			b.Fatal(err)
		}
	}
	for _, c := range []struct {
		name        string
		store, read time.Duration // that a request and a reader take
	}{{name: "even"}, {name: "slow store", store: time.Millisecond},
		{name: "slow readers", read: 200 * time.Microsecond}} {
		b.Run(c.name, func(b *testing.B) {
			e := open(b, HostConfig{Options: cachedir.Options{Path: b.TempDir(), Size: 0, Memory: 112 << 20}},
				Config{Source: "file://" + dir, Order: spec(b, "none")})
			defer closeEngine(b, e)
			d := e.Dataset()
			d.v.volume = e.cache.NewVolume(
				cache.VolumeOptions{Manifest: d.v.manifest, Dataset: e.dataset, Store: slowly{takes: c.store}})
			b.ResetTimer()
			before := processorTime(b)
			for epoch := range b.N {
				s, err := d.Begin("epoch", order.Uniform(files, 1, epoch), 0, 1)
				if err != nil {
					b.Fatal(err)
				}
				var next atomic.Int64
				var all sync.WaitGroup
				for range readers {
					all.Go(func() {
						for pos := int(next.Add(1)) - 1; pos < files; pos = int(next.Add(1)) - 1 {
							_, release, err := s.Read(b.Context(), pos)
							if err != nil {
								b.Error(err)
								return
							}
							if c.read > 0 {
								time.Sleep(c.read)
							}
							release()
						}
					})
				}
				all.Wait()
				d.End(s)
			}
			took := processorTime(b) - before
			b.StopTimer()
			b.ReportMetric(float64(took.Nanoseconds())/float64(b.N*files), "cpu-ns/file")
			n := e.Stats()
			b.ReportMetric(float64(n.Misses+n.Joined)/float64(b.N*files), "waits/file")
		})
	}
}

// slowly is a store of zeros.
type slowly struct {
	objstore.Reader
	takes time.Duration
}

func (s slowly) ReadAt(context.Context, objstore.Object, []byte, int64) error {
	if s.takes > 0 {
		time.Sleep(s.takes)
	}
	return nil
}

func processorTime(t testing.TB) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		t.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
