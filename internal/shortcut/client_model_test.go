package shortcut

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/shoalfs/shoal/cache/catalog"
	"github.com/shoalfs/shoal/cache/objstore"
	"github.com/shoalfs/shoal/cache/segment"
	"github.com/shoalfs/shoal/internal/audit"
	"github.com/shoalfs/shoal/lab/rig/memstore"
)

const (
	worldFiles  = 12
	contentSize = 25
	numbers     = 4 // of segments, which are used again
)

// world is a mount that is a plain folder, with a daemon that is a Server, and the history of its versions. Each file
// says which file of which version it is.
type world struct {
	t              testing.TB
	root, dir      string
	listener       *net.UnixListener
	conns          sync.WaitGroup
	killing        sync.Mutex // one kill at a time
	mu             sync.Mutex // the rest, in the order of the actions
	rand           *rand.Rand
	server         *Server
	current        *catalog.Manifest
	segments       map[*catalog.Manifest][2]segment.Place // of even and odd files
	began          []int64                                // when each version may first have been seen
	ended          []int64                                // when the next was in force
	number         uint32
	faults         []string // for the next pieces of messages
	opened, killed int
}

func clock() int64 {
	var ts unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts)
	return ts.Nano()
}

func content(file, version int) string { return fmt.Sprintf("file %06d of v%08d.", file, version) }

// Manifest and the others implement Volume.
func (w *world) Manifest() *catalog.Manifest {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.current
}

func (w *world) Damaged() int64 { return 0 }

func (w *world) Place(m *catalog.Manifest, file int, check bool) (segment.Place, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	p := w.segments[m][file%2]
	p.Off = int64(64 + contentSize*file)
	return p, p.Salt != 0 && (check || file%3 > 0)
}

func (w *world) SegmentDir(*catalog.Manifest) string { return w.dir }

func (w *world) Opened(m *catalog.Manifest, file int, _ uint32) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.opened++
}

func (w *world) Released(*catalog.Manifest, int) {}

