package accelerator

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
	"pgregory.net/rapid"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const ms = time.Millisecond

// slow is a reader whose reads take as long as took says; it notes what was read and when.
type slow struct {
	took  func(pos int) time.Duration
	size  int64
	begin time.Time

	mu    sync.Mutex
	reads map[int]time.Duration // position -> when the read began
}

func newSlow(took func(pos int) time.Duration) *slow {
	return &slow{took: took, size: 10, begin: time.Now(), reads: map[int]time.Duration{}}
}

func (s *slow) Read(ctx context.Context, pos int) (int64, error) {
	s.mu.Lock()
	if _, again := s.reads[pos]; again {
		s.mu.Unlock()
		return 0, fmt.Errorf("position %d is read again", pos)
	}
	s.reads[pos] = time.Since(s.begin)
	s.mu.Unlock()
	select {
	case <-time.After(s.took(pos)):
		return s.size, nil
	case <-ctx.Done():
		return 0, ctx.Err()
	}
}

func every(d time.Duration) func(int) time.Duration { return func(int) time.Duration { return d } }

// Time is virtual here, so all figures are exact.
func TestRun(t *testing.T) {
	for _, c := range []struct {
		name      string
		job       Job
		positions int
		took      func(int) time.Duration
		first     time.Duration
		run       time.Duration
		stalled   int64 // steps
		longest   time.Duration
	}{
		{
			name: "a loader that keeps up", job: Job{1, 4, 100 * ms, 2, 2},
			positions: 40, took: every(10 * ms), first: 40 * ms, run: 1000 * ms,
		},
		{
			// One worker needs 200 ms a batch, so every step but the first waits for 100 ms.
			name: "half as fast as it should be", job: Job{1, 4, 100 * ms, 1, 1},
			positions: 40, took: every(50 * ms), first: 200 * ms, run: 1000*ms + 9*100*ms, stalled: 9,
			longest: 100 * ms,
		},
		{
			name: "workers read batches side by side", job: Job{1, 4, 100 * ms, 2, 2},
			positions: 40, took: every(50 * ms), first: 200 * ms, run: 1000 * ms,
		},
		{
			// Nothing is ready or under way beside the batch that is computed but one, whatever the workers.
			name: "workers without batches to read", job: Job{1, 4, 100 * ms, 8, 1},
			positions: 40, took: every(50 * ms), first: 200 * ms, run: 1900 * ms, stalled: 9, longest: 100 * ms,
		},
		{
			// The second accelerator's samples, at odd positions, take 40 ms: 160 ms a batch.
			name: "all wait for the slowest", job: Job{2, 4, 100 * ms, 1, 1},
			positions: 80, took: func(pos int) time.Duration { return time.Duration(10+30*(pos%2)) * ms },
			first: 160 * ms, run: 1000*ms + 9*60*ms, stalled: 9, longest: 60 * ms,
		},
		{
			// Batch 5 takes 350 ms, is asked for at 300 ms of compute, at the start of step 3, and is due at 500.
			name: "one late sample", job: Job{1, 4, 100 * ms, 2, 2},
			positions: 40, took: func(pos int) time.Duration {
				if pos == 20 {
					return 320 * ms
				}
				return 10 * ms
			}, first: 40 * ms, run: 1150 * ms, stalled: 1, longest: 150 * ms,
		},
		{
			name: "an incomplete step at the end", job: Job{2, 4, 100 * ms, 1, 2},
			positions: 31, took: every(10 * ms), first: 40 * ms, run: 300 * ms,
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newSlow(c.took)
				last := 0
				e, err := c.job.Run(t.Context(), c.positions, r, func(done, steps int) {
					if done != last+1 || steps != c.job.Steps(c.positions) {
						t.Errorf("progress %d of %d after %d", done, steps, last)
					}
					last = done
				})
				if err != nil {
					t.Fatal(err)
				}
				steps := c.job.Steps(c.positions)
				compute := time.Duration(steps) * c.job.Step
				if e.FirstBatch != c.first.Seconds() || e.Seconds != c.run.Seconds() || e.Compute != compute.Seconds() {
					t.Errorf("first batch %v, run %v, compute %v, want %v, %v, %v",
						e.FirstBatch, e.Seconds, e.Compute, c.first, c.run, compute)
				}
				if want := compute.Seconds() / c.run.Seconds(); e.Utilisation != want ||
					e.Stall != e.Seconds-e.Compute {
					t.Errorf("utilisation %v, stall %v, want %v", e.Utilisation, e.Stall, want)
				}
				var stalled int64
				longest := 0.0
				for _, s := range e.Steps {
					if s.Stall > 0 {
						stalled++
					}
					longest = max(longest, s.Stall)
				}
				if stalled != c.stalled || longest != c.longest.Seconds() {
					t.Errorf("stalls: %d, longest %v s, want %d, %v", stalled, longest, c.stalled, c.longest)
				}
				samples := steps * c.job.Batch * c.job.Accelerators
				if e.Samples != samples || e.Bytes != int64(samples)*r.size || len(r.reads) != samples ||
					len(e.Steps) != steps || last != steps {
					t.Errorf("%d samples, %d bytes, %d reads, %d steps, %d told",
						e.Samples, e.Bytes, len(r.reads), len(e.Steps), last)
				}
				if e.Oversleep != 0 {
					t.Errorf("overslept %v in virtual time", e.Oversleep)
				}
			})
		})
	}
}

