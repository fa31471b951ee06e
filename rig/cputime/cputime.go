// Package cputime reads from /proc what processes and cores have worked.
package cputime

import (
	"fmt"
	"os"
	"strconv"
	"strings"
)

// hertz is what /proc counts processor time in, on every Linux that Go supports.
const hertz = 100

// Process returns the seconds of processor time, user and system, that a process has used in all its threads; 0
// with an error if it is gone.
func Process(pid int) (float64, error) {
	own, _, err := process(pid)
	return own, err
}

// Family is Process with what the children have used that the process has waited for.
func Family(pid int) (float64, error) {
	own, children, err := process(pid)
	return own + children, err
}

func process(pid int) (own, children float64, err error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, 0, err
	}
	// Behind the command, which may hold spaces and parentheses: field 3 of proc(5) is the state, 14 to 17 are
	// utime, stime, cutime and cstime.
	f := strings.Fields(string(b[strings.LastIndexByte(string(b), ')')+1:]))
	if len(f) < 15 {
		return 0, 0, fmt.Errorf("/proc/%d/stat: %q", pid, b)
	}
	return seconds(f, 11, 12), seconds(f, 13, 14), nil
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
