package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/lab/rig/subproc"
	"github.com/shoalfs/shoal/lab/rig/uringswitch"
)

// verbTime is what any verb may take that only asks: five seconds of patience, and what a machine takes that is busy.
const verbTime = 30 * time.Second

// asked runs a verb, which must end in time: then no process of it is left, not even one that cannot be killed.
func asked(t *testing.T, args ...string) (text string, code int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), verbTime)
	defer cancel()
	cmd := exec.CommandContext(ctx, shoalBin, args...)
	cmd.WaitDelay = time.Second
	out, err := cmd.CombinedOutput()
	if ctx.Err() != nil {
		t.Errorf("%v did not end in time (%v): %s", args, err, out)
	}
	return string(out), cmd.ProcessState.ExitCode()
}

// asNobody runs a verb as another user.
func asNobody(t *testing.T, args ...string) (string, error) {
	t.Helper()
	if err := os.Chmod(filepath.Dir(shoalBin), 0o711); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(shoalBin, args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// controlled is a daemon with a mount and a feed, and the verbs that ask it.
type controlled struct {
	source, mnt, cache, feed string
	pid                      int
}

func newControlled(t *testing.T, cache, transport string) *controlled {
	t.Helper()
	dir, _ := pictures(t, 1, 8)
	c := &controlled{source: "file://" + dir, mnt: filepath.Join(t.TempDir(), "mnt"), cache: cache,
		feed: "unix://" + filepath.Join(t.TempDir(), "feed.sock")}
	mustShoal(t, nil, "serve", c.source, "--listen", c.feed, "--mount", c.mnt, "--cache-dir", cache, "--memory",
		"256MiB", "--daemon", "--fuse-transport", transport)
	c.pid = readStats(t, c.mnt).PID
	t.Cleanup(func() {
		_ = syscall.Kill(c.pid, syscall.SIGKILL)
		_ = unix.Unmount(c.mnt, unix.MNT_DETACH)
	})
	return c
}

// verbs are those that a daemon is asked by. Those that would change what the others find come last.
func (c *controlled) verbs(t *testing.T) [][]string {
	other := filepath.Join(t.TempDir(), "other")
	return [][]string{
		{"health", c.mnt}, {"health", c.feed}, {"health", c.mnt, "--timeout", "1s"},
		{"stat", c.mnt}, {"stat", c.cache}, {"stat", c.feed}, {"stat", filepath.Join(c.mnt, "class00")},
		{"top", c.mnt, "--once"},
		{"refresh", c.mnt}, {"refresh", c.cache}, {"order", "sequential", "--mount", c.mnt},
		{"profile", c.mnt, "--duration", "1s"},
		{"cache", "ls", c.cache}, {"stop", c.mnt}, {"stop", c.cache}, {"stop", c.feed},
		{"warm", c.source, "--cache-dir", c.cache}, {"mount", c.source, c.mnt, "--cache-dir", c.cache, "--daemon"},
		{"mount", c.source, other, "--cache-dir", c.cache, "--daemon"},
	}
}

// A daemon that hangs: each verb says within its time-out which process does not answer, since when, and what helps,
// which it does.
func TestControlOfAStoppedDaemon(t *testing.T) {
	t.Parallel()
	c := newControlled(t, t.TempDir(), "dev")
	if err := subproc.Signal(c.pid, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup
	for _, verb := range c.verbs(t) {
		all.Go(func() {
			text, code := asked(t, verb...)
			for _, want := range []string{fmt.Sprintf("(pid %d)", c.pid), "does not answer since",
				fmt.Sprintf("kill -9 %d", c.pid)} {
				if code != 1 || !strings.Contains(text, want) {
					t.Errorf("%v: exit %d, and no %q: %s", verb, code, want, text)
				}
			}
		})
	}
	all.Wait()
	// What the message says: to let it go on, ...
	if err := syscall.Kill(c.pid, syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	healthy(t, c.mnt, c.feed)
	// ... or to end it, and then to unmount.
	if err := subproc.Signal(c.pid, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	if text, code := asked(t, "health", c.mnt); code != 1 || !strings.Contains(text, "shoal umount "+c.mnt) {
		t.Errorf("health: exit %d, %s", code, text)
	}
	if err := syscall.Kill(c.pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	gone(t, c.pid)
	if text, code := asked(t, "umount", c.mnt); code != 0 || mounted(c.mnt) {
		t.Errorf("umount: exit %d, %s", code, text)
	}
	c = newControlled(t, c.cache, "dev")
	if err := subproc.Signal(c.pid, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	text, code := asked(t, "umount", c.mnt)
	if code != 1 || !strings.Contains(text, c.mnt+" is detached") ||
		!strings.Contains(text, fmt.Sprintf("kill -9 %d)", c.pid)) || mounted(c.mnt) {
		t.Errorf("umount of a daemon that hangs: exit %d, %s", code, text)
	}
}

// Over io_uring nobody could end who detaches the mount of a daemon that hangs.
func TestControlOfAStoppedRing(t *testing.T) {
	uringswitch.On(t)
	c := newControlled(t, t.TempDir(), "uring")
	// That a file was closed is for the daemon to hear: nobody's request, so that the verb is the mount's last user.
	reader := exec.Command("/bin/sh", "-c", `for f in "$0"/class00/*; do exec 3<"$f"; done; echo open; read _`, c.mnt)
	in, err := reader.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := reader.StdoutPipe()
	if err = errors.Join(err, reader.Start()); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(out, make([]byte, len("open\n"))); err != nil {
		t.Fatal(err)
	}
	if err := subproc.Signal(c.pid, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	_ = in.Close()
	_ = reader.Wait()
	for _, lazy := range [][]string{nil, {"--lazy"}} {
		text, code := asked(t, append([]string{"umount", c.mnt}, lazy...)...)
		if code != 1 || !strings.Contains(text, "is not detached") || !mounted(c.mnt) ||
			!strings.Contains(text, fmt.Sprintf("kill -9 %d, then shoal umount %s", c.pid, c.mnt)) {
			t.Errorf("umount %v of a daemon that hangs: exit %d, %s", lazy, code, text)
		}
	}
	if err := syscall.Kill(c.pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	gone(t, c.pid)
	if text, code := asked(t, "umount", c.mnt); code != 0 || mounted(c.mnt) {
		t.Errorf("umount: exit %d, %s", code, text)
	}
}

// A daemon that was killed: nobody is waited for, and what needs no daemon works.
func TestControlOfAKilledDaemon(t *testing.T) {
	t.Parallel()
	c := newControlled(t, t.TempDir(), "dev")
	if err := syscall.Kill(c.pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	gone(t, c.pid)
	for _, verb := range c.verbs(t) {
		text, code := asked(t, verb...)
		switch {
		case verb[0] == "cache" || verb[0] == "warm" || verb[0] == "mount":
			if code != 0 {
				t.Errorf("%v: exit %d, %s", verb, code, text)
			}
		case code == 0 || text == "":
			t.Errorf("%v: exit %d, %s", verb, code, text)
		case strings.Contains(strings.Join(verb, " "), c.mnt) &&
			!strings.Contains(text, "no daemon answers for it here"):
			t.Errorf("%v: %s", verb, text)
		}
	}
	mustShoal(t, nil, "stop", c.cache, "--all")
}

// The disk of the cache hangs: the daemon answers, without it.
func TestControlWhileTheDiskHangs(t *testing.T) {
	t.Parallel()
	disk := badDisk(t)
	c := newControlled(t, filepath.Join(disk.Dir, "cache"), "dev")
	hang := func(ops ...faultOp) {
		var rules []faultRule
		for _, op := range ops {
			rules = append(rules, faultRule{Op: op, Path: "cache", Hang: true})
		}
		if err := disk.Set(context.Background(), faultSettings{Rules: rules}); err != nil {
			t.Error(err)
		}
	}
	hang(faultAny)
	t.Cleanup(func() { hang() })
	for _, verb := range [][]string{{"health", c.mnt, c.feed}, {"stat", c.mnt}, {"stat", c.feed},
		{"order", "sequential", "--mount", c.mnt}, {"top", c.mnt, "--once"}} {
		if text, code := asked(t, verb...); code != 0 {
			t.Errorf("%v: exit %d, %s", verb, code, text)
		}
	}
	// These need the disk, and may wait for it; but they say so. Names are in the kernel's memory, as on a real disk.
	hang(faultRead, faultWrite, faultSync, faultMake)
	for _, verb := range [][]string{{"cache", "ls", c.cache}, {"stat", c.cache}, {"refresh", c.cache},
		{"warm", c.source, "--cache-dir", c.cache}} {
		cmd := exec.Command(shoalBin, verb...)
		cmd.Env = os.Environ()
		d := startForeground(t, cmd)
		t.Cleanup(func() { hang() }) // before it is waited for
		within(t, verbTime, fmt.Sprintf("%v says something", verb), func() bool { return d.log() != "" })
		t.Logf("%v: %s", verb, d.log())
	}
	hang()
	umount(t, c.mnt)
}

// A daemon in another container: root of the machine reaches it, and others are told what holds.
func TestControlOfAnotherContainer(t *testing.T) {
	dir, _ := pictures(t, 1, 8)
	mnt, cache := t.TempDir(), t.TempDir()
	if out, err := exec.Command("unshare", "-n", shoalBin, "mount", "file://"+dir, mnt, "--cache-dir", cache,
		"--allow-other", "--daemon").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	t.Cleanup(func() { umount(t, mnt) })
	mustShoal(t, nil, "health", mnt)
	pid := readStats(t, mnt).PID
	if out, err := asNobody(t, "stat", mnt); err == nil || !strings.Contains(out, "if it runs in another container") {
		t.Errorf("%v: %s", err, out)
	}
	if err := subproc.Signal(pid, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = syscall.Kill(pid, syscall.SIGCONT) }()
	if text, code := asked(t, "health", mnt, "--timeout", "1s"); code != 1 ||
		!strings.Contains(text, fmt.Sprintf("kill -9 %d", pid)) {
		t.Errorf("exit %d, %s", code, text)
	}
}

// A mount that is bound elsewhere, or of which a mount namespace that was made meanwhile has a copy, keeps the daemon:
// umount names it, and the remedy works.
func TestUmountNamesCopies(t *testing.T) {
	dir, _ := pictures(t, 1, 8)
	mnt := mount(t, nil, "file://"+dir)
	pid := readStats(t, mnt).PID
	bound := t.TempDir()
	if err := syscall.Mount(mnt, bound, "", syscall.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	if text, code := asked(t, "umount", bound); code != 1 || !strings.Contains(text, "the mount is at "+mnt+", too") {
		t.Errorf("exit %d, %s", code, text)
	}
	other := exec.Command("unshare", "-m", "sh", alone, mnt, "sleep", "1h")
	if err := other.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = other.Process.Kill(), other.Wait() })
	within(t, patience, "a namespace of its own", func() bool {
		comm, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", other.Process.Pid))
		return string(comm) == "sleep\n"
	})
	text, code := asked(t, "umount", mnt, "--wait", "1s")
	if code != 1 || !strings.Contains(text,
		fmt.Sprintf("copies of the mount, those of sleep (pid %d)", other.Process.Pid)) {
		t.Errorf("exit %d, %s", code, text)
	}
	if out, err := exec.Command("nsenter", "-m", "-t", fmt.Sprint(other.Process.Pid), "umount",
		"-l", mnt).CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
	within(t, patience, "the daemon ends", func() bool { return syscall.Kill(pid, 0) != nil })
}

// Another user sees what the mount shows, and changes nothing.
func TestControlByAnotherUser(t *testing.T) {
	dir, _ := pictures(t, 1, 8)
	for _, open := range []bool{true, false} {
		flags := []string{"--cache-dir", t.TempDir()}
		if open {
			flags = append(flags, "--allow-other")
		}
		mnt := mount(t, nil, "file://"+dir, flags...)
		for _, verb := range []string{"health", "stat", "refresh"} {
			out, err := asNobody(t, verb, mnt)
			if may := open && verb != "refresh"; may != (err == nil) ||
				!may && !strings.Contains(out, "only the owner of the mount") {
				t.Errorf("%s, --allow-other %v: %v, %s", verb, open, err, out)
			}
		}
	}
}

// What a verb that attaches asks for explicitly is in force, or refused with what is.
func TestAttachFlags(t *testing.T) {
	dir, _ := pictures(t, 1, 8)
	other, _ := pictures(t, 1, 4)
	cache := t.TempDir()
	mount(t, nil, "file://"+dir, "--cache-dir", cache, "--memory", "256MiB", "--cache-size", "80%",
		"--connections", "8")
	for _, c := range []struct {
		flags  []string
		source string
		want   string // "": it attaches
	}{
		{[]string{"--memory", "512MiB"}, dir, "has 256 MiB"},
		{[]string{"--memory", "0.25GiB"}, dir, ""},
		{[]string{"--cache-size", "1GiB"}, dir, "--cache-size"},
		{[]string{"--cache-size", "80%"}, dir, ""},
		{[]string{"--connections", "16"}, dir, `--connections "8", not "16"`},
		{[]string{"--connections", "auto"}, dir, `--connections "8", not "auto"`},
		{[]string{"--connections", "8"}, dir, ""},
		{[]string{"--connections", "16"}, other, ""}, // another dataset has its own
		{[]string{"--log-level", "debug"}, dir, "has info"},
		{[]string{"--audit-log", filepath.Join(other, "log")}, dir, "has none"},
		{nil, dir, ""},
	} {
		mnt := t.TempDir()
		args := append([]string{"mount", "file://" + c.source, mnt, "--cache-dir", cache, "--daemon"}, c.flags...)
		_, errs, code := shoal(t, nil, args...)
		if c.want == "" && code != 0 || c.want != "" && (code != 2 || !strings.Contains(errs, c.want)) {
			t.Errorf("%v: exit %d, %s", c.flags, code, errs)
		}
		if mounted(mnt) {
			umount(t, mnt)
		}
	}
}
