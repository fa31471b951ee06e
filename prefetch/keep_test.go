package prefetch

import (
	"container/heap"
	"container/list"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/shoalfs/shoal/prefetch/order"
	"pgregory.net/rapid"
)

func TestKeepModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		sizes := rapid.SliceOfN(rapid.Int64Range(0, 1000), 0, 200).Draw(t, "sizes")
		salt := rapid.Uint64().Draw(t, "salt")
		var total int64
		for _, s := range sizes {
			total += s
		}
		keep := func(capacity int64) *Keep {
			return NewKeep(len(sizes), func(f int) int64 {
				return sizes[f]
			}, func(f int) uint64 { return salt + uint64(f) },
				capacity)
		}
		less := rapid.Int64Range(-1, total+10).Draw(t, "capacity")
		more := rapid.Int64Range(less, total+10).Draw(t, "larger capacity")
		a, b := keep(less), keep(more)
		files, bytes := 0, int64(0)
		for f, s := range sizes {
			if a.Admit(f) != Admits(a.Below(), salt+uint64(f)) {
				t.Fatalf("file %d: its key and the threshold %x say otherwise than Admit", f, a.Below())
			}
			if a.Admit(f) {
				files++
				bytes += s
				if !b.Admit(f) {
					t.Fatalf("file %d is kept in %d bytes but not in %d", f, less, more)
				}
			}
		}
		if bytes > max(less, 0) {
			t.Fatalf("%d bytes kept in %d", bytes, less)
		}
		if less >= total && files != len(sizes) {
			t.Fatalf("%d files of %d are kept although all fit", files, len(sizes))
		}
		// The next file in the order of scores did not fit, nor one whose score can hardly be told from its.
		if files < len(sizes) && less-bytes > 2000 {
			t.Fatalf("%d of %d bytes are used", bytes, less)
		}
	})
}

// The admitted set is a promise to what is on disk already.
func TestKeepGolden(t *testing.T) {
	k := NewKeep(30, func(int) int64 { return 10 }, func(f int) uint64 { return uint64(f) }, 105)
	got := ""
	for f := range 30 {
		if k.Admit(f) {
			got += fmt.Sprint(f, " ")
		}
	}
	if want := "3 5 7 10 11 14 16 18 20 21 "; got != want {
		t.Errorf("kept: %s, want %s", got, want)
	}
}

// lognormal sizes with a mean of 100 KB.
func lognormal(n int, sigma float64) []int64 {
	r := rand.New(rand.NewPCG(7, uint64(n)))
	sizes := make([]int64, n)
	for i := range sizes {
		sizes[i] = int64(100e3*math.Exp(sigma*r.NormFloat64()-sigma*sigma/2)) + 1
	}
	return sizes
}

// Of files of any sizes as many are kept as of the bytes.
func TestKeepShare(t *testing.T) {
	const n = 100_000
	sizes := lognormal(n, 1)
	var total int64
	for _, s := range sizes {
		total += s
	}
	files, used := kept(NewKeep(n, func(f int) int64 {
		return sizes[f]
	}, func(f int) uint64 { return uint64(f) }, total/2), sizes)
	if float64(used) < 0.9999*float64(total/2) {
		t.Errorf("%d of %d bytes are used", used, total/2)
	}
	if share := float64(files) / n; share < 0.49 || share > 0.51 {
		t.Errorf("%.3f of the files are kept in half of the bytes", share)
	}
}

// access is a read of a file; next is the time of its next one.
type access struct{ file, next int }

// policy says of each access in turn whether the file is on disk. What is missing is fetched then.
type policy func(a access) bool

func lru(sizes []int64, capacity int64) policy {
	where, recent := make([]*list.Element, len(sizes)), list.New()
	return func(a access) bool {
		if e := where[a.file]; e != nil {
			recent.MoveToFront(e)
			return true
		}
		for capacity -= sizes[a.file]; capacity < 0; {
			f := recent.Remove(recent.Back()).(int)
			where[f] = nil
			capacity += sizes[f]
		}
		where[a.file] = recent.PushFront(a.file)
		return false
	}
}

func firstCome(sizes []int64, capacity int64) policy {
	kept := make([]bool, len(sizes))
	return func(a access) bool {
		if !kept[a.file] && sizes[a.file] <= capacity {
			capacity -= sizes[a.file]
			kept[a.file] = true
			return false
		}
		return kept[a.file]
	}
}

// belady evicts what is needed last, which may be the file itself.
func belady(sizes []int64, capacity int64) policy {
	next := make([]int, len(sizes)) // of what is on disk, else 0
	var last farthest
	return func(a access) bool {
		hit := next[a.file] != 0
		if !hit {
			capacity -= sizes[a.file]
		}
		next[a.file] = a.next
		heap.Push(&last, a)
		for capacity < 0 {
			if v := heap.Pop(&last).(access); next[v.file] == v.next {
				next[v.file] = 0
				capacity += sizes[v.file]
			}
		}
		return hit
	}
}

type farthest []access

func (h farthest) Len() int           { return len(h) }
func (h farthest) Less(i, j int) bool { return h[i].next > h[j].next }
func (h farthest) Swap(i, j int)      { h[i], h[j] = h[j], h[i] }
func (h *farthest) Push(x any)        { *h = append(*h, x.(access)) }
func (h *farthest) Pop() any {
	old := *h
	x := old[len(old)-1]
	*h = old[:len(old)-1]
	return x
}

