package catalog

import (
	"fmt"
	"iter"
	"runtime"
	"testing"
	"time"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/lab/rig/memstore"
)

// listing yields n objects in key order, ImageNet-shaped: 1,000 class folders.
func listing(n int) iter.Seq2[objstore.Object, error] {
	return func(yield func(objstore.Object, error) bool) {
		at := time.Unix(1_700_000_000, 0)
		for i := range n {
			class := i * 1000 / n
			o := objstore.Object{
				Key:  fmt.Sprintf("train/n%08d/n%08d_%d.JPEG", class, class, 10000000+i),
				Size: int64(40_000 + i%80_000), ETag: fmt.Sprintf("%016x%016x", i*7919, i), ModTime: at,
			}
			if !yield(o, nil) {
				return
			}
		}
	}
}

const million = 1_000_000

func BenchmarkBuildMillion(b *testing.B) {
	objs := make([]objstore.Object, 0, million)
	for o := range listing(million) {
		objs = append(objs, o)
	}
	for b.Loop() {
		m, err := Build(memstore.Listing(objs...), BuildOptions{Prefix: "train/"})
		if err != nil {
			b.Fatal(err)
		}
		b.ReportMetric(float64(len(m.data))/million, "file-B/object")
	}
}

func BenchmarkLoadMillion(b *testing.B) {
	m, err := Build(listing(million), BuildOptions{Prefix: "train/"})
	if err != nil {
		b.Fatal(err)
	}
	path, err := m.Save(b.TempDir())
	if err != nil {
		b.Fatal(err)
	}
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	for b.Loop() {
		m, err := Load(path)
		if err != nil {
			b.Fatal(err)
		}
		runtime.ReadMemStats(&after)
		if err := m.Close(); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(after.HeapAlloc-before.HeapAlloc), "heap-B")
}

func BenchmarkVerifyMillion(b *testing.B) {
	m, err := Build(listing(million), BuildOptions{Prefix: "train/"})
	if err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		if err := m.Verify(); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkSamplesMillion(b *testing.B) {
	m, err := Build(listing(million), BuildOptions{Prefix: "train/"})
	if err != nil {
		b.Fatal(err)
	}
	match, err := Match("images")
	if err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		if s := m.Samples(match); s.Len() != million {
			b.Fatal(s.Len())
		}
	}
}

func BenchmarkFind(b *testing.B) {
	m, err := Build(listing(million), BuildOptions{Prefix: "train/"})
	if err != nil {
		b.Fatal(err)
	}
	path := m.Path(777_777)
	b.ReportAllocs()
	for b.Loop() {
		if _, ok := m.Find(path); !ok {
			b.Fatal(path)
		}
	}
}

func BenchmarkPathHash(b *testing.B) {
	m, err := Build(listing(1000), BuildOptions{Prefix: "train/"})
	if err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for b.Loop() {
		m.PathHash(500)
	}
}
