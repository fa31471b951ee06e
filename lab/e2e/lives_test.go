package e2e

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/shoalfs/shoal/lab/rig/certtest"
	"github.com/shoalfs/shoal/lab/rig/subproc"
	"github.com/shoalfs/shoal/loader/feedclient"
)

// patience is for what has to happen sooner or later, on the slowest machine.
const patience = 5 * time.Minute

// node is a server that is killed and started again, always at the same address.
type node struct {
	addr     string
	wires    string // where the trainers' wires begin: a folder of sockets, or ""
	security feedclient.Security
	args     []string
	env      []string

	mu     sync.Mutex
	proc   *subproc.Proc
	starts int
}

// The kinds of nodes: unix, TCP, TLS with certificates for both sides and a token, unix with a token.
const nodeKinds = 4

func newNode(t *testing.T, kind int, env []string, source string) *node {
	t.Helper()
	n := &node{env: env, args: []string{"serve", source, "--cache-dir", t.TempDir(), "--log-level", "error"}}
	address := ownAddress() + ":7070" // nobody else takes it while the server is dead
	token := func() {
		file := filepath.Join(t.TempDir(), "tokens")
		write(t, file, []byte("another\nsesame-0451\n"))
		n.security.Token = "sesame-0451"
		n.args = append(n.args, "--token-file", file)
	}
	switch kind {
	case 0, 3:
		n.addr = "unix://" + filepath.Join(t.TempDir(), "s")
		n.wires = t.TempDir()
		if kind == 3 {
			token()
		}
	case 1:
		n.addr = "tcp://" + address
	case 2:
		n.addr = "tls://" + strings.Replace(address, ":7070", ":7071", 1)
		ca := certtest.New(t, "e2e")
		cert, key := ca.Issue(t, "feed.example.org", 24*time.Hour)
		n.args = append(n.args, "--tls-cert", cert, "--tls-key", key, "--tls-client-ca", ca.File)
		n.security = feedclient.Security{CA: ca.File, ServerName: "feed.example.org"}
		n.security.Cert, n.security.Key = ca.Issue(t, "trainer", 24*time.Hour)
		token()
	}
	n.args = append(n.args, "--listen", n.addr)
	n.start(t)
	t.Cleanup(func() { n.kill(syscall.SIGKILL) })
	return n
}

func (n *node) start(t testing.TB) {
	cmd := exec.Command(shoalBin, n.args...)
	cmd.Env = append(os.Environ(), n.env...)
	p, err := subproc.Start("shoal serve", cmd)
	if err != nil {
		t.Error(err)
		return
	}
	n.mu.Lock()
	n.proc = p
	n.starts++
	n.mu.Unlock()
}

// kill ends the server and waits until it has.
func (n *node) kill(sig syscall.Signal) {
	n.mu.Lock()
	p := n.proc
	n.mu.Unlock()
	_ = p.Signal(sig)
	<-p.Done()
}

// restart ends it by a signal and starts it again.
func (n *node) restart(t testing.TB, sig syscall.Signal) {
	n.mu.Lock()
	err := n.proc.Failed()
	n.mu.Unlock()
	if err != nil {
		t.Errorf("the server ended before it was killed: %v", err)
	}
	n.kill(sig)
	n.start(t)
}

// empty waits until nothing is left of any session.
func (n *node) empty(t *testing.T) {
	flags := []string{"stat", n.addr, "--json"}
	for flag, value := range map[string]string{"--ca": n.security.CA, "--cert": n.security.Cert,
		"--key": n.security.Key, "--server-name": n.security.ServerName} {
		if value != "" {
			flags = append(flags, flag, value)
		}
	}
	var s struct {
		Memory struct {
			Used int64 `json:"ledger_used"`
		}
		Feed struct {
			Open   int   `json:"open_sessions"`
			Held   int64 `json:"held_bytes"`
			Failed int64
		}
	}
	defer func() {
		if t.Failed() {
			t.Logf("%+v", s)
		}
	}()
	within(t, patience, "a server at "+n.addr+" has let go of all that was killed", func() bool {
		out, _, code := shoal(t, []string{"SHOAL_FEED_TOKEN=" + n.security.Token}, flags...)
		if code == 0 {
			if err := json.Unmarshal([]byte(out), &s); err != nil {
				t.Fatal(err)
			}
			if s.Feed.Failed > 0 {
				t.Fatalf("%d sessions failed", s.Feed.Failed)
			}
		}
		return code == 0 && s.Feed.Open == 0 && s.Feed.Held == 0 && s.Memory.Used == 0
	})
}

// host is one process of a life.
type host struct {
	job   trainerJob
	proc  *subproc.Proc
	wire  *wire
	stdin io.WriteCloser
	ended chan struct{} // closed when code is there
	code  int
}

