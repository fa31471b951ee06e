package main

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync/atomic"

	"github.com/shoalfs/shoal/cache"
	"github.com/shoalfs/shoal/engine"
	"github.com/shoalfs/shoal/fusefs"
)

// door joins the engine to the mount: it is fusefs.Volume and fusefs.Control.
type door struct {
	*engine.Engine
	server atomic.Pointer[fusefs.Server]
}

// Reserve implements fusefs.Memory: staged plans are the ledger's too.
func (d *door) Reserve(n int64) bool { return d.Engine.Reserve(n) }

// Release implements fusefs.Memory.
func (d *door) Release(n int64) { d.Ledger().Release(n, cache.ForDemand) }

// Refresh implements fusefs.Control.
func (d *door) Refresh(ctx context.Context) error {
	changed, err := d.Engine.Refresh(ctx)
	if err != nil || !changed {
		return err
	}
	if s := d.server.Load(); s != nil {
		s.Invalidate()
	}
	return nil
}

// octal is a flag value such as 022.
type octal uint32

func (o *octal) String() string { return fmt.Sprintf("%03o", uint32(*o)) }
func (o *octal) Type() string   { return "octal" }
func (o *octal) Set(text string) error {
	n, err := strconv.ParseUint(text, 8, 12)
	if err != nil {
		return fmt.Errorf("%q is not an octal mode such as 022", text)
	}
	*o = octal(n)
	return nil
}

// availableMemory returns the memory that the kernel could use for a page cache: what is available
// on the machine, or less where a cgroup limits it.
func availableMemory() int64 {
	avail := int64(1) << 62
	if b, err := os.ReadFile("/proc/meminfo"); err == nil {
		for line := range strings.Lines(string(b)) {
			if rest, ok := strings.CutPrefix(line, "MemAvailable:"); ok {
				if kib, err := strconv.ParseInt(strings.Fields(rest)[0], 10, 64); err == nil {
					avail = kib << 10
				}
			}
		}
	}
	for _, path := range []string{"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"} {
		if b, err := os.ReadFile(path); err == nil {
			if n, err := strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64); err == nil {
				avail = min(avail, n)
			}
		}
	}
	return avail
}
