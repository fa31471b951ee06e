package cache

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/shoalfs/shoal/cache/segment"
)

// A node that was alone has filled its disk. What it does not own any more goes for what it owns, and nothing else
// goes.
func TestRoomForWhatIsOwned(t *testing.T) {
	const files, size = 64, 50_000
	f := newFixture(t, slices.Repeat([]int{size}, files)...)
	for _, test := range []struct {
		name    string
		alone   int64 // files of the set before
		owned   func(file, extent int) bool
		extents int // of the new set
		segment int64
	}{
		{"every second", 32, func(file, _ int) bool { return file%2 == 0 }, 32, 400_000},
		{"all others", 32, func(file, _ int) bool { return file >= 32 }, 32, 400_000},
		{"a few others", 32, func(file, _ int) bool { return file >= 4 && file < 36 }, 32, 400_000},
		{"few", 32, func(file, _ int) bool { return file%8 == 1 }, 8, 400_000},
		{"one segment", 32, func(file, _ int) bool { return file%2 == 0 }, 32, 64 << 20},
		{"a segment each", 32, func(file, _ int) bool { return file%2 == 0 }, 32, 64},
	} {
		t.Run(test.name, func(t *testing.T) {
			c := newPatient(Options{Memory: 64 << 20, Logger: quiet})
			defer closeCache(t, c)
			v := c.NewVolume(VolumeOptions{Manifest: f.m, Dataset: [16]byte{1}, Store: f.gate})
			v.SetOwned(func(file, _ int) bool { return int64(file) < test.alone })
			const limit = 33*(size+1000) + 20_000
			if err := v.OpenDisk(t.TempDir(),
				segment.Options{MaxBytes: limit, SegmentSize: test.segment, Logger: quiet}); err != nil {
				t.Fatal(err)
			}
			readAll := func() {
				c.ring.drop(nil)
				checkFiles(t, v, f.bytes, span(0, files)...)
				settled(t, c)
			}
			readAll()
			before := v.keptFiles()
			if !slices.Equal(before[:32], span(0, 32)) {
				t.Fatalf("kept %v", before)
			}
			v.SetOwned(test.owned)
			readAll()
			readAll()
			var lost []int
			after := v.keptFiles()
			owned := 0
			for _, file := range after {
				if test.owned(file, 0) {
					owned++
				}
			}
			for _, file := range before {
				if test.owned(file, 0) && !slices.Contains(after, file) {
					lost = append(lost, file)
				}
			}
			if owned != test.extents || len(lost) > 0 || len(after) < 30 {
				t.Errorf("%d of %d owned are kept of %v; lost %v", owned, test.extents, after, lost)
			}
			if s := v.Stats(); s.DiskUsed > limit {
				t.Errorf("%+v", s)
			}
			reads := f.gate.reads.Load()
			c.ring.drop(nil)
			checkFiles(t, v, f.bytes, after...)
			if n := f.gate.reads.Load() - reads; n > 0 {
				t.Errorf("%d fetches of what is kept", n)
			}
		})
	}
}

// Alone, what is kept outside a new set stays, whatever finds no room.
func TestOutsideStaysAlone(t *testing.T) {
	f := newFixture(t, slices.Repeat([]int{50_000}, 16)...)
	c, v := f.open(t, 64<<20, t.TempDir(), 420_000)
	defer closeCache(t, c)
	checkFiles(t, v, f.bytes, span(0, 8)...)
	settled(t, c)
	v.SetAdmit(func(file, _ int) bool { return file >= 8 })
	checkFiles(t, v, f.bytes, span(8, 16)...)
	settled(t, c)
	if kept := v.keptFiles(); !slices.Equal(kept, span(0, 8)) {
		t.Errorf("kept %v", kept)
	}
}

