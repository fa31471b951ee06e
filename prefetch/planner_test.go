package prefetch

import (
	"fmt"
	"runtime"
	"slices"
	"testing"

	"github.com/shoalfs/shoal/prefetch/order"
	"pgregory.net/rapid"
)

// files has extents of the given lengths, by sample.
type files [][]int64

func (f files) Extents(sample int) int               { return len(f[sample]) }
func (f files) ExtentBytes(sample, extent int) int64 { return f[sample][extent] }
func nothing(sample, extent int) bool                { return false }
func request(pos, sample, extent int, bytes int64) Request {
	return Request{pos, sample, extent, bytes}
}

func TestPlan(t *testing.T) {
	f := files{{10}, {4, 4, 2}, {}, {7}}
	p := NewPlanner(order.List([]uint32{3, 1, 2, 0, 3}), f)
	for _, c := range []struct {
		pos    int
		budget int64
		max    int
		want   []Request
		next   int
	}{
		{0, 100, 100, []Request{request(0, 3, 0, 7), request(1, 1, 0, 4), request(1, 1, 1, 4), request(1, 1, 2, 2),
			request(3, 0, 0, 10), request(4, 3, 0, 7)}, 5},
		{0, 11, 100, []Request{request(0, 3, 0, 7), request(1, 1, 0, 4)}, 1},
		{0, 100, 4, []Request{request(0, 3, 0, 7), request(1, 1, 0, 4), request(1, 1, 1, 4), request(1, 1, 2, 2)}, 3},
		{0, 6, 100, nil, 0},
		{0, 100, 0, nil, 0},
		{2, 9, 1, nil, 3}, // the empty file needs nothing, the next does not fit
		{5, 100, 100, nil, 5},
	} {
		if reqs, next := p.Plan(c.pos, c.budget, c.max, nothing); !slices.Equal(reqs, c.want) || next != c.next {
			t.Errorf("Plan(%d, %d, %d) = %v, %d, want %v, %d", c.pos, c.budget, c.max, reqs, next, c.want, c.next)
		}
	}
	part := func(sample, extent int) bool { return sample == 3 || sample == 1 && extent == 1 }
	if reqs, next := p.Plan(0, 100, 100, part); next != 5 ||
		!slices.Equal(reqs, []Request{request(1, 1, 0, 4), request(1, 1, 2, 2), request(3, 0, 0, 10)}) {
		t.Errorf("%v, %d", reqs, next)
	}
	if lead := p.Lead(0, 10, part); lead != 1 {
		t.Errorf("lead %d", lead)
	}
	if lead := p.Skipping(func(pos int) bool { return pos == 1 }).Lead(0, 10, part); lead != 3 {
		t.Errorf("lead with a skipped position %d", lead)
	}
	if lead := p.Lead(0, 2, func(int, int) bool { return true }); lead != 2 {
		t.Errorf("limited lead %d", lead)
	}
	if lead := p.Lead(3, 10, func(int, int) bool { return true }); lead != 2 {
		t.Errorf("lead at the end %d", lead)
	}
}

// Planning while reading: no request for what is resident or read, none beyond the budget, and all
// of them together are the whole order once.
func TestPlanModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(1, 40).Draw(t, "n")
		f := make(files, n)
		for i := range f {
			f[i] = rapid.SliceOfN(rapid.Int64Range(1, 10), 0, 3).Draw(t, "extents")
		}
		o := order.Torch(n, rapid.Uint64().Draw(t, "seed"), 0, 1, 0, 0, false)
		tk := NewTracker(o, TrackerOptions{})
		type extent struct{ sample, extent int }
		resident := map[extent]bool{}
		asked := map[Request]int{}
		read := map[int]bool{} // positions read without a request
		p := NewPlanner(o, f).Skipping(tk.Read)
		is := func(s, e int) bool { return resident[extent{s, e}] }
		pos := 0
		for pos < o.Len() {
			if o.Len() > 0 && rapid.IntRange(0, 3).Draw(t, "read") == 0 {
				// The reader is ahead of the planner.
				if e, at := tk.Open(o.At(min(pos+rapid.IntRange(0, 3).Draw(t, "ahead"), o.Len()-1))); e == Consumed {
					read[at] = true
				}
			}
			budget, most := rapid.Int64Range(10, 60).Draw(t, "budget"), rapid.IntRange(1, 8).Draw(t, "max")
			reqs, next := p.Plan(pos, budget, most, is)
			again, next2 := p.Plan(pos, budget, most, is)
			if !slices.Equal(reqs, again) || next != next2 {
				t.Fatal("equal arguments, different plans")
			}
			if len(reqs) > most || next < pos || len(reqs) == 0 && next < o.Len() {
				t.Fatalf("%d requests, at most %d; from %d to %d", len(reqs), most, pos, next)
			}
			for _, r := range reqs {
				if budget -= r.Bytes; budget < 0 {
					t.Fatal("over budget")
				}
				if is(r.Sample, r.Extent) || tk.Read(r.Pos) || o.At(r.Pos) != r.Sample || r.Bytes != f[r.Sample][r.Extent] {
					t.Fatalf("request %+v", r)
				}
				asked[r]++
			}
			for _, r := range reqs {
				resident[extent{r.Sample, r.Extent}] = true
			}
			pos = next
		}
		for pos := range o.Len() {
			for e, bytes := range f[o.At(pos)] {
				r := Request{pos, o.At(pos), e, bytes}
				if times := asked[r]; times > 1 || times == 0 && !read[pos] {
					t.Fatalf("%+v was asked for %d times", r, times)
				}
			}
		}
	})
}

// fixed says that every file is one extent of 100 KB.
type fixed struct{}

func (fixed) Extents(int) int            { return 1 }
func (fixed) ExtentBytes(_, _ int) int64 { return 100_000 }
func onDisk(share uint32) func(s, _ int) bool {
	return func(s, _ int) bool { return uint32(s)*2654435761 < share }
}

// BenchmarkPlanner plans an epoch of 10^8 samples, half of which are kept, in steps of 64 requests. Memory
// is what the process's heap grows by, the reader's Tracker apart (which takes 5 bits a position).
//
//	go test ./prefetch -run - -bench Planner -benchtime 1x
func BenchmarkPlanner(b *testing.B) {
	for _, n := range []int{1e6, 1e8} {
		b.Run(fmt.Sprintf("uniform/n=%.0e", float64(n)), func(b *testing.B) {
			var before, after runtime.MemStats
			runtime.GC()
			runtime.ReadMemStats(&before)
			resident := onDisk(1 << 31)
			var planned, requests int
			for range b.N {
				o := order.Index(order.Uniform(n, 1, 0))
				p := NewPlanner(o, fixed{})
				for pos := 0; pos < n; {
					reqs, next := p.Plan(pos, 1<<30, 64, resident)
					requests += len(reqs)
					planned += next - pos
					pos = next
				}
			}
			runtime.GC()
			runtime.ReadMemStats(&after)
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(planned), "ns/sample")
			b.ReportMetric(float64(int64(after.HeapAlloc)-int64(before.HeapAlloc)), "B-held")
			if share := float64(requests) / float64(planned); share < 0.49 || share > 0.51 {
				b.Errorf("%.3f of the samples were asked for", share)
			}
		})
	}
}
