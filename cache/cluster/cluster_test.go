package cluster

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/shoalfs/shoal/lab/rig/etcd"
	"github.com/shoalfs/shoal/lab/rig/subproc"
	"github.com/shoalfs/shoal/lab/rig/synced"
)

// quick is the usual pace, faster. The lease is longer than need be, for machines with much else to do.
var quick = pace{lease: 3 * time.Second, beat: 50 * time.Millisecond, answer: time.Second,
	quiet: 200 * time.Millisecond, gather: 1500 * time.Millisecond}

func TestMain(m *testing.M) {
	if url := os.Getenv("CLUSTER_TEST_URL"); url != "" {
		daemon(url)
		return
	}
	_ = flag.Set("test.parallel", "8") // most tests wait
	goleak.VerifyTestMain(m)
}

// daemon is a process that joins as node 9, takes a lock, and says what it sees. It is killed from outside.
func daemon(url string) {
	p := quick
	if os.Getenv("CLUSTER_TEST_PACE") == "usual" {
		p = usual
	}
	c, err := join(Options{URL: url, Self: node(9)}, p)
	if err != nil {
		panic(err)
	}
	for {
		held, _, err := c.Lock(context.Background(), "l")
		switch {
		case errors.Is(err, ErrAway):
			continue
		case err != nil:
			panic(err)
		}
		fmt.Println("locked")
		<-held.Done()
		fmt.Println("unlocked", context.Cause(held))
	}
}

type child struct {
	*subproc.Proc
	out, err synced.Buffer
}

func process(t *testing.T, url string, env ...string) *child {
	t.Helper()
	cmd := exec.Command(os.Args[0], "-test.run=^$")
	p := &child{}
	cmd.Env = append(os.Environ(), append(env, "CLUSTER_TEST_URL="+url)...)
	cmd.Stdout, cmd.Stderr = &p.out, &p.err
	var err error
	if p.Proc, err = subproc.Start("node", cmd); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.kill() })
	return p
}

func (p *child) kill() {
	_ = p.Signal(syscall.SIGKILL)
	<-p.Done()
}

func server(t *testing.T, args ...string) *etcd.Server {
	t.Helper()
	return serverTLS(t, false, args...)
}

