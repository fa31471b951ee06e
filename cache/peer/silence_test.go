package peer

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/lab/rig/subproc"
	"github.com/shoalfs/shoal/lab/rig/synced"
)

// stage is a real server and a real client over pipes, in a bubble whose time is not the machine's. The server's
// process can be frozen: its connections are then made, and carry nothing.
type stage struct {
	client *Client
	server *Server
	shelf  *shelf
	conns  chan net.Conn
	quit   chan struct{}
	ended  chan error
	dials  atomic.Int64

	mu     sync.Mutex
	thawed chan struct{} // closed while it is not frozen
	refuse bool
	deaf   net.Conn // one connection that carries nothing any more

	asked, missed atomic.Int64
	slowest       atomic.Int64
}

var errRefused = errors.New("connection refused")

func newStage() *stage {
	s := &stage{shelf: newShelf(1, 2, 3), conns: make(chan net.Conn), quit: make(chan struct{}),
		ended: make(chan error, 1), thawed: make(chan struct{})}
	close(s.thawed)
	s.server = NewServer(ServerConfig{Self: "node-b", Serving: s.shelf, Memory: 32 << 20, Log: quiet(&synced.Buffer{})})
	go func() { s.ended <- s.server.Listen(s) }()
	s.client = NewClient(ClientConfig{Log: quiet(&synced.Buffer{})})
	s.client.dialer = s.dial
	return s
}

func (s *stage) close(t testing.TB) {
	s.thaw()
	s.client.Close()
	s.server.Close()
	if err := <-s.ended; err != nil {
		t.Error(err)
	}
}

func (s *stage) dial(ctx context.Context, _, _ string) (net.Conn, error) {
	s.mu.Lock()
	refuse := s.refuse
	s.mu.Unlock()
	if refuse {
		return nil, errRefused
	}
	s.dials.Add(1)
	a, b := net.Pipe()
	select {
	case s.conns <- &stageConn{b, s}:
		return a, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// Accept implements net.Listener.
func (s *stage) Accept() (net.Conn, error) {
	select {
	case c := <-s.conns:
		return c, nil
	case <-s.quit:
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener.
func (s *stage) Close() error { close(s.quit); return nil }

// Addr implements net.Listener.
func (s *stage) Addr() net.Addr { return &net.TCPAddr{} }

func (s *stage) freeze() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.thawed = make(chan struct{})
}

func (s *stage) thaw() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.refuse = false
	select {
	case <-s.thawed:
	default:
		close(s.thawed)
	}
}

// stageConn is the server's end.
type stageConn struct {
	net.Conn
	s *stage
}

func (c *stageConn) wait() {
	c.s.mu.Lock()
	thawed := c.s.thawed
	if c.s.deaf == c {
		thawed = c.s.quit
	}
	c.s.mu.Unlock()
	<-thawed
}

func (c *stageConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if err == nil {
		c.wait()
	}
	return n, err
}

func (c *stageConn) Write(p []byte) (int, error) {
	c.wait()
	return c.Conn.Write(p)
}

// read reads a file, and counts.
func (s *stage) read(ctx context.Context, t testing.TB) {
	start := time.Now()
	pieces := want(1000, 1)
	s.client.Read(ctx, Node{ID: "node-b", Address: "node-b:1"}, Request{Dataset: dataset, Version: version}, pieces)
	s.asked.Add(1)
	if filled(t, pieces) == 0 {
		s.missed.Add(1)
	}
	s.slowest.Store(max(s.slowest.Load(), int64(time.Since(start))))
}

// readers read for a time, with pauses.
func (s *stage) readers(ctx context.Context, t testing.TB, n int, d, pause time.Duration) {
	var all sync.WaitGroup
	for end := time.Now().Add(d); n > 0; n-- {
		all.Go(func() {
			for time.Now().Before(end) && ctx.Err() == nil {
				s.read(ctx, t)
				time.Sleep(pause)
			}
		})
	}
	all.Wait()
}

func (s *stage) away() bool {
	all := s.client.Stats()
	return len(all) > 0 && all[0].State == "away"
}

// How much of what a silent peer has goes to the store.
func TestSilence(t *testing.T) {
	for _, tt := range []struct {
		name     string
		pause    time.Duration
		readers  int
		prefetch bool
		most     int64         // reads that go to the store, of 8 s
		least    int64         // of them
		slowest  time.Duration // of all reads
		away     bool          // at the end of the pause
	}{
		{name: "none", readers: 4, slowest: time.Millisecond},
		{name: "short", readers: 4, pause: 900 * time.Millisecond, slowest: 910 * time.Millisecond},
		{name: "a second and a third", readers: 4, pause: 1300 * time.Millisecond, most: 4, least: 4,
			slowest: silence + 2*tick},
		{name: "two of ping", readers: 4, pause: 1900 * time.Millisecond, most: 4, least: 4, slowest: silence + 2*tick},
		{name: "more readers than places", readers: 3 * peerPlaces, pause: 1300 * time.Millisecond,
			most: 3 * peerPlaces, least: peerPlaces, slowest: patience + tick},
		{name: "prefetches", readers: 4, prefetch: true, pause: 1300 * time.Millisecond, most: 3,
			slowest: 1310 * time.Millisecond},
		{name: "prefetches for long", readers: 4, prefetch: true, pause: 2900 * time.Millisecond, most: 900, least: 100,
			slowest: 2*silence + 2*tick, away: true},
		{name: "long", readers: 4, pause: 3500 * time.Millisecond, most: 900, least: 400, slowest: silence + 2*tick,
			away: true},
		{name: "for good", readers: 4, pause: 7900 * time.Millisecond, most: 3000, least: 2000,
			slowest: silence + 2*tick, away: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newStage()
				defer s.close(t)
				ctx := t.Context()
				if tt.prefetch {
					ctx = objstore.WithUrgency(ctx, objstore.NewUrgency(time.Time{}))
				}
				s.readers(ctx, t, tt.readers, 100*time.Millisecond, 10*time.Millisecond)
				var away atomic.Bool
				if tt.pause > 0 {
					s.freeze()
					time.AfterFunc(tt.pause, func() { away.Store(s.away()); s.thaw() })
				}
				s.readers(ctx, t, tt.readers, 8*time.Second, 10*time.Millisecond)
				if n := s.missed.Load(); n > tt.most || n < tt.least || time.Duration(s.slowest.Load()) > tt.slowest ||
					away.Load() != tt.away {
					t.Errorf("%d of %d reads went to the store, the slowest took %v; away: %v; %+v",
						n, s.asked.Load(), time.Duration(s.slowest.Load()), away.Load(), s.client.Stats())
				}
			})
		})
	}
}

