package daemon

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/internal/audit"
	"github.com/shoalfs/shoal/internal/pause"
)

// logName is the file in the cache directory for a daemon's output.
const logName = "shoal.log"

const (
	// logTick is how often a daemon checks its log's size, which it can exceed in between.
	logTick = 2 * time.Second
	// logSize is the size at which it is rotated: days of a busy daemon at level info.
	logSize = 10 << 20
	// logKeep is the number of rotated logs to keep. They are in the cache directory, whose space is for samples.
	logKeep = 1
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
