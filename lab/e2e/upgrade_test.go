package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/lab/rig/proxy"
)

// readOn reads files of mnt and compares them with dir's until its standard input ends: whole, by mapped memory, and at
// random places of files that it keeps open, while signals interrupt it. It says how long the longest read took.
func readOn(mnt, dir string, paths []string) error {
	signal.Notify(make(chan os.Signal, 1), unix.SIGALRM)
	every := unix.Itimerval{Interval: unix.Timeval{Usec: 5000}, Value: unix.Timeval{Usec: 5000}}
	if _, err := unix.Setitimer(unix.ITIMER_REAL, every); err != nil {
		return err
	}
	ended := make(chan struct{})
	go func() { _, _ = io.Copy(io.Discard, os.Stdin); close(ended) }()
	open, longest, n := map[string]*os.File{}, time.Duration(0), 0
	for ; ; n++ {
		select {
		case <-ended:
			fmt.Printf("%d reads, the longest took %v\n", n, longest.Round(time.Millisecond))
			return nil
		case <-time.After(5 * time.Millisecond): // as a trainer makes
		}
		path := paths[rand.IntN(len(paths))]
		want, err := os.ReadFile(filepath.Join(dir, path))
		if err != nil {
			return err
		}
		begun := time.Now()
		if err := readOnce(filepath.Join(mnt, path), want, n, open); err != nil {
			return fmt.Errorf("read %d, after %v: %w", n, time.Since(begun), err)
		}
		longest = max(longest, time.Since(begun))
	}
}

func readOnce(path string, want []byte, n int, open map[string]*os.File) error {
	var got []byte
	switch n % 3 {
	case 0:
		var err error
		if got, err = os.ReadFile(path); err != nil {
			return err
		}
	case 1:
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		defer f.Close()
		mapped, err := unix.Mmap(int(f.Fd()), 0, len(want), unix.PROT_READ, unix.MAP_SHARED)
		if err != nil {
			return err
		}
		defer func() { _ = unix.Munmap(mapped) }()
		got = bytes.Clone(mapped)
	default:
		f := open[path]
		if f == nil {
			var err error
			if f, err = os.Open(path); err != nil {
				return err
			}
			open[path] = f
		}
		_ = unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED)
		from := rand.IntN(len(want))
		want, got = want[from:], make([]byte, len(want)-from)
		if _, err := f.ReadAt(got, int64(from)); err != nil {
			return err
		}
	}
	if !bytes.Equal(got, want) {
		return fmt.Errorf("%s: wrong bytes", path)
	}
	return nil
}

// upgradeReader is a process that reads on.
type upgradeReader struct {
	cmd *exec.Cmd
	in  io.Closer
	out bytes.Buffer
}

func startUpgradeReaders(t *testing.T, n int, mnts []string, dir string, paths []string) (all []*upgradeReader) {
	t.Helper()
	for i := range n {
		r := &upgradeReader{cmd: exec.Command("/proc/self/exe",
			append([]string{"readon", mnts[i%len(mnts)], dir}, paths...)...)}
		r.cmd.Stdout, r.cmd.Stderr = &r.out, &r.out
		in, err := r.cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		if r.in = in; r.cmd.Start() != nil {
			t.Fatal("a reader did not start")
		}
		all = append(all, r)
	}
	return all
}

// end ends the reader, which must have had no error.
func (r *upgradeReader) end(t *testing.T) {
	t.Helper()
	_ = r.in.Close()
	if err := r.cmd.Wait(); err != nil {
		t.Errorf("a reader: %v: %s", err, r.out.String())
	}
	t.Log(strings.TrimSpace(r.out.String()))
}

// install puts a program of its own in a folder, atomically. It can be replaced under what runs it.
func install(t *testing.T, at, program string) {
	t.Helper()
	b, err := os.ReadFile(program)
	if err == nil {
		err = errors.Join(os.WriteFile(at+".new", b, 0o755), os.Rename(at+".new", at))
	}
	if err != nil {
		t.Fatal(err)
	}
}

