package prefetch

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/shoalfs/shoal/prefetch/order"
	"pgregory.net/rapid"
)

// scattered are files in any order in their objects.
type scattered struct {
	rank    []int // by file
	file    []int // by rank
	objects []int // by rank, as are
	offs    []int64
	ends    []int64
}

func (s *scattered) Len() int          { return len(s.rank) }
func (s *scattered) Rank(file int) int { return s.rank[file] }
func (s *scattered) At(rank int) int   { return s.file[rank] }
func (s *scattered) Extent(rank int) (int, int64, int64) {
	return s.objects[rank], s.offs[rank], s.ends[rank]
}

func drawPlaces(t *rapid.T) *scattered {
	n := rapid.IntRange(1, 200).Draw(t, "files")
	s := &scattered{file: rapid.Permutation(slices.Collect(upTo(n))).Draw(t, "files by rank"), rank: make([]int, n)}
	object, at := 0, int64(0)
	for r, f := range s.file {
		s.rank[f] = r
		if rapid.IntRange(0, 19).Draw(t, "new object") == 0 {
			object, at = object+1, 0
		}
		at += rapid.Int64Range(0, 3).Draw(t, "header")
		s.objects, s.offs = append(s.objects, object), append(s.offs, at)
		at += rapid.Int64Range(0, 9).Draw(t, "size")
		s.ends = append(s.ends, at)
	}
	return s
}

func upTo(n int) func(func(int) bool) {
	return func(yield func(int) bool) {
		for i := range n {
			if !yield(i) {
				return
			}
		}
	}
}

// Of all runs of ranks with the file in them that keep the rules, the result is the one that goes as far
// right as can be, and then as far left.
func TestCoalesceModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := drawPlaces(t)
		n := s.Len()
		o := Coalescing{
			MaxBytes: rapid.Int64Range(-1, 300).Draw(t, "bytes"),
			MaxGap:   rapid.Int64Range(0, 40).Draw(t, "gap"),
			MaxFiles: rapid.IntRange(0, 30).Draw(t, "count"),
		}
		file := rapid.IntRange(0, n-1).Draw(t, "file")
		share := rapid.IntRange(1, 10).Draw(t, "share")
		wants := make([]bool, n) // by file
		for f := range wants {
			wants[f] = rapid.IntRange(1, 10).Draw(t, "wanted") <= share
		}
		rank := s.rank[file]
		// choose lists the wanted ranks of [from, to] and says whether they are a legal request.
		choose := func(from, to int) ([]int, bool) {
			var ranks []int
			for r := from; r <= to; r++ {
				if s.objects[r] != s.objects[rank] {
					return nil, false
				}
				if r == rank || wants[s.file[r]] {
					ranks = append(ranks, r)
				}
			}
			for i, r := range ranks {
				if i > 0 && (s.offs[r]-s.ends[ranks[i-1]] > o.MaxGap || r-ranks[i-1]-1 > maxPassed) {
					return nil, false
				}
			}
			if len(ranks) > 1 && (len(ranks) > o.MaxFiles ||
				s.ends[ranks[len(ranks)-1]]-s.offs[ranks[0]] > o.MaxBytes) {
				return nil, false
			}
			return ranks, ranks[0] == from && ranks[len(ranks)-1] == to
		}
		want := []int{rank}
		for to := rank; to < n; to++ {
			if ranks, ok := choose(rank, to); ok {
				want = ranks
			}
		}
		for from, to := rank, want[len(want)-1]; from >= 0; from-- {
			if ranks, ok := choose(from, to); ok {
				want = ranks
			}
		}
		asked := map[int]bool{}
		got := Coalesce(file, s, o, func(f int) bool {
			if asked[f] || f == file {
				t.Fatalf("file %d is asked about for the second time", f)
			}
			asked[f] = true
			return wants[f]
		})
		if !slices.Equal(got, want) {
			t.Fatalf("file %d at rank %d, %+v: %v, want %v", file, rank, o, got, want)
		}
		for f := range asked {
			if wants[f] && !slices.Contains(got, s.rank[f]) {
				t.Fatalf("file %d was asked about, is wanted, and left out", f)
			}
		}
	})
}

// Looking for neighbours ends after 64 files that are not wanted, however large the gaps may be.
// Files of a chunk are fetched with one request, however many bytes of others lie between them: a chunk comes whole.
func TestCoalesceChunk(t *testing.T) {
	const n, size = 100, 100 << 10
	s := &scattered{}
	for r := range n {
		off := int64(r%50)*size + int64(r/50)<<32 // two chunks
		s.rank, s.file, s.objects = append(s.rank, r), append(s.file, r), append(s.objects, 0)
		s.offs, s.ends = append(s.offs, off), append(s.ends, off+size)
	}
	h := Horizon{Chunk: 50 * size}
	bounds := h.Bound(Coalescing{MaxBytes: GroupBytes, MaxGap: groupGap, MaxFiles: groupFiles}, 1<<30)
	if got := Coalesce(1, s, bounds, func(f int) bool { return f%2 == 1 }); len(got) != 25 || got[24] != 49 {
		t.Errorf("%d files of a chunk that has 25: %v", len(got), got)
	}
}

