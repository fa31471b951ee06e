package subproc

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// TestMain lets this test binary play the parent that dies in TestChildDiesWithParent.
func TestMain(m *testing.M) {
	if os.Getenv("SUBPROC_TEST_PARENT") != "" {
		p, err := Start("sleep", exec.Command("sleep", "600"))
		if err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		fmt.Println(p.Pid())
		select {}
	}
	os.Exit(m.Run())
}

// gone waits until no process pid (or only a zombie) is left.
func gone(t *testing.T, pid int) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil || bytes.Contains(b, []byte(") Z ")) {
			return
		}
	}
	t.Fatalf("process %d is still there", pid)
}

func TestWaitReturnsOutputOfFailedChild(t *testing.T) {
	var out bytes.Buffer
	cmd := exec.Command("sh", "-c", "echo hello; echo why it failed >&2; exit 3")
	cmd.Stdout = &out
	p, err := Start("the child", cmd)
	if err != nil {
		t.Fatal(err)
	}
	err = p.Wait(t.Context())
	if err == nil || !strings.Contains(err.Error(), "the child") || !strings.Contains(err.Error(), "why it failed") ||
		!strings.Contains(err.Error(), "hello") {
		t.Fatalf("got %v, want an error with the name and the output", err)
	}
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != 3 {
		t.Fatalf("got %v, want exit status 3 in the chain", err)
	}
	if out.String() != "hello\n" {
		t.Fatalf("the writer got %q", out.String())
	}
}

func TestStopKillsWholeGroup(t *testing.T) {
	// The shell ignores SIGTERM, its child too: only SIGKILL to the group ends both.
	cmd := exec.Command("sh", "-c", "trap '' TERM; sleep 600 & echo $!; wait; sleep 600")
	out := &firstLine{line: make(chan string, 1)}
	cmd.Stdout = out
	p, err := Start("sh", cmd)
	if err != nil {
		t.Fatal(err)
	}
	grandchild, err := strconv.Atoi(<-out.line)
	if err != nil {
		t.Fatal(err)
	}
	p.Stop(50 * time.Millisecond)
	p.Stop(50 * time.Millisecond) // a second call is harmless
	gone(t, p.Pid())
	gone(t, grandchild)
}

// TestGrandchildKeepsTheOutput: what a child leaves behind with its output open makes no failure of its success.
func TestGrandchildKeepsTheOutput(t *testing.T) {
	out := &firstLine{line: make(chan string, 1)}
	cmd := exec.Command("sh", "-c", "sleep 600 & echo $!")
	cmd.Stdout = out
	p, err := Start("sh", cmd)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Wait(t.Context()); err != nil {
		t.Error(err)
	}
	grandchild, err := strconv.Atoi(<-out.line)
	if err != nil {
		t.Fatal(err)
	}
	gone(t, grandchild)
}

func TestWaitStopsChildWhenContextEnds(t *testing.T) {
	p, err := Start("sleep", exec.Command("sleep", "600"))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if err := p.Wait(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("got %v", err)
	}
	gone(t, p.Pid())
}

func TestFailed(t *testing.T) {
	p, err := Start("sh", exec.Command("sh", "-c", "read x; exit 0"))
	if err != nil {
		t.Fatal(err)
	}
	<-p.Done() // stdin is /dev/null, so it ends at once
	if p.Failed() == nil {
		t.Fatal("a child that ended counts as running")
	}
	q, err := Start("sleep", exec.Command("sleep", "600"))
	if err != nil {
		t.Fatal(err)
	}
	defer q.Stop(time.Second)
	if err := q.Failed(); err != nil {
		t.Fatal(err)
	}
}

func TestChildDiesWithParent(t *testing.T) {
	parent := exec.Command(os.Args[0])
	parent.Env = append(os.Environ(), "SUBPROC_TEST_PARENT=1")
	out, err := parent.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := parent.Start(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	child, err := strconv.Atoi(strings.TrimSpace(line))
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(parent.Process.Pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	_ = parent.Wait()
	gone(t, child)
}

// firstLine is a writer that hands over the first line written to it.
type firstLine struct {
	mu   sync.Mutex
	buf  bytes.Buffer
	sent bool
	line chan string
}

func (f *firstLine) Write(b []byte) (int, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.buf.Write(b)
	if s, _, ok := strings.Cut(f.buf.String(), "\n"); ok && !f.sent {
		f.sent = true
		f.line <- s
	}
	return len(b), nil
}
