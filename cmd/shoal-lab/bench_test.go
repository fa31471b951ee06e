package main

import (
	"bytes"
	"math"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/shoalfs/shoal/internal/cli"
	"github.com/shoalfs/shoal/internal/workload"
	"github.com/shoalfs/shoal/lab/accelerator"
	"github.com/shoalfs/shoal/lab/rig/testbed"
)

func TestBandwidth(t *testing.T) {
	for text, want := range map[string]testbed.Bandwidth{
		"1.1x": {Times: 1.1}, "2x": {Times: 2}, "none": {}, "40MB": {Absolute: 40e6}, "40MB/s": {Absolute: 40e6},
		"1GiB/s": {Absolute: 1 << 30},
	} {
		var s testbed.Bandwidth
		if err := s.Set(text); err != nil || s != want {
			t.Errorf("%s: %+v, %v", text, s, err)
		}
	}
	for _, text := range []string{"", "x", "0x", "-1x", "NaNx", "Infx", "fast", "0", "-4MB", "1e40", "9EB/s"} {
		var s testbed.Bandwidth
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
				o := benchOptions{Config: testbed.Config{Job: accelerator.Job{Accelerators: n}, Cached: cached},
					datasetSize: 2 << 30, shrink: 1}
				o.take(s)
				o.fit()
				steps, bytes := o.Job.Steps(o.Dataset.Samples), int64(o.Dataset.Samples)*o.Dataset.Size
				if steps < fewestSteps || steps > mostSteps || bytes > 2<<30 {
					t.Errorf("%s, %d accelerators: %d steps of %d B each: %d B",
						s.Name, n, steps, o.Dataset.Size, bytes)
				}
				if o.scale < 1 || o.scale != math.Trunc(o.scale) || o.shrink < 1 || o.Job.Step < s.Step {
					t.Errorf("%s: %+v", s.Name, o)
				}
				if cores := rigCost(o.Config); cores > holdable*float64(runtime.NumCPU())*1.001 {
					t.Errorf("%s, %d accelerators, %g cached: takes %.2f cores", s.Name, n, cached, cores)
				}
			}
		}
	}
	o := benchOptions{Config: testbed.Config{Job: accelerator.Job{Accelerators: 1}}, datasetSize: 2 << 30, scale: 3,
		steps: 40, shrink: 1}
	s, _ := workload.Find("retinanet-b200")
	o.take(s)
	if o.fit(); o.Job.Step != 3*s.Step || o.Job.Steps(o.Dataset.Samples) != 40 || o.shrink != 1 {
		t.Errorf("%+v", o)
	}
}

// What cannot be meant is wrong use, and nothing is started.
func TestWrongUse(t *testing.T) {
	for _, c := range []struct{ args, says string }{
		{"bench cosmoflow --connections -1", "--connections"},
		{"bench cosmoflow --sigma NaN", "--sigma"},
		{"bench resnet50-h100 --dataset-size 1000B", "at least 12800B"},
		{"bench resnet50-h100 --dataset-size 0", "--dataset-size"},
		{"demo --batch 0", "--batch"},
		{"demo --batch 16 --photos 31", "at least 32"},
		{"demo --steps -1", "--steps"},
		{"demo --sigma Inf", "--sigma"},
		{"store --latency -1ns", "--latency"},
		{"store --photos 3", "--photos 3"},
	} {
		root := root()
		root.SetArgs(strings.Fields(c.args))
		if err := root.Execute(); !cli.IsUsage(err) || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v", c.args, err)
		}
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
	o := benchOptions{Config: testbed.Config{
		Job: accelerator.Job{Accelerators: 2, Batch: 3, Step: 200 * time.Millisecond}}, scale: 2, shrink: 4}
	o.Dataset = testbed.Dataset{Name: "w", Size: 1e6}
	r := o.report(testbed.Result{Kept: 0.5, Demand: 30e6, Busy: 0.99, CPU: 0.5,
		Epochs: []testbed.Epoch{{Epoch: accelerator.Epoch{
			Seconds: 2, Compute: 1.5, Stall: 0.5, Utilisation: 0.75, Samples: 12, Bytes: 12e6,
			Steps: []accelerator.Step{{}, {}, {Stall: 0.003}}}}}})
	r.Store, r.Bound = &far{Latency: 0.03, Bandwidth: 16.5e6}, 1
	var b bytes.Buffer
	if err := r.print(&b); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"no MLPerf result", "1/2 of the real rate", "1/4 of the real size",
		"1.10 times what the 50% that are not cached need", "75.0%", "1 of 3",
		"3 ms", "reached 75.0% of it", "raise --scale",
	} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("%q is missing in\n%s", want, b.String())
		}
	}
}
