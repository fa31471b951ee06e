package engine

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"
)

// What is told is what a list of all GETs of the period would give.
func TestSlowestAgainstAllGets(t *testing.T) {
	seed := time.Now().UnixNano()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(uint64(seed), 1))
	now := time.Unix(1000, 0)
	s := &slowest{now: func() time.Time { return now }}
	longest := map[string]time.Duration{}
	for range 5000 {
		key, took := fmt.Sprintf("k%d", rng.IntN(600)), time.Duration(rng.ExpFloat64()*1e8)
		s.note(key, 1, took, nil)
		longest[key] = max(longest[key], took)
	}
	var want []float64
	for _, d := range longest {
		want = append(want, d.Seconds())
	}
	slices.SortFunc(want, func(a, b float64) int { return -int(math.Copysign(1, a-b)) })
	got := s.snapshot()
	if len(got) != slowestKeys {
		t.Fatalf("%d keys", len(got))
	}
	for i, k := range got {
		if math.Abs(k.Seconds-want[i]) > 1e-9 || longest[k.Key].Seconds() != k.Seconds {
			t.Errorf("%d: %s took %g s, want %g", i, k.Key, k.Seconds, want[i])
		}
	}
}

func TestSlowestForgets(t *testing.T) {
	now := time.Unix(1000, 0)
	s := &slowest{now: func() time.Time { return now }}
	get := func(key string, took time.Duration, err error) { s.note(key, 5, took, err) }
	get("old", time.Hour, nil)
	now = now.Add(slowestFor / 2)
	get("new", time.Second, errors.New("broken"))
	get("old", time.Millisecond, nil)
	if got := s.snapshot(); len(got) != 2 || got[0].Key != "old" || got[0].Seconds != 3600 || got[0].Count != 2 ||
		got[1].Key != "new" || !got[1].Failed {
		t.Errorf("after a while: %+v", got)
	}
	now = now.Add(slowestFor/2 + time.Second)
	if got := s.snapshot(); len(got) != 1 || got[0].Key != "new" {
		t.Errorf("when the first is old: %+v", got)
	}
	now = now.Add(slowestFor)
	if got := s.snapshot(); got == nil || len(got) != 0 {
		t.Errorf("long after: %+v", got)
	}
}

func TestReadersAreCounted(t *testing.T) {
	for _, n := range []int{0, 1, 4, 16, 64, 400} {
		var r readers
		var all sync.WaitGroup
		for i := range n {
			all.Go(func() {
				for range 3 {
					r.opened(uint32(4000 + i*7)) // as the kernel numbers threads
				}
			})
		}
		all.Wait()
		got := r.count()
		if off := math.Abs(float64(got - n)); off > 1 && off > 0.1*float64(n) {
			t.Errorf("%d threads counted as %d", n, got)
		}
	}
}

func TestReaderSeconds(t *testing.T) {
	var r readers
	slot := &r.slots[0]
	for _, c := range []struct {
		thread uint32
		now    int64
		sum    float64
	}{
		{7, 1000, 1}, // who begins has read for a second
		{7, 1000, 1}, // and in it no longer, however much
		{7, 1001, 2},
		{7, 1011, 12}, // a slow read
		{7, 9000, 13}, // a new beginning
		{7, 8999, 13}, // the clock was set back
		{8, 9000, 13}, // another thread, in the same slot
		{8, 9001, 14},
	} {
		if r.openedAt(c.thread, slot, c.now); r.seconds() != c.sum {
			t.Errorf("thread %d at %d: %v s, want %v", c.thread, c.now, r.seconds(), c.sum)
		}
	}
	var two readers
	for now := range int64(100) {
		two.openedAt(7, &two.slots[1], 5000+now)
		two.openedAt(8, &two.slots[2], 5000+now)
	}
	if got := two.seconds(); got != 198 {
		t.Errorf("two threads from 0 to 99 s: %v", got)
	}
}
