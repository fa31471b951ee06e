// Package daemon is the life of a process that serves: how a verb becomes a daemon, who hears what it says, how other
// verbs reach it, and how it ends. What is served it does not know.
//
// A daemon is starting, ready, draining, and then stopped or dead:
//
//   - Starting. The verb runs in the process that the user started, with --daemon in a child of that, and with
//     =supervised in a child of the child (start.go). Wherever it runs it speaks by a [Voice]: to the terminal, by a
//     pipe to the process that started it, or by a socket to a client that attached. Pipe and socket carry the same
//     lines.
//   - Ready, once. Whoever waits goes on, and the service manager hears it (start.go). Verbs that come by a socket are
//     answered (answer.go) from the moment in which the cache directory is owned, ready or not: they tell a daemon that
//     works from one that hangs by its lines (ask.go).
//   - Draining, from the first signal, or once what is served is gone. All waits share one deadline, and a second
//     signal ends them (end.go).
//   - Stopped: the process has ended in order, or before it was ready. Nothing starts it again.
//   - Dead: it has ended otherwise. A supervisor starts it again. The kernel has released its lock and its sockets; a
//     socket's file is left, which the next owner replaces.
//
// More than 40 names are exported: verbs take part in each step of this life.
package daemon

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/shoalfs/shoal/internal/audit"
	"github.com/shoalfs/shoal/internal/cli"
	"github.com/shoalfs/shoal/internal/pause"
	"github.com/shoalfs/shoal/internal/progress"
)

// Life is the state of one thing that is served, for /readyz.
type Life struct{ state atomic.Int32 }

const (
	starting int32 = iota
	ready
	draining
)

var serving atomic.Int32 // how many lives of this process are ready

// Ready says that it is served from now on.
func (l *Life) Ready() {
	l.state.Store(ready)
	serving.Add(1)
}

// Err returns why it is not served, or nil.
func (l *Life) Err() error {
	switch l.state.Load() {
	case starting:
		return errors.New("the daemon is starting")
	case draining:
		return errors.New("the daemon is draining: it is shutting down")
	}
	return nil
}

// Voice is how a verb speaks to whoever waits for it.
type Voice struct {
	id    string      // of the question that it answers
	ready atomic.Bool // it has said so

	mu sync.Mutex
	to io.Writer // nil: standard error
}

// line is one line of a voice; one field beside ID is set, or none: the verb is alive.
type line struct {
	ID     string  `json:"id"`
	Notice string  `json:"notice,omitempty"`
	Out    string  `json:"out,omitempty"`
	Bar    *bar    `json:"bar,omitempty"`
	Ready  bool    `json:"ready,omitempty"`
	Ended  *ending `json:"ended,omitempty"`
}

type bar struct {
	Label       string `json:"label,omitempty"`
	Done, Total int
	Note        string `json:"note,omitempty"`
	End         bool   `json:"end,omitempty"` // Note is the result
}

type ending struct {
	Code  int    `json:"code"`
	Error string `json:"error,omitempty"`
}

const ReadyEnv = "SHOAL_READY_FD" // the descriptor by which a child speaks until it is ready

// Own is this process's voice.
var Own = &Voice{}

// JSON is set if everything on standard error must be JSON, what is said to the user, too: a log collector reads it.
var JSON atomic.Bool

func init() {
	if fd, err := strconv.Atoi(os.Getenv(ReadyEnv)); err == nil {
		_ = os.Unsetenv(ReadyEnv)
		syscall.CloseOnExec(fd)
		Own.to = os.NewFile(uintptr(fd), "ready")
	}
}

var errNoOne = errors.New("nobody listens")

func (v *Voice) say(l line) error {
	l.ID = v.id
	b, _ := json.Marshal(l) // of texts
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.to == nil {
		return errNoOne
	}
	if to, ok := v.to.(interface{ SetWriteDeadline(t time.Time) error }); ok {
		_ = to.SetWriteDeadline(time.Now().Add(10 * time.Second)) // a client that is stopped must not block the verb
	}
	_, err := v.to.Write(append(b, '\n'))
	return err
}

// remote reports whether another process listens.
func (v *Voice) remote() bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.to != nil
}

// hush lets nobody listen to a child any longer.
func (v *Voice) hush() {
	v.mu.Lock()
	defer v.mu.Unlock()
	_ = v.to.(io.Closer).Close()
	v.to = nil
}