// link has program lead to a copy of its own, as where each version has its folder.
func link(t *testing.T, program string, version int) (at string) {
	t.Helper()
	at = fmt.Sprintf("%s-%d", program, version)
	install(t, at, shoalBin)
	if err := errors.Join(os.Symlink(at, program+".new"), os.Rename(program+".new", program)); err != nil {
		t.Fatal(err)
	}
	return at
}

// upgradable mounts with a program that can be replaced.
func upgradable(t *testing.T, env []string, source string, flags ...string) (program, mnt string) {
	t.Helper()
	program, mnt = filepath.Join(t.TempDir(), "shoal"), t.TempDir()
	link(t, program, 0)
	mountBy(t, program, env, source, mnt, flags...)
	return program, mnt
}

func mountBy(t *testing.T, program string, env []string, source, mnt string, flags ...string) {
	t.Helper()
	args := append([]string{"mount", source, mnt, "--fuse-transport", "dev", "--kernel-cache", "off"}, flags...)
	if _, errs, code := shoalWith(t, program, env, args...); code != 0 {
		t.Fatalf("mount: exit %d, %s", code, errs)
	}
	t.Cleanup(func() {
		if mounted(mnt) {
			umount(t, mnt)
		}
	})
}

// upgrade must succeed.
func upgrade(t *testing.T, mnt string) {
	t.Helper()
	if _, errs, code := shoal(t, nil, "upgrade", mnt); code != 0 || !strings.Contains(errs, "serves, as pid") {
		t.Fatalf("upgrade: exit %d, %s", code, errs)
	}
}

// servedBy waits until a daemon other than one that is dead answers for the mount.
func servedByOther(t *testing.T, mnt string, dead int) {
	t.Helper()
	within(t, patience, fmt.Sprintf("another daemon than %d serves %s", dead, mnt), func() bool {
		out, _, code := shoal(t, nil, "stat", mnt, "--json")
		return code == 0 && !strings.Contains(out, fmt.Sprintf(`"pid":%d,`, dead)) &&
			!strings.Contains(out, fmt.Sprintf(`"pid": %d,`, dead))
	})
}

// Readers of three mounts of one daemon see nothing of its upgrades and deaths.
func TestUpgrade(t *testing.T) {
	rounds := atMost(10, 100)
	dir, paths := tree(t, 4, 25, 100<<10)
	_, env := far(t, proxy.Options{Latency: 2 * time.Millisecond})
	source, cache := bucket(t, dir), t.TempDir()
	program, first := upgradable(t, env, source, "--cache-dir", cache, "--daemon=supervised")
	mnts := []string{first, t.TempDir(), t.TempDir()}
	for _, mnt := range mnts[1:] {
		mountBy(t, program, env, source, mnt, "--cache-dir", cache, "--daemon")
	}
	readers := startUpgradeReaders(t, 8, mnts, dir, paths)
	for round := range rounds {
		time.Sleep(time.Duration(rand.IntN(700)) * time.Millisecond) // a random moment
		mnt := mnts[rand.IntN(3)]
		pid := readStats(t, mnt).PID
		if round%2 == 0 {
			install(t, program, shoalBin)
			refreshed := make(chan string)
			go func() {
				_, errs, code := shoal(t, nil, "refresh", mnt)
				refreshed <- fmt.Sprint(code, errs)
			}()
			upgrade(t, mnt)
			if got := <-refreshed; !strings.HasPrefix(got, "0") {
				t.Errorf("a refresh beside the upgrade: exit %s", got)
			}
		} else if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		for _, mnt := range mnts {
			servedByOther(t, mnt, pid)
		}
	}
	for _, r := range readers {
		r.end(t)
	}
	for _, mnt := range mnts {
		umount(t, mnt)
	}
	within(t, patience, "nothing runs any more", func() bool { return len(processes(first)) == 0 })
}

// planScript is a writer of a plan.
const planScript = `
import os, sys
fd = -1
for line in sys.stdin:
    verb, _, arg = line.strip().partition(" ")
    try:
        if verb == "open":
            fd = os.open(os.path.join(sys.argv[1], ".shoal", arg), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        elif verb == "write":
            os.write(fd, (arg + "\n").encode())
        else:
            os.close(fd)
        print("ok")
    except OSError as e:
        print("errno", e.errno)
`

