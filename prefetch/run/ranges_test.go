package run

import (
	"context"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/synctest"

	"pgregory.net/rapid"

	"github.com/shoalfs/shoal/cache"
	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/lab/rig/memstore"
	"github.com/shoalfs/shoal/prefetch"
	"github.com/shoalfs/shoal/prefetch/order"
)

// Numbers mean the ranges that they were given for as long as a live order has them, equal ranges have one number, and
// numbers of orders that have ended are used again.
func TestRenumber(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		one := rapid.Custom(func(t *rapid.T) Range {
			return Range{rapid.IntRange(0, 2).Draw(t, "file"), rapid.Int64Range(0, 30).Draw(t, "off"),
				rapid.Int64Range(1, 9).Draw(t, "n")}
		})
		table := &rangeTable{}
		type plan struct {
			list []Range
			o    order.Locator
		}
		var live []plan
		for range rapid.IntRange(1, 8).Draw(t, "plans") {
			list := rapid.SliceOfN(one, 1, 20).Draw(t, "list")
			if len(live) > 2 {
				live = live[1:]
			}
			var orders []order.Locator
			for _, p := range live {
				orders = append(orders, p.o)
			}
			next, numbers := table.renumber(list, orders)
			table = next
			live = append(live, plan{list, order.Index(order.List(numbers))})
			named := map[Range]bool{}
			for _, p := range live {
				for pos, r := range p.list {
					if named[r] = true; table.all[p.o.At(pos)] != r {
						t.Fatalf("%v has become %v", r, table.all[p.o.At(pos)])
					}
				}
			}
			if n := len(table.all); n > 20*4 {
				t.Fatalf("%d numbers for %d ranges", n, len(named))
			}
			file, off, n := rapid.IntRange(0, 2).Draw(t, "at file"), rapid.Int64Range(0, 40).Draw(t, "from"),
				rapid.Int64Range(1, 9).Draw(t, "bytes")
			var want []Range
			for r := range named {
				if r.File == file && r.Off < off+n && r.Off+r.N > off {
					want = append(want, r)
				}
			}
			got := 0
			for n := range table.touching(file, off, off+n) {
				if got++; !slices.Contains(want, table.all[n]) {
					t.Fatalf("%v is not touched", table.all[n])
				}
			}
			if got != len(want) {
				t.Fatalf("%d ranges touched, not %d", got, len(want))
			}
		}
	})
}

// rangesOf begins a stream over ranges of one large file, and returns how to read in it.
func rangesOf(t *testing.T, size int, list []Range,
	do func(v *cache.Volume, r *Runner, s *Stream, read func(off, n int64))) {
	t.Helper()
	rangesIn(t, 16<<20, size, list, do)
}

// rangesIn is rangesOf with so much memory.
func rangesIn(t *testing.T, memory int64, size int, list []Range,
	do func(v *cache.Volume, r *Runner, s *Stream, read func(off, n int64))) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		mem := memstore.New()
		mem.PutBytes("c/tokens.bin", make([]byte, size))
		m, err := catalog.Build(mem.List(t.Context(), "", ""), catalog.BuildOptions{})
		if err != nil {
			t.Fatal(err)
		}
		c := cache.New(cache.Options{Memory: memory})
		v := c.NewVolume(cache.VolumeOptions{Manifest: m, Store: mem})
		r := New(c)
		ranges, numbers := NewRanges(v, list)
		s, err := r.BeginPlan(Options{
			Name: "plans/default", Volume: v, Ranges: ranges, Gate: &prefetch.Gate{}, Places: func() int { return 4 },
			Ease: func() int { return 4 }, Keep: nothing{},
		}, order.Index(order.List(numbers)))
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		go r.Run(ctx)
		defer s.Close()
		defer cancel()
		do(v, r, s, func(off, n int64) {
			p := make([]byte, n)
			if _, err := v.ReadAt(t.Context(), 0, p, off); err != nil {
				t.Fatal(err)
			}
			r.Read(v, 0, off, n, 1, func() []*Stream { return []*Stream{s} })
		})
		cancel()
		synctest.Wait()
		s.Close()
		if n := s.account.Held(); n != 0 {
			t.Errorf("%d bytes are still on the stream's account", n)
		}
		if r.x.Ready() {
			t.Error("the runner has still to do with ranges of a volume that may be closed now")
		}
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
}