// A node restarts with the same records and other owners. Until these are known nothing goes and nothing comes in; then
// what is not owned does not count as the set's. If the limit was lowered meanwhile, and the owners are known before
// the disk is opened, what is owned stays and the rest goes.
func TestRestartWithOtherOwners(t *testing.T) {
	const files, size = 32, 50_000
	f := newFixture(t, slices.Repeat([]int{size}, files)...)
	owned := func(file, _ int) bool { return file%4 == 1 }
	nothing := func(int, int) bool { return false }
	for _, test := range []struct {
		name   string
		before func(file, extent int) bool // in force when the disk is opened; nil: all
		limit  int64
		kept   int
	}{
		{"owners unknown", nil, 2_000_000, 24},
		{"owners known", owned, 2_000_000, 24},
		{"all others were owned", func(file, _ int) bool { return !owned(file, 0) }, 2_000_000, 24},
		{"nothing was owned", nothing, 2_000_000, 24},
		{"a lower limit, owners known", owned, 500_000, 9},
	} {
		t.Run(test.name, func(t *testing.T) {
			dir := t.TempDir()
			open := func(limit int64, admit func(file, extent int) bool) (*Cache, *Volume) {
				c := newPatient(Options{Memory: 64 << 20, Logger: quiet})
				v := f.volume(c)
				if admit != nil {
					v.SetOwned(admit)
				}
				if err := v.OpenDisk(dir,
					segment.Options{MaxBytes: limit, SegmentSize: 200_000, Logger: quiet}); err != nil {
					t.Fatal(err)
				}
				return c, v
			}
			c, v := open(0, nil)
			checkFiles(t, v, f.bytes, span(0, 24)...)
			settled(t, c)
			closeCache(t, c)
			c, v = open(test.limit, test.before)
			defer closeCache(t, c)
			kept := v.keptFiles()
			v.SetOwned(owned)
			if err := v.Flush(context.Background()); err != nil {
				t.Fatal(err)
			}
			if after := v.keptFiles(); !slices.Equal(after, kept) || len(kept) < test.kept-1 || len(kept) > test.kept {
				t.Errorf("kept %v, then %v", kept, after)
			}
			for file := 1; file < 24; file += 4 {
				if !slices.Contains(kept, file) {
					t.Errorf("file %d is owned and was lost", file)
				}
			}
			// 6 of the 8 owned are kept.
			if a := v.admission.Load(); a.missing.Load() != 2 || a.outside.Load() != int64(len(kept)-6)*size {
				t.Errorf("%d missing, %d bytes outside", a.missing.Load(), a.outside.Load())
			}
			var wanted int64
			for _, s := range v.ds.disk.Load().survey() {
				wanted += s.wanted
			}
			if wanted < 6*size || wanted > 6*(size+500) {
				t.Errorf("%d bytes count as wanted, of 6 files of %d", wanted, size)
			}
		})
	}
}

// killFS copies the folder as a process leaves it that is killed in the middle of a write, or before a removal.
type killFS struct {
	*faultFS
	left atomic.Int64 // changes until then
	copy func()
}

func (k *killFS) change() bool { return k.left.Add(-1) == 0 }

func (k *killFS) OpenFile(name string, flag int, perm fs.FileMode) (segment.File, error) {
	f, err := k.faultFS.OpenFile(name, flag, perm)
	if err != nil {
		return nil, err
	}
	return &killFile{f, k}, nil
}

func (k *killFS) Remove(name string) error {
	if k.change() {
		k.copy()
	}
	return k.faultFS.Remove(name)
}

type killFile struct {
	segment.File
	k *killFS
}

func (f *killFile) WriteAt(p []byte, off int64) (int, error) {
	if f.k.change() {
		if _, err := f.File.WriteAt(p[:len(p)/2], off); err != nil {
			return 0, err
		}
		f.k.copy()
	}
	return f.File.WriteAt(p, off)
}

// node is one of a cluster, as the model of what it keeps sees it.
type node struct {
	t    *rapid.T
	f    *fixture
	fs   *killFS
	o    segment.Options
	root string
	dir  string
	dirs int
	c    *Cache
	v    *Volume

	others map[int]bool
	bytes  int64 // that the set may have
}

// owns is rendezvous hashing among the node, which is 0, and the others.
func (n *node) owns(file int) bool {
	draw := func(node int) uint64 {
		z := (uint64(file)<<8 | uint64(node)) * 0x9e3779b97f4a7c15
		z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
		return (z ^ z>>27) * 0x94d049bb133111eb >> 1
	}
	for other := range n.others {
		if draw(other) < draw(0) {
			return false
		}
	}
	return true
}

// set returns what the node is to keep: what it owns, in an order that is the same for all sets, up to the bytes.
func (n *node) set() map[int]bool {
	set, bytes := make(map[int]bool), int64(0)
	for i := range n.f.bytes {
		file := i * 37 % len(n.f.bytes)
		if !n.owns(file) {
			continue
		}
		if bytes += int64(len(n.f.bytes[file])) + 500; bytes > n.bytes {
			break
		}
		set[file] = true
	}
	return set
}

func (n *node) start(known bool) {
	n.c = newPatient(Options{Memory: 64 << 20, Logger: quiet})
	n.v = n.f.volume(n.c)
	if known {
		n.own()
	}
	if err := n.v.OpenDisk(n.dir, n.o); err != nil {
		n.t.Fatal(err)
	}
	n.own()
}

