package prefetch

import "github.com/shoalfs/shoal/prefetch/order"

// Trial tells from the first opens of a written plan's files whether their readers follow the plan.
//
// Each process (a DataLoader's worker, a thread) that follows it continues from where it was: by 1 within a batch, or past
// the other workers' batches, which may be far, but is the same step every time. So an open matches if its place in the plan
// is less than a reach beyond the process's last one, or beyond its front, which each of these moves by one, or if it makes
// a step that was made before. A reach is a 64th of the plan, 64 at most. The front is for readers that open other samples
// in between (mosaics of pictures). By chance one open in 30 matches. A process's first open says nothing, so it does not
// matter where a resumed run begins. Files that are not in the plan are other readers' (a validation pass), and opens without
// a process count for neither. Nor does an open that continues another plan: it is another rank's, or another loader's. So
// every open is shown to all trials (Continues) before it counts in one (Matches) or in all (Strays). For that a plan that is
// followed goes on learning the steps of processes that matched: their first ones past other workers' batches may come after its trial.
//
// The plan is on trial until 6 opens have matched: then it is followed, and the Tracker does the rest. If of 32 opens
// fewer have, nobody follows it, unless some processes do so more often than not, which are outnumbered by others. With up to
// 32 workers that is within 64 opens.
type Trial struct {
	plan    order.Locator
	at      map[uint32]place // by process
	steps   map[int]bool     // those of opens that did not match
	Opens   int              // that say something
	Matched int
	// Departed says that the opens have shown that nobody follows the plan. Nothing counts then.
	Departed bool
}

// place is where a process is expected in the plan, and how many of its opens matched and did not.
type place struct{ last, front, matched, strayed int }

const trialOpens, trialMatches, trialReach, trialSure = 32, 6, 64, 3

// NewTrial begins the trial of a plan.
func NewTrial(plan order.Locator) Trial {
	return Trial{plan: plan, at: map[uint32]place{}, steps: map[int]bool{}}
}

// Of reports whether the trial is of plan.
func (t *Trial) Of(plan order.Locator) bool { return t.plan == plan }

// Continues reports whether an open continues the plan, and from where the process goes on then.
func (t *Trial) Continues(process uint32, file int) bool {
	was, known := t.at[process]
	if !known {
		return false
	}
	reach := max(min(t.plan.Len()/64, trialReach), 1)
	last := t.plan.Find(file, was.last)
	if front := t.plan.Find(file, was.front); front >= 0 && front < was.front+reach {
		was.last, was.front = front+1, was.front+1
	} else if last >= 0 && (last < was.last+reach || t.steps[last-was.last]) {
		was.last = last + 1
	} else {
		return false
	}
	t.at[process] = was
	return true
}

// Matches records an open that continues this plan and no other.
func (t *Trial) Matches(process uint32) {
	if was := t.at[process]; t.undecided() {
		t.Opens++
		t.Matched++
		was.matched++
		t.at[process] = was
	}
}

func (t *Trial) undecided() bool { return t.Matched < trialMatches && !t.Departed }

// Strays records an open that continues no plan, and reports whether it was the one that showed that nobody follows this.
func (t *Trial) Strays(process uint32, file int) (departed bool) {
	pos := t.plan.Find(file, 0)
	if pos < 0 || process == 0 {
		return false
	}
	if len(t.at) > maxFollowers {
		clear(t.at)
	}
	was, known := t.at[process]
	if last := t.plan.Find(file, was.last); !known {
		was.front = pos + 1
	} else {
		if last >= 0 && (t.undecided() || was.matched > was.strayed) {
			t.steps[last-was.last] = true
		}
		if t.undecided() {
			t.Opens++
		}
		was.strayed++
	}
	was.last = pos + 1
	t.at[process] = was
	if !t.undecided() || t.Opens < trialOpens {
		return false
	}
	sure := 0
	for _, p := range t.at {
		if p.matched > p.strayed {
			sure += p.matched
		}
	}
	t.Departed = sure < trialSure
	return t.Departed
}