func serverTLS(t *testing.T, tls bool, args ...string) *etcd.Server {
	t.Helper()
	t.Parallel()
	if _, err := etcd.FindBinary(); err != nil {
		t.Skip(err)
	}
	s, err := etcd.Start(within(t, patience), tls, args...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

// patience is for what has to happen sooner or later: etcd may write a few bytes for ten seconds on a busy machine.
const patience = 2 * time.Minute

func within(t *testing.T, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}

// answered does what fails while etcd is away, as it is for seconds at a time on a busy machine.
func answered(t *testing.T, do func() error) {
	t.Helper()
	for end := time.Now().Add(patience); ; time.Sleep(10 * time.Millisecond) {
		if err := do(); err == nil {
			return
		} else if !errors.Is(err, ErrAway) || time.Now().After(end) {
			t.Error(err)
			return
		}
	}
}

func publish(t *testing.T, c *Cluster, ctx context.Context, key string, value []byte) {
	t.Helper()
	answered(t, func() error { return c.Publish(ctx, key, value) })
}

func node(i int) Node {
	return Node{ID: fmt.Sprintf("%016x", i), Address: fmt.Sprintf("10.0.0.%d:7", i), Weight: uint32(i)}
}

func where(s *etcd.Server) string { return "etcd://" + s.Addr + "/test" }

// joinAs joins, and leaves at the end of the test.
func joinAs(t *testing.T, o Options) (*Cluster, *synced.Buffer) {
	t.Helper()
	return joinAt(t, o, quick)
}

func joinAt(t *testing.T, o Options, p pace) (*Cluster, *synced.Buffer) {
	t.Helper()
	log := &synced.Buffer{}
	o.Log = slog.New(slog.NewTextHandler(log, nil))
	c, err := join(o, p)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c, log
}

// nodes joins nodes 1 to n and waits until each sees all.
func nodes(t *testing.T, s *etcd.Server, n int) []*Cluster {
	t.Helper()
	var out []*Cluster
	for i := range n {
		c, _ := joinAs(t, Options{URL: where(s), Self: node(i + 1)})
		out = append(out, c)
	}
	for _, c := range out {
		if err := c.Quiet(within(t, patience)); err != nil {
			t.Fatal(err)
		}
		see(t, c, ids(n)...)
	}
	return out
}

func ids(n int) (out []string) {
	for i := range n {
		out = append(out, node(i+1).ID)
	}
	return out
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !ok(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("does not come: " + what)
		}
	}
}

// see waits until c's view has these nodes.
func see(t *testing.T, c *Cluster, want ...string) {
	t.Helper()
	eventually(t, "a view of "+fmt.Sprint(want), func() bool {
		var got []string
		for _, n := range c.View().Nodes {
			got = append(got, n.ID)
		}
		return slices.Equal(got, want)
	})
}

func phase(t *testing.T, c *Cluster, want string) {
	t.Helper()
	eventually(t, want, func() bool { return c.State().Phase == want })
}

func unchanged(t *testing.T, cs []*Cluster) func() {
	t.Helper()
	var changed []<-chan struct{}
	for _, c := range cs {
		changed = append(changed, c.Changed())
	}
	return func() {
		t.Helper()
		for i, ch := range changed {
			select {
			case <-ch:
				t.Errorf("the view of node %d has changed: %v", i+1, cs[i].View())
			default:
			}
		}
	}
}

func TestNodesComeAndGo(t *testing.T) {
	s := server(t)
	cs := nodes(t, s, 3)
	looker, _ := joinAs(t, Options{URL: where(s)})
	see(t, looker, ids(3)...)
	changed := cs[1].Changed()
	cs[0].Open("e")
	cs[0].Open("d")
	cs[0].Open("e")
	<-changed
	for _, c := range append(cs[1:], looker) {
		eventually(t, "the datasets", func() bool { return slices.Equal(c.View().Nodes[0].Open, []string{"d", "e"}) })
	}
	cs[0].Forget("d")
	for _, c := range append(cs[1:], looker) {
		eventually(t, "the dataset is closed", func() bool { return !c.View().Nodes[0].Has("d") })
	}
	if st := cs[0].State(); st.Phase != Joined || st.Nodes != 3 || st.Rev == 0 || st.Error != "" {
		t.Error(st)
	}
	began := time.Now()
	_ = cs[0].Close()
	if took := time.Since(began); took > quick.answer {
		t.Error("leaving took", took)
	}
	see(t, cs[1], ids(3)[1:]...)
	see(t, looker, ids(3)[1:]...)
	if took := time.Since(began); took > quick.lease {
		t.Error("a node that left was seen for", took)
	}
}

func TestEtcdAwayAtStart(t *testing.T) {
	s := server(t)
	s.Stop()
	began := time.Now()
	c, log := joinAs(t, Options{URL: strings.Replace(where(s), "//", "//u:p@", 1), Self: node(1)})
	if took := time.Since(began); took > quick.answer/2 { // it waits for no answer
		t.Error("joining took", took)
	}
	err := c.Quiet(within(t, 3*time.Second))
	if err == nil || !strings.Contains(err.Error(), "cannot be reached: see that it runs") ||
		strings.Contains(err.Error(), "u:p@") {
		t.Error(err)
	}
	if _, err := c.Published(within(t, 3*time.Second), "k"); !errors.Is(err, ErrAway) {
		t.Error(err)
	}
	if err := s.Restart(within(t, patience), false); err != nil {
		t.Fatal(err)
	}
	if err := c.Quiet(within(t, patience)); err != nil {
		t.Error(err)
	}
	if got := log.String(); strings.Count(got, "WARN") != 1 || strings.Count(got, "INFO") != 1 {
		t.Error(got)
	}
	s.Stop()
	phase(t, c, Away)
	if _, _, err := c.Lock(within(t, patience), "l"); !errors.Is(err, ErrAway) {
		t.Error(err)
	}
	began = time.Now()
	_ = c.Close()
	if took := time.Since(began); took > 2*quick.answer {
		t.Error("leaving took", took, "without etcd")
	}
}

// Of an etcd that takes connections and answers nothing, a verb that only looks says that.
func TestEtcdFrozenAtStart(t *testing.T) {
	s := server(t)
	if err := s.Freeze(); err != nil {
		t.Fatal(err)
	}
	c, _ := joinAs(t, Options{URL: where(s)})
	if err := c.Quiet(within(t, 2*quick.lease)); err == nil ||
		!strings.Contains(err.Error(), "does not answer: see that it runs") {
		t.Error(err)
	}
}

// Whatever happens to etcd: no view changes, locks end in time, and afterwards all goes on.
func TestEtcdFails(t *testing.T) {
	for _, how := range []string{"stopped", "frozen", "emptied", "stopped for long", "frozen for long",
		"emptied for long"} {
		t.Run(how, func(t *testing.T) {
			s := server(t)
			cs := nodes(t, s, 3)
			publish(t, cs[0], t.Context(), "k", []byte("v"))
			held, unlock, err := cs[0].Lock(t.Context(), "l")
			if err != nil {
				t.Fatal(err)
			}
			defer unlock()
			same := unchanged(t, cs)
			frozen, long := strings.HasPrefix(how, "frozen"), strings.HasSuffix(how, "long")
			if frozen {
				err = s.Freeze()
			} else {
				s.Stop()
			}
			if err != nil {
				t.Fatal(err)
			}
			if long {
				began := time.Now()
				<-held.Done()
				if took := time.Since(began); took > quick.lease || !errors.Is(context.Cause(held), ErrLost) {
					t.Error("the lock ended after", took, context.Cause(held))
				}
				for _, c := range cs {
					phase(t, c, Away)
				}
				time.Sleep(2 * quick.lease)
			}
			if frozen {
				err = s.Thaw()
			} else {
				err = s.Restart(within(t, patience), strings.HasPrefix(how, "emptied"))
			}
			if err != nil {
				t.Fatal(err)
			}
			for _, c := range cs {
				eventually(t, "an answer", func() bool { _, err := c.Published(t.Context(), "k"); return err == nil })
				phase(t, c, Joined)
			}
			time.Sleep(2 * quick.gather)
			same()
			var v []byte
			eventually(t, "an answer", func() bool { v, err = cs[1].Published(t.Context(), "k"); return err == nil })
			if (string(v) != "v") != strings.HasPrefix(how, "emptied") {
				t.Errorf("%q", v)
			}
			if held.Err() != nil {
				if err := cs[0].Publish(held, "k", nil); !errors.Is(err, ErrLost) {
					t.Error("published without a lock", err)
				}
			} else {
				unlock()
			}
			_, unlock, err = cs[1].Lock(within(t, patience), "l")
			if err != nil {
				t.Fatal(err)
			}
			unlock()
			c, _ := joinAs(t, Options{URL: where(s), Self: node(4)})
			see(t, c, ids(4)...)
			see(t, cs[0], ids(4)...)
		})
	}
}

// One of three members hangs, then dies: nobody is away for long, and nothing moves.
func TestMemberFails(t *testing.T) {
	t.Parallel()
	if _, err := etcd.FindBinary(); err != nil {
		t.Skip(err)
	}
	members, err := etcd.StartMembers(within(t, patience), 3, false)
	if err != nil {
		t.Fatal(err)
	}
	var addrs []string
	for _, m := range members {
		t.Cleanup(m.Close)
		addrs = append(addrs, m.Addr)
	}
	at := "etcd://" + strings.Join(addrs, ",") + "/test"
	c, _ := joinAs(t, Options{URL: at, Self: node(1)})
	if err := c.Quiet(within(t, patience)); err != nil {
		t.Fatal(err)
	}
	same := unchanged(t, []*Cluster{c})
	if err := members[0].Freeze(); err != nil {
		t.Fatal(err)
	}
	// Also somebody who comes now is in the cluster soon.
	look, _ := joinAs(t, Options{URL: at})
	if err := look.Quiet(within(t, patience)); err != nil {
		t.Error(err)
	}
	looks := 0 // in a row; together they take longer than an answer may
	eventually(t, "it is joined, and stays it", func() bool {
		if looks++; c.State().Phase != Joined {
			looks = 0
		}
		return looks == 200
	})
	members[0].Stop()
	phase(t, c, Joined)
	same()
}

// A node that is cut off from etcd keeps its view, and the others go on without it; then it is back.
func TestCutOff(t *testing.T) {
	s := server(t)
	cs := nodes(t, s, 2)
	relay := newRelay(t, s.Addr)
	c, _ := joinAs(t, Options{URL: "etcd://" + relay.Addr().String() + "/test", Self: node(3)})
	see(t, c, ids(3)...)
	see(t, cs[0], ids(3)...)
	changed := unchanged(t, []*Cluster{c})
	relay.cut(true)
	see(t, cs[0], ids(2)...)
	phase(t, c, Away)
	changed()
	relay.cut(false)
	see(t, cs[0], ids(3)...)
	phase(t, c, Joined)
	changed()
}

// relay passes TCP on, unless it is cut: then it takes bytes, and passes none.
type relay struct {
	net.Listener
	gate  sync.RWMutex
	mu    sync.Mutex
	conns []net.Conn
}

// drop ends all connections. While it is cut a new one comes to nothing.
func (r *relay) drop() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, c := range r.conns {
		_ = c.Close()
	}
}

