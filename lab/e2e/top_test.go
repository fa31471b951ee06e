package e2e

import (
	"bytes"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/creack/pty"
)

// screen is what a program has written to its terminal.
type screen struct {
	mu   sync.Mutex
	data bytes.Buffer
	done chan struct{}
}

func watch(f io.Reader) *screen {
	s := &screen{done: make(chan struct{})}
	go func() {
		defer close(s.done)
		p := make([]byte, 4096)
		for {
			n, err := f.Read(p)
			s.mu.Lock()
			s.data.Write(p[:n])
			s.mu.Unlock()
			if err != nil { // EIO when the other end is closed
				return
			}
		}
	}()
	return s
}

func (s *screen) raw() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.data.String()
}

// since waits until text was written after the first n bytes.
func (s *screen) since(t *testing.T, n int, text string) {
	t.Helper()
	within(t, 2*time.Minute, text, func() bool { return strings.Contains(s.raw()[n:], text) })
}

// TestTop runs shoal top in a terminal, on a mount.
func TestTop(t *testing.T) {
	dir, paths := tree(t, 2, 20, 4096)
	mnt := mount(t, nil, "file://"+dir, "--order", "torch:seed=1", "--kernel-cache", "off")
	readAll(t, mnt, dir, paths)

	c := exec.Command(shoalBin, "top", mnt, "--interval", "200ms")
	c.Env = append(os.Environ(), "TERM=xterm-256color", "NO_COLOR=")
	tty, err := pty.StartWithSize(c, &pty.Winsize{Rows: 24, Cols: 80})
	if err != nil {
		t.Fatal(err)
	}
	defer tty.Close()
	s := watch(tty)
	ended := make(chan error, 1)
	go func() { ended <- c.Wait() }()
	t.Cleanup(func() { _ = c.Process.Kill() })

	s.since(t, 0, "file://"+dir)
	s.since(t, 0, "mount, epoch ")
	n := len(s.raw())
	if _, _, code := shoal(t, nil, "umount", mnt); code != 0 {
		t.Fatal("umount", code)
	}
	s.since(t, n, "asking again")
	if err := c.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-ended:
		if err != nil {
			t.Errorf("it ended with %v\n%q", err, s.raw())
		}
	case <-time.After(2 * time.Minute):
		t.Fatal("Ctrl-C does not end it")
	}
}

// Without a terminal, and with --once, it prints a frame.
func TestTopOnce(t *testing.T) {
	dir, paths := tree(t, 2, 20, 4096)
	mnt := mount(t, nil, "file://"+dir, "--order", "torch:seed=1", "--admin", "127.0.0.1:0", "--cache-dir", t.TempDir())
	readAll(t, mnt, dir, paths)
	out, errs, code := shoal(t, nil, "top", mnt, "--interval", "100ms")
	if code != 0 || strings.Contains(out, "\x1b") || !strings.Contains(out, "torch:seed=1") ||
		!strings.Contains(out, "now ") {
		t.Errorf("exit %d, %s\n%s", code, errs, out)
	}
	for _, bad := range []struct {
		args []string
		code int
		want string
	}{
		{[]string{"top", filepath.Join(dir, "class00")}, 1, "is not a live shoal mount"},
		{[]string{"top", "http://127.0.0.1:1"}, 1, "--admin"},
		{[]string{"top", mnt, "--interval", "1ms"}, 2, "100ms"},
		{[]string{"top", "a", "b"}, 2, "is one too many"},
	} {
		if _, errs, code := shoal(t, nil, bad.args...); code != bad.code || !strings.Contains(errs, bad.want) {
			t.Errorf("%v: exit %d, %s", bad.args, code, errs)
		}
	}

	for _, args := range [][]string{{"stat", mnt, "--watch", "--interval", "100ms"}, {"top", mnt, "--once"}} {
		if out, errs, code := shoal(t, nil, args...); code != 0 || strings.Contains(out, "\x1b") ||
			!strings.Contains(out, "torch:seed=1") || !strings.Contains(out, "now ") {
			t.Errorf("%v: exit %d, %s\n%s", args, code, errs, out)
		}
	}
}
