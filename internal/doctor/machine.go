package doctor

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/internal/machine"
)

// Machine is the checks' view of the machine. Tests replace / by a folder, and the kernel's answers by their own. The
// zero value of a field is the real machine.
type Machine struct {
	Root     string // prefix of /proc, /sys, /etc, /dev and LookPath's results; "" is the real machine
	UID      func() int
	Getenv   func(name string) string
	OpenRW   func(path string) error // opens a device for reading and writing, and closes it
	LookPath func(name string) (string, error)
	Limit    func(resource int) (hard uint64, err error)
	Statfs   func(path string) (unix.Statfs_t, error)
	// Command runs a program and returns its output.
	Command func(ctx context.Context, name string, args ...string) (string, error)
	// Dial reports whether a process listens on a unix socket.
	Dial func(path string) error
}

// fill sets the missing fields.
func (m Machine) fill() *Machine {
	if m.UID == nil {
		m.UID = os.Geteuid
	}
	if m.Getenv == nil {
		m.Getenv = os.Getenv
	}
	if m.OpenRW == nil {
		m.OpenRW = func(path string) error {
			fd, err := unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC, 0)
			if err == nil {
				err = unix.Close(fd)
			}
			return err
		}
	}
	if m.LookPath == nil {
		m.LookPath = exec.LookPath
	}
	if m.Limit == nil {
		m.Limit = func(resource int) (uint64, error) {
			var l unix.Rlimit
			err := unix.Getrlimit(resource, &l)
			return l.Max, err
		}
	}
	if m.Statfs == nil {
		m.Statfs = func(path string) (s unix.Statfs_t, err error) {
			err = unix.Statfs(path, &s)
			return s, err
		}
	}
	if m.Command == nil {
		m.Command = func(ctx context.Context, name string, args ...string) (string, error) {
			c := exec.CommandContext(ctx, name, args...)
			out, err := c.Output()
			var failed *exec.ExitError
			if errors.As(err, &failed) && len(failed.Stderr) > 0 {
				err = errors.New(lastLine(string(failed.Stderr)))
			}
			return string(out), err
		}
	}
	if m.Dial == nil {
		m.Dial = dialUnix
	}
	return &m
}

func lastLine(text string) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return strings.TrimSpace(lines[len(lines)-1])
}

func (m *Machine) path(path string) string { return filepath.Join(m.Root, path) }

// read returns the content of a small file, without surrounding spaces.
func (m *Machine) read(path string) (string, error) {
	b, err := os.ReadFile(m.path(path))
	return strings.TrimSpace(string(b)), err
}

// has reports whether the path exists.
func (m *Machine) has(path string) bool {
	_, err := os.Lstat(m.path(path))
	return err == nil
}

// field returns the text after "name:" on a line of a file such as /proc/self/status.
func (m *Machine) field(path, name string) (string, bool) {
	text, err := m.read(path)
	if err != nil {
		return "", false
	}
	for line := range strings.Lines(text) {
		if k, v, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(k) == name {
			return strings.TrimSpace(v), true
		}
	}
	return "", false
}

// number reads a decimal file; ok is false for "max" and for a missing file.
func (m *Machine) number(path string) (int64, bool) {
	text, err := m.read(path)
	if err != nil {
		return 0, false
	}
	n, err := strconv.ParseInt(text, 10, 64)
	return n, err == nil
}

// numbers reads lines of a name and a number, such as cpu.stat.
func (m *Machine) numbers(path string) map[string]int64 {
	text, err := m.read(path)
	if err != nil {
		return nil
	}
	all := map[string]int64{}
	for line := range strings.Lines(text) {
		f := strings.Fields(line)
		if len(f) != 2 {
			continue
		}
		if n, err := strconv.ParseInt(f[1], 10, 64); err == nil {
			all[f[0]] = n
		}
	}
	return all
}

// container names the container that the process runs in, "" if it seems to be in none.
func (m *Machine) container() string {
	switch {
	case m.Getenv("KUBERNETES_SERVICE_HOST") != "":
		return "Kubernetes"
	case m.has("/run/.containerenv"):
		return "Podman"
	case m.has("/.dockerenv"):
		return "Docker"
	}
	if text, err := m.read("/proc/self/cgroup"); err == nil {
		for _, mark := range []string{"kubepods", "docker", "containerd", "libpod", "lxc"} {
			if strings.Contains(text, mark) {
				return mark
			}
		}
	}
	return ""
}

// capability reports whether the process has one, by its number in linux/capability.h.
func (m *Machine) capability(number uint) (has, known bool) {
	text, ok := m.field("/proc/self/status", "CapEff")
	if !ok {
		return false, false
	}
	set, err := strconv.ParseUint(text, 16, 64)
	return set>>number&1 != 0, err == nil
}

const capSysAdmin = 21

// mounts returns the mounts, in the order in which they were made.
func (m *Machine) mounts() ([]machine.Mount, error) { return machine.Mounts(m.path("/")) }

// on returns the mount that contains a path.
func on(all []machine.Mount, path string) (best machine.Mount) {
	for _, e := range all {
		if within(path, e.Point) && len(e.Point) >= len(best.Point) {
			best = e
		}
	}
	return best
}

func within(path, folder string) bool {
	return folder == "/" || path == folder || strings.HasPrefix(path, strings.TrimSuffix(folder, "/")+"/")
}

// existing returns the nearest existing folder at or above the path.
func existing(path string) (string, error) {
	for {
		fi, err := os.Stat(path)
		switch {
		case err == nil && fi.IsDir():
			return path, nil
		case err == nil:
			return "", &fs.PathError{Op: "open", Path: path, Err: unix.ENOTDIR}
		case !errors.Is(err, fs.ErrNotExist):
			return "", err
		}
		parent := filepath.Dir(path)
		if parent == path {
			return "", err
		}
		path = parent
	}
}
