package audit

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func quiet() *slog.Logger { return slog.New(slog.NewTextHandler(io.Discard, nil)) }

func until(t *testing.T, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("never")
		}
	}
}

// events reads the lines of a log, the oldest file first.
func events(t *testing.T, path string, keep int) (all []Event) {
	t.Helper()
	for i := keep; i >= 0; i-- {
		name := path
		if i > 0 {
			name = fmt.Sprintf("%s.%d", path, i)
		}
		b, err := os.ReadFile(name)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(b)) {
			var e Event
			d := json.NewDecoder(strings.NewReader(line))
			d.DisallowUnknownFields()
			if err := d.Decode(&e); err != nil || !strings.HasSuffix(line, "\n") {
				t.Fatalf("%s: %q: %v", name, line, err)
			}
			all = append(all, e)
		}
	}
	return all
}

// TestRotation writes from many goroutines through many rotations: every line is whole, in one file, in
// the order of its writer, and only the oldest are gone.
func TestRotation(t *testing.T) {
	path := filepath.Join(t.TempDir(), "audit.log")
	const keep, writers, each, limit = 4, 8, 200, 30_000
	log, err := Open(Options{Path: path, MaxBytes: limit, Keep: keep, Logger: quiet()})
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for w := range writers {
		wg.Go(func() {
			l := log.With(Event{Source: "s3://b/p"})
			for i := range each {
				l.Write(Event{Event: "feed_open", Session: fmt.Sprint(w), Rank: new(i)})
			}
		})
	}
	wg.Wait()
	// Close waits for a disk that hangs no longer than closeWait, and rotations sync theirs.
	until(t, func() bool { written, lost := log.Counts(); return written+lost == writers*each })
	if err := log.Close(); err != nil {
		t.Fatal(err)
	}
	log.Write(Event{Event: "too late"})
	written, lost := log.Counts()
	if written != writers*each || lost != 0 {
		t.Errorf("%d written, %d lost", written, lost)
	}
	next := map[string]int{}
	got := events(t, path, keep)
	for _, e := range got {
		if want, seen := next[e.Session]; seen && *e.Rank != want {
			t.Errorf("writer %s: %d after %d", e.Session, *e.Rank, want-1)
		}
		next[e.Session] = *e.Rank + 1
		if e.Source != "s3://b/p" || e.Daemon != os.Getpid() || e.Time.IsZero() {
			t.Errorf("%+v", e)
		}
	}
	for w := range writers {
		if n, seen := next[fmt.Sprint(w)]; seen && n != each { // unless it ended before the others began
			t.Errorf("the last of writer %d is %d", w, n-1)
		}
	}
	files, _ := filepath.Glob(path + "*")
	if len(files) != keep+1 || len(got) == writers*each {
		t.Errorf("%v, %d events: nothing was dropped, so the test shows nothing of it", files, len(got))
	}
	for _, f := range files {
		if info, err := os.Stat(f); err != nil || info.Size() > limit || info.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v, %v", f, info, err)
		}
	}
}

// TestMovedAway plays logrotate, and a process that comes when another has the file.
func TestMovedAway(t *testing.T) {
	path := filepath.Join(t.TempDir(), "audit.log")
	if err := os.WriteFile(path, []byte("half a li"), 0o600); err != nil { // of a crash
		t.Fatal(err)
	}
	r, err := OpenRotating(path, 0, 3)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := OpenRotating(path, 0, 3); err == nil || !strings.Contains(err.Error(), "another process") {
		t.Errorf("opened twice: %v", err)
	}
	for i, move := range []func() error{
		func() error { return nil },
		func() error { return os.Rename(path, path+"-20260101") },
		func() error { return os.Remove(path) },
	} {
		if err := move(); err != nil {
			t.Fatal(err)
		}
		if _, err := fmt.Fprintf(r, "line %d\n", i); err != nil {
			t.Fatal(err)
		}
	}
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{path + "-20260101": "half a li\nline 0\n", path: "line 2\n"} {
		if b, err := os.ReadFile(name); err != nil || string(b) != want {
			t.Errorf("%s: %q, %v", name, b, err)
		}
	}
	if _, err := r.Write([]byte("late\n")); err == nil {
		t.Error("written when closed")
	}
	if _, err := OpenRotating("/dev/null", 0, 1); err == nil {
		t.Error("a device was taken")
	}
	if _, err := Open(Options{Path: filepath.Join(path, "x"), Logger: quiet()}); err == nil ||
		!strings.Contains(err.Error(), "audit log") {
		t.Error(err)
	}
}

