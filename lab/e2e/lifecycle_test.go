package e2e

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/internal/audit"
	"github.com/shoalfs/shoal/lab/rig/proxy"
	"github.com/shoalfs/shoal/lab/rig/synced"
)

// foreground is a daemon that the test started and may signal and wait for.
type foreground struct {
	cmd    *exec.Cmd
	exited chan struct{}
	err    error
	out    synced.Buffer
}

func (d *foreground) log() string { return d.out.String() }

// inForeground starts a verb that goes on until it is told to end, which it is at the test's end at the latest.
func inForeground(t testing.TB, env []string, args ...string) *foreground {
	t.Helper()
	cmd := exec.Command(shoalBin, args...)
	cmd.Env = append(os.Environ(), env...)
	return startForeground(t, cmd)
}

// alone runs a command without the mounts of tests that run beside this one.
const alone = "../rig/alone.sh"

// apart is a command in a mount namespace of its own, which has none of the others' mounts but those below dir.
func apart(dir string, args ...string) *exec.Cmd {
	cmd := exec.Command("sh", append([]string{alone, dir}, args...)...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNS}
	return cmd
}

func startForeground(t testing.TB, cmd *exec.Cmd) *foreground {
	t.Helper()
	d := &foreground{cmd: cmd, exited: make(chan struct{})}
	d.cmd.Stdout, d.cmd.Stderr = &d.out, &d.out
	if err := d.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() { d.err = d.cmd.Wait(); close(d.exited) }()
	t.Cleanup(func() {
		_ = d.cmd.Process.Signal(syscall.SIGTERM)
		select {
		case <-d.exited:
		case <-time.After(time.Minute):
			_ = d.cmd.Process.Kill()
			<-d.exited
			t.Errorf("%v did not end:\n%s", d.cmd.Args, d.log())
		}
		if t.Failed() {
			t.Logf("log of %v:\n%s", d.cmd.Args, d.log())
		}
	})
	return d
}

func (d *foreground) signal(t testing.TB, sig syscall.Signal) {
	t.Helper()
	if err := d.cmd.Process.Signal(sig); err != nil {
		t.Fatal(err)
	}
}

// ended waits for the daemon's end and fails the test unless it was in good order.
func (d *foreground) ended(t testing.TB) {
	t.Helper()
	select {
	case <-d.exited:
	case <-time.After(time.Minute):
		t.Fatalf("the daemon is still there after a minute:\n%s", d.log())
	}
	if d.err != nil {
		t.Errorf("the daemon ended with %v:\n%s", d.err, d.log())
	}
}

// unmounts ends the daemon in good order, and fails the test unless its mount is gone.
func (d *foreground) unmounts(t testing.TB, mnt string) {
	t.Helper()
	d.signal(t, syscall.SIGTERM)
	d.ended(t)
	if mounted(mnt) {
		t.Error("it is still mounted")
	}
}

// says waits until the daemon has logged all the words in one line.
func (d *foreground) says(t testing.TB, words ...string) {
	t.Helper()
	within(t, patience, fmt.Sprintf("the log holds a line with %q", words), func() bool {
		for line := range strings.Lines(d.log()) {
			all := true
			for _, w := range words {
				all = all && strings.Contains(line, w)
			}
			if all {
				return true
			}
		}
		return false
	})
}

// healthy waits until the targets answer.
func healthy(t testing.TB, targets ...string) {
	t.Helper()
	mustShoal(t, nil, append([]string{"health", "--wait", "60s"}, targets...)...)
}

// steps is a Python process that does one thing for each line that it is told, and says what came of it.
type steps struct {
	t   testing.TB
	in  io.WriteCloser
	out *os.File
}

// newSteps starts a reader of the mount: "open PATH", "read N", "rest", "close".
func newSteps(t testing.TB, mnt string) *steps {
	t.Helper()
	return startSteps(t, exec.Command("/usr/bin/python3", "-u", "-c", stepsScript, mnt))
}

