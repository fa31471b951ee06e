package demo

import (
	"strings"
	"testing"
)

func TestParseEvents(t *testing.T) {
	const good = `{"event": "start", "total": 256}
{"event": "step", "t": 0.5, "wait": 0.5, "compute": 0.25, "samples": 16, "loss": 3.5}
{"event": "step", "t": 1.0, "wait": 0.25, "compute": 0.5, "samples": 16, "loss": 2.5}
{"event": "end", "seconds": 1.5, "cpu_seconds": 2.5}
`
	var r Result
	var total int
	if err := r.parse(strings.NewReader(good), 100, func(_, n int, _ string) { total = n }); err != nil {
		t.Fatal(err)
	}
	if r.Samples != 32 || len(r.Steps) != 2 || r.Seconds != 1.5 || r.TrainerCPU != 2.5 || total != 100 {
		t.Errorf("%+v, total %d", r, total)
	}
	if w := r.WaitShare(); w != 0.5 {
		t.Errorf("waited %v", w)
	}
	for _, bad := range []string{"", "Traceback\n", `{"event": "what"}`, good[:strings.Index(good, `{"event": "end"`)],
		`{"event": "end", "seconds": 1}`} {
		if err := new(Result).parse(strings.NewReader(bad), 0, func(int, int, string) {}); err == nil {
			t.Errorf("%q: accepted", bad)
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
		if notes := strings.Join(r.notes(), "\n"); strings.Contains(notes, "no faster than the cold one") != c.says {
			t.Errorf("%v: %s", c.warm.Seconds, notes)
		}
	}
}