// What a reader has of the mount survives an upgrade: open files, also of a version that a refresh has replaced, before
// and after the upgrade, and named plans. A plan that is half written does not.
func TestUpgradeKeepsFiles(t *testing.T) {
	dir, paths := tree(t, 2, 10, 200<<10)
	_, env := far(t, proxy.Options{})
	source := bucket(t, dir)
	program, mnt := upgradable(t, env, source, "--cache-dir", t.TempDir(), "--daemon")
	content := func(path string) string {
		t.Helper()
		b, err := os.ReadFile(filepath.Join(dir, path))
		if err != nil {
			t.Fatal(err)
		}
		return fmt.Sprint(len(b))
	}
	left := func(path string) string {
		t.Helper()
		var n int
		_, _ = fmt.Sscan(content(path), &n)
		return fmt.Sprint(n - 1000)
	}
	plan := func() *steps { return startSteps(t, exec.Command("/usr/bin/python3", "-u", "-c", planScript, mnt)) }
	old, current, half, whole := newSteps(t, mnt), newSteps(t, mnt), plan(), plan()
	old.want("open "+paths[0], "ok")
	old.want("read 1000", "1000")
	write(t, filepath.Join(dir, "class00/added.jpg"), bytes.Repeat([]byte("x"), 5000))
	upload(t, dir, bucketName(t))
	mustShoal(t, nil, "refresh", mnt)
	current.want("open class00/added.jpg", "ok")
	current.want("read 1000", "1000")
	half.want("open plan", "ok")
	half.want("write "+paths[1], "ok")
	whole.want("open plans/a", "ok")
	whole.want("write "+paths[2], "ok")
	whole.want("close", "ok")
	for i := range 2 {
		dropCaches(t)
		is := link(t, program, i+1)
		if i == 1 { // as some install a new one
			if err := os.Rename(is, is+".old"); err != nil {
				t.Fatal(err)
			}
			install(t, is, shoalBin)
		}
		upgrade(t, mnt)
		pid, supervisor := readStats(t, mnt).PID, 0
		if runs, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid)); err != nil || runs != is {
			t.Errorf("the program is %s, %v", runs, err)
		}
		status, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		_, rest, _ := strings.Cut(string(status), "PPid:")
		if _, err := fmt.Sscan(rest, &supervisor); err != nil || supervisor <= 1 {
			t.Fatal("no supervisor:", err, supervisor)
		}
		// what it supervised can be replaced all the same
		if err := syscall.Kill(supervisor, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		within(t, patience, "the supervisor has ended", func() bool {
			return errors.Is(syscall.Kill(supervisor, 0), syscall.ESRCH)
		})
	}
	old.want("rest", left(paths[0]))
	old.want("close", "ok")
	current.want("rest", "4000")
	current.want("close", "ok")
	half.want("write "+paths[2], errno(syscall.EIO))
	half.want("close", errno(syscall.EIO))
	half.want("open plan", "ok")
	half.want("write "+paths[1], "ok")
	half.want("close", "ok")
	whole.want("open plans/b", "ok")
	whole.want("write "+paths[3], "ok")
	whole.want("close", "ok")
	if b, err := os.ReadFile(filepath.Join(mnt, ".shoal/plans/b")); err != nil || string(b) != paths[3]+"\n" {
		t.Errorf("the plan b is %q, %v", b, err)
	}
	// Another version while no daemon served.
	if err := os.Remove(filepath.Join(dir, paths[4])); err != nil {
		t.Fatal(err)
	}
	readAll(t, mnt, dir, append(append([]string{"class00/added.jpg"}, paths[:4]...), paths[5:]...))
	umount(t, mnt)
}

