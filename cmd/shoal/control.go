package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/fusefs"
	"github.com/shoalfs/shoal/internal/audit"
	"github.com/shoalfs/shoal/internal/machine"
	"github.com/shoalfs/shoal/prefetch/engine"
)

// A verb reaches a daemon by its socket (attach.go), never through a mount: a process that waits in a mount whose daemon hangs
// cannot even be killed. The socket of a cache directory is CACHE-DIR/shoal.sock. That of a mount is in the abstract namespace,
// named after the mount's device number, which /proc/self/mountinfo has (ADR 57): no disk, which may hang too, is asked, and no
// file outlives the daemon. It is seen in the daemon's network namespace alone, so by the containers of its pod.

const (
	// patience is how long a daemon may say nothing.
	patience = 5 * time.Second
	// beat is how often a daemon says that it is alive while a verb runs.
	beat = time.Second
	// mostAsking is how many may ask about one mount at a time: not all of them are the daemon's user.
	mostAsking = 64
)

// mountAddress is where the daemon of a mount listens.
func mountAddress(device string) string { return "@shoal/" + device }

// errNobody: nothing listens on the socket.
var errNobody = errors.New("no daemon listens")

// silence is the error of a daemon, or a disk, that does not answer.
type silence struct {
	question
	pid   int // 0: not to be seen from here
	since time.Time
}

func (s silence) Error() string {
	waited := fmt.Sprintf("of %s does not answer since %s, for %s", s.at, s.since.Format(time.TimeOnly), time.Since(s.since).Round(100*time.Millisecond))
	then := ""
	if s.then != "" {
		then = ", then " + s.then
	}
	switch {
	case s.pid == 0:
		return "the daemon " + waited + " (it is in another container, or too many ask it: end it where it runs" + then + ")"
	case stateOf(s.pid) == "T":
		return fmt.Sprintf("the daemon (pid %d) %s: it is stopped (kill -CONT %d lets it go on; or kill -9 %d%s)", s.pid, waited, s.pid, s.pid, then)
	}
	return fmt.Sprintf("the daemon (pid %d) %s (kill -9 %d%s)", s.pid, waited, s.pid, then)
}

// stateOf returns a process's state as ps(1) shows it, "" if there is none.
func stateOf(pid int) string {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return ""
	}
	// Field 2 is the command in parentheses, field 3 the state.
	_, rest, _ := strings.Cut(string(b), ") ")
	state, _, _ := strings.Cut(rest, " ")
	return state
}

// running reports whether a process still exists and holds resources: a zombie holds nothing.
func running(pid int) bool { s := stateOf(pid); return s != "" && s != "Z" }

// soon returns what do returns, which may wait for a disk that hangs, or the end of ctx.
func soon[T any](ctx context.Context, do func() (T, error)) (T, error) {
	type result struct {
		of  T
		err error
	}
	c := make(chan result, 1)
	go func() {
		of, err := do()
		c <- result{of, err}
	}()
	select {
	case r := <-c:
		return r.of, r.err
	case <-ctx.Done():
		return *new(T), ctx.Err()
	}
}

// reach connects to a daemon's socket. It must have a goroutine of its own.
func reach(address string) (net.Conn, error) {
	conn, err := dialUnix(address)
	if errors.Is(err, syscall.ECONNREFUSED) && strings.HasPrefix(address, "@") && enter(address) {
		return dialUnix(address)
	}
	return conn, err
}

// enter moves the goroutine's thread, which then ends with it, to the network namespace of this machine in which something listens
// at an abstract address: root may look into containers.
func enter(address string) bool {
	procs, _ := filepath.Glob("/proc/[0-9]*/ns/net")
	seen := map[string]bool{}
	for _, proc := range procs {
		space, err := os.Readlink(proc)
		if err != nil || seen[space] {
			continue
		}
		seen[space] = true
		sockets, _ := os.ReadFile(strings.Replace(proc, "/ns/net", "/net/unix", 1))
		if !bytes.Contains(sockets, []byte(" "+address+"\n")) {
			continue
		}
		f, err := os.Open(proc)
		if err != nil {
			return false
		}
		defer f.Close()
		runtime.LockOSThread()
		return unix.Setns(int(f.Fd()), unix.CLONE_NEWNET) == nil
	}
	return false
}

