package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"

	"github.com/spf13/pflag"

	"github.com/shoalfs/shoal/internal/cli"
)

// A verb with --daemon starts itself again in a new session, with a pipe on which the child reports
// the progress of its start, line by line:
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

// notice shows the user a message during the start.
func notice(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	if p := readyPipe.Load(); p != nil {
		fmt.Fprintln(p, "notice "+text)
		return
	}
	if jsonLog.Load() {
		slog.Info(text)
		return
	}
	fmt.Fprintln(os.Stderr, text)
	serviceProgress(text)
}

// errOrphan ends a daemon whose parent was killed during the start: nobody knows of it.
var errOrphan = errors.New("the process that started this daemon is gone")

// ready tells the parent of a daemon that it can exit, or the service manager that the daemon serves.
func ready() error {
	p := readyPipe.Swap(nil)
	if p == nil {
		serviceReady()
		return nil
	}
	defer p.Close()
	if _, err := fmt.Fprintln(p, "ready"); err != nil {
		return errOrphan
	}
	return nil
}

// boolOr is a flag that is true, false or a word, which is more than true.
type boolOr struct {
	on, more bool
	word     string
}

func (b *boolOr) add(f *pflag.FlagSet, name, word, usage string) {
	b.word = word
	f.Var(b, name, usage)
	f.Lookup(name).NoOptDefVal = "true"
}
func (b *boolOr) Type() string { return "bool" } // may be given without a value
func (b *boolOr) String() string {
	if b.more {
		return b.word
	}
	return strconv.FormatBool(b.on)
}
func (b *boolOr) Set(text string) (err error) {
	if b.more = text == b.word; b.more {
		b.on = true
	} else if b.on, err = strconv.ParseBool(text); err != nil {
		return fmt.Errorf("%q: give true, false or %s", text, b.word)
	}
	return nil
}

// background starts the process again as a daemon and waits until it is ready. In the daemon itself, and without
// --daemon, it returns false at once.
func background(o *engineOptions) (parent bool, err error) {
	if !o.daemon.on || readyPipe.Load() != nil {
		return false, nil
	}
	if err := os.MkdirAll(o.cacheDir, 0o700); err != nil {
		return true, fmt.Errorf("cache directory: %w (give another --cache-dir)", err)
	}
	logPath := filepath.Join(o.cacheDir, logName)
	log, err := os.OpenFile(logPath, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return true, fmt.Errorf("log file: %w", err)
	}
	defer log.Close()
	cmd := &exec.Cmd{Env: os.Environ(), Stdout: log, Stderr: log, SysProcAttr: &syscall.SysProcAttr{Setsid: true}}
	r, err := startAgain(cmd)
	if err != nil {
		return true, err
	}
	defer r.Close()
	// The daemon is in another session, so the terminal's signals do not reach it. Until it is ready they are
	// passed on.
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
	became, failure := readReadiness(r, func(text string) { fmt.Fprintln(os.Stderr, text) })
	if became && !interrupted.Load() {
		return true, nil
	}
	err = cmd.Wait()
	if interrupted.Load() {
		return true, errInterrupted
	}
	if failure != nil {
		return true, failure
	}
	if err != nil {
		return true, fmt.Errorf("the daemon ended before it was ready: %w; see %s", err, logPath)
	}
	return true, fmt.Errorf("the daemon ended before it was ready; see %s", logPath)
}

// startAgain starts this process's command line again, and returns the pipe on which it reports the start.
func startAgain(cmd *exec.Cmd) (r *os.File, err error) {
	if cmd.Path, err = os.Executable(); err != nil {
		return nil, err
	}
	r, w, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer w.Close()
	cmd.Args = append([]string{cmd.Path}, selfArgs()...)
	cmd.Env = append(cmd.Env, readyEnv+"=3", settledEnv+"=1")
	cmd.ExtraFiles = []*os.File{w}
	if err := cmd.Start(); err != nil {
		r.Close()
		return nil, err
	}
	return r, nil
}

// readReadiness reads a child's reports from its pipe until it is ready or has failed, or the pipe ends.
func readReadiness(r io.Reader, notice func(text string)) (became bool, failure error) {
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		verb, rest, _ := strings.Cut(lines.Text(), " ")
		switch verb {
		case "notice":
			notice(rest)
		case "ready":
			return true, nil
		case "failed":
			code, text, _ := strings.Cut(rest, " ")
			n, _ := strconv.Atoi(code)
			return false, cli.Failure(n, text)
		}
	}
	return false, nil
}

// failed tells the parent of a daemon why the start failed.
func failed(err error) {
	p := readyPipe.Swap(nil)
	if p == nil || err == nil {
		return
	}
	fmt.Fprintf(p, "failed %d %s\n", cli.Code(err), cli.OneLine(err))
	p.Close()
}