// A program that does not serve is not taken: the one that runs goes on, whether the new one cannot run at all or fails
// when it is to serve.
func TestUpgradeToABrokenProgram(t *testing.T) {
	dir, paths := tree(t, 1, 20, 50<<10)
	for _, kind := range []string{"--daemon", "--daemon=supervised"} {
		program, mnt := upgradable(t, nil, "file://"+dir, "--cache-dir", t.TempDir(), kind)
		readers := startUpgradeReaders(t, 2, []string{mnt}, dir, paths)
		pid := readStats(t, mnt).PID
		broken := func(text string) string {
			at := filepath.Join(t.TempDir(), "broken")
			write(t, at, []byte(text))
			install(t, program, at)
			_, errs, code := shoal(t, nil, "upgrade", mnt)
			if code != 1 {
				t.Errorf("%s: exit %d, %s", kind, code, errs)
			}
			return errs
		}
		if errs := broken("not a program"); !strings.Contains(errs, "does not run") || readStats(t, mnt).PID != pid {
			t.Errorf("%s: a file that cannot be run: %s, pid %d, before %d", kind, errs, readStats(t, mnt).PID, pid)
		}
		for range 2 {
			errs := broken("#!/bin/sh\ntest \"$1\" = version && { sleep 60 & exec " + shoalBin + " version; }\nexit 7\n")
			if !strings.Contains(errs, "the old one") || !strings.Contains(errs, "exit status 7") {
				t.Errorf("%s: a program that fails: %s", kind, errs)
			}
		}
		if readStats(t, mnt).PID == pid {
			t.Errorf("%s: pid %d still serves", kind, pid)
		}
		install(t, program, shoalBin)
		upgrade(t, mnt)
		for _, r := range readers {
			r.end(t)
		}
		umount(t, mnt)
	}
}

// While nobody serves, readers wait. One that is killed ends once the mount is served again, and the mount can be
// unmounted.
func TestHeldMount(t *testing.T) {
	dir, paths := tree(t, 1, 20, 50<<10)
	p, env := far(t, proxy.Options{})
	source := bucket(t, dir)
	for _, then := range []string{"served", "unmounted"} {
		if err := p.Set(proxy.Options{}); err != nil {
			t.Fatal(err)
		}
		_, mnt := upgradable(t, env, source, "--cache-dir", t.TempDir(), "--daemon=supervised", "--order", "none")
		pid := readStats(t, mnt).PID
		supervisor := 0
		for _, p := range processes(mnt) {
			if p != pid {
				supervisor = p
			}
		}
		if err := p.Set(proxy.Options{Faults: []proxy.Fault{{Kind: proxy.Slow, For: time.Minute}}}); err != nil {
			t.Fatal(err)
		}
		reader, killed := newSteps(t, mnt), exec.Command("/bin/cat", filepath.Join(mnt, paths[1]))
		answers := make(chan string, 1)
		if then == "served" {
			go func() { answers <- reader.do("sha256 " + paths[0]) }()
			if err := killed.Start(); err != nil {
				t.Fatal(err)
			}
			within(t, patience, "the reads are in flight", func() bool { return p.Stats().InFlight >= 2 })
		}
		// The supervisor is stopped, so the mount stays held.
		if err := errors.Join(syscall.Kill(supervisor, syscall.SIGSTOP),
			syscall.Kill(pid, syscall.SIGKILL)); err != nil {
			t.Fatal(err)
		}
		if err := p.Set(proxy.Options{}); err != nil {
			t.Fatal(err)
		}
		if then == "served" {
			if err := killed.Process.Kill(); err != nil {
				t.Fatal(err)
			}
		} else if _, errs, code := shoal(t, nil, "umount", mnt); code != 0 {
			t.Errorf("umount of a held mount: exit %d, %s", code, errs)
		}
		if _, errs, code := shoal(t, nil, "upgrade", mnt); code != 1 ||
			!strings.Contains(errs, "not a live shoal mount") {
			t.Errorf("upgrade of a mount without a daemon: exit %d, %s", code, errs)
		}
		if err := syscall.Kill(supervisor, syscall.SIGCONT); err != nil {
			t.Fatal(err)
		}
		if then == "served" {
			if got := <-answers; strings.HasPrefix(got, "errno") {
				t.Errorf("the read that waited: %s", got)
			}
			_ = killed.Wait()
			umount(t, mnt)
		}
		within(t, patience, "the supervisor has ended", func() bool {
			return errors.Is(syscall.Kill(supervisor, 0), syscall.ESRCH)
		})
		if mounted(mnt) {
			t.Error("it is mounted again")
		}
	}
}

