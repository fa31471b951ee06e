package doctor

import (
	"context"
	"fmt"
	"math"
	"runtime"
	"strconv"
	"strings"

	humanize "github.com/dustin/go-humanize"
	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/internal/machine"
)

func (o *Options) limitChecks() []Check {
	m := o.machine
	return []Check{
		{Area: "limits", Name: "files", Run: func(context.Context) Result { return openFiles(m) }},
		{Area: "limits", Name: "memlock", Run: func(context.Context) Result { return memlock(m) }},
		{Area: "limits", Name: "processes", Run: func(context.Context) Result { return processes(m) }},
		{Area: "limits", Name: "memory", Run: func(context.Context) Result { return memory(m, o.Memory) }},
		{Area: "limits", Name: "cpu", Run: func(context.Context) Result { return cpu(m, runtime.NumCPU()) }},
		{Area: "limits", Name: "load", Run: func(context.Context) Result { return load(m, runtime.NumCPU()) }},
	}
}

// wantFiles is enough for 512 connections, segments, mounts and clients together.
const wantFiles = 4096

func openFiles(m *Machine) Result {
	n, err := m.Limit(unix.RLIMIT_NOFILE)
	if err != nil {
		return skipped("getrlimit: %s", err)
	}
	r := ok("%s open files (the hard limit, which Go uses)", limitText(n)).with("open_files", float64(n))
	if n < wantFiles {
		return r.because(Warn, "512 connections, segments and readers together may need more", "ulimit -n 65536, LimitNOFILE=65536 in a systemd unit, docker run --ulimit nofile=65536:65536")
	}
	return r
}

func limitText(n uint64) string {
	if n > math.MaxInt64 {
		return "unlimited"
	}
	return humanize.Comma(int64(n))
}

// wantMemlock is the kernel's own default since 5.16.
const wantMemlock = 8 << 20

func memlock(m *Machine) Result {
	n, err := m.Limit(unix.RLIMIT_MEMLOCK)
	if err != nil {
		return skipped("getrlimit: %s", err)
	}
	text := "unlimited"
	if n <= math.MaxInt64 {
		text = humanize.IBytes(n)
	}
	r := ok("%s may be locked", text)
	if n < wantMemlock {
		return r.because(Warn, "Shoal locks nothing, but drivers that pin a trainer's buffers (RDMA, some of CUDA's) may refuse to", "ulimit -l unlimited, docker run --ulimit memlock=-1")
	}
	return r
}

// wantProcesses counts threads: those of Go, and of a loader's workers.
const wantProcesses = 500

func processes(m *Machine) Result {
	left, from := int64(math.MaxInt64), ""
	if n, err := m.Limit(unix.RLIMIT_NPROC); err == nil && n <= math.MaxInt64 {
		left, from = int64(n), "ulimit -u"
	}
	for _, dir := range machine.Cgroups(m.path("/"), "pids") {
		if limit, limited := m.number(dir + "/pids.max"); limited {
			current, _ := m.number(dir + "/pids.current")
			if limit-current < left {
				left, from = limit-current, "the cgroup's pids.max less running processes"
			}
		}
	}
	if left == math.MaxInt64 {
		return ok("no limit")
	}
	r := ok("%s processes and threads more (%s)", humanize.Comma(left), from)
	if left < wantProcesses {
		return r.because(Warn, "loader workers and the daemon's threads may not start", "docker run --pids-limit -1, podPidsLimit of the kubelet, TasksMax=infinity in a systemd unit")
	}
	return r
}

// unlimitedV1 is above every limit, since version 1 reports no limit as a huge number.
const unlimitedV1 = 1 << 60

// memoryLimit returns the smallest limit of the process's cgroups; 0 for none.
func (m *Machine) memoryLimit() (limit, used int64) {
	for _, dir := range machine.Cgroups(m.path("/"), "memory") {
		for _, f := range [][2]string{{"memory.max", "memory.current"}, {"memory.limit_in_bytes", "memory.usage_in_bytes"}} {
			n, limited := m.number(dir + "/" + f[0])
			if limited && n < unlimitedV1 && (limit == 0 || n < limit) {
				limit = n
				used, _ = m.number(dir + "/" + f[1])
			}
		}
	}
	return limit, used
}