func randomRanges(size, each, n int) (list []Range) {
	rng := rand.New(rand.NewPCG(4, 2))
	for _, i := range rng.Perm(size / each)[:n] {
		list = append(list, Range{0, int64(i * each), int64(each)})
	}
	return list
}

// What a plan's reader reads is in memory before, and leaves it after. What a waiting reader has displaced comes back.
func TestRangesComeAhead(t *testing.T) {
	const size, other = 64 << 20, 14 << 20
	list := randomRanges(size, 8<<10, 500)
	rangesOf(t, size, list, func(v *cache.Volume, r *Runner, s *Stream, read func(off, n int64)) {
		for i, one := range list {
			synctest.Wait()
			if i == 250 {
				for !r.cache.TryReserve(other) { // the runner may have what was freed for that
					synctest.Wait()
				}
				synctest.Wait()
				r.cache.Ledger().Release(other, cache.ForDemand)
				synctest.Wait()
			}
			if lead := s.Progress().Lead; i+8 < len(list) && lead < 8 {
				t.Fatalf("%d ranges are ready at position %d", lead, i)
			}
			read(one.Off, one.N/2) // in two reads
			read(one.Off+one.N/2, one.N/2)
		}
		p, n := s.Progress(), v.Stats()
		if p.Consumed != len(list) || p.Events.Ahead+p.Events.Jumps > 0 || n.Misses+n.Joined > 0 {
			t.Errorf("%+v, %d reads waited", p, n.Misses+n.Joined)
		}
	})
}

// A stream may end while a range is read again of which nothing is staged any more. Its volume can be closed then.
func TestRangesEndInMidRange(t *testing.T) {
	const size = 1 << 20
	list := randomRanges(size, 8<<10, 20)
	rangesOf(t, size, list[19:], func(_ *cache.Volume, _ *Runner, s *Stream, read func(off, n int64)) {
		read(list[19].Off, list[19].N)
		s.Retell(order.Index(order.List(s.Renumber(list))))
		for _, one := range list {
			synctest.Wait()
			read(one.Off, one.N)
		}
		read(list[10].Off, 100)
		synctest.Wait()
		if staged, open := len(s.Ranges.staged), len(s.Ranges.open); staged != 0 || open != 1 {
			t.Errorf("%d ranges are staged, %d open", staged, open)
		}
	})
}

// Page faults of a memory map read what lies around a range. That is fetched with it, from when it was seen.
func TestReadsAroundRanges(t *testing.T) {
	const size, around = 64 << 20, 64 << 10
	list := randomRanges(size, 8<<10, 500)
	rangesOf(t, size, list, func(v *cache.Volume, _ *Runner, s *Stream, read func(off, n int64)) {
		waited, kernelHas := int64(0), map[int64]bool{} // ranges
		for i, one := range list {
			synctest.Wait()
			from, end := max(one.Off-around, 0), min(one.Off+around, size)
			if !kernelHas[one.Off] {
				read(from, end-from)
			}
			for ; from < end; from += one.N {
				kernelHas[from] = true
			}
			if n := v.Stats(); i < 100 {
				waited = n.Misses
			} else if n.Misses > waited {
				t.Fatalf("a read waits at position %d: %+v, %v", i, s.Progress(), s.walk.State())
			}
		}
		if p := s.Progress(); p.Position < len(list)*9/10 || p.Consumed+len(s.Ranges.known) < len(list)*9/10 ||
			p.Held > 4<<20 {
			t.Errorf("%+v, the kernel has %d", p, len(s.Ranges.known))
		}
	})
}

// A read far from what is due, alone, is the kernel's, which reads on; several are a reader that goes on elsewhere.
func TestReadFarAhead(t *testing.T) {
	const size = 64 << 20
	list := randomRanges(size, 8<<10, 8000)
	rangesOf(t, size, list, func(_ *cache.Volume, _ *Runner, s *Stream, read func(off, n int64)) {
		for i, one := range list[:1000] {
			synctest.Wait()
			read(one.Off, one.N)
			if i%100 == 50 {
				far := list[5000+3*i]
				read(far.Off, far.N)
			}
		}
		if p := s.Progress(); p.Position != 1000 || p.Consumed != 1000 {
			t.Errorf("%+v", p)
		}
		for _, one := range list[6000:6100] {
			synctest.Wait()
			read(one.Off, one.N)
		}
		if p := s.Progress(); p.Position != 6100 {
			t.Errorf("%+v", p)
		}
	})
}

