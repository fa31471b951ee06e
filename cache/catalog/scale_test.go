package catalog

import (
	"fmt"
	"os"
	"runtime"
	"runtime/metrics"
	"sync/atomic"
	"testing"
	"time"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/lab/rig/memstore"
)

// peak runs f and returns by how much the heap, collected and not, exceeded what it was before.
func peak(f func()) int64 {
	heap := func() int64 {
		s := []metrics.Sample{{Name: "/memory/classes/heap/objects:bytes"}}
		metrics.Read(s)
		return int64(s[0].Value.Uint64())
	}
	runtime.GC()
	before := heap()
	var most atomic.Int64
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for {
			most.Store(max(most.Load(), heap()))
			select {
			case <-stop:
				return
			case <-time.After(2 * time.Millisecond):
			}
		}
	}()
	f()
	close(stop)
	<-done
	return most.Load() - before
}

// BenchmarkScale tells what 1,000,000 and, with SHOAL_BENCH_HUGE set, 10,000,000 files cost.
func BenchmarkScale(b *testing.B) {
	sizes := []int{million}
	if os.Getenv("SHOAL_BENCH_HUGE") != "" {
		sizes = append(sizes, 10*million)
	}
	for _, n := range sizes {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			dir := b.TempDir()
			var m *Manifest
			var err error
			start := time.Now()
			most := peak(func() { m, err = Build(listing(n), BuildOptions{Prefix: "train/"}) })
			if err != nil {
				b.Fatal(err)
			}
			build := time.Since(start)
			path, err := m.Save(dir)
			if err != nil {
				b.Fatal(err)
			}
			size := m.FileSize()
			m = nil
			match, err := Match("images")
			if err != nil {
				b.Fatal(err)
			}
			var load, samples, dirTime time.Duration
			var heap int64
			for b.Loop() {
				var before, after runtime.MemStats
				runtime.GC()
				runtime.ReadMemStats(&before)
				t0 := time.Now()
				if m, err = Load(path); err != nil {
					b.Fatal(err)
				}
				load = time.Since(t0)
				t0 = time.Now()
				s := m.Samples(match)
				samples = time.Since(t0)
				t0 = time.Now()
				m.DirTime(0)
				dirTime = time.Since(t0)
				runtime.GC()
				runtime.ReadMemStats(&after)
				heap = int64(after.HeapAlloc) - int64(before.HeapAlloc)
				if s.Len() != n {
					b.Fatal(s.Len())
				}
				if err := m.Close(); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(build.Seconds()*1e3, "build-ms")
			b.ReportMetric(float64(most)/float64(n), "build-peak-heap-B/file")
			b.ReportMetric(float64(size)/float64(n), "file-B/file")
			b.ReportMetric(float64(heap)/float64(n), "heap-B/file")
			b.ReportMetric(load.Seconds()*1e3, "load-ms")
			b.ReportMetric(samples.Seconds()*1e3, "samples-ms")
			b.ReportMetric(dirTime.Seconds()*1e3, "dirtime-ms")
		})
	}
}

