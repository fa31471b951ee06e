package main

import (
	"context"
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

// usesNative gives the C code of pictures its part of --memory. A mount that neither recodes nor restores leaves it to
// the ledger.
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
