package demo

import (
	"math"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

func TestParseEvents(t *testing.T) {
	ignore := func(string) {}
	const good = `{"event": "start", "total": 256}
{"event": "step", "t": 0.5, "wait": 0.5, "compute": 0.25, "samples": 16, "loss": 3.5}
{"event": "step", "t": 1.0, "wait": 0.25, "compute": 0.5, "samples": 16, "loss": 2.5}
{"event": "end", "seconds": 1.5, "cpu_seconds": 2.5}
`
	var r Result
	var total int
	if err := r.parse(strings.NewReader(good), 100, func(_, n int) { total = n }, ignore); err != nil {
		t.Fatal(err)
	}
	if r.Samples != 32 || len(r.Steps) != 2 || r.Seconds != 1.5 || r.TrainerCPU != 2.5 || total != 100 {
		t.Errorf("%+v, total %d", r, total)
	}
	if w := r.WaitShare(); w != 0.5 {
		t.Errorf("waited %v", w)
	}
	if first, last := r.Learned(); first != 3.5 || last != 2.5 {
		t.Errorf("loss %v, %v", first, last)
	}
	for _, bad := range []string{"", "Traceback\n", `{"event": "what"}`, good[:strings.Index(good, `{"event": "end"`)], `{"event": "end", "seconds": 1}`} {
		if err := new(Result).parse(strings.NewReader(bad), 0, func(int, int) {}, ignore); err == nil {
			t.Errorf("%q: accepted", bad)
		}
	}
}

// TestWaitBins: whatever the slices, the waiting in them adds up to the waiting in the steps.
func TestWaitBins(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var r Result
		now, want := 0.0, 0.0
		for range rapid.IntRange(1, 50).Draw(t, "steps") {
			wait, compute := rapid.Float64Range(0, 2).Draw(t, "wait"), rapid.Float64Range(0, 2).Draw(t, "compute")
			now += wait
			r.Steps = append(r.Steps, Step{T: now, Wait: wait, Compute: compute})
			now += compute
			want += wait
		}
		r.Seconds = now + 0.01
		width := rapid.Float64Range(0.01, 3).Draw(t, "width")
		got := 0.0
		for i, share := range waitBins(&r, width) {
			if share < 0 || share > 1+1e-9 {
				t.Fatalf("slice %d waits %v of its time", i, share)
			}
			got += share * width
		}
		if math.Abs(got-want) > 1e-3*max(want, 1) {
			t.Fatalf("the slices wait %v, the steps %v", got, want)
		}
	})
}

func TestNiceStep(t *testing.T) {
	for v, want := range map[float64]float64{0.9: 1, 1: 1, 1.1: 2, 3: 5, 6: 10, 42: 50, 1024: 2000, 0.03: 0.05} {
		if got := niceStep(v); math.Abs(got-want) > 1e-9 {
			t.Errorf("niceStep(%v) = %v, want %v", v, got, want)
		}
	}
}

// A warm pass that is no faster than the cold one says why.
func TestWarmNote(t *testing.T) {
	run := func(seconds, wait float64) *Result {
		return &Result{Samples: 100, Seconds: seconds, Steps: []Step{{Wait: wait}}}
	}
	for _, c := range []struct {
		warm *Result
		says bool
	}{{run(10, 0.1), true}, {run(5, 0.1), false}} {
		r := &report{Results: []*Result{run(40, 30), run(9.8, 0.9), c.warm}, Dropped: true, Cores: 2}
		if notes := strings.Join(r.Notes(), "\n"); strings.Contains(notes, "no faster than the cold one") != c.says {
			t.Errorf("%v: %s", c.warm.Seconds, notes)
		}
	}
}