func (n *node) own() {
	set := n.set()
	n.v.SetOwned(func(file, _ int) bool { return set[file] })
}

func (n *node) end() {
	if err := n.c.Close(); err != nil {
		n.t.Fatal(err)
	}
}

func (n *node) read(files ...int) {
	for _, file := range files {
		p := make([]byte, len(n.f.bytes[file]))
		if _, err := n.v.ReadAt(context.Background(), file, p, 0); err != nil || !bytes.Equal(p, n.f.bytes[file]) {
			n.t.Fatalf("file %d: %v", file, err)
		}
	}
	n.flush()
}

func (n *node) flush() {
	for range 2 { // what SetOwned queues is behind the first mark
		if err := n.v.Flush(context.Background()); err != nil {
			n.t.Fatal(err)
		}
	}
}

// kept returns what is kept of the set.
func (n *node) kept() map[int]bool {
	kept, set := make(map[int]bool), n.set()
	for _, file := range n.v.keptFiles() {
		if set[file] {
			kept[file] = true
		}
	}
	return kept
}

// check says that of what was kept and is still of the set at most some bytes were lost, and that the counts are right.
func (n *node) check(before map[int]bool, most int64) {
	n.flush()
	set := n.set()
	for file := range before {
		if set[file] && n.v.loc(uint32(file)) == 0 {
			if most -= int64(len(n.f.bytes[file])); most < 0 {
				n.t.Fatalf("file %d was kept, is owned, and was lost", file)
			}
		}
	}
	var missing, outside int64
	for file := range n.f.bytes {
		switch kept := n.v.loc(uint32(file)) != 0; {
		case kept && !set[file]:
			outside += int64(len(n.f.bytes[file]))
		case !kept && set[file]:
			missing++
		}
	}
	if a := n.v.admission.Load(); a.missing.Load() != missing || a.outside.Load() != outside {
		n.t.Fatalf("%d missing, %d bytes outside; want %d and %d", a.missing.Load(), a.outside.Load(), missing, outside)
	}
	if used := n.v.ds.disk.Load().store.Used(); used > n.o.MaxBytes {
		n.t.Fatalf("%d bytes are used of %d", used, n.o.MaxBytes)
	}
}

// Nodes join and leave, limits change, one restarts or is killed in the middle of any change of its disk: what it owns
// and has kept is never lost, its disk never exceeds its limit, and once it has read everything it keeps all of its
// set.
func TestOwnedModel(t *testing.T) {
	// The default of 100 takes 5 s.
	if n := flag.Lookup("rapid.checks"); n.Value.String() == n.DefValue {
		_ = n.Value.Set("30")
		defer n.Value.Set(n.DefValue)
	}
	rapid.Check(t, func(r *rapid.T) {
		root, err := os.MkdirTemp("", "cache-owned-")
		if err != nil {
			r.Fatal(err)
		}
		defer os.RemoveAll(root)
		sizes := make([]int, rapid.IntRange(20, 80).Draw(r, "files"))
		var total, largest int64
		for i := range sizes {
			sizes[i] = 1 + rapid.IntRange(0, 40_000).Draw(r, "size")
			total, largest = total+int64(sizes[i]), max(largest, int64(sizes[i]))
		}
		n := &node{t: r, f: newFixture(t, sizes...), root: root, dir: filepath.Join(root, "0"), others: map[int]bool{}}
		n.fs = &killFS{faultFS: newFaultFS()}
		limit := total*int64(rapid.IntRange(5, 100).Draw(r, "percent"))/100 + 4*largest + 20_000
		bound := func(limit int64) { n.o.MaxBytes, n.bytes = limit, limit*9/10-2*largest-10_000 }
		n.o = segment.Options{FS: n.fs,
			SegmentSize: limit / int64(rapid.SampledFrom([]int{16, 5, 1, 40}).Draw(r, "segments")), Logger: quiet}
		bound(limit)
		n.start(true)
		file := rapid.IntRange(0, len(sizes)-1)
		view := func() {
			before := n.kept()
			if other := rapid.IntRange(1, 6).Draw(r, "node"); n.others[other] {
				delete(n.others, other)
			} else {
				n.others[other] = true
			}
			n.own()
			n.check(before, 0)
		}
		steps := map[string]func(){
			"view": view,
			"read": func() {
				before := n.kept()
				n.read(rapid.SliceOfN(file, 1, 20).Draw(r, "files")...)
				n.check(before, 0)
			},
			"limit": func() {
				before := n.kept()
				bound(limit * int64(rapid.SampledFrom([]int{100, 90, 60, 30}).Draw(r, "of the limit")) / 100)
				n.own()
				n.v.SetQuota(n.o.MaxBytes)
				n.check(before, 0)
			},
			"forget": func() { n.c.ring.drop(nil) },
			"everything": func() {
				before := n.kept()
				for range 2 {
					n.c.ring.drop(nil)
					n.read(span(0, len(sizes))...)
				}
				n.check(before, 0)
				if kept, set := n.kept(), n.set(); !maps.Equal(kept, set) {
					r.Fatalf("%d of the %d of the set are kept: %v of %v", len(kept), len(set), kept, set)
				}
				reads := n.f.gate.reads.Load()
				n.c.ring.drop(nil)
				n.read(slices.Collect(maps.Keys(n.kept()))...)
				if more := n.f.gate.reads.Load() - reads; more > 0 {
					r.Fatalf("%d fetches of what is kept", more)
				}
			},
			"restart": func() {
				before := n.kept()
				n.end()
				n.start(rapid.Bool().Draw(r, "owners are known"))
				n.check(before, 0)
			},
			"kill": func() {
				before := n.kept()
				n.dirs++
				to := filepath.Join(root, fmt.Sprint(n.dirs))
				n.fs.copy = func() { copyDir(r, n.dir, to) }
				n.fs.left.Store(int64(rapid.IntRange(1, 200).Draw(r, "changes")))
				for range rapid.IntRange(1, 3).Draw(r, "views") {
					view()
					// What leaves the set may go, though it comes back to it.
					set := n.set()
					maps.DeleteFunc(before, func(file int, _ bool) bool { return !set[file] })
					n.c.ring.drop(nil)
					n.read(rapid.SliceOfN(file, 1, 60).Draw(r, "files")...)
				}
				n.end()
				if n.fs.left.Swap(0) > 0 {
					n.fs.copy()
				}
				n.dir = to
				n.start(rapid.Bool().Draw(r, "owners are known"))
				// Copies under way at the kill are beyond the limit, and what gives them back may be of the set.
				n.check(before, n.o.SegmentSize+largest)
			},
		}
		all := map[string]func(*rapid.T){}
		for name, f := range steps {
			all[name] = func(t *rapid.T) {
				r, n.t = t, t
				f()
			}
		}
		r.Repeat(all)
		n.end()
	})
}