// A connection that carries nothing any more is its own trouble.
func TestSilentConnection(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStage()
		defer s.close(t)
		s.read(t.Context(), t)
		s.server.mu.Lock()
		for c := range s.server.conns {
			s.mu.Lock()
			s.deaf = c
			s.mu.Unlock()
		}
		s.server.mu.Unlock()
		s.readers(t.Context(), t, 4, 4*time.Second, 10*time.Millisecond)
		if n := s.missed.Load(); n != 1 || s.client.Stats()[0].State != "on" {
			t.Errorf("%d reads went to the store: %+v", n, s.client.Stats())
		}
	})
}

// A reader waits for an owner as long as the owner's store brings bytes, also if its own come late; and little if it
// brings none.
func TestSlowLine(t *testing.T) {
	for _, tt := range []struct {
		brings  bool
		fetches time.Duration
		filled  int
		took    time.Duration // at most
	}{
		{true, 20 * time.Second, 1, 20*time.Second + tick},
		{true, 2 * longest, 0, longest + 2*tick},
		{false, 20 * time.Second, 0, fetching + 2*tick},
	} {
		synctest.Test(t, func(t *testing.T) {
			s := newStage()
			defer s.close(t)
			s.shelf.brings.Store(tt.brings)
			s.shelf.gate = make(chan struct{})
			time.AfterFunc(tt.fetches, func() { close(s.shelf.gate) })
			start, pieces := time.Now(), want(1000, 4)
			s.client.Read(t.Context(), Node{ID: "node-b", Address: "node-b:1"},
				Request{Dataset: dataset, Version: version}, pieces)
			if took := time.Since(start); filled(t, pieces) != tt.filled || took > tt.took {
				t.Errorf("%+v: %d filled after %v, %+v", tt, filled(t, pieces), took, s.client.Stats())
			}
			time.Sleep(2 * longest) // the fetch ends
		})
	}
}

// A ping takes as long as answers do, and longer when this process's timers are late.
func TestPingTime(t *testing.T) {
	for _, tt := range []struct {
		answers, late, want time.Duration
	}{
		{0, 0, time.Second}, {time.Millisecond, 0, time.Second}, {500 * time.Millisecond, 0, 2 * time.Second},
		{10 * time.Second, 0, fetching},
		{0, tick, 2 * time.Second}, {0, tick / 2, 1500 * time.Millisecond}, {0, time.Minute, 4 * time.Second},
		{10 * time.Second, time.Minute, 4 * fetching},
	} {
		synctest.Test(t, func(t *testing.T) {
			s := newStage()
			defer s.close(t)
			r := s.client.remote(Node{ID: "node-b", Address: "node-b:1"})
			for range 100 {
				if tt.answers > 0 {
					r.latency.Record(tt.answers)
				}
			}
			s.client.rang(tt.late)
			s.freeze()
			start := time.Now()
			err := r.ping()
			if got := time.Since(start); !isSilence(err) || got < tt.want || got > tt.want+tt.want/20 {
				t.Errorf("answers of %v, timers late by %v: a ping took %v, want %v: %v",
					tt.answers, tt.late, got, tt.want, err)
			}
		})
	}
}

