// Package machine reports how much of the machine this process may use (memory, limited by the machine and its cgroups,
// and disk), and what is mounted.
package machine

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/prometheus/procfs"
	"golang.org/x/sys/unix"
)

// Memory is the memory that this process may use, in bytes.
type Memory struct {
	Total int64 // the machine's; 0 if the kernel does not report it
	// Limit is the smallest limit of the process's cgroups, and From the file it comes from. It is 0 without a limit,
	// or without one below Total.
	Limit int64
	From  string
	// Available is the memory that the kernel could use for a page cache: the machine's MemAvailable, or less if a
	// cgroup leaves less.
	Available int64
}

// Most returns Limit, or Total without a limit.
func (m Memory) Most() int64 { return cmp.Or(m.Limit, m.Total) }

// ReadMemory reads the current values. Limits can change while a container runs.
func ReadMemory() Memory { return readMemory("/") }

func readMemory(root string) Memory {
	info := Fields(filepath.Join(root, "proc/meminfo"))
	m := Memory{Total: info["MemTotal:"] << 10, Available: info["MemAvailable:"] << 10}
	if _, told := info["MemAvailable:"]; !told {
		m.Available = 1 << 62
	}
	for _, dir := range Cgroups(root, "memory") {
		// Above memory.high a process is throttled so much that it counts as a limit, too. The last is version 1's.
		for _, name := range []string{"memory.max", "memory.high", "memory.limit_in_bytes"} {
			file := filepath.Join(dir, name)
			limit, ok := number(filepath.Join(root, file))
			if !ok || m.Total > 0 && limit >= m.Total {
				continue
			}
			if m.Limit == 0 || limit < m.Limit {
				m.Limit, m.From = limit, file
			}
			m.Available = min(m.Available, max(limit-held(filepath.Join(root, dir)), 0))
		}
	}
	return m
}

// held returns what a cgroup uses beside what the kernel can reclaim. Sources: the kernel's
// Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.
func held(dir string) int64 {
	stat := Fields(filepath.Join(dir, "memory.stat"))
	used, ok := number(filepath.Join(dir, "memory.current"))
	reclaim := stat["active_file"] + stat["inactive_file"]
	if !ok { // version 1
		used, _ = number(filepath.Join(dir, "memory.usage_in_bytes"))
		reclaim = stat["total_active_file"] + stat["total_inactive_file"]
	}
	return max(used-reclaim, 0)
}

// Cgroups returns the folders of this process's cgroups and of their visible ancestors, innermost first, that may limit
// a controller's resource ("memory", "cpu", "pids"): one cgroup of version 2, one of version 1 or, if both are mounted,
// both. root is the prefix of /proc and /sys, and not part of the results.
func Cgroups(root, controller string) (dirs []string) {
	text, _ := os.ReadFile(filepath.Join(root, "proc/self/cgroup"))
	paths := map[string]string{} // by controller; version 2 has the name ""
	for line := range strings.Lines(string(text)) {
		// hierarchy:controllers:path
		if f := strings.SplitN(strings.TrimSuffix(line, "\n"), ":", 3); len(f) == 3 {
			for _, name := range strings.Split(f[1], ",") {
				paths[name] = f[2]
			}
		}
	}
	mounts, _ := Mounts(root)
	for _, m := range mounts {
		own, found := paths[""]
		if m.Type == "cgroup" {
			own, found = paths[controller]
			found = found && strings.Contains(","+m.Super+",", ","+controller+",")
		}
		if !found || m.Type != "cgroup" && m.Type != "cgroup2" {
			continue
		}
		// Without a cgroup namespace a container sees the machine's path, and mounts its own cgroup as the root. With
		// one, a path outside of it begins with /..: then the mount itself is the nearest.
		p, below := strings.CutPrefix(own, strings.TrimSuffix(m.Root, "/"))
		if !below || p != "" && p[0] != '/' || strings.HasPrefix(own, "/..") {
			p = ""
		}
		for p = path.Clean("/" + p); p != "/"; p = path.Dir(p) {
			dirs = append(dirs, path.Join(m.Point, p))
		}
		dirs = append(dirs, m.Point)
	}
	return dirs
}

