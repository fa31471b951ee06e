package main

import (
	"testing"

	"github.com/shoalfs/shoal/bench/kit"
	"github.com/shoalfs/shoal/prefetch/sim"
	"github.com/shoalfs/shoal/rig/testbed"
)

func TestGrid(t *testing.T) {
	for quick, least := range map[bool]int{false: 50, true: 16} {
		seen := map[string]bool{}
		for _, c := range grid(quick) {
			if seen[name(c)] {
				t.Errorf("%s is there twice", name(c))
			}
			seen[name(c)] = true
			if global := c.Job.Accelerators * c.Job.Batch; c.Dataset.Samples%global != 0 {
				t.Errorf("%s: an epoch ends in an incomplete step", name(c))
			}
			took := float64(c.Job.Steps(c.Dataset.Samples)) * c.Job.Step.Seconds()
			if took < 4 || took > 8 {
				t.Errorf("%s: an epoch takes %.1f s", name(c), took)
			}
		}
		if len(seen) < least {
			t.Errorf("quick %v: %d configurations", quick, len(seen))
		}
	}
}

// Every configuration can be predicted, and what no bandwidth limits is.
func TestPredict(t *testing.T) {
	for _, c := range grid(true) {
		p, err := kit.Predict(c, testbed.Result{Bytes: c.Dataset.Bytes(), Kept: c.Cached, Memory: 32 << 20}, kit.Work{}, sim.Keep)
		if c.Dataset.Size > 4<<20 {
			p, err = kit.Predict(c, testbed.Result{Bytes: c.Dataset.Bytes(), Kept: c.Cached, Memory: 128 << 20}, kit.Work{}, sim.Keep)
		}
		if err != nil {
			t.Errorf("%s: %v", name(c), err)
			continue
		}
		if e := p[len(p)-1]; e.Bytes > float64(c.Dataset.Bytes())*1.01 || c.Connections >= 16 && e.Utilisation < 0.8 {
			t.Errorf("%s: %+v", name(c), e)
		}
	}
}
