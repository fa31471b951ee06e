package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/shoalfs/shoal/cache/cachedir"
	"github.com/shoalfs/shoal/gpuingest/jpeg"
	"github.com/shoalfs/shoal/internal/audit"
	"github.com/shoalfs/shoal/internal/cli"
	"github.com/shoalfs/shoal/internal/shortcut"
	"github.com/shoalfs/shoal/prefetch/engine"
)

// One daemon owns a cache directory and listens on CACHE-DIR/shoal.sock. A verb that finds the directory owned attaches:
// it sends its command line, its folder and its environment (AWS's variables, the feed's token, the key of SSE-C) as
// one line of JSON, and the daemon runs the verb in its own process. Its output comes back as lines of JSON; the last
// one has the result. If the client closes the connection before it detaches, the verb ends, as with Ctrl-C.
//
// Each line names its question. The first comes at once, and one each second while the verb runs, so that a client knows a
// daemon that hangs from one that works. Whatever is not as it should be ends the connection.
//
// Only the user can open the socket (0600), since anyone who can write to it can control the daemon.
const socketName = "shoal.sock"

// detached is the client's message that leaves a verb to the daemon.
const detached = "detached\n"

type attachRequest struct {
	ID     string            `json:"id"` // of the question; every answer has it
	Args   []string          `json:"args"`
	Dir    string            `json:"dir"`
	Env    map[string]string `json:"env"`
	Detach bool              `json:"detach"` // continue without the client once ready

	Shortcut string `json:"shortcut,omitempty"` // instead of a verb: the key of a mount whose files the client reads
}

// shortcuts are the servers of this process's mounts by their keys.
var shortcuts sync.Map

// attachReply is one line from the daemon; one field beside ID is set, or none: it is alive.
type attachReply struct {
	ID     string     `json:"id"`
	Notice string     `json:"notice,omitempty"`
	Out    string     `json:"out,omitempty"`
	Bar    *barReply  `json:"bar,omitempty"`
	Ready  bool       `json:"ready,omitempty"`
	Ended  *endedWith `json:"ended,omitempty"`
}

type barReply struct {
	Label       string `json:"label,omitempty"`
	Done, Total int
	Note        string `json:"note,omitempty"`
	End         bool   `json:"end,omitempty"` // Note is the result
}

// codeEnding is the exit code of a verb whose daemon is about to end: the client can soon take the directory.
const codeEnding = 3

type endedWith struct {
	Code  int    `json:"code"`
	Error string `json:"error,omitempty"`
}

// attachVerbs are the verbs that can run in a daemon.
var attachVerbs = map[string]bool{"mount": true, "serve": true, "warm": true, "cache": true, "order": true, "stop": true, "s3": true, "stat": true, "refresh": true}

// daemon is a host with its socket, and the attached verbs.
type daemon struct {
	host     *engine.Host
	listener *net.UnixListener
	cancel   context.CancelFunc
	accept   sync.WaitGroup // goroutines other than the verbs
	verbs    verbs
}

// verbs counts running verbs. It is not a sync.WaitGroup, which panics if a verb begins at the moment in which a waiter
// learns that the last one has ended.
type verbs struct {
	mu   sync.Mutex
	n    int
	idle chan struct{} // closed when n is 0 again; nil while nobody waits
}

// Go runs a verb.
func (v *verbs) Go(do func()) {
	v.mu.Lock()
	v.n++
	v.mu.Unlock()
	go func() {
		defer v.end()
		do()
	}()
}

func (v *verbs) end() {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.n--; v.n == 0 && v.idle != nil {
		close(v.idle)
		v.idle = nil
	}
}

// ended returns a channel that is closed once no verb runs.
func (v *verbs) ended() <-chan struct{} {
	v.mu.Lock()
	defer v.mu.Unlock()
	idle := v.idle
	if idle == nil {
		idle = make(chan struct{})
		if v.n == 0 {
			close(idle)
			return idle
		}
		v.idle = idle
	}
	return idle
}

// ownHost takes the cache directory and listens for verbs that attach.
func ownHost(ctx context.Context, cfg engine.HostConfig) (*daemon, error) {
	h, err := engine.OpenHost(cfg)
	if err != nil {
		return nil, err
	}
	d := &daemon{host: h}
	ctx, d.cancel = context.WithCancel(ctx)
	d.accept.Go(func() { adjustProcs(ctx, h.Fetched) })
	owned.Store(h)
	jpeg.SetMemory(cachedir.LeastNative)
	d.accept.Go(func() { giveBack(ctx) })
	path := filepath.Join(cfg.Path, socketName)
	_ = os.Remove(path) // left by a daemon that was killed: the lock is ours
	mask := syscall.Umask(0o177)
	d.listener, err = listenUnix(path)
	syscall.Umask(mask)
	if err != nil {
		// A path that is too long for a socket, or a file system without sockets, only disables sharing.
		cfg.Logger.Warn("no other mount can attach to this daemon", "socket", path, "cause", err)
		return d, nil
	}
	d.accept.Go(func() {
		for {
			conn, err := d.listener.AcceptUnix()
			if err != nil {
				return
			}
			d.verbs.Go(func() { serve(ctx, h, conn, nil) })
		}
	})
	return d, nil
}

