package main

import (
	"context"
	"os"
	"runtime"
	"time"

	"github.com/shoalfs/shoal/internal/pause"
)

const (
	// warmProcs is the least number of threads that may run Go code while nothing is fetched. A thread that waits for
	// the disk or for /dev/fuse keeps its slot for some time, and needs one when it returns. Warm epoch
	// on 2 cores beside a bare go-fuse filesystem: 0.83 and 0.90 with 2, 0.96 and 1.03 with 4 (medians of 7 rounds
	// each, lab/bench warm of that day, 2026-11-21); the ceiling itself does not change by it.
	//
	// While much is fetched it is one for each core: more threads take the cores from the readers. Cold
	// epoch, order known, on the same machine: 3,140 files/s with 2, 2,890 with 3, 2,740 with 4 (medians of
	// 6 runs each).
	warmProcs = 4
	// procsTick is short compared with an epoch. A change stops all goroutines for about 50 µs.
	procsTick = 100 * time.Millisecond
)

// adjustProcs sets GOMAXPROCS by the daemon's activity, on a machine with few cores, until ctx ends. fetched returns the
// amount fetched so far.
func adjustProcs(ctx context.Context, fetched func() int64) {
	cores := runtime.GOMAXPROCS(0)
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
