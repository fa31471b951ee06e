package prefetch

import (
	"testing"

	"pgregory.net/rapid"
)

// Whoever wants something all the time gets its part: at every moment two such flows' bytes for each unit
// of weight differ by no more than the largest request of each, however others come and go.
func TestFair(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const largest = 1000
		flows := make([]Flow, rapid.IntRange(2, 5).Draw(t, "flows"))
		for i := range flows {
			flows[i].Weight = rapid.Float64Range(0.01, 100).Draw(t, "weight")
		}
		var f Fair
		start := [2]int64{}
		for step := range 200 {
			var next *Flow
			for i := range flows {
				wants := i < 2 || rapid.Bool().Draw(t, "wants") // the first two always do
				if wants && (next == nil || f.Tag(&flows[i]) < f.Tag(next)) {
					next = &flows[i]
				}
			}
			f.Serve(next, rapid.Int64Range(1, largest).Draw(t, "bytes"))
			if step == 0 {
				start = [2]int64{flows[0].Served, flows[1].Served}
			}
			a := float64(flows[0].Served-start[0]) / flows[0].Weight
			b := float64(flows[1].Served-start[1]) / flows[1].Weight
			if bound := 2 * (largest/flows[0].Weight + largest/flows[1].Weight); a-b > bound || b-a > bound {
				t.Fatalf("step %d: %v and %v, at most %v apart", step, a, b, bound)
			}
		}
	})
}

// A flow that was away is served next, and has nothing saved up.
func TestFairComesBack(t *testing.T) {
	var f Fair
	a, b := Flow{Weight: 1}, Flow{Weight: 1}
	for range 1000 {
		f.Serve(&a, 100)
	}
	for i := range 10 {
		if f.Tag(&b) <= f.Tag(&a) {
			f.Serve(&b, 100)
		} else {
			f.Serve(&a, 100)
		}
		if i == 9 && (b.Served < 400 || b.Served > 600) {
			t.Errorf("%d of 1000 bytes for the one that came back", b.Served)
		}
	}
}
