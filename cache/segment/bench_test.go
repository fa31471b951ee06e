package segment

import (
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/cache/crypt"
)

const photo = 63 << 10 // the size of the photographs that the design's figures are for

func photoRecord(i int) Record {
	r := Record{Dataset: [16]byte{1}, ETag: "d41d8cd98f00b204e9800998ecf8427e", ObjectSize: photo, Length: photo}
	r.KeyHash[0], r.KeyHash[1], r.KeyHash[2] = byte(i), byte(i>>8), byte(i>>16)
	return r
}

func fill(b *testing.B, s *Store, n int, payload []byte) []Loc {
	b.Helper()
	locs := make([]Loc, n)
	for i := range locs {
		var err error
		if locs[i], err = s.Append(photoRecord(i), payload); err != nil {
			b.Fatal(err)
		}
	}
	return locs
}

func randomBytes(n int) []byte {
	p := make([]byte, n)
	src := rand.NewChaCha8([32]byte{})
	_, _ = src.Read(p)
	return p
}

func benchStore(b *testing.B, dir string, o Options) *Store {
	b.Helper()
	s, err := Open(dir, o, nil)
	if err != nil {
		b.Fatal(err)
	}
	return s
}

// BenchmarkAlign compares alignments of the payload for reads of 63 KB from the page cache in random
// order. It takes turns and reports the median CPU time of a thread, so that what else runs on the
// machine matters little.
func BenchmarkAlign(b *testing.B) {
	const n, rounds, reads = 3000, 15, 4000
	payload := randomBytes(photo)
	aligns := []int64{64, 512, 4096}
	stores, locs := make([]*Store, len(aligns)), make([][]Loc, len(aligns))
	p := make([]byte, photo)
	for i, align := range aligns {
		stores[i] = benchStore(b, b.TempDir(), Options{})
		stores[i].align = align
		defer stores[i].Close()
		locs[i] = fill(b, stores[i], n, payload)
		for _, loc := range locs[i] { // the checks
			if err := stores[i].ReadAt(loc, photo, p, 0); err != nil {
				b.Fatal(err)
			}
		}
		if err := stores[i].Sync(); err != nil {
			b.Fatal(err)
		}
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	rng := rand.New(rand.NewPCG(1, 2))
	cpu := make([][]float64, len(aligns))
	for b.Loop() {
		for range rounds {
			for i, s := range stores {
				before := threadCPU(b)
				for range reads {
					if err := s.ReadAt(locs[i][rng.IntN(n)], photo, p, 0); err != nil {
						b.Fatal(err)
					}
				}
				cpu[i] = append(cpu[i], float64(threadCPU(b)-before)/reads)
			}
		}
	}
	for i, align := range aligns {
		slices.Sort(cpu[i])
		b.ReportMetric(cpu[i][len(cpu[i])/2], fmt.Sprintf("cpu-ns/read-at-%d", align))
	}
}

// threadCPU returns the CPU time of the calling thread in nanoseconds.
func threadCPU(b *testing.B) int64 {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &ts); err != nil {
		b.Fatal(err)
	}
	return ts.Nano()
}

func BenchmarkAppend63KB(b *testing.B) {
	payload := randomBytes(photo)
	for _, align := range []int64{64, 4096} {
		for _, par := range []int{1, 4} {
			b.Run(fmt.Sprintf("align=%d/writers=%d", align, par), func(b *testing.B) {
				s := benchStore(b, b.TempDir(), Options{Index: &mapIndex{}})
				s.align = align
				b.SetBytes(photo)
				b.SetParallelism(par)
				b.ReportAllocs()
				b.RunParallel(func(pb *testing.PB) {
					for i := 0; pb.Next(); i++ {
						if _, err := s.Append(photoRecord(i), payload); err != nil {
							b.Error(err)
						}
					}
				})
				b.StopTimer()
				if err := s.Close(); err != nil {
					b.Fatal(err)
				}
			})
		}
	}
}

