package daemon

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/shoalfs/shoal/internal/cli"
	"github.com/shoalfs/shoal/internal/handover"
	"github.com/shoalfs/shoal/internal/pause"
)

// fakeDaemon listens as the daemon of a cache directory, and does with each question what answer does.
func fakeDaemon(t *testing.T, answer func(q question, conn net.Conn)) (cacheDir string) {
	t.Helper()
	cacheDir = t.TempDir()
	l, err := listenUnix(socketOf(cacheDir))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				var q question
				line, err := bufio.NewReader(conn).ReadBytes('\n')
				if err == nil && json.Unmarshal(line, &q) == nil {
					answer(q, conn)
				}
			}()
		}
	}()
	return cacheDir
}

func list(t *testing.T, cacheDir string, out io.Writer) error {
	return Ask(t.Context(), OfCache(cacheDir), []string{"cache", "ls"}, nil, out)
}

// Who stands in a folder that was removed may still name another by its path.
func TestAskFromNowhere(t *testing.T) {
	var said bytes.Buffer
	dir := fakeDaemon(t, func(q question, conn net.Conn) {
		b, _ := json.Marshal(line{ID: q.ID, Out: q.Dir})
		end, _ := json.Marshal(line{ID: q.ID, Ended: &ending{}})
		_, _ = fmt.Fprintf(conn, "%s\n%s\n", b, end)
	})
	gone := filepath.Join(t.TempDir(), "gone")
	if err := os.Mkdir(gone, 0o700); err != nil {
		t.Fatal(err)
	}
	t.Chdir(gone)
	if err := os.Remove(gone); err != nil {
		t.Fatal(err)
	}
	if err := list(t, dir, &said); err != nil || !strings.HasPrefix(said.String(), gone) {
		t.Errorf("%q, %v", &said, err)
	}
}

// A verb that waits for a daemon to end says so.
func TestGoneSaysThatItWaits(t *testing.T) {
	var said bytes.Buffer
	defer slog.SetDefault(slog.Default())
	slog.SetDefault(slog.New(slog.NewJSONHandler(&said, nil)))
	JSON.Store(true)
	defer JSON.Store(false)
	synctest.Test(t, func(t *testing.T) {
		if Gone(t.Context(), os.Getpid(), 2*Patience) {
			t.Error("this process has ended")
		}
		synctest.Wait()
		text := fmt.Sprintf("waiting for the daemon (pid %d) to end", os.Getpid())
		if strings.Count(said.String(), text) != 1 {
			t.Errorf("%q", &said)
		}
	})
}

// A name that JSON cannot hold would become another one: a mount at a folder that nobody has named.
func TestAskInUTF8(t *testing.T) {
	dir := fakeDaemon(t, func(q question, _ net.Conn) { t.Errorf("it was asked for %q", q.Args) })
	err := Ask(t.Context(), OfCache(dir), []string{"mount", "/data", "/mnt/caf\xe9"}, nil, io.Discard)
	if err == nil || !strings.Contains(err.Error(), `"/mnt/caf\xe9" is not UTF-8`) {
		t.Error(err)
	}
}

// Where all must be JSON, progress is.
func TestStepsInJSON(t *testing.T) {
	var said bytes.Buffer
	defer slog.SetDefault(slog.Default())
	slog.SetDefault(slog.New(slog.NewJSONHandler(&said, nil)))
	JSON.Store(true)
	defer JSON.Store(false)
	Own.Step("warming").Done("3 files")
	for _, want := range []string{`"msg":"warming ..."}`, `  3 files"}`} {
		if !strings.Contains(said.String(), want) {
			t.Errorf("%s is not in %q", want, &said)
		}
	}
}