// Whatever a peer does: a read ends soon; pauses that are shorter than a silence and a ping do not make it away, longer
// ones do; and it is asked again when it has answered for long enough.
func TestSilenceModel(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rapid.Check(struct{ *testing.T }{t}, func(rt *rapid.T) {
			s := newStage()
			defer s.close(t)
			n := rapid.IntRange(1, 4).Draw(rt, "readers")
			ctx, stop := context.WithCancel(t.Context())
			var all sync.WaitGroup
			all.Go(func() { s.readers(ctx, t, n, time.Hour, tick) })
			defer all.Wait()
			defer stop()
			pass := func(d time.Duration) {
				time.Sleep(d)
				synctest.Wait()
			}
			on := true
			for range rapid.IntRange(1, 6).Draw(rt, "events") {
				pass(time.Duration(rapid.IntRange(0, 2500).Draw(rt, "calm")) * time.Millisecond)
				pause := time.Duration(rapid.IntRange(1, 6000).Draw(rt, "pause")) * time.Millisecond
				if refuses := rapid.IntRange(0, 4).Draw(rt, "refuses") == 0; refuses {
					s.mu.Lock()
					s.refuse = true
					s.mu.Unlock()
				}
				s.freeze()
				pass(pause)
				switch away := s.away(); {
				case on && !s.refuse && away && pause < 2*silence:
					rt.Fatalf("away after %v", pause)
				case on && !away && pause > silence+fetching+3*tick:
					rt.Fatalf("not away after %v", pause)
				}
				s.thaw()
				on = !s.away()
				if rapid.IntRange(0, 3).Draw(rt, "recovers") == 0 {
					pass(mostAwayInTest)
					if on = !s.away(); !on {
						rt.Fatalf("still away: %+v", s.client.Stats())
					}
				}
			}
			if slowest := time.Duration(s.slowest.Load()); slowest > silence+2*tick {
				rt.Fatalf("a read took %v", slowest)
			}
		})
	})
}

// mostAwayInTest is more than the longest pause of a circuit, and a silence.
const mostAwayInTest = 62 * time.Second

// asker is a process that reads from a peer, and says what it missed.
func asker(address string) {
	c := NewClient(ClientConfig{Log: quiet(&synced.Buffer{})})
	defer c.Close()
	var asked, missed int
	for end := time.Now().Add(6 * time.Second); time.Now().Before(end); asked++ {
		pieces := want(60<<10, 7) // it takes a while
		c.Read(context.Background(), Node{ID: "node-b", Address: address},
			Request{Dataset: dataset, Version: version}, pieces)
		if !pieces[0].Filled {
			missed++
		}
		if asked == 0 {
			fmt.Println("reads")
		}
	}
	fmt.Printf("asked %v missed %d %s\n", asked > 3, missed, c.Stats()[0].State)
}

// A process that is frozen itself does not take its peer for silent: what came meanwhile is read.
func TestFrozenAsker(t *testing.T) {
	s := newShelf()
	b := newBed(t, s)
	b.fetches = waitEvery * 4 / 5
	forget := make(chan struct{})
	var done sync.WaitGroup
	done.Go(func() { // each read is a fetch
		for {
			select {
			case <-forget:
				return
			case <-time.After(10 * time.Millisecond):
				s.Lock()
				delete(s.held, 7)
				s.Unlock()
			}
		}
	})
	defer done.Wait()
	defer close(forget)
	out := &synced.Buffer{}
	cmd := exec.Command(os.Args[0], "-test.run=^$")
	cmd.Env, cmd.Stdout, cmd.Stderr = append(os.Environ(), "PEER_TEST_ASKS="+b.node.Address), out, out
	p, err := subproc.Start("asker", cmd)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = p.Signal(syscall.SIGKILL); <-p.Done() }()
	until(t, "it reads", func() bool { return strings.Contains(out.String(), "reads") })
	for range 2 {
		until(t, "a read is under way", func() bool { return b.server.Stats().InFlight == 1 })
		if err := p.Signal(syscall.SIGSTOP); err != nil {
			t.Fatal(err)
		}
		time.Sleep(1500 * time.Millisecond) // what is tested is this pause
		if err := p.Signal(syscall.SIGCONT); err != nil {
			t.Fatal(err)
		}
	}
	<-p.Done()
	if lines := strings.Split(strings.TrimSpace(out.String()), "\n"); !slices.Contains(lines,
		"asked true missed 0 on") {
		t.Errorf("%q", lines)
	}
}
