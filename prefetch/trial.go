package prefetch

import "github.com/shoalfs/shoal/prefetch/order"

// Trial tells from the first opens of a written plan's files whether their readers follow the plan.
//
// Each process (a DataLoader's worker, a thread) that follows it continues from where it was: by 1 within a batch, or
// past the other workers' batches, which may be far, but is the same step every time. So an open matches if its place
// in the plan is less than a reach beyond the process's last one, or beyond its front, which each of these moves by
// one, or if it makes a step that was made before. A reach is a 64th of the plan, 64 at most. The front is for readers
// that open other samples in between (mosaics of pictures). By chance one open in 30 matches. A process's first open
// says nothing, so it does not matter where a resumed run begins. Files that are not in the plan are other readers' (a
// validation pass), and opens without a process count for neither. Nor does an open that continues another plan: it is
// another rank's, or another loader's. So every open is shown to all trials (Continues) before it counts in one
// (Matches) or in all (Strays). For that a plan that is followed goes on learning the steps of processes that matched:
// their first ones past other workers' batches may come after its trial.
//
// A read of a large file may touch several ranges of a plan, of which the kernel was asked for one, or none. It matches
// if one of them does, within a reach that is as many times shorter, but not below 8. If it does not match, the process
// may be at any of them.
//
// The plan is on trial until 6 opens have matched: then it is followed, and the Tracker does the rest. If of 32 opens
// fewer have, nobody follows it, unless some processes do so more often than not, which are outnumbered by others. With
// up to 32 workers that is within 64 opens.
type Trial struct {
	plan    order.Locator
	at      map[uint32]place // by process
	steps   map[int]bool     // those of opens that did not match
	Opens   int              // that say something
	Matched int
	// Departed says that the opens have shown that nobody follows the plan. Nothing counts then.
	Departed bool
}

// place is where a process is expected in the plan, or where else, and how many of its opens matched and did not.
type place struct {
	last, front      int
	others           []int
	matched, strayed int
	since            int // it continued, opens that did not
}

const (
	trialOpens, trialMatches, trialSure = 32, 6, 3
	trialReach, leastReach              = 64, 8 // positions
	mostOthers, mostWander              = 64, 8 // places where a process may be; opens in a row
)

// NewTrial begins the trial of a plan.
func NewTrial(plan order.Locator) Trial {
	return Trial{plan: plan, at: map[uint32]place{}, steps: map[int]bool{}}
}

// Of reports whether the trial is of plan.
func (t *Trial) Of(plan order.Locator) bool { return t.plan == plan }

// Continues reports whether an open of a file, or a read that touches several ranges, continues the plan.
func (t *Trial) Continues(process uint32, files []int) bool {
	was, known := t.at[process]
	if !known {
		return false
	}
	reach := max(min(t.plan.Len()/64, trialReach), 1)
	if len(files) > 1 {
		reach = max(reach/len(files), min(reach, leastReach))
	}
	for _, file := range files {
		if t.follows(&was, file, reach) {
			was.others, was.since = nil, 0
			t.at[process] = was
			return true
		}
	}
	return false
}

// follows reports whether an open continues the plan from a place, which then moves.
func (t *Trial) follows(p *place, file, reach int) bool {
	if front := t.plan.Find(file, p.front); front >= 0 && front < p.front+reach {
		p.last, p.front = front+1, p.front+1
		return true
	}
	if last := t.plan.Find(file, p.last); last >= 0 && (last < p.last+reach || t.steps[last-p.last]) {
		p.last = last + 1
		return true
	}
	for _, other := range p.others {
		if last := t.plan.Find(file, other); last >= 0 && last < other+reach {
			p.last = last + 1
			return true
		}
	}
	return false
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

// Wanders reports whether the process of an open that continues no plan still follows this one: of reads of ranges some
// are the kernel's, which reads on. A few opens in a row show that it does not.
func (t *Trial) Wanders(process uint32, files []int) bool {
	was, known := t.at[process]
	if !known || was.matched == 0 {
		return false
	}
	was.since++
	was.others = t.places(files)
	t.at[process] = was
	return was.since < mostWander
}

// places are where in the plan a process may be that has opened one of the files.
func (t *Trial) places(files []int) (places []int) {
	for _, file := range files[:min(len(files), mostOthers)] {
		if pos := t.plan.Find(file, 0); pos >= 0 {
			places = append(places, pos+1)
		}
	}
	return places
}

// Strays records an open that continues no plan, and reports whether it was the one that showed that nobody follows
// this.
func (t *Trial) Strays(process uint32, files []int) (departed bool) {
	places := t.places(files)
	if len(places) == 0 || process == 0 {
		return false
	}
	if len(t.at) > maxFollowers {
		clear(t.at)
	}
	was, known := t.at[process]
	if last := t.plan.Find(files[0], was.last); !known {
		was.front = places[0]
	} else {
		if last >= 0 && len(files) == 1 && (t.undecided() || was.matched > was.strayed) {
			t.steps[last-was.last] = true
		}
		if t.undecided() {
			t.Opens++
		}
		was.strayed++
	}
	was.last, was.others = places[0], places[1:]
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
