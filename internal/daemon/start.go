package daemon

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	systemd "github.com/coreos/go-systemd/v22/daemon"
	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/internal/audit"
	"github.com/shoalfs/shoal/internal/cli"
	"github.com/shoalfs/shoal/internal/pause"
)

// Again is what makes a child do the same as this process: its arguments and, beside this process's, its variables.
type Again struct{ Args, Env []string }

// start starts the child, and returns the pipe by which it speaks until it is ready.
func (a Again) start(cmd *exec.Cmd) (r *os.File, err error) {
	cmd.Path = cmp.Or(cmd.Path, own.Program)
	r, w, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer w.Close()
	cmd.Args = append([]string{cmd.Path}, a.Args...)
	cmd.Env = append(append(cmd.Env, a.Env...), ReadyEnv+"=3")
	cmd.ExtraFiles = append([]*os.File{w}, cmd.ExtraFiles...)
	if err := cmd.Start(); err != nil {
		r.Close()
		return nil, err
	}
	return r, nil
}

// hear shows what a child says until it is ready or has failed, or the pipe ends.
func hear(r io.Reader) (became bool, failure error) {
	lines := json.NewDecoder(r)
	for l := (line{}); lines.Decode(&l) == nil; l = (line{}) {
		switch {
		case l.Ready:
			return true, nil
		case l.Ended != nil:
			return false, cli.Failure(l.Ended.Code, l.Ended.Error)
		case l.Notice != "":
			Own.Notice("%s", l.Notice)
		}
	}
	return false, nil
}

// Background starts this process again in a new session, with its log in cacheDir, and waits until that is ready. In
// the child it returns false at once.
func Background(ctx context.Context, cacheDir string, again Again) (parent bool, err error) {
	if Own.remote() {
		return false, nil
	}
	if err := os.MkdirAll(cacheDir, 0o700); err != nil {
		return true, fmt.Errorf("cache directory: %w (give another --cache-dir)", err)
	}
	logPath := filepath.Join(cacheDir, logName)
	log, err := os.OpenFile(logPath, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return true, fmt.Errorf("log file: %w (make %s writable for this user, or give another --cache-dir)",
			err, cacheDir)
	}
	defer log.Close()
	cmd := &exec.Cmd{Env: os.Environ(), Stdout: log, Stderr: log, SysProcAttr: &syscall.SysProcAttr{Setsid: true}}
	r, err := again.start(cmd)
	if err != nil {
		return true, err
	}
	defer r.Close()
	// In its session the terminal's signals do not reach it. Until it is ready they are passed on.
	defer context.AfterFunc(ctx, func() { _ = cmd.Process.Signal(syscall.SIGTERM) })()
	became, failure := hear(r)
	if became && ctx.Err() == nil {
		return true, nil
	}
	err = cmd.Wait()
	switch {
	case ctx.Err() != nil:
		return true, ctx.Err()
	case failure != nil:
		return true, failure
	case err != nil:
		return true, fmt.Errorf("the daemon ended before it was ready: %w; see %s", err, logPath)
	}
	return true, fmt.Errorf("the daemon ended before it was ready; see %s", logPath)
}

const SupervisedEnv = "SHOAL_SUPERVISED" // marks a process started by a supervisor

const (
	// A daemon that dies is restarted after firstPause, which doubles with each death within calm of its start, up to
	// longestPause.
	firstPause   = 100 * time.Millisecond
	longestPause = 10 * time.Second
	calm         = time.Minute
)