// BenchmarkRead63KB reads records once that were not checked yet, and again when they were.
func BenchmarkRead63KB(b *testing.B) {
	const n = 4000
	payload := randomBytes(photo)
	s := benchStore(b, b.TempDir(), Options{})
	defer s.Close()
	locs := fill(b, s, n, payload)
	p := make([]byte, photo)
	for _, first := range []bool{true, false} {
		b.Run(map[bool]string{true: "first", false: "later"}[first], func(b *testing.B) {
			b.SetBytes(photo)
			b.ReportAllocs()
			i := 0
			for b.Loop() {
				if first && i%n == 0 {
					for _, g := range *s.segs.Load() {
						clear(g.tab.Load().checked)
					}
				}
				if err := s.ReadAt(locs[i%n], photo, p, 0); err != nil {
					b.Fatal(err)
				}
				i++
			}
		})
	}
}

// plainFS has files that offer no more than File asks for.
type plainFS struct{ osFS }

func (p plainFS) OpenFile(name string, flag int, perm fs.FileMode) (File, error) {
	f, err := p.osFS.OpenFile(name, flag, perm)
	return struct{ File }{f}, err
}

// BenchmarkReadFirst compares first reads of 63 KB by one system call (header and payload) with those by
// two, and later reads and the checksum alone, from the page cache. It takes turns and reports the median CPU time of a
// thread.
func BenchmarkReadFirst(b *testing.B) {
	const n, rounds = 3000, 15
	payload := randomBytes(photo)
	dir := b.TempDir()
	one := benchStore(b, dir, Options{})
	defer one.Close()
	locs := fill(b, one, n, payload)
	if err := one.Sync(); err != nil {
		b.Fatal(err)
	}
	two := benchStore(b, dir, Options{FS: plainFS{}, Logger: quiet()})
	defer two.Close()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	p := make([]byte, photo)
	forget := func(s *Store) {
		for _, g := range *s.segs.Load() {
			clear(g.tab.Load().checked)
		}
	}
	readAll := func(read func(Loc, int, []byte, int64) error) {
		for _, loc := range locs {
			if err := read(loc, photo, p, 0); err != nil && !errors.Is(err, ErrWouldBlock) { // a page that was recycled
				b.Fatal(err)
			}
		}
	}
	ways := []struct {
		name string
		do   func()
	}{
		{"two-preads", func() { forget(two); readAll(two.ReadAt) }},
		{"one-preadv", func() { forget(one); readAll(one.ReadAt) }},
		{"now-first", func() { forget(one); readAll(one.ReadAtNow) }},
		{"now-later", func() { readAll(one.ReadAtNow) }},
		{"later", func() { readAll(one.ReadAt) }},
		{"crc", func() {
			for range n {
				crc(p)
			}
		}},
	}
	cpu := make([][]float64, len(ways))
	for b.Loop() {
		for range rounds {
			for i, w := range ways {
				before := threadCPU(b)
				w.do()
				cpu[i] = append(cpu[i], float64(threadCPU(b)-before)/n)
			}
		}
	}
	for i, w := range ways {
		slices.Sort(cpu[i])
		b.ReportMetric(cpu[i][len(cpu[i])/2], "cpu-ns/"+w.name)
	}
}