// committed reads what the trainer has committed; nothing if it has not.
func (h *host) committed(t testing.TB) (c trainedCommit) {
	b, err := os.ReadFile(h.job.Commit)
	if errors.Is(err, fs.ErrNotExist) {
		return c
	}
	if err == nil {
		err = json.Unmarshal(b, &c)
	}
	if err != nil {
		t.Fatalf("a commit that is not whole: %v", err)
	}
	return c
}

// wait returns the exit code, -1 for a killed process.
func (h *host) wait(t testing.TB) int {
	select {
	case <-h.proc.Done():
	case <-time.After(patience):
		t.Errorf("rank %v hangs:\n%s", h.job.Ranks, h.proc.Tail())
		_ = h.proc.Signal(syscall.SIGKILL)
		<-h.proc.Done()
	}
	h.wire.close()
	err := h.proc.Wait(t.Context())
	var exit *exec.ExitError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &exit):
		return exit.ExitCode()
	}
	return -1
}

// atLine tells the end of a trainer's only line on its standard output, which may come in pieces.
type atLine struct{ seen chan<- struct{} }

func (w atLine) Write(p []byte) (int, error) {
	if bytes.ContainsRune(p, '\n') {
		w.seen <- struct{}{}
	}
	return len(p), nil
}

var points = []string{"open", "opened", "next", "batch", "step", "epoch", "edge", "edge", "written half", "written",
	"synced", "committed"}

// live lets the trainers begin from the state and ends them, or not.
func (r *run) live(life int, kill bool) {
	rng := r.rng
	j := r.job
	j.Addr, j.Security = r.node.addr, r.node.security
	if r.state != "" && j.Order != "torch" { // whose order is that of one world
		j.World = r.anyWorld()
	}
	j.Batch, j.Every, j.Credits = r.global/j.World, 1+rng.IntN(3), 1+rng.IntN(4)
	j.State = r.state
	if steps, _ := r.steps(); j.State != "" && r.done%steps == 0 && rng.IntN(2) == 0 {
		j.State = nextEpoch(r.t, j.State) // as EpochEnd brings it: the same place
	}
	if rng.IntN(3) == 0 {
		j.Transport = "chunks"
	}
	hosts := 1
	if j.World > 1 && rng.IntN(3) == 0 {
		hosts = 2
	}
	python := rng.IntN(24) == 0 && r.node.security == (feedclient.Security{})

	// What happens, where, and to whom.
	victim := []string{"trainer", "trainer", "trainer", "server", "both", "connection", "server stops",
		"zombie"}[rng.IntN(8)]
	where := []string{"point", "down", "down", "up"}[rng.IntN(4)]
	if python && victim == "zombie" { // it may come back by itself
		victim = "both"
	}
	if !kill {
		victim, where = "nothing", "end"
	}
	j.Reconnect = !python && (victim == "server" || victim == "connection" || victim == "server stops") &&
		rng.IntN(2) == 0
	steps, _ := r.steps()
	left := len(r.orders)*steps - r.done + 1
	var after int64
	switch where {
	case "point":
		j.Point = points[rng.IntN(len(points))]
		j.Nth = 1 + rng.IntN(max(1, left/3))
		switch j.Point {
		case "open", "opened":
			j.Nth = 1
		case "edge": // the last batch of the epoch, or the first of the next
			j.Nth = 1
			if rest := steps - r.done%steps; rest < left {
				j.Point, j.Nth = "batch", rest+rng.IntN(2)
			} else {
				j.Point = "committed"
			}
		}
	case "down":
		step := r.bytes() / int64(hosts)
		if r.node.wires != "" && j.Transport == "" { // in slots: the headers and the states only
			step = int64(700 * j.World / hosts)
		}
		after = rng.Int64N(step*int64(max(1, left/3)) + 2000)
	case "up":
		after = rng.Int64N(int64(2000 + 60*left/3))
	}
	r.book.note(func() {
		r.book.lives++
		if python {
			r.book.python++
		}
	})

	happened := make(chan chan<- struct{}, 1)
	ended := make(chan struct{})
	trigger := func() { // of the wire and of the point: at most one of them is set
		through := make(chan struct{})
		select {
		case happened <- through:
		case <-ended:
			return
		}
		select {
		case <-through:
		case <-ended:
		}
	}
	var list []*host
	for i := range hosts {
		h := &host{job: j, ended: make(chan struct{})}
		for rank := range j.World {
			if rank*hosts/j.World == i {
				h.job.Ranks = append(h.job.Ranks, rank)
			}
		}
		if i > 0 {
			h.job.Point = ""
		}
		h.job.Commit = filepath.Join(r.dir, fmt.Sprintf("life%d-host%d.json", life, i))
		at, happen := "tcp://127.0.0.1:0", (func())(nil)
		if r.node.wires != "" {
			at = fmt.Sprintf("unix://%s/%d-%d", r.node.wires, life, i)
		}
		if i == 0 && (where == "down" || where == "up") {
			happen = trigger
		}
		h.wire = newWire(r.t, at, r.node.addr, where == "up", after, happen)
		h.job.Addr = h.wire.addr
		r.launch(h, python, trigger)
		list = append(list, h)
	}

	// As a launcher of torch does: when one ends badly, all are ended.
	ends := make(chan *host, hosts)
	for _, h := range list {
		go func() {
			h.code = h.wait(r.t)
			close(h.ended)
			ends <- h
		}()
	}
	killAll := func() {
		for _, h := range list {
			_ = h.proc.Signal(syscall.SIGKILL)
		}
	}
	killed, stopped := false, false
	for n := 0; n < hosts && !stopped; {
		select {
		case through := <-happened:
			name := where
			if where == "point" {
				name = "at " + j.Point
			} else {
				name = "at a byte " + where
			}
			if j.State != "" {
				name += ", resumed"
			}
			r.book.note(func() { r.book.by[victim+" "+name]++ })
			killed = true
			switch victim {
			case "trainer":
				killAll()
			case "server":
				r.node.restart(r.t, syscall.SIGKILL)
			case "server stops":
				r.node.restart(r.t, syscall.SIGTERM)
			case "both":
				r.node.kill(syscall.SIGKILL)
				killAll()
				r.node.start(r.t)
			case "connection":
				list[0].wire.cut()
			case "zombie":
				for _, h := range list {
					_ = h.proc.Signal(syscall.SIGSTOP)
				}
				stopped = true
			}
			close(through)
		case h := <-ends:
			n++
			switch h.code {
			case 0:
			case -1, exitBroken:
				if !killed {
					r.t.Errorf("life %d: a trainer broke off although nothing had happened:\n%s", life, h.proc.Tail())
				}
				killed = true
				killAll()
			default:
				r.t.Errorf("life %d: a trainer failed with %d:\n%s", life, h.code, h.proc.Tail())
				killAll()
			}
		}
	}
	close(ended)
	r.merge(j.World, list)
	if stopped {
		for _, h := range list {
			r.zombies = append(r.zombies, &zombie{h, len(h.committed(r.t).Steps)})
		}
	}
}