// change puts another version in force. The caller has the lock.
func (w *world) change() {
	version := len(w.began)
	w.began = append(w.began, clock())
	var objects []objstore.Object
	for i := range worldFiles {
		name := fmt.Sprintf("c/%02d.bin", i)
		w.replace(filepath.Join(w.root, name), []byte(content(i, version)))
		objects = append(objects, objstore.Object{Key: name, Size: contentSize, ETag: fmt.Sprint(version)})
	}
	m, err := catalog.Build(memstore.Listing(objects...), catalog.BuildOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
	w.segments[m] = [2]segment.Place{w.segment(version), w.segment(version)}
	w.current = m
}

// segment writes a segment with the files of a version. One that had its number is dropped.
func (w *world) segment(version int) segment.Place {
	w.number++
	p := segment.Place{Segment: w.number % numbers, Salt: w.rand.Uint64() | 1}
	b := make([]byte, 64)
	binary.LittleEndian.PutUint64(b[16:], p.Salt)
	for i := range worldFiles {
		b = append(b, content(i, version)...)
	}
	w.replace(filepath.Join(w.dir, fmt.Sprintf("%08d.seg", p.Segment)), b)
	return p
}

func (w *world) replace(path string, data []byte) {
	if err := os.WriteFile(path+"~", data, 0o600); err != nil {
		w.t.Error(err)
	} else if err := os.Rename(path+"~", path); err != nil {
		w.t.Error(err)
	}
}

// refresh is what the engine does.
func (w *world) refresh() {
	w.mu.Lock()
	w.change()
	s := w.server
	w.mu.Unlock()
	s.Moved()
	w.returned()
}

func (w *world) returned() {
	w.mu.Lock()
	defer w.mu.Unlock()
	now := clock()
	for len(w.ended) < len(w.began)-1 {
		w.ended = append(w.ended, now)
	}
}

// evict drops a segment. Its number may be used again at once.
func (w *world) evict() {
	w.mu.Lock()
	defer w.mu.Unlock()
	places, which := w.segments[w.current], w.rand.IntN(2)
	_ = os.Remove(filepath.Join(w.dir, fmt.Sprintf("%08d.seg", places[which].Segment)))
	places[which] = segment.Place{}
	if w.rand.IntN(2) == 0 {
		w.number--
		places[which] = w.segment(len(w.began) - 1)
	}
	w.segments[w.current] = places
}

// kill ends the daemon. Another takes its place, with another version.
func (w *world) kill() {
	w.killing.Lock()
	defer w.killing.Unlock()
	w.mu.Lock()
	old := w.server
	w.killed++
	w.mu.Unlock()
	old.mu.Lock()
	for c := range old.clients { // as the kernel does
		c.end()
	}
	old.clients = nil
	old.mu.Unlock()
	w.mu.Lock()
	w.change()
	w.begin()
	w.mu.Unlock()
	w.returned()
}

// begin starts a daemon.
func (w *world) begin() {
	w.server = New(w, func(*audit.Peer) {})
	w.server.write = func(conn *net.UnixConn, message []byte) (int, error) { return 0, w.write(conn, message) }
	stats, _ := json.Marshal(map[string]string{"shortcut_v2": w.server.Key(), "cache_dir": w.dir})
	w.replace(filepath.Join(w.root, ".shoal", "stats"), stats)
}

// write sends a message in pieces, with faults between them.
func (w *world) write(conn *net.UnixConn, message []byte) error {
	for rest := message; len(rest) > 0; {
		w.mu.Lock()
		fault := ""
		if len(w.faults) > 0 {
			fault, w.faults = w.faults[0], w.faults[1:]
		}
		n, pause := len(rest), time.Duration(w.rand.IntN(300))*time.Microsecond
		if fault != "" {
			n = min(n, 1+w.rand.IntN(len(rest)))
		}
		w.mu.Unlock()
		switch fault {
		case "refresh":
			w.refresh()
		case "evict":
			w.evict()
		case "kill":
			w.kill()
		case "pause":
			time.Sleep(pause)
		case "cut":
			return io.ErrUnexpectedEOF
		case "twice": // an answer that nobody waits for
			if _, err := conn.Write(message); err != nil {
				return err
			}
		}
		if _, err := conn.Write(rest[:n]); err != nil {
			return err
		}
		rest = rest[n:]
	}
	return nil
}

func newWorld(t testing.TB, dir string, seed uint64) *world {
	w := &world{
		t: t, root: filepath.Join(dir, "mount"), dir: filepath.Join(dir, "cache"),
		segments: map[*catalog.Manifest][2]segment.Place{},
		rand:     rand.New(rand.NewPCG(seed, 0)),
	}
	for _, d := range []string{filepath.Join(w.root, ".shoal"), filepath.Join(w.root, "c"), w.dir} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	w.change()
	w.begin()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(w.dir, "shoal.sock")})
	if err != nil {
		t.Fatal(err)
	}
	w.listener = l
	w.conns.Go(func() {
		for {
			conn, err := l.AcceptUnix()
			if err != nil {
				return
			}
			w.conns.Go(func() {
				defer conn.Close()
				line, err := bufio.NewReaderSize(io.LimitReader(conn, 1000), 16).ReadBytes('\n')
				var request struct{ Shortcut string }
				w.mu.Lock()
				s := w.server
				w.mu.Unlock()
				if err == nil && json.Unmarshal(line, &request) == nil && request.Shortcut == s.Key() {
					_ = s.Serve(conn)
				}
			})
		}
	})
	return w
}

func (w *world) close() {
	_ = w.listener.Close()
	w.mu.Lock()
	w.faults = nil
	s := w.server
	w.mu.Unlock()
	s.Close()
	w.conns.Wait()
}

// read is what the client says of a file: what it got, or what was raised, and when it began and ended.
type read struct {
	Path       string
	Begin, End int64
	Got        string
	Raised     string
	Round      bool
}

// check says what is wrong with a read.
func (w *world) check(r read) error {
	if r.Raised != "" {
		if r.Raised != "Interrupted" && r.Raised != "TimeoutError" && r.Raised != "KeyboardInterrupt" {
			return fmt.Errorf("%s: it raised %s", r.Path, r.Raised)
		}
		return nil
	}
	var file, version, want int
	if _, err := fmt.Sscanf(r.Got, "file %06d of v%08d.", &file, &version); err != nil {
		return fmt.Errorf("%s: %q", r.Path, r.Got)
	}
	_, _ = fmt.Sscanf(filepath.Base(r.Path), "%02d.bin", &want)
	if file != want {
		return fmt.Errorf("%s has the bytes of file %d", r.Path, file)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if version >= len(w.began) || r.End < w.began[version] || version < len(w.ended) && r.Begin > w.ended[version] {
		return fmt.Errorf("%s: version %d of %d was not in force: read from %d to %d, in force from %d to %v",
			r.Path, version, len(w.began), r.Begin, r.End, w.began[version], w.ended)
	}
	return nil
}

// player is a process of Python with the real client.
type player struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *json.Decoder
}