// In the foreground the process that was started stays: a terminal, a service manager or a container knows it.
func TestUpgradeInForeground(t *testing.T) {
	dir, paths := tree(t, 1, 20, 50<<10)
	mnt, program := t.TempDir(), filepath.Join(t.TempDir(), "shoal")
	install(t, program, shoalBin)
	d := startForeground(t, exec.Command(program, "mount", "file://"+dir, mnt, "--cache-dir", t.TempDir(),
		"--fuse-transport", "dev", "--kernel-cache", "off"))
	healthy(t, mnt)
	readers := startUpgradeReaders(t, 2, []string{mnt}, dir, paths)
	for range 2 {
		upgrade(t, mnt)
	}
	if pid := readStats(t, mnt).PID; pid == d.cmd.Process.Pid {
		t.Errorf("pid %d serves", pid)
	}
	if err := syscall.Kill(readStats(t, mnt).PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	upgraded := time.Now()
	for _, r := range readers {
		r.end(t)
	}
	t.Logf("after a death readers went on within %v", time.Since(upgraded).Round(time.Millisecond))
	d.says(t, "restarting it") // told to end before it has heard of the death, it would end with that
	d.unmounts(t, mnt)
}

// A supervisor that gets SIGTERM while it waits to start the next daemon leaves no mount.
func TestUpgradedEndsBetweenDaemons(t *testing.T) {
	dir, _ := tree(t, 1, 2, 1<<10)
	mnt, program := t.TempDir(), filepath.Join(t.TempDir(), "shoal")
	install(t, program, shoalBin)
	d := startForeground(t, exec.Command(program, "mount", "file://"+dir, mnt, "--cache-dir", t.TempDir(),
		"--fuse-transport", "dev"))
	healthy(t, mnt)
	upgrade(t, mnt)
	for deaths := range 3 { // the pause doubles
		pid := readStats(t, mnt).PID
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		within(t, patience, "the supervisor waits", func() bool {
			return strings.Count(d.log(), "restarting it") > deaths
		})
		if deaths < 2 {
			servedByOther(t, mnt, pid)
		}
	}
	d.unmounts(t, mnt)
}

// What cannot be taken over says why.
func TestUpgradeRefused(t *testing.T) {
	dir, _ := tree(t, 1, 2, 1<<10)
	folder := t.TempDir()
	refused := func(code int, words string, args ...string) {
		t.Helper()
		if _, errs, got := shoal(t, nil, append([]string{"upgrade"}, args...)...); got != code ||
			!strings.Contains(errs, words) {
			t.Errorf("upgrade %v: exit %d, %s", args, got, errs)
		}
	}
	refused(2, "upgrade")
	refused(1, "is not a live shoal mount", folder)
	refused(1, "is not a live shoal mount", filepath.Join(folder, "missing"))
	rings := mount(t, nil, "file://"+dir, "--fuse-transport", "auto")
	if out := mustShoal(t, nil, "stat", rings, "--json"); strings.Contains(out, `"io_uring: `) {
		refused(1, "--fuse-transport dev", rings)
	}
	dead := t.TempDir()
	d := inForeground(t, nil, "mount", "file://"+dir, dead, "--cache-dir", t.TempDir(), "--fuse-transport", "dev")
	healthy(t, dead)
	d.signal(t, syscall.SIGKILL)
	<-d.exited
	refused(1, "is not a live shoal mount", dead)
	umount(t, dead)
}

// If no daemon can be started, readers get an error in the end.
func TestHeldMountIsLetGo(t *testing.T) {
	long(t)
	dir, paths := tree(t, 1, 2, 1<<10)
	program, mnt := upgradable(t, nil, "file://"+dir, "--cache-dir", t.TempDir(), "--daemon=supervised")
	at := filepath.Join(t.TempDir(), "broken")
	write(t, at, []byte("#!/bin/sh\nexit 7\n"))
	install(t, program, at)
	pid, reader := readStats(t, mnt).PID, newSteps(t, mnt)
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	begun := time.Now()
	if got := reader.do("open " + paths[0]); !strings.HasPrefix(got, "errno") {
		t.Errorf("a reader of a mount that nobody serves: %s", got)
	}
	if waited := time.Since(begun); waited > time.Minute {
		t.Errorf("it waited for %v", waited)
	}
	install(t, program, shoalBin)
	servedByOther(t, mnt, pid)
	umount(t, mnt)
}
