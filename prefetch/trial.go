package prefetch

import "github.com/shoalfs/shoal/prefetch/order"

// Trial tells from the first opens of a written plan's files whether their readers follow the plan.
//
// Each process (a DataLoader's worker, a thread) that follows it continues from where it was: by 1 within a batch, or past
// the other workers' batches, which may be far. So an open matches if its place in the plan is less than a reach beyond the
// process's last one, or beyond its front, which each of these moves by one. A reach is a 64th of the plan, 64 at most. The
// front is for readers that open other samples in between (mosaics of pictures). By chance one open in 30 matches. A
// process's first open says nothing, so it does not matter where a resumed run begins. Files that are not in the plan are
// other readers' (a validation pass), and opens without a process count for neither.
//
// The plan is on trial until 6 opens have matched: then it is followed, and the Tracker does the rest. If of 32 opens
// fewer have, nobody follows it. With up to 32 workers that is within 64 opens. The zero value is ready.
type Trial struct {
	plan    order.Locator
	at      map[uint32]place // by process
	Opens   int              // that say something
	Matched int
}

// place is where a process is expected in the plan.
type place struct{ last, front int }

const trialOpens, trialMatches, trialReach = 32, 6, 64

// Open records an open, which is of a reader of plan if that is the same as before, and reports whether it continues one.
// Opens are no longer counted once the trial is decided.
func (t *Trial) Open(process uint32, file int, plan order.Locator) (continues bool) {
	if t.plan != plan || len(t.at) > maxFollowers {
		*t = Trial{plan: plan, at: map[uint32]place{}, Opens: t.of(plan, t.Opens), Matched: t.of(plan, t.Matched)}
	}
	pos := plan.Find(file, 0)
	if process == 0 || pos < 0 {
		return false
	}
	was, known := t.at[process]
	reach := max(min(plan.Len()/64, trialReach), 1)
	if front := plan.Find(file, was.front); known && front >= 0 && front < was.front+reach {
		was, continues = place{front + 1, was.front + 1}, true
	} else if last := plan.Find(file, was.last); known && last >= 0 && last < was.last+reach {
		was.last, continues = last+1, true
	} else if was.last = pos + 1; !known {
		was.front = was.last
	}
	t.at[process] = was
	if known && t.Opens < trialOpens && t.Matched < trialMatches {
		t.Opens++
		if continues {
			t.Matched++
		}
	}
	return continues
}

// of returns n if the trial is of plan.
func (t *Trial) of(plan order.Locator, n int) int {
	if t.plan != plan {
		return 0
	}
	return n
}

// Departed reports whether the opens so far have shown that nobody follows plan.
func (t *Trial) Departed(plan order.Locator) bool {
	return t.of(plan, t.Opens) == trialOpens && t.Matched < trialMatches
}