// number reads a file with one number; ok is false for "max", and for a missing file.
func number(file string) (n int64, ok bool) {
	b, _ := os.ReadFile(file)
	n, err := strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
	return n, err == nil && n >= 0
}

// Fields reads lines of a name and a number.
func Fields(file string) map[string]int64 {
	list := map[string]int64{}
	b, _ := os.ReadFile(file)
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) >= 2 {
			if n, err := strconv.ParseInt(f[1], 10, 64); err == nil {
				list[f[0]] = n
			}
		}
	}
	return list
}

// IdleCPU returns how long the processors that this process may use have been idle, apart from this process, since some
// fixed moment: use differences of two calls. Its resolution is 10 ms for each processor.
func IdleCPU() (idle time.Duration) {
	var mine unix.CPUSet
	proc, err := procfs.NewDefaultFS()
	if err != nil || unix.SchedGetaffinity(0, &mine) != nil {
		return 0
	}
	stat, err := proc.Stat()
	if err != nil {
		return 0
	}
	for n, spent := range stat.CPU {
		if mine.IsSet(int(n)) {
			idle += time.Duration((spent.Idle + spent.Iowait) * float64(time.Second))
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

// Room returns how many bytes a folder can hold, including the files in it: the space left for this user, and the
// space of the folder. The folder need not exist.
func Room(dir string) (int64, error) {
	var st syscall.Statfs_t
	at, err := dir, syscall.Statfs(dir, &st)
	for (errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR)) && at != filepath.Dir(at) {
		at = filepath.Dir(at)
		err = syscall.Statfs(at, &st)
	}
	if err != nil {
		return 0, fmt.Errorf("free space of %s: %w", at, err)
	}
	return int64(st.Bavail)*st.Bsize + taken(dir), nil
}

// taken returns the disk space of a folder's files. Unreadable files count as 0.
func taken(dir string) (n int64) {
	_ = filepath.WalkDir(dir, func(_ string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return nil //nolint:nilerr // a file removed in the meantime uses nothing
		}
		if info, err := d.Info(); err == nil {
			n += info.Sys().(*syscall.Stat_t).Blocks * 512
		}
		return nil
	})
	return n
}

// Mount is a line of /proc/self/mountinfo.
type Mount struct {
	Device string // MAJOR:MINOR
	Root   string // the mounted folder of the file system
	Point  string
	Type   string
	Source string
	Super  string // options of the file system
	Shared bool   // with other namespaces
}

// Mounts reads the mounts, in the order in which they were made: of two at one place the later one is on top. root is
// the prefix of /proc.
func Mounts(root string) ([]Mount, error) {
	b, err := os.ReadFile(filepath.Join(root, "proc/self/mountinfo"))
	return parseMounts(string(b)), err
}

// Top returns what is mounted at a path, the topmost, or nil.
func Top(mounts []Mount, path string) *Mount {
	for i, m := range slices.Backward(mounts) {
		if m.Point == path {
			return &mounts[i]
		}
	}
	return nil
}

// parseMounts parses lines as described in proc(5):
//
//	36 35 98:0 /root /point rw,noatime shared:1 master:2 - ext4 /dev/root rw
func parseMounts(text string) (list []Mount) {
	for line := range strings.Lines(text) {
		left, right, _ := strings.Cut(line, " - ")
		l, r := strings.Fields(left), strings.Fields(right)
		if len(l) < 6 || len(r) < 2 {
			continue
		}
		m := Mount{Device: l[2], Root: unescape(l[3]), Point: unescape(l[4]), Type: r[0], Source: unescape(r[1]),
			Super: strings.Join(r[2:], " ")}
		for _, o := range l[6:] {
			m.Shared = m.Shared || strings.HasPrefix(o, "shared:")
		}
		list = append(list, m)
	}
	return list
}

// unescape undoes what the kernel's mangle escapes (fs/proc_namespace.c).
var unescape = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\043`, "#", `\134`, `\`).Replace