func (r *relay) cut(on bool) {
	if on {
		r.gate.Lock()
	} else {
		r.gate.Unlock()
	}
}

func newRelay(t *testing.T, to string) *relay {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	r := &relay{Listener: l}
	t.Cleanup(func() { _ = l.Close() })
	pass := func(dst, src net.Conn) {
		defer dst.Close()
		defer src.Close()
		buf := make([]byte, 4096)
		for {
			n, err := src.Read(buf)
			r.gate.RLock()
			_, err2 := dst.Write(buf[:n])
			r.gate.RUnlock()
			if err != nil || err2 != nil {
				return
			}
		}
	}
	go func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			out, err := net.Dial("tcp", to)
			if err != nil {
				_ = in.Close()
				continue
			}
			r.mu.Lock()
			r.conns = append(r.conns, in, out)
			r.mu.Unlock()
			go pass(out, in)
			go pass(in, out)
		}
	}()
	return r
}

// A lease that etcd ends early: the lock ends, and the node registers again.
func TestLeaseLost(t *testing.T) {
	s := server(t)
	cs := nodes(t, s, 2)
	held, unlock, err := cs[0].Lock(t.Context(), "l")
	if err != nil {
		t.Fatal(err)
	}
	defer unlock()
	same := unchanged(t, cs[:1])
	ss := cs[1].session.Load()
	if _, err := ss.Revoke(t.Context(), cs[0].session.Load().lease); err != nil {
		t.Fatal(err)
	}
	<-held.Done()
	eventually(t, "another lease", func() bool { ss := cs[0].session.Load(); return ss != nil && ss.ctx.Err() == nil })
	phase(t, cs[0], Joined)
	see(t, cs[1], ids(2)...)
	same()
	if err := cs[0].Publish(held, "k", nil); !errors.Is(err, ErrLost) {
		t.Error("published without a lock:", err)
	}
	// Also when this node has not noticed: the transaction looks at the lock itself.
	held, unlock, err = cs[0].Lock(t.Context(), "l")
	if err != nil {
		t.Fatal(err)
	}
	defer unlock()
	if _, err := ss.Delete(t.Context(), cs[0].key("locks/", "l")); err != nil {
		t.Fatal(err)
	}
	if err := cs[0].Publish(held, "k", nil); !errors.Is(err, ErrLost) || held.Err() != nil {
		t.Error("published without a lock:", err, held.Err())
	}
}

