package objstore_test

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/lab/rig/memstore"
)

// TestListParallelModel: for any keys, also hostile ones, a parallel listing is the plain one.
func TestListParallelModel(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		m := memstore.New()
		for _, k := range rapid.SliceOfDistinct(rapid.StringMatching(`[ab./-]{1,12}`), rapid.ID).Draw(rt, "keys") {
			m.PutBytes(k, []byte(k))
		}
		prefix := rapid.StringMatching(`[ab./-]{0,3}`).Draw(rt, "prefix")
		workers := rapid.IntRange(1, 6).Draw(rt, "workers")
		last := 0
		got := memstore.Collect(rt, objstore.ListParallel(t.Context(), m, prefix, workers, func(n int) {
			if n <= last {
				rt.Fatalf("progress went from %d to %d", last, n)
			}
			last = n
		}))
		slices.SortFunc(got, func(a, b objstore.Object) int { return strings.Compare(a.Key, b.Key) })
		want := memstore.Collect(rt, m.List(t.Context(), prefix, ""))
		same(rt, got, want)
		if last != len(want) {
			rt.Fatalf("progress ended at %d of %d", last, len(want))
		}
	})
}

func bigTree() *memstore.Mem {
	m := memstore.New()
	for c := range 40 {
		for i := range 50 {
			m.PutBytes(fmt.Sprintf("train/c%02d/%03d.jpg", c, i), nil)
		}
	}
	return m
}

// TestListParallelEnds: whatever ends the loop, no goroutine stays: none may be left in a bubble.
func TestListParallelEnds(t *testing.T) { synctest.Test(t, listParallelEnds) }

func listParallelEnds(t *testing.T) {
	m := bigTree()
	unending := context.WithoutCancel(t.Context())
	for stop := range 20 {
		n := 0
		for _, err := range objstore.ListParallel(unending, m, "", 4, nil) {
			if err != nil {
				t.Fatal(err)
			}
			if n++; n > stop*100 {
				break
			}
		}
	}
	func() {
		defer func() { recover() }()
		for range objstore.ListParallel(unending, m, "", 4, nil) {
			panic("in the loop's body")
		}
	}()
	for _, script := range []string{"list train/c30/ 1 denied", "list train/ 1 denied", "list \"\" 1 denied"} {
		var last error
		for _, err := range objstore.ListParallel(unending, Fault(t, m, script), "", 4, nil) {
			last = err
		}
		if objstore.KindOf(last) != objstore.KindDenied {
			t.Errorf("%s: ended with %v", script, last)
		}
	}
	ctx, cancel := context.WithCancel(unending)
	defer cancel()
	var last error
	for _, err := range objstore.ListParallel(ctx, m, "", 4, nil) {
		cancel()
		last = err
	}
	if !errors.Is(last, context.Canceled) {
		t.Errorf("canceled: ended with %v", last)
	}
}

// busiest counts how many listings run at once; each takes a millisecond.
type busiest struct {
	*memstore.Mem
	now, most atomic.Int64
}

func (b *busiest) List(ctx context.Context, prefix, after string) iter.Seq2[objstore.Object, error] {
	return func(yield func(objstore.Object, error) bool) {
		n := b.now.Add(1)
		defer b.now.Add(-1)
		for {
			m := b.most.Load()
			if n <= m || b.most.CompareAndSwap(m, n) {
				break
			}
		}
		time.Sleep(time.Millisecond)
		b.Mem.List(ctx, prefix, after)(yield)
	}
}

func TestListParallelWorkers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &busiest{Mem: bigTree()}
		if n := len(memstore.Collect(t, objstore.ListParallel(t.Context(), b, "", 8, nil))); n != 2000 {
			t.Errorf("%d objects", n)
		}
		if most := b.most.Load(); most != 8 {
			t.Errorf("%d listings at once with 8 workers", most)
		}
	})
}

func BenchmarkListParallel(b *testing.B) {
	m := bigTree()
	b.ReportAllocs()
	for b.Loop() {
		n := 0
		for range objstore.ListParallel(b.Context(), m, "", 8, nil) {
			n++
		}
		if n != 2000 {
			b.Fatal(n)
		}
	}
}
