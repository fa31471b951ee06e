//go:build cuda

// Command gpu measures the device's part of the feed on a real GPU: copies against a plain copy on the same bus, the
// fused kernel against the memory's bandwidth, and what bringing batches in costs a training step.
//
//	make bench-gpu && scp bin/shoal-bench-gpu GPU-MACHINE: && ssh GPU-MACHINE ./shoal-bench-gpu
//
// The binary needs libc and NVIDIA's driver. On the driver in software it runs too, as a test of itself, and says so:
// then nothing that it prints is a figure of a GPU, and it ends with exit code 4.
package main

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"time"

	"github.com/shoalfs/shoal/gpuingest/cuda"
)

var version = "dev"

// exitSoftware ends a run that measured no GPU.
const exitSoftware = 4

// report is what is printed, one JSON object.
type report struct {
	Version int    `json:"version"`
	Shoal   string `json:"shoal"`
	Date    string `json:"date"`
	Command string `json:"command"`
	Device  string `json:"device"`
	Model   string `json:"model"`
	Of      string `json:"figures_of"`
	Shape   string `json:"shape"`
	cuda.Figures
	Goals map[string]bool `json:"goals,omitempty"` // of a GPU only
}

func main() {
	software, err := run()
	switch {
	case err != nil:
		fmt.Fprintln(os.Stderr, "lab/bench/gpu:", err)
		os.Exit(1)
	case software:
		fmt.Fprintln(os.Stderr, "lab/bench/gpu: this was the driver in software: none of these figures is a GPU's")
		os.Exit(exitSoftware)
	}
}

func run() (software bool, err error) {
	s := cuda.Shape{}
	device := flag.Int("device", 0, "number of the device")
	// The shape of MLPerf's resnet50 on an H100: 400 pictures in 224 ms.
	flag.IntVar(&s.Rows, "rows", 400, "pictures in a batch")
	flag.IntVar(&s.Height, "height", 224, "pixels")
	flag.IntVar(&s.Width, "width", 224, "pixels")
	flag.StringVar(&s.DType, "dtype", "fp16", "uint8, fp16, bf16 or fp32")
	flag.StringVar(&s.Layout, "layout", "nchw", "nchw or nhwc")
	flag.DurationVar(&s.Step, "step", 224*time.Millisecond, "compute of a step")
	flag.IntVar(&s.Steps, "steps", 40, "steps that are timed")
	flag.IntVar(&s.Repeat, "repeat", 100, "copies, kernels and batches that are timed together")
	flag.Parse()
	if s.Rows < 1 || s.Steps < 1 || s.Repeat < 1 || flag.NArg() > 0 {
		return false, errors.New("rows, steps and repeat are at least 1, and there are no arguments: see -help")
	}
	d, err := cuda.Open(*device)
	if err != nil {
		return false, err
	}
	defer func() { err = errors.Join(err, d.Close()) }()
	f, err := d.Measure(s)
	if err != nil {
		return false, err
	}
	r := report{Version: 1, Shoal: version, Date: time.Now().UTC().Format(time.RFC3339), Command: fmt.Sprint(os.Args),
		Device: d.Name(), Model: d.Model(),
		Of: "GPU", Shape: fmt.Sprintf("%d x %dx%dx3 to %s %s, step %v", s.Rows, s.Height, s.Width, s.DType, s.Layout,
			s.Step), Figures: f}
	if d.Software() {
		r.Of = "software driver: not a GPU"
	} else {
		r.Goals = map[string]bool{"h2d at 90% of a plain copy": f.H2DShare >= 0.9,
			"stall of 1% of a step or less":           f.Stall <= 0.01,
			"kernel at 80% of the memory's bandwidth": f.KernelPeak >= 0.8}
	}
	out, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return d.Software(), err
	}
	fmt.Println(string(out))
	return d.Software(), nil
}
