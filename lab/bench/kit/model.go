package kit

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"strconv"
	"time"

	"github.com/shoalfs/shoal/lab/accelerator"
	"github.com/shoalfs/shoal/lab/rig/proxy"
	"github.com/shoalfs/shoal/lab/rig/testbed"
	"github.com/shoalfs/shoal/prefetch/sim"
)

// Work is what this machine itself adds to a run, in seconds: measured, since no model knows it.
type Work struct {
	Read  float64 `json:"read"`  // a worker's time over one sample that is on disk
	Fetch float64 `json:"fetch"` // the machine's time, all processes together, over one request
}

// extentBytes is how much of a file the daemon fetches at a time.
const extentBytes = 4 << 20

// Calibrate measures Work for the dataset of a configuration: one worker reads all of it from disk, then all
// of it comes from a store that is near and wide, into eight.
func Calibrate(ctx context.Context, b *testbed.Bed, c testbed.Config) (w Work, err error) {
	c.Order, c.Told, c.Epochs, c.Bandwidth, c.Latency, c.Packed = "torch:seed=1", "", 1, testbed.Bandwidth{}, 0, false
	for _, side := range []struct {
		cached  float64
		workers int
		into    *float64
	}{{1, 1, &w.Read}, {0, 8, &w.Fetch}} {
		c.Cached = side.cached
		c.Job = accelerator.Job{Accelerators: 1, Batch: max(c.Dataset.Samples/64, 1), Step: time.Microsecond, Workers: side.workers, Prefetch: 2 * side.workers}
		r, err := b.Measure(ctx, c, func(string, int, int) {})
		if err != nil {
			return w, fmt.Errorf("calibrate %s, %.0f%% cached: %w", c.Dataset.Prefix(), 100*side.cached, err)
		}
		*side.into = Whole(r.Epochs[0].Epoch).Seconds / float64(r.Epochs[0].Samples)
	}
	w.Fetch /= math.Ceil(float64(c.Dataset.Size) / extentBytes) // requests a sample
	return w, nil
}

// Whole counts the wait for the first batch as a stall, as package sim does.
func Whole(e accelerator.Epoch) accelerator.Epoch {
	e.Seconds += e.FirstBatch
	e.Stall += e.FirstBatch
	e.Utilisation = e.Compute / e.Seconds
	return e
}

// Epoch is what an epoch took, or was predicted to take.
type Epoch struct {
	Seconds  float64 `json:"seconds"`
	Compute  float64 `json:"compute"` // seconds of that in which the accelerators computed
	Requests float64 `json:"requests"`
	Bytes    float64 `json:"bytes"` // over the line
}

// Utilisation is the part of the time in which the accelerators compute.
func (e Epoch) Utilisation() float64 { return e.Compute / e.Seconds }

// Mean returns the mean of some epochs.
func Mean(epochs []Epoch) (m Epoch) {
	n := float64(len(epochs))
	for _, e := range epochs {
		m.Seconds += e.Seconds / n
		m.Compute += e.Compute / n
		m.Requests += e.Requests / n
		m.Bytes += e.Bytes / n
	}
	return m
}

// predictions is how many simulations with other latencies are averaged: an epoch of a few seconds is a short
// one.
const predictions = 5

// Predict has `shoal plan` predict a configuration that was measured, with what was kept, the bandwidth and
// the memory that it had, and returns each epoch. The store has to hold the dataset.
func Predict(ctx context.Context, b *testbed.Bed, c testbed.Config, r testbed.Result, w Work) ([]Epoch, error) {
	if err := b.Far(ctx, proxy.Options{}); err != nil {
		return nil, err
	}
	mean := make([]Epoch, c.Epochs)
	for seed := range predictions {
		out, err := b.Shoal(ctx, append(planArgs(c, r, w), "--seed", strconv.Itoa(seed))...)
		if err != nil {
			return nil, err
		}
		var report struct {
			Policies []struct{ Epochs []sim.Epoch }
		}
		if err := json.Unmarshal([]byte(out), &report); err != nil {
			return nil, fmt.Errorf("shoal plan: %w", err)
		}
		if len(report.Policies) != 1 || len(report.Policies[0].Epochs) != c.Epochs {
			return nil, fmt.Errorf("shoal plan: %d epochs of one policy were asked for: %s", c.Epochs, out)
		}
		for i, e := range report.Policies[0].Epochs {
			mean[i].Seconds += e.Seconds / predictions
			mean[i].Compute += e.Compute / predictions
			mean[i].Requests += float64(e.Requests) / predictions
			mean[i].Bytes += float64(e.Bytes) / predictions
		}
	}
	return mean, nil
}

// planArgs are the arguments of `shoal plan` for a configuration.
func planArgs(c testbed.Config, r testbed.Result, w Work) []string {
	seconds := func(s float64) string { return time.Duration(s * float64(time.Second)).String() }
	bandwidth := "unlimited"
	if r.Bandwidth > 0 {
		bandwidth = strconv.FormatFloat(8*r.Bandwidth, 'f', 0, 64) + "bit"
	}
	args := []string{
		"plan", c.Source(), "--json", "--warm", "--samples", "*", "--policy", sim.Keep.String(),
		"--cache-size", strconv.FormatInt(int64(r.Kept*float64(r.Bytes)), 10) + "B", "--memory", strconv.FormatInt(c.Memory, 10) + "B",
		"--bandwidth", bandwidth, "--latency", c.Latency.String(), "--latency-sigma", strconv.FormatFloat(c.Sigma, 'g', -1, 64),
		"--request-cpu", seconds(w.Fetch), "--read-time", seconds(w.Read),
		"--order", c.Order, "--epochs", strconv.Itoa(c.Epochs), "--accelerators", strconv.Itoa(c.Job.Accelerators),
		"--batch", strconv.Itoa(c.Job.Batch), "--step-time", c.Job.Step.String(),
		"--workers", strconv.Itoa(c.Job.Workers), "--prefetch", strconv.Itoa(c.Job.Prefetch / c.Job.Workers),
	}
	if c.Connections > 0 {
		args = append(args, "--connections", strconv.Itoa(c.Connections))
	}
	return args
}