// asMount is a question to the daemon of a mount.
func asMount(m *machine.Mount) question {
	owner := ""
	for option := range strings.SplitSeq(m.Super, ",") {
		if id, ok := strings.CutPrefix(option, "user_id="); ok {
			owner = id
		}
	}
	return question{address: mountAddress(m.Device), owner: owner, at: m.Point, then: "shoal umount " + m.Point}
}

// askMount asks the daemon of a mount.
func askMount(ctx context.Context, target string, out io.Writer, args ...string) error {
	m, err := fusefs.At(target)
	if err != nil {
		return err
	}
	if m == nil {
		return notMounted(target)
	}
	err, target = ask(ctx, asMount(m), args, out), m.Point
	if errors.Is(err, errNobody) {
		return fmt.Errorf("%s is not a live shoal mount: no daemon answers for it here (if it has ended: shoal umount %s; if it runs in another container, "+
			"ask there, or its --admin or feed address; if it is of an older version: cat %s/.shoal/stats)", target, target, target)
	}
	return err
}

func notMounted(target string) error {
	return fmt.Errorf("%s is not a live shoal mount: nothing of Shoal is mounted there (mount it with `shoal mount SOURCE %s`)", target, target)
}

// inTime limits a question that has no deadline.
func inTime(ctx context.Context) (context.Context, context.CancelFunc) {
	if _, ok := ctx.Deadline(); ok {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, patience)
}

// answerFor answers questions about the mount until stop is called.
func (m *mounted) answerFor(h *engine.Host, log *slog.Logger) (stop func()) {
	address := mountAddress(m.server.Device())
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: address})
	if err != nil {
		log.Warn("no verb reaches the daemon by this mount", "mountpoint", m.path, "socket", address, "cause", err)
		return func() {}
	}
	ctx, cancel := context.WithCancel(context.Background())
	var asking sync.WaitGroup
	free := make(chan struct{}, mostAsking)
	asking.Go(func() {
		for {
			conn, err := l.AcceptUnix()
			if err != nil {
				return
			}
			free <- struct{}{}
			asking.Go(func() { serve(ctx, h, conn, m); <-free })
		}
	})
	return func() { cancel(); _ = l.Close(); asking.Wait() }
}

// may reports whether a process may run a verb by the mount's socket: its owner as by that of the cache directory, but nothing
// that names files, and others what the mode of .shoal/stats allows.
func (m *mounted) may(who *audit.Peer, verb string) bool {
	if uid := *who.UID; uid == 0 || uid == os.Geteuid() {
		return verb == "stat" || verb == "refresh" || verb == "order"
	}
	return verb == "stat" && m.others
}

// stats writes the content of .shoal/stats.
func (m *mounted) stats(w io.Writer) error {
	if m.server.Draining() {
		return fmt.Errorf("%s is draining: its daemon is shutting down", m.path)
	}
	b, err := m.door.Get("stats")
	if err == nil {
		_, err = w.Write(b)
	}
	return err
}

// refresh lists the source again, as a write to .shoal/refresh does.
func (m *mounted) refresh(ctx context.Context, who *audit.Peer, out io.Writer) error {
	before := m.door.Stats()
	err := m.door.Refresh(ctx)
	m.audit.Write(outcome(audit.Event{Event: "refresh", Peer: who}, err))
	if err != nil {
		return fmt.Errorf("refresh %s: %w", m.path, err)
	}
	refreshed(out, before, m.door.Stats())
	return nil
}

// unanswered is why a daemon at a feed's address did not answer in time.
func unanswered(target string, since time.Time) error {
	s := silence{question: question{at: target, then: "start it again"}, since: since}
	if path, ok := strings.CutPrefix(target, "unix://"); ok {
		s.pid = ownerOf(path)
	}
	return s
}

// ownerOf returns the process that listens on a unix socket, by this pid namespace's number, or 0.
func ownerOf(path string) (pid int) {
	conn, err := dialUnix(path)
	if err != nil {
		return 0
	}
	defer conn.Close()
	return audit.Unix(conn.(syscall.Conn)).PID
}

// isCacheDir reports whether a daemon has used a folder as its cache directory.
func isCacheDir(folder string) bool {
	_, err := os.Lstat(filepath.Join(folder, socketName))
	return err == nil
}
