package top

import (
	"time"

	"github.com/shoalfs/shoal/internal/admin/verdict"
)

// kept is how many snapshots are kept, and judged the time in seconds over which a verdict is given.
const (
	kept   = 300
	judged = 10 * time.Second
)

// series is the daemon's snapshots, oldest first.
type series struct {
	snaps []verdict.Snapshot
	rates []verdict.Rates // between each snapshot and the one before
}

func (s *series) add(now verdict.Snapshot) {
	var before verdict.Snapshot
	if n := len(s.snaps); n > 0 {
		before = s.snaps[n-1]
		if before.PID == now.PID && now.Uptime <= before.Uptime {
			return // the same snapshot again
		}
	}
	r := verdict.Of(before, now).Rates
	if len(s.snaps) == 0 || before.PID != now.PID {
		s.snaps, s.rates = nil, nil // another daemon, or a restart
	}
	s.snaps, s.rates = append(s.snaps, now), append(s.rates, r)
	if over := len(s.snaps) - kept; over > 0 {
		s.snaps, s.rates = s.snaps[over:], s.rates[over:]
	}
}

// last returns the latest snapshot and the verdict on the seconds before it; false before the first one. With a single
// snapshot, the verdict is on the daemon's whole life.
func (s *series) last() (verdict.Snapshot, verdict.Verdict, bool) {
	n := len(s.snaps)
	if n == 0 {
		return verdict.Snapshot{}, verdict.Verdict{}, false
	}
	now := s.snaps[n-1]
	var before verdict.Snapshot
	for i := n - 2; i >= 0; i-- {
		before = s.snaps[i]
		if now.Uptime-before.Uptime >= judged.Seconds() {
			break
		}
	}
	return now, verdict.Of(before, now), true
}

// of returns one figure of every rate except the first, which is a mean over the time before.
func (s *series) of(f func(verdict.Rates) float64) []float64 {
	var out []float64
	for _, r := range s.rates[min(1, len(s.rates)):] {
		out = append(out, f(r))
	}
	return out
}

// before returns the snapshot some seconds before the last one, for computing rates; zero if there is none.
func (s *series) before() (before verdict.Snapshot) {
	if n := len(s.snaps); n > 1 {
		before = s.snaps[max(0, n-6)]
	}
	return before
}
