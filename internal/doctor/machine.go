package doctor

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"runtime"

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
	for _, m := range all {
		found := make(chan error, 1)
		go func() { found <- unix.Stat(m.Point, new(unix.Stat_t)) }()
		var dead error
		select {
		case dead = <-found:
		case <-ctx.Done():
			dead = ctx.Err()
		}
		if dead != nil {
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
		return fmt.Errorf("%s: %w", d.Dir, err)
	}
	d.Type = int64(uint32(st.Type))
	d.Room, err = machine.Room(p.CacheDir)
	return err
}
