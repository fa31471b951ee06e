package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"syscall"
	"time"
)

// supervisedEnv marks a process started by a supervisor.
const supervisedEnv = "SHOAL_SUPERVISED"

const (
	// A daemon that dies is restarted after firstPause, which doubles with each death within calm of its start, up to
	// longestPause.
	firstPause   = 100 * time.Millisecond
	longestPause = 10 * time.Second
	calm         = time.Minute
)

// supervise runs this process's command as a child, and restarts it whenever it dies after being ready. It stops if the
// child ends in an orderly way, or does not become ready the first time. In the child it returns false at
// once.
func supervise(ctx context.Context) (parent bool, err error) {
	if os.Getenv(supervisedEnv) != "" {
		return false, os.Unsetenv(supervisedEnv)
	}
	pause := firstPause
	for first := true; ; first = false {
		start := time.Now()
		wasReady, err := superviseOnce(ctx, first)
		var exit *exec.ExitError
		switch {
		case err == nil:
			return true, nil
		case ctx.Err() != nil:
			return true, ctx.Err()
		case !errors.As(err, &exit):
			return true, err
		case first && !wasReady:
			// The child has reported the error, on the same standard error or to the parent of the daemon.
			os.Exit(exit.ExitCode())
		}
		if time.Since(start) > calm {
			pause = firstPause
		}
		slog.Error("the daemon died; restarting it", "cause", exit.String(), "pause", pause)
		select {
		case <-ctx.Done():
			return true, ctx.Err()
		case <-time.After(pause):
		}
		pause = min(2*pause, longestPause)
	}
}

// superviseOnce runs one child to its end.
func superviseOnce(ctx context.Context, first bool) (wasReady bool, err error) {
	cmd := &exec.Cmd{
		Env: append(withoutManager(os.Environ()), supervisedEnv+"=1"), Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr,
		SysProcAttr: &syscall.SysProcAttr{Setpgid: true}, // so that a terminal's signals reach the child only through this process
	}
	r, err := startAgain(cmd)
	if err != nil {
		return false, fmt.Errorf("supervise: %w", err)
	}
	defer r.Close()
	ended := make(chan struct{})
	defer close(ended)
	go func() { // pass each signal on to the child
		for _, told := range []<-chan struct{}{ctx.Done(), hurry} {
			select {
			case <-told:
				serviceStopping()
				_ = cmd.Process.Signal(syscall.SIGTERM)
			case <-ended:
				return
			}
		}
	}()
	wasReady, failure := readReadiness(r, func(text string) { notice("%s", text) })
	if wasReady && first {
		if orphan := ready(); orphan != nil {
			_ = cmd.Process.Signal(syscall.SIGTERM)
			_ = cmd.Wait()
			return false, orphan
		}
	}
	err = cmd.Wait()
	if failure != nil && first && !wasReady {
		return false, failure
	}
	return wasReady, err
}