// A reader that goes through neighbours by large reads, as the kernel's, is followed, too.
func TestReadsOfManyRanges(t *testing.T) {
	const size, each = 64 << 20, 8 << 10
	var list []Range
	for off := 0; off < size; off += each {
		list = append(list, Range{0, int64(off), each})
	}
	rangesOf(t, size, list, func(_ *cache.Volume, _ *Runner, s *Stream, read func(off, n int64)) {
		for off := int64(0); off < size; off += 512 << 10 {
			synctest.Wait()
			read(off, 512<<10)
		}
		if p := s.Progress(); p.Consumed != len(list) || p.Events.Jumps > 0 {
			t.Errorf("%+v", p)
		}
	})
}

// A hundred readers go on in a range each, in turn: no read of a range that was begun is one that comes again.
func TestManyOpenRanges(t *testing.T) {
	const ranges, each, at, piece = 300, 256 << 10, 100, 32 << 10
	var list []Range
	for i := range ranges {
		list = append(list, Range{0, int64(i) * each, each})
	}
	rangesIn(t, 512<<20, ranges*each, list, func(_ *cache.Volume, _ *Runner, s *Stream, read func(off, n int64)) {
		for from := 0; from < ranges; from += at {
			for off := int64(0); off < each; off += piece {
				for i := range at {
					synctest.Wait()
					read(int64(from+i)*each+off, piece)
				}
			}
		}
		if p := s.Progress(); p.Consumed != ranges || p.Events.Repeats+p.Events.Jumps+p.Events.Restarts > 0 {
			t.Errorf("%+v", p)
		}
	})
}

// Who leaves when a plan ends leaves nothing behind.
func TestReadBesideTheEnd(t *testing.T) {
	list := []Range{{0, 0, 1 << 20}, {0, 1 << 20, 1 << 20}}
	rangesOf(t, 2<<20, list, func(v *cache.Volume, r *Runner, s *Stream, _ func(off, n int64)) {
		synctest.Wait()
		r.Read(v, 0, 0, 4096, 1, func() []*Stream { s.Close(); return []*Stream{s} })
		if len(s.Ranges.open) > 0 {
			t.Errorf("%v stay open", s.Ranges.open)
		}
	})
}

// Who goes through a range that is larger than the memory leaves room for what comes next.
func TestRangesLargerThanMemory(t *testing.T) {
	const size, each = 96 << 20, 32 << 20
	list := []Range{{0, 1000, each}, {0, each + 1000, each}, {0, 2*each + 1000, 8 << 20}}
	rangesOf(t, size, list, func(v *cache.Volume, _ *Runner, s *Stream, read func(off, n int64)) {
		for _, one := range list {
			for off := one.Off; off < one.Off+one.N; off += 128 << 10 {
				synctest.Wait()
				read(off, min(128<<10, one.Off+one.N-off))
			}
		}
		p, n := s.Progress(), v.Stats()
		if p.Consumed != len(list) || n.Misses > 100 { // of 576 reads; 21 to 54 in 100 runs, by how the goroutines fall
			t.Errorf("%+v, %d reads waited", p, n.Misses)
		}
	})
}

