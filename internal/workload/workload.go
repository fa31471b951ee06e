// Package workload has the parameters of known training jobs: batches, sizes of samples and times of steps.
package workload

import (
	"slices"
	"time"
)

// Shape is the load of one accelerator with one model.
type Shape struct {
	Name        string
	Batch       int           // samples in a step of one accelerator
	SampleBytes int64         // mean size of a sample
	SampleSigma float64       // standard deviation of a sample's size, relative to the mean
	Step        time.Duration // compute time of a batch
}

// Shapes are the known shapes. All except tokens are those of MLPerf Storage v1.0 and v2.0 (DLIO's workload files:
// record length, batch size, computation time); tokens is ours: sequences of 4,096 tokens of two bytes.
var Shapes = []Shape{
	{"retinanet-b200", 24, 322_957, 0, 47550 * time.Microsecond},
	{"resnet50-h100", 400, 114_660, 0, 224 * time.Millisecond},
	{"unet3d-h100", 7, 146_600_628, 0.466, 323 * time.Millisecond},
	{"cosmoflow", 1, 2_828_486, 0.025, 3500 * time.Microsecond},
	{"tokens", 512, 8_192, 0, 500 * time.Millisecond},
}

// Names returns their names.
func Names() (names []string) {
	for _, s := range Shapes {
		names = append(names, s.Name)
	}
	return names
}

// Find returns the shape with a name.
func Find(name string) (Shape, bool) {
	if i := slices.IndexFunc(Shapes, func(s Shape) bool { return s.Name == name }); i >= 0 {
		return Shapes[i], true
	}
	return Shape{}, false
}
