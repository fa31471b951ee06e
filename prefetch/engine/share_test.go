package engine

import (
	"context"
	"fmt"
	"math"
	"testing"

	"github.com/shoalfs/shoal/cache"
	"github.com/shoalfs/shoal/prefetch/order"
	"github.com/shoalfs/shoal/prefetch/run"
)

// trainer is a reader of a feed.
type trainer struct {
	*run.Stream
	t     *testing.T
	seq   order.Order
	files order.Order // the same by file
	at    int
}

// begin starts a trainer at a position of an order of the given seed.
func begin(t *testing.T, e *Engine, seed uint64, start, weight int) *trainer {
	t.Helper()
	d := e.Dataset()
	r := &trainer{t: t, seq: order.Uniform(d.Len(), seed, 0), at: start}
	r.files = filesOf(r.seq, d.v.samples)
	s, err := d.Begin(fmt.Sprintf("seed%d/from%d/weight%d", seed, start, weight), r.seq, start, weight)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.End(s) })
	r.Stream = s
	return r
}

// next reads the next sample, and whether or not it lies in memory. It returns false at the end.
func (r *trainer) next() bool {
	if r.at == r.seq.Len() {
		return false
	}
	data, release, err := r.Read(context.Background(), r.at)
	if err != nil || len(data) != 1<<20 {
		r.t.Errorf("%s at %d: %d bytes, %v", r.Name, r.at, len(data), err)
		return false
	}
	release()
	r.at++
	return true
}

// staged waits until the next sample has been fetched ahead: the reader is slower than the store.
func (r *trainer) staged() bool {
	if r.at < r.seq.Len() {
		file := r.files.At(r.at)
		waitFor(r.t, fmt.Sprintf("%s has position %d", r.Name, r.at), func() bool {
			return r.Volume.Where(file, 0) > cache.OnWay
		})
	}
	return r.next()
}

// fetched returns how many files of 1 MiB were fetched.
func fetched(e *Engine) int { return int(e.meter.Stats().Bytes >> 20) }

// Four trainers in one order that began together, none of which waits for what it reads to be fetched: what
// one fetches is fetched for all.
func TestShareTogether(t *testing.T) {
	e, _, _ := openSmall(t, "none", 160)
	var all []*trainer
	for range 4 {
		all = append(all, begin(t, e, 1, 0, 1))
	}
	for going := true; going; {
		going = false
		for i := range all {
			for range 3 { // as a batch
				going = all[i].next() || going
			}
		}
	}
	if n := fetched(e); n > 176 {
		t.Errorf("%d files were fetched of 160", n)
	}
}

// Four trainers in one order that follow each other at a distance, in memory for 42: 24 from the first to
// the last. All have planned before the first one reads: whether a
// machine lets one of them run and not the others is not asked here.
func TestShareStaggered(t *testing.T) {
	e, _, _ := openSmall(t, "none", 160)
	var all []*trainer
	for range 4 {
		all = append(all, begin(t, e, 1, 0, 1))
	}
	for _, r := range all {
		waitFor(t, "it has planned", func() bool { return r.Progress().Planned > 35 })
	}
	for i, r := range all {
		for range 8 * i {
			r.staged()
		}
	}
	for going := true; going; {
		going = false
		for _, r := range all {
			going = r.staged() || going
		}
	}
	if n := fetched(e); n > 192 {
		t.Errorf("%d files were fetched of 160", n)
	}
}

// Trainers that begin when the one before them has read 8: what was read by then is fetched anew, for all
// that come later together.
func TestShareLateStarts(t *testing.T) {
	e, _, _ := openSmall(t, "none", 160)
	var all []*trainer
	for round := 0; ; round++ {
		if round%8 == 0 && len(all) < 4 {
			all = append(all, begin(t, e, 1, 0, 1))
		}
		going := false
		for _, r := range all {
			going = r.staged() || going
		}
		if !going {
			break
		}
	}
	if n := fetched(e); n > 288 {
		t.Errorf("%d files were fetched of 160", n)
	}
}

// Trainers at different speeds: the slowest falls behind by 24 of 160 in the end, which memory holds, or by
// 120, which it does not; then the worst case is that each fetches for itself, and loses one file to another for every
// four that the other opens (some 500 in all mostly, and 688 once in 34 runs on cores that others had).
func TestShareSpeeds(t *testing.T) {
	for _, c := range []struct {
		speeds []int // of 20 rounds
		most   int
	}{
		{[]int{20, 19, 18, 17}, 224},
		{[]int{20, 15, 10, 5}, 800},
	} {
		t.Run(fmt.Sprint(c.speeds), func(t *testing.T) {
			e, _, _ := openSmall(t, "none", 160)
			var all []*trainer
			for range c.speeds {
				all = append(all, begin(t, e, 1, 0, 1))
			}
			for round, going := 0, true; going; round++ {
				going = false
				for i, r := range all {
					if (round+1)*c.speeds[i]/20 > round*c.speeds[i]/20 {
						r.staged()
					}
					going = going || r.at < r.seq.Len()
				}
			}
			if n := fetched(e); n > c.most {
				t.Errorf("%d files were fetched of 160", n)
			}
		})
	}
}

// Trainers in orders of their own take what they find: M/N of it, 42 of 160 here.
func TestShareOtherSeeds(t *testing.T) {
	e, _, _ := openSmall(t, "none", 160)
	var all []*trainer
	for i := range 4 {
		all = append(all, begin(t, e, uint64(i), 0, 1))
	}
	for going := true; going; {
		going = false
		for _, r := range all {
			going = r.staged() || going
		}
	}
	if n := fetched(e); n > 600 {
		t.Errorf("%d files were fetched for 4 readers of 160", n)
	}
}

// A reader of weight 1 goes on beside one of weight 100, and one of weight 100 beside a reader that has
// stopped, whose stream has filled all memory before: neither keeps more than its share.
func TestWeightsShareMemory(t *testing.T) {
	for _, c := range []struct{ slow, fast int }{{1, 1}, {1, 100}, {100, 1}} {
		t.Run(fmt.Sprintf("%d beside %d", c.slow, c.fast), func(t *testing.T) {
			e, _, _ := openSmall(t, "none", 160)
			slow := begin(t, e, 1, 0, c.slow)
			waitFor(t, "it has all memory", func() bool { p := slow.Progress(); return p.Lead > 35 && p.InFlight == 0 })
			fast := begin(t, e, 2, 0, c.fast)
			// What the fast one was due, within the quarter that is not worth a fetch and some files.
			limit := 42*(float64(c.slow)*1.25/float64(c.slow+c.fast)+0.25) + 1
			held := func() float64 { return float64(slow.Progress().Held >> 20) }
			// Though the slow one reads nothing. By its own reading the fast one shows that it lacks memory: where
			// the machine lets it lack none for a while, it takes some reads more.
			for read := 0; read < 80 || read < 150 && held() > limit; read++ {
				fast.staged()
			}
			p, q := slow.Progress(), fast.Progress()
			if share := float64(c.slow) / float64(c.slow+c.fast); math.Abs(p.Share-share) > 1e-9 ||
				math.Abs(p.Share+q.Share-1) > 1e-9 || p.Weight != c.slow {
				t.Errorf("shares %v and %v", p.Share, q.Share)
			}
			if held() > limit {
				t.Errorf("the slow reader's stream holds %v files, and may %v", held(), limit)
			}
			for fast.staged() {
			}
			for slow.staged() {
			}
		})
	}
}
