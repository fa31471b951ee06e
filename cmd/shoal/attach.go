package main

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
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

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
// Only the user can open the socket (0600), since anyone who can write to it can control the daemon.
const socketName = "shoal.sock"

// detached is the client's message that leaves a verb to the daemon.
const detached = "detached\n"

type attachRequest struct {
	Args   []string          `json:"args"`
	Dir    string            `json:"dir"`
	Env    map[string]string `json:"env"`
	Detach bool              `json:"detach"` // continue without the client once ready

	Shortcut string `json:"shortcut,omitempty"` // instead of a verb: the key of a mount whose files the client reads
}

// shortcuts are the servers of this process's mounts by their keys.
var shortcuts sync.Map

// attachReply is one line from the daemon; one field is set.
type attachReply struct {
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
			d.verbs.Go(func() { d.serve(ctx, conn) })
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

// serve runs one attached verb.
func (d *daemon) serve(ctx context.Context, conn *net.UnixConn) {
	defer func() { _ = conn.Close() }()
	verbCtx, cancel := context.WithCancel(ctx)
	defer cancel()
	in := bufio.NewReader(io.LimitReader(conn, 1<<20))
	line, err := in.ReadBytes('\n')
	if err != nil {
		return
	}
	out := &replies{w: conn}
	if ctx.Err() != nil {
		out.send(attachReply{Ended: &endedWith{codeEnding, "the daemon is ending"}})
		return
	}
	var req attachRequest
	err = json.Unmarshal(line, &req)
	if server, ok := shortcuts.Load(req.Shortcut); ok {
		if err := server.(*shortcut.Server).Serve(conn); err != nil {
			slog.Warn("the connection to a shoal.open client was closed", "cause", err)
		}
		return
	}
	if err != nil || len(req.Args) == 0 || !attachVerbs[req.Args[0]] {
		out.send(attachReply{Ended: &endedWith{1, "the daemon does not understand this request (is it another version? stop it first)"}})
		return
	}
	ready := make(chan struct{})
	var once sync.Once
	inv := &invocation{
		host: d.host, dir: req.Dir, peer: audit.Unix(conn), getenv: func(name string) string { return req.Env[name] },
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
	err = c.ExecuteContext(context.WithValue(verbCtx, invocationKey{}, inv))
	if err != nil && ctx.Err() == nil {
		d.host.Audit().Write(outcome(audit.Event{Event: "attach", Verb: req.Args[0], Peer: inv.peer}, err))
	}
	end := &endedWith{}
	if err != nil && ctx.Err() != nil {
		end.Code, end.Error = codeEnding, "the daemon is ending"
	} else if err != nil {
		end.Code, end.Error = cli.Code(err), cli.OneLine(err)
	}
	out.send(attachReply{Ended: end})
}

// replies sends lines to a client. The verb's output is among them.
type replies struct {
	mu sync.Mutex
	w  net.Conn
}

func (r *replies) write(reply attachReply) error {
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

var (
	// errSilent: nothing answers on the socket.
	errSilent = errors.New("the daemon does not answer")
	// errEnding: the daemon ended before the verb was ready.
	errEnding = errors.New("the daemon is ending")
)

// attach runs a verb in the daemon that owns cacheDir. It fails with errSilent or errEnding if there is no daemon, or if
// it is about to end.
func attach(ctx context.Context, cacheDir string, args []string, out io.Writer) error {
	conn, err := dialUnix(filepath.Join(cacheDir, socketName))
	if err != nil {
		return errSilent
	}
	defer conn.Close()
	dir, err := os.Getwd()
	if err != nil {
		return err
	}
	req := attachRequest{Args: args, Dir: dir, Env: map[string]string{}, Detach: readyPipe.Load() != nil}
	for _, kv := range os.Environ() {
		if name, value, _ := strings.Cut(kv, "="); strings.HasPrefix(name, "AWS_") || name == "HOME" || name == tokenEnv || name == customerKeyVariable {
			req.Env[name] = value
		}
	}
	b, err := json.Marshal(req)
	if err != nil {
		return err
	}
	if _, err := conn.Write(append(b, '\n')); err != nil {
		return errEnding // it closed its socket, or was killed, after the connection was made
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.(*net.UnixConn).CloseWrite() }) // the daemon then ends the verb and replies
	defer stop()
	var bar step
	wasReady := false
	lines := bufio.NewScanner(conn)
	lines.Buffer(nil, 16<<20)
	for lines.Scan() {
		var r attachReply
		if err := json.NewDecoder(bytes.NewReader(lines.Bytes())).Decode(&r); err != nil {
			return fmt.Errorf("the daemon of %s: %w", cacheDir, err)
		}
		switch {
		case r.Notice != "":
			notice("%s", r.Notice)
		case r.Out != "":
			if _, err := io.WriteString(out, r.Out); err != nil {
				return err
			}
		case r.Bar != nil:
			if bar == nil {
				bar = localStep(r.Bar.Label)
			}
			if r.Bar.End {
				bar.Done(r.Bar.Note)
				bar = nil
				continue
			}
			bar.Set(r.Bar.Done, r.Bar.Total, r.Bar.Note)
		case r.Ready:
			wasReady = true
			if readyPipe.Load() != nil {
				if err := ready(); err != nil {
					return err // closing the connection then ends the mount
				}
				_, err := io.WriteString(conn, detached)
				return err
			}
			notice("attached to the daemon that owns %s", cacheDir)
			serviceReady()
		case r.Ended != nil:
			if bar != nil {
				bar.Done("")
			}
			switch {
			case r.Ended.Error == "":
				return ctx.Err()
			case r.Ended.Code == codeEnding && !wasReady:
				return errEnding
			}
			return cli.Failure(r.Ended.Code, r.Ended.Error)
		}
	}
	if !wasReady && ctx.Err() == nil {
		return errEnding
	}
	return fmt.Errorf("the daemon of %s ended", cacheDir)
}