// kill -9, with the pace of the product: the lock is another's after the lease, and the view is without the dead one.
func TestKilled(t *testing.T) {
	s := server(t)
	p := process(t, where(s), "CLUSTER_TEST_PACE=usual")
	eventually(t, "the lock", func() bool { return p.out.String() == "locked\n" })
	c, err := join(Options{URL: where(s), Self: node(1)}, usual)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	see(t, c, node(1).ID, node(9).ID)
	p.kill()
	began := time.Now()
	_, unlock, err := c.Lock(within(t, patience), "l")
	if err != nil {
		t.Fatal(err)
	}
	t.Log("handed over after", time.Since(began))
	unlock()
	see(t, c, node(1).ID)
	t.Log("gone from the view after", time.Since(began))
}

// A process that is frozen longer than its lease, and one whose etcd goes away: it comes back by itself, and says
// nothing on stderr.
func TestFrozenAndThawed(t *testing.T) {
	s := server(t)
	cs := nodes(t, s, 1)
	p := process(t, where(s))
	eventually(t, "the lock", func() bool { return p.out.String() == "locked\n" })
	see(t, cs[0], node(1).ID, node(9).ID)
	if err := p.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	see(t, cs[0], node(1).ID)
	_, unlock, err := cs[0].Lock(within(t, patience), "l")
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	see(t, cs[0], node(1).ID, node(9).ID)
	lost := func(times int) func() bool {
		return func() bool { return strings.Count(p.out.String(), "unlocked "+ErrLost.Error()) == times }
	}
	eventually(t, "its loss", lost(1))
	unlock()
	eventually(t, "the lock again", func() bool { return strings.Count(p.out.String(), "locked\n") == 2 })
	s.Stop()
	eventually(t, "its loss again", lost(2))
	if err := s.Restart(within(t, patience), true); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the lock once more", func() bool { return strings.Count(p.out.String(), "locked\n") == 3 })
	if got := p.err.String(); got != "" {
		t.Error("on stderr:", got)
	}
}