func BenchmarkLayoutMillion(b *testing.B) {
	m, err := Build(listing(million), BuildOptions{Prefix: "train/"})
	if err != nil {
		b.Fatal(err)
	}
	const shards = 2000
	sizes := make([]int64, shards)
	for i := range sizes {
		sizes[i] = 64 << 20
	}
	objs := shardObjects(sizes...)
	// A pack's order is random: files of a shard come from everywhere.
	order := make([]int, million)
	for i := range order {
		order[i] = int(uint64(i) * 7919 * 104729 % million)
	}
	dir := b.TempDir()
	var build, load, where time.Duration
	var most, size int64
	for b.Loop() {
		var l *Layout
		t0 := time.Now()
		most = peak(func() {
			l, err = BuildLayout(m, objs, func(yield func(Place, error) bool) {
				for i, f := range order {
					if !yield(Place{Path: m.Path(f), Shard: i * shards / million,
						Off: int64(i % (million / shards) * 100_000)}, nil) {
						return
					}
				}
			})
		})
		if err != nil {
			b.Fatal(err)
		}
		build = time.Since(t0)
		path, err := saveUnder(dir, l.Version(), l.data, "layout", nil)
		if err != nil {
			b.Fatal(err)
		}
		size = l.FileSize()
		t0 = time.Now()
		if l, err = loadLayout(path, m, nil); err != nil {
			b.Fatal(err)
		}
		load = time.Since(t0)
		t0 = time.Now()
		for f := range million {
			l.Where(f)
		}
		where = time.Since(t0)
		if err := l.Close(); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(build.Seconds()*1e3, "build-ms")
	b.ReportMetric(float64(most)/million, "build-peak-heap-B/file")
	b.ReportMetric(float64(size)/million, "file-B/file")
	b.ReportMetric(load.Seconds()*1e3, "load-ms")
	b.ReportMetric(float64(where.Nanoseconds())/million, "where-ns")
}

// BenchmarkBigDirectory finds names in a folder of 100,000.
func BenchmarkBigDirectory(b *testing.B) {
	const n = 100_000
	m, err := Build(func(yield func(objstore.Object, error) bool) {
		for i := range n {
			if !yield(objstore.Object{Key: fmt.Sprintf("big/img_%06d.jpeg", i), Size: 1, ETag: "e"}, nil) {
				return
			}
		}
	}, BuildOptions{})
	if err != nil {
		b.Fatal(err)
	}
	paths := make([]string, n)
	for f := range paths {
		paths[f] = m.Path(f * 7919 % n)
	}
	b.Run("Find", func(b *testing.B) {
		i := 0
		for b.Loop() {
			if _, ok := m.Find(paths[i%n]); !ok {
				b.Fatal(paths[i%n])
			}
			i++
		}
	})
	b.Run("Lookup", func(b *testing.B) {
		i := 0
		for b.Loop() {
			if _, ok := m.Lookup(1, paths[i%n][4:]); !ok {
				b.Fatal(paths[i%n])
			}
			i++
		}
	})
	b.Run("Missing", func(b *testing.B) {
		for b.Loop() {
			if _, ok := m.Lookup(1, "img_050000.jpg"); ok {
				b.Fatal()
			}
		}
	})
}

// TestScale holds the promises of a million files by a tenth of them: the file and the heap stay small.
func TestScale(t *testing.T) {
	const n = 100_000
	m, err := Build(listing(n), BuildOptions{Prefix: "train/"})
	if err != nil {
		t.Fatal(err)
	}
	path, err := m.Save(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	if perFile := m.FileSize() / n; perFile > 110 {
		t.Errorf("%d bytes a file on disk", perFile)
	}
	loaded, err := Load(path)
	if err != nil {
		t.Fatal(err)
	}
	defer loaded.Close()
	match, err := Match("*.JPEG")
	if err != nil {
		t.Fatal(err)
	}
	if allocs := testing.AllocsPerRun(1, func() { loaded.Samples(match) }); allocs > 2*n {
		t.Errorf("%v allocations", allocs)
	}
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	again, err := Load(path)
	if err != nil {
		t.Fatal(err)
	}
	s := again.Samples(match)
	again.DirTime(0)
	runtime.GC()
	runtime.ReadMemStats(&after)
	if heap := int64(after.HeapAlloc) - int64(before.HeapAlloc); heap > 2*n {
		t.Errorf("a loaded manifest takes %d bytes of heap for %d files", heap, n)
	}
	if s.Len() != n {
		t.Error(s.Len())
	}
	if err := again.Close(); err != nil {
		t.Fatal(err)
	}
}

// TestDirTime compares with a walk.
func TestDirTime(t *testing.T) {
	at := func(s int64) time.Time { return time.Unix(s, 7).UTC() }
	obj := func(key string, mod time.Time) objstore.Object {
		return objstore.Object{Key: key, Size: 1, ETag: "e", ModTime: mod}
	}
	m, err := Build(memstore.Listing(
		obj("root", at(5)), obj("a/1", at(10)), obj("a/2", at(8)), obj("a/deep/er/1", at(20)), obj("a/deep/2", at(3)),
		obj("b/1", time.Time{}), obj("c/1", time.Time{}), obj("c/2", at(-50)), obj("d/e/1", at(1)),
	), BuildOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]time.Time{
		"": at(20), "a": at(20), "a/deep": at(20), "a/deep/er": at(20), "b": {}, "c": at(-50), "d": at(1), "d/e": at(1),
	} {
		n, ok := m.Find(path)
		if !ok || !n.IsDir {
			t.Fatal(path)
		}
		if got := m.DirTime(n.Index); !got.Equal(want) || got.IsZero() != want.IsZero() {
			t.Errorf("%q: %v, want %v", path, got, want)
		}
	}
	if n := testing.AllocsPerRun(10, func() { m.DirTime(0) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
