package daemon

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/shoalfs/shoal/internal/audit"
	"github.com/shoalfs/shoal/internal/cli"
	"github.com/shoalfs/shoal/internal/pause"
)

var (
	// ErrNobody means that nothing listens on the socket.
	ErrNobody = errors.New("no daemon answers")
	// ErrEnding means that the daemon ended before the verb was ready.
	ErrEnding = errors.New("the daemon is ending")
)

// Asked is whom to ask, and how errors name it.
type Asked struct {
	Address string // of the socket
	Owner   string // user who must listen there; "": whoever could make the socket
	At      string // what the user names
	Then    string // what to do once a daemon that hangs was ended
}

// OfCache is the daemon that owns a cache directory.
func OfCache(dir string) Asked { return Asked{Address: socketOf(dir), At: dir, Then: "run this again"} }

// Silence is the error of a daemon, or a disk, that does not answer.
type Silence struct {
	Asked
	pid   int // 0: not to be seen from here
	since time.Time
}

func (s Silence) Error() string {
	waited := fmt.Sprintf("of %s does not answer since %s, for %s",
		s.At, s.since.Format(time.TimeOnly), time.Since(s.since).Round(100*time.Millisecond))
	then := ""
	if s.Then != "" {
		then = ", then " + s.Then
	}
	switch {
	case s.pid == 0:
		return "the daemon " + waited +
			" (it is in another container, or too many ask it: end it where it runs" + then + ")"
	case stateOf(s.pid) == "T":
		return fmt.Sprintf("the daemon (pid %d) %s: it is stopped (kill -CONT %d lets it go on; or kill -9 %d%s)",
			s.pid, waited, s.pid, s.pid, then)
	}
	return fmt.Sprintf("the daemon (pid %d) %s (kill -9 %d%s)", s.pid, waited, s.pid, then)
}

// hangs is whether a daemon that is silent for Patience is not to be waited for: it is stopped, or not to be seen, or
// Long has passed. Any other may be slow: a busy machine takes seconds to read its memory back from the disk.
func (s Silence) hangs() bool {
	return s.pid == 0 || slices.Contains([]string{"", "T", "t"}, stateOf(s.pid)) || time.Since(s.since) > Long
}

// Unanswered is why a daemon at a feed's address did not answer in time.
func Unanswered(target string, since time.Time) Silence {
	s := Silence{Asked: Asked{At: target, Then: "start it again"}, since: since}
	if path, ok := strings.CutPrefix(target, "unix://"); ok {
		s.pid = listenerOf(path)
	}
	return s
}

// InTime limits a question to a daemon at a feed's address as Ask does.
func InTime(ctx context.Context, target string) (context.Context, context.CancelFunc) {
	begun := time.Now()
	ctx, cancel := context.WithTimeout(ctx, Long)
	look := time.AfterFunc(Patience, func() {
		if s := Unanswered(target, begun); s.hangs() {
			cancel()
		} else {
			Own.Notice("%v; waiting for it", s)
		}
	})
	return ctx, func() { look.Stop(); cancel() }
}

// soon returns what do returns, which may wait for a disk that hangs, or the end of ctx.
func soon[T any](ctx context.Context, do func() (T, error)) (T, error) {
	get, done := sync.OnceValues(do), make(chan struct{})
	go func() { _, _ = get(); close(done) }()
	select {
	case <-done:
		return get()
	case <-ctx.Done():
		return *new(T), ctx.Err()
	}
}

// Ask runs a verb in a daemon, with variables of this process. It fails with ErrNobody or ErrEnding if there is no
// daemon, or if it is about to end. One that says nothing and hangs is an error; if it is only slow, or falls silent
// later, the user gets a notice.
func Ask(ctx context.Context, to Asked, args []string, env map[string]string, out io.Writer) error {
	a := &asking{Silence: Silence{Asked: to, since: time.Now()}, verb: args[0], out: out}
	dialing, cancel := context.WithTimeout(ctx, Patience)
	defer cancel()
	conn, err := soon(dialing, func() (net.Conn, error) { return reach(to.Address) })
	switch {
	case errors.Is(err, syscall.EAGAIN): // as many wait as the kernel lets wait
		return a.Silence
	case errors.Is(err, context.DeadlineExceeded):
		return fmt.Errorf("the disk of %s does not answer since %s", to.At, a.since.Format(time.TimeOnly))
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("%s: %w (run this as its owner or as root, or name another)", to.At, err)
	case err != nil:
		return errors.Join(ctx.Err(), ErrNobody)
	}
	defer conn.Close()
	a.conn = conn.(*net.UnixConn)
	who := audit.Unix(a.conn)
	if a.pid = who.PID; to.Owner != "" && to.Owner != fmt.Sprint(*who.UID) {
		return fmt.Errorf(
			"%s: what listens for its daemon is user %d's (pid %d) and not the mount's (end that process)", to.At,
			*who.UID, who.PID)
	}
	if err := a.send(args, env); err != nil {
		return err
	}
	defer context.AfterFunc(ctx, func() { _ = a.conn.CloseWrite() })() // the daemon then ends the verb and replies
	return a.listen(ctx)
}