func TestTwoWithOneID(t *testing.T) {
	s := server(t)
	cs := nodes(t, s, 2)
	same := unchanged(t, cs)
	other := node(1)
	other.Address = "10.0.0.99:7"
	c, log := joinAs(t, Options{URL: where(s), Self: other})
	if err := c.Quiet(within(t, patience)); !errors.Is(err, ErrTaken) ||
		!strings.Contains(err.Error(), "Delete the file node") {
		t.Error(err)
	}
	if st := c.State(); st.Phase != Refused || len(c.View().Nodes) > 0 {
		t.Error(st)
	}
	if got := log.String(); strings.Count(got, "WARN") != 1 {
		t.Error(got)
	}
	phase(t, cs[0], Joined)
	same()
	// When the first leaves, the ID is free.
	_ = cs[0].Close()
	see(t, c, ids(2)...)
	phase(t, c, Joined)
	// Who has been in it does not take its place back from another: two would take turns.
	r := node(1)
	cs[1].mu.Lock()
	r.Address = c.self.Address
	cs[1].mu.Unlock()
	if _, err := cs[1].session.Load().Put(t.Context(), c.key("nodes/", r.ID),
		`{"id":"`+r.ID+`","weight":1,"address":"`+r.Address+`","instance":"x"}`); err != nil {
		t.Fatal(err)
	}
	phase(t, c, Refused)
	if len(c.View().Nodes) != 2 {
		t.Error("the last view has not stayed:", c.View())
	}
}

// A restart takes over at once from the process before, whose lease has not ended, with its locks.
func TestRestartTakesOver(t *testing.T) {
	s := server(t)
	cs := nodes(t, s, 1)
	p := process(t, where(s), "CLUSTER_TEST_PACE=usual")
	eventually(t, "the lock", func() bool { return p.out.String() == "locked\n" })
	see(t, cs[0], node(1).ID, node(9).ID)
	was := cs[0].View().Nodes
	p.kill()
	p = process(t, where(s), "CLUSTER_TEST_PACE=usual")
	began := time.Now()
	eventually(t, "the lock again", func() bool { return p.out.String() == "locked\n" })
	if took := time.Since(began); took > usual.lease {
		t.Error("it waited for the lease to end:", took)
	}
	eventually(t, "it is known to be another process", func() bool {
		return cs[0].View().Nodes[1].Instance != was[1].Instance
	})
	if is := cs[0].View().Nodes; !slices.EqualFunc(was, is, Node.member) {
		t.Error("a restart moves what nodes own:", was, is)
	}
	p.kill()
	// At another address it has to wait until the lease ends, and is not refused.
	moved := node(9)
	moved.Address = "10.1.1.1:7"
	patient := quick
	patient.lease = usual.lease
	c, _ := joinAt(t, Options{URL: where(s), Self: moved}, patient)
	if err := c.Quiet(within(t, patience)); err != nil {
		t.Error(err)
	}
}