// maxSocketPath is the longest path in sockaddr_un.
const maxSocketPath = 107

// listenUnix listens on a path of any length, through a descriptor of its folder.
func listenUnix(path string) (*net.UnixListener, error) {
	if len(path) <= maxSocketPath {
		return net.ListenUnix("unix", &net.UnixAddr{Name: path})
	}
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	return net.ListenUnix("unix", &net.UnixAddr{Name: fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), filepath.Base(path))})
}

func dialUnix(path string) (net.Conn, error) {
	if len(path) <= maxSocketPath {
		return net.Dial("unix", path)
	}
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	return net.Dial("unix", fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), filepath.Base(path)))
}

// close ends the attached verbs and releases the directory.
func (d *daemon) close() error {
	d.cancel()
	if d.listener != nil {
		_ = d.listener.Close()
	}
	d.accept.Wait()
	<-d.verbs.ended()
	return d.host.Close()
}

// closeAfter closes the daemon once its own verb, which ended with err, and the attached ones have ended.
func (d *daemon) closeAfter(ctx context.Context, err error) error {
	select {
	case <-d.verbs.ended():
	case <-ctx.Done():
	}
	return errors.Join(err, d.close())
}

// serve runs one attached verb, of the mount m unless that is nil.
func serve(ctx context.Context, h *engine.Host, conn *net.UnixConn, m *mounted) {
	defer func() { _ = conn.Close() }()
	verbCtx, cancel := context.WithCancel(ctx)
	defer cancel()
	peer, in := audit.Unix(conn), bufio.NewReader(io.LimitReader(conn, 1<<20))
	req, out, ok := takeQuestion(ctx, conn, in, m, peer)
	if !ok {
		return
	}
	var beating sync.WaitGroup
	beating.Go(func() { out.beat(verbCtx) })
	defer func() { cancel(); beating.Wait() }()
	ready := make(chan struct{})
	var once sync.Once
	inv := &invocation{
		host: h, mount: m, dir: req.Dir, peer: peer, getenv: func(name string) string { return req.Env[name] },
		notice: func(format string, args ...any) { out.send(attachReply{Notice: fmt.Sprintf(format, args...)}) },
		ready: func() error {
			once.Do(func() { close(ready) })
			return out.write(attachReply{Ready: true})
		},
		waited: func() bool {
			select {
			case <-ready:
				return false
			default:
				return true
			}
		},
		step: func(label string) step { return &remoteStep{out, label} },
	}
	// After its request the client sends at most one message: that it leaves the verb to the daemon. Its end shows
	// as the end of the stream.
	go func() {
		said, _ := io.ReadAll(in)
		select {
		case <-ready:
			if req.Detach && string(said) == detached {
				return
			}
		default:
		}
		cancel()
	}()
	c := root()
	c.SetArgs(req.Args)
	c.SetOut(out)
	c.SetErr(out)
	err := c.ExecuteContext(context.WithValue(verbCtx, invocationKey{}, inv))
	if err != nil && ctx.Err() == nil {
		h.Audit().Write(outcome(audit.Event{Event: "attach", Verb: req.Args[0], Peer: inv.peer}, err))
	}
	end := &endedWith{}
	if err != nil && ctx.Err() != nil {
		end.Code, end.Error = codeEnding, "the daemon is ending"
	} else if err != nil {
		end.Code, end.Error = cli.Code(err), cli.OneLine(err)
	}
	out.send(attachReply{Ended: end})
}