type asking struct {
	Silence
	conn *net.UnixConn
	id   string
	verb string
	out  io.Writer

	bar       Step
	wasReady  bool
	wordAt    time.Time // when there was something for the user
	spoke     bool      // there was a line
	told, bid bool      // the user, of a silence, and of a verb that takes its time
}

func (a *asking) send(args []string, env map[string]string) error {
	if i := slices.IndexFunc(args, func(arg string) bool { return !utf8.ValidString(arg) }); i >= 0 {
		return fmt.Errorf("%s: %q is not UTF-8, as what a daemon is asked must be (give another name, or another "+
			"--cache-dir)", a.At, args[i])
	}
	dir, err := os.Getwd()
	if err != nil { // it was removed, and paths may be absolute
		dir, _ = os.Readlink("/proc/self/cwd")
	}
	a.id = rand.Text()
	b, _ := json.Marshal(question{ID: a.id, Args: args, Dir: dir, Env: env, Detach: Own.remote()}) // of texts
	_ = a.conn.SetWriteDeadline(time.Now().Add(Patience))
	if _, err = a.conn.Write(append(b, '\n')); errors.Is(err, os.ErrDeadlineExceeded) {
		return a.Silence
	} else if err != nil {
		return ErrEnding // it closed its socket, or was killed, after the connection was made
	}
	return nil
}

// listen shows what the daemon says until the verb has ended.
func (a *asking) listen(ctx context.Context) error {
	in, said := bufio.NewReader(a.conn), []byte(nil)
	end, limited := ctx.Deadline()
	for a.wordAt = a.since; ; {
		wake := time.Now().Add(beat)
		if limited && end.Before(wake) {
			wake = end
		}
		_ = a.conn.SetReadDeadline(wake)
		part, err := in.ReadBytes('\n')
		switch said = append(said, part...); {
		case len(said) > 16<<20: // far more than a daemon says at once
			return fmt.Errorf("the daemon of %s said more than a line holds", a.At)
		case err == nil:
			if end, err := a.hear(ctx, said); end {
				return err
			}
			said = nil
		case errors.Is(err, os.ErrDeadlineExceeded):
		case !a.wasReady && ctx.Err() == nil:
			return ErrEnding
		default:
			return fmt.Errorf("the daemon of %s ended", a.At)
		}
		if limited && !time.Now().Before(end) {
			return a.Silence
		}
		if err := a.quiet(ctx); err != nil {
			return err
		}
	}
}

// quiet is called from time to time. It says who is waited for, or that there is nothing to wait for.
func (a *asking) quiet(ctx context.Context) error {
	switch {
	case time.Since(a.since) <= Patience:
	case ctx.Err() != nil || !a.spoke && a.hangs():
		return a.Silence
	case !a.told:
		a.told = true
		Own.Notice("%v; waiting for it", a.Silence)
	}
	if !a.bid && !a.told && !a.wasReady && a.bar == nil && time.Since(a.wordAt) > Patience {
		a.bid = true
		Own.Notice("the daemon (pid %d) of %s is alive, and at `%s` since %s; waiting for it",
			a.pid, a.At, a.verb, a.wordAt.Format(time.TimeOnly))
	}
	return nil
}

// hear takes one line from the daemon. end is whether it is the last one.
func (a *asking) hear(ctx context.Context, said []byte) (end bool, err error) {
	var l line
	if err := json.Unmarshal(said, &l); err != nil {
		return true, fmt.Errorf("the daemon of %s: %w", a.At, err)
	}
	if l.ID != a.id {
		return true, fmt.Errorf(
			"the daemon (pid %d) of %s is of another version, which answers otherwise (end it with kill %d, then %s)",
			a.pid, a.At, a.pid, a.Then)
	}
	if a.told {
		Own.Notice("the daemon of %s answers again", a.At)
	}
	if a.since, a.spoke, a.told = time.Now(), true, false; l != (line{ID: a.id}) {
		a.wordAt = a.since
	}
	switch {
	case l.Notice != "":
		Own.Notice("%s", l.Notice)
	case l.Out != "":
		if _, err := io.WriteString(a.out, l.Out); err != nil {
			return true, err
		}
	case l.Bar != nil:
		a.show(l.Bar)
	case l.Ready:
		a.wasReady = true
		detach := Own.remote()
		if !detach {
			Own.Notice("attached to the daemon that owns %s", a.At)
		}
		if err := Own.Ready(); err != nil {
			return true, err // closing the connection then ends the mount
		}
		if detach {
			_, err := io.WriteString(a.conn, detached)
			return true, err
		}
	case l.Ended != nil:
		if a.bar != nil {
			a.bar.Done("")
		}
		switch {
		case l.Ended.Error == "":
			return true, ctx.Err()
		case l.Ended.Code == codeEnding && !a.wasReady:
			return true, ErrEnding
		}
		return true, cli.Failure(l.Ended.Code, l.Ended.Error)
	}
	return false, nil
}

