package cache

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"pgregory.net/rapid"

	"github.com/shoalfs/shoal/cache/segment"
)

// place is where a file is kept, as the model of giving back sees it.
type place struct {
	loc    segment.Loc
	bytes  int64
	wanted bool
}

func (v *Volume) keptAt(admit func(file, extent int) bool) map[int]place {
	m := make(map[int]place)
	for f := range v.m.Len() {
		if loc := segment.Loc(v.loc(uint32(f))); loc != 0 {
			m[f] = place{loc, loc.Bytes(int(v.m.Size(f))), admit == nil || admit(f, 0)}
		}
	}
	return m
}

// Whatever is kept in whatever segments, and whoever gives back, at the start, by a quota, or to others: the limit
// holds, less than a record more than is needed is lost, the coldest segments go, of the last one the kept set
// stays before others, and what is left is served from the disk.
func TestGiveBackModel(t *testing.T) {
	rapid.Check(t, func(r *rapid.T) {
		// Drawn evenly; rapid prefers what is small.
		rng := rand.New(rand.NewPCG(rapid.Uint64().Draw(r, "seed"), 1))
		sizes := make([]int, rapid.IntRange(1, 60).Draw(r, "files"))
		for i := range sizes {
			sizes[i] = 1 + rng.IntN(60_000)
		}
		f := newFixture(t, sizes...)
		dir := t.TempDir()
		o := segment.Options{SegmentSize: int64(
			rapid.SampledFrom([]int{100_000, 400_000, 64, 1 << 20}).Draw(r, "segment size")), Logger: quiet}
		mod := rapid.IntRange(1, 4).Draw(r, "admitted")
		var admit func(file, extent int) bool
		if mod > 1 {
			admit = func(f, _ int) bool { return f%mod > 0 && f%7 != 3 }
		}
		ctx := context.Background()
		open := func(limit int64, read bool) (*Cache, *Volume) {
			c := newPatient(Options{Memory: 64 << 20, Logger: quiet})
			v := c.NewVolume(VolumeOptions{Manifest: f.m, Dataset: [16]byte{1}, Store: f.gate})
			if !read {
				v.SetAdmit(admit)
			}
			o.MaxBytes = limit
			if err := v.OpenDisk(dir, o); err != nil {
				r.Fatal(err)
			}
			for file := range sizes {
				if p := make([]byte, sizes[file]); read {
					if _, err := v.ReadAt(ctx, file, p, 0); err != nil {
						r.Fatal(err)
					}
				}
			}
			if err := v.Flush(ctx); err != nil {
				r.Fatal(err)
			}
			return c, v
		}
		end := func(c *Cache) {
			if err := c.Close(); err != nil {
				r.Fatal(err)
			}
		}
		c, v := open(0, true)
		v.SetAdmit(admit)
		before, d := v.keptAt(admit), v.ds.disk.Load()
		segs, held := d.store.Segments(), d.store.Used()
		limit := max(1, held*int64(rapid.SampledFrom([]int{99, 90, 50, 10, 100, 75, 0}).Draw(r, "percent"))/100)
		need, idle := max(held-limit, 0), false
		switch rapid.SampledFrom([]string{"start", "quota", "idle"}).Draw(r, "who") {
		case "quota":
			v.SetQuota(limit)
			if err := v.Flush(ctx); err != nil {
				r.Fatal(err)
			}
		case "idle":
			end(c)
			idle = true
			o.MaxBytes = 0
			if _, err := c.GiveBack(dir, o, need); err != nil {
				r.Fatal(err)
			}
			c, v = open(0, false)
		default:
			end(c)
			c, v = open(limit, false)
		}
		defer end(c)
		after, used := v.keptAt(admit), v.ds.disk.Load().store.Used()
		if used > limit {
			r.Fatalf("%d bytes are used of %d", used, limit)
		}
		wanted := make(map[uint32]int64)
		var lost, largest int64
		gone := make(map[uint32]bool)
		for file, p := range before {
			largest = max(largest, p.bytes)
			if p.wanted || idle {
				wanted[p.loc.Segment()] += p.bytes
			}
			now, ok := after[file]
			if !ok {
				lost += p.bytes
			}
			if now.loc != p.loc {
				gone[p.loc.Segment()] = true
			}
		}
		if most := need + largest + 64*int64(len(segs)); lost > most || need == 0 && lost > 0 {
			r.Fatalf("%d bytes of %d were lost to free %d, the largest record is of %d", lost, held, need, largest)
		}
		for cold, p := range before {
			for file, q := range before {
				now, stayed := after[file]
				if _, ok := after[cold]; !ok && p.wanted && !idle && stayed && now.loc != q.loc && !q.wanted &&
					q.loc.Segment() == p.loc.Segment() && q.bytes >= p.bytes {
					r.Fatalf("a record of the kept set went, and one of no smaller size that is not stayed")
				}
			}
		}
		for _, s := range segs {
			for _, g := range segs {
				if gone[g.ID] && !gone[s.ID] && float64(wanted[g.ID])/float64(g.Bytes) > float64(wanted[s.ID])/
					float64(s.Bytes) {
					r.Fatalf("segment %d went with %d of %d bytes of the kept set, and %d stayed with %d of %d",
						g.ID, wanted[g.ID], g.Bytes, s.ID, wanted[s.ID], s.Bytes)
				}
			}
		}
		reads := f.gate.reads.Load()
		for file := range sizes {
			p := make([]byte, sizes[file])
			if _, err := v.ReadAt(ctx, file, p, 0); err != nil || !bytes.Equal(p, f.bytes[file]) {
				r.Fatal(file, errors.Join(err))
			}
		}
		if n := int(f.gate.reads.Load() - reads); n != len(before)-len(after) {
			r.Fatalf("%d fetched, %d were lost", n, len(before)-len(after))
		}
	})
}

