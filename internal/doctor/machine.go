package doctor

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/fusefs"
	"github.com/shoalfs/shoal/internal/findings"
	"github.com/shoalfs/shoal/internal/machine"
)

const feedOnly = findings.Skip("--feed-only: nothing will be mounted")

func (p *patient) device(context.Context) error {
	if p.FeedOnly {
		return feedOnly
	}
	p.facts.Device = fusefs.MayMount(fusefs.Options{})
	return nil
}

// mounts looks for mounts of Shoal's whose daemon is gone: they refuse, or never answer.
func (p *patient) mounts(ctx context.Context) error {
	if p.FeedOnly {
		return feedOnly
	}
	all, err := fusefs.Mounts()
	if p.Pod && err == nil {
		every, _ := machine.Mounts("/")
		p.facts.Private = !slices.ContainsFunc(every, func(m machine.Mount) bool { return m.Shared })
	}
	found := make([]chan error, len(all))
	for i, m := range all { // all at once: one that hangs takes none of the others' time
		found[i] = make(chan error, 1)
		go func() { found[i] <- unix.Statfs(m.Point, new(unix.Statfs_t)) }() // the kernel may answer a stat itself
	}
	for i, m := range all {
		var dead error
		select {
		case dead = <-found[i]:
		case <-ctx.Done():
			if dead = ctx.Err(); len(found[i]) > 0 {
				dead = <-found[i]
			}
		}
		if dead != nil && !errors.Is(dead, unix.EACCES) { // another user's
			p.facts.Dead = append(p.facts.Dead, m.Point)
		} else {
			p.facts.Live = append(p.facts.Live, m.Point)
		}
	}
	return err
}

func (p *patient) limits(context.Context) error {
	l := &p.facts.Limits
	l.Memory, l.Want = machine.ReadMemory(), p.Memory
	l.Cores, l.Quota = runtime.NumCPU(), machine.CPUQuota("/")
	for _, dir := range machine.Cgroups("/", "cpu") {
		if stat := machine.Fields(dir + "/cpu.stat"); stat["nr_periods"] > l.Periods {
			l.Periods, l.Throttled = stat["nr_periods"], stat["nr_throttled"]
		}
	}
	var info unix.Sysinfo_t
	err := unix.Sysinfo(&info)
	l.Load = float64(info.Loads[0]) / (1 << 16)
	return err
}

func (p *patient) filesystem(context.Context) (err error) {
	d := &p.facts.Disk
	d.Dir, d.Want = p.CacheDir, p.CacheSize
	var st unix.Statfs_t
	for err = unix.Statfs(d.Dir+"/.", &st); errors.Is(err, unix.ENOENT); err = unix.Statfs(d.Dir+"/.", &st) {
		d.Dir = filepath.Dir(d.Dir) // the root exists
	}
	if err != nil {
		return fmt.Errorf("%s: %w (give another --cache-dir)", d.Dir, err)
	}
	d.Type = int64(uint32(st.Type))
	d.Room, err = machine.Room(p.CacheDir)
	return err
}

const (
	readers   = 8
	diskBlock = readers * findings.RandomRead
	diskFile  = 256 << 20 // the most bytes to write
)

// speed writes a file without a name, so that nothing can stay behind, and reads it. The window bounds each of the two.
func (p *patient) speed(ctx context.Context) error {
	d, window := &p.facts.Disk, 2*p.window
	f, err := os.CreateTemp(d.Dir, ".shoal-doctor-*")
	if err != nil {
		return fmt.Errorf("cannot create a file: %w", err)
	}
	defer f.Close()
	_ = os.Remove(f.Name())
	// Set O_DIRECT on the open descriptor; tmpfs and others refuse.
	flags, err := unix.FcntlInt(f.Fd(), unix.F_GETFL, 0)
	if err == nil {
		_, err = unix.FcntlInt(f.Fd(), unix.F_SETFL, flags|unix.O_DIRECT)
	}
	d.Direct = err == nil
	block := aligned(diskBlock)
	for i := range block {
		block[i] = byte(rand.Uint32()) // compressible data would be written faster
	}
	began, written := time.Now(), int64(0)
	// At least one, here and in readRate: on a busy machine the window may be over before the first.
	for written == 0 || written < diskFile && time.Since(began) < window && ctx.Err() == nil {
		if _, err = f.WriteAt(block, written); err != nil {
			break
		}
		written += diskBlock
	}
	if written == 0 {
		return fmt.Errorf("writing in %s: %w", d.Dir, err)
	}
	if err := f.Sync(); err != nil {
		return fmt.Errorf("fsync in %s: %w", d.Dir, err)
	}
	d.Write = float64(written) / time.Since(began).Seconds()
	if !d.Direct { // reads must not come from the page cache
		_ = unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED)
	}
	d.Random = readRate(ctx, f, written, window, block)
	return nil
}

func aligned(n int) []byte {
	const page = 4096
	b := make([]byte, n+page)
	at := int(-uintptr(unsafe.Pointer(&b[0])) & (page - 1))
	return b[at : at+n : at+n]
}

// readRate reads at random of a file of n bytes, each reader into its part of the block. It returns bytes a second.
func readRate(ctx context.Context, f *os.File, n int64, window time.Duration, block []byte) float64 {
	var done atomic.Int64
	var wg sync.WaitGroup
	began := time.Now()
	for i := range readers {
		wg.Go(func() {
			into := block[i*findings.RandomRead:][:findings.RandomRead]
			for first := true; first || time.Since(began) < window && ctx.Err() == nil; first = false {
				if _, err := f.ReadAt(into, rand.Int64N(n/findings.RandomRead)*findings.RandomRead); err != nil {
					return
				}
				done.Add(findings.RandomRead)
			}
		})
	}
	wg.Wait()
	return float64(done.Load()) / max(time.Since(began).Seconds(), 1e-6)
}