// bytes is about how many one step has.
func (r *run) bytes() int64 {
	switch {
	case r.job.Transform == "":
		return int64(r.global * 6000)
	case strings.HasPrefix(r.job.Transform, "Center"):
		return int64(r.global * 3 * 4 * 96 * 96)
	}
	return int64(r.global * (3*24*24 + 100))
}

func nextEpoch(t testing.TB, state string) string {
	f := stateFields(t, state)
	epoch, err := f["epoch"].(json.Number).Int64()
	if err != nil {
		t.Fatal(err)
	}
	if cursor, _ := f["cursor"].(json.Number).Int64(); cursor > 0 {
		f["epoch"], f["cursor"] = epoch+1, 0
		delete(f, "bad")
	}
	b, err := json.Marshal(f)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// launch starts the trainer.
func (r *run) launch(h *host, python bool, trigger func()) {
	arg, err := json.Marshal(h.job)
	if err != nil {
		r.t.Fatal(err)
	}
	cmd := exec.Command(os.Args[0], "trainer", string(arg))
	if python {
		client, err := filepath.Abs("../../python")
		if err != nil {
			r.t.Fatal(err)
		}
		cmd = exec.Command("/usr/bin/python3", "trainer/trainer.py", string(arg))
		cmd.Env = append(os.Environ(), "PYTHONPATH="+client, "PYTHONDONTWRITEBYTECODE=1")
	}
	if h.stdin, err = cmd.StdinPipe(); err != nil {
		r.t.Fatal(err)
	}
	seen := make(chan struct{}, 1)
	cmd.Stdout = atLine{seen}
	if h.proc, err = subproc.Start("trainer", cmd); err != nil {
		r.t.Fatal(err)
	}
	go func() {
		select {
		case <-seen:
			trigger()
			_, _ = io.WriteString(h.stdin, "go on\n")
		case <-h.proc.Done():
		}
	}()
}

// zombie is a trainer that was stopped, was taken for dead, and wakes up when another has its place.
type zombie struct {
	host  *host
	steps int // that it had committed
}

// rise lets it go on. It may still have what was granted, and nothing else.
func (z *zombie) rise(t *testing.T) {
	_ = z.host.proc.Signal(syscall.SIGCONT)
	<-z.host.ended
	more := len(z.host.committed(t).Steps) - z.steps
	// One that had not opened its streams yet is now the newest, and has every right to deliver.
	if most := z.host.job.Credits + 2*z.host.job.Every; z.steps > 0 && more > most {
		t.Errorf("a trainer that was replaced got %d batches more, with %d credits", more, z.host.job.Credits)
	}
	switch z.host.code {
	case 0, exitFenced, exitBroken, -1:
		// it may have had the rest already; the server or a launcher's kill may have come first
	default:
		t.Errorf("a trainer that was replaced ended with %d:\n%s", z.host.code, z.host.proc.Tail())
	}
}
