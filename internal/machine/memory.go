// Package machine reports how much of the machine this process may use (memory, limited by the machine and its cgroups,
// and disk), and what is mounted.
package machine

import (
	"bufio"
	"bytes"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"
)

// Memory is the memory that this process may use, in bytes.
type Memory struct {
	// Total is the machine's; 0 if the kernel does not report it.
	Total int64
	// Limit is the smallest limit of the process's cgroups, and From the file it comes from. It is 0 without a limit,
	// or without one below Total.
	Limit int64
	From  string
	// Available is the memory that the kernel could use for a page cache: the machine's MemAvailable, or less if a
	// cgroup leaves less.
	Available int64
}

// Most returns Limit, or Total without a limit.
func (m Memory) Most() int64 {
	if m.Limit > 0 {
		return m.Limit
	}
	return m.Total
}

// ReadMemory reads the current values. Limits can change while a container runs.
func ReadMemory() Memory { return readMemory("/") }

// cgroupFiles are the names of a cgroup's files, by version of cgroups. Sources: the kernel's
// Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.
type cgroupFiles struct {
	limits  []string
	usage   string
	reclaim []string // lines of memory.stat with reclaimable bytes
}

var (
	// Above memory.high a process is throttled so much that it counts as a limit, too.
	version2 = cgroupFiles{[]string{"memory.max", "memory.high"}, "memory.current",
		[]string{"active_file", "inactive_file"}}
	version1 = cgroupFiles{[]string{"memory.limit_in_bytes"}, "memory.usage_in_bytes",
		[]string{"total_active_file", "total_inactive_file"}}
)

func readMemory(root string) Memory {
	info := Fields(filepath.Join(root, "proc/meminfo"))
	m := Memory{Total: info["MemTotal:"] << 10, Available: info["MemAvailable:"] << 10}
	if _, told := info["MemAvailable:"]; !told {
		m.Available = 1 << 62
	}
	for _, g := range cgroups(root, "memory") {
		g.walk(func(dir string) {
			for _, name := range g.files.limits {
				file := filepath.Join(dir, name)
				limit, ok := number(filepath.Join(root, file))
				if !ok || m.Total > 0 && limit >= m.Total {
					continue
				}
				if m.Limit == 0 || limit < m.Limit {
					m.Limit, m.From = limit, file
				}
				used, _ := number(filepath.Join(root, dir, g.files.usage))
				stat := Fields(filepath.Join(root, dir, "memory.stat"))
				for _, line := range g.files.reclaim {
					used -= stat[line]
				}
				m.Available = min(m.Available, max(limit-max(used, 0), 0))
			}
		})
	}
	return m
}

type cgroup struct {
	files cgroupFiles
	mount string // where its hierarchy is mounted
	path  string // below
}

// walk calls do for the cgroup and its ancestors, as far as they are visible.
func (g cgroup) walk(do func(dir string)) {
	for p := path.Clean("/" + g.path); ; p = path.Dir(p) {
		do(path.Join(g.mount, p))
		if p == "/" {
			return
		}
	}
}

// Cgroups returns the folders of this process's cgroup and of its ancestors, innermost first, that may limit a
// controller's resource ("memory", "cpu", "pids"). root is the prefix of /proc and /sys, and not part of the
// results.
func Cgroups(root, controller string) (dirs []string) {
	for _, g := range cgroups(root, controller) {
		g.walk(func(dir string) { dirs = append(dirs, dir) })
	}
	return dirs
}

// cgroups returns the cgroups of this process that can limit a controller's resource: one of version 2, one of version
// 1 or, if both are mounted, both.
func cgroups(root, controller string) (list []cgroup) {
	own, err := os.ReadFile(filepath.Join(root, "proc/self/cgroup"))
	if err != nil {
		return nil
	}
	paths := map[string]string{} // by controller; version 2 has the name ""
	for line := range strings.Lines(string(own)) {
		// hierarchy:controllers:path
		if f := strings.SplitN(strings.TrimSuffix(line, "\n"), ":", 3); len(f) == 3 {
			for _, name := range strings.Split(f[1], ",") {
				paths[name] = f[2]
			}
		}
	}
	mounts, _ := Mounts(root)
	for _, m := range mounts {
		g := cgroup{files: version2, mount: m.Point}
		own, found := paths[""]
		switch m.Type {
		case "cgroup2":
		case "cgroup":
			own, found = paths[controller]
			found = found && strings.Contains(","+m.Super+",", ","+controller+",")
			g.files = version1
		default:
			continue
		}
		if !found {
			continue
		}
		// Without a cgroup namespace a container sees the machine's path, and mounts its own cgroup as the root. With
		// one, a path outside of it begins with /..: then the mount itself is the nearest.
		if rest, below := strings.CutPrefix(own, strings.TrimSuffix(m.Root, "/")); below &&
			(rest == "" || rest[0] == '/') {
			g.path = rest
		}
		if strings.HasPrefix(own, "/..") {
			g.path = ""
		}
		list = append(list, g)
	}
	return list
}

// number reads a file with one number; ok is false for "max", and for a missing file.
func number(file string) (n int64, ok bool) {
	b, err := os.ReadFile(file)
	if err != nil {
		return 0, false
	}
	n, err = strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
	return n, err == nil && n >= 0
}

// Fields reads lines of a name and a number.
func Fields(file string) map[string]int64 {
	list := map[string]int64{}
	b, err := os.ReadFile(file)
	if err != nil {
		return list
	}
	for lines := bufio.NewScanner(bytes.NewReader(b)); lines.Scan(); {
		if f := strings.Fields(lines.Text()); len(f) >= 2 {
			if n, err := strconv.ParseInt(f[1], 10, 64); err == nil {
				list[f[0]] = n
			}
		}
	}
	return list
}
