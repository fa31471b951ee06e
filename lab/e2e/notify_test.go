package e2e

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/lab/rig/proxy"
)

// manager is the service manager's end of sd_notify(3): it keeps what comes and who sent it.
type manager struct {
	socket string

	mu    sync.Mutex
	lines []managerLine
}

type managerLine struct {
	pid  int
	text string
}

func newManager(t testing.TB) *manager {
	t.Helper()
	m := &manager{socket: filepath.Join(t.TempDir(), "notify")}
	c, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: m.socket, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	raw, err := c.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var set error
	if err := raw.Control(func(fd uintptr) {
		set = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_PASSCRED, 1)
	}); err != nil || set != nil {
		t.Fatal(err, set)
	}
	go func() {
		buf, oob := make([]byte, 4096), make([]byte, 256)
		for {
			n, oobn, _, _, err := c.ReadMsgUnix(buf, oob)
			if errors.Is(err, net.ErrClosed) {
				return
			}
			var pid int
			if messages, err := unix.ParseSocketControlMessage(oob[:oobn]); err == nil && len(messages) > 0 {
				if cred, err := unix.ParseUnixCredentials(&messages[0]); err == nil {
					pid = int(cred.Pid)
				}
			}
			m.mu.Lock()
			for line := range strings.SplitSeq(string(buf[:n]), "\n") {
				m.lines = append(m.lines, managerLine{pid, line})
			}
			m.mu.Unlock()
		}
	}()
	return m
}

// count returns how many lines begin so, and from which processes they came.
func (m *manager) count(prefix string) (n int, pids []int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, l := range m.lines {
		if strings.HasPrefix(l.text, prefix) {
			n++
			if !slices.Contains(pids, l.pid) {
				pids = append(pids, l.pid)
			}
		}
	}
	return n, pids
}

// hears waits until n lines have come that begin so, all of one process.
func (m *manager) hears(t testing.TB, n int, prefix string, pid int) {
	t.Helper()
	within(t, patience, prefix, func() bool { got, _ := m.count(prefix); return got >= n })
	if _, pids := m.count(prefix); !slices.Equal(pids, []int{pid}) {
		t.Errorf("%s came from %v, want %d, the process that the manager started", prefix, pids, pid)
	}
}

// The service manager hears that the start goes on, that the daemon serves, that it lives, and that it ends: from the
// process that it started, since it listens to no other.
func TestServiceManager(t *testing.T) {
	dir, _ := tree(t, 2, 1100, 64) // two pages a folder
	for _, slow := range []bool{false, true}[:atMost(1, 2)] {
		t.Run(fmt.Sprintf("slow %v", slow), func(t *testing.T) {
			p, env := far(t, proxy.Options{})
			source := bucket(t, dir)
			if slow {
				if err := p.Set(proxy.Options{Latency: 1500 * time.Millisecond}); err != nil { // each page
					t.Fatal(err)
				}
			}
			m := newManager(t)
			env = append(env, "NOTIFY_SOCKET="+m.socket, "WATCHDOG_USEC=9000000")
			mnt, socket := t.TempDir(), filepath.Join(t.TempDir(), "feed.sock")
			d := inForeground(t, env, "serve", source, "--listen", "unix://"+socket, "--mount", mnt,
				"--cache-dir", t.TempDir())
			pid := d.cmd.Process.Pid
			if slow {
				m.hears(t, 1, "EXTEND_TIMEOUT_USEC=", pid)
				if n, _ := m.count("STATUS=listing"); n == 0 {
					t.Error("the status does not tell what takes so long")
				}
			}
			m.hears(t, 1, "READY=1", pid)
			if _, errs, code := shoal(t, nil, "health", mnt, "unix://"+socket); code != 0 {
				t.Errorf("ready, and health says %s", errs)
			}
			if err := p.Set(proxy.Options{}); err != nil {
				t.Fatal(err)
			}
			m.hears(t, 1, "WATCHDOG=1", pid)
			if !slow {
				m.hears(t, 2, "WATCHDOG=1", pid)
				// A daemon that cannot be reached is not spoken for, though its processes run.
				if err := os.Remove(socket); err != nil {
					t.Fatal(err)
				}
				said := func() int { return strings.Count(d.log(), "watchdog is not fed") }
				within(t, patience, "a watchdog that is not fed", func() bool { return said() > 0 })
				before, _ := m.count("WATCHDOG=1")
				within(t, patience, "one more check", func() bool { return said() > 1 })
				if after, _ := m.count("WATCHDOG=1"); after != before {
					t.Errorf("%d more signs of life", after-before)
				}
			}

			d.signal(t, syscall.SIGTERM)
			m.hears(t, 1, "STOPPING=1", pid)
			d.ended(t)
			if n, _ := m.count("READY=1"); n != 1 {
				t.Errorf("READY=1 came %d times", n)
			}
		})
	}
}

// A verb that attached to another service's daemon is a service like any other.
func TestServiceManagerAttached(t *testing.T) {
	dir, _ := tree(t, 1, 2, 4<<10)
	_, env := far(t, proxy.Options{})
	source, cache := bucket(t, dir), t.TempDir()
	mount(t, env, source, "--cache-dir", cache)
	m := newManager(t)
	mnt := t.TempDir()
	d := inForeground(t, append(env, "NOTIFY_SOCKET="+m.socket, "WATCHDOG_USEC=9000000"), "mount", source, mnt,
		"--cache-dir", cache)
	m.hears(t, 1, "READY=1", d.cmd.Process.Pid)
	m.hears(t, 1, "WATCHDOG=1", d.cmd.Process.Pid)
	d.signal(t, syscall.SIGTERM)
	<-d.exited
	if mounted(mnt) {
		t.Error("still mounted")
	}
}
