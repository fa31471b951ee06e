package cache

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/cache/segment"
)

// tally counts requests, and the bytes that they asked for.
type tally struct {
	objstore.Reader
	requests, bytes atomic.Int64
}

func (y *tally) ReadAt(ctx context.Context, o objstore.Object, p []byte, off int64) error {
	y.requests.Add(1)
	y.bytes.Add(int64(len(p)))
	return y.Reader.ReadAt(ctx, o, p, off)
}

func (y *tally) ReadSpans(ctx context.Context, o objstore.Object, spans []objstore.Span) error {
	y.requests.Add(1)
	for _, s := range spans {
		y.bytes.Add(int64(len(s.P)))
	}
	return objstore.ReadSpans(ctx, y.Reader, o, spans)
}

const mib = 1 << 20

// openLarge returns a volume of one file of 12 MiB and 5,000 bytes, what it holds, and a count of what is fetched.
func openLarge(t *testing.T, memory int64, dir string) (*Cache, *Volume, []byte, *tally) {
	t.Helper()
	f := newFixture(t, 12*mib+5000)
	y := &tally{Reader: f.mem}
	c := newPatient(Options{Memory: memory, Logger: quiet})
	v := c.NewVolume(VolumeOptions{Manifest: f.m, Dataset: [16]byte{1}, Store: y})
	if dir != "" {
		if err := v.OpenDisk(dir, segment.Options{MaxBytes: 64 * mib, Logger: quiet}); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() { closeCache(t, c) })
	return c, v, f.bytes[0], y
}

func readRight(t *testing.T, v *Volume, want []byte, off, n int) {
	t.Helper()
	p := make([]byte, n)
	if got, err := v.ReadAt(t.Context(), 0, p, int64(off)); err != nil ||
		!bytes.Equal(p[:got], want[off:min(off+n, len(want))]) {
		t.Fatalf("%d bytes at %d: %d, %v", n, off, got, err)
	}
}

func TestGranules(t *testing.T) {
	const g = granuleSize
	type read struct{ off, n int }
	each := func(from, to, by, n int) (reads []read) {
		for off := from; off < to; off += by {
			reads = append(reads, read{off, n})
		}
		return reads
	}
	steps := func(from, to, by int) []read { return each(from, to, by, by) }
	pairs := append(each(4*mib, 8*mib, 4*g, g+1), read{4*mib + 3*g, 1}) // half of an extent, and one more
	for _, c := range []struct {
		name            string
		disk            bool
		reads           []read
		requests, bytes int64
	}{
		{"a read of 8 KiB", false, []read{{5 * mib, 8 << 10}}, 1, g},
		{"again", false, []read{{5 * mib, 8 << 10}, {5*mib + 4096, 8 << 10}}, 1, g},
		{"across two granules", false, []read{{5*mib + g - 1, 2}}, 1, 2 * g},
		{"across two extents, which continues", false, []read{{8*mib - 1, 2}}, 2, 3 * g},
		{"far apart", false, []read{{5 * mib, 4096}, {9 * mib, 4096}, {7 * mib, 4096}}, 3, 3 * g},
		{"the end of the file, which is a small extent", false, []read{{12*mib + 100, 4096}}, 1, 5000},
		{"the start of the file", false, []read{{0, 8}}, 1, 4 * mib},
		{"a quarter of an extent at once", true, []read{{5 * mib, mib}}, 1, mib},
		{"most of an extent at once", false, []read{{5 * mib, 3 * mib}}, 1, 3 * mib},
		{"most of an extent at once, with a disk", true, []read{{5 * mib, 3 * mib}}, 1, 4 * mib},
		{"from start to end", false, steps(0, 12*mib+5000, 128<<10), 4, 12*mib + 5000},
		{"on from the middle of an extent: 1, 2, 6, 18, the last 5 granules, then those after it", false,
			steps(6*mib, 12*mib+5000, g), 7, 6*mib + 5000},
		{"on from near the end of an extent: 1, 2, 5, then 16, 32, 16", false, steps(8*mib-8*g, 12*mib, g), 6,
			4*mib + 8*g},
		{"2 MiB from a quarter of an extent: 1, 2, 6, 18, 21", true, steps(5*mib, 7*mib, g), 5, 48 * g},
		{"half of an extent and more, without a disk", false, pairs, 17, 33 * g},
		{"half of an extent and more, with a disk", true, pairs, 17, 32*g + 4*mib},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := ""
			if c.disk {
				dir = t.TempDir()
			}
			cache, v, want, y := openLarge(t, 32*mib, dir)
			for _, r := range c.reads {
				readRight(t, v, want, r.off, r.n)
			}
			settled(t, cache)
			if y.requests.Load() != c.requests || y.bytes.Load() != c.bytes {
				t.Errorf("%d requests, %d bytes; want %d, %d", y.requests.Load(), y.bytes.Load(), c.requests, c.bytes)
			}
		})
	}
}