// BenchmarkReadNow reads 63 KB that are not in the page cache: what the refusal costs, and what the read that follows
// then takes, as against a read that was not preceded by one.
func BenchmarkReadNow(b *testing.B) {
	const n = 1000
	s := benchStore(b, b.TempDir(), Options{})
	defer s.Close()
	locs := fill(b, s, n, randomBytes(photo))
	if err := s.Sync(); err != nil {
		b.Fatal(err)
	}
	p := make([]byte, photo)
	var miss, after, alone []float64
	hits := 0
	timed := func(read func(Loc, int, []byte, int64) error, loc Loc) (float64, error) {
		start := time.Now()
		err := read(loc, photo, p, 0)
		return float64(time.Since(start)), err
	}
	for b.Loop() {
		for i, loc := range locs {
			f := s.segment(loc.Segment()).f.(osFile)
			f.Forget(0, 0)
			if i%2 == 0 {
				d, err := timed(s.ReadAt, loc)
				if err != nil {
					b.Fatal(err)
				}
				alone = append(alone, d)
				continue
			}
			d, err := timed(s.ReadAtNow, loc)
			if !errors.Is(err, ErrWouldBlock) {
				hits++
				continue
			}
			miss = append(miss, d)
			if d, err = timed(s.ReadAt, loc); err != nil {
				b.Fatal(err)
			}
			after = append(after, d)
		}
	}
	b.ReportMetric(float64(hits), "hits")
	for name, d := range map[string][]float64{"miss": miss, "read-after-miss": after, "read-alone": alone} {
		slices.Sort(d)
		if len(d) > 0 {
			b.ReportMetric(d[len(d)/2], "ns/"+name)
		}
	}
}

// BenchmarkScrub checks records that are not in the page cache.
func BenchmarkScrub(b *testing.B) {
	s := benchStore(b, b.TempDir(), Options{})
	defer s.Close()
	fill(b, s, 3000, randomBytes(photo))
	if err := s.Sync(); err != nil {
		b.Fatal(err)
	}
	b.SetBytes(s.Used())
	for b.Loop() {
		s.segment(1).f.(osFile).Forget(0, 0)
		if err := s.Scrub(b.Context(), func(int) {}, func(_ Record, loc Loc) { b.Error(loc) }); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkOpen100k opens a store of 100,000 records, from committed tables and by a scan.
func BenchmarkOpen100k(b *testing.B) {
	const n = 100_000
	for _, size := range []int{photo, 4 << 10} {
		dir := b.TempDir()
		idx := &mapIndex{}
		s := benchStore(b, dir, Options{Index: idx})
		payload := make([]byte, size)
		for i := range n {
			r := photoRecord(i)
			r.ObjectSize, r.Length = int64(size), size
			if _, err := s.Append(r, payload); err != nil {
				b.Fatal(err)
			}
		}
		if err := s.Close(); err != nil {
			b.Fatal(err)
		}
		for name, idx := range map[string]Index{"tables": idx, "scan": nil} {
			b.Run(fmt.Sprintf("size=%d/%s", size, name), func(b *testing.B) {
				for b.Loop() {
					seen := 0
					s, err := Open(dir, Options{Index: idx, Logger: quiet()}, func(Extent, Loc) { seen++ })
					if err != nil || seen != n {
						b.Fatal(seen, err)
					}
					b.StopTimer()
					if err := s.Close(); err != nil {
						b.Fatal(err)
					}
					b.StartTimer()
				}
			})
		}
	}
}

// BenchmarkReadSealed reads 63 KB from the page cache, in clear and encrypted, and appends them.
func BenchmarkReadSealed(b *testing.B) {
	const n = 1000
	payload := randomBytes(photo)
	for name, key := range map[string]*crypt.Key{"clear": nil, "encrypted": testKey} {
		s := benchStore(b, b.TempDir(), Options{Key: key})
		locs := fill(b, s, n, payload)
		p := make([]byte, photo)
		for _, loc := range locs {
			if err := s.ReadAt(loc, photo, p, 0); err != nil {
				b.Fatal(err)
			}
		}
		b.Run("read/"+name, func(b *testing.B) {
			b.SetBytes(photo)
			b.ReportAllocs()
			for i := range b.N {
				if err := s.ReadAtNow(locs[i%n], photo, p, 0); err != nil {
					b.Fatal(err)
				}
			}
		})
		b.Run("append/"+name, func(b *testing.B) {
			b.SetBytes(photo)
			for i := range b.N {
				loc, err := s.Append(photoRecord(i), payload)
				if err != nil {
					b.Fatal(err)
				}
				s.Free(loc)
				if i%1000 == 999 {
					if _, err := s.Reclaim(); err != nil {
						b.Fatal(err)
					}
				}
			}
		})
		if err := s.Close(); err != nil {
			b.Fatal(err)
		}
	}
}