// Readers that do not follow a plan are found out by their first reads. Those that do are not, with any workers, from
// any position, and when the kernel has half of what comes, or reads around what is asked for.
func TestDepartFromRanges(t *testing.T) {
	const size, each = 64 << 20, 2 << 10
	list := randomRanges(size, each, 8000)
	other := slices.Clone(list)
	rand.New(rand.NewPCG(1, 1)).Shuffle(len(other), func(i, j int) { other[i], other[j] = other[j], other[i] })
	for _, c := range []struct {
		workers, batch, from int
		around               int64
		hidden               bool
	}{{1, 1, 0, 0, false}, {4, 1, 0, 0, false}, {4, 32, 700, 0, false}, {8, 8, 0, 8 << 10, false},
		{2, 16, 1000, 0, true}, {8, 1, 300, 0, true}} {
		for _, follows := range []bool{false, true} {
			rangesOf(t, size, list, func(v *cache.Volume, r *Runner, s *Stream, _ func(off, n int64)) {
				departed := make(chan int, 1)
				s.Departs = func(_ *Stream, _, of int) { departed <- of }
				read := other
				if follows {
					read = list
				}
				reads := 0
				for i, one := range read[c.from:] {
					if c.hidden && one.Off/each%2 == 0 {
						continue
					}
					from := max(one.Off-c.around, 0)
					reads++
					r.Read(v, 0, from, min(one.Off+one.N+c.around, size)-from, uint32(1+i/c.batch%c.workers),
						func() []*Stream { return []*Stream{s} })
					synctest.Wait()
					if len(departed) > 0 || reads == 2000 {
						break
					}
				}
				if gone := len(departed) > 0; gone == follows || gone && reads > 64 {
					t.Errorf("%+v: follows %t, departed %t, %d reads", c, follows, gone, reads)
				}
				if gone := s.Departed(); gone == follows {
					t.Errorf("%+v: follows %t, departed %t", c, follows, gone)
				}
			})
		}
	}
}

// The next plan waits for its reader, has the head of what it needs, and is followed. Plans may share ranges. Reads
// that the kernel makes of its own accord move nothing, and show nothing of a plan that waits.
func TestPlansOfRangesInTurn(t *testing.T) {
	const size = 64 << 20
	all := randomRanges(size, 8<<10, 1500)
	rangesOf(t, size, all[:500], func(v *cache.Volume, _ *Runner, s *Stream, read func(off, n int64)) {
		s.Departs = func(*Stream, int, int) { t.Error("a plan is withdrawn") }
		list, kernelHas, strays, draw := all[:500], map[Range]bool{}, int64(0), rand.New(rand.NewPCG(1, 7))
		for k := 1; k < 4; k++ {
			next := slices.Clone(all[k*250 : k*250+500]) // half of which the last one had
			rand.New(rand.NewPCG(1, uint64(k))).Shuffle(len(next), func(i, j int) {
				next[i], next[j] = next[j], next[i]
			})
			for i, one := range list {
				if synctest.Wait(); i == 50 && !s.Retell(order.Index(order.List(s.Renumber(next)))) {
					t.Fatal("the next plan does not wait")
				}
				if !kernelHas[one] {
					read(one.Off, one.N)
				}
				if i%8 == 2 {
					before, stray := v.Stats().Misses, next[draw.IntN(500)]
					read(stray.Off, stray.N)
					kernelHas[stray] = true
					strays += v.Stats().Misses - before
				}
			}
			list = next
		}
		for _, one := range list[:250] {
			synctest.Wait()
			read(one.Off, one.N)
		}
		p := s.Progress()
		if n := v.Stats(); p.Epoch != 3 || p.Consumed < 200 || n.Misses-strays > 30 || p.Events.Restarts > 0 {
			t.Errorf("%+v, %d reads waited", p, n.Misses-strays)
		}
	})
}

// A range that was not read to its end counts when the next plan reads it, and so does one that a later plan gives its
// number.
func TestRangesLeftOpen(t *testing.T) {
	const size = 4 << 20
	all := randomRanges(size, 8<<10, 60)
	for _, waits := range []bool{false, true} {
		rangesOf(t, size, all[:20], func(_ *cache.Volume, _ *Runner, s *Stream, read func(off, n int64)) {
			plans := [][]Range{all[:20], append(slices.Clone(all[30:40]), all[:20]...), all[40:]}
			for k, plan := range plans {
				for i, one := range plan {
					if synctest.Wait(); waits && i == 10 && k < 2 {
						s.Retell(order.Index(order.List(s.Renumber(plans[k+1]))))
					}
					read(one.Off, one.N/2) // the kernel has the rest
				}
				if p := s.Progress(); p.Consumed != len(plan) {
					t.Fatalf("plan %d: %+v", k, p)
				}
				if !waits && k < 2 {
					s.Retell(order.Index(order.List(s.Renumber(plans[k+1]))))
				}
			}
		})
	}
}
