package daemon

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/shoalfs/shoal/internal/audit"
	"github.com/shoalfs/shoal/internal/cli"
	"github.com/shoalfs/shoal/internal/handover"
)

// One daemon owns a cache directory, and listens there. A verb that finds the directory owned attaches: it sends its
// command line, its folder and some of its environment as one line of JSON, and the daemon runs the verb in its own
// process. What the verb says comes back by its Voice; the last line has the result. If the client closes the
// connection before it detaches, the verb ends, as with Ctrl-C.
//
// Each line names its question. The first comes at once, and one each second while the verb runs, so that a client
// knows a daemon that hangs from one that works. Whatever is not as it should be ends the connection.
//
// Only the user can open a cache directory's socket (0600), since anyone who can write to it can control the daemon.

const (
	Patience   = 5 * time.Second // how long a daemon may say nothing
	Long       = time.Minute     // how long it may if it goes on, or for an answer that it has at hand
	beat       = time.Second     // between signs of life while a verb runs
	codeEnding = 3               // exit code of a verb whose daemon ends soon: the client can take the directory then
	detached   = "detached\n"    // the client's message that leaves a verb to the daemon
)

type question struct {
	ID     string            `json:"id"` // every answer has it
	Args   []string          `json:"args"`
	Dir    string            `json:"dir"`
	Env    map[string]string `json:"env"`
	Detach bool              `json:"detach"` // continue without the client once ready

	Shortcut string `json:"shortcut,omitempty"` // instead of a verb: the key of a mount whose files the client reads
}

// Answers runs the verbs that come by a socket.
type Answers struct {
	Run    func(ctx context.Context, v *Verb) error
	Verbs  []string                                 // that can run here
	May    func(who *audit.Peer, verb string) error // why a process may not run one of them, or nil; nil: all may
	Failed func(v *Verb, err error)
	Take   func(key string, conn *net.UnixConn) bool // takes the connection of a client that asks for a mount's files
	Most   int                                       // verbs at a time

	listener *net.UnixListener
	cancel   func()
	accept   sync.WaitGroup
	verbs    verbs
}

// ListenIn begins to answer by the socket of a cache directory, which this process owns.
func (a *Answers) ListenIn(ctx context.Context, cacheDir string) (path string, err error) {
	path = socketOf(cacheDir)
	_ = os.Remove(path) // left by a daemon that was killed
	defer syscall.Umask(syscall.Umask(0o177))
	return path, a.Listen(ctx, path)
}

// Listen begins to answer by a socket.
func (a *Answers) Listen(ctx context.Context, address string) (err error) {
	if a.listener, err = listenUnix(address); err != nil {
		return err
	}
	ctx, a.cancel = context.WithCancel(ctx)
	free := make(chan struct{}, a.Most)
	a.accept.Go(func() {
		for {
			conn, err := handover.Accept(a.listener.AcceptUnix, slog.Default())
			if err != nil {
				return
			}
			free <- struct{}{}
			a.verbs.Go(func() { a.answer(ctx, conn); <-free })
		}
	})
	return nil
}

// Running is a verb that runs here without a client.
type Running struct {
	Ready, Ended chan struct{} // closed
	End          func()        // ends it
	Err          error         // why it has ended, if not in order; only once it has

	mu   sync.Mutex
	said string
}

// Said returns the last notice.
func (r *Running) Said() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.said
}

