package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/pprof"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/shoalfs/shoal/engine"
)

// A verb with --daemon starts itself again in a new session, with a pipe on which the child tells
// its parent, line by line, how the start goes on:
//
//	notice TEXT        shown to the user
//	ready              the parent exits 0
//	failed CODE TEXT   the parent says so and exits with CODE
const readyEnv = "SHOAL_READY_FD"

// readyPipe is the child's end; nil in the foreground.
var readyPipe atomic.Pointer[os.File]

func init() {
	if fd, err := strconv.Atoi(os.Getenv(readyEnv)); err == nil {
		_ = os.Unsetenv(readyEnv)
		syscall.CloseOnExec(fd)
		readyPipe.Store(os.NewFile(uintptr(fd), "ready"))
	}
}

// notice tells the user something on the way to being ready.
func notice(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	if p := readyPipe.Load(); p != nil {
		fmt.Fprintln(p, "notice "+text)
		return
	}
	fmt.Fprintln(os.Stderr, text)
}

// ready tells the parent of a daemon that it may go.
func ready() {
	if p := readyPipe.Swap(nil); p != nil {
		if _, err := fmt.Fprintln(p, "ready"); err != nil {
			// The parent was killed, so nobody knows of this daemon.
			_ = syscall.Kill(os.Getpid(), syscall.SIGTERM)
		}
		p.Close()
	}
}

// background runs the process again as a daemon and waits until that is ready. In the daemon
// itself, and without --daemon, it returns false at once.
func background(o *engineOptions) (parent bool, err error) {
	if !o.daemon || readyPipe.Load() != nil {
		return false, nil
	}
	if err := os.MkdirAll(o.cacheDir, 0o700); err != nil {
		return true, fmt.Errorf("cache directory: %w (give another --cache-dir)", err)
	}
	logPath := filepath.Join(o.cacheDir, "shoal.log")
	log, err := os.OpenFile(logPath, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return true, fmt.Errorf("log file: %w", err)
	}
	defer log.Close()
	self, err := os.Executable()
	if err != nil {
		return true, err
	}
	r, w, err := os.Pipe()
	if err != nil {
		return true, err
	}
	defer r.Close()
	cmd := exec.Command(self, os.Args[1:]...)
	cmd.Env = append(os.Environ(), readyEnv+"=3")
	cmd.ExtraFiles = []*os.File{w}
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		w.Close()
		return true, err
	}
	w.Close()
	// The daemon is in another session, so that the terminal's signals do not reach it later. Until it
	// is ready they mean it.
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, endSignals()...)
	defer signal.Stop(signals)
	var interrupted atomic.Bool
	go func() {
		if _, ok := <-signals; ok {
			interrupted.Store(true)
			_ = cmd.Process.Signal(syscall.SIGTERM)
		}
	}()
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		verb, rest, _ := strings.Cut(lines.Text(), " ")
		switch verb {
		case "notice":
			fmt.Fprintln(os.Stderr, rest)
		case "ready":
			if interrupted.Load() {
				_ = cmd.Wait()
				return true, errInterrupted
			}
			return true, nil
		case "failed":
			code, text, _ := strings.Cut(rest, " ")
			_ = cmd.Wait()
			if interrupted.Load() {
				return true, errInterrupted
			}
			if code == "2" {
				return true, usagef("%s", text)
			}
			return true, errors.New(text)
		}
	}
	err = cmd.Wait()
	if interrupted.Load() {
		return true, errInterrupted
	}
	if err != nil {
		return true, fmt.Errorf("the daemon ended before it was ready: %w; see %s", err, logPath)
	}
	return true, fmt.Errorf("the daemon ended before it was ready; see %s", logPath)
}

// failed tells the parent of a daemon why it did not get ready.
func failed(err error) {
	p := readyPipe.Swap(nil)
	if p == nil || err == nil {
		return
	}
	code := 1
	if errors.As(err, new(usageError)) {
		code = 2
	}
	fmt.Fprintf(p, "failed %d %s\n", code, oneLine(err))
	p.Close()
}

// startAdmin serves stats, health and profiles; it returns a function that ends that.
func startAdmin(addr string, e *engine.Engine) (stop func(), err error) {
	if addr == "" {
		return func() {}, nil
	}
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("--admin %s: %w (give another port)", addr, err)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /stats", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		b, err := e.Get("stats")
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		_, _ = w.Write(b)
	})
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "ok\n") })
	mux.HandleFunc("GET /debug/pprof/", pprof.Index)
	mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	srv := &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = srv.Serve(l)
	}()
	return func() { srv.Close(); <-done }, nil
}
