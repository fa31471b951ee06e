package predict

import (
	"reflect"
	"testing"

	"github.com/shoalfs/shoal/lab/rig/testbed"
	"github.com/shoalfs/shoal/prefetch/order"
)

func TestGrid(t *testing.T) {
	for quick, least := range map[bool]int{false: 50, true: 16} {
		seen := map[string]bool{}
		for _, c := range grid(quick) {
			if seen[name(c)] {
				t.Errorf("%s is there twice", name(c))
			}
			seen[name(c)] = true
			valid(t, c)
		}
		if len(seen) < least {
			t.Errorf("quick %v: %d configurations", quick, len(seen))
		}
	}
}

// valid fails for a configuration that cannot be measured, or is not what the others are.
func valid(t *testing.T, c testbed.Config) {
	t.Helper()
	if global := c.Job.Accelerators * c.Job.Batch; global == 0 || c.Dataset.Samples%global != 0 {
		t.Errorf("%s: an epoch ends in an incomplete step", name(c))
	}
	if c.Job.Prefetch%c.Job.Workers != 0 {
		t.Errorf("%s: plan takes the batches ahead by worker", name(c))
	}
	if took := float64(c.Job.Steps(c.Dataset.Samples)) * c.Job.Step.Seconds(); took < 4 || took > 8 {
		t.Errorf("%s: an epoch takes %.1f s", name(c), took)
	}
	if spec, err := order.Parse(c.Order); err != nil || spec.Check() != nil {
		t.Errorf("%s: no order (%v)", name(c), err)
	}
}

func TestDrawn(t *testing.T) {
	for seed := range uint64(100) {
		list := drawn(12, seed)
		if !reflect.DeepEqual(list, drawn(12, seed)) {
			t.Fatalf("seed %d draws others the second time", seed)
		}
		if reflect.DeepEqual(list, drawn(12, seed+1)) {
			t.Errorf("seed %d draws what the next one does", seed)
		}
		for _, c := range list {
			valid(t, c)
		}
	}
}
