package main

import (
	"context"
	"os"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"sync/atomic"
	"time"

	"github.com/shoalfs/shoal/gpuingest/jpeg"
	"github.com/shoalfs/shoal/internal/pause"
	"github.com/shoalfs/shoal/prefetch/engine"
)

// owned is the host of the cache directory that this process owns.
var owned atomic.Pointer[engine.Host]

// usesNative gives the C code of pictures its part of --memory. Mounts that neither recode nor restore need none.
func usesNative() {
	if h := owned.Load(); h != nil {
		jpeg.SetMemory(h.Native())
	}
}

const (
	giveBackEvery = 15 * time.Second
	quietBytes    = 32 << 20 // allocated by Go in that time at most, while little happens
)

// giveBack returns memory to the kernel once little happens, until ctx ends. Go would keep a burst's garbage until
// much more has been allocated, or for some minutes.
func giveBack(ctx context.Context) {
	allocated := []metrics.Sample{{Name: "/gc/heap/allocs:bytes"}}
	var before, given uint64
	for range pause.Every(ctx, giveBackEvery) {
		jpeg.TrimMemory(giveBackEvery)
		metrics.Read(allocated)
		now := allocated[0].Value.Uint64()
		if now-before < quietBytes && now-given > quietBytes {
			runtime.GC() // the first moves what lies in pools, the second frees it
			debug.FreeOSMemory()
			given = now
		}
		before = now
	}
}

const (
	// warmProcs is the least number of threads that may run Go code while nothing is fetched. A thread that waits for
	// the disk or for /dev/fuse keeps its slot for some time, and needs one when it returns. Warm epoch
	// on 2 cores beside a bare go-fuse filesystem: 0.83 and 0.90 with 2, 0.96 and 1.03 with 4 (medians of 7 rounds
	// each, lab/bench warm of that day, 2026-11-21); the ceiling itself does not change by it.
	//
	// While much is fetched it is one for each core: more threads take the cores from the readers. Cold epoch, order
	// known, on the same machine: 3,140 files/s with 2, 2,890 with 3, 2,740 with 4 (medians of 6 runs each).
	warmProcs = 4
	// procsTick is short compared with an epoch. A change stops all goroutines for about 50 µs.
	procsTick = 100 * time.Millisecond
)

// cores is what GOMAXPROCS is where adjustProcs does not change it.
var cores = runtime.GOMAXPROCS(0)

// adjustProcs sets GOMAXPROCS by what is fetched, on a machine with few cores, until ctx ends.
func adjustProcs(ctx context.Context, fetched func() int64) {
	if os.Getenv("GOMAXPROCS") != "" || cores >= warmProcs {
		return
	}
	defer runtime.GOMAXPROCS(cores)
	before, now := fetched(), warmProcs
	runtime.GOMAXPROCS(now)
	for range pause.Every(ctx, procsTick) {
		want, count := warmProcs, fetched()
		if count != before {
			want = cores
		}
		if before = count; want != now {
			now = want
			runtime.GOMAXPROCS(now)
		}
	}
}
