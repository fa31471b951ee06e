package prefetch

import (
	"math/rand/v2"
	"testing"

	"pgregory.net/rapid"

	"github.com/shoalfs/shoal/prefetch/order"
)

func located(files []int) order.Locator {
	list := make([]uint32, len(files))
	for i, f := range files {
		list[i] = uint32(f)
	}
	return order.Index(order.List(list))
}

// Readers of all kinds of a plan, and of other orders of the same files.
func TestTrial(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		rng := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 1))
		n := rapid.SampledFrom([]int{200, 1000, 5000, 100_000}).Draw(t, "files")
		files := rng.Perm(n)
		if rapid.Bool().Draw(t, "sequential") {
			for i := range files {
				files[i] = i
			}
		}
		plan := located(files)
		workers, batch := rapid.IntRange(1, 16).Draw(t, "workers"), rapid.IntRange(2, 64).Draw(t, "batch")
		if rapid.Bool().Draw(t, "single samples") {
			workers, batch = min(workers, n/64), 1
		}
		follows := rapid.Bool().Draw(t, "follows")
		reading := files
		if !follows {
			reading = rng.Perm(n)
			if rapid.Bool().Draw(t, "backwards") {
				for i, f := range files {
					reading[n-1-i] = f
				}
			}
		}
		start := rapid.IntRange(0, n/2).Draw(t, "start")
		noise := rapid.IntRange(0, 2).Draw(t, "other files")

		// Each worker takes the batches whose number leaves its own; they go on in random turns.
		next := make([]int, workers)
		var trial Trial
		opens, departed := 0, false
		for range 64 {
			w := rng.IntN(workers)
			pos := start + (next[w]/batch*workers+w)*batch + next[w]%batch
			next[w]++
			if pos >= n {
				break
			}
			opens++
			trial.Open(uint32(w+1), reading[pos], plan)
			departed = trial.Departed(plan)
			for range noise { // of files outside the plan, by the same and by other processes
				trial.Open(uint32(rng.IntN(2*workers)+1), n+rng.IntN(n), plan)
			}
		}
		switch {
		case follows && departed:
			t.Fatalf("withdrawn, although %d of %d opens matched", trial.Matched, trial.Opens)
		case !follows && !departed && opens == 64 && trial.Matched < trialMatches:
			t.Fatalf("not withdrawn after %d opens: %d of %d matched", opens, trial.Matched, trial.Opens)
		case !follows && n >= 5000 && opens == 64 && !departed:
			t.Fatalf("followed, with %d of %d matches by chance", trial.Matched, trial.Opens)
		}
	})
}

// Each sample is read with three random ones, as for a mosaic.
func TestTrialMosaic(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	files := rng.Perm(2000)
	plan := located(files)
	var trial Trial
	for pos := range 16 {
		for k := range 4 {
			file := files[pos]
			if k > 0 {
				file = rng.IntN(2000)
			}
			if trial.Open(1, file, plan); trial.Departed(plan) {
				t.Fatalf("withdrawn at %d: %d of %d", pos, trial.Matched, trial.Opens)
			}
		}
	}
	if trial.Open(0, files[100], plan) || trial.Open(7, 5000, plan) {
		t.Error("an open without a process, or of another file, ended the trial")
	}
	// A new plan is on trial anew.
	other := located(rng.Perm(2000))
	for pos := range 64 {
		trial.Open(1, files[pos], other)
	}
	if !trial.Departed(other) || trial.Departed(plan) {
		t.Errorf("%d of %d opens matched another plan", trial.Matched, trial.Opens)
	}
}
