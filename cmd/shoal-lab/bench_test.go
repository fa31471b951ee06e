package main

import (
	"bytes"
	"math"
	"runtime"
	"strings"
	"testing"

	"github.com/shoalfs/shoal/internal/workload"
	"github.com/shoalfs/shoal/lab/accelerator"
	"github.com/shoalfs/shoal/lab/rig/testbed"
)

func TestLineSpeed(t *testing.T) {
	for text, want := range map[string]testbed.Bandwidth{
		"1.1x": {Times: 1.1}, "2x": {Times: 2}, "none": {}, "40MB": {Absolute: 40e6}, "40MB/s": {Absolute: 40e6}, "1GiB/s": {Absolute: 1 << 30},
	} {
		var s lineSpeed
		if err := s.Set(text); err != nil || s.Bandwidth != want {
			t.Errorf("%s: %+v, %v", text, s, err)
		}
	}
	for _, text := range []string{"", "x", "0x", "-1x", "NaNx", "Infx", "fast", "0", "-4MB", "1e40", "9EB/s"} {
		var s lineSpeed
		if err := s.Set(text); err == nil {
			t.Errorf("%q is taken as %+v", text, s)
		}
	}
}

// Whatever the workload, the rig's dataset fits, an epoch is long enough to say something, and the rate is one that
// the cores can hold.
func TestBenchSize(t *testing.T) {
	for _, s := range workload.Shapes {
		for _, n := range []int{1, 3} {
			for _, cached := range []float64{0, 0.5, 1} {
				o := benchOptions{accelerators: n, cached: cached, datasetSize: 2 << 30}
				w, steps := o.size(s)
				bytes := int64(steps*n*w.Batch) * w.SampleBytes
				if steps < fewestSteps || steps > mostSteps || bytes > 2<<30 {
					t.Errorf("%s, %d accelerators: %d steps of %d B each: %d B", s.Name, n, steps, w.SampleBytes, bytes)
				}
				if w.scale < 1 || w.scale != math.Trunc(w.scale) || w.shrink < 1 || w.Step < s.Step {
					t.Errorf("%s: %+v", s.Name, w)
				}
				if cores := rigCost(n, workload.Shape{Batch: w.Batch, SampleBytes: w.SampleBytes, Step: w.Step}, cached); cores > holdable*float64(runtime.NumCPU())*1.001 {
					t.Errorf("%s, %d accelerators, %g cached: takes %.2f cores", s.Name, n, cached, cores)
				}
			}
		}
	}
	o := benchOptions{accelerators: 1, datasetSize: 2 << 30, scale: 3, steps: 40}
	s, _ := workload.Find("retinanet-b200")
	if w, steps := o.size(s); w.Step != 3*s.Step || steps != 40 || w.shrink != 1 {
		t.Errorf("%+v, %d steps", w, steps)
	}
}

func TestRanks(t *testing.T) {
	for _, c := range []struct {
		text string
		n    int
		want string
	}{
		{"torch:seed=7", 1, "torch:seed=7"},
		{"torch:seed=7", 4, "torch:seed=7,world=4,rank=0-3"},
		{"torch:seed=7,world=8,rank=0-3", 4, "torch:seed=7,world=8,rank=0-3"},
		{"sequential", 2, "sequential:world=2,rank=0-1"},
	} {
		if got, err := ranks(c.text, c.n); err != nil || got != c.want {
			t.Errorf("%s for %d: %s, %v", c.text, c.n, got, err)
		}
	}
}

func TestBenchPrint(t *testing.T) {
	r := &benchReport{benchJob: benchJob{Workload: "w", Cores: 2, Accelerators: 2, Batch: 3, SampleBytes: 1e6, StepSeconds: 0.2, Scale: 2, Shrink: 4}, Cached: 0.5,
		Store: &far{Latency: 0.03, Bandwidth: 16.5e6}, Bound: 1, Busy: 0.99, CPU: 0.5}
	r.add([]testbed.Epoch{{Epoch: accelerator.Epoch{Seconds: 2, Compute: 1.5, Stall: 0.5, Utilisation: 0.75, Samples: 12, Bytes: 12e6, Steps: []accelerator.Step{{}, {}, {Stall: 0.003}}}}})
	var b bytes.Buffer
	if err := r.print(&b); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"no MLPerf result", "1/2 of the real rate", "1/4 of the real size", "1.10 times what the 50% that are not cached need", "75.0%", "1 of 3",
		"3 ms", "reached 75.0% of it", "raise --scale",
	} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("%q is missing in\n%s", want, b.String())
		}
	}
}