func TestCoalesceIsBounded(t *testing.T) {
	s := pack(make([]int64, 100_000), 100_000)
	for _, far := range []int{maxPassed, maxPassed + 1} {
		asked := 0
		got := Coalesce(50_000, s, Coalescing{math.MaxInt64, math.MaxInt64, math.MaxInt}, func(f int) bool {
			asked++
			return f == 50_000+far+1
		})
		if want := far == maxPassed; want != (len(got) == 2) || asked > 4*(maxPassed+1) {
			t.Errorf("a wanted file after %d that are not: %v, %d asked", far, got, asked)
		}
	}
}

// testShards are n photographs of 64 KiB in the mean in shards of per.
func testShards(n, per int) (s shards, mean int64) {
	r := rand.New(rand.NewPCG(1, 1))
	sizes := make([]int64, n)
	var total int64
	for i := range sizes {
		sizes[i] = int64(64<<10*math.Exp(r.NormFloat64()*0.5-0.125)) + 1
		total += sizes[i]
	}
	return pack(sizes, per), total / int64(n)
}

// The table of requests and bytes a sample: `go test -run Horizon -v ./prefetch`.
func TestHorizon(t *testing.T) {
	const n, per, shard = 128_000, 1000, 64 << 20
	s, mean := testShards(n, per)
	c := Coalescing{MaxBytes: 8 << 20, MaxGap: 16 << 10, MaxFiles: 4096}
	window := func(w int) order.Locator { return windowed(order.Contiguous(n, per), 1, 0, w) }
	for _, k := range []struct {
		name   string
		order  order.Locator
		memory int64
		most   float64 // requests a sample
		naive  float64 // at least as many without a horizon; 0: not run
	}{
		{"sequential", order.Sequential(n), 2 * shard, 0.01, 0},
		{"sequential", order.Sequential(n), 16 * shard, 0.01, 0.5},
		{"windowed 4", window(4), 4 * shard, 0.03, 0.5},
		{"windowed 16", window(16), 4 * shard, 0.45, 0},
		{"windowed 16", window(16), 8 * shard, 0.20, 0},
		{"windowed 16", window(16), 12 * shard, 0.05, 0},
		{"windowed 16", window(16), 16 * shard, 0.02, 0.5},
		{"windowed 16", window(16), 32 * shard, 0.012, 0},
		{"uniform", order.Uniform(n, 1, 0), 4 * shard, 1, 0},
		{"uniform", order.Uniform(n, 1, 0), 32 * shard, 0.8, 0},
	} {
		h := NewHorizon(k.memory, mean)
		got := fetch(k.order, s, c, k.memory, &h, nil)
		t.Logf("%-11s %2d shards of memory: %.4f requests and %.4f times the bytes a sample, peak %.2f of memory, %d "+
			"requests at once",
			k.name, k.memory/shard, got.requestsPerSample(n), float64(got.spans)/float64(got.samples),
			float64(got.peak)/float64(k.memory), got.burst)
		if got.requestsPerSample(n) > k.most {
			t.Errorf("%s: %.4f requests a sample, want at most %.3f", k.name, got.requestsPerSample(n), k.most)
		}
		if got.spans != got.samples+got.gaps || got.widestGap > c.MaxGap || got.gaps > int64(n-got.requests)*c.MaxGap {
			t.Errorf("%s: %d bytes fetched for %d, gaps %d up to %d",
				k.name, got.spans, got.samples, got.gaps, got.widestGap)
		}
		if got.peak > k.memory || got.waited > 0 {
			t.Errorf("%s: %d of %d bytes of memory, the reader waited for %d samples",
				k.name, got.peak, k.memory, got.waited)
		}
		if k.naive == 0 {
			continue
		}
		naive := fetch(k.order, s, c, k.memory, nil, nil)
		t.Logf("%-11s %2d shards of memory, no horizon: %.4f", k.name, k.memory/shard, naive.requestsPerSample(n))
		if naive.requestsPerSample(n) < k.naive {
			t.Errorf("%s: without a horizon %.4f requests a sample: what it is for is gone",
				k.name, naive.requestsPerSample(n))
		}
	}
}

