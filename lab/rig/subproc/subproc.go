// Package subproc runs child processes that never outlive their parent.
//
// Three traps are handled here once:
//
//   - PR_SET_PDEATHSIG is delivered when the *thread* that forked the child ends, not the process.
//     [Start] therefore forks from a goroutine that is locked to its thread and stays there until
//     the child has been waited for.
//   - Killing a child does not kill what the child started (DataLoader workers, for one). Each
//     child leads a process group of its own and [Proc.Stop] signals the whole group. The group
//     also keeps a terminal's Ctrl-C away from the child: the parent alone decides the order in
//     which things end.
//   - A child that fails at start says why on stderr, and that text must reach the error message.
//     The last lines of its output are kept.
package subproc

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
)

// tailBytes is how much of a child's output is kept for error messages.
const tailBytes = 8 << 10

// Proc is a running or finished child process.
type Proc struct {
	name string
	cmd  *exec.Cmd
	tail *tailWriter
	done chan struct{}
	err  error // valid once done is closed
}

// Start runs cmd as the leader of a new process group. The child is killed when this process ends in
// any way; what is left of its group is killed when the child itself ends. name is used in errors. Where cmd.Stdout or
// cmd.Stderr is nil, that output goes only to the tail (see [Proc.Tail]); otherwise to both.
func Start(name string, cmd *exec.Cmd) (*Proc, error) {
	p := &Proc{name: name, cmd: cmd, tail: &tailWriter{}, done: make(chan struct{})}
	for _, out := range []*io.Writer{&cmd.Stdout, &cmd.Stderr} {
		if *out == nil {
			*out = p.tail
		} else {
			*out = io.MultiWriter(*out, p.tail)
		}
	}
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Setpgid = true
	cmd.SysProcAttr.Pdeathsig = syscall.SIGKILL
	// A grandchild that inherited the output pipe must not keep Wait from returning for ever.
	cmd.WaitDelay = 2 * time.Second

	started := make(chan error)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err != nil {
			return
		}
		if p.err = cmd.Wait(); errors.Is(p.err, exec.ErrWaitDelay) {
			p.err = nil // it exited with status 0, and a grandchild had its output open still
		}
		// Now, not later: until the number is reused it can hit no stranger.
		_ = p.Signal(syscall.SIGKILL)
		close(p.done)
	}()
	if err := <-started; err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	return p, nil
}

// Pid returns the child's process id, which is also its process group's.
func (p *Proc) Pid() int { return p.cmd.Process.Pid }

// Done is closed when the child has ended and been waited for.
func (p *Proc) Done() <-chan struct{} { return p.done }

// Tail returns the last lines that the child wrote to stdout and stderr.
func (p *Proc) Tail() string { return p.tail.String() }

// Wait waits for the child to end and returns nil if it exited with status 0, else an error that
// holds the last lines of its output. When ctx ends first the child is stopped and ctx's error
// returned.
func (p *Proc) Wait(ctx context.Context) error {
	select {
	case <-p.done:
		return p.exitError()
	case <-ctx.Done():
		p.Stop(3 * time.Second)
		return fmt.Errorf("%s: %w", p.name, context.Cause(ctx))
	}
}

func (p *Proc) exitError() error {
	if p.err == nil {
		return nil
	}
	tail := p.Tail()
	if tail == "" {
		return fmt.Errorf("%s: %w", p.name, p.err)
	}
	return fmt.Errorf("%s: %w; its last output:\n%s", p.name, p.err, indent(tail))
}

func indent(s string) string {
	return "  | " + strings.ReplaceAll(strings.TrimRight(s, "\n"), "\n", "\n  | ")
}

// Failed returns an error for a child that ended although it should be running, else nil.
func (p *Proc) Failed() error {
	select {
	case <-p.done:
		if err := p.exitError(); err != nil {
			return err
		}
		return fmt.Errorf("%s: ended by itself; its last output:\n%s", p.name, indent(p.Tail()))
	default:
		return nil
	}
}

// Until waits until ready returns no error. It fails when the child ends before that, or ctx does.
func (p *Proc) Until(ctx context.Context, ready func(ctx context.Context) error) error {
	for {
		err := ready(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-p.done:
			return p.Failed()
		case <-ctx.Done():
			return fmt.Errorf("%s is not ready: %w: %w; its last output:\n%s",
				p.name, context.Cause(ctx), err, indent(p.Tail()))
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// Signal sends sig to the child's process group, as the function does.
func (p *Proc) Signal(sig syscall.Signal) error { return Signal(-p.Pid(), sig) }

// Signal sends sig to a process, or to the group -pid. One that is gone is not an error. After SIGSTOP it returns when
// no thread of the process, or of the group's leader, runs: kill(2) returns before, and it may answer for a while.
func Signal(pid int, sig syscall.Signal) error {
	if err := syscall.Kill(pid, sig); err != nil && !errors.Is(err, syscall.ESRCH) {
		return err
	}
	stats := fmt.Sprintf("/proc/%d/task/*/stat", max(pid, -pid))
	for sig == syscall.SIGSTOP {
		threads, err := filepath.Glob(stats)
		if err != nil || !slices.ContainsFunc(threads, func(stat string) bool {
			b, _ := os.ReadFile(stat)
			return bytes.ContainsAny(b[bytes.LastIndexByte(b, ')')+1:], "RS") // what it runs, or waits in
		}) {
			return err
		}
		time.Sleep(time.Millisecond)
	}
	return nil
}

// Stop asks the child's group to end with SIGTERM, and after grace makes it, with SIGKILL. It
// returns when the child has been waited for. Stop may be called more than once.
func (p *Proc) Stop(grace time.Duration) {
	select {
	case <-p.done:
		return
	default:
	}
	_ = p.Signal(syscall.SIGTERM)
	select {
	case <-p.done:
	case <-time.After(grace):
		_ = p.Signal(syscall.SIGKILL)
		<-p.done
	}
}

// tailWriter keeps the last tailBytes written to it.
type tailWriter struct {
	mu  sync.Mutex
	buf []byte
}

func (t *tailWriter) Write(b []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.buf = append(t.buf, b...)
	if over := len(t.buf) - tailBytes; over > 0 {
		t.buf = append(t.buf[:0], t.buf[over:]...)
	}
	return len(b), nil
}

// String returns at most the last 20 lines.
func (t *tailWriter) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	lines := strings.Split(strings.TrimRight(string(t.buf), "\n"), "\n")
	return strings.Join(lines[max(len(lines)-20, 0):], "\n")
}