// takeQuestion reads what a client asks, and reports whether it is a verb that may run. Otherwise it has been answered.
func takeQuestion(ctx context.Context, conn *net.UnixConn, in *bufio.Reader, m *mounted, peer *audit.Peer) (req attachRequest, out *replies, ok bool) {
	_ = conn.SetReadDeadline(time.Now().Add(patience))
	line, err := in.ReadBytes('\n')
	if err != nil {
		return req, nil, false
	}
	_ = conn.SetReadDeadline(time.Time{})
	err = json.Unmarshal(line, &req)
	out = &replies{w: conn, id: req.ID}
	refuse := func(code int, text string) (attachRequest, *replies, bool) {
		out.send(attachReply{Ended: &endedWith{code, text}})
		return req, out, false
	}
	if ctx.Err() != nil {
		return refuse(codeEnding, "the daemon is ending")
	}
	if server, ok := shortcuts.Load(req.Shortcut); ok && m == nil {
		if err := server.(*shortcut.Server).Serve(conn); err != nil {
			slog.Warn("the connection to a shoal.open client was closed", "cause", err)
		}
		return req, out, false
	}
	switch {
	case err != nil || len(req.Args) == 0 || !attachVerbs[req.Args[0]]:
		return refuse(1, "the daemon does not understand this request (is it another version? stop it first)")
	case m != nil && !m.may(peer, req.Args[0]):
		return refuse(1, fmt.Sprintf("only the owner of the mount %s may %s it: run this as that user, or as root", m.path, req.Args[0]))
	}
	return req, out, true
}

// replies sends lines to a client. The verb's output is among them.
type replies struct {
	mu sync.Mutex
	w  net.Conn
	id string // of the question
}

// beat says that the daemon is alive until ctx ends.
func (r *replies) beat(ctx context.Context) {
	t := time.NewTicker(beat)
	defer t.Stop()
	for r.write(attachReply{}) == nil {
		select {
		case <-t.C:
		case <-ctx.Done():
			return
		}
	}
}

func (r *replies) write(reply attachReply) error {
	reply.ID = r.id
	b, err := json.Marshal(reply)
	if err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	_ = r.w.SetWriteDeadline(time.Now().Add(10 * time.Second)) // a client that is stopped must not block the verb
	_, err = r.w.Write(append(b, '\n'))
	return err
}

// send is write for lines that are not needed if the client is gone.
func (r *replies) send(reply attachReply) { _ = r.write(reply) }

func (r *replies) Write(p []byte) (int, error) {
	if err := r.write(attachReply{Out: string(p)}); err != nil {
		return 0, err
	}
	return len(p), nil
}

// errEnding: the daemon ended before the verb was ready.
var errEnding = errors.New("the daemon is ending")

// question is whom to ask, and how errors name it.
type question struct {
	address string // of the socket
	owner   string // user who must listen there; "": whoever could make the socket
	at      string // what the user names
	then    string // what to do once a daemon that hangs was ended
}

// attach runs a verb in the daemon that owns cacheDir. It fails with errNobody or errEnding if there is no daemon, or if
// it is about to end.
func attach(ctx context.Context, cacheDir string, args []string, out io.Writer) error {
	return ask(ctx, question{address: filepath.Join(cacheDir, socketName), at: cacheDir, then: "run this again"}, args, out)
}

// ask runs a verb in a daemon. One that says nothing for patience is an error; once it has said something, the user is told.
func ask(ctx context.Context, q question, args []string, out io.Writer) error {
	a := &asking{silence: silence{question: q, since: time.Now()}, verb: args[0], out: out}
	dialing, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	to, err := soon(dialing, func() (net.Conn, error) { return reach(q.address) })
	switch {
	case errors.Is(err, syscall.EAGAIN): // as many wait as the kernel lets wait
		return a.silence
	case errors.Is(err, context.DeadlineExceeded):
		return fmt.Errorf("the disk of %s does not answer since %s", q.at, a.since.Format(time.TimeOnly))
	case err != nil:
		return errors.Join(ctx.Err(), errNobody)
	}
	defer to.Close()
	conn := to.(*net.UnixConn)
	who := audit.Unix(conn)
	if a.conn, a.pid = conn, who.PID; q.owner != "" && q.owner != fmt.Sprint(*who.UID) {
		return fmt.Errorf("%s: what listens for its daemon is user %d's (pid %d) and not the mount's (end that process)", q.at, *who.UID, who.PID)
	}
	if err := a.send(args); err != nil {
		return err
	}
	// The daemon then ends the verb and replies.
	stop := context.AfterFunc(ctx, func() { _ = conn.CloseWrite() })
	defer stop()
	return a.listen(ctx)
}

// asking is a question that was sent.
type asking struct {
	silence
	conn *net.UnixConn
	id   string
	verb string
	out  io.Writer

	bar       step
	wasReady  bool
	wordAt    time.Time // when there was something for the user
	lastAt    time.Time // when there was anything
	told, bid bool      // the user, of a silence, and of a verb that takes its time
}

