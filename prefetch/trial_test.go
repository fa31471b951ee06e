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

// hear tells trials of an open, as run.Runner does.
func hear(process uint32, file int, trials ...*Trial) {
	var continued []*Trial
	for _, t := range trials {
		if t.Continues(process, []int{file}) {
			continued = append(continued, t)
		}
	}
	if len(continued) == 1 {
		continued[0].Matches(process)
	}
	for _, t := range trials {
		if continued == nil {
			t.Strays(process, []int{file})
		}
	}
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
		// One has 6 opens after the first of each worker, and after the first step from batch to batch.
		workers, batch := rapid.IntRange(1, 100).Draw(t, "workers"), rapid.IntRange(1, 64).Draw(t, "batch")
		workers = min(workers, n/batch/4, n/12)
		workers = max(workers, 1)
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
		trial := NewTrial(located(files))
		opens, departed := 0, false
		for range 2*workers + 32 {
			w := rng.IntN(workers)
			pos := start + (next[w]/batch*workers+w)*batch + next[w]%batch
			next[w]++
			if pos >= n {
				break
			}
			opens++
			hear(uint32(w+1), reading[pos], &trial)
			departed = departed || trial.Departed
			for range noise { // of files outside the plan, by the same and by other processes
				hear(uint32(rng.IntN(2*workers)+1), n+rng.IntN(n), &trial)
			}
		}
		switch enough := opens == 2*workers+32; {
		case follows && departed:
			t.Fatalf("withdrawn, although %d of %d opens matched", trial.Matched, trial.Opens)
		case follows && enough && trial.Matched < trialMatches:
			t.Fatalf("still on trial after %d opens: %d of %d matched", opens, trial.Matched, trial.Opens)
		case !follows && n >= 5000 && workers <= 32 && enough && !departed:
			t.Fatalf("followed, with %d of %d matches by chance", trial.Matched, trial.Opens)
		}
	})
}

// Several plans of the same files, each with its own readers (the ranks of a node, two loaders of a process, two jobs):
// those of the others do not count against it, also if one of them is wrong, or others read without a plan.
func TestTrialBesideOthers(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		rng := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 1))
		n := rapid.SampledFrom([]int{1000, 20_000}).Draw(t, "files")
		plans, workers := rapid.IntRange(1, 16).Draw(t, "plans"), rapid.IntRange(1, 4).Draw(t, "workers")
		batch := rapid.IntRange(1, 16).Draw(t, "batch")
		one := plans == 2 && workers == 1 && rapid.Bool().Draw(t, "one process reads all")
		wrong := -1
		if !one && plans > 1 && n > 1000 && rapid.Bool().Draw(t, "one is wrong") {
			wrong = rng.IntN(plans)
		}
		strangers := !one && wrong < 0 && plans <= 4 && rapid.Bool().Draw(t, "strangers") // as many opens as a plan has
		orders, trials := make([][]int, plans), make([]*Trial, plans)
		for i := range plans {
			orders[i] = rng.Perm(n)
			trial := NewTrial(located(orders[i]))
			trials[i] = &trial
			if i == wrong {
				orders[i] = rng.Perm(n)
			}
		}
		next := make([]int, plans*workers)
		for range 150 * plans {
			reader := rng.IntN(plans * workers)
			i, w := reader/workers, reader%workers
			pos := (next[reader]/batch*workers+w)*batch + next[reader]%batch
			if next[reader]++; pos >= n {
				break
			}
			process := uint32(reader + 1)
			if one {
				process = 1
			}
			hear(process, orders[i][pos], trials...)
			if strangers && rng.IntN(plans) == 0 {
				hear(uint32(1000+rng.IntN(2)), rng.IntN(n), trials...)
			}
			for j, trial := range trials {
				if j != wrong && trial.Departed {
					t.Fatalf("plan %d withdrawn, although %d of %d opens matched", j, trial.Matched, trial.Opens)
				}
			}
		}
		if wrong >= 0 && !trials[wrong].Departed {
			t.Fatalf("plan %d is wrong and followed: %d of %d", wrong, trials[wrong].Matched, trials[wrong].Opens)
		}
	})
}

// A rank whose readers come late, on a busy machine, keeps its plan while another's read their whole epoch: also their
// first steps past the other workers' batches continue a plan, although it is followed by then.
func TestTrialOfLateReaders(t *testing.T) {
	const n, workers, batch = 280, 3, 4
	rng := rand.New(rand.NewPCG(1, 2))
	early, late := rng.Perm(n), rng.Perm(n)
	first, second := NewTrial(located(early)), NewTrial(located(late))
	for _, file := range late[:2] {
		hear(100, file, &first, &second)
	}
	for pos, file := range early {
		if hear(uint32(1+pos/batch%workers), file, &first, &second); second.Departed {
			t.Fatalf("withdrawn after %d opens of the other's: %d of %d", pos, second.Matched, second.Opens)
		}
	}
	if second.Opens > 1+2*workers {
		t.Errorf("%d opens count", second.Opens)
	}
}

// Each sample is read with three random ones, as for a mosaic.
func TestTrialMosaic(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	files := rng.Perm(2000)
	trial := NewTrial(located(files))
	for pos := range 16 {
		for k := range 4 {
			file := files[pos]
			if k > 0 {
				file = rng.IntN(2000)
			}
			if hear(1, file, &trial); trial.Departed {
				t.Fatalf("withdrawn at %d: %d of %d", pos, trial.Matched, trial.Opens)
			}
		}
	}
	before := trial.Opens
	hear(0, files[100], &trial)
	if hear(7, 5000, &trial); trial.Opens != before {
		t.Error("an open without a process, or of another file, counts")
	}
	// A new plan is on trial anew.
	other := NewTrial(located(rng.Perm(2000)))
	for pos := range 64 {
		hear(1, files[pos], &other)
	}
	if !other.Departed || trial.Departed {
		t.Errorf("%d of %d opens matched another plan", other.Matched, other.Opens)
	}
}