// Ranks that read their share of a windowed order from memories of their own find a part of each shard.
func TestHorizonRanks(t *testing.T) {
	const n, per, shard, world = 128_000, 1000, 64 << 20, 4
	s, mean := testShards(n, per)
	all := windowed(order.Contiguous(n, per), 1, 0, 16)
	share := order.Stripe(all, world, 1, 1).(order.Locator)
	h := NewHorizon(16*shard, mean)
	near := fetch(share, s, Coalescing{MaxBytes: 8 << 20, MaxGap: 16 << 10, MaxFiles: 4096}, 16*shard, &h, nil)
	wide := fetch(share, s, Coalescing{MaxBytes: 8 << 20, MaxGap: 1 << 20, MaxFiles: 4096}, 16*shard, &h, nil)
	t.Logf(
		"one rank of %d: gaps of 16 KiB %.3f requests and %.2f times the bytes a sample; gaps of 1 MiB %.3f and %.2f",
		world,
		near.requestsPerSample(n/world), float64(near.spans)/float64(near.samples), wide.requestsPerSample(n/world),
		float64(wide.spans)/float64(wide.samples))
	if r := near.requestsPerSample(n / world); r < 0.5 || r > 0.8 {
		t.Errorf("%.3f requests a sample", r)
	}
	if r, b := wide.requestsPerSample(n/world), float64(wide.spans)/float64(wide.samples); r > 0.05 || b < 3 ||
		b > world+0.1 {
		t.Errorf("with wide gaps %.3f requests and %.2f times the bytes a sample", r, b)
	}
}

// What is kept of packed files must not leave holes that cut requests in pieces: runs of neighbours are
// kept or not, by a key that they share.
func TestHorizonKeep(t *testing.T) {
	const n, per, shard, run = 128_000, 1000, 64 << 20, 4 << 20
	s, mean := testShards(n, per)
	o := windowed(order.Contiguous(n, per), 1, 0, 16)
	h := NewHorizon(16*shard, mean)
	c := Coalescing{MaxBytes: 8 << 20, MaxGap: 16 << 10, MaxFiles: 4096}
	size := func(f int) int64 { return s.sizes[f] }
	for _, share := range []float64{0.5, 0.75} {
		capacity := int64(share * float64(mean*n))
		apart := NewKeep(n, size, func(f int) uint64 { return uint64(f) }, capacity)
		runs := NewKeep(n, size, func(f int) uint64 { return uint64(f/per)<<32 + uint64(s.offs[f]/run) }, capacity)
		if _, bytes := kept(runs, s.sizes); bytes > capacity || bytes < capacity-2*run {
			t.Errorf("runs take %d bytes of %d", bytes, capacity)
		}
		a, r := fetch(o, s, c, 16*shard, &h, apart), fetch(o, s, c, 16*shard, &h, runs)
		// How even it is: the peak over windows of 1,000 samples.
		flat := func(k *Keep) float64 {
			missed := make([]int64, n)
			for pos := range n {
				if f := o.At(pos); !k.Admit(f) {
					missed[pos] = s.sizes[f]
				}
			}
			return float64(peak(missed, 1000)) / (1000 * float64(mean) * (1 - share))
		}
		t.Logf("%.2f kept: files apart %.3f requests a sample, peak %.2f of what is fair; in runs %.4f, peak %.2f",
			share,
			a.requestsPerSample(n), flat(apart), r.requestsPerSample(n), flat(runs))
		if r.requestsPerSample(n) > 0.03 || r.waited > 0 || a.requestsPerSample(n) < 0.1 {
			t.Errorf("%.2f kept: %.3f requests a sample in runs, %.3f apart, %d waited for",
				share, r.requestsPerSample(n), a.requestsPerSample(n), r.waited)
		}
		if flat(runs) > 2 {
			t.Errorf("%.2f kept in runs: peak %.2f", share, flat(runs))
		}
	}
}

func BenchmarkCoalesce(b *testing.B) {
	s, _ := testShards(100_000, 1000)
	o := Coalescing{MaxBytes: 4 << 20, MaxGap: 16 << 10, MaxFiles: 256}
	files := 0
	i := 0
	for b.Loop() {
		files += len(Coalesce(i%100_000, s, o, func(int) bool { return true }))
		i += 37
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(files), "ns/file")
}

func TestHorizonFront(t *testing.T) {
	h := NewHorizon(100<<10, 1<<10)
	for _, c := range []struct{ frontier, head, want int }{
		{0, 0, 0}, {7, 8, 8}, {10, 34, 34}, // a worker's batch is further on
		{10, 90, 10 + 50}, // one file out of turn
		{20, 5, 20},       // the tracker has skipped what a reader left out
	} {
		if got := h.Front(c.frontier, c.head); got != c.want {
			t.Errorf("Front(%d, %d) = %d, want %d", c.frontier, c.head, got, c.want)
		}
	}
}