// Notice shows the user a message.
func (v *Voice) Notice(format string, args ...any) {
	text := cli.Printable(fmt.Sprintf(format, args...))
	switch {
	case v.remote():
		_ = v.say(line{Notice: text}) // not needed if nobody is there any more
	case JSON.Load():
		slog.Info(text)
	default:
		fmt.Fprintln(os.Stderr, text)
		tellManager("STATUS="+text, usec(startExtension))
	}
}

// Write sends the verb's output.
func (v *Voice) Write(p []byte) (int, error) {
	if err := v.say(line{Out: string(p)}); err != nil {
		return 0, err
	}
	return len(p), nil
}

// errOrphan ends a daemon whose parent was killed during the start: nobody knows of it.
var errOrphan = errors.New("the process that started this daemon is gone")

// Ready says that whoever waits can go on. If it fails, nobody knows of the daemon, and it must end.
func (v *Voice) Ready() error {
	v.ready.Store(true)
	if !v.remote() {
		managerReady()
		return nil
	}
	err := v.say(line{Ready: true})
	if v != Own {
		return err
	}
	v.hush()
	if err != nil {
		return errOrphan
	}
	return nil
}

// Waited reports whether another process waits for Ready: its user does not see the log.
func (v *Voice) Waited() bool { return !v.ready.Load() && v.remote() }

// Failed tells the process that started this one why the start failed.
func Failed(err error) {
	if err != nil && Own.say(line{Ended: &ending{cli.Code(err), cli.OneLine(err)}}) == nil {
		Own.hush()
	}
}

// Step is a long part of a verb, whose progress is shown.
type Step interface {
	Set(done, total int, note string)
	Done(result string) // called once
}

// Step begins a step.
func (v *Voice) Step(label string) Step {
	if v.remote() {
		return remoteStep{v, label}
	}
	out := io.Writer(os.Stderr)
	if JSON.Load() {
		out = slog.NewLogLogger(slog.Default().Handler(), slog.LevelInfo).Writer()
	}
	return progress.New(out).Start(label, 0)
}

type remoteStep struct {
	*Voice
	label string
}

func (s remoteStep) Set(done, total int, note string) {
	_ = s.say(line{Bar: &bar{Label: s.label, Done: done, Total: total, Note: note}})
}

func (s remoteStep) Done(result string) {
	_ = s.say(line{Bar: &bar{Label: s.label, Note: result, End: true}})
}

// beat says that the verb is alive until ctx ends.
func (v *Voice) beat(ctx context.Context) {
	for v.say(line{}) == nil {
		if pause.For(ctx, beat) != nil {
			return
		}
	}
}

// Announce tells whoever waits the daemon's addresses and its log file. In the foreground the log has them.
func (v *Voice) Announce(cacheDir string, where ...string) {
	if !v.Waited() {
		return
	}
	if path := filepath.Join(cacheDir, logName); isStderr(path) {
		where = append(where, "log: "+path)
	}
	v.Notice("%s", strings.Join(where, "; "))
}

// Warner is a slog.Handler that also sends warnings to the user who waits for a verb, and who does not see its log.
type Warner struct {
	slog.Handler
	*Voice
}

// Handle implements slog.Handler.
func (w Warner) Handle(ctx context.Context, r slog.Record) error {
	if r.Level >= slog.LevelWarn && w.Waited() {
		var b strings.Builder
		b.WriteString("warning: " + r.Message)
		r.Attrs(func(a slog.Attr) bool {
			b.WriteString("; " + a.Key + ": " + a.Value.String())
			return true
		})
		w.Notice("%s", strings.ReplaceAll(b.String(), "\n", " "))
	}
	return w.Handler.Handle(ctx, r)
}

// WithAttrs implements slog.Handler.
func (w Warner) WithAttrs(attrs []slog.Attr) slog.Handler {
	return Warner{w.Handler.WithAttrs(attrs), w.Voice}
}

// WithGroup implements slog.Handler.
func (w Warner) WithGroup(name string) slog.Handler {
	return Warner{w.Handler.WithGroup(name), w.Voice}
}

// Verb is a verb that a client runs here.
type Verb struct {
	*Voice
	Args     []string
	Dir      string            // the client's folder
	Peer     *audit.Peer       // the client
	Env      map[string]string // some of the client's
	Detached bool              // it goes on without the client once it is ready
}
