package fusefs

import (
	"bytes"
	"context"
	"os"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// The kernel sends INTERRUPT when any signal reaches a thread that waits for a request, even one that the program
// handles and then continues after: the Go runtime preempts with SIGURG, others have SIGCHLD or a timer. Answering
// EINTR would fail reads in spite of SA_RESTART, and turn a page fault of a mapped file into SIGBUS. So an interrupted
// request is given up only if its caller is about to die, according to /proc, as with a disk or a hard NFS mount.

// requestContext is a context over go-fuse's cancel channel. It has one word, so it costs no allocation, and no
// goroutine.
type requestContext struct{ cancel <-chan struct{} }

func (c requestContext) Deadline() (time.Time, bool) { return time.Time{}, false }
func (c requestContext) Done() <-chan struct{}       { return c.cancel }
func (c requestContext) Value(any) any               { return nil }
func (c requestContext) Err() error {
	if interrupted(c.cancel) {
		return context.Canceled
	}
	return nil
}

func interrupted(cancel <-chan struct{}) bool {
	select {
	case <-cancel:
		return true
	default:
		return false
	}
}

// dyingPoll is how often an interrupted caller is checked. The kernel sends only one INTERRUPT per request, so a
// later signal that kills must be polled for.
const dyingPoll = 50 * time.Millisecond

// callerContext returns a context that ends when the thread tid, whose request may have been
// interrupted, is about to die, or when the server stops. stop frees it and waits for its goroutine.
func callerContext(cancel, stopping <-chan struct{}, tid uint32) (ctx context.Context, stop func()) {
	ctx, cancelCtx := context.WithCancel(context.Background())
	var watching sync.WaitGroup
	watching.Go(func() {
		defer cancelCtx()
		select {
		case <-ctx.Done():
			return
		case <-cancel:
		}
		for !dying(tid) {
			select {
			case <-ctx.Done():
				return
			case <-stopping:
				return
			case <-time.After(dyingPoll):
			}
		}
	})
	return ctx, func() { cancelCtx(); watching.Wait() }
}

// harmless are the signals whose default action is to ignore, stop or continue.
const harmless = 1<<(unix.SIGCHLD-1) | 1<<(unix.SIGCONT-1) | 1<<(unix.SIGURG-1) | 1<<(unix.SIGWINCH-1) |
	1<<(unix.SIGSTOP-1) | 1<<(unix.SIGTSTP-1) | 1<<(unix.SIGTTIN-1) | 1<<(unix.SIGTTOU-1)

// dying reports whether a pending signal will end the thread. An invisible thread, because it is gone or in another
// process namespace, counts as dying.
func dying(tid uint32) bool {
	if tid == 0 {
		return true
	}
	status, err := os.ReadFile("/proc/" + strconv.FormatUint(uint64(tid), 10) + "/status")
	if err != nil {
		return true
	}
	var pending, survived uint64
	for line := range bytes.Lines(status) {
		name, value, _ := bytes.Cut(line, []byte(":"))
		mask, err := strconv.ParseUint(string(bytes.TrimSpace(value)), 16, 64)
		if err != nil {
			continue
		}
		switch string(name) {
		case "SigPnd", "ShdPnd":
			pending |= mask
		case "SigBlk", "SigIgn", "SigCgt":
			survived |= mask
		}
	}
	return pending&^survived&^harmless != 0
}