// Write takes what the verb says.
func (r *Running) Write(p []byte) (int, error) {
	var l line
	if err := json.Unmarshal(p, &l); err != nil {
		return 0, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.said = cmp.Or(l.Notice, r.said)
	if l.Ready {
		close(r.Ready)
	}
	return len(p), nil
}

// Start runs a verb as for a client that has left.
func (a *Answers) Start(ctx context.Context, args []string, dir string, env map[string]string) *Running {
	ctx, cancel := context.WithCancel(ctx)
	r := &Running{Ready: make(chan struct{}), Ended: make(chan struct{}), End: cancel}
	v := &Verb{Voice: &Voice{to: r}, Args: args, Dir: dir, Env: env, Detached: true}
	a.verbs.Go(func() {
		defer cancel()
		defer close(r.Ended)
		if r.Err = a.Run(ctx, v); r.Err != nil && ctx.Err() == nil {
			a.Failed(v, r.Err)
			slog.Error("what was to be served is not served", "verb", args[0], "cause", r.Err)
		}
	})
	return r
}

// Idle returns a channel that is closed once no verb runs.
func (a *Answers) Idle() <-chan struct{} { return a.verbs.ended() }

// Close ends the verbs, and waits for them.
func (a *Answers) Close() {
	if a.cancel == nil { // it does not listen
		return
	}
	a.cancel()
	_ = a.listener.Close()
	a.accept.Wait()
	<-a.verbs.ended()
}

// verbs counts running verbs. It is not a sync.WaitGroup, which panics if a verb begins at the moment in which a waiter
// learns that the last one has ended.
type verbs struct {
	mu   sync.Mutex
	n    int
	idle chan struct{} // closed while n is 0; nil before the first
}

// Go runs a verb.
func (v *verbs) Go(do func()) {
	v.add(1)
	go func() { defer v.add(-1); do() }()
}

func (v *verbs) add(n int) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.n == 0 {
		v.idle = make(chan struct{})
	}
	if v.n += n; v.n == 0 {
		close(v.idle)
	}
}

func (v *verbs) ended() <-chan struct{} {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.idle == nil {
		v.idle = make(chan struct{})
		close(v.idle)
	}
	return v.idle
}

func (a *Answers) answer(ctx context.Context, conn *net.UnixConn) {
	defer func() { _ = conn.Close() }()
	verbCtx, cancel := context.WithCancel(ctx)
	defer cancel()
	in := bufio.NewReader(io.LimitReader(conn, 1<<20))
	v, detach := a.take(ctx, conn, in)
	if v == nil {
		return
	}
	var beating sync.WaitGroup
	beating.Go(func() { v.beat(verbCtx) })
	defer func() { cancel(); beating.Wait() }()
	// After its request the client sends at most one message: that it leaves the verb to the daemon. Its end shows
	// as the end of the stream.
	go func() {
		if said, _ := io.ReadAll(in); !v.ready.Load() || !detach || string(said) != detached {
			cancel()
		}
	}()
	err := a.Run(verbCtx, v)
	end := &ending{}
	switch {
	case err == nil:
	case ctx.Err() != nil:
		end.Code, end.Error = codeEnding, "the daemon is ending"
	default:
		a.Failed(v, err)
		end.Code, end.Error = cli.Code(err), cli.OneLine(err)
	}
	_ = v.say(line{Ended: end})
}

// take reads what a client asks, and returns it if it is a verb that may run. Otherwise it has been answered.
func (a *Answers) take(ctx context.Context, conn *net.UnixConn, in *bufio.Reader) (v *Verb, detach bool) {
	_ = conn.SetReadDeadline(time.Now().Add(Patience))
	text, err := in.ReadBytes('\n')
	if err != nil {
		return nil, false
	}
	_ = conn.SetReadDeadline(time.Time{})
	var q question
	err = json.Unmarshal(text, &q)
	v = &Verb{Voice: &Voice{to: conn, id: q.ID}, Args: q.Args, Dir: q.Dir, Peer: audit.Unix(conn), Env: q.Env,
		Detached: q.Detach}
	if ctx.Err() != nil {
		_ = v.say(line{Ended: &ending{codeEnding, "the daemon is ending"}})
		return nil, false
	}
	if a.Take != nil && a.Take(q.Shortcut, conn) {
		return nil, false
	}
	if err != nil || len(q.Args) == 0 || !slices.Contains(a.Verbs, q.Args[0]) {
		err = errors.New("the daemon does not understand this request (is it another version? stop it first)")
	} else if a.May != nil {
		err = a.May(v.Peer, q.Args[0])
	}
	if err != nil {
		_ = v.say(line{Ended: &ending{1, err.Error()}})
		return nil, false
	}
	return v, q.Detach
}