// Supervise starts this process again as a child, and again whenever that dies after being ready, with what it has kept
// (keep.go). It ends if the child ends in order, or does not become ready the first time. If ctx ends, or a signal a
// child that is starting, each keepsake ends, after unmount of its name. In the child it returns false at once.
func Supervise(ctx context.Context, again Again, unmount func(mountpoint string)) (parent bool, err error) {
	if os.Getenv(SupervisedEnv) != "" {
		return false, os.Unsetenv(SupervisedEnv)
	}
	again.Env = append(again.Env, SupervisedEnv+"=1")
	rest, k, stopped := firstPause, newKeeper(), false
	defer func() {
		if stopped || ctx.Err() != nil {
			k.remove(func(o *keepsake) bool { unmount(o.Name); return true })
		}
	}()
	for first := !successor(); ; first = false {
		start := time.Now()
		wasReady, failure, err := superviseOnce(ctx, again, k)
		stopped = ctx.Err() != nil || failure != nil && failure.Error() == ErrInterrupted.Error() // or the child alone was
		var exit *exec.ExitError
		switch {
		case err == nil || stopped && !first && !wasReady:
			return true, nil
		case ctx.Err() != nil:
			return true, ctx.Err()
		case !errors.As(err, &exit) && first:
			return true, err
		case first && !wasReady && failure != nil:
			return true, failure
		case first && !wasReady:
			os.Exit(exit.ExitCode()) // the child has said why, on the same standard error or to the daemon's parent
		case k.died(wasReady, exit, cmp.Or(failure, err).Error()):
			rest = firstPause
			continue
		case exit == nil:
			return true, err
		}
		if time.Since(start) > calm {
			rest = firstPause
		}
		slog.Error("the daemon died; restarting it", "cause", err, "pause", rest)
		if stopped = pause.For(ctx, rest) != nil; stopped {
			return true, nil
		}
		rest = min(2*rest, longestPause)
	}
}

// superviseOnce runs one child to its end. failure is what it said of its start.
func superviseOnce(ctx context.Context, again Again, k *keeper) (wasReady bool, failure, err error) {
	cmd := &exec.Cmd{
		Path: k.program, Env: os.Environ(), Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr,
		SysProcAttr: &syscall.SysProcAttr{Setpgid: true}, // a terminal's signals reach the child only by this process
	}
	cmd.Env = slices.DeleteFunc(cmd.Env, func(kv string) bool {
		name, _, _ := strings.Cut(kv, "=")
		return slices.Contains(managerEnv, name)
	})
	k.Lock()
	ours, theirs, err := k.gift(cmd)
	if err != nil {
		k.Unlock()
		return false, nil, fmt.Errorf("supervise: %w", err)
	}
	var keeping sync.WaitGroup
	keeping.Go(func() { k.serve(ours) })
	defer keeping.Wait()
	r, err := again.start(cmd)
	k.Unlock()
	_ = theirs.Close()
	if err != nil {
		return false, err, err
	}
	defer r.Close()
	ended := make(chan struct{})
	defer close(ended)
	go func() { // pass each signal on to the child
		for _, told := range []<-chan struct{}{ctx.Done(), hurried.Done()} {
			select {
			case <-told:
				managerStopping()
				_ = cmd.Process.Signal(syscall.SIGTERM)
			case <-ended:
				return
			}
		}
	}()
	if wasReady, failure = hear(r); wasReady {
		k.ready(cmd.Process.Pid)
	}
	if wasReady && !k.began {
		k.began = true
		if orphan := Own.Ready(); orphan != nil {
			_ = cmd.Process.Signal(syscall.SIGTERM)
			_ = cmd.Wait()
			return false, nil, orphan
		}
	}
	return wasReady, failure, cmd.Wait()
}

// The service manager (systemd, or any other that sets NOTIFY_SOCKET) follows this process's life through sd_notify(3),
// sent by the process that the manager started: for an attached verb that is the client.

// managerEnv are the manager's variables for its process, which children must not inherit.
var managerEnv = []string{"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"}

const startExtension = 30 * time.Second // that each sign of progress adds to the start

// manager is what a process that a manager may have started tells it.
var manager struct {
	serves string                          // for the status
	check  func(ctx context.Context) error // whether the daemon answers; nil: not a daemon
	stop   sync.Once
	over   context.Context // ends once it is stopping
	cancel func()
}

func init() { manager.over, manager.cancel = context.WithCancel(context.Background()) }