const stepsScript = `
import hashlib, os, sys
fd = -1
for line in sys.stdin:
    verb, _, arg = line.strip().partition(" ")
    try:
        if verb == "open":
            fd = os.open(os.path.join(sys.argv[1], arg), os.O_RDONLY)
            print("ok")
        elif verb == "read":
            print(len(os.read(fd, int(arg))))
        elif verb == "rest":
            n = 0
            while True:
                got = os.read(fd, 1 << 16)
                if not got:
                    break
                n += len(got)
            print(n)
        elif verb == "close":
            os.close(fd)
            print("ok")
        elif verb == "sha256":
            print(hashlib.sha256(open(os.path.join(sys.argv[1], arg), "rb").read()).hexdigest())
    except OSError as e:
        print("errno", e.errno)
`

func startSteps(t testing.TB, cmd *exec.Cmd) *steps {
	t.Helper()
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stdout, cmd.Stderr = w, os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	w.Close()
	t.Cleanup(func() { in.Close(); _ = cmd.Wait(); r.Close() })
	return &steps{t, in, r}
}

// do tells the reader one thing and returns its answer.
func (s *steps) do(line string) string {
	s.t.Helper()
	if _, err := io.WriteString(s.in, line+"\n"); err != nil {
		s.t.Fatal(err)
	}
	var answer []byte
	for one := make([]byte, 1); ; {
		if _, err := io.ReadFull(s.out, one); err != nil {
			s.t.Fatalf("%s: %v", line, err)
		}
		if one[0] == '\n' {
			return string(answer)
		}
		answer = append(answer, one[0])
	}
}

func (s *steps) want(line, answer string) {
	s.t.Helper()
	if got := s.do(line); got != answer {
		s.t.Errorf("%s: %s, want %s", line, got, answer)
	}
}

func errno(e syscall.Errno) string { return fmt.Sprintf("errno %d", int(e)) }

// ownAddress is one of loopback where no other process asks for a port: one that is free stays so.
func ownAddress() string { return fmt.Sprintf("127.77.%d.%d", os.Getpid()>>8&0xff, os.Getpid()&0xfe+1) }