func memory(m *Machine, want int64) Result {
	kib := func(name string) int64 {
		text, _ := m.field("/proc/meminfo", name)
		n, _ := strconv.ParseInt(strings.TrimSuffix(text, " kB"), 10, 64)
		return n << 10
	}
	total, available := kib("MemTotal"), kib("MemAvailable")
	if total == 0 {
		return skipped("/proc/meminfo cannot be read")
	}
	limit, used := m.memoryLimit()
	r := ok("%s, %s available; no cgroup limit", humanize.IBytes(uint64(total)), humanize.IBytes(uint64(available)))
	room, by := available, "the machine"
	if limit > 0 && limit < total {
		r = ok("cgroup limit %s, %s used (page cache included); machine %s, %s available", humanize.IBytes(uint64(limit)), humanize.IBytes(uint64(max(used, 0))), humanize.IBytes(uint64(total)), humanize.IBytes(uint64(available)))
		if limit < room {
			room, by = limit, "the cgroup"
		}
	}
	r = r.with("memory_room_bytes", float64(room))
	flag := func(n int64) string { return fmt.Sprintf("--memory %dMiB", max(n>>20, LeastMemory)) }
	kills := int64(0)
	for _, dir := range machine.Cgroups(m.path("/"), "memory") {
		kills = max(kills, m.numbers(dir + "/memory.events")["oom_kill"])
	}
	switch {
	case room < want:
		return r.because(Fail, fmt.Sprintf("--memory %s is more than %s has: the daemon would be killed, or the trainer", humanize.IBytes(uint64(want)), by), "shoal mount "+flag(room/2)+" ...")
	case kills > 0:
		return r.because(Warn, fmt.Sprintf("the kernel has killed %d processes of this cgroup for its memory", kills), "raise the limit, or lower --memory ("+flag(want/2)+")")
	case room < want*3/2:
		return r.because(Warn, fmt.Sprintf("--memory %s leaves little for the trainer and the page cache", humanize.IBytes(uint64(want))), "shoal mount "+flag(room/3)+" ...")
	}
	return r
}

// LeastMemory is the least memory with which a daemon starts, in MiB.
const LeastMemory = 107

func cpu(m *Machine, cores int) Result {
	quota := machine.CPUQuota(m.path("/"))
	var periods, throttled int64
	for _, dir := range machine.Cgroups(m.path("/"), "cpu") {
		if s := m.numbers(dir + "/cpu.stat"); s["nr_periods"] > periods {
			periods, throttled = s["nr_periods"], s["nr_throttled"]
		}
	}
	have := float64(cores)
	r := ok("%d cores, no quota", cores)
	if quota > 0 {
		have = min(quota, have)
		r = ok("%d cores, cgroup quota %.2f", cores, quota)
	}
	r = r.with("cores", have)
	if periods > 0 && throttled > 0 {
		share := float64(throttled) / float64(periods)
		r.Measured += fmt.Sprintf(", throttled in %.1f%% of %s periods", 100*share, humanize.Comma(periods))
		if share > 0.05 {
			return r.because(Warn, "the kernel throttles this cgroup: reads wait for a core, not for the store", "raise the CPU limit (resources.limits.cpu, docker run --cpus), or remove it")
		}
	}
	if have < 2 {
		return r.because(Warn, "one core serves about 7,000 files/s at best, and must decode as well", "give the daemon 2 cores or more")
	}
	return r
}

func load(m *Machine, cores int) Result {
	text, err := m.read("/proc/loadavg")
	if err != nil {
		return skipped("/proc/loadavg cannot be read: %s", cause(err))
	}
	n, err := strconv.ParseFloat(strings.Fields(text + " ?")[0], 64)
	if err != nil {
		return skipped("/proc/loadavg is %q", text)
	}
	r := ok("load %.1f on %d cores", n, cores)
	if n > 2*float64(cores) {
		return r.because(Warn, "other processes use the cores: the rates below are lower than the machine's", "top -o %CPU, and run shoal doctor again when the machine is idle")
	}
	return r
}
