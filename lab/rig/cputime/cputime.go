// Package cputime tells what processes and cores have worked.
package cputime

import (
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// hertz is what /proc counts processor time in, on every Linux that Go supports.
const hertz = 100

// Process returns the seconds of processor time, user and system, that a process has used in all its threads, those
// that have ended included; 0 with an error if it is gone. It reads the process's clock (clock_getcpuclockid(3)), which
// counts nanoseconds: /proc/PID/stat counts ticks of 10 ms, as much as a hundred warm files take.
func Process(pid int) (float64, error) {
	const (
		sched = 2       // CPUCLOCK_SCHED of linux/posix-timers_types.h
		most  = 1 << 22 // PID_MAX_LIMIT of linux/threads.h
	)
	if pid > most {
		return 0, fmt.Errorf("processor time of process %d: %w", pid, unix.ESRCH)
	}
	var t unix.Timespec
	if err := unix.ClockGettime(int32(^pid<<3|sched), &t); err != nil {
		return 0, fmt.Errorf("processor time of process %d: %w", pid, err)
	}
	return float64(t.Nano()) / 1e9, nil
}

// Own is Process of this one.
func Own() float64 { return Sum(os.Getpid()) }

// Sum is Process of several. Those that are gone count nothing.
func Sum(pids ...int) (all float64) {
	for _, pid := range pids {
		seconds, _ := Process(pid)
		all += seconds
	}
	return all
}

// Family is Process with what the children have used that the process has waited for, in ticks of 10 ms.
func Family(pid int) (float64, error) {
	own, err := Process(pid)
	if err != nil {
		return 0, err
	}
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	// Behind the command, which may hold spaces and parentheses: field 3 of proc(5) is the state, 16 and 17 are
	// cutime and cstime.
	f := strings.Fields(string(b[strings.LastIndexByte(string(b), ')')+1:]))
	if len(f) < 15 {
		return 0, fmt.Errorf("/proc/%d/stat: %q", pid, b)
	}
	return own + seconds(f, 13, 14), nil
}

// Cores returns the seconds that all cores together have worked, whoever used them, and have idled, since the
// machine's start; 0 where the kernel does not tell.
func Cores() (busy, idle float64) {
	b, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0, 0
	}
	return parseCores(string(b))
}

// parseCores reads the first line of /proc/stat: cpu, user, nice, system, idle, iowait, irq, softirq, steal, and
// guests, which are in user. Steal is work: it is somebody else's.
func parseCores(stat string) (busy, idle float64) {
	line, _, _ := strings.Cut(stat, "\n")
	f := strings.Fields(line)
	return seconds(f, 1, 2, 3, 6, 7, 8), seconds(f, 4, 5)
}

// seconds sums fields that count ticks.
func seconds(fields []string, at ...int) float64 {
	var ticks float64
	for _, i := range at {
		if i < len(fields) {
			v, _ := strconv.ParseFloat(fields[i], 64)
			ticks += v
		}
	}
	return ticks / hertz
}