// Readers get the right bytes, and no error, while what they read is given back, or written anew elsewhere.
func TestGiveBackUnderReaders(t *testing.T) {
	f := newFixture(t, slices.Repeat([]int{40_000}, 48)...)
	c := newPatient(Options{Memory: 64 << 20, Logger: quiet})
	defer closeCache(t, c)
	v := f.volume(c)
	if err := v.OpenDisk(t.TempDir(), segment.Options{SegmentSize: 400_000, Logger: quiet}); err != nil {
		t.Fatal(err)
	}
	checkFiles(t, v, f.bytes, span(0, 48)...)
	done := make(chan struct{})
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for p := make([]byte, 40_000); ; {
				select {
				case <-done:
					return
				default:
				}
				for i := range f.bytes {
					if _, err := v.ReadAt(context.Background(), i, p, 0); err != nil || !bytes.Equal(p, f.bytes[i]) {
						t.Errorf("file %d: %v", i, err)
						return
					}
				}
			}
		})
	}
	for _, quota := range []int64{1_900_000, 1_300_000, 1_250_000, 700_000, 100_000, 0, 1_000_000} {
		v.SetQuota(quota)
		if err := v.Flush(context.Background()); err != nil {
			t.Error(err)
		}
		if used := v.Stats().DiskUsed; quota > 0 && used > quota {
			t.Errorf("%d bytes of %d", used, quota)
		}
	}
	close(done)
	wg.Wait()
}

// What is live of a segment that is mostly garbage stays while the disk has no room for its copies.
func TestWastefulWithoutRoom(t *testing.T) {
	f := newFixture(t, slices.Repeat([]int{100 << 10}, 40)...)
	c := newPatient(Options{Memory: 64 << 20, Logger: quiet})
	defer closeCache(t, c)
	v := f.volume(c)
	if err := v.OpenDisk(t.TempDir(), segment.Options{SegmentSize: 2 << 20, Logger: quiet}); err != nil {
		t.Fatal(err)
	}
	for i := range 40 {
		if _, err := v.ReadAt(t.Context(), i, make([]byte, 100<<10), 0); err != nil {
			t.Fatal(err)
		}
	}
	if err := v.Flush(t.Context()); err != nil {
		t.Fatal(err)
	}
	d, first := v.ds.disk.Load(), segment.Loc(v.loc(0)).Segment()
	for e := range uint32(40) {
		if loc := segment.Loc(v.loc(e)); loc.Segment() == first && e%3 > 0 && v.unplace(e, loc) {
			d.free(loc)
		}
	}
	kept, _ := v.Kept()
	for _, room := range []int64{150 << 10, 1 << 30} {
		err := d.writer.do(t.Context(), func() {
			c.statfs = func(string) (free, size int64, err error) { return 2<<20 + room, 0, nil }
			if d.rewriteWasteful(wasteful) != (room == 1<<30) {
				t.Errorf("with room for %d", room)
			}
		})
		if now, _ := v.Kept(); now != kept || err != nil {
			t.Errorf("%d of %d are kept, %v", now, kept, err)
		}
	}
}