// No batch is begun before the one that makes room for it was taken.
func TestLoaderKeepsNoMoreReady(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		j := Job{Accelerators: 1, Batch: 1, Step: 100 * ms, Workers: 8, Prefetch: 3}
		r := newSlow(every(ms))
		if _, err := j.Run(t.Context(), 10, r, nil); err != nil {
			t.Fatal(err)
		}
		for pos, at := range r.reads {
			want := time.Duration(0)
			if pos >= j.Prefetch { // step k begins at 1 ms + k · 100 ms
				want = ms + time.Duration(pos-j.Prefetch)*100*ms
			}
			if at != want {
				t.Errorf("position %d is read at %v, want %v", pos, at, want)
			}
		}
	})
}

// The run obeys the recurrence by which it is defined, whatever the reads take.
func TestRunModel(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		j := Job{
			Accelerators: rapid.IntRange(1, 3).Draw(rt, "accelerators"), Batch: rapid.IntRange(1, 4).Draw(rt, "batch"),
			Step: time.Duration(rapid.IntRange(1, 40).Draw(rt, "step")) * ms, Workers: 1,
			Prefetch: rapid.IntRange(1, 4).Draw(rt, "prefetch"),
		}
		steps := rapid.IntRange(1, 12).Draw(rt, "steps")
		n := steps * j.Batch * j.Accelerators
		took := rapid.SliceOfN(rapid.IntRange(0, 30), n, n).Draw(rt, "took")
		// One worker an accelerator reads its batches in order, each when it was asked for and the one
		// before has come.
		start := make([]int, steps) // ms
		ready := make([][]int, j.Accelerators)
		end := 0
		for k := range steps {
			start[k] = end
			for a := range j.Accelerators {
				at := 0
				if k > 0 {
					at = ready[a][k-1]
				}
				if k >= j.Prefetch {
					at = max(at, start[k-j.Prefetch])
				}
				for i := range j.Batch {
					at += took[(k*j.Batch+i)*j.Accelerators+a]
				}
				ready[a] = append(ready[a], at)
				start[k] = max(start[k], at)
			}
			end = start[k] + int(j.Step/ms)
		}
		synctest.Test(t, func(t *testing.T) {
			e, err := j.Run(t.Context(), n, newSlow(func(pos int) time.Duration {
				return time.Duration(took[pos]) * ms
			}), nil)
			if err != nil {
				rt.Fatal(err)
			}
			if got, want := e.Seconds, (time.Duration(end-start[0]) * ms).Seconds(); got != want {
				rt.Fatalf("%v s, want %v", got, want)
			}
			for k, s := range e.Steps {
				if want := (time.Duration(start[k]-start[0]) * ms).Seconds(); s.Start != want {
					rt.Fatalf("step %d begins at %v, want %v", k, s.Start, want)
				}
			}
		})
	})
}

type failing struct {
	Reader
	at  int
	err error
}

func (f failing) Read(ctx context.Context, pos int) (int64, error) {
	if pos == f.at {
		return 0, f.err
	}
	return f.Reader.Read(ctx, pos)
}

func TestRunEnds(t *testing.T) {
	j := Job{Accelerators: 2, Batch: 2, Step: 100 * ms, Workers: 3, Prefetch: 4}
	broken := errors.New("broken")
	t.Run("by an error", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			_, err := j.Run(t.Context(), 400, failing{newSlow(every(ms)), 77, broken}, nil)
			if !errors.Is(err, broken) || !strings.Contains(err.Error(), "position 77") {
				t.Errorf("%v", err)
			}
		})
	})
	t.Run("by its context", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			why := errors.New("enough")
			ctx, cancel := context.WithCancelCause(t.Context())
			begin := time.Now()
			time.AfterFunc(250*ms, func() { cancel(why) })
			_, err := j.Run(ctx, 4000, newSlow(every(time.Hour)), nil)
			if !errors.Is(err, why) || time.Since(begin) != 250*ms {
				t.Errorf("%v after %v", err, time.Since(begin))
			}
		})
	})
	t.Run("at once", func(t *testing.T) {
		for _, bad := range []Job{{}, {1, 1, 0, 1, 1}, {1, 1, ms, 0, 1}, {1, 1, ms, 1, 0}, {0, 1, ms, 1, 1},
			{1, 0, ms, 1, 1}} {
			if _, err := bad.Run(t.Context(), 10, newSlow(every(ms)), nil); err == nil {
				t.Errorf("%+v ran", bad)
			}
		}
		if _, err := j.Run(t.Context(), 3, newSlow(every(ms)), nil); err == nil {
			t.Error("a run of no step")
		}
	})
}

func TestFiles(t *testing.T) {
	dir := t.TempDir()
	for name, size := range map[string]int{"a": 1, "b": 3 << 20, "empty": 0} {
		if err := os.WriteFile(filepath.Join(dir, name), make([]byte, size), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	f := &Files{Dir: dir, Paths: []string{"a", "b", "empty", "none"}}
	for pos, want := range []int64{1, 3 << 20, -1, -1} {
		if n, err := f.Read(t.Context(), pos); (err != nil) != (want < 0) || err == nil && n != want {
			t.Errorf("position %d: %d, %v", pos, n, err)
		}
	}
}