// traceOf joins epochs to one sequence of accesses.
func traceOf(n, epochs int, o func(epoch int) order.Order) []access {
	var trace []access
	for e := range epochs {
		seq := o(e)
		for pos := range seq.Len() {
			trace = append(trace, access{file: seq.At(pos)})
		}
	}
	next := make([]int, n)
	for i := range next {
		next[i] = math.MaxInt
	}
	for i := len(trace) - 1; i >= 0; i-- {
		trace[i].next = next[trace[i].file]
		next[trace[i].file] = i
	}
	return trace
}

// steady runs the policy over the trace and returns the bytes that each access after the first skip
// fetches.
func steady(trace []access, skip int, sizes []int64, p policy) []int64 {
	missed := make([]int64, 0, len(trace)-skip)
	for i, a := range trace {
		hit := p(a)
		if i < skip {
			continue
		}
		if hit {
			missed = append(missed, 0)
		} else {
			missed = append(missed, sizes[a.file])
		}
	}
	return missed
}

// peak returns the most bytes that any window of so many accesses fetches.
func peak(missed []int64, window int) (most int64) {
	var sum int64
	for i, m := range missed {
		sum += m
		if i >= window {
			sum -= missed[i-window]
		}
		most = max(most, sum)
	}
	return most
}

// utilisation runs an accelerator that takes a sample for each unit of time, while what is missing is
// fetched in the same order at the given bytes a unit, ahead by memory bytes at most.
func utilisation(missed []int64, bandwidth float64, memory int64) float64 {
	ends := make([]float64, len(missed)) // when the accelerator is done with each
	line, end := 0.0, 0.0                // when the line and the accelerator are free
	free, oldest := memory, 0
	for i, bytes := range missed {
		if bytes > 0 {
			for ; free < bytes; oldest++ {
				free += missed[oldest]
				line = max(line, ends[oldest])
			}
			free -= bytes
			line += float64(bytes) / bandwidth
			end = max(end, line)
		}
		end++
		ends[i] = end
	}
	return float64(len(missed)) / end
}

// The table: `go test -run KeepTable -v ./prefetch`. Of each policy, in epochs after the first: what share
// of the bytes is fetched; the most that 500 accesses in a row fetch, in units of their fair share; for
// how many percent of the time an accelerator is busy that is fed over a line of 1.05, and of 1.10, times
// the bytes a second that a share of 1-f needs.
func TestKeepTable(t *testing.T) {
	const (
		n      = 20_000
		ahead  = 1000 // mean files that fit memory: 5% of the dataset
		window = 500  // accesses over which the peak is taken
	)
	orders := []struct {
		name string
		of   func(epoch int) order.Order
	}{
		{"random", func(e int) order.Order { return order.Uniform(n, 1, e) }},
		{"windowed", func(e int) order.Order { return windowed(order.Contiguous(n, 250), 1, e, 16) }},
		{"sequential", func(int) order.Order { return order.Sequential(n) }},
		{"repeated", func(int) order.Order { return order.Uniform(n, 1, 0) }},
	}
	t.Log("σ of sizes, order, f | keep                 | first come           | lru                  | belady")
	for _, sigma := range []float64{0.3, 1} {
		sizes := lognormal(n, sigma)
		var total int64
		for _, s := range sizes {
			total += s
		}
		mean := float64(total) / n
		for _, o := range orders {
			if sigma < 1 && o.name != "random" && o.name != "repeated" {
				continue // as with skewed sizes, only flatter
			}
			trace := traceOf(n, 4, o.of) // the last epoch only says what is needed next
			for _, f := range []float64{0.25, 0.5, 0.75, 0.9} {
				capacity := int64(f * float64(total))
				k := NewKeep(n, func(f int) int64 {
					return sizes[f]
				}, func(f int) uint64 { return uint64(f) }, capacity)
				line := fmt.Sprintf("%.1f  %-10s %.2f", sigma, o.name, f)
				for _, p := range []struct {
					name string
					policy
				}{
					{"keep", func(a access) bool { return k.Admit(a.file) }},
					{"first come", firstCome(sizes, capacity)},
					{"lru", lru(sizes, capacity)},
					{"belady", belady(sizes, capacity)},
				} {
					missed := steady(trace[:3*n], n, sizes, p.policy)
					var sum int64
					for _, m := range missed {
						sum += m
					}
					at := func(slack float64) float64 {
						return utilisation(missed, slack*(1-f)*mean, int64(ahead*mean))
					}
					u105, u110 := at(1.05), at(1.1)
					flat := float64(peak(missed, window)) / (window * mean * (1 - f))
					line += fmt.Sprintf(" | %.3f %5.2f %5.1f %5.1f",
						float64(sum)/float64(2*total), flat, 100*u105, 100*u110)
					switch {
					case p.name == "keep" && (u105 < 0.985 || u110 < 0.99 || flat > 2):
						t.Errorf("σ=%.1f %s f=%.2f: busy %.4f at 1.05, peak %.2f", sigma, o.name, f, u105, flat)
					case p.name != "keep" && p.name != "first come" && u110 > 0.93:
						t.Errorf("σ=%.1f %s f=%.2f, %s: busy %.4f: the comparison is not one",
							sigma, o.name, f, p.name, u110)
					}
				}
				t.Log(line)
			}
		}
	}
}

func BenchmarkNewKeep1M(b *testing.B) {
	sizes := lognormal(1_000_000, 1)
	for b.Loop() {
		NewKeep(len(sizes), func(f int) int64 { return sizes[f] }, func(f int) uint64 { return uint64(f) }, 50e9)
	}
}

// kept counts which files are kept, and their bytes.
func kept(k *Keep, sizes []int64) (files int, bytes int64) {
	for f, size := range sizes {
		if k.Admit(f) {
			files++
			bytes += size
		}
	}
	return files, bytes
}