// A moment without descriptors does not make a daemon deaf.
func TestAcceptWithoutDescriptors(t *testing.T) {
	l, err := listenUnix(filepath.Join(t.TempDir(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	client, err := net.Dial("unix", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	said := make(chan struct{}, 100)
	defer slog.SetDefault(slog.Default())
	slog.SetDefault(slog.New(slog.NewTextHandler(writerFunc(func(p []byte) (int, error) {
		said <- struct{}{}
		return len(p), nil
	}), nil)))
	var limit syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	none := limit
	none.Cur = 3
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &none); err != nil {
		t.Fatal(err)
	}
	accepted := make(chan error)
	go func() {
		conn, err := handover.Accept(l.AcceptUnix, slog.Default())
		if err == nil {
			conn.Close()
		}
		accepted <- err
	}()
	<-said
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	if err := <-accepted; err != nil {
		t.Error(err)
	}
	l.Close()
	if _, err := handover.Accept(l.AcceptUnix, slog.Default()); !errors.Is(err, net.ErrClosed) {
		t.Error(err)
	}
}

type writerFunc func(p []byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

// A daemon that takes the question and says nothing: one that is stopped hangs, any other gets a minute.
func TestSilence(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		program string
		silent  time.Duration
		hangs   bool
	}{
		{"exec sleep 1h", Patience - time.Second, false},
		{"exec sleep 1h", Patience + time.Second, false},
		{"exec sleep 1h", time.Minute + time.Second, true},
		{"kill -STOP $$", Patience - time.Second, false},
		{"kill -STOP $$", Patience + time.Second, true},
	} {
		daemon := exec.Command("sh", "-c", c.program)
		if err := daemon.Start(); err != nil {
			t.Fatal(err)
		}
		pid := daemon.Process.Pid
		for strings.HasPrefix(c.program, "kill") && stateOf(pid) != "T" {
			_ = pause.For(t.Context(), time.Millisecond)
		}
		since := time.Now().Add(-c.silent)
		a := &asking{Silence: Silence{Asked: OfCache("/c"), pid: pid, since: since}}
		err := a.quiet(t.Context())
		if errors.As(err, new(Silence)) != c.hangs || err != nil &&
			!strings.Contains(err.Error(), fmt.Sprintf("(pid %d) of /c does not answer since", pid)) {
			t.Errorf("%s, silent for %v: %v", c.program, c.silent, err)
		}
		_ = daemon.Process.Kill()
		_ = daemon.Wait()
	}
}

// Each answer names its question. What names none is of an older version, and what names another one is for somebody
// else.
func TestAnswersNameTheirQuestion(t *testing.T) {
	t.Parallel()
	for _, text := range []string{`{"out":"x"}`, `{"id":"another","out":"x"}`} {
		dir := fakeDaemon(t, func(_ question, conn net.Conn) { fmt.Fprintln(conn, text) })
		var out strings.Builder
		err := list(t, dir, &out)
		if err == nil || !strings.Contains(err.Error(), "is of another version") || out.Len() > 0 {
			t.Errorf("%s: %v, %q", text, err, out.String())
		}
	}
	dir := fakeDaemon(t, func(q question, conn net.Conn) {
		v := &Voice{to: conn, id: q.ID}
		_ = v.say(line{})
		_, _ = v.Write([]byte("x"))
		_ = v.say(line{Ended: &ending{}})
	})
	var out strings.Builder
	if err := list(t, dir, &out); err != nil || out.String() != "x" {
		t.Errorf("%v, %q", err, out.String())
	}
}

// A line may come in pieces, with more than a beat between them, and two may come at once.
func TestLinesInPieces(t *testing.T) {
	t.Parallel()
	dir := fakeDaemon(t, func(q question, conn net.Conn) {
		text := fmt.Sprintf(`{"id":%q,"out":"one"}`, q.ID)
		fmt.Fprint(conn, text[:9])
		<-time.After(beat * 3 / 2)
		fmt.Fprintf(conn, "%s\n{\"id\":%q,\"out\":\" two\"}\n{\"id\":%q,\"ended\":{\"code\":0}}\n",
			text[9:], q.ID, q.ID)
	})
	var out strings.Builder
	if err := list(t, dir, &out); err != nil || out.String() != "one two" {
		t.Errorf("%v, %q", err, out.String())
	}
}

// A child speaks by the pipe as a verb does by a socket: notices, until it is ready or says why not.
func TestAChildSpeaks(t *testing.T) {
	for _, c := range []struct {
		name   string
		says   func(v *Voice)
		became bool
		want   string
	}{
		{"ready", func(v *Voice) { v.Notice("listing"); _ = v.say(line{Ready: true}) }, true, ""},
		{"failed", func(v *Voice) { _ = v.say(line{Ended: &ending{2, "--order: no"}}) }, false, "--order: no"},
		{"dead", func(v *Voice) { v.Notice("listing") }, false, ""},
	} {
		r, w, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		v := &Voice{to: w}
		c.says(v)
		v.hush()
		became, failure := hear(r)
		r.Close()
		if became != c.became || (failure == nil) != (c.want == "") ||
			failure != nil && (failure.Error() != c.want || cli.Code(failure) != 2) {
			t.Errorf("%s: %v, %v", c.name, became, failure)
		}
	}
}

// TestVerbsBeginAsTheLastEnds: who waits for the verbs does not mind one that begins just then.
func TestVerbsBeginAsTheLastEnds(t *testing.T) {
	var v verbs
	<-v.ended()
	for range 20_000 {
		last := make(chan struct{})
		v.Go(func() { <-last })
		idle := v.ended()
		close(last)
		v.Go(func() {})
		<-idle
	}
	running := make(chan struct{})
	v.Go(func() { <-running })
	idle := v.ended()
	select {
	case <-idle:
		t.Error("ended while one runs")
	default:
	}
	close(running)
	<-idle
}

// TestAttachToOneThatEnds: a daemon that closes its socket before it has read what is asked is ending, and the verb
// tries again. What is asked is more than a socket holds, so the writing of it fails.
func TestAttachToOneThatEnds(t *testing.T) {
	dir := t.TempDir()
	l, err := listenUnix(socketOf(dir))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		if conn, err := l.Accept(); err == nil {
			_, _ = conn.Read(make([]byte, 1))
			conn.Close()
		}
	}()
	env := map[string]string{"AWS_LONG": strings.Repeat("x", 4<<20)}
	if err := Ask(t.Context(), OfCache(dir), []string{"cache", "ls"}, env, nil); !errors.Is(err, ErrEnding) {
		t.Errorf("%v, want %v", err, ErrEnding)
	}
}

// TestPIDOfALongPath: a cache directory's path may be longer than a socket's.
func TestPIDOfALongPath(t *testing.T) {
	dir := filepath.Join(t.TempDir(), strings.Repeat("d", maxSocketPath))
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	l, err := listenUnix(socketOf(dir))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if pid := OfCache(dir).PID(); pid != os.Getpid() || OfCache(t.TempDir()).PID() != 0 {
		t.Errorf("process %d", pid)
	}
}

// busyMount has a file open for ever. To name its users takes long.
type busyMount struct {
	named, aborted int
	gone           chan struct{}
}

func (m *busyMount) Drain()         {}
func (m *busyMount) OpenFiles() int { return 1 }
func (m *busyMount) Abort() error   { m.aborted++; close(m.gone); return nil }
func (m *busyMount) Unmount(bool) error {
	m.named++
	return errors.New("in use by a reader")
}

// At the deadline a mount in use is detached at once: the process is about to be ended, and would leave it dead.
func TestDrainNamesUsersOnce(t *testing.T) {
	t.Setenv(DrainEnv, "50ms")
	var log bytes.Buffer
	l := &Life{}
	d := l.Drain(slog.New(slog.NewTextHandler(&log, nil)), func() {})
	m := &busyMount{gone: make(chan struct{})}
	if err := d.End(d.Mount(m, "/m", m.gone)); err != nil || m.named != 1 || m.aborted != 1 ||
		!strings.Contains(log.String(), "in use by a reader") {
		t.Errorf("%v, named %d times, detached %d times:\n%s", err, m.named, m.aborted, &log)
	}
}

// stuckMount takes its time to find out who uses it.
type stuckMount struct {
	busyMount
	asked chan struct{}
}

func (m *stuckMount) Unmount(bool) error { close(m.asked); <-m.gone; return nil }

// An end that is cut off leaves no dead mount.
func TestCutOffDetaches(t *testing.T) {
	d := (&Life{}).Drain(slog.New(slog.DiscardHandler), func() {})
	m := &stuckMount{busyMount{gone: make(chan struct{})}, make(chan struct{})}
	ended := make(chan error)
	go func() { ended <- d.End(d.Mount(m, "/m", m.gone)) }()
	<-m.asked
	d.cutOff()
	if err := <-ended; err != nil || m.aborted != 1 {
		t.Errorf("%v, detached %d times", err, m.aborted)
	}
}

// heldMount has a file open, and cannot be aborted.
type heldMount struct{ busyMount }

func (m *heldMount) Abort() error { return nil }

// lines are what a log has written, one by one.
type lines chan string

func (l lines) Write(p []byte) (int, error) {
	l <- string(p)
	return len(p), nil
}

// A mount that is held by its reader does not end the process while that serves others.
func TestHeldMountBesideOthers(t *testing.T) {
	t.Setenv(DrainEnv, "50ms")
	var other, l Life
	other.Ready()
	l.Ready()
	log := make(lines, 10)
	d := l.Drain(slog.New(slog.NewTextHandler(log, nil)), func() {})
	m := &heldMount{busyMount{gone: make(chan struct{})}}
	ended := make(chan error)
	go func() {
		err := d.Mount(m, "/m", m.gone)
		if errors.Is(err, ErrHeld) {
			err = d.Outlast("/m", m.gone)
		}
		ended <- d.End(err)
	}()
	for said := ""; !strings.Contains(said, "until it closes them"); {
		said = <-log
	}
	select {
	case err := <-ended:
		t.Fatalf("it ended under its reader: %v", err)
	default:
	}
	close(m.gone)
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if other.Drain(slog.New(slog.DiscardHandler), func() {}); serving.Load() != 0 {
		t.Errorf("%d are still served", serving.Load())
	}
}

// The service manager hears of the end of the last thing that is served, and of none before: it would end the others.
func TestManagerHearsOfTheLast(t *testing.T) {
	manager.stop = sync.Once{}
	manager.over, manager.cancel = context.WithCancel(context.Background())
	defer manager.cancel()
	var a, b Life
	a.Ready()
	b.Ready()
	for _, l := range []*Life{&a, &b} {
		if manager.over.Err() != nil {
			t.Error("it was told while something is served")
		}
		_ = l.Drain(slog.New(slog.DiscardHandler), func() {}).End(nil)
	}
	if manager.over.Err() == nil {
		t.Error("it was not told of the last one")
	}
}