func newPlayer(t testing.TB) *player {
	t.Helper()
	python := "/usr/bin/python3"
	if out, err := exec.Command(python, "-c", "import numpy, grpc").CombinedOutput(); err != nil {
		t.Skipf("no numpy and grpcio: %s", out)
	}
	p := &player{cmd: exec.Command(python, "../../python/tests/open_player.py")}
	p.cmd.Env = append(os.Environ(), "PYTHONPATH=../../python")
	p.cmd.Stderr = os.Stderr
	var err error
	if p.in, err = p.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	p.out = json.NewDecoder(out)
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = p.in.Close()
		if err := p.cmd.Wait(); err != nil {
			t.Errorf("the client: %v", err)
		}
	})
	return p
}

type play struct {
	Do     string // "begin" a world, or read "plainly", in "threads", in a "fork", forked by a "handler"
	Root   string
	Files  []int
	Kind   string // of the exception
	Micros int    // when it is raised by a signal; 0: not
	Step   int    // the step of the client's code before which it is raised; 0: not
}

func (p *player) play(t interface{ Fatalf(string, ...any) }, what play) (reads []read) {
	line, _ := json.Marshal(what)
	hung := time.AfterFunc(30*time.Second, func() { _ = p.cmd.Process.Signal(unix.SIGABRT) })
	defer hung.Stop()
	_, err := p.in.Write(append(line, '\n'))
	if err == nil {
		err = p.out.Decode(&reads)
	}
	if err != nil {
		t.Fatalf("%s: %v", line, err)
	}
	return reads
}

// The real client plays against the real server: refreshes, evictions, kills and cuts in the midst of messages and
// beside reads, exceptions at random times and before any step of the client's code, threads, forks. Every read gets
// the bytes of a version that was in force at some time while it ran, and no error but those that a handler raises.
func TestClientModel(t *testing.T) {
	p := newPlayer(t)
	var total, round, raised, refreshed, killed int
	rapid.Check(t, func(t *rapid.T) {
		dir, err := os.MkdirTemp("", "shoal-open")
		if err != nil {
			t.Fatal(err)
		}
		defer os.RemoveAll(dir)
		w := newWorld(&fatal{TB: nil, t: t}, dir, rapid.Uint64().Draw(t, "seed"))
		defer w.close()
		p.play(t, play{Do: "begin", Root: w.root})
		fault := rapid.SampledFrom([]string{"", "refresh", "evict", "kill", "pause", "pause", "cut", "twice"})
		for range rapid.IntRange(1, 8).Draw(t, "steps") {
			what := play{
				Do: rapid.SampledFrom([]string{"plainly", "plainly", "plainly", "plainly", "threads", "fork",
					"handler"}).Draw(t, "how"),
				Files: rapid.SliceOfN(rapid.IntRange(0, worldFiles-1), 1, 12).Draw(t, "files"),
			}
			switch rapid.IntRange(0, 2).Draw(t, "interrupted") {
			case 1:
				what.Micros = rapid.IntRange(1, 1500).Draw(t, "micros")
			case 2:
				what.Step = rapid.IntRange(1, 900).Draw(t, "step")
			}
			what.Kind = rapid.SampledFrom([]string{"Interrupted", "TimeoutError", "KeyboardInterrupt"}).Draw(t, "kind")
			w.mu.Lock()
			w.faults = rapid.SliceOfN(fault, 0, 6).Draw(t, "faults")
			w.mu.Unlock()
			var beside sync.WaitGroup
			if act := rapid.SampledFrom([]string{"", "refresh", "refresh", "evict", "kill"}).Draw(t,
				"beside"); act != "" {
				after := time.Duration(rapid.IntRange(0, 1500).Draw(t, "after")) * time.Microsecond
				beside.Go(func() {
					time.Sleep(after)
					switch act {
					case "refresh":
						w.refresh()
					case "evict":
						w.evict()
					case "kill":
						w.kill()
					}
				})
			}
			reads := p.play(t, what)
			beside.Wait()
			for _, r := range reads {
				if err := w.check(r); err != nil {
					t.Fatal(err)
				}
				total++
				if r.Round {
					round++
				}
				if r.Raised != "" {
					raised++
				}
			}
		}
		refreshed += len(w.began) - 1
		killed += w.killed
	})
	t.Logf("%d reads, %d of them round the mount, %d interrupted; %d versions, %d kills",
		total, round, raised, refreshed, killed)
	if round < total/8 || raised < total/100 || refreshed < total/100 {
		t.Error("it tried nothing")
	}
}

