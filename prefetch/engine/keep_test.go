package engine

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/shoalfs/shoal/cache"
	"github.com/shoalfs/shoal/cache/cachedir"
	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/cache/owner"
	"github.com/shoalfs/shoal/prefetch"
	"github.com/shoalfs/shoal/prefetch/order"
)

// What is kept is chosen among the files that are read: beside an archive that is larger than the disk, and that nobody
// reads, all pictures and their labels are kept, and the fourth epoch comes from the disk.
func TestKeptOfWhatIsRead(t *testing.T) {
	dir := t.TempDir()
	write := func(path string, n int) {
		if err := os.MkdirAll(filepath.Dir(filepath.Join(dir, path)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, path), make([]byte, n), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	const n = 160
	for i := range n {
		write(fmt.Sprintf("images/c/f%03d.jpg", i), 512<<10)
		write(fmt.Sprintf("labels/f%03d.txt", i), 100)
	}
	write("all.zip", 0)
	if err := os.Truncate(filepath.Join(dir, "all.zip"), 1<<30); err != nil {
		t.Fatal(err)
	}
	spec, err := order.Parse("torch:seed=1")
	if err != nil {
		t.Fatal(err)
	}
	e := open(t, HostConfig{Options: cachedir.Options{Path: t.TempDir(), Size: 160 << 20, Memory: 128 << 20}},
		Config{Source: "file://" + dir, Order: spec})
	defer closeEngine(t, e)
	var gets [4]int64
	for epoch := range gets {
		before := e.Stats().GetRequests
		o, err := spec.Order(n, epoch)
		if err != nil {
			t.Fatal(err)
		}
		for pos := range n {
			i := o.At(pos)
			read(t, e, dir, fmt.Sprintf("images/c/f%03d.jpg", i))
			read(t, e, dir, fmt.Sprintf("labels/f%03d.txt", i))
		}
		if err := e.cur.Load().volume.Flush(t.Context()); err != nil {
			t.Fatal(err)
		}
		gets[epoch] = e.Stats().GetRequests - before
	}
	// The labels are in the set once the end of the first epoch was seen, which may be in the second. Those that memory
	// has dropped until then are kept when they are read next.
	if gets[0] > 2*n+n/2 || gets[1] > n+10 || gets[2] > n+10 || gets[3] > 10 {
		t.Errorf("%v GETs in four epochs of %d pictures and as many labels", gets, n)
	}
}

// A node of a cluster keeps what it owns, of all files, by a threshold that others know; what it has kept before goes
// for that, also after a restart, at which its owners come after its records.
func TestKeptOfWhatIsOwned(t *testing.T) {
	dir, cacheDir := t.TempDir(), t.TempDir()
	const n, size = 200, 128 << 10
	for i := range n {
		if err := os.WriteFile(filepath.Join(dir, fmt.Sprintf("f%03d.jpg", i)), make([]byte, size), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	start := func() *Engine {
		return open(t, HostConfig{Options: cachedir.Options{Path: cacheDir, Size: 20 << 20, Memory: 128 << 20}},
			Config{Source: "file://" + dir})
	}
	kept := func(e *Engine) (files []int) {
		for f := range n {
			if e.cur.Load().volume.Residence(f) == cache.OnDisk {
				files = append(files, f)
			}
		}
		return files
	}
	everything := func(e *Engine) {
		t.Helper()
		for range 2 { // what came before the last of the set was kept may have been declined
			for f := range n {
				read(t, e, dir, fmt.Sprintf("f%03d.jpg", f))
			}
			if err := e.cur.Load().volume.Flush(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
	}
	e := start()
	everything(e)
	alone := kept(e)
	if len(alone) < 130 {
		t.Fatalf("%d of %d are kept in 20 MiB", len(alone), n)
	}
	for _, test := range []struct {
		owned   func(file, extent int) bool
		restart bool
	}{
		{func(f, _ int) bool { return f%2 == 1 }, false},
		{func(f, _ int) bool { return f%4 > 0 }, false},
		{func(f, _ int) bool { return f%3 == 2 }, true},
		{func(f, _ int) bool { return f >= 10 }, true},
	} {
		before := kept(e)
		if test.restart {
			closeEngine(t, e)
			e = start()
			again := kept(e) // perhaps more: what made room for others, and whose segment is still there
			if slices.ContainsFunc(before, func(f int) bool { return !slices.Contains(again, f) }) {
				t.Fatalf("%d are kept after a restart, before the owners are known; %d were", len(again), len(before))
			}
		}
		k := e.cur.Load().keeping
		owned, unit := make(owner.Set, owner.Buckets/64), units(k.v.manifest, nil)
		for f := range n {
			if test.owned(f, 0) {
				owned[owner.Bucket(unit(f, 0))/64] |= 1 << (owner.Bucket(unit(f, 0)) % 64)
			}
		}
		k.own(owned)
		below := k.below.Load()
		everything(e)
		set, have := 0, 0
		for f := range n {
			if !test.owned(f, 0) || !prefetch.Admits(below, bucketKey(owner.Bucket(unit(f, 0)))) {
				continue
			}
			set++
			switch is, was := k.v.volume.Residence(f) == cache.OnDisk, slices.Contains(before, f); {
			case is:
				have++
			case was:
				t.Errorf("file %d was kept, is of the set, and is kept no longer", f)
			}
		}
		t.Logf("%d files in the set, %d of them kept, %d in all", set, have, len(kept(e)))
		if have < set*97/100 || set < 60 {
			t.Errorf("%d of the %d files of the set are kept", have, set)
		}
		if k.again(); below != k.below.Load() {
			t.Error("another threshold for the same files and the same capacity")
		}
	}
	closeEngine(t, e)
}

// BenchmarkOwn chooses again after a change of owners, with half of the files owned and a fifth of them kept.
func BenchmarkOwn(b *testing.B) {
	for _, shape := range []struct {
		name  string
		files int
		size  int64
	}{{"small files", 4_000_000, 100_000}, {"files of 1000 extents", 4_000, 1000 * cache.ExtentSize}} {
		b.Run(shape.name, func(b *testing.B) {
			m, err := catalog.Build(func(yield func(objstore.Object, error) bool) {
				for i := range shape.files {
					if !yield(objstore.Object{Key: fmt.Sprintf("c%04d/f%07d", i/1000, i), Size: shape.size,
						ETag: "e"}, nil) {
						return
					}
				}
			}, catalog.BuildOptions{})
			if err != nil {
				b.Fatal(err)
			}
			c := cache.New(cache.Options{Memory: 1 << 20, Disk: m.Bytes() / 10})
			defer c.Close()
			e := &Engine{cache: c, host: &Host{Dir: &cachedir.Dir{}}}
			v := &view{manifest: m, volume: c.NewVolume(cache.VolumeOptions{Manifest: m})}
			v.keeping = newKeeping(e, v)
			owned := make(owner.Set, owner.Buckets/64)
			for i := range owned {
				owned[i] = 0x5555555555555555
			}
			b.ResetTimer()
			for range b.N {
				v.keeping.own(owned)
			}
			_, extents := v.volume.Kept()
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*extents), "ns/extent")
		})
	}
}