// Of a range that is announced, what is most of an extent is fetched whole, so a reader of the rest fetches nothing.
func TestGranulesOfARange(t *testing.T) {
	const g = granuleSize
	c, v, want, y := openLarge(t, 64*mib, t.TempDir())
	fetched := func(requests, bytes int64) {
		t.Helper()
		settled(t, c)
		if y.requests.Load() != requests || y.bytes.Load() != bytes {
			t.Errorf("%d requests, %d bytes; want %d, %d", y.requests.Load(), y.bytes.Load(), requests, bytes)
		}
	}
	v.WillReadRange(0, 4*mib+g, 3*mib)
	fetched(1, 4*mib)
	readRight(t, v, want, 4*mib+g, 3*mib)
	readRight(t, v, want, 4*mib, g)
	fetched(1, 4*mib)
	v.WillReadRange(0, 6*mib, 4*mib)
	fetched(1, 4*mib) // of the one it is there, of the other it is half
	v.WillReadRange(0, 0, 12*mib+5000)
	fetched(4, 12*mib+5000)
}

// An extent of an announced range for which there was no memory is fetched whole when it is read.
func TestGranulesOfARangeLater(t *testing.T) {
	c, v, want, y := openLarge(t, 64*mib, t.TempDir())
	held := c.ledger.Limit()
	if !c.ledger.TryReserve(held, ForDemand) {
		t.Fatal("no memory")
	}
	v.WillReadRange(0, 4*mib, 4*mib)
	if y.requests.Load() != 0 {
		t.Fatal("it was fetched without memory")
	}
	c.ledger.Release(held, ForDemand)
	readRight(t, v, want, 5*mib, 100)
	settled(t, c)
	if y.bytes.Load() != 4*mib {
		t.Errorf("%d bytes", y.bytes.Load())
	}
}

// A piece of 2 MiB is fetched in granules. A granule that is fetched for the second time brings its extent to the disk.
func TestGranuleAgain(t *testing.T) {
	c, v, want, y := openLarge(t, 32*mib, t.TempDir())
	for range 3 {
		for off := 5 * mib; off < 7*mib; off += granuleSize {
			readRight(t, v, want, off, 100)
		}
		settled(t, c)
		c.ring.reclaim(32*mib, 0, true, false)
	}
	if y.requests.Load() != 6 || y.bytes.Load() != 48*granuleSize+4*mib {
		t.Errorf("%d requests, %d bytes", y.requests.Load(), y.bytes.Load())
	}
}

// Readers at random places, some of which leave, in memory that is too small: every byte is right, and nothing is held
// in the end.
func TestGranulesTogether(t *testing.T) {
	for _, dir := range []string{"", t.TempDir()} {
		c, v, want, _ := openLarge(t, 10*mib, dir)
		var all sync.WaitGroup
		for r := range 8 {
			all.Go(func() {
				draw := rand.New(rand.NewPCG(uint64(r), 1))
				for range 150 {
					off, n := draw.IntN(len(want)), 1<<draw.IntN(20)
					ctx, cancel := context.WithCancel(t.Context())
					if draw.IntN(8) == 0 {
						go cancel()
					}
					p := make([]byte, n)
					got, err := v.ReadAt(ctx, 0, p, int64(off))
					cancel()
					if err != nil && !errors.Is(err, context.Canceled) ||
						err == nil && !bytes.Equal(p[:got], want[off:min(off+n, len(want))]) {
						t.Errorf("%d bytes at %d: %d, %v", n, off, got, err)
					}
				}
			})
		}
		all.Wait()
		settled(t, c)
		if n := len(v.flights); n > 0 {
			t.Errorf("%d flights are left", n)
		}
		if peak := c.Stats().MemoryPeak; peak > 10*mib {
			t.Errorf("%d bytes of memory", peak)
		}
	}
}

// A reader who reaches an extent gets as many of the following ones in advance as it has read, and in little memory
// none.
func TestReadAhead(t *testing.T) {
	for memory, ahead := range map[int64]bool{64 * mib: true, 24 * mib: false} {
		c, v, want, _ := openLarge(t, memory, "")
		readRight(t, v, want, 0, 100)
		readRight(t, v, want, 4*mib, 100)
		settled(t, c)
		if (v.Where(0, 2) > OnWay) != ahead || v.Where(0, 3) > OnWay {
			t.Errorf("with %d of memory, staged: %v, %v", memory, v.Where(0, 2) > OnWay, v.Where(0, 3) > OnWay)
		}
	}
}