func (a *asking) show(b *bar) {
	if a.bar == nil {
		a.bar = Own.Step(b.Label)
	}
	if b.End {
		a.bar.Done(b.Note)
		a.bar = nil
		return
	}
	a.bar.Set(b.Done, b.Total, b.Note)
}

// A verb reaches a daemon by its socket, never through a mount: a process that waits in a mount whose daemon hangs
// cannot even be killed. The socket of a cache directory is CACHE-DIR/shoal.sock. That of a mount is in the abstract
// namespace, named after the mount's device number, which /proc/self/mountinfo has (ADR 57): no disk, which may hang
// too, is asked, and no file outlives the daemon. It is seen in the daemon's network namespace alone, so by the
// containers of its pod.

// MountAddress is where the daemon of a mount listens.
func MountAddress(device string) string { return "@shoal/" + device }

func socketOf(cacheDir string) string { return filepath.Join(cacheDir, "shoal.sock") }

const maxSocketPath = 107 // in sockaddr_un

// short calls do with a path that fits into a socket's address, through a descriptor of its folder if need be.
func short[T any](path string, do func(path string) (T, error)) (of T, err error) {
	if len(path) <= maxSocketPath {
		return do(path)
	}
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return of, err
	}
	defer dir.Close()
	return do(fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), filepath.Base(path)))
}

func listenUnix(path string) (*net.UnixListener, error) {
	return short(path, func(path string) (*net.UnixListener, error) {
		return net.ListenUnix("unix", &net.UnixAddr{Name: path})
	})
}

func dialUnix(path string) (net.Conn, error) {
	return short(path, func(path string) (net.Conn, error) { return net.Dial("unix", path) })
}

// reach connects to a daemon's socket. It must have a goroutine of its own.
func reach(address string) (net.Conn, error) {
	conn, err := dialUnix(address)
	if errors.Is(err, syscall.ECONNREFUSED) && strings.HasPrefix(address, "@") && enter(address) {
		return dialUnix(address)
	}
	return conn, err
}

// enter moves the goroutine's thread, which then ends with it, to the network namespace of this machine in which
// something listens at an abstract address: root may look into containers.
func enter(address string) bool {
	procs, _ := filepath.Glob("/proc/[0-9]*/ns/net")
	seen := map[string]bool{}
	for _, proc := range procs {
		space, err := os.Readlink(proc)
		if err != nil || seen[space] {
			continue
		}
		seen[space] = true
		sockets, _ := os.ReadFile(strings.Replace(proc, "/ns/net", "/net/unix", 1))
		if !bytes.Contains(sockets, []byte(" "+address+"\n")) {
			continue
		}
		f, err := os.Open(proc)
		if err != nil {
			return false
		}
		defer f.Close()
		runtime.LockOSThread()
		return unix.Setns(int(f.Fd()), unix.CLONE_NEWNET) == nil
	}
	return false
}

// PID returns the process that listens on the socket, by this pid namespace's number, or 0.
func (a Asked) PID() int { return listenerOf(a.Address) }

func listenerOf(path string) (pid int) {
	conn, err := dialUnix(path)
	if err != nil {
		return 0
	}
	defer conn.Close()
	return audit.Unix(conn.(syscall.Conn)).PID
}

// stateOf returns a process's state as ps(1) shows it, "" if there is none.
func stateOf(pid int) string {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return ""
	}
	_, rest, _ := strings.Cut(string(b), ") ") // field 2 is the command in parentheses, field 3 the state
	state, _, _ := strings.Cut(rest, " ")
	return state
}

// Gone waits for a process to end, and reports whether it has. A zombie has: it holds nothing.
func Gone(ctx context.Context, pid int, wait time.Duration) bool {
	ctx, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	defer time.AfterFunc(Patience, func() { Own.Notice("waiting for the daemon (pid %d) to end", pid) }).Stop()
	for s := stateOf(pid); s != "" && s != "Z"; s = stateOf(pid) {
		if pause.For(ctx, 20*time.Millisecond) != nil {
			return false
		}
	}
	return true
}