// fatal lets a world end a check of rapid.
type fatal struct {
	testing.TB
	t *rapid.T
}

func (f *fatal) Error(args ...any) { f.t.Error(args...) }
func (f *fatal) Fatal(args ...any) { f.t.Fatal(args...) }

// An exception before each step of the client's code in turn, until none is left: while it connects, asks, opens a
// segment, reads what it knows, and finds that a refresh has returned.
func TestClientInterruptedAnywhere(t *testing.T) {
	p := newPlayer(t)
	stride := 1
	if testing.Short() {
		stride = 13
	}
	for _, phase := range []string{"connect", "ask", "known", "moved"} {
		steps, round := 0, 0
		for step, done := 1, false; !done; step += stride {
			done = true
			w := newWorld(t, t.TempDir(), uint64(step))
			p.play(t, play{Do: "begin", Root: w.root})
			if phase != "connect" {
				p.play(t, play{Do: "plainly", Files: []int{1, 2, 1}})
			}
			switch phase {
			case "ask":
				w.evict() // and something is asked again
				p.play(t, play{Do: "forget"})
			case "moved":
				w.refresh()
			}
			kind := []string{"Interrupted", "TimeoutError", "KeyboardInterrupt"}[step%3]
			reads := p.play(t, play{Do: "plainly", Files: []int{3}, Step: step, Kind: kind})
			reads = append(reads, p.play(t, play{Do: "plainly", Files: []int{1, 2, 3, 4, 5}})...)
			w.refresh()
			reads = append(reads, p.play(t, play{Do: "plainly", Files: []int{1, 2, 3, 4, 5}})...)
			for _, r := range reads {
				if err := w.check(r); err != nil {
					t.Fatalf("%s, step %d: %v", phase, step, err)
				}
				if r.Round {
					round++
				}
			}
			if reads[0].Raised != "" {
				done = false
				if steps++; reads[0].Raised != kind {
					t.Fatalf("%s, step %d: %v", phase, step, reads[0])
				}
			}
			w.close()
		}
		t.Logf("%s: %d steps, %d reads round the mount", phase, steps, round)
		if steps < 500/stride/4 || round < steps*6 {
			t.Errorf("%s: %d steps, %d reads round the mount", phase, steps, round)
		}
	}
}

// A daemon of another version is not understood, and nobody notices.
func TestOtherProtocols(t *testing.T) {
	p := newPlayer(t)
	for name, hello := range map[string]string{
		"older": "\x08\x00\x00\x00H\x01\x00\x00\x00\x00\x00\x00\x00", "longer": "\xff\xff\xff\xffHx", "silent end": "",
		"other": strings.Repeat("HTTP/1.1 ", 9),
	} {
		w := newWorld(t, t.TempDir(), 1)
		w.server.write = func(conn *net.UnixConn, message []byte) (int, error) {
			if message[4] != 'H' {
				message[5]++ // another question
				return conn.Write(message)
			}
			if hello == "" {
				return 0, io.EOF
			}
			return conn.Write([]byte(hello))
		}
		p.play(t, play{Do: "begin", Root: w.root})
		for range 3 {
			for _, r := range p.play(t, play{Do: "plainly", Files: []int{1, 2, 3}}) {
				if err := w.check(r); err != nil || r.Raised != "" || r.Round {
					t.Errorf("%s: %v %+v", name, err, r)
				}
			}
		}
		w.close()
	}
}
