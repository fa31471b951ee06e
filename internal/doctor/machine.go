package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/internal/findings"
	"github.com/shoalfs/shoal/internal/machine"
)

// patient is a machine under examination.
type patient struct {
	Options
	facts  findings.Machine
	window time.Duration // of a measurement
}

// steps gathers a machine's facts.
func (p *patient) steps() map[string]step {
	steps := map[string]step{
		"fuse/device": {0, p.device}, "fuse/mounts": {0, p.mounts}, "limits/machine": {0, p.limits},
		"disk/filesystem": {0, p.filesystem}, "disk/speed": {4 * p.window, p.speed},
	}
	if p.FeedOnly {
		skip := step{0, func(context.Context) error { return findings.Skip("--feed-only: nothing will be mounted") }}
		steps["fuse/device"], steps["fuse/mounts"] = skip, skip
	}
	return steps
}

// read returns the content of a small file, without surrounding spaces.
func read(path string) string {
	b, _ := os.ReadFile(path)
	return strings.TrimSpace(string(b))
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

func (p *patient) device(context.Context) error {
	fd, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err == nil {
		err = unix.Close(fd)
	}
	p.facts.Device = err
	cgroup := read("/proc/self/cgroup")
	p.facts.Container = os.Getenv("KUBERNETES_SERVICE_HOST") != "" || exists("/.dockerenv") ||
		exists("/run/.containerenv") ||
		strings.Contains(cgroup, "kubepods") || strings.Contains(cgroup, "docker") || strings.Contains(cgroup, "containerd")
	return nil
}

// mounts looks for mounts of Shoal's whose daemon is gone: they refuse, or never answer.
func (p *patient) mounts(ctx context.Context) error {
	all, err := machine.Mounts("/")
	for _, m := range all {
		if m.Type != "fuse.shoal" {
			continue
		}
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
	first, _, _ := strings.Cut(read("/proc/loadavg"), " ")
	l.Load, _ = strconv.ParseFloat(first, 64)
	for _, dir := range machine.Cgroups("/", "cpu") {
		var periods, throttled int64
		for line := range strings.Lines(read(dir + "/cpu.stat")) {
			_, _ = fmt.Sscanf(line, "nr_periods %d", &periods)
			_, _ = fmt.Sscanf(line, "nr_throttled %d", &throttled)
		}
		if periods > l.Periods {
			l.Periods, l.Throttled = periods, throttled
		}
	}
	return nil
}

// existing returns the nearest existing folder at or above the path.
func existing(path string) (string, error) {
	for {
		fi, err := os.Stat(path)
		switch {
		case err == nil && fi.IsDir():
			return path, nil
		case err == nil:
			return "", fmt.Errorf("%s: %w", path, unix.ENOTDIR)
		case !errors.Is(err, fs.ErrNotExist) || path == "/":
			return "", err
		}
		path = filepath.Dir(path)
	}
}

func (p *patient) filesystem(context.Context) (err error) {
	d := &p.facts.Disk
	if d.Dir, err = existing(p.CacheDir); err != nil {
		return err
	}
	if d.Room, err = machine.Room(p.CacheDir); err != nil {
		return err
	}
	var st unix.Statfs_t
	err = unix.Statfs(d.Dir, &st)
	d.Type, d.Want = int64(uint32(st.Type)), p.CacheSize
	return err
}