func (a *asking) send(args []string) error {
	dir, err := os.Getwd()
	if err != nil {
		return err
	}
	a.id = rand.Text()
	req := attachRequest{ID: a.id, Args: args, Dir: dir, Env: map[string]string{}, Detach: readyPipe.Load() != nil}
	for _, kv := range os.Environ() {
		if name, value, _ := strings.Cut(kv, "="); strings.HasPrefix(name, "AWS_") || name == "HOME" || name == tokenEnv || name == customerKeyVariable || name == s3ConnectionsEnv {
			req.Env[name] = value
		}
	}
	b, err := json.Marshal(req)
	if err != nil {
		return err
	}
	_ = a.conn.SetWriteDeadline(time.Now().Add(patience))
	if _, err = a.conn.Write(append(b, '\n')); errors.Is(err, os.ErrDeadlineExceeded) {
		return a.silence
	} else if err != nil {
		return errEnding // it closed its socket, or was killed, after the connection was made
	}
	return nil
}

// listen shows what the daemon says until the verb has ended.
func (a *asking) listen(ctx context.Context) error {
	lines, done := make(chan []byte), make(chan struct{})
	defer close(done)
	go func() {
		defer close(lines)
		said := bufio.NewScanner(a.conn)
		said.Buffer(nil, 16<<20)
		for said.Scan() {
			select {
			case lines <- bytes.Clone(said.Bytes()):
			case <-done:
				return
			}
		}
	}()
	over, deadline := ctx.Done(), time.NewTicker(beat)
	defer deadline.Stop()
	a.wordAt = a.since
	for {
		select {
		case line, ok := <-lines:
			switch {
			case ok:
				if end, err := a.hear(ctx, line); end {
					return err
				}
			case !a.wasReady && ctx.Err() == nil:
				return errEnding
			default:
				return fmt.Errorf("the daemon of %s ended", a.at)
			}
		case <-over:
			if errors.Is(ctx.Err(), context.DeadlineExceeded) {
				return a.silence
			}
			over = nil // the daemon ends the verb, and says so
		case <-deadline.C:
			if err := a.quiet(ctx); err != nil {
				return err
			}
		}
	}
}

// quiet is called from time to time. It says who is waited for, or that there is nothing to wait for.
func (a *asking) quiet(ctx context.Context) error {
	switch {
	case time.Since(a.since) <= patience:
	case a.lastAt.IsZero() || ctx.Err() != nil:
		return a.silence
	case !a.told:
		a.told = true
		notice("%v; waiting for it", a.silence)
	}
	if !a.bid && !a.told && !a.wasReady && a.bar == nil && time.Since(a.wordAt) > patience {
		a.bid = true
		notice("the daemon (pid %d) of %s is alive, and at `%s` since %s; waiting for it", a.pid, a.at, a.verb, a.wordAt.Format(time.TimeOnly))
	}
	return nil
}

// hear takes one line from the daemon. end is whether it is the last one.
func (a *asking) hear(ctx context.Context, line []byte) (end bool, err error) {
	var r attachReply
	if err := json.Unmarshal(line, &r); err != nil {
		return true, fmt.Errorf("the daemon of %s: %w", a.at, err)
	}
	if r.ID != a.id {
		return true, fmt.Errorf("the daemon (pid %d) of %s is of another version, which answers otherwise (end it with kill %d, then %s)", a.pid, a.at, a.pid, a.then)
	}
	if a.told {
		notice("the daemon of %s answers again", a.at)
	}
	now := time.Now()
	a.since, a.lastAt, a.told = now, now, false
	if r != (attachReply{ID: a.id}) {
		a.wordAt = now
	}
	switch {
	case r.Notice != "":
		notice("%s", r.Notice)
	case r.Out != "":
		if _, err := io.WriteString(a.out, r.Out); err != nil {
			return true, err
		}
	case r.Bar != nil:
		a.show(r.Bar)
	case r.Ready:
		a.wasReady = true
		if readyPipe.Load() != nil {
			if err := ready(); err != nil {
				return true, err // closing the connection then ends the mount
			}
			_, err := io.WriteString(a.conn, detached)
			return true, err
		}
		notice("attached to the daemon that owns %s", a.at)
		serviceReady()
	case r.Ended != nil:
		if a.bar != nil {
			a.bar.Done("")
		}
		switch {
		case r.Ended.Error == "":
			return true, ctx.Err()
		case r.Ended.Code == codeEnding && !a.wasReady:
			return true, errEnding
		}
		return true, cli.Failure(r.Ended.Code, r.Ended.Error)
	}
	return false, nil
}

// show shows the progress of a long step.
func (a *asking) show(b *barReply) {
	if a.bar == nil {
		a.bar = localStep(b.Label)
	}
	if b.End {
		a.bar.Done(b.Note)
		a.bar = nil
		return
	}
	a.bar.Set(b.Done, b.Total, b.Note)
}
