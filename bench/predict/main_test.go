package main

import "testing"

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
			if c.Job.Prefetch%c.Job.Workers != 0 {
				t.Errorf("%s: plan takes the batches ahead by worker", name(c))
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