func TestDrain(t *testing.T) {
	s := server(t)
	cs := nodes(t, s, 3)
	looker, _ := joinAs(t, Options{URL: where(s)})
	see(t, looker, ids(3)...)
	if err := looker.Drain(t.Context(), "feedfeedfeedfeed"); err == nil ||
		!strings.Contains(err.Error(), "no such node") {
		t.Error(err)
	}
	for range 2 {
		if err := looker.Drain(t.Context(), node(2).ID); err != nil {
			t.Fatal(err)
		}
	}
	draining := func(want bool) {
		t.Helper()
		for _, c := range cs {
			eventually(t, "the mark", func() bool { n := c.View().Nodes; return len(n) == 3 && n[1].Draining == want })
		}
	}
	draining(true)
	cs[1].Open("d")
	eventually(t, "the dataset", func() bool { return cs[0].View().Nodes[1].Has("d") })
	draining(true)
	if err := s.Restart(within(t, patience), true); err != nil {
		t.Fatal(err)
	}
	time.Sleep(2 * quick.gather)
	draining(true)
	_ = cs[1].Close()
	c, _ := joinAs(t, Options{URL: where(s), Self: node(2)})
	cs[1] = c
	draining(false)
}

func TestConcurrentLocks(t *testing.T) {
	s := server(t)
	cs := nodes(t, s, 3)
	inside, most, total := 0, 0, 0
	var mu sync.Mutex
	var wg sync.WaitGroup
	for i := range 6 {
		wg.Go(func() {
			c := cs[i%3]
			var held context.Context
			var unlock func()
			if answered(t, func() (err error) {
				held, unlock, err = c.Lock(within(t, patience), "l")
				return err
			}); unlock == nil {
				return
			}
			mu.Lock()
			inside++
			total++
			most = max(most, inside)
			mu.Unlock()
			publish(t, c, held, "k", []byte{byte(i)})
			mu.Lock()
			inside--
			mu.Unlock()
			unlock()
			unlock()
		})
	}
	wg.Wait()
	if most != 1 || total != 6 {
		t.Errorf("%d of %d at once", most, total)
	}
	_, unlock, err := cs[0].Lock(t.Context(), "l")
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := cs[1].Lock(within(t, 200*time.Millisecond), "l"); !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
	unlock()
}

func TestConcurrentUse(t *testing.T) {
	s := server(t)
	cs := nodes(t, s, 2)
	ctx, cancel := context.WithCancel(t.Context())
	var wg, workers sync.WaitGroup
	var last synced.Buffer
	wg.Go(func() {
		cs[1].WatchPublished(ctx, "k", func(v []byte) { fmt.Fprintf(&last, "%s\n", v) })
	})
	for i := range 4 {
		workers.Go(func() {
			for j := range 10 {
				c := cs[(i+j)%2]
				c.Open("d")
				c.Open(fmt.Sprint(i))
				_, _ = c.View(), c.State()
				publish(t, c, ctx, "k", []byte("some"))
				answered(t, func() error { return c.Drain(ctx, node(1).ID) })
			}
		})
	}
	eventually(t, "a value", func() bool { return last.String() != "" })
	eventually(t, "the datasets", func() bool {
		n := cs[0].View().Nodes
		return len(n) == 2 && len(n[0].Open) == 5 && len(n[1].Open) == 5 && n[0].Draining
	})
	workers.Wait()
	publish(t, cs[0], ctx, "k", []byte("last"))
	eventually(t, "the last", func() bool { return strings.HasSuffix(last.String(), "last\n") })
	cancel()
	wg.Wait()
	for _, c := range cs {
		for range 2 {
			wg.Go(func() { _ = c.Close() })
		}
	}
	wg.Wait()
}
