// Package cputime tells what processes and cores have worked.
package cputime

import (
	"fmt"

	"github.com/prometheus/procfs"
	"golang.org/x/sys/unix"
)

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

// Sum is Process of several. Those that are gone count nothing.
func Sum(pids ...int) (all float64) {
	for _, pid := range pids {
		seconds, _ := Process(pid)
		all += seconds
	}
	return all
}

// Family is Process of this one, with what the children have used that it has waited for.
func Family() (all float64) {
	for _, who := range []int{unix.RUSAGE_SELF, unix.RUSAGE_CHILDREN} {
		var used unix.Rusage
		_ = unix.Getrusage(who, &used) // there are both
		all += float64(used.Utime.Nano()+used.Stime.Nano()) / 1e9
	}
	return all
}

// Cores returns the seconds that all cores together have worked, whoever used them, since the machine's start; 0 where
// the kernel does not tell.
func Cores() (busy float64) { return cores(procfs.DefaultMountPoint) }

// cores leaves out guests, which are in user. Steal is work: it is somebody else's.
func cores(proc string) (busy float64) {
	fs, err := procfs.NewFS(proc)
	if err != nil {
		return 0
	}
	stat, err := fs.Stat()
	if err != nil {
		return 0
	}
	all := stat.CPUTotal
	return all.User + all.Nice + all.System + all.IRQ + all.SoftIRQ + all.Steal
}