// freePort returns an address that nobody listens on.
func freePort(t testing.TB) string {
	t.Helper()
	l, err := net.Listen("tcp", ownAddress()+":0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// A daemon that is told to end takes nobody new, at once and visibly, and lets who is in the middle of a file finish.
func TestDrainMount(t *testing.T) {
	dir, paths := tree(t, 1, 4, 512<<10)
	_, env := far(t, proxy.Options{})
	mnt, admin := t.TempDir(), freePort(t)
	d := inForeground(t, drains(env, "10m"), "mount", bucket(t, dir), mnt, "--cache-dir", t.TempDir(), "--admin", admin,
		"--kernel-cache", "off")
	healthy(t, mnt, "http://"+admin)
	fi, err := os.Stat(filepath.Join(dir, paths[0]))
	if err != nil {
		t.Fatal(err)
	}
	first, second := newSteps(t, mnt), newSteps(t, mnt)
	first.want("open "+paths[0], "ok")
	first.want("read 1000", "1000")
	second.want("open "+paths[1], "ok")
	second.want("close", "ok")

	d.signal(t, syscall.SIGTERM)
	d.says(t, "unmounting", "open_files=")
	second.want("open "+paths[2], errno(syscall.ESHUTDOWN))
	second.want("open .shoal/stats", errno(syscall.ESHUTDOWN))
	if _, errs, code := shoal(t, nil, "health", mnt); code != 1 || !strings.Contains(errs, mnt) {
		t.Errorf("health of a mount that drains: exit %d, %s", code, errs)
	}
	resp, err := http.Get("http://" + admin + "/readyz")
	if err != nil {
		t.Fatal(err)
	}
	body, _ := io.ReadAll(resp.Body)
	resp.Body.Close()
	if resp.StatusCode != http.StatusServiceUnavailable || !strings.Contains(string(body), "draining") {
		t.Errorf("/readyz: %d %s", resp.StatusCode, body)
	}
	if _, errs, code := shoal(t, nil, "health", "http://"+admin); code != 1 || !strings.Contains(errs, "draining") {
		t.Errorf("health by the admin address: exit %d, %s", code, errs)
	}

	first.want("rest", fmt.Sprint(fi.Size()-1000))
	first.want("close", "ok")
	d.ended(t)
	d.says(t, "mount drained", "open_files=", "waited=")
	if mounted(mnt) {
		t.Error("still mounted")
	}
}

// Who keeps a file open beyond the drain's time loses it, and the log names him.
func TestDrainCutsOff(t *testing.T) {
	dir, paths := tree(t, 1, 2, 4<<10)
	_, env := far(t, proxy.Options{})
	mnt := t.TempDir()
	d := inForeground(t, drains(env, "200ms"), "mount", bucket(t, dir), mnt, "--cache-dir", t.TempDir(),
		"--kernel-cache", "off")
	healthy(t, mnt)
	reader := newSteps(t, mnt)
	reader.want("open "+paths[0], "ok")
	d.signal(t, syscall.SIGTERM)
	d.ended(t)
	d.says(t, "open files fail", "open_files=1", "python3 (pid ")
	if got := reader.do("rest"); !strings.HasPrefix(got, "errno") {
		t.Errorf("a read of a mount that is gone: %s", got)
	}
	if mounted(mnt) {
		t.Error("still mounted")
	}
}

// A daemon whose standard error nobody reads any more, as after Ctrl-C in a pipeline, serves on and ends in order.
func TestNobodyReadsTheLog(t *testing.T) {
	dir, paths := tree(t, 1, 2, 4<<10)
	_, env := far(t, proxy.Options{})
	mnt := t.TempDir()
	cmd := exec.Command(shoalBin, "mount", bucket(t, dir), mnt, "--cache-dir", t.TempDir())
	cmd.Env = append(os.Environ(), drains(env, "200ms")...)
	log, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill() })
	healthy(t, mnt)
	log.Close()
	reader := newSteps(t, mnt)
	reader.want("open "+paths[0], "ok")
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil { // it logs that files are open
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil || mounted(mnt) {
		t.Errorf("the daemon ended with %v; mounted: %v", err, mounted(mnt))
	}
}

// A cache that has more to write to a slow disk than there is time for does not hold up the end, and is in order later.
func TestDrainOnASlowDisk(t *testing.T) {
	dir, paths := tree(t, 1, 60, 64<<10)
	_, env := far(t, proxy.Options{})
	source, disk := bucket(t, dir), badDisk(t)
	cache, mnt := filepath.Join(disk.Dir, "cache"), t.TempDir()
	flags := []string{"mount", source, mnt, "--cache-dir", cache, "--kernel-cache", "off", "--order", "none"}
	d := inForeground(t, drains(env, "100ms"), flags...)
	t.Cleanup(func() { _ = disk.Set(t.Context(), faultSettings{}) }) // before the daemon is waited for
	healthy(t, mnt)
	slow := faultSettings{
		Rules: []faultRule{{Op: faultWrite, Path: "cache/segments", Delay: time.Second}}}
	if err := disk.Set(t.Context(), slow); err != nil {
		t.Fatal(err)
	}
	readAll(t, mnt, dir, paths)
	d.signal(t, syscall.SIGTERM)
	d.ended(t)
	d.says(t, "the end is cut off")
	if mounted(mnt) {
		t.Error("still mounted")
	}
	if err := disk.Set(t.Context(), faultSettings{}); err != nil {
		t.Fatal(err)
	}
	d = inForeground(t, env, flags...) // which cuts a torn tail
	healthy(t, mnt)
	readAll(t, mnt, dir, paths)
	d.signal(t, syscall.SIGTERM)
	d.ended(t)
	mustBeClean(t, cache)
}

// drains makes the end of a daemon wait for its readers for so long.
func drains(env []string, patience string) []string {
	return append(slices.Clip(env), "SHOAL_DRAIN_TIMEOUT="+patience)
}

// The second signal ends a drain at once, and still leaves no dead mount.
func TestSecondSignal(t *testing.T) {
	dir, paths := tree(t, 1, 2, 4<<10)
	_, env := far(t, proxy.Options{})
	source := bucket(t, dir)
	mnt := t.TempDir()
	d := inForeground(t, drains(env, "1h"), "mount", source, mnt, "--cache-dir", t.TempDir())
	healthy(t, mnt)
	reader := newSteps(t, mnt)
	reader.want("open "+paths[0], "ok")
	d.signal(t, syscall.SIGTERM)
	d.says(t, "unmounting", "open_files=1")
	d.signal(t, syscall.SIGINT)
	select {
	case <-d.exited:
	case <-time.After(time.Minute):
		t.Fatalf("still there:\n%s", d.log())
	}
	within(t, patience, "nothing is mounted", func() bool { return !mounted(mnt) })
}

// A trainer of the feed gets what it has asked for, and then the word that the server ends, with a state to go on from.
func TestDrainFeed(t *testing.T) {
	dir, paths := pictures(t, 2, 32)
	p, env := far(t, proxy.Options{})
	source := bucket(t, dir)
	cache, socket := t.TempDir(), filepath.Join(t.TempDir(), "feed.sock")
	args := []string{"serve", source, "--listen", "unix://" + socket, "--cache-dir", cache}
	d := inForeground(t, drains(env, "10m"), args...)
	healthy(t, "unix://"+socket)
	// the first batch is under way when the end comes
	if err := p.Set(proxy.Options{Latency: time.Second}); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(shoalBin, "feed", "unix://"+socket, "--batch", "8", "--seed", "3", "--epochs", "0", "--json")
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	d.says(t, "feed session opened")
	d.signal(t, syscall.SIGTERM)
	d.ended(t)
	d.says(t, "feed drained", "sessions=1")
	if err := cmd.Wait(); err == nil || !strings.Contains(errs.String(), "stopping") {
		t.Fatalf("the trainer: %v\n%s", err, errs.String())
	}
	text := errs.String()
	from, to := strings.Index(text, "'"), strings.LastIndex(text, "'")
	if from == to {
		t.Fatalf("no state to go on from: %s", text)
	}
	var state struct{ Epoch, Cursor int }
	if err := json.Unmarshal([]byte(text[from+1:to]), &state); err != nil {
		t.Fatal(err)
	}
	if state.Epoch == 0 && state.Cursor == 0 || state.Cursor%8 != 0 {
		t.Errorf("stopped at %+v: a batch under way did not come", state)
	}
	if err := p.Set(proxy.Options{}); err != nil {
		t.Fatal(err)
	}
	inForeground(t, env, args...)
	healthy(t, "unix://"+socket)
	rest := feed(t, "unix://"+socket, "--state", text[from+1:to])
	if order := orderOf(t, "uniform:seed=3", len(paths), "--epoch", fmt.Sprint(state.Epoch)); rest.Digest != digest(t,
		dir, paths, order[state.Cursor:]) {
		t.Error("resumed with other samples than the order's")
	}
}

// SIGKILL leaves a dead mount, a socket and locks behind, and the next start, in the same places, needs no help.
func TestKilledInPlace(t *testing.T) {
	dir, paths := pictures(t, 1, 16)
	_, env := far(t, proxy.Options{})
	mnt, socket, cache := filepath.Join(t.TempDir(), "made"), filepath.Join(t.TempDir(), "feed.sock"), t.TempDir()
	args := []string{"serve", bucket(t, dir), "--listen", "unix://" + socket, "--mount", mnt, "--cache-dir", cache}
	for range 2 {
		d := inForeground(t, env, args...)
		healthy(t, mnt, "unix://"+socket)
		readAll(t, mnt, dir, paths)
		feed(t, "unix://"+socket, "--batch", "4")
		d.signal(t, syscall.SIGKILL)
		<-d.exited
		if _, errs, code := shoal(t, nil, "health", mnt, "unix://"+socket); code != 1 || !strings.Contains(errs, mnt) ||
			!strings.Contains(errs, socket) {
			t.Errorf("health of what was killed: exit %d, %s", code, errs)
		}
		if err := unix.Statfs(mnt, new(unix.Statfs_t)); err == nil {
			t.Error("the kill left no dead mount behind: the test shows nothing")
		}
	}
	d := inForeground(t, env, args...)
	healthy(t, mnt, "unix://"+socket)
	readAll(t, mnt, dir, paths)
	d.unmounts(t, mnt)
}

// Those who come before the daemon wait for it.
func TestWaitForTheDaemon(t *testing.T) {
	dir, _ := pictures(t, 1, 16)
	_, env := far(t, proxy.Options{})
	mnt, socket := t.TempDir(), filepath.Join(t.TempDir(), "feed.sock")
	for _, target := range []string{mnt, "unix://" + socket, "http://" + freePort(t)} {
		if _, errs, code := shoal(t, nil, "health", target, "--wait", "300ms"); code != 1 ||
			!strings.Contains(errs, "not healthy after 300ms") {
			t.Errorf("%s, where nothing is: exit %d, %s", target, code, errs)
		}
	}
	waiting := exec.Command(shoalBin, "health", mnt, "unix://"+socket, "--wait", "60s")
	trainer := python(t, `
import sys, shoal
feed = shoal.Feed(sys.argv[1], 4, epochs=1, as_torch=False, reconnect=60)
print(sum(len(b.id) for b in feed))`, "unix://"+socket)
	var got bytes.Buffer
	trainer.Stdout, trainer.Stderr = &got, &got
	for _, cmd := range []*exec.Cmd{waiting, trainer} {
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
	}
	cameFirst(t, socket, waiting.Process.Pid, trainer.Process.Pid)
	inForeground(t, env, "serve", bucket(t, dir), "--listen", "unix://"+socket, "--mount", mnt,
		"--cache-dir", t.TempDir())
	if err := waiting.Wait(); err != nil {
		t.Errorf("health --wait: %v", err)
	}
	if err := trainer.Wait(); err != nil || strings.TrimSpace(lastLine(got.String())) != "16" {
		t.Errorf("the trainer that came first: %v\n%s", err, got.String())
	}
}

// cameFirst waits until each process has tried to connect to a socket that is not served yet.
func cameFirst(t *testing.T, socket string, pids ...int) {
	t.Helper()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	_ = l.SetDeadline(time.Now().Add(time.Minute))
	for len(pids) > 0 {
		c, err := l.AcceptUnix()
		if err != nil {
			t.Fatal(err)
		}
		pids = slices.DeleteFunc(pids, func(pid int) bool { return pid == audit.Unix(c).PID })
		_ = c.Close()
	}
}

func lastLine(text string) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return lines[len(lines)-1]
}

