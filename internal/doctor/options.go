package doctor

import (
	"context"
	"time"
)

// Options say what to check.
type Options struct {
	Machine      Machine
	CacheDir     string // absolute; "" for no cache
	CacheSize    int64  // bytes of --cache-size
	Memory       int64  // bytes of --memory
	Mountpoint   string // absolute; "" for any
	Python       string // interpreter of the trainer; "": the first python3 in PATH
	ShoalVersion string
	FeedOnly     bool // nothing will be mounted
	Quick        bool // a third of the time
	Source       *Source

	machine *Machine
}

// window is the duration of a measurement.
func (o *Options) window() time.Duration {
	if o.Quick {
		return 500 * time.Millisecond
	}
	return 1500 * time.Millisecond
}

// Checks returns the checks to run.
func Checks(o Options) []Check {
	o.machine = o.Machine.fill()
	var all []Check
	fuse := o.fuseChecks()
	if o.FeedOnly {
		fuse = []Check{{Area: "fuse", Name: "device", Run: func(context.Context) Result { return skipped("--feed-only: nothing will be mounted") }}}
	}
	for _, list := range [][]Check{fuse, o.limitChecks(), o.diskChecks(), o.cacheChecks(), o.versionChecks(), o.gpuChecks()} {
		all = append(all, list...)
	}
	if o.Source != nil {
		o.Source.quick, o.Source.memory = o.Quick, o.Memory
		all = append(all, o.Source.checks()...)
	}
	return all
}
