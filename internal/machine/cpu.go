package machine

import (
	"bufio"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// IdleCPU returns how long the processors that this process may use have been idle, apart from this process, since some
// fixed moment: use differences of two calls. Its resolution is 10 ms for each processor.
func IdleCPU() (idle time.Duration) {
	var mine unix.CPUSet
	if unix.SchedGetaffinity(0, &mine) != nil {
		return 0
	}
	f, err := os.Open("/proc/stat")
	if err != nil {
		return 0
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		// cpuN user nice system idle iowait ..., in hundredths of a second
		fields := strings.Fields(lines.Text())
		if len(fields) < 6 || !strings.HasPrefix(fields[0], "cpu") {
			continue
		}
		if n, err := strconv.Atoi(fields[0][3:]); err != nil || !mine.IsSet(n) {
			continue
		}
		for _, ticks := range fields[4:6] {
			n, _ := strconv.ParseInt(ticks, 10, 64)
			idle += time.Duration(n) * 10 * time.Millisecond
		}
	}
	var own syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &own) == nil {
		idle += time.Duration(own.Utime.Nano() + own.Stime.Nano())
	}
	return idle
}

// CPUQuota returns the number of cores that this process's cgroups allow, the smallest of them; 0 without a quota. root
// is the prefix of /proc and /sys.
func CPUQuota(root string) (cores float64) {
	for _, dir := range Cgroups(root, "cpu") {
		file := func(name string) string {
			b, _ := os.ReadFile(filepath.Join(root, dir, name))
			return strings.TrimSpace(string(b))
		}
		quota, period, _ := strings.Cut(file("cpu.max"), " ") // version 2: "QUOTA PERIOD", "max" for none
		if quota == "" {
			quota, period = file("cpu.cfs_quota_us"), file("cpu.cfs_period_us") // version 1: -1 for none
		}
		q, err := strconv.ParseFloat(quota, 64)
		p, periodErr := strconv.ParseFloat(period, 64)
		if err == nil && periodErr == nil && q > 0 && p > 0 && (cores == 0 || q/p < cores) {
			cores = q / p
		}
	}
	return cores
}