// --daemon says where it can be reached, what it writes to, and what the log warns of before it is ready. Somebody who
// attaches is told, too.
func TestDaemonSaysWhereItIs(t *testing.T) {
	dir, _ := tree(t, 1, 4, 1<<10)
	cache, mnt, other := t.TempDir(), t.TempDir(), t.TempDir()
	log := filepath.Join(cache, "shoal.log")
	_, errs, code := shoal(t, nil, "serve", "file://"+dir, "--listen", "tcp://127.0.0.1:0", "--mount", mnt, "--admin",
		":0", "--cache-dir", cache, "--cache-size", "10B", "--daemon")
	if code != 0 {
		t.Fatalf("exit %d, %s", code, errs)
	}
	defer mustShoal(t, nil, "stop", mnt, "--all")
	want := regexp.MustCompile(`(?s)^warning: --cache-size leaves no room .*; remedy: give at least \d+MiB
serving file://` + regexp.QuoteMeta(dir) + `/ at (tcp://127\.0\.0\.1:[1-9]\d*); mounted at ` + regexp.QuoteMeta(mnt) + `; dashboard: http://127\.0\.0\.1:[1-9]\d*; log: ` + regexp.QuoteMeta(log) + `\n$`)
	m := want.FindStringSubmatch(errs)
	if m == nil {
		t.Fatalf("%q", errs)
	}
	mustShoal(t, nil, "stat", m[1])
	_, errs, code = shoal(t, nil, "mount", "file://"+dir, other, "--cache-dir", cache, "--daemon")
	if code != 0 || errs != "mounted file://"+dir+"/ at "+other+"; log: "+log+"\n" {
		t.Errorf("attached: exit %d, %q", code, errs)
	}
}