// Readers get the right bytes, and the counts stay right, while owners change again and again.
func TestOwnersChangeUnderReaders(t *testing.T) {
	f := newFixture(t, slices.Repeat([]int{40_000}, 48)...)
	c := newPatient(Options{Memory: 1 << 20, Logger: quiet})
	defer closeCache(t, c)
	v := f.volume(c)
	if err := v.OpenDisk(t.TempDir(),
		segment.Options{MaxBytes: 800_000, SegmentSize: 100_000, Logger: quiet}); err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	var wg sync.WaitGroup
	for r := range 4 {
		wg.Go(func() {
			p := make([]byte, 40_000)
			for i := r; ; i++ {
				select {
				case <-done:
					return
				default:
				}
				file := i * (2*r + 5) % 48
				if _, err := v.ReadAt(context.Background(), file, p, 0); err != nil || !bytes.Equal(p, f.bytes[file]) {
					t.Errorf("file %d: %v", file, err)
					return
				}
				v.Spend(file)
			}
		})
	}
	for i := range 60 {
		switch i % 7 {
		case 3:
			v.SetAdmit(func(file, _ int) bool { return file%2 == 0 })
		case 5:
			v.SetAdmit(nil)
		default:
			v.SetOwned(func(file, _ int) bool { return (file+i)%3 == 0 })
		}
		time.Sleep(3 * time.Millisecond)
	}
	owned := func(file, _ int) bool { return file%3 == 1 }
	v.SetOwned(owned)
	close(done)
	wg.Wait()
	a := v.admission.Load()
	// short memory drops some before they are written
	for pass := 0; pass < 20 && (pass == 0 || a.missing.Load() > 0); pass++ {
		checkFiles(t, v, f.bytes, span(0, 48)...)
		settled(t, c)
	}
	var missing, outside int64
	for file := range f.bytes {
		switch kept := v.loc(uint32(file)) != 0; {
		case kept && !owned(file, 0):
			outside += 40_000
		case !kept && owned(file, 0):
			missing++
		}
	}
	if a.missing.Load() != missing || a.outside.Load() != outside || missing > 0 {
		t.Errorf("%d missing, %d bytes outside; want 0 = %d and %d",
			a.missing.Load(), a.outside.Load(), missing, outside)
	}
}