// Serves says what this process will serve, and how the manager's watchdog learns that it answers.
func Serves(what []string, check func(ctx context.Context) error) {
	manager.serves, manager.check = strings.Join(what, ", "), check
}

// tellManager sends lines such as READY=1. Without a manager it does nothing.
func tellManager(lines ...string) {
	if _, err := systemd.SdNotify(false, strings.Join(lines, "\n")); err != nil {
		slog.Warn("cannot notify the service manager", "message", lines[0], "cause", err)
	}
}

func usec(d time.Duration) string { return fmt.Sprintf("EXTEND_TIMEOUT_USEC=%d", d.Microseconds()) }

// managerReady reports that the daemon serves, and begins to feed the manager's watchdog.
func managerReady() {
	if manager.check == nil {
		return
	}
	tellManager("READY=1", "STATUS=serving "+manager.serves)
	interval, err := systemd.SdWatchdogEnabled(false)
	if err != nil {
		slog.Warn("the service manager's watchdog is not fed", "cause", err)
	}
	if interval > 0 {
		go feedWatchdog(interval)
	}
}

// managerStopping reports that the end has begun, and how long it may wait for readers.
func managerStopping() {
	manager.stop.Do(func() {
		manager.cancel()
		tellManager("STOPPING=1", "STATUS=draining", usec(DrainTime()+startExtension))
	})
}

// feedWatchdog tells the manager that the daemon is alive, each time that it has answered as it answers other
// processes. If it does not, nothing is sent, and the manager acts as configured.
func feedWatchdog(interval time.Duration) {
	for range pause.Every(manager.over, interval/3) {
		ctx, cancel := context.WithTimeout(manager.over, interval/2)
		err := manager.check(ctx)
		cancel()
		switch {
		case manager.over.Err() != nil:
			return
		case err == nil:
			tellManager("WATCHDOG=1")
		default:
			slog.Warn("the daemon does not answer; its watchdog is not fed", "cause", err)
		}
	}
}

const logName = "shoal.log" // in the cache directory, for a daemon's output

const (
	logTick = 2 * time.Second // between checks of a log's size, which it can exceed in between
	logSize = 10 << 20        // at which it is rotated: days of a busy daemon at level info
	logKeep = 1               // rotated logs to keep, in the cache directory, whose space is for samples
)

// RotateLog limits the size of a daemon's log until stop is called. It does nothing if standard error is another file.
//
// Standard output and error are the log's descriptors, not a writer of ours, so that the runtime's panics and a
// supervisor's messages are in the log, too. So the descriptors themselves are moved to the new file. A supervisor and
// its child share the log: one rotates it, and the other follows at its next check.
func RotateLog(cacheDir string) (stop func()) {
	path := filepath.Join(cacheDir, logName)
	if !isStderr(path) {
		return func() {}
	}
	ctx, cancel := context.WithCancel(context.Background())
	var looking sync.WaitGroup
	looking.Go(func() {
		warned := false
		for range pause.Every(ctx, logTick) {
			if err := lookAtLog(path); err != nil && !warned {
				warned = true
				slog.Warn("log is not rotated", "file", path, "cause", err)
			}
		}
	})
	return func() { cancel(); looking.Wait() }
}

func isStderr(path string) bool {
	a, _ := os.Stderr.Stat()
	b, _ := os.Stat(path)
	return os.SameFile(a, b)
}

// lookAtLog rotates the log if it is full, and switches to the new one, whichever process rotated it.
func lookAtLog(path string) error {
	if isStderr(path) {
		if info, err := os.Stderr.Stat(); err != nil || info.Size() < logSize {
			return err
		}
		if err := shiftLog(path); err != nil {
			return err
		}
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	for fd := 1; fd <= 2; fd++ {
		if err := unix.Dup3(int(f.Fd()), fd, 0); err != nil {
			return err
		}
	}
	return nil
}

// shiftLog renames the log, unless another process has just done so.
func shiftLog(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) || err == nil && !isStderr(path) {
		return nil
	} else if err != nil {
		return err
	}
	return audit.Shift(path, logKeep)
}