// TestFullDisk fails writes. Nobody waits, what is lost is told in the log and in
// the file, and no half line stays.
func TestFullDisk(t *testing.T) {
	path := filepath.Join(t.TempDir(), "audit.log")
	var said bytes.Buffer
	log, err := Open(Options{Path: path, Logger: slog.New(slog.NewTextHandler(&said, nil))})
	if err != nil {
		t.Fatal(err)
	}
	log.Write(Event{Event: "before"})
	// A file for reading only stands for a disk that refuses.
	until(t, func() bool { n, _ := log.Counts(); return n == 1 })
	f := log.file
	f.mu.Lock()
	good := f.f
	bad, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	f.f = bad
	f.mu.Unlock()
	for range 7 {
		log.Write(Event{Event: "lost"})
	}
	until(t, func() bool { _, n := log.Counts(); return n == 7 })
	f.mu.Lock()
	f.f = good
	f.mu.Unlock()
	if err := bad.Close(); err != nil {
		t.Fatal(err)
	}
	log.Write(Event{Event: "after"})
	until(t, func() bool { n, _ := log.Counts(); return n == 2 })
	if err := log.Close(); err != nil {
		t.Fatal(err)
	}
	got := events(t, path, 0)
	if len(got) != 2 || got[1].Event != "after" || got[1].Lost != 7 {
		t.Errorf("%+v", got)
	}
	if n := strings.Count(said.String(), "events are lost"); n != 1 ||
		!strings.Contains(said.String(), "can be written again") {
		t.Errorf("said %d times:\n%s", n, said.String())
	}

	// A disk that hangs: the queue fills, and no more.
	stuck := &Log{sink: &sink{path: path, log: quiet(), queue: make(chan Event, queueLen), ended: make(chan struct{})}}
	for range queueLen + 5 {
		stuck.Write(Event{Event: "x"})
	}
	if _, lost := stuck.Counts(); lost != 5 {
		t.Errorf("%d lost", lost)
	}
	if err := stuck.Close(); err == nil || !strings.Contains(err.Error(), "hangs") {
		t.Error(err)
	}
}

// TestHalfLine cuts what a full disk took of a line: a limit on the size of files makes the kernel write a part. The
// limit is a process's, so a child has it.
func TestHalfLine(t *testing.T) {
	path := os.Getenv("AUDIT_HALF_LINE")
	if path == "" {
		path = filepath.Join(t.TempDir(), "log")
		cmd := exec.Command(os.Args[0], "-test.run=^TestHalfLine$")
		cmd.Env = append(os.Environ(), "AUDIT_HALF_LINE="+path)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		if b, err := os.ReadFile(path); err != nil || string(b) != "0123456789\nnext\n" {
			t.Errorf("%q, %v", b, err)
		}
		return
	}
	signal.Ignore(syscall.SIGXFSZ)
	limit := func(n uint64) {
		if err := syscall.Setrlimit(unix.RLIMIT_FSIZE, &syscall.Rlimit{Cur: n, Max: 1 << 20}); err != nil {
			t.Fatal(err)
		}
	}
	r, err := OpenRotating(path, 0, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.Write([]byte("0123456789\n")); err != nil {
		t.Fatal(err)
	}
	limit(25)
	if _, err := r.Write([]byte("01234567890123456789\n")); !errors.Is(err, syscall.EFBIG) &&
		!errors.Is(err, io.ErrShortWrite) {
		t.Fatal(err)
	}
	limit(1 << 20)
	if _, err := r.Write([]byte("next\n")); err != nil {
		t.Fatal(err)
	}
}

// TestPeers tells who is at the other end of a unix socket, and hides tokens.
func TestPeers(t *testing.T) {
	inner, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	l := Listener{Listener: inner}
	defer l.Close()
	c, err := net.Dial("unix", inner.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	s, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	p := Of(s.RemoteAddr())
	if p.PID != os.Getpid() || *p.UID != os.Getuid() || *p.GID != os.Getgid() || p.Comm == "" || p.Network != "unix" ||
		s.RemoteAddr().Network() != "unix" {
		t.Errorf("%+v", p)
	}
	p.Token = "mine"
	if Of(s.RemoteAddr()).Token != "" {
		t.Error("the peer is shared")
	}
	if p := Of(&net.TCPAddr{IP: net.IPv4(10, 0, 0, 1), Port: 7}); p.Network != "tcp" || p.Address != "10.0.0.1:7" ||
		p.UID != nil {
		t.Errorf("%+v", p)
	}
	if p := Process(uint32(syscall.Gettid()), 3, 4); p.PID != os.Getpid() || *p.UID != 3 || *p.GID != 4 ||
		p.Comm == "" {
		t.Errorf("%+v", p)
	}
	if f := Fingerprint("a token"); len(f) != 8 || strings.Contains("a token", f) {
		t.Error(f)
	}
	var none *Log
	none.Write(Event{})
	if none.With(Event{}) != nil || none.Path() != "" || none.Close() != nil {
		t.Error("nil is no log")
	}
}
